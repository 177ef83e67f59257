"""Tensors of more than 2**31 elements: offsets must be 64 bits wide. Needs a GPU with 40 GiB free."""

import dataclasses

import pytest
import torch

from fastlm_kernels._attention_triton import triton_attention_bwd, triton_attention_fwd
from fastlm_kernels.attention import attention_reference
from fastlm_kernels.glu import glu_bwd, glu_fwd, glu_reference
from fastlm_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_reference
from fastlm_kernels.nf4 import NF4Weight, nf4_decode, nf4_decode_reference
from fastlm_kernels.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_reference

pytestmark = pytest.mark.gpu
COLUMNS = 4096
ROWS = 2**31 // COLUMNS + 8
# compared so many rows at a time, in float32
CHUNK = 2**13
ROUNDING = 2.0**-7


@pytest.fixture(autouse=True)
def _free_memory():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def _random(columns=COLUMNS, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.empty(ROWS, columns, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    assert x.numel() > 2**31
    return x


def _chunks(n_rows=ROWS):
    return [slice(start, min(start + CHUNK, n_rows)) for start in range(0, n_rows, CHUNK)]


def _assert_close(got, expected):
    torch.testing.assert_close(got.float(), expected.float(), rtol=ROUNDING, atol=1e-3)


def test_rms_norm():
    x, weight = _random(), _random()[0].clone()
    y, h, rstd = rms_norm_fwd(x, weight, 1e-6, cast_before_weight=False)
    assert h is x
    for rows in _chunks():
        _assert_close(y[rows], rms_norm_reference(x[rows].float(), weight.float()))
    # the gradient of y itself: dy = y
    dx, dweight = rms_norm_bwd(y, x, weight, rstd, needs_dweight=True)
    total = torch.zeros(COLUMNS, dtype=torch.float64, device="cuda")
    for rows in _chunks():
        leaves = [x[rows].float().requires_grad_(), weight.float().requires_grad_()]
        rms_norm_reference(*leaves).backward(y[rows].float())
        _assert_close(dx[rows], leaves[0].grad)
        total += leaves[1].grad
    torch.testing.assert_close(dweight.double(), total, rtol=ROUNDING, atol=1e-3 * float(total.abs().max()))


# one hidden state a row, one that the backward cannot hold in registers, and heads with a weight of each
@pytest.mark.parametrize("shape", [(COLUMNS,), (4 * COLUMNS,), (32, COLUMNS // 32)], ids=["hidden", "long", "heads"])
def test_add_layer_norm(shape):
    x = _random().view(-1, *shape)
    weight, bias = x[0].clone(), x[1].clone()
    y, h, mean, rstd = layer_norm_fwd(x, weight, bias, 1e-5, residual=x)
    # the gradient of y itself and of h: dy = y, dh = x
    dx, *sums = layer_norm_bwd(y, h, weight, mean, rstd, dh=x, needs_weight=True, needs_bias=True)
    totals = [torch.zeros(shape, dtype=torch.float64, device="cuda") for _ in range(2)]
    for rows in _chunks(len(x)):
        assert torch.equal(h[rows], x[rows] + x[rows])
        leaves = [h[rows].float().requires_grad_(), weight.float().requires_grad_(), bias.float().requires_grad_()]
        expected = layer_norm_reference(*leaves, 1e-5)
        _assert_close(y[rows], expected)
        expected.backward(y[rows].float())
        _assert_close(dx[rows], leaves[0].grad + x[rows].float())
        for total, leaf in zip(totals, leaves[1:], strict=True):
            total += leaf.grad
    for got, total in zip(sums, totals, strict=True):
        torch.testing.assert_close(got.double(), total, rtol=ROUNDING, atol=1e-3 * float(total.abs().max()))


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_triton_attention(is_packed):
    n_tokens, n_heads, head_size = 1024, 32, 256
    shape = (ROWS * COLUMNS // (n_tokens * n_heads * head_size) + 1, n_tokens, n_heads, head_size)
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(3)]
    assert qkv[0].numel() > 2**31
    rule = dict(scale=head_size**-0.5, window=300, softcap=5.0)
    cu_seqlens = None
    if is_packed:
        cu_seqlens = torch.arange(0, (shape[0] + 1) * n_tokens, n_tokens, dtype=torch.int32, device="cuda")
        qkv = [x.view(1, -1, n_heads, head_size) for x in qkv]
    out, lse = triton_attention_fwd(*qkv, **rule, cu_seqlens=cu_seqlens)
    # the gradients of half its square: dout = out
    gradients = triton_attention_bwd(out, *qkv, out, lse, **rule, cu_seqlens=cu_seqlens)
    for sequence in (0, shape[0] // 2, shape[0] - 1):
        q, k, v, o, *got = (x.view(shape)[sequence : sequence + 1].float() for x in (*qkv, out, *gradients))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        truth = attention_reference(*leaves, **rule)
        truth.backward(o)
        for ours, exact in zip((o, *got), (truth.detach(), *(leaf.grad for leaf in leaves)), strict=True):
            # probabilities and their gradients are rounded, so small values are sums of larger ones' roundings
            assert torch.linalg.vector_norm(ours - exact) <= 2 * ROUNDING * torch.linalg.vector_norm(exact)


def test_glu_on_halves_of_one_buffer():
    both = _random(2 * COLUMNS)
    gate, up = both.chunk(2, dim=1)
    h = glu_fwd(gate, up, "silu")
    expected = [
        (glu_reference(gate[rows].float(), up[rows].float()), *_glu_gradients(h[rows], gate[rows], up[rows]))
        for rows in (slice(0, CHUNK), slice(ROWS // 2, ROWS // 2 + CHUNK), slice(ROWS - CHUNK, ROWS))
    ]
    # in place: dgate and dup where gate and up lay, the product again where dh lay
    again = h.clone()
    glu_bwd(again, gate, up, "silu", dgate=gate, dup=up, h=again)
    assert torch.equal(again, h)
    for rows, (product, dgate, dup) in zip((0, ROWS // 2, ROWS - CHUNK), expected, strict=True):
        chunk = slice(rows, rows + CHUNK)
        _assert_close(h[chunk], product)
        _assert_close(gate[chunk], dgate)
        _assert_close(up[chunk], dup)


def _glu_gradients(dh, gate, up):
    leaves = [gate.float().requires_grad_(), up.float().requires_grad_()]
    glu_reference(*leaves).backward(dh.float())
    return leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
def test_nf4_decode(is_strided):
    n_blocks = ROWS * COLUMNS // 64
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(n):
        return torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda", generator=generator)

    def floats(*size):
        return torch.rand(size, device="cuda", generator=generator) + 0.01

    weight = NF4Weight(
        integers(ROWS * COLUMNS // 2), integers(n_blocks), (ROWS, COLUMNS), 64, floats(-(-n_blocks // 256)), floats(256),
        floats(),
    )  # fmt: skip
    buffer = torch.full((ROWS, COLUMNS + 64 * is_strided), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = nf4_decode(weight, torch.bfloat16, out=buffer[:, :COLUMNS])
    for rows in _chunks():
        values = slice(rows.start * COLUMNS, rows.stop * COLUMNS)
        blocks = slice(values.start // 64, values.stop // 64)
        part = dataclasses.replace(
            weight,
            packed=weight.packed[values.start // 2 : values.stop // 2],
            absmax=weight.absmax[blocks],
            shape=(rows.stop - rows.start, COLUMNS),
            nested_absmax=weight.nested_absmax[blocks.start // 256 : -(-blocks.stop // 256)],
        )
        _assert_close(out[rows], nf4_decode_reference(part))
    assert not is_strided or buffer[:, COLUMNS:].isnan().all()
