"""Loading and extending: new tokens, adapters of newer versions, damaged files, adapting twice."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import PROJ, build, close, ids, load, logits, lora_state, ref, with_lora, workdir

BATCH = dict(input_ids=ids(2, 18, vocab=320))


def shake_full_copies(model, seed=0):
    """Gives the fully trained copies (modules_to_save) other values, each its own."""
    n = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "modules_to_save" in name and p.requires_grad:
                g = torch.Generator().manual_seed(seed + n)
                p.add_((torch.randn(p.shape, generator=g) * 0.2).to(p.dtype).to(p.device))
                n += 1
    assert n, "no fully trained copies found"
    return n


def save_merged(model, tok, out=None):
    out = out or workdir("merged")
    model.save_pretrained_merged(out, tok, save_method="merged_16bit")
    return out


def test_new_tokens():
    """Four new tokens, embeddings grown to 324, all trained, saved, loaded and merged."""
    path = build("llama", vocab_size=320)
    model, tok = load(path)
    assert tok.add_tokens(["<a>", "<b>", "<c>", "<d>"]) == 4
    model.resize_token_embeddings(len(tok))
    model = with_lora(model, modules_to_save=["embed_tokens", "lm_head"])
    shake_full_copies(model)
    batch = dict(input_ids=torch.tensor([tok("hello <a> there <d>", add_special_tokens=False)["input_ids"]]))
    assert batch["input_ids"].max() == 323
    here = logits(model, batch)
    assert here.shape[-1] == 324
    adapter = workdir("adapter")
    model.save_pretrained(adapter)
    tok.save_pretrained(adapter)
    again, tok2 = load(adapter)
    assert len(tok2) == 324
    close(logits(again, batch), here, what="adapter loaded here")
    out = save_merged(model, tok)
    assert json.load(open(os.path.join(out, "config.json")))["vocab_size"] == 324  # noqa: SIM115
    close(ref("forward", path=out, batch=batch), here, tol=3e-2, what="merged")


def test_adapter_settings_unknown_to_this_version():
    """An adapter written by a newer library has settings nobody here knows: it loads, with the same answers."""
    path = build("llama")
    out = ref("make_adapter", path=path, out=workdir("peft"), lora=dict(r=4, lora_alpha=12, target_modules=PROJ))
    want = ref("forward", path=path, batch=BATCH, adapter=out)
    f = Path(out, "adapter_config.json")
    cfg = dict(json.loads(f.read_text()), setting_of_the_future=None, another_config={"a": 1})
    f.write_text(json.dumps(cfg))
    model, _ = load(out)
    close(logits(model, BATCH), want)


@pytest.mark.parametrize("how", ["cut", "empty", "text"])
def test_damaged_weights_are_an_error(how):
    src = workdir("bad")
    shutil.rmtree(src)
    shutil.copytree(build("llama"), src)
    f = Path(src, "model.safetensors")
    data = f.read_bytes()
    f.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "text": b"version https://git-lfs"}[how])
    with pytest.raises(Exception):  # noqa: B017
        load(src)


def test_adapting_twice_does_not_stack():
    """get_peft_model on a model that has adapters: an error, or the same model; never a second set on top."""
    from fastlm import FastLanguageModel

    path = build("llama")
    model, _ = load(path)
    model = with_lora(model)
    here, n = logits(model, BATCH), len(lora_state(model))
    try:
        again = FastLanguageModel.get_peft_model(
            model,
            r=8,
            target_modules=PROJ,
            lora_alpha=16,
            lora_dropout=0,
            bias="none",
            use_gradient_checkpointing=False,
            random_state=3407,
        )
    except Exception:
        again = model
    assert len(lora_state(again)) == n
    close(logits(again, BATCH), here, tol=1e-5)
