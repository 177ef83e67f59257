"""What a merged save checks before it replaces anything, merging into another base, 4-bit checkpoints, and files that stay as they were."""

import json
import logging
import re

import pytest
import tiny
import torch
import transformers as tf
from exported import (
    BATCH,
    add_lora,
    assert_close,
    logits,
    make,
    reload,
    same_bits,
    shake,
    tensors,
    tokenizer,
    with_lora,
)
from safetensors.torch import load_file, save_file

import fastlm
from fastlm import quant
from fastlm.export import checkpoint, save_pretrained_merged, verify, weights

NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
           bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip


def four_bit(folder, **settings):
    pytest.importorskip("bitsandbytes")
    config = tf.BitsAndBytesConfig(**NF4 | settings)
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


def numbers(text):
    found = re.search(r"differ by (\S+) from .* error of ([\d.e-]+\d)", text)
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("name", ["gemma3", "phi3-longrope", "granite", "cohere2", "olmo"])
def test_logits_agree_within_the_error_of_16_bits(name, tmp_path, caplog):
    """Families with scaled embeddings, fused projections, multipliers, parallel halves and clipped projections; on fast layers."""
    model = fastlm.patch_model(tiny.with_lora(tiny.model(name, torch.bfloat16)))
    model.train()
    modes = [module.training for module in model.modules()]
    with caplog.at_level(logging.INFO, logger="fastlm"):
        save_pretrained_merged(model, tmp_path / "out")
    difference, error = numbers(caplog.text)
    assert 0 < difference <= 2 * error
    assert "verified: " in caplog.text and len(tensors(tmp_path / "out")) == int(
        re.search(r"verified: (\d+) tensors", caplog.text)[1]
    )
    assert [module.training for module in model.modules()] == modes


def test_a_bit_that_a_file_lost_is_found(tmp_path, monkeypatch):
    def save(content, path, **kw):
        name = sorted(content)[-1]
        spoilt = content[name].clone()
        spoilt.view(-1)[-1] *= 1.01
        save_file(content | {name: spoilt}, path, **kw)

    monkeypatch.setattr(checkpoint, "save_file", save)
    model = with_lora(make("llama"))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight: 1 of 32 saved entries are not the bits"):
        save_pretrained_merged(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    save_pretrained_merged(model, tmp_path / "out", verify=False)


def test_a_merge_that_answers_otherwise_is_found(tmp_path, monkeypatch):
    """Twice the adapter: every tensor is what was computed, and the model another."""
    right = weights.LowRank.delta
    monkeypatch.setattr(weights.LowRank, "delta", lambda self, *args: 2 * right(self, *args))
    model = with_lora(make("llama"))
    with pytest.raises(RuntimeError, match="differ by .* from the live model's .* 2 times are allowed") as caught:
        save_pretrained_merged(model, tmp_path / "out")
    difference, error = numbers(str(caught.value))
    assert difference > 10 * error > 0
    assert not list(tmp_path.iterdir())
    save_pretrained_merged(model, tmp_path / "out", verify=False)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_float16_that_overflows_in_between_is_found(tmp_path):
    """Every weight fits float16, the hidden state between two of them does not."""
    model = make("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(RuntimeError, match="not finite"):
        save_pretrained_merged(model, tmp_path / "out", dtype=torch.float16)
    save_pretrained_merged(model, tmp_path / "out")


def test_a_model_that_trains_under_autocast(tmp_path, caplog):
    """Norms and head in float32 over 16-bit layers, as kbit training leaves them."""
    model = with_lora(make("llama"))
    inner = model.get_base_model()
    inner.lm_head.float()
    inner.model.norm.float()
    with caplog.at_level(logging.INFO, logger="fastlm"):
        save_pretrained_merged(model, tmp_path)
    difference, error = numbers(caplog.text)
    assert 0 < difference <= 2 * error


def test_models_without_a_next_token(tmp_path, caplog):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=3
    )
    model = tf.LlamaForSequenceClassification(config).to(torch.bfloat16)
    with caplog.at_level(logging.INFO, logger="fastlm"):
        save_pretrained_merged(model, tmp_path)
    assert "logits are not compared" in caplog.text and "tensors" in caplog.text
    assert "score.weight" in tensors(tmp_path)


# --- another base ---


@pytest.mark.parametrize("quantized", [True, False], ids=["nf4", "16bit"])
def test_merging_into_the_16_bit_base(quantized, tmp_path):
    make("llama-biases", torch.float32, hidden_size=64).save_pretrained(tmp_path / "base", max_shard_size="30KB")
    base = four_bit(tmp_path / "base") if quantized else reload(tmp_path / "base", torch.bfloat16)
    model = with_lora(base, modules_to_save=["lm_head"])
    shake(model, "modules_to_save")
    save_pretrained_merged(model, tmp_path / "out", base=tmp_path / "base")
    expected = add_lora(tensors(tmp_path / "base"), model, 3.0, torch.bfloat16)
    expected["lm_head.weight"] = model.get_base_model().lm_head.weight
    got = tensors(tmp_path / "out")
    assert set(got) == set(expected)
    assert all(same_bits(got[key], expected[key].to(torch.bfloat16).detach()) for key in expected)
    reload(tmp_path / "out")


def test_a_base_that_is_another_model_is_refused(tmp_path):
    for name, kw in (("base", {}), ("other", dict(seed=7)), ("wide", dict(intermediate_size=128)), ("qwen", {})):
        kind = "qwen3" if name == "qwen" else "llama"
        make(kind, hidden_size=64, **kw).save_pretrained(tmp_path / name)
    model = with_lora(four_bit(tmp_path / "base"))
    model.get_base_model().save_pretrained(tmp_path / "packed")
    for other, text in (
        ("other", r"q_proj\.weight: the live weight is 1\.\d\d of its size away"),
        ("wide", r"gate_proj\.weight has shape \[128, 64\]"),
        ("packed", "no weight|is stored as U8|has shape"),
        ("nowhere", "must be the folder"),
    ):
        with pytest.raises(ValueError, match=text):
            save_pretrained_merged(model, tmp_path / "out", base=tmp_path / other)
    with pytest.raises(ValueError, match="leave it out"):
        save_pretrained_merged(make("llama"), tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()


# --- 4-bit checkpoints ---


def stored(model):
    return {
        name: (module.weight.data.clone(), module.weight.quant_state.as_dict(packed=True))
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied", "gemma2"])
@pytest.mark.parametrize("method", ["merged_4bit", "merged_4bit_forced"])
def test_merged_4bit(name, method, tmp_path):
    """What transformers loads is what bitsandbytes makes of the merged weights; the others keep their bytes."""
    bnb = pytest.importorskip("bitsandbytes")
    make(name, hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base"), target_modules=["q_proj", "down_proj"])
    before = stored(model.get_base_model())
    save_pretrained_merged(model, tmp_path / "merged")
    save_pretrained_merged(model, tmp_path / "out", save_method=method, max_shard_size="20KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    loaded, info = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    merged = tensors(tmp_path / "merged")
    found = stored(loaded)
    assert len(found) == 14 and {tensor.dtype for tensor in loaded.state_dict().values()} >= {torch.uint8}
    for layer, (packed, state) in found.items():
        if layer.endswith(("q_proj", "down_proj")):
            data, wanted = bnb.functional.quantize_4bit(
                merged[f"{layer}.weight"], blocksize=64, quant_type="nf4", compress_statistics=True
            )
            wanted = wanted.as_dict(packed=True)
            old, _ = before[f"{layer}.base_layer"]
            assert not torch.equal(old, data)
        else:
            data, wanted = before[layer]
        assert same_bits(packed, data), layer
        assert all(same_bits(state[key], wanted[key]) for key in wanted), layer
    # quantized anew, the weights that adapters changed are about as far from the merged ones as 4 bits are
    difference = logits(loaded.train()) - logits(reload(tmp_path / "merged", torch.bfloat16))
    assert difference.square().mean() < 0.1 * logits(loaded.train()).square().mean()


def test_merged_4bit_of_a_16_bit_model(tmp_path):
    """It is what transformers makes of the merged model when it loads that in 4 bits."""
    model = with_lora(make("llama", hidden_size=64), modules_to_save=["lm_head"])
    shake(model, "modules_to_save")
    save_pretrained_merged(model, tmp_path / "merged")
    save_pretrained_merged(model, tmp_path / "out", save_method="merged_4bit")
    wanted, loaded = four_bit(tmp_path / "merged"), tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded.lm_head) is torch.nn.Linear
    assert loaded.config.quantization_config.llm_int8_skip_modules == ["lm_head"]
    for layer, (packed, state) in stored(wanted).items():
        found = stored(loaded)[layer]
        assert same_bits(found[0], packed) and all(same_bits(found[1][key], state[key]) for key in state), layer
    assert torch.equal(logits(loaded.train()), logits(wanted.train()))


@pytest.mark.parametrize("settings", [dict(bnb_4bit_use_double_quant=False), dict(bnb_4bit_quant_type="fp4")])
def test_merged_4bit_keeps_the_settings(settings, tmp_path):
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base", **settings))
    save_pretrained_merged(model, tmp_path / "out", save_method="merged_4bit")
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in settings.items():
        assert getattr(loaded.config.quantization_config, key) == value
    assert_close(logits(loaded.train()), logits(model.train()), 0.5)
    # again, without an adapter: to the byte
    save_pretrained_merged(loaded, tmp_path / "again", save_method="merged_4bit")
    first, second = tensors(tmp_path / "out"), tensors(tmp_path / "again")
    assert all(same_bits(first[key], second[key]) for key in first) and set(first) == set(second)


def test_an_adapter_too_small_for_4_bits(tmp_path):
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base"), target_modules=["q_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-8)
    with pytest.raises(ValueError, match="too small to change any entry of the 2 adapted tensors in 4 bits"):
        save_pretrained_merged(model, tmp_path / "out", save_method="merged_4bit")


def test_a_weight_that_bitsandbytes_rewrote_is_refused(tmp_path):
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base"))
    model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight.quant_state.packing_format_for_cpu = True
    for method in ("merged_16bit", "merged_4bit"):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: .*[Ll]oad the model again"):
            save_pretrained_merged(model, tmp_path / "out", save_method=method)


def test_verifying_leaves_4_bit_weights_trainable(tmp_path):
    """On a CPU, bitsandbytes rewrites weights that it meets in evaluation; the probe must not let it."""
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base"))
    layers = [module for module in model.modules() if quant.is_4bit(module)]
    before = [(layer.weight.data.clone(), layer.support_avx512bf16_for_cpu) for layer in layers]
    save_pretrained_merged(model, tmp_path / "out")
    for layer, (data, switch) in zip(layers, before, strict=True):
        assert torch.equal(layer.weight.data, data) and layer.support_avx512bf16_for_cpu == switch
    model.train()
    model(input_ids=BATCH, labels=BATCH, use_cache=False).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


# --- files that stay as they were ---


def source(tmp_path, **generation):
    """A base model whose tokenizer and generation files have bytes that no library would write."""
    folder = tmp_path / "base"
    make("llama").save_pretrained(folder)
    tokenizer("{{ messages[0]['content'] }}").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        if name == "generation_config.json":
            content |= generation
        (folder / name).write_text(json.dumps(content, indent=7, sort_keys=False) + "\n\n")
    (folder / "special_tokens_map.json").write_text('{"pad_token":   "<pad>"}')
    return folder


FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json",
)  # fmt: skip


@pytest.mark.parametrize("loads", ["fastlm", "transformers"])
@pytest.mark.parametrize("method", ["merged_16bit", "lora"])
def test_tokenizer_template_and_generation_settings_are_the_sources_bytes(loads, method, tmp_path):
    folder = source(tmp_path, temperature=0.6, do_sample=True, top_p=0.9)
    if loads == "fastlm":
        model, tok = fastlm.FastLanguageModel.from_pretrained(str(folder), load_in_16bit=True, lora_r=4)
        shake(model)
    else:
        model, tok = with_lora(reload(folder, torch.bfloat16)), tf.AutoTokenizer.from_pretrained(folder)
    # a call leaves its padding and truncation in the tokenizer
    tok(["a b", "a"], padding="max_length", max_length=7, truncation=True)
    save_pretrained_merged(model, tmp_path / "out", tok, save_method=method)
    for name in FILES[: len(FILES) - (method == "lora")]:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out")("a b")["input_ids"] == [1, 2]


def test_what_was_changed_on_purpose_is_written(tmp_path):
    folder = source(tmp_path)
    model, tok = with_lora(reload(folder, torch.bfloat16)), tf.AutoTokenizer.from_pretrained(folder)
    save_pretrained_merged(model, tmp_path / "out", tok)
    tok.chat_template = "{{ 'new' }}"
    model.get_base_model().generation_config.max_new_tokens = 17
    save_pretrained_merged(model, tmp_path / "out", tok)
    again = tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == "{{ 'new' }}"
    assert tf.GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 17
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    tok.add_tokens(["<new>"])
    save_pretrained_merged(model, tmp_path / "out", tok)
    assert "<new>" in tf.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    # a tokenizer without a template leaves none of an earlier save
    tok.chat_template = None
    save_pretrained_merged(model, tmp_path / "out", tok)
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None


def test_the_card(tmp_path):
    model = with_lora(make("llama"), r=4, lora_alpha=12)
    save_pretrained_merged(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "library_name: transformers" in card and "bfloat16" in card and "r=4, lora_alpha=12" in card
    assert str(tmp_path) not in card
    (tmp_path / "README.md").write_text("mine")
    save_pretrained_merged(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_what_serving_engines_read(tmp_path):
    """What vLLM and SGLang read: safetensors, a configuration without quantization, and nothing that must be run."""
    save_pretrained_merged(with_lora(make("qwen3")), tmp_path, tokenizer())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    assert not {"quantization_config", "auto_map", "_name_or_path"} & set(config)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert set(load_file(tmp_path / "model.safetensors")) == set(loaded.state_dict())


def test_of_several_processes_the_first_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    save_pretrained_merged(with_lora(make("llama")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_probe_reasons():
    assert verify.has_probe(make("llama")) is None
    config = tf.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert "next token" in verify.has_probe(tf.T5ForConditionalGeneration(config))


def test_dora_on_another_base(tmp_path):
    """The magnitude over the norm of the other base's rows."""
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    model = with_lora(four_bit(tmp_path / "base"), use_dora=True)
    save_pretrained_merged(model, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
    own = with_lora(reload(tmp_path / "base"), use_dora=True)
    own.load_state_dict({k: v.float() for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    assert_close(logits(reload(tmp_path / "out")), logits(own), 1e-5)
