"""Adapters of every setting inside a layer that runs as one function: what PEFT computes, and which of them stay PEFT's."""

import copy

import peft
import pytest
import tiny
import torch
from adapted import (
    BATCH,
    EXACT,
    RECOMPUTE,
    assert_block,
    assert_same_step,
    fill,
    layer_rows,
    logits,
    models,
    pair,
    pair_4bit,
    quantized,
    recomputing,
    with_our_masks,
)
from peft import LoraConfig

import fastlm

# --- settings --------------------------------------------------------------------------------------------------------

SETTINGS = {
    **{name: dict(targets=[name]) for name in tiny.LINEAR},
    "attention-only": dict(targets=tiny.LINEAR[:4]),
    "mlp-only": dict(targets=tiny.LINEAR[4:]),
    "q-v": dict(targets=["q_proj", "v_proj"]),
    "one-expression": dict(targets=r".*layers\.1\..*(k|gate)_proj"),
    "ranks": dict(rank_pattern={"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2, "v_proj": 1}),
    "alphas": dict(alpha_pattern={"up_proj": 5, r"layers\.0\..*o_proj": 31}),
    "ranks-and-alphas": dict(rank_pattern={"k_proj": 6, "down_proj": 3}, alpha_pattern={"k_proj": 1, "q_proj": 9}),
    "rslora": dict(use_rslora=True, rank_pattern={"o_proj": 9}),
    "bias-all": dict(bias="all"),
    "bias-lora-only": dict(bias="lora_only", targets=["q_proj", "o_proj", "down_proj"]),
    "some-layers": dict(layers_to_transform=[1]),
    "excluded": dict(exclude_modules=r".*layers\.0\.self_attn.*"),
    "saved-head": dict(modules_to_save=["lm_head"]),
    "saved-head-and-embeddings": dict(modules_to_save=["lm_head", "embed_tokens"], targets=["v_proj"]),
    "saved-last-norm": dict(modules_to_save=["model.norm"]),
    "new-token-rows": dict(trainable_token_indices=[5, 9]),
}


@RECOMPUTE
@pytest.mark.parametrize("kind", SETTINGS)
def test_settings(kind, recompute):
    stock, ours = pair("llama-biases", **copy.deepcopy(SETTINGS[kind]))
    if recompute:
        recomputing(stock, ours)
    assert_same_step(stock, ours)
    assert_same_step(stock, ours, tiny.packed_batch(), use_cache=False)
    assert_block(ours)
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT


WITH_BIASES = ["qwen2", "granite", "seed_oss", "arcee", "ernie4_5"]
# layer norms have biases of their own, before both halves or one for both
WITH_BIASES += ["starcoder2", "stablelm", "stablelm-parallel", "phi", "nemotron", "jais2"]


@RECOMPUTE
@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("name", WITH_BIASES)
def test_biases_of_families(name, bias, recompute):
    stock, ours = pair(name, bias=bias)
    if recompute:
        recomputing(stock, ours)
    # lora_only is that of the projections, which some of them lack
    assert bias == "lora_only" or any(p.requires_grad and n.endswith("bias") for n, p in ours.named_parameters())
    assert_same_step(stock, ours)
    assert_block(ours)


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_adapters_before_and_after_patching(when):
    stock, ours = models()
    stock = tiny.with_lora(stock)
    ours = fastlm.patch_model(ours) if when != "before" else ours
    ours = tiny.with_lora(ours)
    ours = fastlm.patch_model(ours, strict=True) if when != "after" else ours
    assert_same_step(stock, ours)
    assert_block(ours)


# --- initialisations -------------------------------------------------------------------------------------------------

INITIAL = ["gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", False, True]


@pytest.mark.parametrize("init", INITIAL, ids=str)
def test_initialisations(init):
    """They change the base's weights or the adapter's, before or after patching; the block reads what there is."""
    made = []
    for i, base in enumerate((*models(), tiny.model("llama", attention="sdpa"))):
        base = fastlm.patch_model(base) if i == 2 else base
        torch.manual_seed(5)
        config = LoraConfig(
            target_modules=tiny.LINEAR, r=4, lora_alpha=12, init_lora_weights=init, task_type="CAUSAL_LM"
        )
        made.append(peft.get_peft_model(base, config))
    stock, before, after = made
    fastlm.patch_model(before, strict=True)
    for ours in (before, after):
        # pissa's randomised decomposition differs in the last bits between runs; all have the first one's numbers
        ours.load_state_dict(stock.state_dict())
        assert_same_step(stock, ours)
        assert_block(ours)


@pytest.mark.gpu
def test_loftq():
    """PEFT quantizes and decomposes the base on an accelerator alone."""
    base = tiny.model("llama", attention="sdpa", intermediate_size=128).cuda()
    settings = dict(init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_bits=4))
    ours = peft.get_peft_model(base, LoraConfig(target_modules=tiny.LINEAR, r=4, **settings))
    stock = copy.deepcopy(ours)
    fastlm.patch_model(ours, strict=True)
    assert_same_step(stock, ours, tolerance=1e-4)
    assert_block(ours)


def test_eva():
    """EVA measures activations through hooks on the projections, of a patched model too; ranks differ between layers afterwards."""
    made = []
    for base in models():
        config = LoraConfig(
            target_modules=tiny.LINEAR,
            r=4,
            init_lora_weights="eva",
            eva_config=peft.EvaConfig(rho=2.0),
            task_type="CAUSAL_LM",
        )
        base = fastlm.patch_model(base) if made else base
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(base, config, low_cpu_mem_usage=True)
        batches = [dict(input_ids=tiny.ids(4, 24, seed), attention_mask=torch.ones(4, 24)) for seed in range(4)]
        peft.initialize_lora_eva_weights(wrapped, batches, show_progress_bar=False)
        made.append(wrapped)
    stock, ours = made
    assert len({p.shape for n, p in ours.named_parameters() if "q_proj.lora_A" in n or "down_proj.lora_B" in n}) > 1
    ours.load_state_dict(stock.state_dict())
    fill(stock, "default"), fill(ours, "default")
    before = [row.fallback_calls for row in layer_rows(ours)]
    fastlm.patch_model(ours, strict=True)
    assert_same_step(stock, ours)
    assert [row.fallback_calls for row in layer_rows(ours)] == before
    assert all(row.path == "block" for row in layer_rows(ours))


# --- several adapters ------------------------------------------------------------------------------------------------


def two_adapters():
    stock, ours = pair()
    for made in (stock, ours):
        made.add_adapter(
            "second", LoraConfig(target_modules=["q_proj", "down_proj"], r=6, lora_alpha=3, task_type="CAUSAL_LM")
        )
        fill(made, "second")
    return stock, ours


def test_switching():
    stock, ours = two_adapters()
    seen = []
    for name in ("default", "second", "default"):
        for made in (stock, ours):
            made.set_adapter(name)
        assert_same_step(stock, ours)
        seen.append(logits(ours))
        assert tiny.relative(seen[-1], logits(stock)) <= EXACT
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    for made in (stock, ours):
        made.delete_adapter("default")
        made.set_adapter("second")
    assert_same_step(stock, ours)
    assert_block(ours)


def test_two_at_once_run_stock():
    stock, ours = two_adapters()
    fastlm.patch_model(ours, strict=False)
    for made in (stock, ours):
        made.base_model.set_adapter(["default", "second"])
    assert_same_step(stock, ours)
    assert all("2 adapters are active at once" in row.reason and row.fallback_calls for row in layer_rows(ours))


@RECOMPUTE
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_reference_without_the_adapter_between_forward_and_backward(dropout, recompute):
    """As preference losses have it: the adapter is off for a pass without gradients, and the step is right."""
    stock, ours = pair(lora_dropout=dropout)
    with_our_masks(stock)
    if recompute:
        recomputing(stock, ours)
    results = []
    for made in (stock, ours):
        steps = []
        for seed in range(2):
            torch.manual_seed(seed)
            made.train().zero_grad()
            policy = made(**BATCH).loss
            with torch.no_grad(), made.disable_adapter():
                reference = made(**BATCH).loss
            (policy - reference).square().backward()
            steps += [
                policy.detach(),
                reference,
                *(p.grad for _, p in sorted(made.named_parameters()) if p.requires_grad),
            ]
            with torch.no_grad():
                for parameter in made.parameters():
                    if parameter.requires_grad:
                        parameter -= 0.01 * parameter.grad
        results.append(steps)
    assert len(results[0]) == len(results[1])
    for got, want in zip(results[1], results[0], strict=True):
        assert tiny.relative(got, want) <= EXACT
    assert_block(ours)


def test_a_reference_adapter():
    """A second, frozen adapter as the reference of a preference loss."""
    stock, ours = two_adapters()
    results = []
    for made in (stock, ours):
        made.train().zero_grad()
        policy = made(**BATCH).loss
        made.set_adapter("second")
        with torch.no_grad():
            reference = made(**BATCH).loss
        made.set_adapter("default")
        (policy - reference).square().backward()
        results.append(
            [policy.detach(), reference, *(p.grad for _, p in sorted(made.named_parameters()) if p.grad is not None)]
        )
    assert len(results[0]) == len(results[1]) > 2
    assert all(tiny.relative(a, b) <= EXACT for a, b in zip(*results, strict=True))
    assert_block(ours)


def test_merging_and_unmerging():
    stock, ours = pair()
    before = logits(ours)
    for made in (stock, ours):
        made.merge_adapter()
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT and tiny.relative(logits(ours), before) <= EXACT
    assert_block(ours)
    for made in (stock, ours):
        made.unmerge_adapter()
    assert_same_step(stock, ours)
    assert_block(ours)
    merged = [made.merge_and_unload() for made in (stock, ours)]
    assert tiny.relative(logits(merged[1]), logits(merged[0])) <= EXACT
    assert_block(merged[1])
    stock, ours = (tiny.with_lora(made.requires_grad_(False), seed=3) for made in merged)
    assert_same_step(stock, ours)
    assert_block(ours)


def test_a_disabled_adapter_that_is_merged_runs_stock():
    """PEFT unmerges it at the call, which is its own to do."""
    stock, ours = pair()
    fastlm.patch_model(ours, strict=False)
    for made in (stock, ours):
        made.merge_adapter()
    with stock.disable_adapter(), ours.disable_adapter():
        assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    assert all("a disabled adapter is still merged" in row.reason for row in layer_rows(ours))
    assert_same_step(stock, ours)


def test_saved_and_loaded_again(tmp_path):
    stock, ours = two_adapters()
    ours.save_pretrained(tmp_path)
    for made in (stock, ours):
        made.load_adapter(str(tmp_path), "third", is_trainable=True)
        made.set_adapter("third")
    assert_same_step(stock, ours)
    assert_block(ours)


# --- 4-bit weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base_4bit(tmp_path_factory):
    return quantized(tmp_path_factory.mktemp("base"))


FOUR_BIT = ["q_proj", "mlp-only", "ranks-and-alphas", "rslora", "bias-all", "some-layers", "saved-head"]


@RECOMPUTE
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_settings_over_4bit_weights(base_4bit, kind, recompute):
    stock, ours = pair_4bit(base_4bit, **copy.deepcopy(SETTINGS[kind]))
    if recompute:
        recomputing(stock, ours)
    assert_same_step(stock, ours)
    assert_block(ours)


def test_the_life_of_an_adapter_over_4bit_weights(base_4bit):
    stock, ours = pair_4bit(base_4bit)
    for made in (stock, ours):
        made.add_adapter("second", LoraConfig(target_modules=["q_proj", "down_proj"], r=6, task_type="CAUSAL_LM"))
        fill(made, "second")
        made.set_adapter("second")
    assert_same_step(stock, ours)
    with stock.disable_adapter(), ours.disable_adapter():
        assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    assert_same_step(stock, ours)
    for made in (stock, ours):
        made.merge_adapter()
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    for made in (stock, ours):
        made.unmerge_adapter()
    assert_same_step(stock, ours)
    assert_block(ours)


# --- what stays PEFT's -----------------------------------------------------------------------------------------------

TASK = dict(task_type="CAUSAL_LM")
OTHERS = {
    "dora": (LoraConfig(target_modules=tiny.LINEAR, r=4, use_dora=True, **TASK), "is a LoRA variant (DoraLinearVariant)"),
    "lora-bias": (LoraConfig(target_modules=tiny.LINEAR, r=4, lora_bias=True, **TASK), "is more than two plain matrices"),
    "vera": (peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4, **TASK), "vera.layer.Linear is not a plain"),
    "adalora": (peft.AdaLoraConfig(target_modules=tiny.LINEAR, init_r=4, total_step=10, **TASK), "SVDLinear is not a plain"),
    "lokr": (peft.LoKrConfig(target_modules=tiny.LINEAR, r=4, **TASK), "lokr.layer.Linear is not a plain"),
    "oft": (peft.OFTConfig(target_modules=tiny.LINEAR, r=0, oft_block_size=8, **TASK), "oft.layer.Linear is not a plain"),
    "ia3": (
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
        "ia3.layer.Linear is not a plain",
    ),
    "saved-projection": (
        LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["down_proj"], **TASK), "ModulesToSaveWrapper is not a plain"
    ),
    "saved-norm": (
        LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["input_layernorm"], **TASK), "a norm is a ModulesToSaveWrapper"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_run_stock_and_say_why(kind):
    config, reason = OTHERS[kind]
    made = []
    for base in models():
        torch.manual_seed(5)
        one = peft.get_peft_model(base, copy.deepcopy(config))
        generator = torch.Generator().manual_seed(3)
        for _, parameter in sorted(one.named_parameters()):
            if parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        made.append(one)
    stock, ours = made[0], fastlm.patch_model(made[1])
    assert_same_step(stock, ours)
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    rows = layer_rows(ours)
    assert all(reason in row.reason for row in rows), [row.reason for row in rows]
    with pytest.raises(RuntimeError):
        fastlm.patch_model(ours, strict=True).train()(**BATCH)
