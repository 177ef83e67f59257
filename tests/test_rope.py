"""rope beyond its CASE: transformers' own functions, caller's buffers, reuse in place, tables, errors."""

import pytest
import torch
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fastlm_kernels.rope import rope, rope_bwd, rope_fwd

CANARY = 12345.0


def _tables(rows, rotary_dim):
    angles = torch.outer(torch.arange(rows).float(), 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    return angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()


def _qk(batch=2, tokens=5, heads=3, kv_heads=2, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, tokens, heads, head_dim, generator=generator)
    return q, torch.randn(batch, tokens, kv_heads, head_dim, generator=generator)


@pytest.mark.parametrize("rotary_dim", [16, 8], ids=["full", "partial"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_equals_transformers(path, interleaved, rotary_dim):
    q, k = _qk()
    cos, sin = (table[None] for table in _tables(5, rotary_dim))
    got = rope(q, k, cos, sin, interleaved=interleaved)
    if interleaved:
        expected = glm_rope(q, k, cos, sin, unsqueeze_dim=2)
    else:
        # Llama's function turns whole heads: partial models slice around it
        turned = llama_rope(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, unsqueeze_dim=2)
        expected = [torch.cat((y, x[..., rotary_dim:]), -1) for y, x in zip(turned, (q, k), strict=True)]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.is_contiguous()


def test_head_norm_equals_qwen3(path):
    q, k = _qk()
    cos, sin = (table[None] for table in _tables(5, 16))
    norms = [Qwen3RMSNorm(16, eps=1e-5) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights = [norm.weight.detach().clone().requires_grad_() for norm in norms]
    inputs = [[x.clone().requires_grad_() for x in (q, k)] for _ in range(2)]
    ours = rope(*inputs[0], cos, sin, *weights, eps=1e-5)
    theirs = llama_rope(*[norm(x) for norm, x in zip(norms, inputs[1], strict=True)], cos, sin, unsqueeze_dim=2)
    for y, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.autograd.backward(ours, (q + 1, k + 1))
    torch.autograd.backward(theirs, (q + 1, k + 1))
    for mine, expected in zip((*inputs[0], *weights), (*inputs[1], *(norm.weight for norm in norms)), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_gradients_land_in_the_packed_buffer_and_nowhere_else(path, interleaved, has_norm):
    q, k = _qk(head_dim=12)
    cos, sin = (table[None] for table in _tables(5, 8))
    weights = (torch.rand(12), torch.rand(12)) if has_norm else (None, None)
    *_, q_rstd, k_rstd = rope_fwd(q, k, cos, sin, *weights, interleaved=interleaved)
    arguments = (q + 1, k + 1, q, k, cos, sin, *weights, q_rstd, k_rstd, 0.0, interleaved)
    dq, dk, *_ = rope_bwd(*arguments)
    packed = torch.full((2, 6, 3 + 2 + 2, 12), CANARY)
    dq_out, dk_out = packed[:, :5, :3], packed[:, :5, 3:5]
    rope_bwd(*arguments, dq_out=dq_out, dk_out=dk_out)
    assert torch.equal(dq_out, dq) and torch.equal(dk_out, dk)
    dq_out.fill_(CANARY)
    dk_out.fill_(CANARY)
    assert (packed == CANARY).all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_results_may_take_the_place_of_the_inputs(path, interleaved):
    q, k = _qk()
    cos, sin = (table[None] for table in _tables(5, 8))
    expected = rope_fwd(q, k, cos, sin, interleaved=interleaved)
    packed = torch.cat((q, k), 2)
    q_view, k_view = packed[:, :, :3], packed[:, :, 3:]
    rope_fwd(q_view, k_view, cos, sin, interleaved=interleaved, q_out=q_view, k_out=k_view)
    assert torch.equal(q_view, expected[0]) and torch.equal(k_view, expected[1])
    rope_bwd(q_view, k_view, None, None, cos, sin, interleaved=interleaved, dq_out=q_view, dk_out=k_view)
    torch.testing.assert_close(packed, torch.cat((q, k), 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_row", [False, True], ids=["one-row-of-positions", "positions-per-row"])
def test_positions_gather_rows_of_the_table(path, per_row):
    q, k = _qk()
    cos, sin = _tables(11, 16)
    # two packed documents: positions restart
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 0]] if per_row else [[3, 4, 0, 1, 2]])
    ours = rope(q, k, cos, sin, position_ids=position_ids)
    gathered = rope(q, k, cos[position_ids], sin[position_ids])
    assert all(torch.equal(mine, expected) for mine, expected in zip(ours, gathered, strict=True))


def test_float32_tables_and_head_major_layout_are_taken_as_they_are(path):
    q, k = (x.half().transpose(1, 2).contiguous().transpose(1, 2) for x in _qk())
    cos, sin = (table[None].expand(2, -1, -1) for table in _tables(5, 16))
    ours = rope(q, k, cos, sin)
    truth = llama_rope(q.float(), k.float(), cos, sin, unsqueeze_dim=2)
    for mine, expected in zip(ours, truth, strict=True):
        assert mine.dtype is torch.float16 and mine.is_contiguous()
        torch.testing.assert_close(mine.float(), expected, rtol=2**-11, atol=1e-6)


def test_weight_gradients_are_repeatable(path):
    q, k = _qk(tokens=40, heads=4, head_dim=64)
    cos, sin = (table[None] for table in _tables(40, 64))
    weights = (torch.rand(64), torch.rand(64))
    _, _, q_rstd, k_rstd = rope_fwd(q, k, cos, sin, *weights)
    runs = [rope_bwd(q, k, q, k, cos, sin, *weights, q_rstd, k_rstd, needs_dweight=True) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_wrong_arguments_are_named():
    q, k = _qk()
    cos, sin = (table[None] for table in _tables(5, 16))
    with pytest.raises(ValueError, match=r"\(2, 5, 3, 16\) torch.float32 and \(2, 4, 2, 16\)"):
        rope(q, k[:, :4], cos, sin)
    with pytest.raises(ValueError, match="R = 15"):
        rope(q, k, cos[..., :15], sin[..., :15])
    with pytest.raises(ValueError, match=r"cos \(1, 4, 16\)"):
        rope(q, k, cos[:, :4], sin[:, :4])
    with pytest.raises(ValueError, match=r"position_ids \(2, 4\)"):
        rope(q, k, cos[0], sin[0], position_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"got \(16,\) and None"):
        rope(q, k, cos, sin, q_weight=torch.ones(16))
    with pytest.raises(ValueError, match=r"got \(16,\) and \(8,\)"):
        rope(q, k, cos, sin, torch.ones(16), torch.ones(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_turned_as_stock_models_do_to_the_bit(dtype):
    """Each product is rounded before the sum: a multiplication fused with the addition would differ in every seventh value."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = lambda *shape: torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)
    q, k, angles = made(2, 33, 8, 64), made(2, 33, 2, 64), made(2, 33, 32)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    for ours, theirs in zip(rope(q, k, cos, sin), llama_rope(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        assert torch.equal(ours, theirs)
