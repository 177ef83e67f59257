"""The loss: how it is averaged, what is ignored, very large vocabularies, fully ignored batches."""

import pytest
import torch
from tiny_models import (
    PROJ,
    Collate,
    build,
    close,
    close_grads,
    close_number,
    grads_of,
    ids,
    labels_like,
    load,
    logits,
    lora_state,
    loss_and_grads,
    losses_of,
    ref,
    rows_of_lengths,
    to_device,
    trainer_for,
    with_lora,
)

LORA = dict(r=4, lora_alpha=8, target_modules=PROJ, lora_dropout=0.0)


def test_accumulated_loss_is_per_token_of_the_whole_step():
    """Two micro-batches with 2 and 30 trained tokens, num_items_in_batch=32: the losses and the gradients
    add up to those of one batch.  A mean of means gives the short row sixteen times its weight."""
    path = build("llama")
    rows = rows_of_lengths([4, 32])
    trained = sum(sum(v != -100 for v in r["labels"][1:]) for r in rows)
    whole = Collate()(rows)
    want = ref("forward", path=path, batch=whole, want="grads", only="lora_", lora=LORA)
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8)
    model.train()
    total = 0.0
    for r in rows:
        out = model(**to_device(Collate()([r]), model), use_cache=False, num_items_in_batch=trained)
        out.loss.backward()
        total += out.loss.item()
    close_number(total, want["loss"], what="summed micro-batch losses")
    close_grads(grads_of(model, "lora_"), want["grads"])


def test_accumulation_in_the_trainer_equals_one_large_batch():
    """Four rows, one step: batch size 4, and batch size 1 with 4 accumulation steps, end in the same weights."""
    path = build("llama")
    rows = rows_of_lengths([5, 30, 9, 18])
    want = ref("train", path=path, rows=rows, lora=LORA, per_device_train_batch_size=4, max_steps=1, optim="sgd")
    ends = {}
    for size, steps in ((4, 1), (1, 4)):
        model, _ = load(path)
        model = with_lora(model, r=4, lora_alpha=8)
        t = trainer_for(
            model, rows, per_device_train_batch_size=size, gradient_accumulation_steps=steps, max_steps=1, optim="sgd"
        )
        t.train()
        ends[size] = lora_state(model)
        close_number(losses_of(t)[0], want["losses"][0], tol=1e-3, what=f"logged loss, {size} x {steps}")
    for end in ends.values():
        for n, v in want["lora"].items():
            close(end[n], v, tol=1e-5, what=n)


def test_batch_with_nothing_to_train_on_is_zero_and_finite():
    """Every label ignored while the step has 10 trained tokens elsewhere: loss 0, no NaN in any gradient."""
    path = build("llama")
    model, _ = load(path)
    model = with_lora(model, r=4)
    x = ids(2, 12)
    model.train()
    out = model(
        **to_device(dict(input_ids=x, labels=torch.full_like(x, -100)), model), use_cache=False, num_items_in_batch=10
    )
    assert out.loss.item() == 0.0
    out.loss.backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all() and p.grad.abs().max() == 0, n


@pytest.mark.parametrize("vocab", [65536, 70001, 131200])
def test_vocabulary_larger_than_one_block(vocab):
    """Vocabulary beyond 65536 and not a multiple of anything; targets sit at both ends of it."""
    path = build("llama", vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    x = ids(2, 10, vocab=vocab)
    y = x.clone()
    y[0, 3], y[0, 5], y[1, 4], y[1, 6] = vocab - 1, 0, min(65536, vocab - 1), -100
    batch = dict(input_ids=x, labels=y)
    lora = dict(LORA, target_modules=["q_proj", "up_proj"])
    want = ref("forward", path=path, batch=batch, want="grads", only="lora_", lora=lora)
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    loss, grads = loss_and_grads(model, batch, only="lora_")
    close_number(loss, want["loss"])
    close_grads(grads, want["grads"])


def test_padded_vocabulary_is_kept():
    """The model has 512 rows, the tokenizer 320 entries: loading must not shrink the model."""
    path = build("qwen2")
    model, tok = load(path)
    assert len(tok) == 320
    assert model.get_input_embeddings().weight.shape[0] == 512
    assert logits(model, dict(input_ids=ids(1, 6))).shape[-1] == 512


def test_last_positions_only():
    path = build("llama")
    batch = dict(input_ids=ids(2, 20))
    want = ref("forward", path=path, batch=batch)
    model, _ = load(path)
    close(logits(model, dict(batch, logits_to_keep=3)), want[:, -3:], what="logits_to_keep")


def test_train_and_eval_mode_give_the_same_loss():
    """No dropout anywhere, so the mode must not matter: neither for the loss nor against plain torch."""
    path = build("gemma2")
    x = ids(2, 24)
    batch = dict(input_ids=x, labels=labels_like(x))
    want = ref("cross_entropy", logits=ref("forward", path=path, batch=dict(input_ids=x)), labels=batch["labels"])
    model, _ = load(path)
    model = with_lora(model, randomise=False)  # fresh adapters change nothing
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            close_number(model(**to_device(batch, model), use_cache=False).loss.item(), want, what=f"train={mode}")
