"""GGUF export, read back with the `gguf` package.  Skipped without it.

Right values (llama.cpp's layout): query and key rows are re-ordered from half-split to interleaved rotary
for the llama architecture only; everything else is copied; a tied head has no output.weight or an equal one;
the token list is as long as the embedding has rows.
"""

import glob
import os

import numpy as np
import pytest
import torch
from tiny_models import build, gap, load, ref, rope, with_lora, workdir

gguf = pytest.importorskip("gguf")


def export(path, adapt=False, method="f16"):
    model, tok = load(path)
    if adapt:
        model = with_lora(model, r=4, lora_alpha=8)
    if not hasattr(model, "save_pretrained_gguf"):
        pytest.skip("no GGUF export here yet")
    out = workdir("gguf")
    model.save_pretrained_gguf(out, tok, quantization_method=method)
    files = glob.glob(os.path.join(out, "**", "*.gguf"), recursive=True) or glob.glob(out + "*/*.gguf")
    assert files, "no .gguf file written"
    return gguf.GGUFReader(files[0]), model, tok


def tensors(reader):
    out = {}
    for t in reader.tensors:
        data = gguf.quants.dequantize(t.data, t.tensor_type)
        out[t.name] = torch.tensor(np.array(data, dtype=np.float32)).reshape(*[int(v) for v in reversed(t.shape)])
    return out


def field(reader, key):
    f = reader.fields[key]
    v = f.contents()
    return v


def interleave(w, heads):
    rows, cols = w.shape
    return w.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def test_llama_layout():
    path = build("llama", **rope("default", theta=500000.0))
    reader, _, _tok = export(path)
    got, want = tensors(reader), ref("state", path=path)
    q, k = (want[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
    assert gap(got["blk.0.attn_q.weight"], interleave(q, 4)) < 2e-3
    assert gap(got["blk.0.attn_k.weight"], interleave(k, 2)) < 2e-3
    assert gap(got["blk.0.attn_v.weight"], want["model.layers.0.self_attn.v_proj.weight"]) < 2e-3
    assert gap(got["blk.1.ffn_down.weight"], want["model.layers.1.mlp.down_proj.weight"]) < 2e-3
    assert gap(got["output.weight"], want["lm_head.weight"]) < 2e-3
    assert field(reader, "general.architecture") == "llama"
    assert abs(field(reader, "llama.rope.freq_base") - 500000.0) < 1
    assert field(reader, "llama.attention.head_count_kv") == 2


def test_qwen2_is_not_reordered_and_keeps_biases():
    path = build("qwen2", tie_word_embeddings=True)
    reader, _, _ = export(path)
    got, want = tensors(reader), ref("state", path=path)
    assert gap(got["blk.0.attn_q.weight"], want["model.layers.0.self_attn.q_proj.weight"]) < 2e-3
    assert gap(got["blk.0.attn_q.bias"], want["model.layers.0.self_attn.q_proj.bias"]) < 2e-3
    if "output.weight" in got:
        assert gap(got["output.weight"], want["model.embed_tokens.weight"]) < 2e-3
