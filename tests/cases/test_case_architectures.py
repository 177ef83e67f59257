"""Logits, loss and LoRA gradients equal plain transformers + peft in float32.

Covers: query/key/value biases (Qwen2), query/key norms and head_dim != hidden/heads (Qwen3),
sliding windows (Mistral), attention and final soft-capping with alternating windows (Gemma2),
attention sinks (gpt-oss), ignored labels, right padding, lora_alpha != r.
"""

import pytest
from tiny_models import (
    PROJ,
    build,
    close,
    close_grads,
    close_number,
    differs,
    ids,
    labels_like,
    load,
    logits,
    loss_and_grads,
    ref,
    with_lora,
)

ARCHS = {
    "llama": dict(arch="llama"),
    "llama-biases": dict(arch="llama", attention_bias=True, mlp_bias=True),
    "mistral-window": dict(arch="mistral", sliding_window=8),
    "qwen2-biases": dict(arch="qwen2"),
    "qwen3-qk-norm-wide-heads": dict(arch="qwen3"),
    "gemma2-softcap-window": dict(arch="gemma2"),
    "gpt-oss-sinks": dict(arch="gpt_oss"),
}
ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]


def targets(name):
    return ATTN if name.startswith("gpt-oss") else PROJ


def padded_batch():
    x = ids(3, 28, seed=5)
    mask = x.new_ones(x.shape)
    y = labels_like(x)
    for row, n in ((1, 19), (2, 9)):
        x[row, n:], mask[row, n:], y[row, n:] = 3, 0, -100
    return dict(input_ids=x, attention_mask=mask, labels=y)


@pytest.mark.parametrize("name", ARCHS)
def test_logits(name):
    path = build(**ARCHS[name])
    batch = dict(input_ids=ids(2, 40))
    model, _ = load(path)
    close(logits(model, batch), ref("forward", path=path, batch=batch), what=name)


@pytest.mark.parametrize("name", ARCHS)
def test_loss_and_lora_gradients(name):
    path = build(**ARCHS[name])
    batch = padded_batch()
    want = ref(
        "forward",
        path=path,
        batch=batch,
        want="grads",
        only="lora_",
        lora=dict(r=8, lora_alpha=24, target_modules=targets(name), lora_dropout=0.0),
    )
    model, _ = load(path)
    model = with_lora(model, r=8, lora_alpha=24, target_modules=targets(name))
    loss, grads = loss_and_grads(model, batch, only="lora_")
    close_number(loss, want["loss"], what=f"{name} loss")
    close_grads(grads, want["grads"])


def test_window_is_used_at_all():
    """A window of 8 must change what position 39 sees; and positions before 8 stay as they were."""
    wide, narrow = build("mistral", sliding_window=None), build("mistral", sliding_window=8)
    batch = dict(input_ids=ids(1, 40))
    a, b = ref("forward", path=wide, batch=batch), ref("forward", path=narrow, batch=batch)
    differs(a[:, 20:], b[:, 20:], what="window")
    model, _ = load(narrow)
    got = logits(model, batch)
    close(got, b)
    close(got[:, :8], a[:, :8], what="before the window matters")


def test_softcaps_are_used_at_all():
    capped = build("gemma2")
    batch = dict(input_ids=ids(1, 24))
    free = ref("forward", path=build("gemma2", final_logit_softcapping=None, attn_logit_softcapping=None), batch=batch)
    want = ref("forward", path=capped, batch=batch)
    differs(free, want, what="softcap")
    model, _ = load(capped)
    got = logits(model, batch)
    close(got, want)
    assert got.abs().max() < 4.0


def test_partly_adapted_layers():
    """LoRA on two projections only: the others keep their base behaviour, gradients stay right."""
    path = build("qwen2")
    batch = padded_batch()
    some = ["q_proj", "down_proj"]
    want = ref(
        "forward",
        path=path,
        batch=batch,
        want="grads",
        only="lora_",
        lora=dict(r=4, lora_alpha=4, target_modules=some, lora_dropout=0.0),
    )
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=4, target_modules=some)
    loss, grads = loss_and_grads(model, batch, only="lora_")
    close_number(loss, want["loss"])
    close_grads(grads, want["grads"])
