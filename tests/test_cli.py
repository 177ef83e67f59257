"""The command: what it reads, what it says of mistakes, and that it trains, shows, talks, merges and migrates."""

import json
import re
import time

import checkpoint
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import fastlm
from fastlm.cli import app
from fastlm.cli_config import EXAMPLE, ConfigError, parse

CPU = [] if torch.cuda.is_available() else ["--set", "trainer.use_cpu=true"]
ROW = {"messages": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}]}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a tiny chat model, data, a configuration, and what training by it wrote."""
    folder = tmp_path_factory.mktemp("cli")
    checkpoint.save(folder / "model")
    (folder / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    text = EXAMPLE.replace("Qwen/Qwen3-0.6B", str(folder / "model")).replace("train.jsonl", str(folder / "train.jsonl"))
    text = text.replace("output_dir: output", f"output_dir: {folder / 'output'}").replace(
        "load_in_4bit", "load_in_16bit"
    )
    (folder / "config.yaml").write_text(text)
    done = run("train", folder / "config.yaml", "--max-steps", 2, "--set", "trainer.save_steps=1", *CPU)
    assert "steps     2" in done
    return folder


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, (result.output, result.exception)
    return re.sub(r"[ \t]+\n", "\n", result.output)


def test_training_by_a_file(work):
    assert {path.name for path in (work / "output").iterdir()} >= {"checkpoint-1", "checkpoint-2", "final"}
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(str(work / "output/final"), load_in_16bit=True)
    assert model.peft_config["default"].r == 16 and tokenizer.chat_template == checkpoint.TEMPLATE
    done = run("train", work / "config.yaml", "--max-steps", 3, "--resume", *CPU)
    assert "steps  3" in re.sub(" +", "  ", done)


def test_a_dry_run_trains_nothing(work):
    output = work / "dry"
    shown = run("train", work / "config.yaml", "--output", output, "--dry-run", *CPU)
    assert "<|im_start|>assistant\n⟦It is 5.<|im_end|>⟧" in shown and "trained" in shown
    assert "block" in shown or "parts" in shown
    assert re.search(
        r"memory: 2 rows of 2,048 tokens need [\d.]+ GiB \(weights [\d.]+, adapters", " ".join(shown.split())
    )
    assert not (output / "final").exists()


def test_new_tokens_and_packed_batches(work):
    text = (work / "config.yaml").read_text().replace("  per_device_train_batch_size: 2\n", "")
    text += "new_tokens: [<scratch>]\nbatches: {tokens_per_batch: 160, long: split}\n"
    (work / "packed.yaml").write_text(text)
    run("train", work / "packed.yaml", "--output", work / "packed", "--max-steps", 2, *CPU)
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(str(work / "packed/final"), load_in_16bit=True)
    assert tokenizer.convert_tokens_to_ids("<scratch>") == 259
    assert model.peft_config["default"].trainable_token_indices == {"model.embed_tokens": [259]}
    (work / "packed.yaml").write_text(text.replace("trainer:", "trainer:\n  per_device_train_batch_size: 2"))
    said = run("train", work / "packed.yaml", "--output", work / "packed", code=2)
    assert "set per_device_train_batch_size=1, got 2" in " ".join(said.split())


def test_training_by_flags(work):
    flags = ("--model", work / "model", "--data", work / "train.jsonl", "--output", work / "flags", "--max-steps", 1)
    run("train", *flags, "--set", "model.load_in_16bit=true", "--set", "responses_only=false", *CPU)
    assert (work / "flags/final/adapter_model.safetensors").is_file()


MISTAKES = [
    ("modl: {}", "unknown key 'modl' in the configuration: did you mean 'model'?"),
    ("model: {model_name: x, max_seq_len: 4}", "unknown key 'max_seq_len' of model: did you mean 'max_seq_length'?"),
    ("trainer: {learning_rat: 1}", "unknown key 'learning_rat' of trainer: did you mean 'learning_rate'?"),
    ("data: {source: x, zzz: 1}", "unknown key 'zzz' of data: known are chunk_length, columns, form"),
    ("model: 3", "model must have keys of its own"),
    ("- a", "must be sections with keys, got list"),
    ("a: [", "is no YAML"),
    ("model: {}\ndata: {source: x}", "model.model_name is missing: what to train"),
    ("model: {model_name: x}", "data.source is missing: what to train on"),
    ("model: {model_name: x}\ndata: {source: x}\nresponses_only: 3", "responses_only must be bool, got 3"),
    (
        "model: {model_name: x, full_finetuning: true}\nlora: {r: 8}\ndata: {source: x}",
        "lora and model.full_finetuning exclude each other",
    ),
    ("model: {model_name: m}\ndata: {source: d}\nbatches: {long: split}", "batches.tokens_per_batch is missing"),
    ("model: {model_name: m}\ndata: {source: d}\nnew_tokens: <a>", "new_tokens must be list, got '<a>'"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=[words[:30] for _, words in MISTAKES])
def test_mistakes_in_a_configuration(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(text)


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: " + "[" * 100_000, "nested more than 20 deep"),
        ("model:\n" + "".join(" " * i + "-\n" for i in range(1, 3000)), "nested more than 20 deep"),
        (BOMB, "has the alias"),
        ("model: &a [*a]", "has the alias"),
        ("model: {name: !!python/object/apply:os.system [true]}", "is no YAML"),
    ],
    ids=["flow", "block", "bomb", "itself", "code"],
)
def test_configurations_that_never_end_are_refused_at_once(text, words):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        parse(text)
    with pytest.raises(ConfigError):
        parse("", [f"model={text}"])
    assert time.monotonic() - start < 5


def test_overrides():
    base = "model: {model_name: x}\ndata: {source: y}\n"
    made = parse(
        base, ["trainer.max_steps=10", "lora.r=8", "chat_template=chatml", "data.source=[a]", "model.dtype=null"]
    )
    assert made.trainer == {"max_steps": 10} and made.lora == {"r": 8} and made.chat_template == "chatml"
    assert made.data == {"source": ["a"]} and made.model == {"model_name": "x", "dtype": None}
    for override in ("trainer", "=3", "trainer.=3"):
        with pytest.raises(ConfigError, match="an override is section.key=value"):
            parse(base, [override])
    with pytest.raises(ConfigError, match="is no YAML"):
        parse(base, ["trainer.max_steps=["])


def test_the_example_is_right():
    assert run("example") == EXAMPLE
    made = parse(EXAMPLE)
    assert (
        made.trainer["learning_rate"] == 2e-4
        and made.responses_only is True
        and made.lora == {"r": 16, "lora_alpha": 16}
    )


def test_errors_are_one_line(work, tmp_path):
    assert "error: data.source is missing" in run("train", "--model", "x", code=2)
    assert f"{tmp_path / 'no.yaml'} cannot be read" in run("train", tmp_path / "no.yaml", code=2)
    shown = run("train", work / "config.yaml", "--data", tmp_path / "no.jsonl", code=2)
    assert "error: there is no file or folder" in shown
    assert "error:" in run("preview", tmp_path / "no.jsonl", "--model", work / "model", code=2)
    assert "error:" in run("migrate", tmp_path / "no.py", code=2)


def test_preview(work):
    shown = run("preview", work / "train.jsonl", "--model", work / "model", "--rows", 1)
    assert "8 of 8 rows of the form chat" in shown and "⟦It is 5.<|im_end|>⟧" in shown
    run("preview", work / "train.jsonl", "--model", work / "model", "--html", work / "page.html")
    page = (work / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "It is 5." in page


def test_estimate(work):
    found = fastlm.estimate(str(work / "model"), 2, 512, mode="16bit", device_gib=8.0)
    said = run("estimate", work / "model", "--batch", 2, "--seq", 512, "--mode", "16bit", "--device-gib", 8)
    assert f"together       {found.total / 2**30:.2f} GiB" in said and "it fits        8.00 GiB are there" in said
    longest = fastlm.max_seq_length(str(work / "model"), 2, mode="16bit", device_gib=8.0)
    assert f"longest row    {longest:,} tokens" in said
    assert "mode must be one of" in run("estimate", work / "model", "--mode", "3bit", code=2)


def test_chat(work):
    """The answer is what generate gives for the rendered chat, system text included."""
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(str(work / "output/final"), load_in_16bit=True)
    fastlm.FastLanguageModel.for_inference(model)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs.to(model.device), max_new_tokens=6, do_sample=False)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    flags = ("--system", "S", "--max-new-tokens", 6)
    shown = run("chat", work / "output/final", "--prompt", "hello", *flags)
    assert shown.split("it/s]")[-1].strip() == expected.strip()
    assert run("chat", work / "output/final", *flags, input="hello\n\n").count("you:") == 2


def test_merge_and_report(work):
    run("merge", work / "output/final", work / "merged")
    merged = AutoModelForCausalLM.from_pretrained(work / "merged")
    assert merged.dtype is torch.bfloat16 and merged.config.num_hidden_layers == 2
    assert "model.layers.1" in run("report", work / "merged", "--no-load-in-4bit")
    run("merge", work / "output/final", work / "merged4", "--method", "merged_4bit")
    assert AutoModelForCausalLM.from_pretrained(work / "merged4").is_loaded_in_4bit
    shown = run("merge", work / "output/final", work / "merged5", "--method", "merged_5bit", code=2)
    assert "error: save_method must be one of" in shown and not (work / "merged5").exists()


def test_migrate(tmp_path):
    old = "from unsloth import FastLanguageModel\nm.fast_generate('x')\n"
    (tmp_path / "a.py").write_text(old)
    shown = run("migrate", tmp_path, "--diff")
    assert "+from fastlm import FastLanguageModel" in shown and "line 2: fast_generate is not there" in shown
    assert "nothing was written" in shown and (tmp_path / "a.py").read_text() == old
    assert "need other imports" in run("migrate", tmp_path / "a.py", "--write")
    assert (tmp_path / "a.py").read_text() == old.replace("unsloth", "fastlm")


def test_doctor():
    shown = run("doctor")
    for name in ("fastlm", "torch", "transformers", "GPU"):
        assert re.search(rf"^{name}", shown, re.MULTILINE)
    assert torch.__version__ in shown
