"""Inside transformers.Trainer: metrics from logits, label smoothing, embedding noise."""

import torch
from tiny_models import (
    PROJ,
    Collate,
    build,
    close,
    close_number,
    ids,
    load,
    logits,
    losses_of,
    ref,
    rows_of_lengths,
    to_device,
    trainer_for,
    with_lora,
)

LORA = dict(r=4, lora_alpha=8, target_modules=PROJ, lora_dropout=0.0)
ROWS = rows_of_lengths([9, 22, 14, 31, 6, 17, 25, 12], seed=4)
EVAL = rows_of_lengths([8, 27, 13, 5, 19], seed=8)


def fresh(path):
    model, _ = load(path)
    return with_lora(model, r=4, lora_alpha=8)


def test_compute_metrics_gets_real_logits():
    path = build("llama")
    seen = {}

    def metrics(p):
        seen["logits"], seen["labels"] = p.predictions, p.label_ids
        return {"right": float((p.predictions[:, :-1].argmax(-1) == p.label_ids[:, 1:]).mean())}

    model = fresh(path)
    t = trainer_for(model, ROWS, eval_rows=EVAL, compute_metrics=metrics, per_device_eval_batch_size=len(EVAL))
    got = t.evaluate()
    batch = Collate()(EVAL)
    want = ref("forward", path=path, batch={k: v for k, v in batch.items() if k != "labels"}, lora=LORA)
    assert seen["logits"].shape == tuple(want.shape)
    kept = batch["attention_mask"].bool()
    close(torch.tensor(seen["logits"])[kept], want[kept])
    close_number(got["eval_loss"], ref("cross_entropy", logits=want, labels=batch["labels"]))


def test_label_smoothing():
    path = build("llama")
    args = dict(per_device_train_batch_size=4, max_steps=2, label_smoothing_factor=0.3)
    want = ref("train", path=path, rows=ROWS, lora=LORA, **args)
    plain = ref("train", path=path, rows=ROWS, lora=LORA, **dict(args, label_smoothing_factor=0.0))
    assert abs(want["losses"][0] - plain["losses"][0]) > 0.01
    model = fresh(path)
    t = trainer_for(model, ROWS, **args)
    t.train()
    close_number(losses_of(t)[0], want["losses"][0], tol=2e-4)


def test_embedding_noise_only_while_training():
    """neftune_noise_alpha changes the training loss, not evaluation, and is gone afterwards."""
    path = build("llama")
    args = dict(per_device_train_batch_size=4, max_steps=1, learning_rate=0.0, optim="sgd")
    calm = fresh(path)
    t0 = trainer_for(calm, ROWS, eval_rows=EVAL, **args)
    t0.train()
    noisy = fresh(path)
    t1 = trainer_for(noisy, ROWS, eval_rows=EVAL, neftune_noise_alpha=300.0, **args)
    t1.train()
    assert abs(losses_of(t1)[0] - losses_of(t0)[0]) > 1e-3, "no noise in training"
    close_number(t1.evaluate()["eval_loss"], t0.evaluate()["eval_loss"], tol=1e-5)
    batch = dict(input_ids=ids(1, 12))
    close(logits(noisy, batch), logits(calm, batch), tol=1e-6)
    noisy.train()
    with torch.no_grad():
        a = noisy(**to_device(batch, noisy), use_cache=False).logits
        b = noisy(**to_device(batch, noisy), use_cache=False).logits
    assert torch.equal(a, b), "noise still on after training"
