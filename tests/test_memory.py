"""Plans, what they are predicted to need, and what is said before a run that cannot fit."""

import copy
import dataclasses
import pickle

import pytest
import tiny
import torch
from allocations import Allocations

import fastlm
from fastlm import binding
from fastlm.block import attention, function, mlp
from fastlm.block.spec import KEEP_ALL, RECOMPUTE_ALL, SELECTIVE, SMALLEST
from fastlm.forwards import layer as layer_forward
from fastlm.forwards import shapes
from fastlm.memory import budget, manager, planner, sizes
from fastlm.memory.planner import Batch
from fastlm.patching import patch_of

GIB = 1 << 30
PLANS = {"keep": KEEP_ALL, "selective": SELECTIVE, "recompute": RECOMPUTE_ALL, "smallest": SMALLEST}
SHAPE = dict(
    hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096
)


# --- the ledger against what is really allocated


@pytest.fixture
def empty_launches(monkeypatch):
    """The kernels' path with launches that do nothing: what they allocate is what a GPU's would."""
    from triton.runtime import interpreter

    from fastlm_kernels import _launch

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    with _launch.interpreting():
        yield


def captured_call(model, tokens, monkeypatch):
    """The arguments of the first layer's block in a forward."""
    calls, stock = [], function.BlockFunction.apply

    def apply(*args):
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(layer_forward.BlockFunction, "apply", apply)
    x = tiny.ids(1, tokens)
    model.train()(input_ids=x, labels=x)
    monkeypatch.setattr(layer_forward.BlockFunction, "apply", stock)
    return calls[0]


def measured(call, plan):
    """Peak of the forward, what it leaves beside its output, and peak of the backward."""
    x, cos, sin, layer, *tensors = call
    x, layer = x.detach().requires_grad_(), dataclasses.replace(layer, plan=plan, rescue=None)
    with Allocations() as seen:
        before = seen.reset()
        y = function.BlockFunction.apply(x, cos, sin, layer, *tensors)
        forward, kept = seen.peak - before, seen.now() - before - y.numel() * y.element_size()
        dy, inputs = torch.ones_like(y), [t for t in (x, *tensors) if t is not None and t.requires_grad]
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        before = seen.reset()
        torch.autograd.grad(edge, inputs, dy)
        return forward, kept, seen.peak - before


def assert_predicted(model, tokens, monkeypatch, share=0.05):
    call = captured_call(model, tokens, monkeypatch)
    layer = model.get_base_model().model.layers[0]
    facts = patch_of(layer).facts
    shape = shapes.layer_shape(layer, facts.family, facts.spec, 2, "sdpa", facts.rounds_once)
    scaled = [any(scaling != 1.0 for scaling in group.scalings) for group in call[3].groups]
    groups = [dataclasses.replace(g, scaled=s) for g, s in zip(shape.groups, scaled, strict=True)]
    shape = dataclasses.replace(shape, **dict(zip(("qkv", "out", "gate_up", "down"), groups, strict=True)))
    for name, plan in PLANS.items():
        forward, kept, backward = measured(call, plan)
        predicted = (
            sizes.forward_peak(shape, tokens, plan),
            sizes.kept_on_device(shape, tokens, plan) - sizes.kept_bytes(shape, tokens)["input"],
            sizes.backward_peak(shape, tokens, plan),
        )
        for want, got in zip((forward, kept, backward), predicted, strict=True):
            assert abs(got - want) <= share * want, (name, (forward, kept, backward), predicted)


FAMILIES = ["llama", "llama-biases", "qwen3", "gemma3", "olmo2", "cohere", "granite", "hunyuan", "nemotron"]


@pytest.mark.parametrize("is_long", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layers_allocations_are_predicted(name, is_long, empty_launches, monkeypatch):
    """Forward peak, what is kept and backward peak, within 5 %, for each plan."""
    over = dict(SHAPE, layer_types=["full_attention"] * 2) if name == "gemma3" else SHAPE
    made = tiny.with_lora(tiny.model(name, torch.bfloat16, "sdpa", **over), dtype=torch.bfloat16, r=2)
    fastlm.patch_model(made, strict=True)
    if is_long:
        monkeypatch.setattr(mlp, "WHOLE_BYTES", 0)
        monkeypatch.setattr(mlp, "TILE_BYTES", 128 * 2 * 384 * 2)
        monkeypatch.setattr(attention, "GROUP_BYTES", 1)
    assert_predicted(made, 1024, monkeypatch)


@pytest.mark.parametrize("is_long", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("rounding", ["stock", "once"])
def test_decoded_weights_are_predicted(rounding, is_long, empty_launches, tmp_path, monkeypatch):
    """4-bit weights wide enough for adapters to ride in the base GEMM."""
    pytest.importorskip("bitsandbytes")
    from test_parity_4bit import load

    shape = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, max_position_embeddings=4096)
    tiny.model("llama", torch.bfloat16, **shape).save_pretrained(tmp_path)
    made = tiny.with_lora(load(tmp_path, torch.bfloat16, "sdpa"), dtype=torch.bfloat16)
    fastlm.patch_model(made, strict=True, lora_rounding=rounding)
    if is_long:
        monkeypatch.setattr(mlp, "WHOLE_BYTES", 0)
        monkeypatch.setattr(mlp, "TILE_BYTES", 512 * 2 * 1024 * 2)
        monkeypatch.setattr(attention, "GROUP_BYTES", 1)
    assert_predicted(made, 2048, monkeypatch)


# --- plans


def llama_8b(r=16):
    group = lambda widths, features: sizes.GroupShape(widths, features, r * len(widths), True)
    qkv, out = group((4096, 1024, 1024), 4096), group((4096,), 4096)
    shape = sizes.LayerShape(qkv, out, group((14336, 14336), 4096), group((4096,), 14336), 32, 8, 128)
    return planner.Model((shape,) * 32, planner.HeadShape(128256, 4096), 512)


def test_more_memory_never_keeps_less():
    model, batch = llama_8b(), Batch.of(2, 2048)
    saved = []
    for n in (0.5, 2, 3, 4, 6, 8, 10, 13):
        found = planner.choose(model, batch, int(n * GIB), 100 * GIB)
        assert found.fits == (n > 1) and (found.peak.total <= n * GIB or not found.fits)
        flops = sizes.recompute_flops(model.layers[0], batch.tokens, batch.row_tokens)
        saved.append(sum(flops[name] for plan in found.plans for name in flops if getattr(plan, name)))
    assert saved == sorted(saved) and saved[0] == 0
    # with enough of it, nothing is made again and nothing travels
    assert all(p.qkv and p.attention and p.residual and p.gate_up and not p.offloads for p in found.plans)


def test_long_rows_keep_the_attention_first():
    assert planner.values(llama_8b().layers[0], Batch.of(1, 32768))[0] == "attention"
    assert planner.values(llama_8b().layers[0], Batch.of(2, 2048))[-1] == "attention"
    # the last layers first: what they keep is gone first
    found = planner.choose(llama_8b(), Batch.of(1, 32768), 22 * GIB, 0)
    kept = [plan.attention for plan in found.plans]
    assert sum(kept) > 0 and kept == sorted(kept)


def test_the_host_takes_what_the_device_cannot():
    model, batch = llama_8b(), Batch.of(1, 60000)
    alone = planner.choose(model, batch, 8 * GIB, 0)
    assert not alone.fits
    found = planner.choose(model, batch, 8 * GIB, 64 * GIB)
    assert found.fits and found.peak.host > 0 and found.peak.total <= 8 * GIB
    # the last layer's would come straight back
    assert "input" not in found.plans[-1].offloads
    limited = planner.minimal(model, batch, 5 * GIB)
    assert 4 * GIB < limited.peak.host <= 5 * GIB


def test_a_frozen_prefix_keeps_nothing():
    model = dataclasses.replace(llama_8b(), n_frozen_first=16)
    found = planner.choose(model, Batch.of(2, 2048), 30 * GIB, 0)
    assert found.plans[:16] == (RECOMPUTE_ALL,) * 16 and found.plans[-1].gate_up
    assert found.peak.kept < 0.6 * planner.choose(llama_8b(), Batch.of(2, 2048), 30 * GIB, 0).peak.kept


MEASURED_GIB = {
    # torch.cuda.max_memory_allocated on one H200, 4-bit weights, r=16, adamw_8bit (benchmarks/results/finetune.jsonl)
    ("llama-3.1-8b", 2, True): 7.68,
    ("llama-3.1-8b", 2, False): 18.05,
    ("llama-3.2-1b", 4, True): 2.28,
    ("llama-3.2-1b", 4, False): 7.98,
}


@pytest.mark.parametrize("name, batch, recomputes", MEASURED_GIB)
def test_measured_peaks_are_predicted(name, batch, recomputes):
    found = fastlm.estimate(config(name), batch, 2048, use_gradient_checkpointing=recomputes)
    measured = MEASURED_GIB[name, batch, recomputes]
    assert abs(found.total / GIB - measured) <= 0.05 * measured, str(found)


def config(name):
    import sys
    from pathlib import Path

    import transformers

    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    try:
        from finetune import SHAPES
    finally:
        sys.path.pop(0)
    kind, settings = SHAPES[name]
    return transformers.AutoConfig.for_model(kind, max_position_embeddings=131072, **settings)


# --- predictions


def test_an_estimate_of_a_config_and_of_its_model_agree(tmp_path):
    made = tiny.with_lora(tiny.model("llama", torch.bfloat16, "sdpa", **SHAPE), dtype=torch.bfloat16, r=8)
    fastlm.patch_model(made, strict=True)
    of_config = fastlm.estimate(tiny.config("llama", **SHAPE), 2, 512, mode="16bit", r=8, device_gib=8)
    of_model = fastlm.estimate(made, 2, 512, device_gib=8)
    assert (of_config.weights, of_config.adapters, of_config.optimizer) == (
        of_model.weights - sum(b.numel() * b.element_size() for b in made.buffers()),
        of_model.adapters,
        of_model.optimizer,
    )
    assert of_config.kept == of_model.kept and of_config.head == of_model.head
    tiny.config("llama", **SHAPE).save_pretrained(tmp_path)
    assert fastlm.estimate(str(tmp_path), 2, 512, mode="16bit", r=8, device_gib=8) == of_config
    assert str(of_config).startswith("0.0") and "GiB (weights" in str(of_config)


def test_the_largest_batch_and_the_longest_row_fit():
    made = tiny.config("llama", **SHAPE)
    settings = dict(device_gib=0.25, host_memory=1.0, mode="16bit")
    rows, longest = fastlm.max_batch_size(made, 256, **settings), fastlm.max_seq_length(made, **settings)
    assert rows > 1 and fastlm.estimate(made, rows, 256, **settings).fits
    assert not fastlm.estimate(made, rows + 1, 256, **settings).fits
    assert longest > 256 and fastlm.estimate(made, 1, longest, **settings).fits
    assert not fastlm.estimate(made, 1, longest + 1, **settings).fits
    assert fastlm.max_batch_size(made, 256, **dict(settings, device_gib=0.001)) == 0


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda c: fastlm.estimate(c, 0, 8), ValueError, "batch must be a whole number of at least 1, got 0"),
        (lambda c: fastlm.estimate(c, 1, 8, optim="adagrad"), ValueError, "optim must be one of adamw_8bit"),
        (lambda c: fastlm.estimate(c, 1, 8, mode="2bit"), ValueError, "mode must be one of 4bit, 16bit, got '2bit'"),
        (lambda c: fastlm.estimate(c, 1, 8, memory="all"), ValueError, "memory must be one of minimal, balanced"),
        (lambda c: fastlm.estimate(c, 1, 8, host_memory=-1), ValueError, "host_memory must be the GiB"),
        (lambda c: fastlm.estimate(c, 1, 8, device_gib=0), ValueError, "device_gib must be a number of GiB above 0"),
        (lambda c: fastlm.estimate("/nowhere", 1, 8), FileNotFoundError, "there is no directory '/nowhere'"),
        (lambda c: fastlm.estimate(tiny.config("olmo"), 1, 8), ValueError, "no row for 'olmo'"),
        (lambda c: fastlm.estimate(tiny.model("llama"), 1, 8), ValueError, "not patched"),
        (lambda c: fastlm.max_seq_length(c, 1, rank=3), TypeError, "unknown arguments rank"),
        (lambda c: fastlm.set_memory_strategy("all"), ValueError, "got 'all'"),
        (lambda c: fastlm.set_memory_strategy(True), ValueError, "got True"),
    ],
)
def test_what_cannot_be_estimated_is_an_error(call, error, said):
    with pytest.raises(error, match=said):
        call(tiny.config("llama"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_memory_must_be_said():
    with pytest.raises(ValueError, match="device_gib=24"):
        fastlm.max_batch_size(tiny.config("llama"), 128)


def test_advice_names_what_would_fit(monkeypatch):
    from fastlm.memory import prediction

    made = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa", **SHAPE)))
    monkeypatch.setattr(prediction, "_device_bytes", lambda: 200 << 20)
    said = fastlm.memory.advice(made, 64, 2048, "CUDA out of memory.")
    assert said.startswith("CUDA out of memory. 64 x 2048 tokens need") and "What would fit: a batch size of" in said
    rows = int(said.split("a batch size of ")[1].split()[0])
    assert 0 < rows < 64 and fastlm.estimate(made, rows, 2048, memory="minimal").fits
    assert "load with memory='minimal'" in fastlm.memory.advice(made, 1, 64)


# --- strategies


def patched(**settings):
    made = tiny.with_lora(tiny.model("llama", attention="sdpa", num_hidden_layers=4, **SHAPE))
    return fastlm.patch_model(made, strict=True, **settings)


def batch(rows=2, length=256):
    x = tiny.ids(rows, length)
    return dict(input_ids=x, labels=x)


def plans_of(model):
    return binding.state_of(model).memory.choice.plans


def test_a_number_is_kept_to_and_changes_no_bit():
    """A CPU's memory is not planned, but a number of GiB is."""
    free = patched()
    want = tiny.loss_and_gradients(free, batch())
    assert binding.state_of(free).memory.choice is None
    seen = []
    for gib in (0.05, 0.016, 0.011):
        ours = patched(memory=gib)
        got = tiny.loss_and_gradients(ours, batch())
        assert torch.equal(got[0], want[0]) and all(torch.equal(got[1][n], want[1][n]) for n in want[1])
        seen.append(sum(plan.gate_up + plan.qkv + plan.attention + plan.residual for plan in plans_of(ours)))
        assert f"memory: {gib}, of 4 layers keep attention of" in str(fastlm.report(ours))
    assert seen[0] == 16 > seen[1] > seen[2]


def test_a_longer_batch_is_planned_anew():
    ours = patched(memory=0.016)
    tiny.loss_and_gradients(ours, batch(2, 64))
    short = plans_of(ours)
    tiny.loss_and_gradients(ours, batch(2, 256))
    longer = plans_of(ours)
    assert sum(p.gate_up for p in short) > sum(p.gate_up for p in longer)
    tiny.loss_and_gradients(ours, batch(2, 63))
    assert plans_of(ours) == short


def test_a_run_that_cannot_fit_ends_before_it_starts():
    ours = patched(memory=0.01)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"out of memory: this batch of 8192 tokens .* At most (\d+) tokens"
    ) as told:
        tiny.loss_and_gradients(ours, batch(8, 1024))
    most = int(str(told.value).split("At most ")[1].split()[0])
    assert 0 < most < 8192
    assert all(row.calls <= 1 for row in fastlm.report(ours))
    tiny.loss_and_gradients(ours, batch(1, manager._bucket(most) // 2))


def test_what_the_user_said_of_checkpointing_holds():
    memory = manager.Memory()
    # nobody chose a strategy: plans decide where the trainer allows it
    assert memory.is_asked(True) and not memory.is_asked(False)
    memory.choose_strategy("balanced", None)
    assert memory.is_asked(True) and memory.is_asked(False)
    for mode in (True, False):
        memory.checkpointing = mode
        assert not memory.is_asked(True) and not memory.is_asked(False)
    memory.checkpointing = True
    memory.choose_strategy("minimal", None)
    assert memory.is_asked(True)


def test_checkpointing_flags_win(monkeypatch):
    ours = patched(memory=0.02)
    binding.set_checkpointing(ours.get_base_model(), False)
    seen, stock = [], function._forward

    def spy(*args):
        seen.append(args[-1])
        return stock(*args)

    monkeypatch.setattr(function, "_forward", spy)
    tiny.loss_and_gradients(ours, batch())
    binding.set_checkpointing(ours.get_base_model(), True)
    ours.enable_input_require_grads()
    tiny.loss_and_gradients(ours, batch())
    assert seen == [KEEP_ALL] * 4 + [RECOMPUTE_ALL] * 4


def test_a_default_for_models_loaded_later(monkeypatch):
    monkeypatch.setattr(manager, "_default", None)
    before = patched()
    fastlm.set_memory_strategy("minimal")
    after, own = patched(), patched(memory=2)
    found = [binding.state_of(model).memory.strategy for model in (before, after, own)]
    assert found == [None, "minimal", 2.0]
    tiny.loss_and_gradients(after, batch())
    assert plans_of(after) == (SMALLEST,) * 4
    with pytest.raises(ValueError, match="got 'some'"):
        patched(memory="some")


def test_copies_and_pickles_plan_for_themselves():
    ours = patched(memory=0.02, host_memory=3)
    tiny.loss_and_gradients(ours, batch())
    for memory in (
        binding.state_of(copy.deepcopy(ours)).memory,
        pickle.loads(pickle.dumps(binding.state_of(ours).memory)),
    ):
        assert (memory.strategy, memory.host_gib, memory.choice) == (0.02, 3.0, None)
        assert memory is not binding.state_of(ours).memory
    twin = copy.deepcopy(ours)
    tiny.loss_and_gradients(twin, batch())
    assert plans_of(twin) == plans_of(ours)


def test_a_short_memory_plans_smaller_next_time(monkeypatch):
    ours = patched(memory=0.016)
    tiny.loss_and_gradients(ours, batch())
    before = plans_of(ours)
    binding.state_of(ours).memory.rescue.repeated += 1
    tiny.loss_and_gradients(ours, batch())
    assert sum(p.gate_up for p in plans_of(ours)) < sum(p.gate_up for p in before)
    assert "1 passes of layers repeated for lack of memory" in str(fastlm.report(ours))


def test_evaluation_is_not_planned():
    ours = patched(memory=0.02)
    with torch.no_grad():
        ours.eval()(**batch())
    assert binding.state_of(ours).memory.choice is None


def test_the_hosts_budget(tmp_path, monkeypatch):
    assert budget.host_bytes(2.0) == 2 * GIB
    assert budget._available(tmp_path / "none") is None and budget._cgroup_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert budget._cgroup_left(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert budget._cgroup_left(tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert budget._available(tmp_path / "meminfo") == 7 * 1024
    monkeypatch.setattr(budget, "_cgroup_left", lambda: 500)
    monkeypatch.setattr(budget, "_available", lambda: 1000)
    assert budget.host_bytes() == 400


# --- as on a device with memory of its own


@pytest.fixture
def device(monkeypatch):
    """Sets how many MiB a device has left, whose copies to the host come late."""
    from test_block_memory import Late

    from fastlm.block import offload

    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(manager, "CudaCopier", lambda device: Late())

    def left(mib):
        found = budget.DeviceMemory(mib << 20, 0, mib << 20)
        monkeypatch.setattr(budget, "device_memory", lambda device: found)

    return left


def checkpointed(**settings):
    ours = patched(**settings)
    ours.gradient_checkpointing_enable()
    ours.enable_input_require_grads()
    return ours


@pytest.mark.parametrize("strategy", [None, "balanced", "aggressive", "minimal", 0.5])
def test_a_strategy_changes_no_bit(strategy, device, caplog):
    want = tiny.loss_and_gradients(checkpointed(), batch())
    device(2000)
    ours = checkpointed(memory=strategy, host_memory=1)
    with caplog.at_level("INFO", logger="fastlm"):
        for _ in range(2):
            got = tiny.loss_and_gradients(ours, batch())
            assert torch.equal(got[0], want[0]) and all(torch.equal(got[1][n], want[1][n]) for n in want[1])
    # told once
    assert caplog.text.count("memory for up to 512 tokens") == 1 and "GiB predicted beside" in caplog.text
    plans, said = plans_of(ours), str(fastlm.report(ours))
    if strategy == "minimal":
        assert [sorted(plan.offloads) for plan in plans] == [["input"]] * 3 + [[]]
        assert "sent to" in said and "0.00 of it not pinned" in said
    else:
        assert all(plan.gate_up and plan.attention and not plan.offloads for plan in plans)
    binding.release_graphs(ours)
    assert all(store.buffers.n_bytes == 0 for store in binding.state_of(ours).memory._stores.values())


def test_less_is_kept_where_less_is_free(device):
    want, kept = tiny.loss_and_gradients(checkpointed(), batch()), []
    # of which 64 MiB are cuBLAS' and 512 stay free
    for mib in (640, 590, 583):
        device(mib)
        ours = checkpointed(host_memory=1)
        got = tiny.loss_and_gradients(ours, batch())
        assert all(torch.equal(got[1][n], want[1][n]) for n in want[1])
        kept.append(sum(plan.gate_up + plan.qkv + plan.attention + plan.residual for plan in plans_of(ours)))
    assert kept[0] == 16 > kept[1] > kept[2]


def test_without_the_trainers_word_everything_is_kept(device):
    device(640)
    ours = patched()
    tiny.loss_and_gradients(ours, batch())
    assert binding.state_of(ours).memory.choice is None
