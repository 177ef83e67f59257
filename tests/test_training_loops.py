"""transformers' Trainer and a plain PyTorch loop compute the same numbers with a patched model; who decides what is recomputed."""

import datasets
import pytest
import tiny
import torch
import training
import transformers
from torch.nn.utils import clip_grad_norm_

from fastlm import FastLanguageModel
from fastlm.forwards.causal_lm import DeferredLogits

CASES = {
    "usual": {},
    "checkpointing": dict(gradient_checkpointing=True),
    "accumulated": dict(gradient_accumulation_steps=2),
    "smoothed": dict(label_smoothing_factor=0.1),
}


@pytest.fixture
def no_logits(monkeypatch):
    """Logits that a training step makes without anybody reading them are an error."""

    def refuse(self):
        raise AssertionError("a training step made its logits")

    monkeypatch.setattr(DeferredLogits, "__call__", refuse)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_transformers_trainer(tmp_path, lora, case, no_logits):
    """Loss and gradient norm of every step, over batches of unequal lengths whose tokens count alike."""
    want = training.train(training.plain(training.stock(lora), tmp_path, **CASES[case]))
    model = training.ours(lora)
    training.assert_same_run(training.train(training.plain(model, tmp_path, **CASES[case])), want)
    training.assert_ran_fast(model, "block" if lora else "parts")


@pytest.mark.parametrize("make", [training.plain, training.sft], ids=["plain", "sft"])
def test_a_step_without_labels_changes_nothing(tmp_path, make):
    """A batch of ignored labels counts no token: its loss and gradient are 0, and training goes on. Stock divides 0 by 0."""
    data = training.rows().to_list()
    for row in data[2:4]:
        row["labels"] = [-100] * len(row["labels"])
    data = datasets.Dataset.from_list(data)
    # TRL drops such rows itself unless rows are taken as they are
    args = dict(dataset_kwargs=dict(skip_prepare_dataset=True)) if make is training.sft else {}
    args |= dict(train_sampling_strategy="sequential", optim="sgd", learning_rate=0.1, lr_scheduler_type="constant")
    runs, weights = [], []
    for n_steps, rows in ((3, data), (2, data.select([0, 1, 4, 5]))):
        model = training.ours()
        runs.append(training.train(make(model, tmp_path, rows, max_steps=n_steps, **args)))
        weights.append(training.trained(model))
    assert runs[0][1]["loss"] == 0 and runs[0][1]["grad_norm"] == 0
    training.assert_same_run(runs[0][::2], runs[1], 0.0, but=("num_tokens",))
    training.assert_same_weights(*weights, 0.0)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_transformers_trainer_in_mixed_precision(tmp_path, lora, no_logits):
    """accelerate converts every output to float32: that reads no logits either."""
    exact = training.train(training.plain(training.stock(lora), tmp_path))
    model = training.ours(lora)
    # off by the rounding of a few bfloat16 GEMMs
    training.assert_same_run(training.train(training.plain(model, tmp_path, bf16=True)), exact, 2e-2)
    training.assert_ran_fast(model, "parts")


def batches(number: int = 6):
    """Padded batches of two rows with labels of their own; transformers' collator pads labels with -100."""
    collate = transformers.DataCollatorForSeq2Seq(training.tokenizer())
    data = training.rows()
    return [dict(collate([data[i % 8], data[(i + 3) % 8]])) for i in range(number)]


def loop(model) -> list[float]:
    """Three steps over two batches each, normalised by the labelled tokens of both; then the loss of the first batch again.

    SGD, whose weights can be compared: Adam makes a full step of a gradient that is nothing but rounding.
    """
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9, weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    seen = []
    model.train()
    data = batches()
    for step in range(3):
        pair = data[2 * step : 2 * step + 2]
        n_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in pair)
        for batch in pair:
            loss = model(**batch, num_items_in_batch=n_items).loss
            loss.backward()
            seen.append(loss.item())
        seen.append(clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.append(model(**data[0]).loss.item())
    return seen


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_pytorch_loop(lora):
    stock, ours = training.stock(lora), training.ours(lora)
    want, got = loop(stock), loop(ours)
    assert want[-1] < 0.9 * (want[0] + want[1]), "the loop does not learn"
    assert all(abs(a - b) <= training.CLOSE * abs(b) for a, b in zip(got, want, strict=True)), (got, want)
    training.assert_same_weights(training.trained(ours), training.trained(stock))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return training.save_base(tmp_path_factory.mktemp("base"))


def test_four_bit_with_float32_adapters(tmp_path, checkpoint, no_logits):
    """transformers' Trainer leaves the adapters as PEFT made them: equal as closely as in 16 bit."""
    pytest.importorskip("bitsandbytes")
    want = training.train(training.plain(training.stock_4bit(checkpoint), tmp_path))
    model = training.load(checkpoint)
    training.assert_same_run(training.train(training.plain(model, tmp_path)), want)
    training.assert_ran_fast(model)


def kept_bytes(model) -> int:
    """What a training forward keeps for its backward, apart from parameters."""
    total, own = 0, {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        nonlocal total
        total += 0 if tensor.data_ptr() in own else tensor.numel() * tensor.element_size()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tiny.ids(2, 32), labels=tiny.ids(2, 32)).loss.backward()
    model.zero_grad()
    return total


@pytest.mark.parametrize(
    "asked, trainer_says, recomputes",
    [
        (False, True, False),
        (True, False, True),
        ("auto", True, True),
        ("auto", False, False),
        ("unsloth", True, True),
    ],
)
def test_who_decides_what_is_recomputed(tmp_path, checkpoint, asked, trainer_says, recomputes):
    """False keeps all and True recomputes, whatever the trainer enables; the other two do as it says. No number changes."""
    model = training.load(checkpoint, load_in_16bit=True, use_gradient_checkpointing=asked)
    run = training.train(training.sft(model, tmp_path, max_steps=2, gradient_checkpointing=trainer_says))
    training.assert_ran_fast(model)
    assert model.get_base_model().is_gradient_checkpointing == recomputes
    kept = kept_bytes(model)
    changed = FastLanguageModel.for_training(model, use_gradient_checkpointing=not recomputes)
    assert (kept < kept_bytes(changed)) == recomputes, "what is kept does not follow the setting"
    other = training.load(checkpoint, load_in_16bit=True, use_gradient_checkpointing=not recomputes)
    assert training.train(training.sft(other, tmp_path, max_steps=2, gradient_checkpointing=trainer_says)) == run


def test_training_after_inference_and_back(tmp_path, checkpoint):
    """for_inference and for_training change modes and nothing that is computed in the other."""
    model, stock = (
        training.load(checkpoint, load_in_16bit=True),
        tiny.with_lora(tiny.model("llama", intermediate_size=128)),
    )
    prompt = dict(input_ids=tiny.ids(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.long))
    greedy = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=3)
    for made in (model, stock):
        if made is model:
            assert FastLanguageModel.for_inference(model) is model and not model.training
        else:
            made.eval()
    before = stock.generate(**prompt, **greedy)
    assert torch.equal(model.generate(**prompt, **greedy), before)
    assert FastLanguageModel.for_training(model) is model and all(m.training for m in model.modules())
    runs = [training.train(training.sft(made, tmp_path, learning_rate=3e-2)) for made in (model, stock)]
    training.assert_same_run(*runs)
    training.assert_ran_fast(model)
    FastLanguageModel.for_inference(model)
    after = stock.eval().generate(**prompt, **greedy)
    assert not torch.equal(after, before), "training changed no answer"
    assert torch.equal(model.generate(**prompt, **greedy), after)
    with pytest.raises(ValueError, match="use_gradient_checkpointing must be 'auto', True or False, got 'always'"):
        FastLanguageModel.for_training(model, use_gradient_checkpointing="always")
