"""Our own attention, in Triton and in torch blocks: soft-capped scores, windows, packed rows, wide and odd heads, O(S) memory."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastlm_kernels import _attention_torch, _attention_triton, _launch
from fastlm_kernels._attention_torch import torch_attention
from fastlm_kernels._attention_triton import triton_attention_bwd, triton_attention_fwd
from fastlm_kernels.attention import (
    attention,
    attention_reference,
    layout_from_cu_seqlens,
    packed_layout,
    padded_layout,
)
from fastlm_kernels.testing import poisoned_memory

SCALE = 0.3
PATHS = ["torch", "triton"]


def _on(path):
    """The path's kernels on CPU tensors."""
    if path == "triton" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process: the gpu tests run the kernels")
    return _launch.interpreting() if path == "triton" else contextlib.nullcontext()


def _qkv(batch, n_queries, n_heads, n_kv_heads, head_size, n_keys=None, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = (n_queries, n_heads), (n_keys or n_queries, n_kv_heads), (n_keys or n_queries, n_kv_heads)
    return [
        torch.randn(batch, *shape, head_size, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def _gradients(out, tensors):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad(out, tensors, weight)


def _check(path, qkv, tolerance=1e-5, **arguments):
    """Value and gradients against the definition in float64, as shares of the largest true value; poisoned memory."""
    with _on(path), poisoned_memory():
        out = attention(*qkv, SCALE, backend=path, **arguments)
        got = (out, *_gradients(out, qkv))
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = attention_reference(*exact, SCALE, **arguments)
    for what, ours, want in zip(("o", "dq", "dk", "dv"), got, (truth, *_gradients(truth, exact)), strict=True):
        assert ours.dtype is qkv[0].dtype and ours.shape == want.shape, what
        error = float((ours.detach().double() - want.detach()).abs().max())
        assert error <= tolerance * max(1.0, float(want.detach().abs().max())), f"{what}: off by {error:.3g}"
    return out


# more tokens than the interpreter's tiles of 32 queries and 16 keys hold, and windows that end inside of them
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 20, 33, 500])
def test_dense(path, window, softcap):
    _check(path, _qkv(1, 70, 4, 2, 16), window=window, softcap=softcap)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[1, 30, 0, 3, 16, 0, 0, 40], [90], [1] * 9 + [64], [47, 43]], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_packed(path, lengths, window):
    layout = layout_from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))
    _check(path, _qkv(1, layout.tokens, 2, 1, 16), layout=layout, window=window, softcap=2.0)


@pytest.mark.parametrize("path", PATHS)
def test_packed_equals_separate_over_rows(path):
    positions = torch.tensor([[*range(20), *range(13)], [*range(5), *range(28)]])
    qkv = _qkv(2, 33, 4, 2, 16)
    out = _check(path, qkv, layout=packed_layout(positions), softcap=2.0)
    with _on(path):
        alone = attention(*(x[1:, 5:] for x in qkv), SCALE, backend=path, softcap=2.0)
    assert torch.allclose(out[1:, 5:], alone, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_padded_rows_are_zero(path):
    is_real = torch.tensor([[0] * 5 + [1] * 30, [1] * 20 + [0] * 15])
    qkv = _qkv(2, 35, 2, 2, 16)
    with torch.no_grad():
        for x in qkv:
            x[is_real == 0] = float("nan")
    with _on(path):
        out = attention(*qkv, SCALE, backend=path, layout=padded_layout(is_real), softcap=2.0)
        gradients = _gradients(out, qkv)
        alone = attention(*(x[:1, 5:] for x in qkv), SCALE, backend=path, softcap=2.0)
    assert all(torch.isfinite(x).all() and not x[is_real == 0].any() for x in (out, *gradients))
    assert torch.allclose(out[:1, 5:], alone, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n_queries,window", [(1, None), (1, 7), (5, None), (5, 7), (40, 3)])
def test_fewer_queries_than_keys(path, n_queries, window):
    _check(path, _qkv(2, n_queries, 2, 1, 24, n_keys=53), window=window, softcap=2.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_size", [8, 20, 80, 96, 256])
def test_head_sizes(path, head_size):
    if path == "triton" and head_size > 128:
        # float32 heads as wide do not fit a GPU's registers
        with _on(path), pytest.raises(ValueError, match="at most 128"):
            attention(*_qkv(1, 4, 1, 1, head_size), SCALE, backend=path)
        return
    _check(path, _qkv(1, 20, 2, 1, head_size), softcap=2.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n_kv_heads", [1, 3, 6])
def test_groups_of_heads(path, n_kv_heads):
    _check(path, _qkv(2, 18, 6, n_kv_heads, 16), softcap=2.0)


# one unit in the last place, twice for the two roundings on a gradient's way, and what the interpreter truncates
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2.0**-9), (torch.bfloat16, 2.0**-6)], ids=str)
def test_half_precision(path, dtype, tolerance):
    _check(path, _qkv(1, 70, 4, 2, 256, dtype=dtype), tolerance, window=20, softcap=2.0)


@pytest.mark.parametrize("path", PATHS)
def test_slices_of_a_packed_projection(path):
    plain = [x.detach() for x in _qkv(2, 20, 2, 1, 16)]
    slices = torch.cat(plain, dim=2).split([2, 1, 1], dim=2)
    with _on(path):
        want = attention(*plain, SCALE, backend=path, softcap=2.0)
        assert torch.equal(attention(*slices, SCALE, backend=path, softcap=2.0), want)


@pytest.mark.parametrize("path", PATHS)
def test_a_gradient_without_strides(path):
    """The gradient of a sum is one value expanded."""
    qkv = _qkv(1, 20, 2, 1, 16)
    with _on(path):
        out = attention(*qkv, SCALE, backend=path, softcap=2.0)
        want = torch.autograd.grad(out, qkv, torch.ones(out.shape), retain_graph=True)
        got = torch.autograd.grad(out.sum(), qkv)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_masks_under_a_softcap():
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    seen[1, :, :, 0] = False  # left padding: query 0 of row 1 sees nothing
    qkv = _qkv(2, 9, 4, 2, 8)
    out = _check("torch", qkv, mask=seen, softcap=2.0)
    assert not out[1, 0].any()
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    assert torch.equal(attention(*qkv, SCALE, mask=added, softcap=2.0), out)
    _check("torch", qkv, mask=torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(2)), softcap=2.0)


def test_the_softcap_by_hand():
    """Scores 0 and 3 under a cap of 2: weights 1 and exp(2 tanh(1.5))."""
    q = torch.tensor([0.0, 3.0]).view(1, 2, 1, 1)
    k = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    weight = torch.tensor(1.5).tanh().mul(2.0).exp()
    out = attention(q, k, v, 1.0, softcap=2.0)
    assert torch.allclose(out.flatten(), torch.stack([torch.zeros(()), weight / (1.0 + weight)]))


@pytest.mark.parametrize("path", PATHS)
def test_autocast_does_not_lower_the_dtype(path):
    qkv = _qkv(1, 5, 2, 2, 8)
    with _on(path):
        want = attention(*qkv, SCALE, backend=path, softcap=2.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(*qkv, SCALE, backend=path, softcap=2.0)
            got = _gradients(out, qkv)
    assert torch.equal(out, want)
    assert all(torch.equal(x, y) for x, y in zip(got, _gradients(want, qkv), strict=True) if path == "torch")


def test_the_log_sum_exp_of_the_launchers():
    q, k, v = (x.detach() for x in _qkv(1, 40, 2, 1, 16))
    scores = (2.0 * torch.tanh(q.transpose(1, 2) @ k.transpose(1, 2).mT * SCALE / 2.0)).double()
    scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
    with _on("triton"):
        out, lse = triton_attention_fwd(q, k, v, SCALE, softcap=2.0)
        dq, dk, dv = triton_attention_bwd(torch.ones_like(out), q, k, v, out, lse, SCALE, softcap=2.0)
    assert lse.dtype is torch.float32 and torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-6)
    # the weights of a query sum to one
    assert torch.allclose(dv.double().sum(1), torch.full((1, 1, 16), 2.0 * 40, dtype=torch.float64), rtol=1e-5)
    assert dq.shape == q.shape and dk.shape == k.shape


class _Largest(TorchDispatchMode):
    """The most memory that any tensor made inside holds."""

    n_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.n_bytes = max(self.n_bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("arguments", [{}, {"window": 100}, {"layout": 3}], ids=str)
def test_torch_blocks_are_never_square(arguments):
    n_tokens = 1600
    if "layout" in arguments:
        arguments = {"layout": layout_from_cu_seqlens(torch.tensor([0, 900, 901, n_tokens]))}
    qkv = _qkv(1, n_tokens, 2, 1, 8)
    with _Largest() as largest:
        out = attention(*qkv, SCALE, softcap=2.0, **arguments)
        _gradients(out, qkv)
    keys = {"window": 100 + _attention_torch._BLOCK, "layout": 900}.get(next(iter(arguments), ""), n_tokens)
    assert largest.n_bytes <= 4 * 2 * _attention_torch._BLOCK * keys < 4 * n_tokens * n_tokens


@pytest.mark.parametrize("is_packed", [False, True])
def test_memory_grows_with_the_tokens_alone(is_packed):
    """What the kernels make and save: q, k, v, their gradients, o, and a float32 for each query and head."""
    qkv = _qkv(1, 64, 2, 1, 8)
    layout = layout_from_cu_seqlens(torch.tensor([0, 40, 64])) if is_packed else None
    saved = []
    with _on("triton"), _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):  # fmt: skip
        out = attention(*qkv, SCALE, layout=layout, backend="triton", softcap=2.0)
        _gradients(out, qkv)
    assert sorted(saved) == sorted([64 * 16, 64 * 8, 64 * 8, 64 * 16, 64 * 2] + [3] * is_packed)
    assert largest.n_bytes == 4 * 64 * 16


def test_every_tile_is_built_ahead_of_time():
    """The table of tiles has a build for each chip, kernel and width, so that none is launched unseen."""
    for name, rows in _attention_triton._TILES.items():
        chips = {"wgmma": [(9, 0)], "tcgen05": [(10, 0)], "mma": [(8, 0), (8, 9), (12, 0)], "float32": [(9, 0)]}[name]
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        for cc in chips:
            built = {
                (b.kernel.__name__, b.constants["BLOCK_M"], b.constants["BLOCK_N"], b.constants["BLOCK_E"])
                for b in _attention_triton.builds(cc, dtype)
            }
            for kernel, tiles in rows.items():
                kernel_name = {"fwd": "fwd", "dq": "bwd_dq", "dkdv": "bwd_dkdv"}[kernel]
                for width, tile in zip((64, 128, 256), tiles, strict=False):
                    assert (f"_attention_{kernel_name}_kernel", tile.block_m, tile.block_n, width) in built
    assert _attention_triton.builds((7, 5), torch.float16) == []


def _rms(x):
    return float(x.detach().double().square().mean().sqrt())


GPU_CALLS = {
    "gemma2-9b-window": (torch.bfloat16, 16, 8, 256, 4096, None),
    "gemma2-9b-full": (torch.bfloat16, 4, 2, 256, None, None),
    "gemma2-27b": (torch.float16, 8, 4, 128, 4096, None),
    "packed": (torch.bfloat16, 8, 2, 128, None, [1, 4000, 127, 3, 2061, 2000]),
    "packed-window": (torch.bfloat16, 4, 2, 64, 700, [1, 4000, 127, 3, 2061, 2000]),
    "odd-head": (torch.bfloat16, 4, 4, 80, 1000, None),
    "fp32-packed-window": (torch.float32, 4, 2, 128, 700, [1, 4000, 127, 3, 2061, 2000]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flash_attention_4"])
@pytest.mark.parametrize("case", GPU_CALLS)
def test_8k_tokens_on_the_gpu(case, backend):
    """Soft-capped, against float64 in blocks: no worse than the matrix form at the same precision, in O(S) memory."""
    dtype, n_heads, n_kv_heads, head_size, window, lengths = GPU_CALLS[case]
    qkv = _qkv(1, 8192, n_heads, n_kv_heads, head_size, dtype=dtype, device="cuda")
    layout = layout_from_cu_seqlens(torch.tensor([0, *lengths], device="cuda").cumsum(0)) if lengths else None
    arguments = dict(window=window, softcap=5.0, layout=layout)
    scale = 3.0 * head_size**-0.5
    if reason := _refused(qkv, scale, backend, arguments):
        pytest.skip(reason)
    with poisoned_memory():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attention(*qkv, scale, backend=backend, **arguments)
        got = (out, *_gradients(out, qkv))
        peak_bytes = torch.cuda.max_memory_allocated() - before
    # o, dq, dk, dv, the gradient of o, float32 sums of some of them; an [S, S] matrix of each head would be twice as much
    assert peak_bytes <= 16 * sum(x.numel() for x in qkv) < 2 * n_heads * 8192**2
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = torch_attention(*exact, scale, window, 5.0, lengths)
    truth = (truth, *_gradients(truth, exact))
    eager = _matrix_form(qkv, scale, window, 5.0, lengths)
    eager = (eager, *_gradients(eager, qkv))
    for what, ours, plain, want in zip(("o", "dq", "dk", "dv"), got, eager, truth, strict=True):
        assert torch.isfinite(ours).all(), what
        rounding = torch.finfo(dtype).eps / 2 / 3**0.5 * _rms(want)
        bound = 1.1 * _rms(plain.double() - want) + rounding
        if dtype is torch.float32:  # three TF32 products stand for a float32 one: the promise is 1e-5
            bound = max(bound, 1e-5 * _rms(want))
        assert _rms(ours.double() - want) <= bound, f"{what}: {_rms(ours.double() - want):.3g}, allowed {bound:.3g}"


def _refused(qkv, scale, backend, arguments):
    try:
        with torch.no_grad():
            attention(*qkv, scale, backend=backend, **arguments)
    except ValueError as error:
        return str(error)
    return None


def _matrix_form(qkv, scale, window, softcap, lengths):
    """What transformers computes, head by head so that the matrices fit."""
    q, k, v = qkv
    places = torch.arange(q.shape[1], device=q.device)
    seen = places[:, None] >= places
    if window is not None:
        seen &= places[:, None] - places < window
    if lengths is not None:
        sample = torch.repeat_interleave(torch.tensor(lengths, device=q.device))
        seen &= sample[:, None] == sample
    hidden = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    outs = []
    for head in range(q.shape[2]):
        member = head // (q.shape[2] // k.shape[2])
        scores = softcap * torch.tanh(q[:, :, head] @ k[:, :, member].mT * scale / softcap)
        weights = (scores + hidden).softmax(-1, dtype=torch.float32).to(q.dtype)
        outs.append(weights @ v[:, :, member])
    return torch.stack(outs, dim=2)


@pytest.mark.gpu
def test_the_same_bits_again_on_the_gpu():
    qkv = _qkv(1, 3000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    runs = []
    for _ in range(3):
        out = attention(*qkv, SCALE, window=500, softcap=5.0, deterministic=True, backend="triton")
        runs.append((out, *_gradients(out, qkv)))
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
