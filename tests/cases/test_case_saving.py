"""Saving: merged 16-bit checkpoints, adapters, tied heads, biases and norms, what stays in memory."""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import PROJ, build, close, differs, ids, load, logits, lora_state, ref, with_lora, workdir

FINE = {"torch.float16": 2**-11, "torch.bfloat16": 2**-8}  # half a unit in the last place


def rounded_once(got, want, fine, what):
    """Each entry is the float32 value rounded a single time (a little slack for the order of the sums)."""
    err = (got.float() - want.float()).abs()
    allowed = 1.1 * fine * want.float().abs() + 2e-6 * want.float().abs().max()
    bad = (err > allowed).float().mean().item()
    assert bad < 1e-3, f"{what}: {100 * bad:.1f}% of the entries are not the once-rounded sum, worst {err.max():.3g}"


def merged(path, scale, **kw):
    """Saves a merged checkpoint; returns (directory, the model, its tokenizer, the LoRA matrices)."""
    model, tok = load(path)
    model = with_lora(model, **kw)
    out = workdir("merged")
    model.save_pretrained_merged(out, tok, save_method="merged_16bit")
    return out, model, tok, lora_state(model)


def expected(path, lora, scale):
    want = ref("state", path=path)
    for name in [n for n in lora if n.endswith("lora_A.weight")]:
        base = name[: -len(".lora_A.weight")]
        key = next(k for k in want if k.endswith(base + ".weight"))
        want[key] = want[key] + scale * lora[base + ".lora_B.weight"] @ lora[name]
    return want


@pytest.mark.parametrize(
    "arch,over",
    [
        ("llama", {}),
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("qwen2", dict(tie_word_embeddings=True)),
        ("qwen3", {}),
        ("gemma2", {}),
    ],
)
def test_merged_16bit_weights(arch, over):
    """Every tensor equals base + alpha/r * B A, rounded once to the saved type; nothing is missing or extra."""
    path = build(arch, **over)
    out, _model, _tok, lora = merged(path, 3.0, r=8, lora_alpha=24)
    want, got, report = expected(path, lora, 3.0), ref("state", path=out), ref("load_report", path=out)
    assert report["missing"] == [] and report["unexpected"] == [], report
    fine = FINE[report["dtype"]]
    assert set(got) == set(want)
    for k, w in want.items():
        rounded_once(got[k], w, fine, k)
    changed = [k for k in want if k.endswith("q_proj.weight")]
    differs(want[changed[0]], ref("state", path=path)[changed[0]], what="adapter")
    files = os.listdir(out)
    assert "config.json" in files and "tokenizer_config.json" in files and "adapter_config.json" not in files
    config = json.loads(Path(out, "config.json").read_text())
    assert "quantization_config" not in config
    assert bool(config.get("tie_word_embeddings")) == bool(over.get("tie_word_embeddings") or arch == "gemma2")
    texts = ["hello there <|im_end|>", "one two"]
    assert ref("tokenize", path=out, texts=texts) == ref("tokenize", path=path, texts=texts)


def test_merged_model_answers_like_the_adapter():
    path = build("qwen2")
    out, model, _, _ = merged(path, 2.0, r=8, lora_alpha=16)
    batch = dict(input_ids=ids(2, 24))
    with_adapter = logits(model, batch)
    differs(with_adapter, ref("forward", path=path, batch=batch), by=0.1, what="adapter")
    close(ref("forward", path=out, batch=batch), with_adapter, tol=3e-2)


def test_saving_merged_leaves_the_model_as_it_was():
    """Training goes on after a merged save: same answers, LoRA still there and still trainable."""
    path = build("llama")
    model, tok = load(path)
    model = with_lora(model)
    batch = dict(input_ids=ids(1, 16))
    before, lora = logits(model, batch), lora_state(model)
    for _ in range(2):
        model.save_pretrained_merged(workdir("merged"), tok, save_method="merged_16bit")
    close(logits(model, batch), before, tol=1e-6)
    after = lora_state(model)
    assert set(after) == set(lora) and all(torch.equal(after[k], lora[k]) for k in lora)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_round_trip(rslora):
    """Adapter saved here, opened by plain peft and by this package: same logits; alpha/sqrt(r) survives."""
    path = build("qwen3")
    model, tok = load(path)
    model = with_lora(model, r=4, lora_alpha=6, use_rslora=rslora)
    batch = dict(input_ids=ids(2, 20))
    here = logits(model, batch)
    want = ref(
        "forward",
        path=path,
        batch=batch,
        lora=dict(r=4, lora_alpha=6, target_modules=PROJ, use_rslora=rslora, lora_dropout=0.0),
    )
    close(here, want, what="in memory")
    out = workdir("adapter")
    model.save_pretrained(out)
    tok.save_pretrained(out)
    saved = json.loads(Path(out, "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["use_rslora"]) == (4, 6, rslora)
    close(ref("forward", path=path, batch=batch, adapter=out), want, what="plain peft")
    again, _ = load(out)
    close(logits(again, batch), want, what="loaded here")
    assert any(p.requires_grad for n, p in again.named_parameters() if "lora_" in n), "not trainable after loading"


def test_adapter_made_by_plain_peft():
    path = build("llama")
    out = ref("make_adapter", path=path, out=workdir("peft"), lora=dict(r=4, lora_alpha=12, target_modules=PROJ))
    batch = dict(input_ids=ids(2, 20))
    model, _ = load(out)
    close(logits(model, batch), ref("forward", path=path, batch=batch, adapter=out))


def test_fresh_adapter_changes_nothing_and_seeds_repeat():
    path = build("llama")
    batch = dict(input_ids=ids(1, 16))
    base = ref("forward", path=path, batch=batch)
    states = []
    for noise, seed in ((1, 3407), (2, 3407), (1, 11)):
        torch.manual_seed(noise)  # what happened before must not matter
        model, _ = load(path)
        model = with_lora(model, randomise=False, random_state=seed)
        close(logits(model, batch), base, tol=1e-5)
        states.append(lora_state(model))
    a = [n for n in states[0] if "lora_A" in n]
    assert all(torch.equal(states[0][n], states[1][n]) for n in a), "same seed, other matrices"
    assert not any(torch.equal(states[0][n], states[2][n]) for n in a), "other seed, same matrices"
    assert all(states[0][n].abs().max() == 0 for n in states[0] if "lora_B" in n)


def test_only_adapters_are_trainable():
    model, _ = load(build("qwen2"))
    model = with_lora(model, randomise=False)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in n for n in names)
    assert len(names) == 2 * 2 * 7  # layers x (A, B) x projections
