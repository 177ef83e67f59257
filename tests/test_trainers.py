"""An unchanged SFTTrainer script computes the same numbers with a patched model: every kind of batch, mode and loss."""

import copy

import datasets
import peft
import pytest
import tiny
import torch
import training
import transformers
import trl

import fastlm
from fastlm import FastLanguageModel
from fastlm.patching import patch_of

BATCHES = {
    "padded": {},
    "padding-free": dict(padding_free=True, max_length=None),
    "packed": dict(packing=True, max_length=32),
    "accumulated": dict(gradient_accumulation_steps=2),
    "all-kept": dict(gradient_checkpointing=False),
}


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_sft_trainer(tmp_path, lora, batch):
    """Loss, gradient norm, accuracy and entropy of every step, with TRL's default of checkpointing unless a case turns it off."""
    want = training.train(training.sft(training.stock(lora), tmp_path, **BATCHES[batch]))
    model = training.ours(lora)
    trainer = training.sft(model, tmp_path, **BATCHES[batch])
    training.assert_same_run(training.train(trainer), want)
    training.assert_ran_fast(model, "block" if lora else "parts")
    assert {"loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens"} == set(want[0])
    assert all(0 < entry["mean_token_accuracy"] < 1 for entry in want)
    base = model.get_base_model() if lora else model
    assert base.is_gradient_checkpointing == (batch != "all-kept")


@pytest.fixture(scope="module")
def usual_run(tmp_path_factory):
    """What a stock model with an adapter logs under TRL's defaults."""
    return training.train(training.sft(training.stock(), tmp_path_factory.mktemp("usual")))


@pytest.mark.parametrize(
    "loss",
    [dict(loss_type="dft"), dict(label_smoothing_factor=0.1), dict(neftune_noise_alpha=5.0)],
    ids=lambda s: next(iter(s)),
)
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated")
def test_losses_and_embedding_noise(tmp_path, usual_run, loss):
    want = training.train(training.sft(training.stock(), tmp_path, **loss))
    assert abs(want[0]["loss"] - usual_run[0]["loss"]) > 1e-2, "the setting does nothing"
    model = training.ours()
    training.assert_same_run(training.train(training.sft(model, tmp_path, **loss)), want)
    assert not any(row.fallback_calls for row in fastlm.report(model))
    # the noise is gone once training is over
    model.eval()
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=tiny.ids(1, 40)).logits for _ in range(2)))


def test_only_completions_are_trained(tmp_path):
    words = lambda *numbers: " ".join(f"t{n:03}" for n in numbers)
    pairs = [
        dict(prompt=words(*range(10 + i, 17 + 2 * i)) + " ", completion=words(*range(60, 63 + i), 2)) for i in range(8)
    ]
    data = datasets.Dataset.from_list(pairs)
    whole = training.train(training.sft(training.stock(), tmp_path, data, completion_only_loss=False))
    for batch in ({}, dict(packing=True, max_length=32)):
        want = training.train(training.sft(training.stock(), tmp_path, data, **batch))
        assert abs(want[0]["loss"] - whole[0]["loss"]) > 1e-2
        model = training.ours()
        trainer = training.sft(model, tmp_path, data, **batch)
        # [prompt][completion] of the first row, as the trainer tokenized it
        assert batch or trainer.train_dataset[0]["labels"] == [-100] * 7 + [60, 61, 62, 2]
        training.assert_same_run(training.train(trainer), want)
        training.assert_ran_fast(model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return training.save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_four_bit(tmp_path, checkpoint, batch):
    pytest.importorskip("bitsandbytes")
    stock, ours = training.stock_4bit(checkpoint), training.load(checkpoint)
    want = training.train(training.sft(stock, tmp_path, **BATCHES[batch]))
    got = training.train(training.sft(ours, tmp_path, **BATCHES[batch]))
    assert all(p.dtype is torch.bfloat16 for p in ours.parameters() if p.requires_grad)
    # TRL casts the adapters of a quantized model to bfloat16: their products are rounded in another order, a part in 2**8 each,
    # and so is the norm of their bfloat16 gradients
    training.assert_same_run(got, want, 1e-3, but=("grad_norm", "mean_token_accuracy"))
    assert all(abs(a["grad_norm"] / b["grad_norm"] - 1) <= 2**-6 for a, b in zip(got, want, strict=True))
    training.assert_ran_fast(ours)


@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "SFTConfig"])
def test_get_trainer(tmp_path, checkpoint, as_dict):
    stock = tiny.with_lora(transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager"))
    settings = training.settings(tmp_path, gradient_accumulation_steps=2)
    want = training.train(
        trl.SFTTrainer(
            model=stock,
            args=trl.SFTConfig(**settings),
            train_dataset=training.rows(),
            processing_class=training.tokenizer(),
        )
    )
    model = training.load(checkpoint, load_in_16bit=True, max_seq_length=128)
    # what the dict leaves out is chosen: no mixed precision for a float32 model, the CPU where there is no GPU
    less = {name: value for name, value in settings.items() if name not in ("bf16", "use_cpu")}
    args = less if as_dict else trl.SFTConfig(**settings)
    trainer = FastLanguageModel.get_trainer(model, training.rows(), args, processing_class=training.tokenizer())
    assert isinstance(trainer, trl.SFTTrainer) and trainer.args.max_length == (128 if as_dict else 1024)
    training.assert_same_run(training.train(trainer), want)
    training.assert_ran_fast(model)


def test_operations_are_counted_as_the_stock_trainer_does(tmp_path):
    totals = []
    for made, make in ((training.stock(), trl.SFTTrainer), (training.ours(), FastLanguageModel.get_trainer)):
        config = trl.SFTConfig(**training.settings(tmp_path))
        trainer = make(model=made, args=config, train_dataset=training.rows(), processing_class=training.tokenizer())
        trainer.train()
        totals.append(trainer.state.total_flos)
    assert totals[0] == totals[1] > 0


def test_an_adapter_that_the_trainer_makes(tmp_path):
    """SFTTrainer(peft_config=...) wraps a model that was patched before."""
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=tiny.LINEAR, task_type="CAUSAL_LM")
    runs = []
    for make in (training.stock, training.ours):
        model = make(lora=False)
        trainer = training.sft(model, tmp_path, trainer=dict(peft_config=copy.deepcopy(config)), learning_rate=1e-2)
        runs.append(training.train(trainer))
    training.assert_same_run(runs[1], runs[0])
    training.assert_ran_fast(trainer.model)
    assert trainer.model.get_base_model() is model


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_mixed_precision_around_float32_weights(tmp_path, lora):
    """bf16=True, TRL's default: the parts round where stock rounds, and the head is ours inside accelerate's wrapper too."""
    exact, stock = (training.train(training.sft(training.stock(lora), tmp_path, bf16=bf16)) for bf16 in (False, True))
    model = training.ours(lora)
    got = training.train(training.sft(model, tmp_path, bf16=True))
    training.assert_ran_fast(model, "parts")
    # both are off by the rounding of a few bfloat16 GEMMs
    for run in (stock, got):
        training.assert_same_run(run, exact, 2e-2, but=("mean_token_accuracy",))
    assert [entry["loss"] for entry in got] != [entry["loss"] for entry in exact]


def test_mixed_precision_around_bfloat16_weights(tmp_path, usual_run):
    """A bfloat16 model with PEFT's float32 adapters under bf16=True runs as blocks."""
    model = training.ours(dtype=torch.bfloat16)
    got = training.train(training.sft(model, tmp_path, bf16=True))
    training.assert_ran_fast(model)
    # the base weights themselves are rounded to 8 bits
    training.assert_same_run(got, usual_run, 5e-2, but=("mean_token_accuracy",))


def metrics(seen):
    def compute(prediction):
        seen.append((prediction.predictions.copy(), prediction.label_ids))
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"right": float(hits.sum() / (prediction.label_ids[:, 1:] != -100).sum())}

    return compute


@pytest.mark.parametrize("kind", ["sft", "sft-packed", "plain"])
@pytest.mark.filterwarnings("ignore:`return_outputs=True`")
def test_evaluation_during_training(tmp_path, kind):
    """Equal to stock, with logits for metrics, and the training steps after it are those of a run without it, to the bit."""
    make = training.plain if kind == "plain" else training.sft
    args = dict(packing=True, max_length=32) if kind == "sft-packed" else {}
    evaluating = dict(args, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3)
    held_out = training.rows((8, 27, 13, 5, 19), seed=8)
    runs, logits = [], []
    for build in (training.stock, training.ours):
        seen: list = []
        extra = dict(eval_dataset=held_out) | ({} if args else dict(compute_metrics=metrics(seen)))
        model = build()
        runs.append(training.train(make(model, tmp_path, trainer=extra, **evaluating)))
        logits.append(seen)
    training.assert_same_run(runs[1], runs[0])
    assert sum("eval_loss" in entry for entry in runs[1]) == 3
    for (got, labels), (want, _) in zip(*reversed(logits), strict=True):
        kept = torch.tensor(labels) != -100
        assert tiny.relative(torch.tensor(got)[kept], torch.tensor(want)[kept]) <= training.CLOSE
    without = training.train(make(training.ours(), tmp_path, **args))
    assert [entry for entry in runs[1] if "eval_loss" not in entry] == without
    assert not any(row.fallback_calls for row in fastlm.report(model))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_revert_reaches_through_the_trainers_wrappers(tmp_path, lora, bf16):
    """After training under TRL's and accelerate's wrappers, a reverted model computes what a stock one with its weights does."""
    model = training.ours(lora)
    trainer = training.sft(model, tmp_path, bf16=bf16, trainer=dict(eval_dataset=training.rows(seed=3)))
    trainer.train()
    stock = tiny.model("llama", attention="sdpa")
    stock = tiny.with_lora(stock) if lora else stock
    reference = training.sft(stock, tmp_path, bf16=bf16, trainer=dict(eval_dataset=training.rows(seed=3)))
    # accelerate wraps a model when its training starts
    reference.train()
    stock.load_state_dict(model.state_dict())
    fastlm.revert(model)
    assert all(row.path == "stock" for row in fastlm.report(model))
    assert not any(patch_of(module) and patch_of(module).active for module in model.modules())
    want_loss, want = tiny.loss_and_gradients(stock, tiny.padded_batch())
    loss, got = tiny.loss_and_gradients(model, tiny.padded_batch())
    assert torch.equal(loss, want_loss) and set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)
    values = [made.evaluate() for made in (trainer, reference)]
    assert all(values[0][name] == values[1][name] for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"))


def test_a_model_patched_after_its_trainer_was_made(tmp_path, usual_run):
    """TRL's wrapper is on the head already: the head stays TRL's and the report says so, of the head alone."""
    model = tiny.with_lora(tiny.model("llama", attention="sdpa"))
    trainer = training.sft(model, tmp_path)
    fastlm.patch_model(model)
    training.assert_same_run(training.train(trainer), usual_run)
    paths = {row.layer: (row.path, row.reason) for row in fastlm.report(model)}
    assert [paths[f"model.layers.{i}"] for i in range(2)] == [("block", "")] * 2
    assert paths["LlamaForCausalLM (head)"][0] == "stock" and "replaced" in paths["LlamaForCausalLM (head)"][1]


def test_rows_that_end_at_the_default_cut_are_told_of(tmp_path, caplog):
    """TRL cuts rows at 1024 tokens unless it is told otherwise; a model that was loaded for more says so, once."""
    path = tmp_path / "long"
    tiny.model("llama", max_position_embeddings=1100).save_pretrained(path)
    training.tokenizer().save_pretrained(path)
    data = training.rows((1030, 40))
    for args, told in (({}, 1), (dict(max_length=1025), 0)):
        model = training.load(str(path), load_in_16bit=True)
        caplog.clear()
        training.sft(model, tmp_path, data, max_steps=2, per_device_train_batch_size=1, **args).train()
        lines = [r.getMessage() for r in caplog.records if r.name.startswith("fastlm")]
        assert len([line for line in lines if "SFTConfig(max_length=1100)" in line and "1024" in line]) == told, lines


def test_a_default_length_that_is_not_the_models_is_told_of(tmp_path, caplog):
    """An SFTConfig keeps its max_length; where that is TRL's default and the model was loaded for another, one line says so."""
    path = tmp_path / "small"
    tiny.model("llama", max_position_embeddings=2048).save_pretrained(path)
    training.tokenizer().save_pretrained(path)
    own = dict(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    cases = [(2048, {}, 1024, 1), (128, {}, 1024, 1), (1024, {}, 1024, 0), (2048, dict(max_length=512), 512, 0)]
    for longest, settings, used, told in cases:
        model = training.load(str(path), load_in_16bit=True, max_seq_length=longest)
        caplog.clear()
        for args in (trl.SFTConfig(**own, **settings), trl.SFTConfig(**own, **settings), {**own, **settings}):
            trainer = FastLanguageModel.get_trainer(model, training.rows(), args, processing_class=training.tokenizer())
            assert trainer.args.max_length == (settings.get("max_length", longest) if isinstance(args, dict) else used)
        lines = [r.getMessage() for r in caplog.records if "max_seq_length" in r.getMessage()]
        assert len(lines) == told and all("1024" in line and f"max_length={longest}" in line for line in lines), lines


def test_mistakes_with_get_trainer(tmp_path):
    model = training.ours()
    make = lambda data, args: FastLanguageModel.get_trainer(model, data, args, processing_class=training.tokenizer())
    for empty in (None, [], training.rows().select([])):
        with pytest.raises(ValueError, match="train_dataset is empty"):
            make(empty, {})
    with pytest.raises(TypeError, match="SFTConfig or a dict of its arguments, got TrainingArguments"):
        make(training.rows(), transformers.TrainingArguments(str(tmp_path), report_to="none"))
    with pytest.raises(TypeError, match="learning_rat"):
        make(training.rows(), dict(learning_rat=1e-3))
