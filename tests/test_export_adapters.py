"""Adapters on disk and back: save_lora, load_lora, PEFT's own methods on fast models, and what an interruption leaves."""

import json
import re

import checkpoint
import pytest
import torch
from exported import BATCH, assert_close, logits, reload, same_bits, shake, tensors
from peft import PeftModel
from safetensors.torch import load_file, save_file

import fastlm
from fastlm import FastLanguageModel
from fastlm.export import save_pretrained_merged

TARGETS = ["q_proj", "v_proj", "down_proj"]


def load(folder, **kw):
    return FastLanguageModel.from_pretrained(str(folder), **dict(load_in_16bit=True, dtype="float32") | kw)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("adapters") / "base")


def adapted(base, seed=1, **kw):
    loading = {key: kw.pop(key) for key in ("load_in_4bit", "load_in_16bit", "dtype") if key in kw}
    model, tokenizer = load(base, **loading)
    model = FastLanguageModel.get_peft_model(model, **dict(r=4, lora_alpha=12, target_modules=TARGETS) | kw)
    return shake(model, seed=seed).eval(), tokenizer


def state(model, name="default"):
    return {key: value.clone() for key, value in model.state_dict().items() if f".{name}." in f".{key}."}


VARIANTS = {
    "lora": {},
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "copies": dict(modules_to_save=["lm_head"]),
    "biases": dict(bias="all"),
    "tokens": dict(trainable_token_indices={"embed_tokens": [1, 5]}),
    "4bit": dict(load_in_4bit=True, load_in_16bit=None),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_round_trip_to_the_bit(variant, base, tmp_path):
    """Saved, loaded, saved again: the same bytes; loaded for training, with the logits of before."""
    kw = VARIANTS[variant]
    model, tokenizer = adapted(base, **kw)
    if variant in ("copies", "tokens"):
        shake(model, {"copies": "modules_to_save", "tokens": "trainable_tokens"}[variant])
    model.save_lora(tmp_path / "first", tokenizer)
    again, _ = load(tmp_path / "first", **{key: kw[key] for key in kw if key.startswith("load_in")})
    again.save_lora(str(tmp_path / "second"))
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert set(first) == set(second) and all(same_bits(first[key], second[key]) for key in first)
    assert torch.equal(logits(again.eval()), logits(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trained
    for file in tokenizer.save_pretrained(tmp_path / "tokenizer"):
        name = file.rpartition("/")[2]
        assert (tmp_path / "first" / name).exists() or not (tmp_path / "tokenizer" / name).exists()


def test_hot_swap(base, tmp_path):
    """One adapter after the other on one fast model: each answers as it did where it was trained."""
    answers = {}
    for seed, name in enumerate(("one", "two.b", "three"), 1):
        model, _ = adapted(base, seed=seed, r=2 + seed)
        model.save_lora(tmp_path / name)
        answers[name] = logits(model)
    assert (answers["one"] - answers["three"]).abs().max() > 0.1
    serving, _ = load(tmp_path / "one")
    FastLanguageModel.for_inference(serving)
    for name in ("two.b", "three", "two.b"):
        assert serving.load_lora(tmp_path / name) == name.replace(".", "_")
        assert serving.active_adapters == [name.replace(".", "_")]
        assert_close(logits(serving), answers[name], 1e-6)
        assert not any(parameter.requires_grad for parameter in serving.parameters())
    assert set(serving.peft_config) == {"default", "two_b", "three"}
    # one in the place of another of its name, and rank
    assert serving.load_lora(tmp_path / "three", adapter_name="two_b") == "two_b"
    assert_close(logits(serving), answers["three"], 1e-6)
    assert set(serving.peft_config) == {"default", "two_b", "three"}
    serving.set_adapter("default")
    assert_close(logits(serving), answers["one"], 1e-6)


def test_loaded_for_further_training(base, tmp_path):
    model, _ = adapted(base)
    model.save_lora(tmp_path / "more")
    model.load_lora(tmp_path / "more", is_trainable=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".more." in name for name in trained)
    model.train()
    model(input_ids=BATCH, labels=BATCH).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert len(fastlm.report(model).as_dicts()) > 0


def test_mixtures_merge_as_they_answer(base, tmp_path):
    model, _ = adapted(base)
    other, _ = adapted(base, seed=5)
    other.save_lora(tmp_path / "other")
    model.load_lora(tmp_path / "other")
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "both", combination_type="linear")
    model.set_adapter("both")
    first = logits(model)
    model.save_pretrained_merged(tmp_path / "merged", dtype=torch.float32)
    assert_close(logits(reload(tmp_path / "merged")), first, 2e-5)
    model.save_lora(tmp_path / "all")
    for name in ("other", "both"):
        assert (tmp_path / "all" / name / "adapter_model.safetensors").exists()
    again, _ = load(tmp_path / "all")
    again.load_lora(tmp_path / "all" / "both")
    assert_close(logits(again.eval()), first, 1e-6)


def test_plain_peft_reads_it(base, tmp_path):
    model, _ = adapted(base)
    model.save_lora(tmp_path / "out")
    plain = PeftModel.from_pretrained(reload(base), tmp_path / "out").eval()
    assert_close(logits(plain), logits(model), 1e-5)


def spoil(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_an_adapter_that_does_not_fit_changes_nothing(base, tmp_path):
    model, _ = adapted(base)
    for name in ("short", "long", "wide", "hostile", "cut"):
        model.save_lora(tmp_path / name)
    content = load_file(tmp_path / "short" / "adapter_model.safetensors")
    key = next(key for key in sorted(content) if "down_proj" in key)
    save_file({k: v for k, v in content.items() if k != key}, tmp_path / "short" / "adapter_model.safetensors")
    save_file(
        content | {key.replace("down_proj", "side_proj"): content[key].clone()},
        tmp_path / "long" / "adapter_model.safetensors",
    )
    spoil(tmp_path / "wide", r=8)
    spoil(tmp_path / "hostile", megatron_config={"a": 1})
    with (tmp_path / "cut" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(400)
    model.train()
    before, flags = state(model), [p.requires_grad for p in model.parameters()]
    answer = logits(model)
    for name, text in (
        ("short", "lacks .*down_proj"),
        ("long", "side_proj.* has no place"),
        ("wide", "size mismatch|does not fit"),
        ("hostile", "megatron_config"),
        ("cut", "is damaged"),
        ("nowhere", "holds no adapter"),
    ):
        with pytest.raises(ValueError, match=text):
            model.load_lora(tmp_path / name)
        with pytest.raises(ValueError, match=text):
            model.load_lora(tmp_path / name, adapter_name="default")
        assert set(model.peft_config) == {"default"} and model.active_adapters == ["default"] and model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    after = state(model)
    assert set(after) == set(before) and all(same_bits(after[k], before[k]) for k in before)
    assert torch.equal(logits(model), answer)
    spoil(tmp_path / "wide", r=4)
    with pytest.raises(ValueError, match="no dot"):
        model.load_lora(tmp_path / "wide", adapter_name="a.b")
    plain, _ = load(base)
    with pytest.raises(TypeError, match="FastLanguageModel.from_pretrained"):
        plain.load_lora(tmp_path / "wide")
    with pytest.raises(ValueError, match="needs the PEFT model"):
        plain.save_lora(tmp_path / "none")


def test_a_save_that_fails_leaves_the_adapter_that_was_there(base, tmp_path):
    model, tokenizer = adapted(base)
    model.save_lora(tmp_path / "out", tokenizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    shake(model, seed=9)

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        model.save_lora(tmp_path / "out", Broken())
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_methods_come_and_go_with_the_patch(base):
    model, _ = adapted(base)
    names = ("save_lora", "load_lora", "push_to_hub_merged", "push_to_hub", "save_pretrained_merged")
    assert all(name in vars(model) and re.match(r"[A-Z]", getattr(model, name).__doc__) for name in names)
    fastlm.revert(model)
    assert not any(name in vars(model) for name in names)
    assert callable(model.push_to_hub)


def test_merged_of_an_adapter_trained_on_4_bits(base, tmp_path):
    model, tokenizer = adapted(base, load_in_4bit=True, load_in_16bit=None, dtype="bfloat16")
    save_pretrained_merged(model, tmp_path / "merged", tokenizer)
    save_pretrained_merged(model, tmp_path / "on-base", tokenizer, base=base)
    four, full = tensors(tmp_path / "merged"), tensors(tmp_path / "on-base")
    name = "model.layers.0.mlp.down_proj.weight"
    difference = (four[name].float() - full[name].float()).norm() / full[name].float().norm()
    assert 0.02 < difference < 0.2
