"""Training that stops and goes on, in a model loaded afresh, is the training that never stopped; adapters go to disk and back."""

import shutil

import datasets
import peft
import pytest
import tiny
import torch
import training
import transformers
from safetensors.torch import load_file

from fastlm import FastLanguageModel

STEPS = 4
TO_THE_BIT = 0.0
# TRL's count of tokens starts again at zero when training resumes
RECOUNTED = ("num_tokens",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return training.save_base(tmp_path_factory.mktemp("base"))


def fresh(checkpoint, mode: str, seed: int = 1, dropout: float = 0.0, r: int = 4, **loading):
    """A model as a new process would make it. Adapters start with a B of noise, not zeros, which depends on the seed as A does."""
    flags = {"4bit": dict(load_in_4bit=True), "16bit": dict(load_in_16bit=True), "full": dict(full_finetuning=True)}[
        mode
    ]
    model, _ = FastLanguageModel.from_pretrained(checkpoint, dtype=torch.float32, strict=True, **flags, **loading)
    if mode == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model, r=r, lora_alpha=12, lora_dropout=dropout, random_state=seed, init_lora_weights=False
    )


class StopAfterTwo(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 2


def trainer(model, folder, kind=training.sft, callbacks=None):
    args = dict(max_steps=STEPS, save_strategy="steps", save_steps=2, learning_rate=1e-2)
    return kind(model, folder, trainer=dict(callbacks=callbacks), **args)


# case -> model, trainer. In 4 bit TRL casts the adapters to bfloat16 and PEFT loads them back as float32, in stock models too: only
# transformers' Trainer leaves them as they are.
CASES = {
    "lora": (dict(mode="16bit"), training.sft),
    "lora-dropout": (dict(mode="16bit", dropout=0.1), training.sft),
    "4bit-dropout": (dict(mode="4bit", dropout=0.1), training.plain),
    "full": (dict(mode="full"), training.sft),
}


@pytest.mark.parametrize("case", list(CASES))
def test_resume_is_the_run_that_never_stopped(tmp_path, checkpoint, case):
    """Losses, norms and final weights to the bit; masks of the adapters' dropout come from the saved state of torch's generator."""
    settings, kind = CASES[case]
    if settings["mode"] == "4bit":
        pytest.importorskip("bitsandbytes")
    whole = fresh(checkpoint, **settings)
    want = training.train(trainer(whole, tmp_path / "whole", kind))
    assert want[2]["loss"] != want[3]["loss"] and len(want) == STEPS
    first = fresh(checkpoint, **settings)
    training.assert_same_run(
        training.train(trainer(first, tmp_path / "parts", kind, [StopAfterTwo()])), want[:2], TO_THE_BIT
    )
    # another start, all of which the checkpoint replaces
    second = fresh(checkpoint, **settings, seed=2)
    if case != "full":
        start, other = training.trained(first), training.trained(second)
        assert all(not torch.equal(start[name], other[name]) for name in start)
    else:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(1.5)
    resumed = trainer(second, tmp_path / "parts", kind)
    resumed.train(resume_from_checkpoint=True)
    training.assert_same_run(training.logged(resumed), want, TO_THE_BIT, but=RECOUNTED)
    training.assert_same_weights(training.trained(second), training.trained(whole), TO_THE_BIT)
    training.assert_ran_fast(second, "parts" if case == "full" else "block")


def with_everything(checkpoint, folder, seed: int = 1, callbacks=None, device: str = "cpu"):
    """get_trainer's, with dropout, accumulation, a 4-bit base, adapters in bfloat16 and moments in 8 bits."""
    model = fresh(checkpoint, "4bit", seed, dropout=0.1, r=64, deterministic=True)
    args = training.settings(
        folder, max_steps=STEPS, save_strategy="steps", save_steps=2, learning_rate=1e-2, optim="adamw_8bit",
        gradient_accumulation_steps=2, use_cpu=device == "cpu",
    )  # fmt: skip
    named = dict(train_dataset=training.rows(), processing_class=training.tokenizer(), callbacks=callbacks)
    return FastLanguageModel.get_trainer(model, args=args, **named)


def resume_with_everything(checkpoint, folder, device: str) -> None:
    whole = with_everything(checkpoint, folder / "whole", device=device)
    want = training.train(whole)
    assert len({entry["loss"] for entry in want}) == STEPS
    codes = [
        value
        for state in whole.optimizer.state_dict()["state"].values()
        for value in state["__bnb_optimizer_quant_state__"].values()
    ]
    assert any(torch.is_tensor(value) and value.dtype == torch.uint8 for value in codes)
    with_everything(checkpoint, folder / "parts", callbacks=[StopAfterTwo()], device=device).train()
    resumed = with_everything(checkpoint, folder / "parts", seed=2, device=device)
    resumed.train(resume_from_checkpoint=True)
    training.assert_same_run(training.logged(resumed), want, TO_THE_BIT, but=RECOUNTED)
    training.assert_same_weights(training.trained(resumed.model), training.trained(whole.model), TO_THE_BIT)
    dtypes = [{p.dtype for p in training.trained(made.model).values()} for made in (whole, resumed)]
    assert dtypes == [{torch.bfloat16}, {torch.bfloat16}]


def test_resume_with_everything_at_once(tmp_path, checkpoint):
    """Also the dtype of the adapters: PEFT reads bfloat16 ones as float32, and the run would go on with other numbers."""
    pytest.importorskip("bitsandbytes")
    resume_with_everything(checkpoint, tmp_path, "cpu")


@pytest.mark.gpu
def test_resume_with_everything_at_once_on_a_gpu(tmp_path, checkpoint):
    """Where moments in 8 bits and the skipped steps are the kernels' work."""
    pytest.importorskip("bitsandbytes")
    resume_with_everything(checkpoint, tmp_path, "cuda")


def test_dropout_masks_differ_from_step_to_step(tmp_path, checkpoint):
    """With no learning, losses of one repeated batch differ by the masks alone; without dropout they are equal."""
    same = datasets.Dataset.from_list([training.rows()[0]] * 8)
    for dropout in (0.0, 0.3):
        model = fresh(checkpoint, "16bit", dropout=dropout)
        run = training.train(training.sft(model, tmp_path, same, learning_rate=0.0))
        assert (len({entry["loss"] for entry in run}) == 1) == (dropout == 0.0)


@pytest.mark.parametrize("saved_by", ["fastlm", "stock"])
def test_checkpoints_are_those_of_peft_and_transformers(tmp_path, checkpoint, saved_by):
    """What one stack saved half-way, the other resumes: same files, same numbers."""

    def stock():
        made = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        return tiny.with_lora(made)

    def patched():
        return training.load(checkpoint, load_in_16bit=True)

    makers = (patched, stock) if saved_by == "fastlm" else (stock, patched)
    want = training.train(trainer(makers[1](), tmp_path / "whole"))
    training.train(trainer(makers[0](), tmp_path / "parts", callbacks=[StopAfterTwo()]))
    model = makers[1]()
    resumed = trainer(model, tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    training.assert_same_run(training.logged(resumed), want, but=RECOUNTED)
    names = [sorted(p.name for p in (tmp_path / run / "checkpoint-2").iterdir()) for run in ("whole", "parts")]
    assert names[0] == names[1]
    files = [load_file(tmp_path / run / "checkpoint-2" / "adapter_model.safetensors") for run in ("whole", "parts")]
    training.assert_same_weights(*files)


def test_an_adapter_goes_to_disk_and_back_in_training(tmp_path, checkpoint):
    """save_pretrained, then a model from the adapter's directory: the same logits, and training that goes on the same."""
    model = fresh(checkpoint, "16bit")
    training.train(training.sft(model, tmp_path / "runs", max_steps=2, learning_rate=1e-2))
    model.save_pretrained(tmp_path / "adapter")
    training.tokenizer().save_pretrained(tmp_path / "adapter")
    loaded, _ = FastLanguageModel.from_pretrained(
        str(tmp_path / "adapter"), dtype=torch.float32, load_in_16bit=True, strict=True
    )
    training.assert_same_weights(training.trained(loaded), training.trained(model), TO_THE_BIT)
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    plain = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    x = tiny.ids(2, 40)
    with torch.no_grad():
        logits = [made.eval()(input_ids=x).logits for made in (loaded, model, plain)]
    assert torch.equal(logits[0], logits[1]) and tiny.relative(logits[0], logits[2]) <= 1e-5
    shutil.rmtree(tmp_path / "runs")
    runs = [
        training.train(training.sft(made, tmp_path / "runs", seed=9, learning_rate=1e-2))
        for made in (loaded, model, plain)
    ]
    training.assert_same_run(runs[0], runs[1], TO_THE_BIT)
    training.assert_same_run(runs[0], runs[2])
    training.assert_ran_fast(loaded)
