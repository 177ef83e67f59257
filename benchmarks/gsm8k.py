"""SmolLM2-135M learns GSM8K's way to answer, ours beside plain TRL: losses by step, and on the test set before and after.

    python benchmarks/gsm8k.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --out results.jsonl [--model DIR] [--seeds 0 1 2]
        [--steps 200] [--batch 16] [--impl trl fastlm] [--test-rows N] [--generate 200] [--run-id ID --commit SHA]
    python benchmarks/gsm8k.py verdict results.jsonl

Each run (library x seed) is a process of its own. Both libraries get the same rows of messages, the same LoRA adapter (16-bit base,
rank 16, all linear layers, initialised by the seed), the same batches and TRL's trainer: `trl` is transformers, PEFT and
SFTTrainer(assistant_only_loss=True); `fastlm` is from_pretrained, get_peft_model, get_trainer and train_on_responses_only. One JSON row
a run is appended to --out: the losses of all steps; loss, perplexity and token accuracy on the test answers before and after; the
share of greedy answers that end in `#### number` (format), and that end in the right one (correct), before and after; seconds and
peak memory.

`verdict` compares: the mean difference of the libraries' losses over all steps, seed by seed, must lie within the spread (largest
less smallest mean loss) of plain TRL's seeds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# libraries read them when they are imported: no run asks a hub for anything
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

RESULTS = ROOT / "benchmarks/results/gsm8k.jsonl"
LIBRARIES = ("torch", "triton", "transformers", "peft", "trl", "datasets")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ANSWER = r"#### *(-?[0-9][0-9.,]*)\s*$"


def read(file: Path, n_rows: int | None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:n_rows]]
    pairs = (zip(("user", "assistant"), (row["question"], row["answer"]), strict=True) for row in rows)
    return [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in pairs]


def load(impl: str, folder: str, seed: int) -> tuple[Any, Any]:
    """The model with its adapter, and its tokenizer with a template that marks answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fastlm.chat_templates import get_chat_template

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if impl == "fastlm":
        from fastlm import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(folder, 1024, dtype=dtype, load_in_16bit=True)
        model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=seed)
    else:
        from peft import LoraConfig, get_peft_model

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": 0} if torch.cuda.is_available() else None
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(seed)
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM", lora_dropout=0.0)
        )
    return model, get_chat_template(tokenizer, "smollm2")


def trainer_of(impl: str, model: Any, tokenizer: Any, rows: Any, options: Any, folder: str) -> Any:
    import torch
    from trl import SFTConfig, SFTTrainer

    settings = dict(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch, max_length=1024,
        learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=options.steps // 20, logging_steps=1, seed=options.seed,
        bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    if impl == "trl":
        args = SFTConfig(**settings, assistant_only_loss=True)
        return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=args)
    from fastlm import FastLanguageModel
    from fastlm.chat_templates import train_on_responses_only

    trainer = FastLanguageModel.get_trainer(model, rows, SFTConfig(**settings), processing_class=tokenizer)
    return train_on_responses_only(trainer)


def judged(model: Any, tokenizer: Any, rows: list[dict[str, Any]], options: Any) -> dict[str, float]:
    from fastlm.evaluation import generate, held_out, pattern_equal, pattern_found
    from fastlm.evaluation.generation import split_row

    loss = held_out(model, rows, tokenizer)
    found = dict(loss=loss.loss, perplexity=loss.perplexity, token_accuracy=loss.token_accuracy, n_tokens=loss.n_tokens)
    pairs = [split_row(row, tokenizer) for row in rows[: options.generate]]
    texts = (
        generate(model, tokenizer, [ids for ids, _ in pairs], max_new_tokens=options.new_tokens, batch_size=64)
        if pairs
        else []
    )
    for name, score in (("format", pattern_found(ANSWER)), ("correct", pattern_equal(ANSWER))):
        scores = [score(text.strip(), answer.strip()) for text, (_, answer) in zip(texts, pairs, strict=True)]
        found[name] = statistics.mean(scores) if scores else float("nan")
    return found


def run(options: Any) -> dict[str, Any]:
    """One training, in this process."""
    import datasets
    import torch

    train, test = read(options.train, options.train_rows), read(options.test, options.test_rows)
    model, tokenizer = load(options.impl[0], options.model, options.seed)
    before = judged(model, tokenizer, test, options)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = trainer_of(
        options.impl[0], model, tokenizer, datasets.Dataset.from_list(train), options, str(options.out) + ".run"
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    after = judged(model, tokenizer, test, options)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return dict(
        run_id=options.run_id, impl=options.impl[0], seed=options.seed, steps=options.steps, batch=options.batch,
        train_rows=len(trainer.train_dataset), test_rows=len(test), losses=losses, before=before, after=after,
        seconds=round(seconds, 2), peak_gib=peak_gib, generated=min(options.generate, len(test)),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", commit=options.commit,
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    )  # fmt: skip


def verdict(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """What the rows of both libraries say, and whether the losses agree.

    Raises:
        SystemExit: if a seed lacks one of the libraries.
    """
    by = {impl: {row["seed"]: row for row in rows if row["impl"] == impl} for impl in ("trl", "fastlm")}
    if not by["trl"] or set(by["trl"]) != set(by["fastlm"]):
        raise SystemExit(f"both libraries need the same seeds, got { ({impl: sorted(of) for impl, of in by.items()}) }")
    means = {impl: {seed: statistics.mean(row["losses"]) for seed, row in of.items()} for impl, of in by.items()}
    difference = statistics.mean(means["fastlm"][seed] - means["trl"][seed] for seed in means["trl"])
    spread = max(means["trl"].values()) - min(means["trl"].values())
    lines = [
        f"mean loss over all steps, fastlm less trl: {difference:+.5f}; spread of trl's {len(by['trl'])} seeds: {spread:.5f}"
    ]
    for when in ("before", "after"):
        for impl, of in by.items():
            mean = {
                name: statistics.mean(row[when][name] for row in of.values()) for name in next(iter(of.values()))[when]
            }
            lines.append(
                f"{when:6s} {impl:6s} test loss {mean['loss']:.4f}, format {mean['format']:.1%}, correct {mean['correct']:.1%}"
            )
    return "\n".join(lines), abs(difference) <= spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="folder; by default SmolLM2-135M-Instruct")
    parser.add_argument("--impl", nargs="+", choices=("trl", "fastlm"), default=["trl", "fastlm"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--train-rows", type=int)
    parser.add_argument("--test-rows", type=int)
    parser.add_argument("--generate", type=int, default=200, help="test rows that are answered")
    parser.add_argument("--new-tokens", type=int, default=320, help="after which an answer is cut")
    parser.add_argument("--run-id", help="append the rows to the results under this name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["verdict"]:
        text, agrees = verdict([json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()])
        print(text)
        raise SystemExit(0 if agrees else 1)
    options = parser.parse_args()
    if options.seed is not None:
        row = json.dumps(run(options))
        for file in [options.out, *([RESULTS] if options.run_id else [])]:
            with file.open("a") as results:
                results.write(row + "\n")
        return
    if options.model is None:
        from smollm2 import smollm2

        options.model = str(smollm2())
    given = sys.argv[1:] + ["--model", options.model]
    for seed in options.seeds:
        for impl in options.impl:
            # a later option wins over an earlier one
            subprocess.run([sys.executable, __file__, *given, "--impl", impl, "--seed", str(seed)], check=True)
            print(f"{impl} seed {seed} done", flush=True)


if __name__ == "__main__":
    main()
