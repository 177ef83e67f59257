"""FusedAdamW as an optimizer: what torch's loops, schedulers, scalers and checkpoints expect."""

import copy
import io
import pickle

import pytest
import test_adamw
import torch

from fastlm import optimizers
from fastlm.optimizers import FusedAdamW

SETTINGS = test_adamw.SETTINGS
SIZES = (300, 4096, 5000)
KINDS = {"float": None, "float32": torch.float32, "8bit": torch.uint8}


def made(kind, dtype=torch.float32, **settings):
    params = test_adamw.parameters(dtype, SIZES)
    return params, FusedAdamW(params, **SETTINGS, state_dtype=KINDS[kind], **settings)


def stock(kind, params):
    """The optimizer whose checkpoints are exchanged."""
    if kind == "8bit":
        return test_adamw.bnb_optimizer(params)
    return torch.optim.AdamW(params, **SETTINGS, fused=True)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    # as Trainer reads optimizer.pt
    return torch.load(file, weights_only=True)


def assert_equal_states(got, want):
    """State dicts: the same keys, values and tensors, to the bit."""
    assert type(got) is type(want)
    if isinstance(got, dict):
        assert list(got) == list(want)
        for key in got:
            assert_equal_states(got[key], want[key])
    elif isinstance(got, list):
        assert len(got) == len(want)
        for pair in zip(got, want, strict=True):
            assert_equal_states(*pair)
    elif isinstance(got, torch.Tensor):
        assert got.dtype is want.dtype and torch.equal(got, want)
    else:
        assert got == want


# --- checkpoints ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_goes_round_to_the_bit(kind, dtype):
    params, optimizer = made(kind, dtype)
    test_adamw.run(optimizer, params, 3)
    saved = through_a_file(optimizer.state_dict())
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedAdamW(again, state_dtype=KINDS[kind])
    resumed.load_state_dict(saved)
    assert_equal_states(resumed.state_dict(), optimizer.state_dict())
    for group, one in ((params, optimizer), (again, resumed)):
        test_adamw.set_gradients(group, 3)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert_equal_states(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["float", "8bit"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["theirs-to-ours", "ours-to-theirs"])
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_move_both_ways(kind, dtype, to_ours):
    """A run of one optimizer goes on with the other: layouts are equal, and so is the next step but for a rounding."""
    params = test_adamw.parameters(dtype, SIZES)
    ours = lambda group: FusedAdamW(group, **SETTINGS, state_dtype=KINDS[kind])
    theirs = lambda group: stock(kind, group)
    before, after = (theirs, ours) if to_ours else (ours, theirs)
    first = before(params)
    test_adamw.run(first, params, 3)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    second = after(again)
    saved = first.state_dict()
    second.load_state_dict(through_a_file(saved))
    loaded = second.state_dict()
    assert [list(state) for state in loaded["state"].values()] == [list(state) for state in saved["state"].values()]
    for key, state in saved["state"].items():
        flat, other = ({**s, **s.get(optimizers._BNB_NEST, {})} for s in (state, loaded["state"][key]))
        for one in (flat, other):
            one.pop(optimizers._BNB_NEST, None)
        assert set(flat) == set(other)
        for name in flat:
            assert torch.equal(torch.as_tensor(flat[name]), torch.as_tensor(other[name])), name
    for group in (params, again):
        test_adamw.set_gradients(group, 3)
    first.step()
    second.step()
    for a, b in zip(params, again, strict=True):
        # one rounding of the value, and one of the step, whose moments some kernels round before they use them
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=unit, atol=SETTINGS["lr"] * unit + 1e-6)


def test_what_bitsandbytes_wrote_before_it_nested_its_tensors():
    params, optimizer = made("8bit")
    test_adamw.run(optimizer, params, 2)
    saved = optimizer.state_dict()
    flat = {key: {"step": state["step"], **state[optimizers._BNB_NEST]} for key, state in saved["state"].items()}
    other = FusedAdamW(test_adamw.parameters(torch.float32, SIZES), state_dtype=torch.uint8)
    other.load_state_dict(dict(saved, state=flat))
    assert_equal_states(other.state_dict()["state"], saved["state"])


def test_states_of_other_optimizers_are_refused():
    params, optimizer = made("float")
    test_adamw.run(optimizer, params, 1)
    saved = optimizer.state_dict()
    eight = made("8bit")[1]
    with pytest.raises(ValueError, match="exp_avg.*state_dtype=torch.uint8 needs"):
        eight.load_state_dict(saved)
    amsgrad = torch.optim.AdamW(params, amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="no amsgrad"):
        optimizer.load_state_dict(amsgrad)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        FusedAdamW(params[:2]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"moments are \[\(300,\), \(300,\)\], the parameter is \(7,\)"):
        FusedAdamW([torch.nn.Parameter(torch.zeros(7)), *params[1:]]).load_state_dict(saved)
    test_adamw.run(eight, eight.param_groups[0]["params"], 1)
    saved = copy.deepcopy(eight.state_dict())
    saved["state"][1][optimizers._BNB_NEST]["qmap2"][5] *= 2
    with pytest.raises(ValueError, match="qmap2 is not the dynamic map"):
        eight.load_state_dict(saved)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_go_on_alone(copied):
    params, optimizer = made("8bit")
    test_adamw.run(optimizer, params, 2)
    other = copied(optimizer)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    test_adamw.run(other, other.param_groups[0]["params"], 1)
    assert [other.state[p]["step"] for p in other.param_groups[0]["params"]] == [3, 3, 3]
    assert [optimizer.state[p]["step"] for p in params] == [2, 2, 2]


# --- what a training loop does with an optimizer ---


def test_frozen_and_unused_parameters_stay(path):
    params, optimizer = made("float")
    params[1].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.ones(300)
    assert float(optimizer.clip_grad_norm()) == pytest.approx(300**0.5)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1]) and torch.equal(params[2], before[2])
    assert set(optimizer.state_dict()["state"]) == {0}


def test_no_gradient_at_all(path):
    params, optimizer = made("8bit")
    assert float(optimizer.clip_grad_norm(1.0)) == 0.0
    assert optimizer.step() is None and not optimizer.state_dict()["state"]


def test_a_clip_counts_once_and_leaves_the_gradients(path):
    params, optimizer = made("float")
    alone = test_adamw.parameters(torch.float32, SIZES)
    theirs = torch.optim.AdamW(alone, **SETTINGS)
    for group in (params, alone):
        test_adamw.set_gradients(group, 0)
    kept = [p.grad.clone() for p in params]
    optimizer.clip_grad_norm(1e-3)
    optimizer.clip_grad_norm(1e-1)
    torch.nn.utils.clip_grad_norm_(alone, 1e-1)
    optimizer.step()
    theirs.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, kept, strict=True))
    for p, a, grad in zip(params, alone, kept, strict=True):
        a.grad = grad
        torch.testing.assert_close(p, a, rtol=1e-6, atol=1e-6)
    optimizer.step()
    theirs.step()
    for p, a in zip(params, alone, strict=True):
        torch.testing.assert_close(p, a, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"max_norm must be positive, got 0"):
        optimizer.clip_grad_norm(0.0)


def test_gradients_dropped_between_the_clip_and_the_step(path):
    """What skips a step, as `fastlm.callbacks` do: nothing moves, and the next step is not clipped by what was measured before."""
    params, optimizer = made("8bit")
    test_adamw.run(optimizer, params, 1)
    before, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    test_adamw.set_gradients(params, 1)
    optimizer.clip_grad_norm(1e-3)
    for p in params:
        p.grad = None
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))
    assert_equal_states(optimizer.state_dict(), saved)
    again = [torch.nn.Parameter(value) for value in before]
    other = FusedAdamW(again, state_dtype=torch.uint8)
    other.load_state_dict(saved)
    for group, one in ((params, optimizer), (again, other)):
        test_adamw.set_gradients(group, 2)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_schedulers_closures_and_further_groups():
    params, alone = test_adamw.parameters(torch.float32, SIZES), test_adamw.parameters(torch.float32, SIZES)
    made_of = (FusedAdamW(params[:1], **SETTINGS), torch.optim.AdamW(alone[:1], **SETTINGS, foreach=False))
    runs = []
    for optimizer, group in zip(made_of, (params, alone), strict=True):
        optimizer.add_param_group(dict(params=group[1:], lr=3e-2, weight_decay=0.0))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-1, 1e-2], total_steps=6)

        def closure(optimizer=optimizer, group=group):
            optimizer.zero_grad()
            loss = sum((p.square() * torch.arange(p.numel()).remainder(3)).mean() for p in group)
            loss.backward()
            return loss

        losses = []
        for _ in range(5):
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        runs.append(losses)
    assert runs[0] == runs[1] and runs[0][-1] < runs[0][0]
    assert all(torch.equal(a, b) for a, b in zip(params, alone, strict=True))


def test_with_8_bits_small_and_named_parameters_keep_float32():
    params = test_adamw.parameters(torch.float32, SIZES)
    optimizer = FusedAdamW(params, state_dtype=torch.uint8, full_precision=[params[2]])
    test_adamw.run(optimizer, params, 1)
    dtypes = [optimizer.state[p]["state1"].dtype for p in params]
    assert dtypes == [torch.float32, torch.uint8, torch.float32]
    assert optimizer.state[params[1]]["absmax1"].shape == (16,)


def test_mistakes_are_told():
    param = torch.nn.Parameter(torch.zeros(3))
    for settings, said in (
        (dict(lr=-1.0), "lr must be at least 0, got -1.0"),
        (dict(eps=float("nan")), "eps must be at least 0, got nan"),
        (dict(weight_decay=-0.1), "weight_decay must be at least 0, got -0.1"),
        (dict(betas=(0.9, 1.0)), r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        (dict(state_dtype=torch.int8), "state_dtype must be None, torch.float32 or torch.uint8, got torch.int8"),
    ):
        with pytest.raises(ValueError, match=said):
            FusedAdamW([param], **settings)
    with pytest.raises(TypeError, match="real float dtype, got torch.complex64"):
        FusedAdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="no sparse gradients, got torch.sparse_coo"):
        FusedAdamW(table.parameters()).step()


@pytest.mark.parametrize("overflows", [False, True])
def test_behind_a_gradient_scaler(path, overflows):
    """Unscaled, then measured, then clipped; a step that the scaler leaves out changes nothing and leaves no clip behind."""
    made_of = []
    for ours in (True, False):
        params = test_adamw.parameters(torch.float32, SIZES)
        optimizer = (FusedAdamW if ours else torch.optim.AdamW)(params, **SETTINGS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        norms = []
        for step in range(3):
            test_adamw.set_gradients(params, step)
            for p in params:
                p.grad *= scaler.get_scale() if step else 2.0**10
            # the scale is made when something is scaled
            scaler.scale(torch.zeros(()))
            if overflows and step == 1:
                params[0].grad[5] = float("inf")
            scaler.unscale_(optimizer)
            clip = (
                optimizer.clip_grad_norm
                if ours
                else lambda limit, params=params: torch.nn.utils.clip_grad_norm_(params, limit)
            )
            norms.append(float(clip(0.5)))
            scaler.step(optimizer)
            scaler.update()
        made_of.append((params, norms, scaler.get_scale()))
    (params, norms, scale), (alone, want, other_scale) = made_of
    assert norms == pytest.approx(want, rel=1e-5) and scale == other_scale == (512.0 if overflows else 1024.0)
    for a, b in zip(params, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_hundreds_of_tensors_on_the_gpu():
    """As many as a 1B model's adapters: bfloat16, one launch each for sums, norm and update, whatever moved since the last step."""
    shapes, made_of = [(16, 2048), (2048, 16)] * 112, {}
    for name, make, dtype in (
        ("ours", FusedAdamW, torch.bfloat16),
        ("torch", torch.optim.AdamW, torch.bfloat16),
        ("truth", torch.optim.AdamW, torch.float64),
    ):
        generator = torch.Generator(device="cuda").manual_seed(0)
        draw = lambda shape, generator=generator: torch.randn(shape, device="cuda", generator=generator).bfloat16()
        params = [torch.nn.Parameter(draw(shape).to(dtype)) for shape in shapes]
        optimizer = make(params, **SETTINGS)
        for _ in range(3):
            for p in params:
                p.grad = draw(p.shape).to(dtype)
            if name == "ours":
                optimizer.clip_grad_norm(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        made_of[name] = torch.cat([p.detach().double().flatten() for p in params])
    ours, stock = (made_of[name] - made_of["truth"] for name in ("ours", "torch"))
    assert ours.square().mean() <= stock.square().mean() and ours.abs().max() <= 2 * stock.abs().max()
