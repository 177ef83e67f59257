"""What the report counts, and the reasons that it gives."""

import peft
import pytest
import tiny
import torch

import fastlm

X = tiny.ids(2, 40)


def patched(name="llama", **settings):
    return fastlm.patch_model(tiny.with_lora(tiny.model(name, attention="sdpa"), **settings))


def layer_rows(model):
    return [row for row in fastlm.report(model) if ".layers." in row.layer]


def train_a_norm(model):
    for layer in model.get_base_model().model.layers:
        layer.input_layernorm.weight.requires_grad_(True)


def hook_a_projection(model):
    for layer in model.get_base_model().model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize(
    "change", [lambda model: None, train_a_norm, hook_a_projection], ids=["block", "parts", "stock"]
)
def test_a_call_is_one_forward_in_every_row(name, change):
    model = patched(name)
    change(model)
    for _ in range(3):
        model.train()(input_ids=X, labels=X).loss.backward()
    rows = list(fastlm.report(model))
    assert [row.calls for row in rows] == [3] * len(rows), fastlm.report(model)
    is_stock = change is hook_a_projection
    assert [row.fallback_calls for row in layer_rows(model)] == [3 * is_stock] * 2
    assert all((": a projection has hooks" in row.reason) == is_stock for row in layer_rows(model))
    assert all(reason.split(" ")[0] == "3" for row in rows for reason in row.reason.split("; ") if " calls: " in reason)


def test_a_projection_that_cannot_be_read_is_counted_once_a_call():
    model = patched(use_dora=True)
    for _ in range(2):
        model.train()(input_ids=X, labels=X).loss.backward()
    for row in layer_rows(model):
        assert row.path == "parts" and row.calls == row.fallback_calls == 2
        assert row.reason.startswith("2 calls: adapter 'default' is a LoRA variant")


def in_mixed_precision(model):
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(input_ids=X, labels=X)


def with_a_cache(model):
    model.eval()(input_ids=X, use_cache=True)


def on_few_tokens(model):
    with torch.no_grad():
        model.eval()(input_ids=X[:1, :5], use_cache=False)


ELSEWHERE = [
    (in_mixed_precision, "mixed precision: it multiplies in torch.bfloat16, its input is torch.float32"),
    (with_a_cache, "a key/value cache was given"),
    (on_few_tokens, "at most 32 tokens without gradients"),
]


@pytest.mark.parametrize("call, reason", ELSEWHERE, ids=[call.__name__ for call, _ in ELSEWHERE])
def test_a_layer_that_never_ran_as_a_block_says_what_happened(call, reason):
    model = patched()
    call(model)
    for row in layer_rows(model):
        assert (row.path, row.calls, row.fallback_calls) == ("parts", 1, 0)
        assert row.reason == f"no call ran as a block yet: {reason}"
    model.train()(input_ids=X, labels=X)
    for row in layer_rows(model):
        assert (row.path, row.calls, row.reason) == ("block", 1, "")


UNFIT = {
    "dora": (dict(use_dora=True), r"self_attn.q_proj would stay stock: adapter 'default' is a LoRA variant \(Dora"),
    "lora-bias": (
        dict(lora_bias=True, bias="none"),
        "q_proj would stay stock: adapter 'default' is more than two plain matrices",
    ),
    "a-few-projections": (
        dict(use_dora=True, target_modules=["down_proj"]),
        "mlp.down_proj would stay stock: adapter 'default'",
    ),
    "trained-copy": (
        dict(target_modules=["q_proj"], modules_to_save=["o_proj"]),
        "o_proj would stay stock: .*ModulesToSaveWrapper",
    ),
}


@pytest.mark.parametrize("kind", list(UNFIT))
@pytest.mark.parametrize("way", ["get_peft_model", "patch_model"])
def test_a_strict_model_refuses_an_adapter_that_cannot_run_fast(kind, way):
    settings, told = UNFIT[kind]
    model = tiny.model("llama-biases", attention="sdpa")
    want = model.train()(input_ids=X, labels=X).loss
    with pytest.raises(RuntimeError, match=f"strict=True, but model.layers.0.*{told}"):
        if way == "get_peft_model":
            fastlm.FastLanguageModel.get_peft_model(fastlm.patch_model(model, strict=True), **settings)
        else:
            targets = settings.get("target_modules", "all-linear")
            adapted = peft.get_peft_model(model, peft.LoraConfig(**{**settings, "target_modules": targets}))
            fastlm.patch_model(adapted, strict=True)
    # as always when strict refuses, the model is stock again; a new adapter changes nothing yet
    assert {row.path for row in fastlm.report(model)} == {"stock"}
    assert torch.equal(model.train()(input_ids=X, labels=X).loss, want)


@pytest.mark.parametrize("settings", [{}, dict(r=4, rank_pattern={"q_proj": 8}), dict(lora_dropout=0.1)], ids=str)
def test_a_strict_model_takes_others(settings):
    model = fastlm.patch_model(tiny.model("llama", attention="sdpa"), strict=True)
    model = fastlm.FastLanguageModel.get_peft_model(model, **settings)
    model(input_ids=X, labels=X).loss.backward()
    assert all(row.path == "block" and not row.reason for row in layer_rows(model))
