"""Uses that nobody plans for, each against the stock model: odd inputs, hooks, compilers, caches, adapters of every kind."""

import concurrent.futures
import copy

import peft
import pytest
import tiny
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig
from transformers import StaticCache

import fastlm

torch.set_num_threads(1)
EXACT = 1e-5
X = tiny.ids(2, 21)
BATCH = dict(input_ids=X, labels=X)
GREEDY = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=3)


def pair(name="llama", lora=True, dtype=torch.float32, attention="eager", **over):
    """The stock model, and a patched one with the same weights."""
    stock, ours = tiny.model(name, dtype, attention, **over), tiny.model(name, dtype, "sdpa", **over)
    if lora:
        stock, ours = tiny.with_lora(stock), tiny.with_lora(ours)
    return stock, fastlm.patch_model(ours)


def step(model, batch=BATCH, **call):
    loss, gradients = tiny.loss_and_gradients(model, batch, **call)
    return [loss, *(gradients[name] for name in sorted(gradients))]


def logits(model, **batch):
    with torch.no_grad():
        return model(**batch).logits


def same(call, models, tolerance=EXACT):
    """`call(model)` gives both models the same tensors."""
    want, got = ([x] if isinstance(x, torch.Tensor) else list(x) for x in map(call, models))
    assert len(want) == len(got) and want
    for theirs, mine in zip(want, got, strict=True):
        assert theirs.shape == mine.shape
        # a gradient that is exactly zero has no relative error
        assert tiny.relative(mine.detach(), theirs.detach()) <= tolerance or (mine - theirs).abs().max() <= 1e-7


# --- inputs ----------------------------------------------------------------------------------------------------------

ONES = torch.ones_like(X)
LEFT, HOLE = ONES.clone(), ONES.clone()
LEFT[0, :5], HOLE[0, 3:9] = 0, 0
CAUSAL = torch.ones(21, 21).tril().bool().expand(2, 1, 21, 21).clone()
BLOCKS = CAUSAL.clone()
BLOCKS[:, :, 10:, :10] = False


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_attention_masks(name):
    models = pair(name)
    for mask in (ONES.bool(), ONES.float(), LEFT, HOLE, torch.ones(2, 30, dtype=torch.long)):
        kept = mask[:, :21].bool()
        same(lambda m: logits(m, input_ids=X, attention_mask=mask)[kept], models)  # noqa: B023
    # shorter than the rows: what it does not speak of is padding
    same(lambda m: logits(m, input_ids=X, attention_mask=ONES[:, :10])[:, :10], models)
    additive = torch.zeros(2, 1, 21, 21).masked_fill(~BLOCKS, torch.finfo(torch.float32).min)
    same(lambda m: step(m, dict(BATCH, attention_mask=additive)), models)
    # eager attention adds masks of bools to its scores
    models = pair(name, attention="sdpa")
    for mask in (CAUSAL, BLOCKS, BLOCKS[:1], BLOCKS.expand(2, 4, -1, -1)):
        same(lambda m: logits(m, input_ids=X, attention_mask=mask), models)  # noqa: B023


POSITIONS = {
    "gaps": [0, 1, 2, 10, 11, 12, 40, 41, 60, 61, 62, *range(100, 110)],
    "restarts": [*range(9), *range(12)],
    "both": [0, 1, 2, 5, 6, 7, 0, 1, 4, 5, 6, *range(10)],
    "constant": [0] * 21,
    "shifted": list(range(5, 26)),
}


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions(name, kind):
    models, one = pair(name), torch.tensor([POSITIONS[kind]])
    for positions in (one, one.expand(2, -1)):
        same(lambda m: logits(m, input_ids=X, position_ids=positions, use_cache=False), models)  # noqa: B023
        same(lambda m: step(m, dict(BATCH, position_ids=positions), use_cache=False), models)  # noqa: B023
        for mask in (ONES, LEFT):
            call = dict(input_ids=X, position_ids=positions, attention_mask=mask)
            same(lambda m: logits(m, **call)[mask.bool()], models)  # noqa: B023
        if kind in ("gaps", "shifted"):
            # with a cache, transformers takes positions as they come
            same(lambda m: logits(m, input_ids=X, position_ids=positions), models)  # noqa: B023


def test_odd_shapes_and_dtypes():
    models = pair()
    same(lambda m: step(m, dict(input_ids=X[:, :2], labels=X[:, :2])), models)
    same(lambda m: step(m, dict(input_ids=X.int(), labels=X)), models)
    same(lambda m: step(m, dict(input_ids=X.t().contiguous().t(), labels=X)), models)
    same(lambda m: step(m, dict(BATCH, shift_labels=torch.nn.functional.pad(X[:, 1:], (0, 1), value=-100))), models)
    for dtype in (torch.int32, torch.int16):
        # stock refuses them; the numbers are those of int64
        want, got = step(models[0]), step(models[1], dict(input_ids=X, labels=X.to(dtype)))
        assert all(tiny.relative(a, b) <= EXACT for a, b in zip(got, want, strict=True))
    for empty in (X[:0], X[:, :0]):
        for made in models:
            with pytest.raises((RuntimeError, IndexError)):
                made(input_ids=empty)
    for labels, error in ((X.float(), TypeError), (X + 200, ValueError), (X[:, :9], ValueError)):
        with pytest.raises(error, match="labels must"):
            models[1].train()(input_ids=X, labels=labels)
    loss, gradients = tiny.loss_and_gradients(models[1], dict(input_ids=X[:, :1], labels=X[:, :1]))
    assert loss == 0 and not any(g.any() for g in gradients.values())


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_gradients_reach_embeddings_that_are_given(lora):
    def call(model):
        embeds = model.get_input_embeddings()(X).detach().requires_grad_()
        loss = model.train()(inputs_embeds=embeds, labels=X).loss
        loss.backward()
        return loss.detach(), embeds.grad

    same(call, pair(lora=lora))


def test_what_is_asked_for_is_returned():
    models = pair()
    same(lambda m: m(input_ids=X, output_hidden_states=True).hidden_states, models)
    same(lambda m: m.train()(**BATCH, output_hidden_states=True).hidden_states, models)
    same(lambda m: logits(m, input_ids=X, logits_to_keep=torch.tensor([3, 5])), models)
    # scores are eager attention's alone: like SDPA, ours has none to return
    assert models[1](input_ids=X, output_attentions=True).attentions == ()
    same(lambda m: m.eval()(input_ids=X, output_attentions=True).attentions, pair(attention="eager")[:1] * 2)
    with pytest.raises(ValueError, match="set to fastlm. Please set it to 'eager'"):
        models[1].get_base_model().config.output_attentions = True


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32], ids=["bf16-base", "autocast"])
def test_adapters_in_float32_are_no_worse_than_stock(base):
    """Over a bfloat16 base outside autocast, and over a float32 base inside it: at most 1.1 times stock's error."""
    stock, ours = pair(dtype=base)
    exact = tiny.with_lora(tiny.model("llama", base).float())
    assert {p.dtype for n, p in ours.named_parameters() if "lora_" in n} == {torch.float32}
    errors = [0.0, 0.0]
    for seed in range(4):
        batch = dict(input_ids=tiny.ids(2, 24, seed), labels=tiny.ids(2, 24, seed))
        truth = torch.cat([g.flatten() for g in step(exact, batch)])
        for i, made in enumerate((stock, ours)):
            with torch.autocast("cpu", torch.bfloat16, enabled=base is torch.float32):
                got = torch.cat([g.float().flatten() for g in step(made, batch)])
            errors[i] += tiny.relative(got, truth)
    assert errors[1] <= 1.1 * errors[0], errors


# --- hooks, modes and compilers --------------------------------------------------------------------------------------


class Louder(ModelHook):
    def post_forward(self, module, output):
        return output * 1.5 if isinstance(output, torch.Tensor) else output


def place(model, where):
    base = model.get_base_model()
    layer = base.model.layers[1]
    places = dict(
        root=base, backbone=base.model, layer=layer, attention=layer.self_attn, mlp=layer.mlp, head=base.lm_head
    )
    return {**places, "norm": layer.input_layernorm, "projection": layer.self_attn.q_proj}[where]


@pytest.mark.parametrize("where", ["root", "backbone", "layer", "attention", "mlp", "norm", "projection", "head"])
def test_hooks(where):
    def run(model):
        return [*step(model), logits(model.eval(), input_ids=X)]

    before = [tiny.with_lora(tiny.model("llama", attention=attention)) for attention in ("eager", "sdpa")]
    for made in before:
        add_hook_to_module(place(made, where), Louder())
    fastlm.patch_model(before[1])
    after = pair()
    for made in after:
        add_hook_to_module(place(made, where), Louder())
    torch_hooks = pair()
    for made in torch_hooks:
        place(made, where).register_forward_hook(lambda _, args, out: out * 1.5 if torch.is_tensor(out) else None)
    for models in (before, after, torch_hooks):
        same(run, models)
        fastlm.revert(models[1])
        same(run, models)
    for models in (before, after):
        fastlm.patch_model(models[1])
        for made in models:
            remove_hook_from_module(place(made, where))
        same(run, models)


def test_gradient_hooks():
    models = pair()
    for made in models:
        place(made, "layer").register_full_backward_hook(lambda _, dx, dy: tuple(g * 2 for g in dx))
        dict(made.named_parameters())[
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
        ].register_hook(lambda g: g * 3)
    same(step, models)


def test_modes_without_gradients():
    models = pair()
    for checkpointing in (False, True):
        for made in models:
            made.gradient_checkpointing_enable() if checkpointing else None
        for mode in (torch.inference_mode, torch.no_grad):
            for training in (False, True):

                def call(model):
                    with mode():  # noqa: B023
                        out = model.train(training)(**BATCH)  # noqa: B023
                        return out.loss.clone(), out.logits.clone()

                same(call, models)


def test_compiled_calls():
    stock, ours = pair(num_hidden_layers=1)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager")
    for got, want in zip(step(compiled), step(stock), strict=True):
        assert tiny.relative(got, want) <= EXACT


def test_functional_calls():
    same(lambda m: torch.func.functional_call(m, dict(m.named_parameters()), kwargs=BATCH).loss.detach(), pair())


def test_threads_share_a_model():
    stock, ours = pair()
    rows = [tiny.ids(2, 33 + k, seed=k) for k in range(6)]
    want = [logits(stock, input_ids=row) for row in rows]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda row: logits(ours, input_ids=row), rows * 3))
    assert all(tiny.relative(got[i], want[i % 6]) <= EXACT for i in range(18))


# --- generation ------------------------------------------------------------------------------------------------------

PADDED = {k: v for k, v in tiny.padded_batch("left").items() if k != "labels"}


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_beams=3),
        dict(do_sample=True, temperature=0.7, top_k=20),
        dict(use_cache=False),
        dict(cache_implementation="static", disable_compile=True),
        dict(prefill_chunk_size=8),
        dict(max_new_tokens=40),
    ],
    ids=lambda s: next(iter(s)),
)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_generation(name, settings):
    def call(model):
        torch.manual_seed(0)
        rows = [PADDED] if "prefill_chunk_size" not in settings else []
        rows.append(dict(input_ids=tiny.ids(2, 40), attention_mask=torch.ones(2, 40, dtype=torch.long)))
        return [model.eval().generate(**batch, **{**GREEDY, **settings}).float() for batch in rows]

    same(call, pair(name), tolerance=0)


def test_speculative_generation():
    models, one = pair(), dict(input_ids=tiny.ids(1, 9), attention_mask=torch.ones(1, 9, dtype=torch.long))
    small = fastlm.patch_model(tiny.model("llama", attention="sdpa", seed=7))
    same(lambda m: m.generate(**one, **GREEDY, assistant_model=small).float(), models, tolerance=0)
    same(lambda m: m.generate(tiny.ids(1, 8).repeat(1, 4), **GREEDY, prompt_lookup_num_tokens=3).float(), models, 0)
    embeds = dict(attention_mask=PADDED["attention_mask"], **GREEDY)
    same(lambda m: m.generate(inputs_embeds=m.get_input_embeddings()(PADDED["input_ids"]), **embeds).float(), models, 0)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_row_in_pieces_through_a_cache(name, is_padded):
    x, mask = tiny.ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0

    def call(model, cache=None):
        out, seen = [], 0
        for end in (23, 38, 39, 40):
            call_mask = dict(attention_mask=mask[:, :end]) if is_padded else {}
            piece = model(input_ids=x[:, seen:end], past_key_values=cache, use_cache=True, **call_mask)
            out.append(piece.logits[1] if seen == 0 else piece.logits)
            cache, seen = piece.past_key_values, end
        return out

    models = pair(name)
    same(call, models)
    static = StaticCache(config=models[1].get_base_model().config, max_cache_len=64)
    with torch.no_grad():
        for got, want in zip(call(models[1], static), call(models[0]), strict=True):
            assert tiny.relative(got, want) <= EXACT


def test_gradients_through_a_cache():
    def call(model):
        model.train()
        first = model(input_ids=X[:, :9], use_cache=True)
        loss = model(input_ids=X[:, 9:], past_key_values=first.past_key_values, labels=X[:, 9:]).loss
        loss.backward()
        return [loss.detach(), *(p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None)]

    same(call, pair())


# --- adapters --------------------------------------------------------------------------------------------------------

ALL, TASK = tiny.LINEAR, dict(task_type="CAUSAL_LM")
KINDS = {
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32, **TASK),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "loha": peft.LoHaConfig(target_modules=ALL, r=4, **TASK),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], **TASK),
    "adaption-prompt": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TASK),
    "embeddings": LoraConfig(target_modules=[*ALL, "embed_tokens", "lm_head"], r=4, **TASK),
    "saved": LoraConfig(target_modules=ALL, r=4, modules_to_save=["embed_tokens", "lm_head"], **TASK),
    "saved-norms": LoraConfig(target_modules=ALL, r=4, modules_to_save=["norm", "input_layernorm"], **TASK),
    "rows": LoraConfig(target_modules=ALL, r=4, trainable_token_indices=[5, 9], **TASK),
    "replicated": LoraConfig(target_modules=ALL, r=4, layer_replication=[(0, 2), (1, 2)], **TASK),
    "dora": LoraConfig(target_modules=ALL, r=4, use_dora=True, **TASK),
}


TIED = [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("embeddings", "saved", "rows")]


@pytest.mark.parametrize(("kind", "is_tied"), TIED, ids=[kind + "-tied" * is_tied for kind, is_tied in TIED])
def test_every_kind_of_adapter(kind, is_tied):
    models = []
    for attention in ("eager", "sdpa"):
        torch.manual_seed(5)
        made = peft.get_peft_model(
            tiny.model("llama", attention=attention, tie_word_embeddings=is_tied), copy.deepcopy(KINDS[kind])
        )
        generator = torch.Generator().manual_seed(3)
        for _, parameter in sorted(made.named_parameters()):
            if parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        models.append(made)
    fastlm.patch_model(models[1])

    def disabled(model):
        with model.disable_adapter():
            return logits(model.eval(), input_ids=X)

    for call in (
        step,
        lambda m: step(m, tiny.padded_batch()),
        lambda m: logits(m.eval(), input_ids=X),
        lambda m: m.eval().generate(input_ids=X, attention_mask=ONES, **GREEDY).float(),
        disabled,
    ):
        same(call, models)


def fill(model, name):
    generator = torch.Generator().manual_seed(9)
    for key, parameter in sorted(model.named_parameters()):
        if f".{name}." in key:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_the_life_of_an_adapter():
    models = pair()
    for made in models:
        made.add_adapter("second", made.peft_config["default"])
        fill(made, "second")
        made.add_weighted_adapter(["default", "second"], [0.3, 0.7], "both", combination_type="linear")
    fastlm.patch_model(models[1])
    names = dict(input_ids=tiny.ids(3, 20), adapter_names=["default", "second", "__base__"])
    same(lambda m: logits(m.eval(), **names), models)
    for name in ("both", "second"):
        for made in models:
            made.set_adapter(name)
        same(step, models)
    for made in models:
        made.delete_adapter("default")
        for module in made.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.set_scale("second", 2.5)
    same(step, models)
    for made in models:
        made.merge_adapter()
    same(lambda m: m.train()(**BATCH).loss.detach(), models)
    same(lambda m: logits(m.merge_and_unload(), input_ids=X), models)


FROZEN = {
    "A": lambda name: "lora_A" in name,
    "B-of-a-layer": lambda name: "lora_B" in name and "layers.0" in name,
    "nothing-but-a-norm": lambda name: "norm" not in name,
    "nothing-but-a-base": lambda name: "layers.1.mlp.up_proj.base" not in name,
    "nothing-but-the-head": lambda name: "lm_head" not in name,
}


@pytest.mark.parametrize("kind", FROZEN)
def test_what_is_trained_is_the_users_choice(kind):
    models = pair()
    for made in models:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not FROZEN[kind](name) and (kind[0] == "n" or parameter.requires_grad))
    same(step, models)
    for made in models:
        made.gradient_checkpointing_enable(dict(use_reentrant=False))
        made.enable_input_require_grads()
    same(step, models)
