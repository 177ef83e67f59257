"""Merged checkpoints: every value is W + s B A rounded once; names and configuration are transformers' own."""

import json

import pytest
import torch
import transformers as tf
from exported import (
    BATCH,
    CONFIGS,
    DENSE,
    add_lora,
    assert_close,
    logits,
    make,
    reload,
    same_bits,
    shake,
    snapshot,
    stock,
    tensors,
    tokenizer,
    with_lora,
)
from peft import LoraConfig

from fastlm.export import save_pretrained_merged, weights


@pytest.mark.parametrize("name", DENSE)
def test_every_value_is_the_float32_sum_rounded_once(name, tmp_path):
    base = make(name)
    expected, config = stock(base, tmp_path / "stock")
    model = with_lora(base)
    before, here = snapshot(model), logits(model)
    tok = tokenizer()
    save_pretrained_merged(model, tmp_path / "out", tok)

    got = tensors(tmp_path / "out")
    add_lora(expected, model, 3.0, torch.bfloat16)
    assert list(got) and set(got) == set(expected)
    for key in expected:
        assert same_bits(got[key], expected[key]), key
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert (tmp_path / "out" / "generation_config.json").read_text() == (
        tmp_path / "stock" / "generation_config.json"
    ).read_text()
    tok.save_pretrained(tmp_path / "tok")
    for file in (tmp_path / "tok").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "out" / "adapter_config.json").exists()

    after = snapshot(model)
    assert list(after) == list(before)
    for key, (tensor, value, requires_grad) in before.items():
        assert after[key][0] is tensor and same_bits(after[key][1], value) and after[key][2] == requires_grad, key
    assert torch.equal(logits(model), here)
    assert_close(logits(reload(tmp_path / "out", torch.bfloat16)), here, 0.05)


@pytest.mark.parametrize("name", DENSE)
def test_float32_model(name, tmp_path):
    """Saved in float32 it answers like the adapter; by default it is rounded to bfloat16."""
    base = make(name, torch.float32)
    expected, _ = stock(base, tmp_path / "stock")
    model = with_lora(base)
    save_pretrained_merged(model, tmp_path / "fp32", dtype=torch.float32)
    assert_close(logits(reload(tmp_path / "fp32")), logits(model), 1e-5)
    save_pretrained_merged(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    add_lora(expected, model, 3.0, torch.bfloat16)
    got = tensors(tmp_path / "out")
    assert set(got) == set(expected)
    assert all(same_bits(got[key], expected[key].to(torch.bfloat16)) for key in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_models_own_dtype_is_kept(dtype, tmp_path):
    base = make("llama", dtype)
    model = with_lora(base)
    base.model.norm.float()
    save_pretrained_merged(model, tmp_path)
    assert {tensor.dtype for tensor in tensors(tmp_path).values()} == {dtype}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert base.model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_without_adapter_is_saved_as_transformers_does(name, tmp_path):
    """Mixture-of-experts models too: their fused experts go back to the names of the checkpoint."""
    base = make(name)
    expected, config = stock(base, tmp_path / "stock")
    save_pretrained_merged(base, tmp_path / "out", max_shard_size=20_000)
    got = tensors(tmp_path / "out")
    assert set(got) == set(expected)
    assert all(same_bits(got[key], expected[key]) for key in expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    reload(tmp_path / "out")


def test_adapters_on_a_mixture_of_experts(tmp_path):
    base = make("qwen3-moe", torch.float32)
    model = with_lora(base, target_modules=["q_proj", "o_proj"])
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    assert_close(logits(reload(tmp_path)), logits(model), 1e-5)


VARIANTS = {
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "lora-bias": dict(lora_bias=True),
    "trained-biases": dict(bias="all"),
    "embedding": dict(target_modules=["embed_tokens", "q_proj"]),
    "embedding-dora": dict(target_modules=["embed_tokens", "q_proj"], use_dora=True),
    "head": dict(target_modules=["lm_head", "q_proj"]),
    "tokens": dict(trainable_token_indices={"embed_tokens": [1, 5, 9]}),
    "rank-pattern": dict(rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 30}),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_adapter_variants(variant, tied, tmp_path):
    """In float32 the saved model gives the logits of the live adapter, tied only where the live one is."""
    base = make("llama-biases", torch.float32, tie_word_embeddings=tied)
    plain = logits(base)
    model = with_lora(base, **VARIANTS[variant])
    for only in ("bias", "magnitude", "trainable_tokens"):
        if any(only in name and p.requires_grad for name, p in model.named_parameters()):
            shake(model, only=only)
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    assert (logits(model) - plain).abs().max() > 0.1 * plain.abs().max()
    assert_close(logits(reload(tmp_path)), logits(model), 2e-5)
    saved = json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert saved == (tied and variant not in ("embedding", "embedding-dora", "head"))
    assert ("lm_head.weight" in tensors(tmp_path)) == (not saved)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_several_active_adapters(use_dora, tmp_path):
    model = with_lora(make("llama", torch.float32), use_dora=use_dora)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], use_dora=use_dora))
    model.base_model.set_adapter(["default", "second"])
    shake(model, "second.weight", seed=7)
    save_pretrained_merged(model, tmp_path / "both", dtype=torch.float32)
    assert_close(logits(reload(tmp_path / "both")), logits(model), 2e-5)
    both = logits(model)
    model.set_adapter("second")
    save_pretrained_merged(model, tmp_path / "second", dtype=torch.float32)
    assert (logits(model) - both).abs().max() > 0.01
    assert_close(logits(reload(tmp_path / "second")), logits(model), 2e-5)


def test_conv1d_weights_are_stored_transposed(tmp_path):
    torch.manual_seed(0)
    base = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=2)).eval()
    model = with_lora(base, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    assert_close(logits(reload(tmp_path)), logits(model), 1e-5)


def test_an_adapter_that_peft_merged_is_not_added_again(tmp_path):
    model = with_lora(make("llama", torch.float32))
    here = logits(model)
    model.merge_adapter()
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    assert_close(logits(reload(tmp_path)), here, 1e-5)


def test_an_adapter_added_by_transformers_itself(tmp_path):
    base = make("llama", torch.float32)
    base.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    shake(base)
    save_pretrained_merged(base, tmp_path / "merged", dtype=torch.float32)
    assert_close(logits(reload(tmp_path / "merged")), logits(base), 1e-5)
    save_pretrained_merged(base, tmp_path / "adapter", save_method="lora")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_row_blocks_change_nothing(tmp_path, monkeypatch):
    model = with_lora(make("llama"), use_dora=True)
    save_pretrained_merged(model, tmp_path / "whole")
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 3 * 32)
    save_pretrained_merged(model, tmp_path / "blocks")
    whole, blocks = tensors(tmp_path / "whole"), tensors(tmp_path / "blocks")
    assert all(same_bits(whole[key], blocks[key]) for key in whole)


@pytest.mark.parametrize("copies", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"], ["norm"]])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "equal"])
def test_fully_trained_copies(copies, tied, trained, tmp_path):
    model = with_lora(make("llama", torch.float32, tie_word_embeddings=tied), modules_to_save=copies)
    if trained:
        shake(model, "modules_to_save")
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    got = tensors(tmp_path)
    stays_tied = tied and (not trained or copies == ["norm"])
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == stays_tied
    assert ("lm_head.weight" in got) == (not stays_tied)
    inner = model.get_base_model()
    assert torch.equal(got["model.embed_tokens.weight"], inner.model.embed_tokens.weight)
    assert stays_tied or torch.equal(got["lm_head.weight"], inner.lm_head.weight)
    assert inner.config.tie_word_embeddings == tied
    assert_close(logits(reload(tmp_path)), logits(model), 1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_resized_embeddings(name, tmp_path):
    base = make(name, torch.float32)
    base.resize_token_embeddings(101)
    model = shake(with_lora(base, modules_to_save=["embed_tokens", "lm_head"]), "modules_to_save")
    save_pretrained_merged(model, tmp_path, dtype=torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 101
    assert tensors(tmp_path)["model.embed_tokens.weight"].shape == (101, 32)
    assert_close(logits(reload(tmp_path)), logits(model), 1e-5)


def load_quantized(folder, **kw):
    pytest.importorskip("bitsandbytes")
    settings = dict(quantization_config=tf.BitsAndBytesConfig(**kw)) if kw else {}
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings)


NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
           bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("settings", [NF4, dict(load_in_8bit=True)], ids=["nf4", "int8"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied"])
def test_quantized_base(name, settings, tmp_path):
    """The weights that were trained on are decoded; nothing of bitsandbytes is left in the files."""
    bnb = pytest.importorskip("bitsandbytes")
    make(name, hidden_size=64).save_pretrained(tmp_path / "base")
    expected, config = tensors(tmp_path / "base"), json.loads((tmp_path / "base" / "config.json").read_text())
    base = load_quantized(tmp_path / "base", **settings)
    decoded = {}
    for key, module in base.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            decoded[f"{key}.weight"] = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            decoded[f"{key}.weight"] = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    assert len(decoded) == 14
    model = with_lora(base)
    save_pretrained_merged(model, tmp_path / "out")
    add_lora(expected, model, 3.0, torch.bfloat16, decoded)
    got = tensors(tmp_path / "out")
    assert set(got) == set(expected)
    for key in expected:
        assert same_bits(got[key], expected[key]), key
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved == config
    assert_close(logits(reload(tmp_path / "out", torch.bfloat16)), logits(model.train()), 0.06)


@pytest.mark.parametrize("settings", [NF4], ids=["nf4"])
def test_quantized_base_after_training_steps(settings, tmp_path):
    """bitsandbytes moves weights inside its modules when they run; what is saved stays the same."""
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(load_quantized(tmp_path / "base", **settings))
    save_pretrained_merged(model, tmp_path / "before")
    model.train()
    model(input_ids=BATCH, labels=BATCH, use_cache=False).loss.backward()
    save_pretrained_merged(model, tmp_path / "after")
    before, after = tensors(tmp_path / "before"), tensors(tmp_path / "after")
    assert all(same_bits(after[key], before[key]) for key in before)


def test_quantized_checkpoint_as_base(tmp_path):
    """Loaded from a folder that is 4-bit already: its unpacking is no conversion to revert."""
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    load_quantized(tmp_path / "base", **NF4).save_pretrained(tmp_path / "packed")
    model = with_lora(load_quantized(tmp_path / "packed"))
    save_pretrained_merged(model, tmp_path / "out")
    assert set(tensors(tmp_path / "out")) == set(tensors(tmp_path / "base"))
    reloaded = reload(tmp_path / "out", torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_close(logits(reloaded), logits(model.train()), 0.06)
