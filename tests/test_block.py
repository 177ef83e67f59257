"""The decoder layer as one function: plans, what is kept and where, which gradients are made."""

import itertools
import weakref

import pytest
import tiny
import torch

import fastlm
from fastlm.block import function
from fastlm.block.spec import KEEP_ALL, RECOMPUTE_ALL, MemoryPlan
from fastlm.forwards import layer as layer_forward
from fastlm.patching import patch_of

PLANS = [MemoryPlan(*flags) for flags in itertools.product((False, True), repeat=5)]


def patched(name, dtype=torch.float32, **over):
    return fastlm.patch_model(tiny.with_lora(tiny.model(name, dtype, "sdpa", **over), dtype=dtype), strict=True)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3", "cohere", "olmo2", "hunyuan", "granite"])
def test_plans_change_no_bit(name, monkeypatch):
    """Whatever a layer keeps, loss and gradients are equal to the bit."""
    ours, batch = patched(name), tiny.padded_batch()
    want = None
    # the plan of norms before the output matters only where there are such norms
    for plan in PLANS if ours.config.model_type == "gemma3_text" else PLANS[::2]:
        monkeypatch.setattr(layer_forward, "KEEP_ALL", plan)
        loss, got = tiny.loss_and_gradients(ours, batch)
        want = want or (loss, got)
        assert torch.equal(loss, want[0]), plan
        assert all(torch.equal(got[n], want[1][n]) for n in want[1]), plan


class _Bytes:
    """Bytes of distinct storages that autograd saves."""

    def __init__(self):
        self.storages = {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def saved_bytes(ours, batch, plan, monkeypatch):
    monkeypatch.setattr(layer_forward, "KEEP_ALL", plan)
    seen = _Bytes()
    with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda t: t):
        loss = ours.train()(**batch).loss
    parameters = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    del loss
    return sum(size for start, size in seen.storages.items() if start not in parameters)


def test_a_plan_keeps_what_it_says(monkeypatch):
    """Each kept tensor costs its own size and no more, seen by the hooks that offload saved tensors."""
    ours = patched("llama", num_hidden_layers=3)
    x = tiny.ids(2, 40)
    batch, config = dict(input_ids=x, labels=x), ours.config
    tokens, layers, size = x.numel(), config.num_hidden_layers, 4
    head = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    base = saved_bytes(ours, batch, RECOMPUTE_ALL, monkeypatch)
    lows = {"qkv": 12, "residual": 4, "gate_up": 8 + 4}
    costs = {
        "qkv": heads * head,
        "attention": config.hidden_size + config.num_attention_heads,
        "residual": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
    }
    for name, width in costs.items():
        plan = MemoryPlan(**{field: field == name for field in ("qkv", "attention", "residual", "gate_up", "down")})
        more = saved_bytes(ours, batch, plan, monkeypatch) - base
        assert more == layers * tokens * (width + lows.get(name, 0)) * size, name


def test_offloading_saved_tensors_changes_no_bit():
    ours, batch = patched("qwen3"), tiny.packed_batch()
    want = tiny.loss_and_gradients(ours, batch)
    moved = []

    def pack(tensor):
        moved.append(tensor.numel())
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        got = tiny.loss_and_gradients(ours, batch)
    assert moved and torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][n], want[1][n]) for n in want[1])


def test_a_frozen_prefix_runs_forward_only(monkeypatch):
    """Adapters in the top half and a trainer's defaults: lower layers run once, without a backward."""
    made = tiny.with_lora(tiny.model("llama", attention="sdpa", num_hidden_layers=4), layers_to_transform=[2, 3])
    stock = tiny.with_lora(tiny.model("llama", num_hidden_layers=4), layers_to_transform=[2, 3])
    ours = fastlm.patch_model(made, strict=True)
    for model in (stock, ours):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    want_loss, want = tiny.loss_and_gradients(stock, tiny.padded_batch())
    backward, seen = function.BlockFunction.backward, []

    def counted(ctx, dy):
        seen.append(ctx.needs_input_grad[0])
        return backward(ctx, dy)

    monkeypatch.setattr(function.BlockFunction, "backward", staticmethod(counted))
    loss, got = tiny.loss_and_gradients(ours, tiny.padded_batch())
    assert seen == [True, False]
    assert abs(loss - want_loss) <= 1e-5 * want_loss and set(got) == set(want)
    assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)
    assert [patch_of(layer).calls for layer in ours.base_model.model.model.layers] == [1, 1, 1, 1]


WATCHERS = {
    "hidden-states": lambda base, read: None,
    "hook": lambda base, read: base.get_input_embeddings().register_forward_hook(lambda m, args, out: read(out)),
    "backward-hook": lambda base, read: base.get_input_embeddings().register_full_backward_hook(
        lambda m, dx, dy: read(dy[0], 0)
    ),
    "layer": lambda base, read: base.model.layers[0].register_full_backward_hook(lambda m, dx, dy: read(dx[0], 0)),
}


@pytest.mark.parametrize("kind", WATCHERS)
def test_whoever_watches_the_embeddings_sees_their_gradient(kind):
    """Below frozen layers too: saliency by returned hidden states, or by a hook."""
    made = [tiny.with_lora(tiny.model("llama", attention=a), layers_to_transform=[1]) for a in ("eager", "sdpa")]
    fastlm.patch_model(made[1], strict=True)
    gradients = []
    for model in made:
        seen = []

        def read(tensor, is_forward=True, seen=seen):
            tensor.register_hook(seen.append) if is_forward else seen.append(tensor)

        model.enable_input_require_grads()
        WATCHERS[kind](model.get_base_model(), read)
        out = model.train()(**tiny.padded_batch(), output_hidden_states=kind == "hidden-states" or None)
        if kind == "hidden-states":
            assert all(h.requires_grad for h in out.hidden_states)
            read(out.hidden_states[0])
        out.loss.backward()
        gradients.append(seen)
    assert len(gradients[0]) == len(gradients[1]) == 1 and gradients[0][0].any()
    assert tiny.relative(gradients[1][0], gradients[0][0]) <= 1e-5


def test_given_embeddings_get_their_gradient():
    stock, ours = tiny.with_lora(tiny.model("llama")), patched("llama")
    gradients = []
    for made in (stock, ours):
        x = tiny.ids(2, 40)
        embeds = made.get_input_embeddings()(x).detach().requires_grad_()
        made.train()(inputs_embeds=embeds, labels=x).loss.backward()
        gradients.append(embeds.grad)
    assert tiny.relative(gradients[1], gradients[0]) <= 1e-5 and gradients[0].any()


def test_a_second_derivative_is_an_error():
    ours = patched("llama")
    loss = ours.train()(**tiny.padded_batch()).loss
    parameters = [p for p in ours.parameters() if p.requires_grad]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, parameters, create_graph=True)


def test_keep_and_recompute_all_are_named_plans():
    assert PLANS[-1] == KEEP_ALL and PLANS[0] == RECOMPUTE_ALL


@pytest.mark.parametrize("name, rounding", [("llama", "stock"), ("llama", "once"), ("llama-biases", "once")])
def test_adapters_may_be_added_before_the_rounding(name, rounding, tmp_path):
    """Layers so wide, and so many tokens, that adapters ride in the base GEMM: the values of stock in float32."""
    from test_parity_4bit import load

    pytest.importorskip("bitsandbytes")
    shape = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, initializer_range=0.02)
    tiny.model(name, **shape).save_pretrained(tmp_path)
    x = tiny.ids(1, 520)
    batch = dict(input_ids=x, labels=x)
    stock, ours = (tiny.with_lora(load(tmp_path, torch.float32, a), dtype=torch.float32) for a in ("eager", "sdpa"))
    fastlm.patch_model(ours, strict=True, lora_rounding=rounding)
    want_loss, want = tiny.loss_and_gradients(stock, batch)
    for recomputes in (False, True):
        if recomputes:
            ours.gradient_checkpointing_enable()
            ours.enable_input_require_grads()
        loss, got = tiny.loss_and_gradients(ours, batch)
        assert abs(loss - want_loss) <= 1e-5 * want_loss
        worst = max((tiny.relative(got[n], want[n]), n) for n in want)
        assert worst[0] <= 1e-5, worst


def test_a_rounding_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="'stock' or 'once', got 'never'"):
        fastlm.patch_model(tiny.model("llama", attention="sdpa"), lora_rounding="never")


@pytest.mark.parametrize("name", ["cohere", "ernie4_5", "olmo2", "olmo3"])
def test_rotary_tables_are_made_once_a_forward(name, monkeypatch):
    """All layers of a kind read one pair of tables, which nobody holds when the forward is over."""
    ours, seen, stock = patched(name, torch.bfloat16, num_hidden_layers=4, layer_types=None), [], function.heads_fwd

    def spy(packed, cos, sin, *args, **kwargs):
        seen.append((weakref.ref(cos), cos.data_ptr(), sin.data_ptr(), cos.dtype))
        return stock(packed, cos, sin, *args, **kwargs)

    monkeypatch.setattr(function, "heads_fwd", spy)
    output = ours.train()(input_ids=tiny.ids(2, 40), labels=tiny.ids(2, 40))
    n_kinds = len(set(getattr(ours.config, "layer_types", None) or ["all"]))
    assert len(seen) == 4 and len({row[1:3] for row in seen}) == n_kinds
    assert {dtype for *_, dtype in seen} == {torch.float32}
    del output
    assert all(table() is None for table, *_ in seen)
