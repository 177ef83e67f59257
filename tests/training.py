"""Training runs in two arms for the tests: the same trainer, rows and seed with a stock model and with a patched one."""

from __future__ import annotations

import functools

import datasets
import tiny
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import fastlm

# of losses, gradient norms and metrics in float32: sums in another order, carried through a few optimizer steps
CLOSE = 1e-4
LENGTHS = (9, 22, 14, 31, 6, 17, 25, 12)
NUMBERS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
NUMBERS += tuple(f"eval_{name}" for name in ("loss", "mean_token_accuracy", "entropy", "num_tokens", "right"))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Whole words t000 … t159 between spaces, for the tiny models' vocabulary."""
    words = Tokenizer(models.WordLevel({f"t{i:03}": i for i in range(160)}, unk_token="t004"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t004", bos_token="t001", eos_token="t002", pad_token="t003"
    )


@functools.cache
def _labelled_rows(lengths: tuple[int, ...], seed: int) -> list[dict[str, list[int]]]:
    generator, teacher = torch.Generator().manual_seed(seed), stock()
    made = []
    for length in lengths:
        ids = torch.randint(4, 160, (length,), generator=generator)
        labels = ids.clone()
        with torch.no_grad():
            labels[1::2] = teacher(input_ids=ids[None]).logits[0].argmax(-1)[:-1:2]
        made.append(dict(input_ids=ids.tolist(), labels=labels.tolist()))
    return made


def rows(lengths=LENGTHS, seed: int = 0) -> datasets.Dataset:
    """Tokenized rows. Every second label is what the stock model says, so that accuracies are neither 0 nor 1."""
    return datasets.Dataset.from_list(_labelled_rows(tuple(lengths), seed))


def stock(lora: bool = True, **over):
    made = tiny.model("llama", **over)
    return tiny.with_lora(made) if lora else made


def ours(lora: bool = True, **over):
    """Patched with strict=True: a call that falls back anywhere raises."""
    made = tiny.model("llama", attention="sdpa", **over)
    return fastlm.patch_model(tiny.with_lora(made) if lora else made, strict=True)


def save_base(folder) -> str:
    """A base model with its tokenizer on disk.

    Its widths are whole quantization blocks: bitsandbytes decodes other shapes to wrong values on a CPU.
    """
    tiny.model("llama", intermediate_size=128).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def stock_4bit(path: str):
    """Plain transformers + bitsandbytes with float32 compute, in plain PEFT."""
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=quantization, attn_implementation="eager"
    )
    return tiny.with_lora(loaded)


def load(path: str, **mode):
    """The facade's float32 model, strict, in plain PEFT with the same adapter weights as the stock ones here."""
    model, _ = fastlm.FastLanguageModel.from_pretrained(path, dtype=torch.float32, strict=True, **mode)
    return fastlm.patch_model(tiny.with_lora(model), strict=True)


def settings(folder, **args) -> dict:
    """Arguments of a quiet run of three float32 steps on the CPU that logs each of them."""
    return {
        **dict(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            report_to="none", use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, seed=7,
        ),
        **args,
    }  # fmt: skip


def sft(model, folder, data=None, trainer=None, **args):
    """A plain SFTTrainer; `trainer`: arguments of its own, the others are its SFTConfig's."""
    config = trl.SFTConfig(**settings(folder, **args))
    named = dict(processing_class=tokenizer(), train_dataset=rows() if data is None else data)
    return trl.SFTTrainer(model=model, args=config, **named, **(trainer or {}))


def plain(model, folder, data=None, trainer=None, **args):
    """transformers' own Trainer on padded batches."""
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings(folder, **args)),
        train_dataset=rows() if data is None else data,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer()),
        **(trainer or {}),
    )


def logged(trainer) -> list[dict[str, float]]:
    """Every number that a run logged, in order."""
    entries = [{n: entry[n] for n in NUMBERS if n in entry} for entry in trainer.state.log_history]
    return [entry for entry in entries if entry]


def train(trainer) -> list[dict[str, float]]:
    trainer.train()
    return logged(trainer)


def assert_same_run(got, want, tolerance: float = CLOSE, but: tuple[str, ...] = ()) -> None:
    """Two logs hold the same numbers, apart from those named in `but`."""
    assert [set(entry) for entry in got] == [set(entry) for entry in want] and want
    for step, (ours_logged, stock_logged) in enumerate(zip(got, want, strict=True)):
        for name in set(stock_logged) - set(but):
            difference = abs(ours_logged[name] - stock_logged[name])
            assert difference <= tolerance * abs(stock_logged[name]), (
                step,
                name,
                ours_logged[name],
                stock_logged[name],
            )


def assert_ran_fast(model, path: str = "block") -> None:
    """Every layer ran on this path and the head was ours, without a call that fell back."""
    found = fastlm.report(model)
    assert [row.path for row in found if ".layers." in row.layer] == [path, path], found
    assert all(row.calls and not row.fallback_calls for row in found), found
    assert any("(head)" in row.layer for row in found), found


def trained(model) -> dict[str, torch.Tensor]:
    """The trained parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same_weights(got, want, tolerance: float = CLOSE) -> None:
    """Trained parameters are equal; tolerance 0 is to the bit."""
    assert set(got) == set(want) and want
    for name in want:
        if tolerance:
            assert tiny.relative(got[name], want[name]) <= tolerance, name
        else:
            assert torch.equal(got[name], want[name]), name
