"""How fast rows of questions and answers become labelled tokens: ours beside plain TRL, in turns.

    python benchmarks/preparation.py --data gsm8k_train.jsonl [--tokenizer DIR] [--rows N] [--rounds 5] [--impl …]
        [--run-id ID --commit SHA]

From a JSON Lines file to the prepared `train_dataset` of an SFTTrainer whose labels are the answers with their end-of-turn token:
    fastlm          fastlm.data.load, get_trainer, train_on_responses_only
    fastlm-plain    fastlm.data.load, SFTTrainer, train_on_responses_only
    trl             datasets' json reader, rows written as messages, SFTTrainer(assistant_only_loss=True)
    trl-completion  the same as prompt and completion, SFTTrainer's own labels
All have one tokenizer and template, one process and no cache. All but the last must make the same tokens and labels, else nothing is
timed.
One JSON row for each library is printed, and appended to benchmarks/results/preparation.jsonl under --run-id.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

RESULTS = Path(__file__).parent / "results" / "preparation.jsonl"
LIBRARIES = ("datasets", "tokenizers", "torch", "transformers", "trl")


def _model(vocabulary: int) -> Any:
    """The smallest model that a trainer takes: it is never run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes))


def _trainer(model: Any, tokenizer: Any, rows: Any, folder: str, make: Any = None, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(folder, max_length=1024, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, **settings)
    return (make or SFTTrainer)(model=model, processing_class=tokenizer, train_dataset=rows, args=args)


def _read(file: Path) -> Any:
    from datasets import load_dataset

    # read anew each time, as fastlm.data.load does
    with tempfile.TemporaryDirectory() as cache:
        return load_dataset("json", data_files=str(file), split="train", cache_dir=cache, keep_in_memory=True)


def fastlm(file: Path, model: Any, tokenizer: Any, folder: str) -> Any:
    from fastlm import FastLanguageModel
    from fastlm.chat_templates import train_on_responses_only
    from fastlm.data import load

    made = _trainer(model, tokenizer, load(file), folder, make=FastLanguageModel.get_trainer)
    return train_on_responses_only(made).train_dataset


def fastlm_plain(file: Path, model: Any, tokenizer: Any, folder: str) -> Any:
    from fastlm.chat_templates import train_on_responses_only
    from fastlm.data import load

    return train_on_responses_only(_trainer(model, tokenizer, load(file), folder)).train_dataset


def trl(file: Path, model: Any, tokenizer: Any, folder: str) -> Any:
    def messages(row: dict[str, str]) -> dict[str, Any]:
        pair = (("user", row["question"]), ("assistant", row["answer"]))
        return {"messages": [{"role": role, "content": text} for role, text in pair]}

    rows = _read(file).map(messages, remove_columns=["question", "answer"])
    return _trainer(model, tokenizer, rows, folder, assistant_only_loss=True).train_dataset


def trl_completion(file: Path, model: Any, tokenizer: Any, folder: str) -> Any:
    def sides(row: dict[str, str]) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }

    rows = _read(file).map(sides, remove_columns=["question", "answer"])
    return _trainer(model, tokenizer, rows, folder).train_dataset


ARMS = {"fastlm": fastlm, "fastlm-plain": fastlm_plain, "trl": trl, "trl-completion": trl_completion}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", help="folder; by default SmolLM2-135M-Instruct's")
    parser.add_argument("--rows", type=int, help="the first ones only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--impl", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--run-id", help="append the rows to the results under this name")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()

    import datasets
    import transformers
    from smollm2 import smollm2

    from fastlm.chat_templates import get_chat_template

    datasets.disable_caching()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer or smollm2())
    tokenizer = get_chat_template(tokenizer, "chatml")
    model = _model(len(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        lines = options.data.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[: options.rows]), encoding="utf-8")
        # also the warm-up
        made = {name: ARMS[name](file, model, tokenizer, folder) for name in options.impl}
        rows = {name: made[name].select_columns(["input_ids", "labels"]) for name in made if name != "trl-completion"}
        for name, own in rows.items():
            for ours, theirs in zip(own, rows[options.impl[0]], strict=True):
                if ours != theirs:
                    raise SystemExit(f"other tokens or labels by {name} than by {options.impl[0]}:\n{ours}\n{theirs}")
        n_rows = len(made[options.impl[0]])
        del made, rows
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in options.impl}
        for _ in range(options.rounds):
            for name in options.impl:
                start = time.perf_counter(), time.process_time()
                ARMS[name](file, model, tokenizer, folder)
                seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for name, pairs in seconds.items():
        wall, cpu = ([round(each, 3) for each in times] for times in zip(*pairs, strict=True))
        # the processor's own time stands beside that of the clock: another program may want the same core
        row = dict(
            run_id=options.run_id, impl=name, data=options.data.name, rows=n_rows,
            rows_s=round(n_rows / statistics.median(wall), 1), rows_cpu_s=round(n_rows / statistics.median(cpu), 1),
            seconds=wall, cpu_seconds=cpu, cpus=os.cpu_count(), commit=options.commit,
            **{n: importlib.metadata.version(n) for n in LIBRARIES},
        )  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.run_id:
            with RESULTS.open("a") as results:
                results.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
