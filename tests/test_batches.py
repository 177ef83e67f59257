"""Packed batches: the samples are whole, apart and all there, and losses and gradients are those of padded batches."""

import random

import datasets
import pytest
import tiny
import torch
import training

import fastlm
from fastlm.chat_templates import train_on_responses_only
from fastlm.data import batch_by_tokens, preview
from fastlm.data.batches import TokenBatches, best_fit

LENGTHS = (9, 22, 14, 31, 6, 17, 25, 12, 9, 9, 14, 3)


def trainer(model, folder, lengths=LENGTHS, data=None, **args):
    args = dict(per_device_train_batch_size=1, max_length=None) | args
    return training.sft(model, folder, training.rows(lengths) if data is None else data, **args)


def members(batches):
    return [
        tuple(tuple(batches.rows[p.row]["input_ids"][p.start : p.stop]) for p in batches.members(n))
        for n in range(len(batches))
    ]


@pytest.mark.parametrize("size", [7, 50, 1000])
def test_best_fit(size):
    draw = random.Random(size)
    lengths = [draw.randint(1, size) for _ in range(500)]
    bins = best_fit(lengths, size)
    assert sorted(number for each in bins for number in each) == list(range(500))
    full = [sum(lengths[number] for number in each) for each in bins]
    assert max(full) <= size
    # no two bins would fit into one, and the bound of the method
    assert sum(sorted(full)[:2]) > size
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // size) + 1 + sum(length > size // 2 for length in lengths)
    assert best_fit([], size) == []


def test_every_sample_once_in_every_epoch(tmp_path):
    made = batch_by_tokens(trainer(training.ours(), tmp_path), 40).train_dataset
    want = sorted(tuple(row["input_ids"]) for row in training.rows(LENGTHS))
    seen = []
    for epoch in range(3):
        made.set_epoch(epoch)
        assert sorted(sample for row in members(made) for sample in row) == want
        assert all(sum(map(len, row)) <= 40 for row in members(made))
        seen.append(members(made))
    # the three samples of 9 tokens change places, and an epoch is always the same
    assert seen[0] != seen[1] and [list(map(len, row)) for row in seen[0]] == [list(map(len, row)) for row in seen[1]]
    made.set_epoch(0)
    assert members(made) == seen[0] and len(made) == len(seen[0]) == 5


def per_token(model, batch):
    """Log-probability of each label, in the order of the tokens."""
    model.eval()
    call = {name: value for name, value in batch.items() if name not in ("labels", "seq_idx")}
    with torch.no_grad():
        scores = model(**call, use_cache=False).logits[:, :-1].log_softmax(-1)
    targets = batch["labels"][:, 1:]
    return scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -100]


@pytest.mark.parametrize("kind", ["tokens", "bfd"])
@pytest.mark.parametrize("make", [training.stock, training.ours])
def test_losses_are_those_of_padded_batches(tmp_path, make, kind):
    if kind == "bfd":
        made = trainer(make(), tmp_path, packing=True, max_length=40)
        rows = [made.train_dataset[n] for n in range(len(made.train_dataset))]
    else:
        made = batch_by_tokens(trainer(make(), tmp_path), 40)
        rows = list(made.train_dataset)
    padded = trainer(make(), tmp_path).data_collator
    model = training.stock()
    for row in rows:
        cuts = [0, *torch.tensor(row["seq_lengths"]).cumsum(0).tolist()]
        samples = [
            {name: row[name][start:stop] for name in ("input_ids", "labels")}
            for start, stop in zip(cuts, cuts[1:], strict=False)
        ]
        batch, want = made.data_collator([row]), padded(samples)
        positions = batch["position_ids"][0].tolist()
        assert positions == [n for length in row["seq_lengths"] for n in range(length)]
        assert "attention_mask" not in batch and batch["input_ids"].shape == (1, len(row["input_ids"]))
        # a sample's first token is nobody's label
        want["labels"][:, 0] = -100
        assert (batch["labels"] != -100).sum() == (want["labels"] != -100).sum()
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        numbers = {name: value for name, value in batch.items() if name not in tensors}
        loss, got = tiny.loss_and_gradients(made.model, tensors, use_cache=False, **numbers)
        its_loss, gradients = tiny.loss_and_gradients(model, want)
        assert abs(loss - its_loss) <= 1e-5 * its_loss
        assert all(tiny.relative(got[name], gradients[name]) <= 1e-5 for name in gradients)
        torch.testing.assert_close(per_token(made.model, batch), per_token(model, want), rtol=1e-4, atol=1e-5)
        if len(samples) > 1:
            # another first sample changes nothing for the others
            n_first = row["seq_lengths"][0]
            other = dict(
                row,
                input_ids=[(token + 1 - 4) % 156 + 4 for token in row["input_ids"][:n_first]]
                + row["input_ids"][n_first:],
            )
            changed = made.data_collator([other])
            n_labels = int((batch["labels"][0, n_first:] != -100).sum())
            assert torch.equal(per_token(made.model, changed)[-n_labels:], per_token(made.model, batch)[-n_labels:])


def test_a_run_of_packed_batches(tmp_path):
    """Three steps of an epoch, through the trainers: the same rows as padded batches give the same losses."""
    made = batch_by_tokens(trainer(training.ours(), tmp_path / "a", logging_steps=1, max_steps=5), 40)
    log = training.train(made)
    batches = made.train_dataset
    batches.set_epoch(0)
    order = list(made.get_train_dataloader().batch_sampler)
    assert len(order) == len(log) == 5
    training.assert_ran_fast(made.model)
    assert sum(step["num_tokens"] for step in log[-1:]) == sum(LENGTHS)


def test_resume_goes_on_with_the_same_batches(tmp_path):
    def run(folder, **args):
        settings = training.settings(folder, per_device_train_batch_size=1, max_length=None, max_steps=8, **args)
        made = fastlm.FastLanguageModel.get_trainer(
            training.ours(), training.rows(LENGTHS), settings, processing_class=training.tokenizer()
        )
        return batch_by_tokens(made, 40)

    whole = run(tmp_path / "a", save_strategy="steps", save_steps=6)
    whole.train()
    again = run(tmp_path / "a")
    again.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-6"))
    training.assert_same_weights(training.trained(again.model), training.trained(whole.model), tolerance=0)


def test_long_samples_are_split_or_dropped(tmp_path, caplog):
    rows = [dict(row) for row in training.rows((30, 8, 21))]
    rows[2]["labels"] = [-100] * 12 + rows[2]["labels"][12:]
    rows[0]["labels"] = rows[0]["input_ids"]
    data = datasets.Dataset.from_list(rows)
    with pytest.raises(ValueError, match="2 of 3 rows are longer than tokens_per_batch=10, the longest has 30 tokens"):
        batch_by_tokens(trainer(training.stock(), tmp_path, data=data), 10)
    dropped = batch_by_tokens(trainer(training.stock(), tmp_path, data=data), 10, long="drop")
    assert members(dropped.train_dataset) == [(tuple(rows[1]["input_ids"]),)]
    assert "2 longer rows were dropped" in caplog.text
    made = batch_by_tokens(trainer(training.stock(), tmp_path, data=data), 10, long="split")
    assert "2 longer rows were split; 1 pieces of them without a label were left out" in caplog.text
    labels = [
        label
        for row in made.train_dataset
        for label in made.data_collator([row])["labels"][0].tolist()
        if label != -100
    ]
    want = [label for row in rows for label in row["labels"][1:] if label != -100]
    # each once
    assert sorted(labels) == sorted(want)
    assert {len(p) for row in members(made.train_dataset) for p in row} <= {10, 8, 4, 3}
    with pytest.raises(ValueError, match="no row is left: 2 longer rows were dropped"):
        batch_by_tokens(trainer(training.stock(), tmp_path, data=data.select([0, 2])), 10, long="drop")


def test_answers_previews_and_evaluation(tmp_path, caplog):
    from chats import ANSWER, USER, chat, make_tokenizer, sft, texts

    tokenizer = make_tokenizer()
    rows = [chat(("user", "hello"), ("assistant", answer)) for answer in ("fine.", "one two three", "fox")]
    made = sft(tokenizer, rows, tmp_path, eval_rows=texts(rows), per_device_train_batch_size=1, max_length=None)
    unpacked = made.evaluate()["eval_loss"]
    batch_by_tokens(train_on_responses_only(made, USER, ANSWER), 40)
    # evaluation is padded as before, on the answers now
    assert made.data_collator([made.eval_dataset[0]])["attention_mask"].shape[0] == 1
    assert made.evaluate()["eval_loss"] != unpacked
    shown = preview(made)
    assert shown.statistics.n_samples == 3 and shown.statistics.n_rows == len(made.train_dataset) == 2
    assert not [text for text in shown.warnings if "questions" in text]
    with pytest.raises(TypeError, match="got TokenBatches .batch_by_tokens comes after this"):
        train_on_responses_only(made, USER, ANSWER)
    cut = sft(tokenizer, rows, tmp_path, per_device_train_batch_size=1, max_length=12)
    batch_by_tokens(cut, 60)
    assert "3 rows are exactly as long as max_length=12" in caplog.text
    packed = sft(tokenizer, rows * 3, tmp_path, packing=True, max_length=12)
    assert any("as long as max_length=12" in text for text in preview(packed).warnings)


def test_wrong_arguments(tmp_path):
    good = trainer(training.stock(), tmp_path)
    cases = [
        (dict(trainer=good.model), TypeError, "transformers Trainer, got Peft"),
        (dict(tokens_per_batch=1), ValueError, "2 or more, got 1"),
        (dict(tokens_per_batch=40.0), ValueError, "got 40.0"),
        (dict(long="cut"), ValueError, "one of error, split, drop, got 'cut'"),
        (dict(trainer=training.sft(training.stock(), tmp_path)), ValueError, "per_device_train_batch_size=1, got 2"),
        (dict(trainer=trainer(training.stock(), tmp_path, packing=True, max_length=40)), ValueError, "packed already"),
        (dict(trainer=training.plain(training.stock(), tmp_path, per_device_train_batch_size=1)), ValueError, "TRL's own"),
        (dict(trainer=trainer(training.stock(), tmp_path, data=training.rows().to_iterable_dataset())), ValueError, "of a stream"),
    ]  # fmt: skip
    for given, error, words in cases:
        with pytest.raises(error, match=words):
            batch_by_tokens(**dict(trainer=good, tokens_per_batch=40) | given)
    assert not isinstance(good.train_dataset, TokenBatches)
