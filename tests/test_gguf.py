"""GGUF files: values read back by transformers' own reader or undone by hand, fields, adapters, and what is refused."""

import copy

import pytest
import tiny
import torch
import transformers as tf
from exported import shake, snapshot
from gguf_models import FAMILIES, ROWS, byte_level, fields, model, tensors
from peft import LoraConfig, get_peft_model
from test_export_hub import TOKEN, Hub, httpx

import fastlm
from fastlm.export import gguf as export
from fastlm.export import gguf_arch, hub
from fastlm.export.gguf import push_to_hub_gguf, save_pretrained_gguf

READ_BY_TRANSFORMERS = [name for name in FAMILIES if name not in ("gemma", "granite", "smollm3")]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def logits(made, length=24):
    with torch.no_grad():
        return made(input_ids=tiny.ids(2, length), use_cache=False).logits


def merged(made):
    """The base model's own weights with W + s B A in them."""
    return copy.deepcopy(made).merge_and_unload()


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_merged_model(name, tokenizer, tmp_path):
    """Its reader knows less of configurations than of tensors: it gets the model's own."""
    made = tiny.with_lora(model(name))
    before = snapshot(made)
    f32, f16 = save_pretrained_gguf(made, tmp_path, tokenizer, ["f32", "f16"])
    for key, (tensor, value, _) in snapshot(made).items():
        assert tensor is before[key][0] and torch.equal(value, before[key][1]), key
    config = copy.deepcopy(made.config)
    factor = gguf_arch.score_factor(config)
    if factor != 1:
        # the file holds scaled queries, for llama.cpp's own scale of scores
        config.query_pre_attn_scalar = config.head_dim
    if name == "mistral":
        # by its file alone: a llama that takes the rest from it
        config = None
    want = logits(made)
    for file, tolerance in ((f32, 1e-5), (f16, 5e-3)):
        read = tf.AutoModelForCausalLM.from_pretrained(
            tmp_path,
            gguf_file=file.name,
            config=copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        assert (logits(read) - want).abs().max() < tolerance * want.abs().max(), file
    # rounded once from the float32 sum: half an ulp of float16, and the smallest of its subnormals
    exact, half = tensors(f32), tensors(f16)
    assert list(exact) == list(half)
    for key, (value, _) in exact.items():
        assert torch.equal(half[key][0], value if half[key][1] == "F32" else value.half().float()), key


@pytest.mark.parametrize("name", ["gemma", "granite", "smollm3"])
def test_values_of_families_that_transformers_does_not_read(name, tokenizer, tmp_path):
    made = tiny.with_lora(model(name))
    (file,) = save_pretrained_gguf(made, tmp_path, tokenizer, "f32")
    want, found = merged(made).state_dict(), tensors(file)
    heads, key_heads = made.config.num_attention_heads, made.config.num_key_value_heads

    def plain(key):
        value = want[f"model.layers.1.{key}"]
        return value + 1 if name == "gemma" and key.endswith("norm.weight") else value

    def pairs(value, n):
        # row 2i of a head is row i, row 2i + 1 is row i + half
        half = len(value) // n // 2
        order = [h * 2 * half + i + s * half for h in range(n) for i in range(half) for s in range(2)]
        return value if name == "gemma" else value[order]

    expected = {
        "attn_q.weight": pairs(plain("self_attn.q_proj.weight"), heads),
        "attn_k.weight": pairs(plain("self_attn.k_proj.weight"), key_heads),
        "attn_v.weight": plain("self_attn.v_proj.weight"),
        "attn_output.weight": plain("self_attn.o_proj.weight"),
        "ffn_gate.weight": plain("mlp.gate_proj.weight"),
        "ffn_up.weight": plain("mlp.up_proj.weight"),
        "ffn_down.weight": plain("mlp.down_proj.weight"),
        "attn_norm.weight": plain("input_layernorm.weight"),
        "ffn_norm.weight": plain("post_attention_layernorm.weight"),
    }
    if name == "granite":
        expected["attn_q.bias"] = pairs(plain("self_attn.q_proj.bias"), heads)
        expected["attn_k.bias"] = pairs(plain("self_attn.k_proj.bias"), key_heads)
        expected["ffn_down.bias"] = plain("mlp.down_proj.bias")
    for key, value in expected.items():
        assert torch.allclose(found[f"blk.1.{key}"][0], value, rtol=1e-6, atol=1e-7), key
    assert torch.equal(found["token_embd.weight"][0], want["model.embed_tokens.weight"])
    assert ("output.weight" in found) == (name == "granite")


def test_fields(tokenizer, tmp_path):
    (file,) = save_pretrained_gguf(model("llama3-rope"), tmp_path / "my model!", tokenizer, "q8_0")
    assert file.name == "my-model.Q8_0.gguf"
    found = fields(file)
    want = {
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": ROWS,
    }
    assert {key: found[key] for key in want} == want
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    # an own look at the frequencies that transformers computes
    stock = tf.models.llama.modeling_llama.LlamaRotaryEmbedding(tiny.config("llama3-rope", vocab_size=ROWS))
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(tensors(file)["rope_freqs.weight"][0], plain / stock.inv_freq, rtol=1e-5)


def test_fields_of_other_families(tokenizer, tmp_path):
    def saved(name, **over):
        return fields(save_pretrained_gguf(model(name, **over), tmp_path, tokenizer, "f16", model_name=name)[0])

    found = saved("granite")
    assert [
        pytest.approx(found[f"granite.{key}"])
        for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    ] == [0.2, 3.0, 0.6, 1.7]
    found = saved("gemma2")
    assert found["gemma2.attention.sliding_window"] == 6 and found["gemma2.attn_logit_softcapping"] == 1.5
    assert found["gemma2.final_logit_softcapping"] == 2.0
    assert "gemma2.attention.sliding_window_pattern" not in found
    found = saved("gemma3")
    assert found["gemma3.attention.sliding_window_pattern"] == [True, False]
    assert found["gemma3.rope.freq_base_swa"] == 10000.0 and found["gemma3.rope.freq_base"] == 1000000.0
    found = saved("phi3-longrope")
    assert found["phi3.rope.scaling.type"] == "longrope" and found["phi3.rope.scaling.original_context_length"] == 16
    stock = tf.models.phi3.modeling_phi3.Phi3RotaryEmbedding(tiny.config("phi3-longrope"))
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(stock.attention_scaling)
    assert found["phi3.rope.dimension_count"] == 8
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
    found = saved("qwen2", rope_parameters=rope)
    assert found["qwen2.rope.scaling.type"] == "yarn" and found["qwen2.rope.scaling.factor"] == 4.0
    assert found["qwen2.rope.scaling.original_context_length"] == 64
    found = saved("llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0))
    assert found["llama.rope.scaling.type"] == "linear" and found["llama.rope.scaling.factor"] == 2.0


def test_k_quants_where_rows_are_long_enough(tokenizer, tmp_path):
    """One row of q4_k_m's table, and the fallback of a width that is no multiple of 256."""
    made = model("llama", hidden_size=256, intermediate_size=352, num_hidden_layers=8)
    (file,) = save_pretrained_gguf(made, tmp_path, tokenizer, "q4_k_m")
    found = tensors(file)
    kinds = {name: kind for name, (_, kind) in found.items()}
    more = [0, 3, 6, 7]
    for i in range(8):
        assert kinds[f"blk.{i}.attn_q.weight"] == "Q4_K"
        assert kinds[f"blk.{i}.attn_v.weight"] == ("Q6_K" if i in more else "Q4_K")
        assert kinds[f"blk.{i}.ffn_down.weight"] == ("Q8_0" if i in more else "Q5_0")
    assert kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    state = made.state_dict()
    for name, key in (("blk.5.ffn_up", "layers.5.mlp.up_proj"), ("token_embd", "embed_tokens")):
        value = state[f"model.{key}.weight"]
        assert (found[f"{name}.weight"][0] - value).norm() < 0.08 * value.norm()


def test_heads_tied_and_trained_apart(tokenizer, tmp_path):
    tied = model("llama-tied-mha")
    (file,) = save_pretrained_gguf(tied, tmp_path / "tied", tokenizer, "f32")
    assert "output.weight" not in tensors(file)
    apart = shake(
        get_peft_model(tied, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])), "lm_head"
    )
    (file,) = save_pretrained_gguf(apart, tmp_path / "apart", tokenizer, "f32")
    assert torch.equal(tensors(file)["output.weight"][0], apart.base_model.model.lm_head.weight)
    gemma = get_peft_model(model("gemma"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="one matrix for the embedding and the head of gemma"):
        save_pretrained_gguf(shake(gemma, "lm_head"), tmp_path / "gemma", tokenizer)
    assert not (tmp_path / "gemma").exists()


def test_four_bit_weights_are_decoded(tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    model("llama", torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    made, loaded = fastlm.FastLanguageModel.from_pretrained(str(tmp_path / "base"), load_in_4bit=True, device_map="cpu")
    made = shake(fastlm.FastLanguageModel.get_peft_model(made, r=4), "lora_B").eval()
    (file,) = made.save_pretrained_gguf(tmp_path / "out", loaded, "f32")
    layer = made.base_model.model.model.layers[0].mlp.up_proj
    from fastlm import quant

    base = quant.decode_weight(layer.base_layer, torch.float32)
    delta = layer.lora_B.default.weight.double() @ layer.lora_A.default.weight.double() * layer.scaling["default"]
    assert torch.equal(tensors(file)["blk.0.ffn_up.weight"][0], (base + delta.float()).detach())


# --- adapters ---


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", dict(use_rslora=True, target_modules=["q_proj", "k_proj", "embed_tokens"])),
        ("llama", dict(rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 30})),
        ("qwen2", {}),
        ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj"])),
    ],
    ids=["llama", "rslora-embedding", "patterns", "qwen2", "phi3"],
)
def test_an_adapter_alone(name, settings, tokenizer, tmp_path):
    """The base file plus (alpha / rank) B A of the adapter's file is the merged file."""
    base = model(name)
    (plain,) = save_pretrained_gguf(base, tmp_path, tokenizer, "f32", model_name="base")
    plain = tensors(plain)
    made = shake(
        get_peft_model(base, LoraConfig(r=4, lora_alpha=12, **{"target_modules": tiny.targets(name)} | settings))
    )
    (whole,) = save_pretrained_gguf(made, tmp_path, tokenizer, "f32", model_name="merged")
    (file,) = save_pretrained_gguf(made, tmp_path, save_method="lora", model_name="mine")
    assert file.name == "mine.LORA.gguf"
    found, adapter = fields(file), tensors(file)
    assert (found["general.type"], found["adapter.type"], found["adapter.lora.alpha"]) == ("adapter", "lora", 12.0)
    names = {key.rpartition(".")[0] for key in adapter}
    for key, (value, _) in tensors(whole).items():
        got = plain[key][0]
        if key in names:
            a, b = adapter[f"{key}.lora_a"][0], adapter[f"{key}.lora_b"][0]
            a = a.t() if key == "token_embd.weight" else a
            delta = 12.0 / len(a) * (b @ a)
            got = got + (delta.t() if key == "token_embd.weight" else delta)
            names.remove(key)
        assert torch.allclose(got, value, rtol=1e-5, atol=1e-6), key
    assert not names


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(use_dora=True), "DoRA"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(bias="all"), "biases"),
        (dict(trainable_token_indices={"embed_tokens": [1, 2]}), "trained rows"),
    ],
)
def test_adapters_without_a_form(settings, reason, tmp_path):
    made = shake(get_peft_model(model("llama"), LoraConfig(r=2, target_modules=["q_proj"], **settings)))
    with pytest.raises(ValueError, match=f"{reason}.*save a merged model"):
        save_pretrained_gguf(made, tmp_path / "out", save_method="lora")
    assert not (tmp_path / "out").exists()


# --- mistakes, and files that stay ---


def test_mistakes(tokenizer, tmp_path):
    made = model("llama")
    for call, kind, text in (
        (dict(quantization_method="q9"), ValueError, "got 'q9'"),
        (dict(save_method="merged"), ValueError, "'merged_16bit', 'lora', got 'merged'"),
        (dict(save_method="lora"), ValueError, "needs the PEFT model with its adapter"),
        (dict(model_name="../up"), ValueError, r"letters, digits.*'\.\./up'"),
        (dict(model_name=".hidden"), ValueError, "letters, digits"),
        (dict(tokenizer=None), TypeError, "must be a fast tokenizer of transformers, got NoneType"),
    ):
        with pytest.raises(kind, match=text):
            save_pretrained_gguf(made, tmp_path / "out", **{"tokenizer": tokenizer} | call)
    for name, over, text in (
        ("olmo2", {}, "type 'olmo2' are not written as GGUF: llama, mistral"),
        ("llama", dict(hidden_act="relu"), "its MLP uses relu"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
            "RoPE is of type 'dynamic'",
        ),
        ("smollm3", dict(no_rope_layers=[0, 1]), "no_rope_layers"),
        ("qwen3", dict(attention_bias=True), r"q_proj\.bias has no place in a GGUF file of a qwen3"),
        ("llama", dict(vocab_size=300), "tokens up to 399.*has 300 rows"),
    ):
        odd = tiny.model(name, **{"vocab_size": ROWS} | over)
        with pytest.raises(ValueError, match=text):
            save_pretrained_gguf(odd, tmp_path / "out", tokenizer)
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight.*beyond float16"):
        save_pretrained_gguf(made, tmp_path / "out", tokenizer, ["bf16", "f16"])
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        save_pretrained_gguf(made, tmp_path / "out", tokenizer, "q4_k_m")
    assert not list(tmp_path.iterdir())


def test_a_window_that_llama_cpp_does_not_have_is_told(tokenizer, tmp_path, caplog):
    save_pretrained_gguf(tiny.model("mistral-window", vocab_size=ROWS), tmp_path, tokenizer, "f16")
    assert "beyond sliding_window=6" in caplog.text


def test_other_files_stay_and_an_error_leaves_what_was_there(tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "note.txt").write_text("mine")
    save_pretrained_gguf(model("llama"), out, tokenizer, ["f16", "q8_0"])
    names = {"note.txt", "Modelfile", "out.F16.gguf", "out.Q8_0.gguf"}
    assert {path.name for path in out.iterdir()} == names and {path.name for path in tmp_path.iterdir()} == {"out"}
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert (out / "Modelfile").read_text().startswith("FROM ./out.F16.gguf\n")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.gguf_types, "encode", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained_gguf(model("llama", seed=5), out, tokenizer, ["f16", "q8_0"])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_one_tensor_at_a_time(tokenizer, tmp_path, monkeypatch):
    """No value is computed before the one before it is written."""
    events = []
    encode, compute = export.gguf_types.encode, export.Source.compute
    monkeypatch.setattr(export.gguf_types, "encode", lambda *a: events.append("write") or encode(*a))
    monkeypatch.setattr(export.Source, "compute", lambda *a: events.append("compute") or compute(*a))
    save_pretrained_gguf(model("llama"), tmp_path, tokenizer, ["f16", "q8_0"])
    assert len(events) > 60 and events == ["compute", "write", "write"] * (len(events) // 3)


def test_methods_of_a_loaded_model(tokenizer, tmp_path):
    base = model("llama")
    made = fastlm.patch_model(tiny.with_lora(base))
    (file,) = made.save_pretrained_gguf(tmp_path, tokenizer, "f16")
    assert file.exists() and "push_to_hub_gguf" in vars(base)
    fastlm.revert(made)
    assert "save_pretrained_gguf" not in vars(made) and "save_pretrained_gguf" not in vars(base)


def test_upload(tokenizer, monkeypatch):
    """What goes to the hub, without one; the token goes to the client and nowhere else."""
    api = Hub([None, httpx.ConnectError("reset")])
    monkeypatch.setattr(hub, "HfApi", api)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    link = push_to_hub_gguf(model("llama"), "tiny", tokenizer, "q8_0", private=True, token=TOKEN)
    assert link == "https://hub.example/me/tiny/commit/1" and api.tokens == [TOKEN]
    assert [name for name, _ in api.calls] == ["create", "upload", "upload"] and api.calls[0][1]["private"] is True
    assert set(api.kept) == {"tiny.Q8_0.gguf", "Modelfile", "README.md"}
    assert b"library_name: gguf" in api.kept["README.md"]
    assert not any(TOKEN.encode() in content for content in api.kept.values())
    with pytest.raises(ValueError, match="repo"):
        push_to_hub_gguf(model("llama"), "../../etc", tokenizer)
