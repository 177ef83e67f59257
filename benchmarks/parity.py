"""How far log-probabilities, logits and gradients are from the truth: ours beside the stock stack's, for every family.

    python benchmarks/parity.py                    # every tiny model on the CPU, in every mode
    python benchmarks/parity.py --quick            # float32 only, one batch of each layout
    python benchmarks/parity.py --device cuda      # larger models on a GPU

Every tiny model of the tests, dense and in NF4, adapters on all projections, is trained a step on dense, padded and packed batches by
transformers + PEFT with eager attention and by fastlm. The truth is the stock model in float64 (its norms, softmax and angles stay in
float32) with the same rounded weights. Errors are taken over all batches of a layout, as shares of the truth's RMS:

- loss: of the log-probability of each labelled token,
- logits: of the real tokens,
- gradients: of each adapter tensor, as a share of that tensor's own truth; RMS over the tensors.

A line fails if ours has more than 1.1 times stock's RMS error or 2 times its largest one; in float32, where both are rounding noise,
if its RMS error exceeds 1e-5; and if a layer did not run as a block, which under autocast it need not. `worst` is the largest ratio
of any single tensor, which chance moves more. Lines go to benchmarks/results/parity.jsonl in the place of what the same device
measured before; what is printed is the largest ratio of each model and mode, and every line that fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "kernels")]

import tiny  # noqa: E402  found through the line above
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402

import fastlm  # noqa: E402
from fastlm import quant  # noqa: E402
from fastlm.forwards.causal_lm import TOKEN_OUTPUT  # noqa: E402

RESULTS = ROOT / "benchmarks/results/parity.jsonl"
LIBRARIES = ("torch", "triton", "transformers", "peft", "bitsandbytes")
WEIGHTS, LAYOUTS = ("dense", "nf4"), ("dense", "padded", "packed")
# mode -> dtype of the weights, of the adapters, and whether a bfloat16 autocast runs around the step
MODES = {
    "fp32": (torch.float32, torch.float32, False),
    "bf16": (torch.bfloat16, torch.bfloat16, False),
    "fp16": (torch.float16, torch.float16, False),
    "autocast": (torch.float32, torch.float32, True),
}
EXACT, RMS_LIMIT, MAX_LIMIT = 1e-5, 1.1, 2.0


@dataclass
class Errors:
    """Errors of one quantity, summed over batches: name of a tensor -> sums of squares and largest error."""

    squares: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    count: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    largest: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
        error = got.detach().double() - truth.detach()
        self.squares[name] += float(error.square().sum())
        self.truth[name] += float(truth.square().sum())
        self.count[name] += truth.numel()
        # written so that a NaN stays
        self.largest[name] = float(torch.stack((error.abs().max(), error.new_tensor(self.largest[name]))).max())

    def share(self, name: str) -> float:
        return self.squares[name] / self.truth[name]

    def rms(self) -> float:
        return (sum(map(self.share, self.truth)) / len(self.truth)) ** 0.5

    def max(self) -> float:
        return max(self.largest[name] / (self.truth[name] / self.count[name]) ** 0.5 for name in self.truth)


def shape_of(name: str, device: str) -> dict[str, Any]:
    """Sizes that quantization blocks and kernels like; windows stay shorter than the rows."""
    if device == "cpu":
        return dict(hidden_size=128, intermediate_size=192)
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=512)
    return sizes | (dict(sliding_window=24) if tiny.MODELS[name][1].get("sliding_window") else {})


def batch_of(layout: str, seed: int, device: str) -> dict[str, torch.Tensor]:
    scale = 1 if device == "cpu" else 4
    if layout == "packed":
        lengths = [scale * n for n in (17, 23, 9)] + [1]
        x = tiny.ids(1, sum(lengths), seed)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        batch = dict(input_ids=x, position_ids=positions, labels=x.masked_fill(positions == 0, -100))
    else:
        x = tiny.ids(2, 25 * scale, seed)
        batch = dict(input_ids=x, labels=x)
        if layout == "padded":
            # less padding than any window: a query that sees nothing is NaN in a float64 model with an additive mask
            mask = torch.ones_like(x)
            mask[1, -5:] = 0
            batch = dict(input_ids=x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100))
    return {key: value.to(device) for key, value in batch.items()}


def models_of(name: str, weights: str, mode: str, device: str, folder: str) -> Iterator[torch.nn.Module]:
    """The stock model, ours, and the truth."""
    dtype, lora_dtype, is_autocast = MODES[mode]
    shape = shape_of(name, device)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if is_autocast else dtype,
    )  # fmt: skip
    made = []
    for attention in ("eager", "sdpa"):
        if weights == "dense":
            model = tiny.model(name, dtype, attention, **shape).to(device)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                quantization_config=config,
                device_map={"": device},
                attn_implementation=None if attention == "sdpa" else attention,
            )
            quant.keep_cpu_layout(model)
        made.append(tiny.with_lora(model, dtype=lora_dtype))
    stock = made[0]
    exact = tiny.with_lora(tiny.model(name, dtype if weights == "dense" else torch.float32, **shape).float())
    truths = dict(exact.named_modules())
    with torch.no_grad():
        for path, module in stock.named_modules():
            if quant.is_4bit(module):
                truths[path].weight.copy_(quant.decode_weight(module, torch.float32))
        for path, parameter in stock.named_parameters():
            if parameter.is_floating_point():
                exact.get_parameter(path).copy_(parameter)
    yield stock
    yield fastlm.patch_model(made[1], strict=True)
    yield exact.double().to(device)


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each labelled token; in float32 as transformers' loss computes them, in float64 for the truth."""
    labels = labels[:, 1:]
    kept = labels != -100
    wide = logits[:, :-1] if logits.dtype is torch.float64 else logits[:, :-1].float()
    return wide.log_softmax(-1)[kept].gather(-1, labels[kept][:, None])[:, 0]


def step(
    made: torch.nn.Module, batch: dict[str, torch.Tensor], is_ours: bool
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(quantity, name, value) of one training step."""
    made.train()
    made.zero_grad()
    labels = batch["labels"]
    output = made(**batch, use_cache=False)
    logits = output.logits.detach()
    if is_ours:
        # the log-probabilities of the loss that makes no logits
        take: dict[str, Callable[..., Any]] = {TOKEN_OUTPUT: lambda **fields: fields}
        with torch.no_grad():
            found = made(**batch, use_cache=False, **take)
        log_probs = found["statistics"].log_probs[found["label_mask"]]
    else:
        log_probs = token_log_probs(logits, labels)
    output.loss.backward()
    yield "loss", "", log_probs
    real = batch.get("attention_mask", torch.ones_like(labels)).bool()
    yield "logits", "", logits[real]
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            yield "gradients", name.replace(".base_layer", ""), parameter.grad


def path_of(made: torch.nn.Module) -> str:
    """What ran, as the report says: "block" where every layer did, in every call."""
    layers = [row for row in fastlm.report(made) if ".layers." in row.layer]
    paths = {row.path for row in layers} | {row.reason for row in layers if row.fallback_calls}
    return ", ".join(sorted(paths))


def measure(name: str, weights: str, mode: str, device: str, folder: str, seeds: int) -> list[dict[str, Any]]:
    """The lines of one model in one mode."""
    is_autocast = MODES[mode][2]
    stock, ours, exact = models_of(name, weights, mode, device, folder)
    lines = []
    for layout in LAYOUTS:
        errors: dict[tuple[str, str], Errors] = defaultdict(Errors)
        for seed in range(seeds):
            batch = batch_of(layout, seed, device)
            truth = {(quantity, at): value for quantity, at, value in step(exact, batch, is_ours=False)}
            for label, made in (("stock", stock), ("ours", ours)):
                with torch.autocast(device, torch.bfloat16, enabled=is_autocast):
                    for quantity, at, value in step(made, batch, is_ours=label == "ours"):
                        errors[quantity, label].add(at, value, truth[quantity, at])
        for quantity in ("loss", "logits", "gradients"):
            mine, theirs = errors[quantity, "ours"], errors[quantity, "stock"]
            worst = max((mine.share(at) / theirs.share(at)) ** 0.5 for at in mine.truth)
            numbers = dict(
                rms_ours=mine.rms(), rms_stock=theirs.rms(), max_ours=mine.max(), max_stock=theirs.max(), worst=worst
            )  # fmt: skip
            lines.append(
                dict(
                    family=tiny.MODELS[name][0], model=name, weights=weights, mode=mode, layout=layout, quantity=quantity,
                    **{key: float(f"{value:.4g}") for key, value in numbers.items()}, path=path_of(ours),
                )
            )  # fmt: skip
    return lines


def measure_model(name: str, modes: list[str], device: str, seeds: int) -> list[dict[str, Any]]:
    """The lines of one model. A model that cannot run is a line with the reason: it fails, and the others are measured."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        tiny.model(name, **shape_of(name, device)).save_pretrained(folder)
        for weights in WEIGHTS:
            for mode in modes:
                try:
                    lines += measure(name, weights, mode, device, folder, seeds)
                except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                    lines.append(
                        dict(family=tiny.MODELS[name][0], model=name, weights=weights, mode=mode, error=reason)
                    )
    return lines


def fails(line: dict[str, Any]) -> bool:
    """Comparisons are written so that NaN fails."""
    if "error" in line or (line["path"] != "block" and line["mode"] != "autocast"):
        return True
    if line["mode"] == "fp32":
        return not line["rms_ours"] <= EXACT
    is_close = line["rms_ours"] <= RMS_LIMIT * line["rms_stock"] and line["max_ours"] <= MAX_LIMIT * line["max_stock"]
    return not is_close


def shown(line: dict[str, Any]) -> str:
    where = f"{line['model']:22}{line['weights']:6}{line['mode']:9}"
    if "error" in line:
        return f"{where}{line['error']}"
    numbers = f"{line['rms_ours']:10.2e}{line['rms_stock']:10.2e}{line['max_ours']:10.2e}{line['max_stock']:10.2e}"
    ratios = f"x{line['rms_ours'] / line['rms_stock']:.2f} x{line['max_ours'] / line['max_stock']:.2f}"
    return f"{where}{line['layout']:7}{line['quantity']:10}{numbers}  {ratios}  {line['path']}"


def summary(lines: list[dict[str, Any]]) -> Iterator[str]:
    """One line of largest ratios for each of a model's weights and modes."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "error" not in line:
            groups[line["model"], line["weights"], line["mode"]].append(line)
    for (model, weights, mode), group in groups.items():
        rms = max(line["rms_ours"] / line["rms_stock"] for line in group)
        most = max(line["max_ours"] / line["max_stock"] for line in group)
        largest = max(line["rms_ours"] for line in group)
        paths = {line["path"] for line in group}
        yield f"{model:22}{weights:6}{mode:9} RMS {largest:.1e} x{rms:.2f}  max x{most:.2f}  {', '.join(sorted(paths))}"


def environment(device: str, commit: str | None) -> dict[str, str]:
    if commit is None:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        commit = asked.stdout.strip()
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {**{library: version(library) for library in LIBRARIES}, "device": name, "commit": commit}


def write(path: Path, lines: list[dict[str, Any]], device: str) -> None:
    """Put the lines in the place of those that the same models had on this device in these modes."""
    measured = {(line["model"], line["weights"], line["mode"]) for line in lines}
    before = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    kept = [
        line
        for line in before
        if line["device"] != device or (line["model"], line["weights"], line["mode"]) not in measured
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept + lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="float32 only, one batch of each layout")
    parser.add_argument("--models", nargs="+", choices=tiny.MODELS, default=list(tiny.MODELS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--seeds", type=int, default=4, help="batches of each layout; more of them leave less to chance"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where this is no git checkout")
    given = parser.parse_args()
    modes, seeds = (["fp32"], 1) if given.quick else (given.modes, given.seeds)
    facts = environment(given.device, given.commit)
    # processes that start afresh: a forked one cannot use CUDA
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
        waiting = [pool.submit(measure_model, name, modes, given.device, seeds) for name in given.models]
        lines = []
        for done in waiting:
            found = [line | facts for line in done.result()]
            print(*summary(found), sep="\n", flush=True)
            write(given.output, found, facts["device"])
            lines += found
    failed = [line for line in lines if fails(line)]
    if failed:
        print(f"\n{len(failed)} of {len(lines)} lines fail:")
        print("\n".join(shown(line) for line in failed))
        raise SystemExit(1)
    print(f"\nall {len(lines)} lines hold")


if __name__ == "__main__":
    main()
