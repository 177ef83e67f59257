"""Attention: what each argument means, packed against separate rows, refusals, and every library on the GPU."""

import dataclasses

import pytest
import torch

from fastlm_kernels import _attention_backends
from fastlm_kernels.attention import (
    BACKENDS,
    SequenceLayout,
    attention,
    attention_backend,
    attention_reference,
    layout_from_cu_seqlens,
    packed_layout,
    padded_layout,
)

SCALE = 0.3


def _qkv(
    batch, n_queries, n_heads, n_kv_heads, head_size, n_keys=None, value_size=None, device="cpu", dtype=torch.float32
):
    generator = torch.Generator().manual_seed(0)
    n_keys, value_size = n_keys or n_queries, value_size or head_size
    shapes = (n_queries, n_heads, head_size), (n_keys, n_kv_heads, head_size), (n_keys, n_kv_heads, value_size)
    return [torch.randn(batch, *shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def _gradients(out, tensors):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad((out * weight).sum(), tensors)


def _close(got, want, what="", tolerance=2e-6):
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    error = float((got.detach().double() - want.detach().double()).abs().max()) if want.numel() else 0.0
    assert error <= tolerance, f"{what}: off by {error:.3g}"


def _check(qkv, backend=None, **arguments):
    """Value and gradients against the definition in float64."""
    out = attention(*qkv, SCALE, backend=backend, **arguments)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = attention_reference(*exact, SCALE, **arguments)
    _close(out, truth, "output")
    for name, got, want in zip("qkv", _gradients(out, qkv), _gradients(truth, exact), strict=True):
        _close(got, want, f"d{name}", 1e-5)
    return out


@pytest.mark.parametrize("backend", [None, "math"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 11, 50])
def test_dense(n_kv_heads, window, backend):
    _check(_qkv(2, 11, 4, n_kv_heads, 8), backend, window=window)


def test_the_definition_by_hand():
    """Query i sees i - window < j <= i: with equal scores the output is the mean of those values."""
    v = torch.arange(5.0).view(1, 5, 1, 1)
    zeros = torch.zeros(1, 5, 1, 1)
    assert attention(zeros, zeros, v, SCALE).flatten().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert attention(zeros, zeros, v, SCALE, window=2).flatten().tolist() == [0.0, 0.5, 1.5, 2.5, 3.5]
    # two queries at the end of five keys
    assert attention(zeros[:, :2], zeros, v, SCALE).flatten().tolist() == [1.5, 2.0]
    assert attention(zeros[:, :2], zeros, v, SCALE, window=2).flatten().tolist() == [2.5, 3.5]
    assert attention(zeros[:, :1], zeros, v, SCALE, window=3).flatten().tolist() == [3.0]
    layout = packed_layout(torch.tensor([[0, 1, 0, 0, 1]]))
    assert attention(zeros, zeros, v, SCALE, layout=layout).flatten().tolist() == [0.0, 0.5, 2.0, 3.0, 3.5]


def test_one_token():
    _check(_qkv(2, 1, 4, 2, 8))


def test_value_heads_of_another_size():
    _check(_qkv(2, 6, 4, 2, 16, value_size=8))


@pytest.mark.parametrize("n_queries", [1, 3, 7])
@pytest.mark.parametrize("window", [None, 2, 9])
def test_fewer_queries_than_keys(n_queries, window):
    _check(_qkv(2, n_queries, 4, 2, 8, n_keys=7), window=window)


POSITIONS = {
    "samples": [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 0]],
    "length-1": [[0, 0, 0, 1, 0, 0, 1, 0]],
    "gaps": [[0, 3, 4, 9, 0, 2, 5, 6]],
    "not-from-0": [[5, 6, 7, 2, 3, 1, 2, 3]],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("window", [None, 2])
def test_packed_equals_separate(positions, window):
    positions = torch.tensor(positions)
    qkv = _qkv(len(positions), positions.shape[1], 4, 2, 8)
    layout = packed_layout(positions)
    out = _check(qkv, layout=layout, window=window)
    flat = [x.flatten(0, 1) for x in qkv]
    bounds = layout.cu_seqlens.tolist()
    parts = [
        attention(*(x[None, start:end] for x in flat), SCALE, window=window)[0]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    assert torch.equal(out.flatten(0, 1), torch.cat(parts))


MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "both": [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    "hole": [[1, 1, 0, 1, 1], [1, 0, 0, 1, 1]],
    "empty-row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 0]],
    "nothing": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("is_real", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("window", [None, 2])
def test_padded_rows_are_zero_and_the_rest_unpadded(is_real, window):
    is_real = torch.tensor(is_real)
    qkv = _qkv(*is_real.shape, 4, 2, 8)
    with torch.no_grad():  # what padding holds must not matter
        for x in qkv:
            x[is_real == 0] = float("nan")
    out = attention(*qkv, SCALE, layout=padded_layout(is_real), window=window)
    gradients = _gradients(out, qkv)
    for name, x in zip(("o", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert torch.isfinite(x).all(), name
        assert not x[is_real == 0].any(), name
    for row, row_is_real in enumerate(is_real.bool()):
        alone = [x[row : row + 1, row_is_real].detach().requires_grad_() for x in qkv]
        _close(out[row, row_is_real], attention(*alone, SCALE, window=window)[0], f"row {row}")


def test_samples_start_where_transformers_sees_them_start():
    from transformers.masking_utils import find_packed_sequence_indices

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        # most steps go on by one; the others stay, fall back or leave gaps
        steps = torch.randint(-2, 14, (3, 12), generator=generator).clamp(max=4)
        positions = torch.where(steps == 4, 1, steps).cumsum(1)
        sample = find_packed_sequence_indices(positions)
        lengths = [n for row in sample.tolist() for n in torch.bincount(torch.tensor(row)).tolist()]
        assert packed_layout(positions).lengths == tuple(lengths)


def test_layouts():
    layout = packed_layout(torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.int32))
    assert (layout.cu_seqlens.tolist(), layout.max_seqlen, layout.indices) == ([0, 2, 3, 4, 6], 2, None)
    assert layout.cu_seqlens.dtype is torch.int32 and layout.lengths == (2, 1, 1, 2) and layout.tokens == 6
    assert packed_layout(torch.tensor([[0, 1, 2], [4, 5, 6]])) is None
    assert packed_layout(torch.tensor([[0, 1, 2], [4, 5, 9]])).lengths == (3, 2, 1)
    assert packed_layout(torch.zeros(3, 0, dtype=torch.int64)) is None
    layout = padded_layout(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]]))
    assert (layout.cu_seqlens.tolist(), layout.max_seqlen, layout.indices.tolist()) == ([0, 2, 4], 2, [1, 2, 6, 7])
    assert padded_layout(torch.ones(2, 3, dtype=torch.bool)) is None
    layout = layout_from_cu_seqlens(torch.tensor([0, 2, 2, 6]))
    assert (layout.cu_seqlens.tolist(), layout.max_seqlen, layout.lengths) == ([0, 2, 2, 6], 4, (2, 0, 4))
    assert layout_from_cu_seqlens(torch.tensor([0, 2, 6]), 5).max_seqlen == 5
    assert SequenceLayout(torch.tensor([0, 1, 3], dtype=torch.int32), 2).lengths == (1, 2)


def test_a_sequence_of_no_tokens():
    layout = layout_from_cu_seqlens(torch.tensor([0, 2, 2, 6, 6]))
    _check(_qkv(1, 6, 4, 2, 8), layout=layout)


def test_mask():
    seen = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6).clone()
    seen[1, :, :, 0] = False  # left padding: query 0 of row 1 sees nothing
    qkv = _qkv(2, 6, 4, 2, 8)
    out = _check(qkv, mask=seen)
    assert not out[1, 0].any()
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    assert torch.equal(attention(*qkv, SCALE, mask=added), out)
    _check(qkv, mask=torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(2)))
    _check(_qkv(2, 2, 4, 2, 8, n_keys=6), mask=seen[:, :, 4:])


@pytest.mark.parametrize("arguments", [{}, {"window": 3}, {"layout": [[0, 1, 2, 0, 1, 0]] * 2}], ids=str)
def test_slices_of_a_packed_projection(arguments):
    if "layout" in arguments:
        arguments = {"layout": packed_layout(torch.tensor(arguments["layout"]))}
    plain = _qkv(2, 6, 4, 2, 8)
    packed = torch.cat([x.detach() for x in plain], dim=2).requires_grad_()
    slices = packed.split([4, 2, 2], dim=2)
    want = attention(*plain, SCALE, **arguments)
    got = attention(*slices, SCALE, **arguments)
    _close(got, want)
    _close(_gradients(got, [packed])[0], torch.cat(_gradients(want, plain), dim=2))


def test_empty_batch():
    for qkv in (_qkv(0, 4, 4, 2, 8), _qkv(2, 0, 4, 2, 8)):
        out = attention(*qkv, SCALE)
        assert out.shape == qkv[0].shape
        assert all(grad.shape == x.shape for grad, x in zip(_gradients(out, qkv), qkv, strict=True))


def test_autocast_does_not_lower_the_dtype():
    qkv = _qkv(1, 5, 2, 2, 8)
    want = attention(*qkv, SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(*qkv, SCALE), want)


def test_refuses_what_does_not_fit():
    q, k, v = _qkv(2, 6, 4, 2, 8)
    cu = torch.tensor([0, 5, 11], dtype=torch.int32)
    layout = packed_layout(torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))
    padded = padded_layout(torch.tensor([[1, 1, 0]] * 5))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    for match, arguments, options in (
        (r"\[B, S, H, E\]", (q[0], k, v), {}),
        ("do not fit", (q, k, v[:, :5]), {}),
        ("do not fit", (q[..., :4], k, v), {}),
        ("got 3 and 2", (q[:, :, :3], k, v), {}),
        ("agree in dtype.*float64", (q, k.double(), v), {}),
        ("floating, got torch.int64", (q.long(), k.long(), v.long()), {}),
        ("at least 1.*got 0", (q, k, v), {"window": 0}),
        ("above 0, got 0.0", (q, k, v), {"softcap": 0.0}),
        ("above 0, got -5.0", (q, k, v), {"softcap": -5.0}),
        ("above 0, got inf", (q, k, v), {"softcap": float("inf")}),
        ("detached", (q, k, v), {"softcap": 5.0, "mask": torch.zeros(1, 1, 6, 6, requires_grad=True)}),
        ("'math' cannot serve.*softcap", (q, k, v), {"backend": "math", "softcap": 5.0}),
        ("'triton' cannot serve.*GPUs", (q, k, v), {"backend": "triton"}),
        ("not both", (q, k, v), {"mask": mask, "layout": layout}),
        (r"must be \[2, 1, 6, 6\], got \(2, 1, 6, 5\)", (q, k, v), {"mask": mask[..., :5]}),
        ("bool .* or float .* got torch.int64", (q, k, v), {"mask": mask.long()}),
        ("6 queries and 3 keys", (q, k[:, :3], v[:, :3]), {}),
        ("as many keys", (q[:, :3], k, v), {"layout": layout}),
        ("covers 11 tokens, the batch has 2 x 6", (q, k, v), {"layout": SequenceLayout(cu, 6)}),
        ("covers 10 tokens, the batch has 1 x 6", (q[:1], k[:1], v[:1]), {"layout": padded}),
        ("must be one of flash_attention_4", (q, k, v), {"backend": "fast"}),
        ("'flash_attention_4' cannot serve.*CUDA", (q, k, v), {"backend": "flash_attention_4"}),
    ):
        with pytest.raises(ValueError, match=match):
            attention(*arguments, SCALE, **options)
    for match, make in (
        ("start at 0, got 1", lambda: SequenceLayout(torch.tensor([1, 3], dtype=torch.int32), 2)),
        ("int32", lambda: SequenceLayout(torch.tensor([0, 3]), 3)),
        ("never fall", lambda: SequenceLayout(torch.tensor([0, 3, 2], dtype=torch.int32), 3)),
        ("at least the longest sequence, 6, got 5", lambda: SequenceLayout(cu, 5)),
        (r"int64 \[11\]", lambda: SequenceLayout(cu, 6, torch.arange(10))),
        (r"\[B, S\]", lambda: packed_layout(torch.arange(3))),
        (r"\[B, S\]", lambda: padded_layout(mask)),
        ("start at 0", lambda: layout_from_cu_seqlens(torch.tensor([2, 3]))),
    ):
        with pytest.raises(ValueError, match=match):
            make()


def _name(monkeypatch, form="square", capability=(9, 0), is_cuda=True, has_fa4=True, **changes):
    missing = None if has_fa4 else "the package flash-attn-4 is not installed"
    facts = _attention_backends.BACKENDS["flash_attention_4"]
    monkeypatch.setitem(BACKENDS, "flash_attention_4", dataclasses.replace(facts, missing=lambda: missing))
    call = {
        "form": form, "is_cuda": is_cuda, "capability": capability, "dtype": torch.bfloat16, "head_size": 128,
        "value_head_size": 128, "window": None, "is_deterministic": False, "is_globally_deterministic": False,
        "has_softcap": False, "has_triton": is_cuda,
    }  # fmt: skip
    # not the cached choice, which does not know that the table was changed
    return _attention_backends.choose.__wrapped__(_attention_backends.Call(**{**call, **changes}), None)


def test_the_choice_is_by_facts(monkeypatch):
    def name(form="square", **facts):
        return _name(monkeypatch, form, **facts)

    for form in ("square", "packed", "window", "rectangular"):
        window = 100 if form == "window" else None
        assert name(form, window=window) == "flash_attention_4"
        assert name(form, window=window, is_deterministic=True) == "flash_attention_4"
        in_float32 = "efficient" if form == "square" else "triton"
        assert name(form, window=window, dtype=torch.float32) == in_float32
        assert name(form, window=window, dtype=torch.float32, has_triton=False) == "efficient"
        assert name(form, window=window, is_cuda=False, capability=(0, 0)) == "sdpa"
    assert name(has_fa4=False) == "cudnn"
    assert name(capability=(8, 0)) == "flash"
    assert name(capability=(8, 0), dtype=torch.float32) == "efficient"
    assert name(capability=(7, 5), dtype=torch.float16) == "efficient"
    assert name("packed", has_fa4=False) == "torch_varlen"
    assert name("packed", capability=(7, 5), dtype=torch.float16, window=7) == "efficient"
    assert name("window", window=7, has_fa4=False) == "torch_varlen"
    assert name("mask") == "efficient"
    assert name("single") == "flash"
    assert name(head_size=256, value_head_size=256) == "flash_attention_4"
    assert name(head_size=256, value_head_size=256, has_fa4=False) == "flash"
    assert name(head_size=256, value_head_size=256, capability=(8, 9)) == "efficient"
    assert name(head_size=320, value_head_size=320) == "efficient"
    assert name(head_size=192, value_head_size=128) == "efficient"
    assert name(head_size=20, value_head_size=20) == "flash"
    assert name(head_size=20, value_head_size=20, dtype=torch.float32) == "triton"
    # wide or odd heads, where torch's packed kernel refuses them
    for form, window in (("packed", None), ("window", 100)):
        assert name(form, head_size=256, value_head_size=256, window=window, capability=(8, 9)) == "triton"
    assert name("window", head_size=20, value_head_size=20, window=100) == "triton"
    assert name("packed", head_size=256, value_head_size=256, dtype=torch.float32) == "efficient"
    # torch's kernels are deterministic by a global flag alone, cuDNN's never
    assert name(has_fa4=False, is_deterministic=True) == "triton"
    assert name(has_fa4=False, is_deterministic=True, has_triton=False) == "math"
    assert name(has_fa4=False, is_deterministic=True, is_globally_deterministic=True) == "flash"
    assert name(capability=(12, 0), is_deterministic=True, is_globally_deterministic=True) == "flash"


def test_the_choice_under_a_softcap(monkeypatch):
    def name(form="square", **facts):
        return _name(monkeypatch, form, has_softcap=True, **facts)

    wide = {"head_size": 256, "value_head_size": 256}
    for form in ("square", "packed", "window", "rectangular"):
        window = 100 if form == "window" else None
        assert name(form, window=window) == name(form, window=window, **wide) == "flash_attention_4"
        assert name(form, window=window, is_deterministic=True) == "flash_attention_4"
        # flash-attn-4 takes 256 on capability 9 alone, and modified scores nowhere on 12
        assert name(form, window=window, capability=(10, 0)) == "flash_attention_4"
        assert name(form, window=window, capability=(10, 0), **wide) == "triton"
        for capability in ((8, 0), (8, 9), (12, 0)):
            assert name(form, window=window, capability=capability) == "triton"
        assert name(form, window=window, has_fa4=False, **wide) == "triton"
        assert name(form, window=window, dtype=torch.float32) == "triton"
        assert name(form, window=window, dtype=torch.float32, **wide) == "torch"
        assert name(form, window=window, capability=(7, 5), dtype=torch.float16) == "torch"
        assert name(form, window=window, has_fa4=False, has_triton=False) == "torch"
        assert name(form, window=window, is_cuda=False, capability=(0, 0)) == "torch"
    assert name("single") == "triton"
    assert name("mask") == "torch"
    assert name("empty") == "math"
    assert name(head_size=192, value_head_size=128) == "torch"


def test_the_choice_for_tensors():
    q, k, v = _qkv(2, 6, 4, 2, 8)
    assert attention_backend(q, k, v) == "sdpa"
    assert attention_backend(q, k, v, packed_layout(torch.tensor([[0, 1, 0, 0, 1, 2]] * 2)), 2) == "sdpa"
    assert attention_backend(q[:0], k[:0], v[:0]) == "math"
    assert attention_backend(q, k, v, softcap=5.0) == "torch"
    with pytest.raises(ValueError, match="window"):
        attention_backend(q, k, v, window=-1)


# form, dtype, head size: few, since flash-attn-4 compiles its kernels anew for each
GPU_CALLS = [
    ("dense", torch.bfloat16, 64), ("dense", torch.bfloat16, 128), ("dense", torch.bfloat16, 256),
    ("dense", torch.float16, 128), ("window", torch.bfloat16, 128), ("packed", torch.bfloat16, 128),
    ("packed-window", torch.bfloat16, 128), ("padded", torch.bfloat16, 128), ("padded", torch.float16, 64),
    ("rectangular", torch.bfloat16, 128), ("single", torch.bfloat16, 128),
    ("dense", torch.float32, 128), ("window", torch.float32, 64), ("packed", torch.float32, 64),
]  # fmt: skip


def _gpu_call(form, dtype, head_size):
    batch, n_tokens = 2, 384
    n_queries = {"rectangular": 130, "single": 1}.get(form, n_tokens)
    qkv = _qkv(batch, n_queries, 8, 2, head_size, n_keys=n_tokens, device="cuda", dtype=dtype)
    arguments = {"window": 100 if "window" in form else None, "layout": None}
    if form.startswith("packed"):
        lengths = [1, 200, 1, 63, 119, 384]
        positions = torch.cat([torch.arange(length) for length in lengths]).view(batch, n_tokens)
        arguments["layout"] = packed_layout(positions.cuda())
    if form == "padded":
        places = torch.arange(n_tokens, device="cuda")
        arguments["layout"] = padded_layout(torch.stack([places >= 77, places < 300]))
    return qkv, arguments


def _rms(got, truth):
    return float((got.detach().double() - truth.detach().double()).square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("math", "sdpa")])
@pytest.mark.parametrize("form,dtype,head_size", GPU_CALLS, ids=lambda value: str(value).removeprefix("torch."))
def test_every_library_on_the_gpu(backend, form, dtype, head_size):
    """Value and gradients no worse than the matrix form at the same precision: 1.1 times its error, or one rounding."""
    qkv, arguments = _gpu_call(form, dtype, head_size)
    try:
        out = attention(*qkv, SCALE, backend=backend, **arguments)
    except ValueError as error:
        pytest.skip(str(error))
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = attention_reference(*exact, SCALE, **arguments)
    plain = attention(*qkv, SCALE, backend="math", **arguments)
    results = zip(
        ("o", "dq", "dk", "dv"),
        (out, *_gradients(out, qkv)), (plain, *_gradients(plain, qkv)), (truth, *_gradients(truth, exact)),
        strict=True,
    )  # fmt: skip
    for what, got, eager, want in results:
        assert torch.isfinite(got).all(), what
        # an element's rounding is at most half a unit: its square is on average a third of that
        rounding = torch.finfo(dtype).eps / 2 / 3**0.5 * _rms(want, torch.zeros_like(want))
        bound = 1.1 * _rms(eager, want) + rounding
        if dtype is torch.float32:  # three TF32 products stand for a float32 one: the promise is 1e-5
            bound = max(bound, 1e-5 * _rms(want, torch.zeros_like(want)))
        assert _rms(got, want) <= bound, f"{what}: error {_rms(got, want):.3g}, allowed {bound:.3g}"


@pytest.mark.gpu
def test_masks_on_the_gpu():
    """Left padding through a mask: queries that see nothing give zeros, not NaN."""
    qkv = _qkv(2, 64, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
    seen = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril().expand(2, 1, 64, 64).clone()
    seen[1, ..., :9] = False
    out = attention(*qkv, SCALE, mask=seen)
    gradients = _gradients(out, qkv)
    assert not out[1, :9].any() and all(torch.isfinite(x).all() for x in gradients)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = attention_reference(*exact, SCALE, mask=seen)
    for got, want in zip((out, *gradients), (truth, *_gradients(truth, exact)), strict=True):
        assert _rms(got, want) <= 2.0**-7 * _rms(want, torch.zeros_like(want))


@pytest.mark.gpu
def test_deterministic_gradients_on_the_gpu():
    qkv, arguments = _gpu_call("packed", torch.bfloat16, 128)
    runs = [_gradients(attention(*qkv, SCALE, deterministic=True, **arguments), qkv) for _ in range(3)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
