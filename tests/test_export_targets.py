"""Quantized formats of other libraries: loaded by transformers, they hold the merged weights rounded to nearest."""

import importlib.util
import json

import pytest
import torch
import transformers as tf
from exported import make, tensors, tokenizer, with_lora

from fastlm.export import save_pretrained_merged, targets

WIDE = dict(hidden_size=128, intermediate_size=256)


def saved(method, tmp_path, name="llama-biases", **kw):
    model = with_lora(make(name, **WIDE))
    save_pretrained_merged(model, tmp_path / "dense", tokenizer())
    save_pretrained_merged(model, tmp_path / "out", tokenizer(), save_method=method, **kw)
    return tensors(tmp_path / "dense"), tensors(tmp_path / "out"), tmp_path / "out"


def groups(weight, size):
    return weight.float().unflatten(-1, (-1, size)) if size else weight.float().unsqueeze(1)


@pytest.mark.parametrize(
    "method, size, steps",
    [
        ("compressed_tensors_w4a16", 128, 7.5),
        ("compressed_tensors_w8a16", 128, 127.5),
        ("compressed_tensors_int8", 0, 127.5),
        ("compressed_tensors_fp8", 0, None),
    ],
)
def test_compressed_tensors(method, size, steps, tmp_path):
    pytest.importorskip("compressed_tensors")
    dense, got, folder = saved(method, tmp_path)
    loaded, info = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    # the first call decodes
    loaded(input_ids=torch.arange(8)[None])
    n_layers = 0
    for name, module in loaded.named_modules():
        if type(module).__name__.endswith("Linear") and name != "lm_head":
            n_layers += 1
            want, found = groups(dense[f"{name}.weight"], size), groups(module.weight.detach(), size)
            largest = want.abs().amax(-1, keepdim=True)
            # half a step, and the rounding of scale and result to bfloat16; fp8 (e4m3) rounds to 4 bits of each value, or to its least ones
            allowed = largest / steps * 0.5 if steps else torch.maximum(want.abs() / 16, largest / 448 * 2**-9)
            # the largest value of a 4-bit or 8-bit range lies half a step beyond the last code
            assert ((found - want).abs() <= allowed * 1.1 + largest * 2.0**-7).all(), name
    assert n_layers == 14 and "lm_head.weight" in got and got["lm_head.weight"].dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert tf.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [1, 2]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_shards_of_compressed_tensors(tmp_path):
    pytest.importorskip("compressed_tensors")
    _, whole, folder = saved("compressed_tensors_w4a16", tmp_path, "qwen2-tied", max_shard_size="20KB")
    assert len(list(folder.glob("model-*"))) > 2 and not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)
    _, info = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_groups_that_do_not_fit(tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.raises(
        ValueError, match=r"q_proj has 32 inputs, W4A16 needs a multiple of 128.*compressed_tensors_fp8"
    ):
        save_pretrained_merged(make("llama"), tmp_path / "out", save_method="compressed_tensors_w4a16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method, error", [("torchao_int8", 0.5 / 127.5), ("torchao_fp8", 2.0**-4)])
def test_torchao(method, error, tmp_path):
    pytest.importorskip("torchao")
    dense, _, folder = saved(method, tmp_path)
    loaded, info = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    assert not any(info.values()), info
    n_layers = 0
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            n_layers += 1
            want, found = dense[f"{name}.weight"].float(), module.weight.dequantize().float()
            assert not torch.equal(want, found)
            # half a step of 8 bits, and the rounding of scale and result to bfloat16
            largest = want.abs().amax(-1, keepdim=True)
            assert ((found - want).abs() <= (error + 2.0**-8) * largest).all(), name
    assert n_layers == 14
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for method in targets.TARGETS:
        extra = "torchao" if "torchao" in method else "compressed-tensors"
        with pytest.raises(ImportError, match=rf"fastlm\[{extra}\]"):
            targets.check_target(method)
    with pytest.raises(ImportError, match="compressed-tensors, which is not installed"):
        save_pretrained_merged(make("llama"), tmp_path / "out", save_method="compressed_tensors_fp8")


def test_int4_of_torchao_is_explained(tmp_path):
    with pytest.raises(ValueError, match="compressed_tensors_w4a16"):
        save_pretrained_merged(make("llama"), tmp_path / "out", save_method="torchao_int4")
