"""glu beyond its CASE: caller's buffers, reuse in place, neighbours left alone, errors."""

import pytest
import torch

from fastlm_kernels.glu import ACTIVATIONS, glu, glu_bwd, glu_fwd, glu_reference

CANARY = 12345.0


def _inputs(rows=3, columns=37):
    generator = torch.Generator().manual_seed(0)
    dh, gate, up = torch.randn(3, rows, columns, generator=generator)
    return dh, gate, up


def _truth(dh, gate, up, activation):
    gate, up = (x.double().requires_grad_() for x in (gate, up))
    h = glu_reference(gate, up, activation)
    h.backward(dh.double())
    return h.detach().float(), gate.grad.float(), up.grad.float()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_land_in_the_callers_stacked_buffer_and_nowhere_else(path, activation):
    dh, gate, up = _inputs()
    h, dgate, dup = _truth(dh, gate, up, activation)
    # [dgate, canary, dup, canary | h, canary], one row of canaries below
    buffer = torch.full((4, 3 * 37 + 6), CANARY)
    views = [buffer[:3, start : start + 37] for start in (0, 39, 78)]
    glu_bwd(dh, gate, up, activation, dgate=views[0], dup=views[1], h=views[2])
    for view, truth in zip(views, (dgate, dup, h), strict=True):
        torch.testing.assert_close(view, truth, rtol=1e-5, atol=1e-6)
        view.fill_(CANARY)
    assert (buffer == CANARY).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_may_take_the_place_of_the_inputs(path, activation):
    dh, gate, up = _inputs()
    h, dgate, dup = _truth(dh, gate, up, activation)
    got = glu_bwd(dh, gate, up, activation, dgate=gate, dup=up, h=dh)
    assert [x.data_ptr() for x in got] == [gate.data_ptr(), up.data_ptr(), dh.data_ptr()]
    torch.testing.assert_close(gate, dgate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(up, dup, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dh, h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_remade_product_is_the_forwards(path, activation):
    dh, gate, up = (x.bfloat16() for x in _inputs())
    assert torch.equal(glu_bwd(dh, gate, up, activation, needs_h=True)[2], glu_fwd(gate, up, activation))
    assert glu_bwd(dh, gate, up, activation)[2] is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate_without_nan(path, activation):
    gate = torch.tensor([[-1e4, -200.0, -30.0, 30.0, 200.0, 1e4]], requires_grad=True)
    y = glu(gate, torch.ones_like(gate), activation)
    y.backward(torch.ones_like(y))
    assert y.tolist() == [pytest.approx([0.0, 0.0, 0.0, 30.0, 200.0, 1e4], abs=1e-10)]
    assert gate.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], abs=1e-10)]


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="'relu'"):
        glu(x, x, "relu")
    with pytest.raises(ValueError, match=r"\(2, 4\) torch.float32 and \(2, 3\)"):
        glu(x, x[:, :3])
    with pytest.raises(ValueError, match=r"torch\.float16"):
        glu(x, x.half())
