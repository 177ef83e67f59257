"""What long rows, a short memory and the host's memory do to a layer: nothing to its values."""

import dataclasses

import pytest
import tiny
import torch

import fastlm
from fastlm import binding
from fastlm.block import attention, function, mlp, offload
from fastlm.block.graphs import StackCall
from fastlm.block.spec import KEEP_ALL, OFFLOADABLE, RECOMPUTE_ALL, SELECTIVE, SMALLEST
from fastlm.forwards import backbone
from fastlm.forwards import layer as layer_forward

PLANS = {"keep": KEEP_ALL, "selective": SELECTIVE, "recompute": RECOMPUTE_ALL, "smallest": SMALLEST}


def patched(name="llama", dtype=torch.float32, **over):
    return fastlm.patch_model(tiny.with_lora(tiny.model(name, dtype, "sdpa", **over), dtype=dtype), strict=True)


def long_batch(rows=3, length=100):
    x = tiny.ids(rows, length)
    return dict(input_ids=x, labels=x)


def assert_equal(got, want):
    assert torch.equal(got[0], want[0]) and set(got[1]) == set(want[1]) and want[1]
    assert all(torch.equal(got[1][n], want[1][n]) for n in want[1])


@pytest.fixture
def tiles(monkeypatch):
    """Tiles of 128 rows, and each key/value head by itself."""
    monkeypatch.setattr(mlp, "WHOLE_BYTES", 0)
    monkeypatch.setattr(mlp, "TILE_BYTES", 1)
    monkeypatch.setattr(attention, "GROUP_BYTES", 1)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3", "cohere", "olmo2", "hunyuan", "granite"])
def test_tiles_change_rounding_at_most(name, monkeypatch, request):
    """Long rows in tiles and by groups of heads: the values of whole ones, and equal to the bit between plans."""
    ours = patched(name)
    want = tiny.loss_and_gradients(ours, long_batch())
    request.getfixturevalue("tiles")
    first = None
    for plan in PLANS.values():
        monkeypatch.setattr(layer_forward, "KEEP_ALL", plan)
        got = tiny.loss_and_gradients(ours, long_batch())
        first = first or got
        assert_equal(got, first)
    assert abs(first[0] - want[0]) <= 1e-6 * want[0]
    worst = max((tiny.relative(first[1][n], want[1][n]), n) for n in want[1])
    assert worst[0] <= 1e-5, worst


def test_tiles_follow_from_the_shape():
    # Llama-3.1-8B in bfloat16: whole up to 4,608 tokens, equal tiles beyond
    assert [mlp.tile_rows(n, 28672, 2) for n in (1, 4096, 4608, 8192, 32768)] == [1, 4096, 4608, 2048, 2304]
    assert mlp.tile_rows(0, 28672, 2) == 0 and mlp.tile_rows(10**6, 28672, 2) % 128 == 0
    assert [attention.n_groups(n, 32, 8, 128) for n in (2048, 16384, 32768, 131072, 10**6)] == [1, 1, 2, 8, 8]
    assert attention.n_groups(10**6, 24, 6, 128) == 6


@pytest.mark.parametrize("plan, n_decoded", [(RECOMPUTE_ALL, 8), (SMALLEST, 11)], ids=["holds", "lets-go"])
def test_weights_are_decoded_again_where_memory_is_dearer(plan, n_decoded, tmp_path, monkeypatch):
    from test_parity_4bit import load

    from fastlm_kernels import _stacked

    pytest.importorskip("bitsandbytes")
    shape = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, initializer_range=0.02)
    tiny.model("llama", **shape).save_pretrained(tmp_path)
    ours = tiny.with_lora(load(tmp_path, torch.float32, "sdpa"), dtype=torch.float32)
    fastlm.patch_model(ours, strict=True)
    want = tiny.loss_and_gradients(ours, long_batch(1, 520))
    decoded, stock = [], _stacked.nf4_decode_stacked
    monkeypatch.setattr(_stacked, "nf4_decode_stacked", lambda weights, out: decoded.append(out) or stock(weights, out))
    monkeypatch.setattr(layer_forward, "KEEP_ALL", plan)
    assert_equal(tiny.loss_and_gradients(ours, long_batch(1, 520)), want)
    assert len(decoded) in (2 * n_decoded, 2 * n_decoded - 1)


def test_weights_of_tiles_are_decoded_once(tiles, tmp_path, monkeypatch):
    from adapted import quantized

    from fastlm_kernels import _stacked

    ours = fastlm.patch_model(tiny.with_lora(quantized(tmp_path), dtype=torch.float32), strict=True)
    decoded, stock = [], _stacked.nf4_decode_stacked

    def spy(weights, out):
        decoded.append(len(weights))
        return stock(weights, out)

    monkeypatch.setattr(_stacked, "nf4_decode_stacked", spy)
    x = tiny.ids(3, 100)
    loss = ours.train()(input_ids=x, labels=x).loss
    n_layers = ours.config.num_hidden_layers
    assert len(decoded) == 4 * n_layers
    loss.backward()
    # nobody reads the gradient of the first layer's input
    assert len(decoded) == 8 * n_layers - 1


def test_a_dropout_mask_is_drawn_for_all_rows(tiles):
    ours = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa"), lora_dropout=0.5), strict=True)
    results = []
    for plan in (False, True):
        if plan:
            ours.gradient_checkpointing_enable()
            ours.enable_input_require_grads()
        torch.manual_seed(3)
        results.append(tiny.loss_and_gradients(ours, long_batch()))
    assert_equal(*results)


# --- the host


class Late:
    """Copies when it is waited for and no earlier, as a busy bus would."""

    pageable_bytes = 0

    def __init__(self):
        self.n_bytes = self.n_copies = 0
        self.waiting = []

    def new_buffer(self, n_bytes):
        self.n_bytes += n_bytes
        return torch.full((n_bytes,), 255, dtype=torch.uint8)

    def copy(self, target, source):
        ticket = [target, source]
        self.waiting.append(ticket)
        return ticket

    def wait(self, ticket):
        # in the order in which they were asked for
        while ticket:
            target, source = self.waiting[0]
            # a device's copy would have counted as a change when it was asked for
            target.data.copy_(source)
            self.waiting.pop(0).clear()
            self.n_copies += 1

    def finish(self):
        while self.waiting:
            self.wait(self.waiting[-1])


def offloading(monkeypatch, plans, limit=1 << 30, copier=None, ahead=2):
    """The store that calls of all models use from now on, and their plans."""
    store = offload.HostStore(copier or Late(), limit, ahead)
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(
        backbone, "StackCall", lambda n_unwatched, *_: StackCall(n_unwatched, plans, lambda device: store)
    )
    return store


def on_host(plan, *fields):
    return dataclasses.replace(plan, offloads=frozenset(fields))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3"])
def test_the_host_changes_no_bit(name, ahead, monkeypatch):
    ours = patched(name, num_hidden_layers=4, layer_types=None)
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    for plan in (
        on_host(RECOMPUTE_ALL, "input"),
        on_host(KEEP_ALL, *OFFLOADABLE),
        on_host(SELECTIVE, "input", "attention"),
    ):
        store = offloading(monkeypatch, [plan] * 3 + [KEEP_ALL], ahead=ahead)
        for _ in range(3):
            assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
        # buffers serve the next step
        n_bytes = store.buffers.n_bytes
        assert store.sent_bytes and n_bytes == store.copier.n_bytes and not store.refused
        assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
        assert store.copier.n_bytes == n_bytes


def test_tensors_are_under_way_before_their_layer_asks(monkeypatch):
    """Also below a layer that keeps all on the device, where the backward begins."""
    ours = patched(num_hidden_layers=5)
    store, asked, backward = (
        offloading(monkeypatch, [on_host(RECOMPUTE_ALL, "input")] * 4 + [KEEP_ALL]),
        [],
        function._backward,
    )

    def spy(ctx, dy):
        layer = ctx.layer
        asked.append(bool(layer.parcel._arrived) or not layer.parcel._sent)
        return backward(ctx, dy)

    monkeypatch.setattr(function, "_backward", spy)
    tiny.loss_and_gradients(ours, tiny.padded_batch())
    assert asked == [True] * 5 and store.copier.n_copies == 8


def test_gradients_from_the_host_may_be_taken_twice_and_accumulate(monkeypatch):
    ours = patched()
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    offloading(monkeypatch, [on_host(KEEP_ALL, *OFFLOADABLE)] * 2)
    ours.train().zero_grad()
    losses = [ours(**tiny.padded_batch()).loss for _ in range(2)]
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert all(torch.allclose(grads[n], 3 * want[1][n], rtol=1e-6) for n in want[1])


def test_a_full_host_leaves_tensors_on_the_device(monkeypatch, caplog):
    ours = patched()
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    store = offloading(monkeypatch, [on_host(KEEP_ALL, *OFFLOADABLE)] * 2, limit=20000)
    assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
    assert store.refused and 0 < store.buffers.peak_bytes <= 20000
    assert "more than the budget of 20000" in caplog.text


def test_buffers_give_way_to_longer_rows(monkeypatch):
    store = offloading(monkeypatch, [on_host(RECOMPUTE_ALL, "input")] * 2)
    ours = patched()
    sizes = []
    for length in (40, 200, 40):
        tiny.loss_and_gradients(ours, long_batch(2, length))
        sizes.append(store.buffers.n_bytes)
    assert sizes[0] < sizes[1] == store.buffers.peak_bytes <= 4 * 200 * 64 * 4 + sizes[0]
    store.buffers.clear()
    assert store.buffers.n_bytes == 0


def test_hooks_on_saved_tensors_see_the_devices(monkeypatch):
    ours = patched()
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    store = offloading(monkeypatch, [on_host(KEEP_ALL, *OFFLOADABLE)] * 2)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
    assert not store.sent_bytes


def test_writing_to_what_travels_is_an_error(monkeypatch):
    ours = patched(num_hidden_layers=3)
    offloading(monkeypatch, [on_host(RECOMPUTE_ALL, "input")] * 3)
    seen = []
    layers = ours.base_model.model.model.layers
    layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))

    def write(module, args):
        seen[0].detach().mul_(2.0)

    layers[2].register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tiny.loss_and_gradients(ours, tiny.padded_batch())


# --- out of memory


class Short:
    """Raises out of memory at the given calls of a function, counted from 0."""

    def __init__(self, monkeypatch, module, name, calls):
        self.stock, self.calls, self.n = getattr(module, name), set(calls), 0
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.n += 1
        if self.n - 1 in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.stock(*args, **kwargs)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("calls", [[0], [1, 2], [0, 1, 4]], ids=str)
@pytest.mark.parametrize("where", ["mlp_forward", "mlp_backward", "attend_bwd", "heads_bwd"])
def test_a_layer_that_is_short_of_memory_runs_again(where, calls, plan, monkeypatch):
    ours = patched("qwen3", num_hidden_layers=3)
    monkeypatch.setattr(layer_forward, "KEEP_ALL", PLANS[plan])
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    rescue = binding.state_of(ours).memory.rescue
    assert not rescue.repeated
    short = Short(monkeypatch, function, where, calls)
    assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
    assert short.n == 3 + len(calls) and rescue.repeated == len(calls)
    # two failures in a row cost what other layers keep
    assert (rescue.dropped_bytes > 0) == (
        len(calls) > 1 and plan in ("keep", "selective") and (where != "mlp_forward" or calls[0] > 0)
    )


def test_an_adapters_dropout_is_drawn_once(monkeypatch):
    ours = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa"), lora_dropout=0.5), strict=True)
    results = []
    for calls in ([], [0, 1], [1]):
        torch.manual_seed(3)
        with monkeypatch.context() as patch:
            Short(patch, function, "mlp_backward" if len(calls) == 1 else "mlp_forward", calls)
            results.append(tiny.loss_and_gradients(ours, tiny.padded_batch()))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_what_is_too_much_is_an_error(monkeypatch):
    ours = patched()
    binding.state_of(ours).memory.rescue.explain = lambda message: f"{message} Take less."
    Short(monkeypatch, function, "mlp_forward", range(9))
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB. Take less."):
        tiny.loss_and_gradients(ours, tiny.padded_batch())


def test_a_short_memory_and_the_host(monkeypatch):
    ours = patched(num_hidden_layers=4)
    want = tiny.loss_and_gradients(ours, tiny.padded_batch())
    offloading(monkeypatch, [on_host(SELECTIVE, "input", "qkv")] * 4)
    for where, calls in (("mlp_forward", [2, 3]), ("mlp_backward", [1, 2])):
        with monkeypatch.context() as patch:
            Short(patch, function, where, calls)
            assert_equal(tiny.loss_and_gradients(ours, tiny.padded_batch()), want)
