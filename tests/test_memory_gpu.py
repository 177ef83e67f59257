"""Memory on a GPU: bits are equal whatever is kept and where, budgets hold, and predictions are what is measured."""

import dataclasses

import pytest
import tiny
import torch

import fastlm
from fastlm import binding
from fastlm.block import attention, mlp
from fastlm.block.spec import KEEP_ALL, OFFLOADABLE, RECOMPUTE_ALL, SELECTIVE, SMALLEST
from fastlm.memory import manager

pytestmark = pytest.mark.gpu
GIB = 1 << 30
SHAPE = dict(
    hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=6,
    vocab_size=32000, max_position_embeddings=65536,
)  # fmt: skip


def on_host(plan, *names):
    return dataclasses.replace(plan, offloads=frozenset(names))


PLANS = {
    "selective": SELECTIVE,
    "recompute": RECOMPUTE_ALL,
    "smallest": SMALLEST,
    "offload-inputs": on_host(RECOMPUTE_ALL, "input"),
    "offload-all": on_host(KEEP_ALL, *OFFLOADABLE),
}


def on_gpu(name="llama", **settings):
    over = dict(SHAPE, layer_types=None, initializer_range=0.02)
    made = tiny.with_lora(tiny.model(name, torch.bfloat16, "sdpa", **over).cuda(), dtype=torch.bfloat16, r=16)
    return fastlm.patch_model(made, strict=True, **settings).train()


def batch(rows=2, length=1024, seed=0):
    x = tiny.ids(rows, length, seed).cuda()
    return dict(input_ids=x, labels=x, use_cache=False)


def with_plan(monkeypatch, plan, n=6):
    monkeypatch.setattr(manager.Memory, "is_asked", lambda self, recomputes: plan is not None)
    monkeypatch.setattr(manager.Memory, "plans", lambda self, *args: (plan,) * (n - 1) + (KEEP_ALL,))


def assert_equal(got, want, name):
    assert torch.equal(got[0], want[0]), name
    assert want[1] and all(torch.equal(got[1][n], want[1][n]) for n in want[1]), name


@pytest.mark.parametrize("is_long", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_plans_and_the_host_change_no_bit(name, is_long, monkeypatch):
    if is_long:
        monkeypatch.setattr(mlp, "WHOLE_BYTES", 0)
        monkeypatch.setattr(mlp, "TILE_BYTES", 1 << 22)
        monkeypatch.setattr(attention, "GROUP_BYTES", 1)
    made = on_gpu(name, deterministic=True, cuda_graphs=False)
    with_plan(monkeypatch, None)
    want, again = (tiny.loss_and_gradients(made, batch()) for _ in range(2))
    assert_equal(again, want, "again")
    for plan_name, plan in PLANS.items():
        with_plan(monkeypatch, plan)
        for _ in range(3):
            assert_equal(tiny.loss_and_gradients(made, batch()), want, plan_name)
    store = binding.state_of(made).memory.host(torch.device("cuda", 0))
    assert store.sent_bytes and not store.refused
    assert all(b.is_pinned() for b in store.buffers._free)


def test_tiles_differ_no_more_than_runs_of_stock(monkeypatch):
    """Adapters' gradients of tiles are summed in float32."""
    made = on_gpu(deterministic=True, cuda_graphs=False)
    want = tiny.loss_and_gradients(made, batch(1, 4096))
    monkeypatch.setattr(mlp, "WHOLE_BYTES", 0)
    monkeypatch.setattr(mlp, "TILE_BYTES", 1 << 23)
    got = tiny.loss_and_gradients(made, batch(1, 4096))
    stock = fastlm.revert(on_gpu())
    stock.config._attn_implementation = "sdpa"
    exact = tiny.loss_and_gradients(stock, batch(1, 4096))
    tiled, whole = ({n: tiny.relative(g[n], exact[1][n]) for n in g} for g in (got[1], want[1]))
    assert max(tiled[n] / max(whole[n], 1e-4) for n in tiled) <= 1.2


def peak_of_step(made, inputs):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    made(**inputs).loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("plan", ["keep", "recompute", "minimal"])
@pytest.mark.parametrize("shape", [(2, 2048), (1, 16384), (1, 40000)], ids=str)
def test_peaks_are_predicted(plan, shape):
    made = on_gpu(memory="minimal" if plan == "minimal" else None, cuda_graphs=False)
    if plan != "minimal":
        binding.set_checkpointing(made.get_base_model(), plan == "recompute")
        made.enable_input_require_grads()
    peak_of_step(made, batch(*shape))
    measured = peak_of_step(made, batch(*shape))
    found = fastlm.estimate(made, *shape, optim="sgd", use_gradient_checkpointing="auto")
    assert abs(found.total - measured) <= 0.05 * measured, (measured / GIB, str(found))


@pytest.mark.parametrize("gib", [1.0, 2.0, 4.0])
def test_a_number_is_never_exceeded(gib):
    made = on_gpu(memory=gib, cuda_graphs=False)
    want = tiny.loss_and_gradients(on_gpu(cuda_graphs=False), batch(2, 4096))[0]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    peak_of_step(made, batch(2, 4096))
    made.zero_grad()
    assert peak_of_step(made, batch(2, 4096)) - before <= gib * GIB
    assert torch.equal(tiny.loss_and_gradients(made, batch(2, 4096))[0], want)


def test_a_real_shortage_is_handled_in_the_layer(monkeypatch):
    """More is kept than the device may hold: layers give up what they kept, and nothing else is repeated."""
    made = on_gpu(deterministic=True, cuda_graphs=False)
    with_plan(monkeypatch, None)
    want = tiny.loss_and_gradients(made, batch(2, 4096))
    made.zero_grad()
    keep = peak_of_step(made, batch(2, 4096))
    made.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((0.75 * keep) / total)
    try:
        got = tiny.loss_and_gradients(made, batch(2, 4096))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_equal(got, want, "short")
    rescue = binding.state_of(made).memory.rescue
    assert rescue.repeated and rescue.dropped_bytes
    assert "repeated for lack of memory" in str(fastlm.report(made))


def test_a_batch_that_cannot_fit_is_refused_before_it_runs():
    made = on_gpu(memory="balanced", cuda_graphs=False)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="tokens a micro-batch would fit"):
            made(**batch(4, 16384))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_long_runs_do_not_grow():
    made = on_gpu(memory="balanced")
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=1e-3)
    reserved = []
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        rows, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 5), (64, 1024)))
        made(**batch(rows, length, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_allocated())
    assert max(reserved[200:]) <= max(reserved[:100]) * 1.02
