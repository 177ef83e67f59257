"""The longest row that trains within a cap of a GPU's memory, of one library.

    python benchmarks/context.py make --model llama-3.1-8b --out DIR
    python benchmarks/context.py run --impl fastlm|unsloth --checkpoint DIR --cap-gib 16 --tokens N [--steps 2]
    python benchmarks/context.py search --impl fastlm|unsloth --checkpoint DIR --cap-gib 16 [--low N] [--most N]
        [--run-id ID --commit SHA]
    python benchmarks/context.py predict --checkpoint DIR --cap-gib 16

QLoRA with r=16 on all linears, one row, `adamw_8bit`, through TRL's SFTTrainer, each library as its own documentation loads a model;
ours with `memory="minimal"`. `run` is one process: it caps the allocator at the card's size less 0.75 GiB, which its driver and
context take, trains some steps and ends with an error unless every gradient norm is finite and not zero. `search` bisects between a
length that runs and one that does not, to 3 %, a process each, and with a run id appends what it found to
benchmarks/results/context.jsonl. `predict` says what ours is predicted to hold, without a GPU too. `make` writes a checkpoint of
random weights whose window does not end before the memory does.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import finetune

RESULTS = Path(__file__).parent / "results" / "context.jsonl"
WINDOW = 1 << 21
# what a process' context, and the display of a desktop, take of a card
_BESIDE_GIB = 0.75
_GIB = 1 << 30
_STEP = 0.03
# GEMM tiles cover 128 rows
_MULTIPLE = 128


def make(name: str, out: Path) -> None:
    """A 4-bit checkpoint with a window of two million tokens."""
    finetune.make(name, out, bits=4)
    path = out / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | dict(max_position_embeddings=WINDOW)))


def run(impl: str, checkpoint: Path, cap_gib: float, tokens: int, steps: int, out: Path) -> dict[str, Any]:
    """Train on rows of one length. Raises what the library raises where that is too long."""
    if impl == "unsloth":
        import unsloth  # type: ignore[import-not-found]  # noqa: F401  before what it patches
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_gib - _BESIDE_GIB) * _GIB / total))
    if impl == "fastlm":
        import fastlm

        fastlm.set_memory_strategy("minimal")
    settings = finetune.Run(
        impl=impl, checkpoint=checkpoint, out=out, setting="default", mode="qlora", bs=1, seq=tokens, accum=1, data="dense",
        lengths=None, trainer="plain", attention="sdpa", busy=False, optim="adamw_8bit" if is_cuda else "adamw_torch", steps=steps,
    )  # fmt: skip
    model = finetune._load_facade(settings)
    finetune._same_adapters(model)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.start)

    args = SFTConfig(
        output_dir=str(out), per_device_train_batch_size=1, max_steps=steps, learning_rate=1e-4, logging_steps=1,
        optim=settings.optim, bf16=is_cuda, use_cpu=not is_cuda, report_to="none", max_length=tokens, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = finetune._rows(settings, model.config.vocab_size)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows}), callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )  # fmt: skip
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    if len(norms) < steps or not all(math.isfinite(norm) and norm > 0 for norm in norms):
        raise SystemExit(f"gradient norms {norms}: nothing was trained")
    found = dict(
        impl=impl, model=finetune._shape_of(checkpoint), cap_gib=cap_gib, tokens=tokens, steps=steps,
        ms=round(statistics.median(times) * 1e3, 1), first_ms=round(times[0] * 1e3, 1), grad_norms=norms,
        peak_gib=round(torch.cuda.max_memory_allocated() / _GIB, 3) if is_cuda else None,
        reserved_gib=round(torch.cuda.max_memory_reserved() / _GIB, 3) if is_cuda else None,
        host_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2), pinned_gib=None, predicted_gib=None,
        gpu=torch.cuda.get_device_name() if is_cuda else "cpu", **finetune._versions(),
    )  # fmt: skip
    if impl == "fastlm":
        from fastlm import binding

        memory = binding.state_of(model).memory
        found["pinned_gib"] = round(sum(s.buffers.peak_bytes for s in memory._stores.values()) / _GIB, 2)
        found["predicted_gib"] = round(fastlm.estimate(model, 1, tokens).total / _GIB, 3)
        found["plan"] = memory.status
    return found


def _tries(options: argparse.Namespace, tokens: int) -> dict[str, Any] | None:
    """A run in a process of its own; None where it did not get through."""
    command = [
        sys.executable, __file__, "run", "--impl", options.impl, "--checkpoint", str(options.checkpoint),
        "--cap-gib", str(options.cap_gib), "--tokens", str(tokens), "--steps", str(options.steps), "--out", str(options.out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said = (done.stderr.strip().splitlines() or [""])[-1]
    print(f"{tokens} tokens: {'runs' if done.returncode == 0 else 'does not run: ' + said[:300]}", flush=True)
    if done.returncode != 0 and "out of memory" not in done.stderr.lower():
        raise SystemExit(f"not for lack of memory: {done.stderr[-3000:]}")
    return json.loads(lines[-1]) if done.returncode == 0 else None


def search(options: argparse.Namespace) -> dict[str, Any]:
    """The longest row that ran, to 3 %."""
    best, low, high = None, 0, options.most
    tokens = min(options.low, options.most)
    while True:
        found = _tries(options, tokens)
        if found is None:
            high = tokens
        else:
            best, low = found, tokens
        if low == options.most or (best is not None and high - low <= max(_MULTIPLE, _STEP * low)):
            break
        if best is None and tokens <= _MULTIPLE:
            raise SystemExit("not even a short row runs")
        middle = tokens // 2 if best is None else min((low + high) // 2, 2 * low)
        tokens = max(_MULTIPLE, middle // _MULTIPLE * _MULTIPLE)
    # what was tried and failed is a bound, where it was tried
    return dict(best, max_tokens=low, failed_tokens=high if high != options.most else None)


def predict(checkpoint: Path, cap_gib: float) -> int:
    """The longest row that ours is predicted to hold."""
    import fastlm

    longest: int = fastlm.max_seq_length(str(checkpoint), device_gib=cap_gib - _BESIDE_GIB, memory="minimal")
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("make")
    part.add_argument("--model", choices=finetune.SHAPES, required=True)
    part.add_argument("--out", type=Path, required=True)
    for name in ("run", "search", "predict"):
        part = parts.add_parser(name)
        part.add_argument("--checkpoint", type=Path, required=True)
        part.add_argument("--cap-gib", type=float, required=True)
        if name == "predict":
            continue
        part.add_argument("--impl", choices=("fastlm", "unsloth"), required=True)
        part.add_argument("--steps", type=int, default=2)
        part.add_argument("--out", type=Path, default=Path("context-run"))
        if name == "run":
            part.add_argument("--tokens", type=int, required=True)
            continue
        part.add_argument("--low", type=int, default=2048, help="where to begin")
        part.add_argument("--most", type=int, default=WINDOW, help="longer rows are not tried")
        part.add_argument("--run-id", help="appends what was found to benchmarks/results/context.jsonl")
        part.add_argument("--commit")
    options = parser.parse_args()
    if options.what == "make":
        make(options.model, options.out)
    elif options.what == "predict":
        print(predict(options.checkpoint, options.cap_gib))
    elif options.what == "run":
        print(
            json.dumps(
                run(options.impl, options.checkpoint, options.cap_gib, options.tokens, options.steps, options.out)
            )
        )
    else:
        found = search(options)
        print(json.dumps(found))
        if options.run_id:
            row = found | dict(
                run_id=options.run_id, commit=options.commit, command=" ".join(["context.py", *sys.argv[1:]])
            )
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
