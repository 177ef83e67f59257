"""Evaluation: the numbers are those of a plain computation, and a training run is the same to the bit with and without it."""

import json
import math
import random

import checkpoint
import datasets
import numpy as np
import pytest
import tiny
import torch
import training
import trl

import fastlm
from fastlm import evaluation
from fastlm.data import load
from fastlm.evaluation import GenerationEvaluation, LeaveNoTrace, generate, held_out
from fastlm.evaluation.state import RandomState

ANSWERS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {a}?"}, {"role": "assistant", "content": f"It is {2 * a}."}]}
    for a in (1, 20, 333)
]  # fmt: skip


def truth(model, rows):
    """Loss of a token and accuracy, sample by sample in float64."""
    losses, right = [], []
    for ids, labels in rows:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        for score, label in zip(scores, labels[1:], strict=True):
            if label != -100:
                losses.append(-score[label].item())
                right.append(score.argmax().item() == label)
    return sum(losses) / len(losses), sum(right) / len(right), len(losses)


@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
@pytest.mark.parametrize("make", [training.stock, training.ours])
def test_held_out_numbers(make, batch_tokens):
    model = make().train()
    rows = [dict(row) for row in training.rows()]
    rows[2]["labels"] = [-100] * 5 + rows[2]["labels"][5:]
    # nothing of it counts: its only label is what nothing predicts
    rows.append(dict(input_ids=[5, 6, 7], labels=[5, -100, -100]))
    loss, accuracy, n_tokens = truth(training.stock(), [(row["input_ids"], row["labels"]) for row in rows])
    assert 0.1 < accuracy < 0.9
    got = held_out(model, rows, batch_tokens=batch_tokens)
    assert got.n_tokens == n_tokens and got.token_accuracy == accuracy
    assert abs(got.loss - loss) <= 1e-5 * loss
    assert got.perplexity == math.exp(got.loss)
    packed = dict(
        input_ids=[token for row in rows for token in row["input_ids"]],
        labels=[label for row in rows for label in row["labels"]],
        seq_lengths=[len(row["input_ids"]) for row in rows],
    )
    again = held_out(model, datasets.Dataset.from_list([packed]), batch_tokens=batch_tokens)
    assert again.n_tokens == n_tokens and abs(again.loss - loss) <= 1e-5 * loss
    assert model.training


def test_held_out_answers_of_conversations(tmp_path):
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(
        str(checkpoint.save(tmp_path)), dtype=torch.float32, load_in_16bit=True
    )
    got = held_out(model, load(ANSWERS), tokenizer)
    # bytes, and the end of the turn
    assert got.n_tokens == sum(len(f"It is {2 * a}.") + 1 for a in (1, 20, 333))
    assert 5 < got.loss < 6.5
    with pytest.raises(ValueError, match="need a tokenizer"):
        held_out(model, load(ANSWERS))
    with pytest.raises(ValueError, match="none of 1 rows has a labelled token"):
        held_out(model, [dict(input_ids=[1, 2], labels=[1, -100])])
    with pytest.raises(ValueError, match="got 0"):
        held_out(model, load(ANSWERS), tokenizer, batch_tokens=0)


def random_state():
    # drawn, and put back
    before = RandomState()
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    before.restore()
    return drawn


@pytest.mark.parametrize("make", [training.stock, training.ours])
def test_generated_texts_do_not_depend_on_the_batch(make):
    model = make()
    tokenizer = training.tokenizer()
    model.base_model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rows = training.rows()
    prompts = [" ".join(f"t{token:03}" for token in rows[n]["input_ids"][:n]) for n in (3, 5, 1, 6, 7)]
    one_by_one = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        one_by_one.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    tokenizer.padding_side = "right"
    state = random_state()
    for batch_size in (1, 2, 16):
        assert generate(model, tokenizer, prompts, max_new_tokens=12, batch_size=batch_size) == one_by_one
    assert tokenizer.padding_side == "right" and random_state() == state
    assert [module.training for module in model.modules()] == modes
    assert len(set(one_by_one)) > 1
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, tokenizer, ["t001", ""])
    with pytest.raises(ValueError, match="got 0 and 16"):
        generate(model, tokenizer, prompts, max_new_tokens=0)


def test_scores():
    assert evaluation.exact_match(" a\n", "a") == 1 and evaluation.exact_match("a b", "a") == 0
    assert evaluation.json_valid('{"a": [1]}', "") == 1 and evaluation.json_valid('{"a": 1} and', "") == 0
    found, equal = evaluation.pattern_found(r"####\s"), evaluation.pattern_equal(r"#### *(-?[\d,]+)")
    assert found("so #### 7", "") == 1 and found("so 7", "") == 0
    assert equal("4, so #### 3\n#### 7", "1 + 6 = 7 #### 7") == 1
    assert equal("#### 8", "#### 7") == equal("7", "7") == equal("#### 7", "7") == 0
    assert evaluation.pattern_equal(r"\d+$")("is 12", "12") == 1


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("chat")))


def trained(chat_model, folder, kind, is_evaluated):
    """Weights, logged training numbers, the random state at the end, and the trainer."""
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(chat_model, dtype=torch.float32, load_in_16bit=True)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4, lora_dropout=0.3, random_state=5)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    settings = training.settings(folder, max_steps=5, logging_steps=2, max_length=64)
    evaluated = dict(eval_strategy="steps", eval_steps=2, metric_for_best_model="exact") if is_evaluated else {}
    common = dict(train_dataset=load(ANSWERS * 4), processing_class=tokenizer)
    if is_evaluated:
        common["eval_dataset"] = load(ANSWERS)
    if kind == "get_trainer":
        trainer = fastlm.FastLanguageModel.get_trainer(model, args=settings | evaluated, **common)
    else:
        trainer = trl.SFTTrainer(model=model, args=trl.SFTConfig(**settings, **evaluated), **common)
        if is_evaluated:
            trainer.add_callback(LeaveNoTrace)
    if is_evaluated:
        scores = dict(exact=evaluation.exact_match, long=lambda text, reference: len(text) / 100)
        trainer.add_callback(GenerationEvaluation(trainer, ANSWERS, scores, max_new_tokens=5, batch_size=2))
    trainer.train()
    log = [
        {n: v for n, v in entry.items() if "runtime" not in n and "second" not in n}
        for entry in trainer.state.log_history
    ]
    log = [entry for entry in log if not any(name.startswith("eval_") for name in entry)]
    return training.trained(model), log, random_state(), trainer


@pytest.mark.parametrize("kind", ["get_trainer", "plain"])
def test_a_run_is_the_same_with_and_without(chat_model, tmp_path, kind):
    weights, log, state, _ = trained(chat_model, tmp_path / "a", kind, is_evaluated=False)
    again, its_log, its_state, trainer = trained(chat_model, tmp_path / "b", kind, is_evaluated=True)
    training.assert_same_weights(again, weights, tolerance=0)
    assert its_log == log and len(log) == 3 and its_state == state
    found = [entry for entry in trainer.state.log_history if "eval_exact" in entry]
    # the last step too, as transformers does
    assert [entry["step"] for entry in found] == [2, 4, 5]
    assert all(entry["eval_exact"] == 0 and 0 < entry["eval_long"] < 0.06 for entry in found)
    assert trainer.state.best_metric == 0


def test_random_numbers_are_kept_by_the_callback_alone(chat_model, tmp_path):
    """What the test above would not notice if nothing drew any: a plain trainer's evaluation draws, and dropout changes."""
    rows, runs = training.rows(), []
    for callbacks in (None, [], [LeaveNoTrace()]):
        model = tiny.with_lora(tiny.model("llama"), lora_dropout=0.3)
        evaluated = {} if callbacks is None else dict(eval_strategy="steps", eval_steps=1)
        trainer = training.plain(
            model,
            tmp_path,
            rows,
            trainer=dict(callbacks=callbacks, eval_dataset=rows if evaluated else None),
            **evaluated,
        )
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert runs[0] == runs[2] != runs[1]


def test_generation_by_steps(chat_model, tmp_path):
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(chat_model, dtype=torch.float32, load_in_16bit=True)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4)
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "1 = ", "completion": "1"}]
    trainer = fastlm.FastLanguageModel.get_trainer(
        model, load(rows), training.settings(tmp_path, max_steps=4), processing_class=tokenizer
    )
    # fits whatever is written
    callback = GenerationEvaluation(
        trainer, rows, dict(any=evaluation.pattern_found("")), every_steps=3, max_new_tokens=3
    )
    trainer.add_callback(callback)
    trainer.train()
    found = [(entry["step"], entry["eval_any"]) for entry in trainer.state.log_history if "eval_any" in entry]
    assert found == [(3, 1.0)] and len(callback.texts) == 2 and callback() == {"any": 1.0}
    cases = [
        (dict(trainer=model), TypeError, "transformers Trainer"),
        (dict(tokenizer=3), TypeError, "got int"),
        (dict(rows=[]), ValueError, "0 rows and 1 scores"),
        (dict(scores={}), ValueError, "2 rows and 0 scores"),
        (dict(scores={"a": "exact"}), TypeError, r"\['a'\] are no functions"),
        (dict(every_steps=0), ValueError, "got 0"),
        (dict(every_steps=None), ValueError, "nothing would generate"),
        (dict(rows=[{"text": "a"}]), ValueError, r"got the columns \['text'\]"),
    ]
    common = dict(trainer=trainer, rows=rows, scores=dict(a=evaluation.exact_match), every_steps=3)
    for given, error, words in cases:
        with pytest.raises(error, match=words):
            GenerationEvaluation(**common | given)


def test_lm_eval_runs_its_tasks_on_a_model_in_memory(chat_model, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(chat_model, dtype=torch.float32, load_in_16bit=True)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4)
    rows = [{"q": f"{a} + {a} =", "a": f" {2 * a}"} for a in (1, 20, 333)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = dict(
        task="sums", dataset_path="json", dataset_kwargs=dict(data_files=str(tmp_path / "rows.jsonl")), test_split="train",
        output_type="loglikelihood", doc_to_text="{{q}}", doc_to_target="{{a}}", target_delimiter="",
        metric_list=[dict(metric="perplexity", aggregation="perplexity", higher_is_better=False)],
    )  # fmt: skip
    adapter = evaluation.harness_model(model, tokenizer, batch_size=2)
    results = lm_eval.simple_evaluate(model=adapter, tasks=[task], bootstrap_iters=0)
    got = results["results"]["sums"]["perplexity,none"]
    losses = []
    for row in rows:
        asked, answered = tokenizer(row["q"])["input_ids"], tokenizer(row["a"])["input_ids"]
        losses.append(held_out(model, [dict(input_ids=asked + answered, labels=[-100] * len(asked) + answered)]))
    want = math.exp(sum(each.loss * each.n_tokens for each in losses) / len(rows))
    assert abs(got - want) <= 1e-4 * want
