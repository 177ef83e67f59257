"""The folder of a merged save: shards, what a failure leaves behind, and mistakes that are errors before anything moves."""

import itertools
import json
import logging
import math
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import transformers as tf
from exported import assert_close, logits, make, reload, same_bits, shake, tensors, tokenizer, with_lora
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from fastlm.export import folders, save_pretrained_merged


def test_shards_and_the_files_around_them(tmp_path):
    model = with_lora(make("llama"))
    save_pretrained_merged(model, tmp_path)
    single = tensors(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_text("mine")
    save_pretrained_merged(model, tmp_path, max_shard_size="10KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files[0] == f"model-00001-of-{count:05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    for file in files:
        content = load_file(tmp_path / file)
        assert set(content) == {key for key, value in index["weight_map"].items() if value == file}
        assert sum(t.nbytes for t in content.values()) <= 10_000 or len(content) == 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in single.values())
    sharded = tensors(tmp_path)
    assert all(same_bits(sharded[key], single[key]) for key in single) and set(sharded) == set(single)
    assert_close(logits(reload(tmp_path, torch.bfloat16)), logits(model), 0.05)
    save_pretrained_merged(model, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "sub" / "model.safetensors").read_text() == "mine"


class BrokenTokenizer:
    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("half")
        raise OSError("no space left on device")


@pytest.mark.parametrize("failure", ["tokenizer", "weights", "lora"])
@pytest.mark.parametrize("exists", [True, False], ids=["old-save", "new-folder"])
def test_a_failure_leaves_everything_as_it_was(failure, exists, tmp_path):
    model = with_lora(make("llama"))
    target = tmp_path / "out"
    if exists:
        save_pretrained_merged(model, target, tokenizer(), max_shard_size="10KB")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    shake(model)
    if failure == "weights":
        # after most of the shards were written
        with torch.no_grad():
            model.get_base_model().model.norm.weight[3] = math.nan
        with pytest.raises(ValueError, match=r"model\.norm\.weight.*not finite"):
            save_pretrained_merged(model, target, tokenizer(), max_shard_size="10KB")
    else:
        with pytest.raises(OSError, match="no space"):
            save_pretrained_merged(model, target, BrokenTokenizer(), "lora" if failure == "lora" else "merged_16bit")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out"] if exists else [])


def test_a_folder_in_the_way_is_an_error_before_anything_moves(tmp_path):
    model = with_lora(make("llama"))
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is a folder"):
        save_pretrained_merged(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_lora(tmp_path):
    base = make("llama", torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("# mine\n")
    save_pretrained_merged(model, tmp_path / "out", tokenizer(), save_method="lora")
    assert "# mine" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not list((tmp_path / "out").glob("model*"))
    again = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    assert torch.equal(logits(again.eval()), logits(model))


def test_a_merged_save_into_an_adapter_folder_is_refused(tmp_path):
    model = with_lora(make("llama"))
    save_pretrained_merged(model, tmp_path, save_method="lora")
    with pytest.raises(ValueError, match="holds an adapter"):
        save_pretrained_merged(model, tmp_path)


def test_mistakes(tmp_path):
    model, plain = with_lora(make("llama")), make("llama")
    with pytest.raises(
        ValueError, match="'merged_16bit', 'merged_4bit', 'merged_4bit_forced', 'lora', .* got 'merged16'"
    ):
        save_pretrained_merged(model, tmp_path, save_method="merged16")
    with pytest.raises(NotImplementedError, match="not supported yet.*gguf"):
        save_pretrained_merged(model, tmp_path, save_method="q4_k_m")
    for without in (plain, model.get_base_model()):
        with pytest.raises(ValueError, match="needs the PEFT model with its adapter, got a LlamaForCausalLM"):
            save_pretrained_merged(without, tmp_path, save_method="lora")
    with pytest.raises(ValueError, match=r"dtype must be one of .*got torch\.int8"):
        save_pretrained_merged(plain, tmp_path, dtype=torch.int8)
    with pytest.raises(TypeError, match="got Sequential"):
        save_pretrained_merged(torch.nn.Sequential(plain), tmp_path)
    with pytest.raises(ValueError, match="switched off"), model.disable_adapter():
        save_pretrained_merged(model, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        save_pretrained_merged(model, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"], task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ],
    ids=["ia3", "parameter", "alora", "prompt"],
)
def test_adapters_without_a_merged_form_are_refused(config, tmp_path):
    model = get_peft_model(make("llama"), config)
    with pytest.raises(ValueError, match=r"no merged form.*save_method='lora'"):
        save_pretrained_merged(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_changes_nothing(tmp_path, caplog):
    model = get_peft_model(make("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with caplog.at_level(logging.WARNING, logger="fastlm"):
        save_pretrained_merged(model, tmp_path / "zero")
    assert "all zero" in caplog.text and (tmp_path / "zero" / "model.safetensors").exists()
    shake(model, "lora_B", std=1e-9)
    with pytest.raises(ValueError, match="too small to change"):
        save_pretrained_merged(model, tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


def test_values_that_do_not_fit_the_saved_dtype(tmp_path):
    model = make("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight.*float16.*bfloat16"):
        save_pretrained_merged(model, tmp_path / "out", dtype=torch.float16)
    save_pretrained_merged(model, tmp_path / "out")
    assert tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"][0, 0] == torch.tensor(1e6).bfloat16()


def test_files_get_the_usual_permissions(tmp_path):
    save_pretrained_merged(make("llama"), tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


SIZES = {1.0: "5GB", 2.0: "10KB"}


def save_as(value, model, target):
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(value)
    # progress bars share a lock with forked processes, and one that is killed would keep it
    save_pretrained_merged(model, target, max_shard_size=SIZES[value], verify=False)


def save_by_turns(model, target):
    for value in itertools.cycle((2.0, 1.0)):
        save_as(value, model, target)


def saved_value(target, wanted):
    """Which of the two saves a folder holds; an error if it is not whole."""
    content = tensors(target)
    assert set(content) == wanted
    files = {path.name for path in target.glob("model*")}
    if files != {"model.safetensors"}:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values(), "model.safetensors.index.json"} == files
    value = 1.0 if files == {"model.safetensors"} else 2.0
    assert (content["model.norm.weight"] == value).all()
    return value


def test_a_kill_at_any_moment_leaves_one_whole_save(tmp_path):
    model, target = with_lora(make("llama")), tmp_path / "out"
    save_as(1.0, model, target)
    (target / "notes.txt").write_text("mine")
    wanted = set(tensors(target))
    context = multiprocessing.get_context("fork")
    for turn in range(12):
        child = context.Process(target=save_by_turns, args=(model, target))
        child.start()
        time.sleep(0.01 + 0.035 * turn)
        child.kill()
        child.join()
        saved_value(target, wanted)
        assert (target / "notes.txt").read_text() == "mine"
    save_as(2.0, model, target)
    assert saved_value(target, wanted) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_system_that_cannot_exchange_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    model, target = with_lora(make("llama")), tmp_path / "out"
    save_pretrained_merged(model, target, max_shard_size="10KB")
    (target / "notes.txt").write_text("mine")
    (target / "link").symlink_to("notes.txt")
    save_pretrained_merged(model, target)
    assert [path.name for path in target.glob("model*")] == ["model.safetensors"]
    assert (target / "notes.txt").read_text() == "mine" and (target / "link").is_symlink()
    # killed between its two renames
    target.rename(tmp_path / ".out.replaced")
    save_pretrained_merged(model, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] and (target / "notes.txt").exists()


def test_a_mount_point_is_written_file_by_file(tmp_path, monkeypatch):
    model, target = with_lora(make("llama")), tmp_path / "out"
    save_pretrained_merged(model, target, max_shard_size="10KB")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == target)
    node = target.stat().st_ino
    save_pretrained_merged(model, target)
    assert target.stat().st_ino == node
    assert [path.name for path in target.iterdir() if path.name[:5] in ("model", ".out.")] == ["model.safetensors"]
