"""Whole training steps of one library through TRL, and the gate that a time must pass before it counts.

    python benchmarks/finetune.py make --model llama-3.1-8b --out DIR [--bits 4]
    python benchmarks/finetune.py run --impl hf|liger|unsloth|fastlm --checkpoint DIR --out RUN [--setting default|recompute|keep]
        [--mode qlora|lora|full] [--bs 2] [--seq 2048] [--accum 1] [--data dense|ragged-padded|ragged-free|ragged-packed]
        [--lengths FILE.jsonl] [--trainer plain|get_trainer] [--steps 20] [--attention NAME] [--busy]
    python benchmarks/finetune.py gate REFERENCE OTHER [OTHER …]
    python benchmarks/finetune.py record --run-id ID --commit SHA REFERENCE OTHER [OTHER …]

A run is one process: every library gets the same checkpoint (random weights of a real model's shape), the same batches, the same
adapters and the same optimizer through the same trainer, the way that library's own documentation loads a model. RUN is a folder:
result.json and the final adapters. The gate compares runs with one of plain transformers + PEFT: over twenty steps on eight repeated
rows the loss falls by a tenth, its relative difference is at most 2e-4 in the first five steps and 5e-3 later, gradient norms agree to
2 %, final adapters to a cosine of 0.985. `record` appends the runs that pass to benchmarks/results/finetune.jsonl. `--busy` adds a few
steps, in which nobody waits between steps, and measures which share of that time the GPU computes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# each library reads them when it is imported: no run asks a hub for anything
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}

RESULTS = Path(__file__).parent / "results" / "finetune.jsonl"
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "trl",
    "unsloth",
    "liger-kernel",
    "flash-attn-4",
)
_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
# name -> (model_type, what its config says); sizes from the models' published configs
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("llama", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False, rope_parameters=_ROPE,
    )),
    "llama-3.2-1b": ("llama", dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        vocab_size=128256, tie_word_embeddings=True, rope_parameters=_ROPE,
    )),
    "qwen3-4b": ("qwen3", dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, tie_word_embeddings=True,
    )),
    "tiny": ("llama", dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        tie_word_embeddings=False,
    )),
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, LEARNING_RATE, N_ROWS = 16, 1e-3, 8
# median and spread of instruction data's lengths in tokens, where no file of real rows is given
_LOG_NORMAL = (5.6, 0.8)
_WARM_UP = 3
_BUSY_STEPS = 4


def _nf4() -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )  # fmt: skip


def _device_map() -> dict[str, int] | None:
    import torch

    return {"": 0} if torch.cuda.is_available() else None


def _tokenizer() -> Any:
    """Bytes, with a beginning, an end and padding: what every loader wants to see."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", pad_token="<|finetune_right_pad_id|>")
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=131072, **special)


def make(name: str, out: Path, bits: int) -> None:
    """A checkpoint of random weights in bfloat16, or in NF4 with nested absmax."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = SHAPES[name]
    config = AutoConfig.for_model(kind, max_position_embeddings=131072, bos_token_id=256, eos_token_id=257, **settings)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dense = out if bits == 16 else out.with_name(out.name + ".dense")
    model.save_pretrained(dense, max_shard_size="4GB")
    del model
    if bits == 4:
        quantized = AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=_nf4(), dtype=torch.bfloat16, device_map=_device_map()
        )
        quantized.save_pretrained(out)
        for file in dense.iterdir():
            file.unlink()
        dense.rmdir()
    _tokenizer().save_pretrained(out)


@dataclass(frozen=True)
class Run:
    """What one run measures."""

    impl: str
    checkpoint: Path
    out: Path
    setting: str
    mode: str
    bs: int
    seq: int
    accum: int
    data: str
    lengths: Path | None
    trainer: str
    optim: str
    steps: int
    attention: str
    busy: bool

    @property
    def recomputes(self) -> bool | None:
        """As a script says it; None leaves it to the library and the trainer."""
        return {"default": None, "recompute": True, "keep": False}[self.setting]


def _load_facade(run: Run) -> Any:
    """A model of unsloth or fastlm, whose interface is one."""
    import torch

    if run.impl == "unsloth":
        from unsloth import FastLanguageModel  # type: ignore[import-not-found]
    else:
        from fastlm import FastLanguageModel
    full = dict(full_finetuning=True) if run.mode == "full" else {}
    model, _ = FastLanguageModel.from_pretrained(
        str(run.checkpoint), max_seq_length=run.seq, dtype=torch.bfloat16, load_in_4bit=run.mode == "qlora", **full
    )
    if run.mode == "full":
        return model
    checkpointing = "unsloth" if run.impl == "unsloth" and run.recomputes is None else run.recomputes
    settings = {} if checkpointing is None else dict(use_gradient_checkpointing=checkpointing)
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=TARGETS, random_state=0, **settings
    )


def _load_stock(run: Run) -> Any:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    is_quantized = "quantization_config" in json.loads((run.checkpoint / "config.json").read_text())
    quantization = dict(quantization_config=_nf4()) if run.mode == "qlora" and not is_quantized else {}
    model = AutoModelForCausalLM.from_pretrained(
        run.checkpoint,
        dtype=torch.bfloat16,
        device_map=_device_map(),
        attn_implementation=run.attention,
        **quantization,
    )
    if run.mode == "full":
        return model
    return peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    )


def _same_adapters(model: Any) -> None:
    """A from a seed of its module's name, B zero: equal for every library."""
    import torch

    for name, p in model.named_parameters():
        if "lora_A" in name:
            place = name[name.index("layers.") :]
            seed = int(hashlib.sha256(place.encode()).hexdigest()[:8], 16)
            values = torch.rand(p.shape, generator=torch.Generator().manual_seed(seed))
            p.data.copy_((values * 2 - 1) / p.shape[1] ** 0.5)
        elif "lora_B" in name:
            p.data.zero_()


def row_lengths(run: Run, n: int) -> list[int]:
    """Tokens of each row: all `seq`; or those of real text at four bytes a token; or drawn like an instruction data set's."""
    if run.data == "dense":
        return [run.seq] * n
    generator = random.Random(3)
    if run.lengths is None:
        drawn = [int(generator.lognormvariate(*_LOG_NORMAL)) for _ in range(n)]
    else:
        texts = [" ".join(map(str, json.loads(line).values())) for line in run.lengths.read_text().splitlines() if line]
        drawn = [len(generator.choice(texts).encode()) // 4 for _ in range(n)]
    return [max(16, min(run.seq, length)) for length in drawn]


def _rows(run: Run, vocab_size: int) -> list[list[int]]:
    """Random tokens. Dense rows repeat, so that a model that learns nothing shows."""
    import torch

    generator, n = torch.Generator().manual_seed(1), run.bs * run.accum * (run.steps + _BUSY_STEPS)
    draw = lambda length: torch.randint(300, min(vocab_size, 100_000), (length,), generator=generator).tolist()
    if run.data == "dense":
        few = [draw(run.seq) for _ in range(N_ROWS)]
        return [few[i % N_ROWS] for i in range(n)]
    return [draw(length) for length in row_lengths(run, n)]


def measure(run: Run) -> dict[str, Any]:
    """Train, and say what it took."""
    if run.impl == "unsloth":
        import unsloth  # type: ignore[import-not-found]  # noqa: F401  before what it patches
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    is_cuda = torch.cuda.is_available()
    start = time.perf_counter()
    model = _load_facade(run) if run.impl in ("unsloth", "fastlm") else _load_stock(run)
    load_s = time.perf_counter() - start
    _same_adapters(model)
    rows = _rows(run, model.config.vocab_size)
    times: list[float] = []
    busy = _Busy()

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if is_cuda and state.global_step <= run.steps:
                torch.cuda.synchronize()
            self.start = time.perf_counter()
            if state.global_step == run.steps:
                busy.begin()

        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step > run.steps:
                return
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.start)
            if state.global_step == run.steps:
                _save_adapters(model, run.out)

    extra: dict[str, Any] = {}
    if run.impl in ("hf", "liger"):
        extra = dict(gradient_checkpointing=run.recomputes is not False, use_liger_kernel=run.impl == "liger")
    args = SFTConfig(
        output_dir=str(run.out), per_device_train_batch_size=run.bs, gradient_accumulation_steps=run.accum,
        max_steps=run.steps + (_BUSY_STEPS if run.busy else 0), learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", warmup_steps=0, logging_steps=1,
        optim=run.optim, weight_decay=0.0, max_grad_norm=1.0, bf16=is_cuda, use_cpu=not is_cuda, report_to="none", seed=0,
        max_length=run.seq, packing=run.data == "ragged-packed", padding_free=run.data == "ragged-free", save_strategy="no",
        disable_tqdm=True, dataloader_num_workers=0, **extra,
    )  # fmt: skip
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    given: dict[str, Any] = dict(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows}), callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(run.checkpoint),
    )  # fmt: skip
    if run.trainer == "get_trainer":
        from fastlm import FastLanguageModel

        trainer = FastLanguageModel.get_trainer(**given)
    else:
        trainer = SFTTrainer(**given)
    trainer.train()
    share = busy.end() if run.busy else None
    history = [entry for entry in trainer.state.log_history if "loss" in entry][: run.steps]
    warm = times[_WARM_UP:]
    tokens = sum(map(len, rows)) / (run.steps + _BUSY_STEPS)
    return dict(
        impl=run.impl, setting=run.setting, trainer=run.trainer, model=_shape_of(run.checkpoint), mode=run.mode, bs=run.bs,
        seq=run.seq, accum=run.accum, data=run.data, optim=run.optim, ms=round(statistics.median(warm) * 1e3, 1),
        min_ms=round(min(warm) * 1e3, 1), tok_s=round(tokens / statistics.median(warm)),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_cuda else None,
        losses=[round(entry["loss"], 5) for entry in history],
        grad_norms=[round(entry.get("grad_norm", float("nan")), 5) for entry in history],
        attention=run.attention, gpu_busy=None if share is None else round(share, 3),
        load_s=round(load_s, 1), first_s=round(times[0], 1), gpu=torch.cuda.get_device_name() if is_cuda else "cpu",
        command=" ".join(["finetune.py", *sys.argv[1:]]), **_versions(),
    )  # fmt: skip


class _Busy:
    """The share of some time in which the GPU computes: the union of its kernels' and copies' intervals."""

    def begin(self) -> None:
        import torch

        # without a GPU none of its activities may be asked for
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if torch.cuda.is_available() else kinds.CPU])
        self._profile.__enter__()
        self._start = time.perf_counter()

    def end(self) -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._start
        self._profile.__exit__(None, None, None)
        on_device = torch.autograd.DeviceType.CUDA
        spans = [event.time_range for event in self._profile.events() if event.device_type == on_device]
        busy = end = 0.0
        for span in sorted(spans, key=lambda span: span.start):
            busy += max(0.0, span.end - max(end, span.start))
            end = max(end, span.end)
        return busy / 1e6 / wall


def _shape_of(checkpoint: Path) -> str:
    """The name in SHAPES that the checkpoint's config fits, else the folder's."""
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    fits = [name for name, (_, shape) in SHAPES.items() if all(config[size] == shape[size] for size in sizes)]
    return fits[0] if fits else checkpoint.name


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _save_adapters(model: Any, out: Path) -> None:
    from safetensors.torch import save_file

    trained = {
        name[name.index("layers.") :]: p for name, p in model.named_parameters() if p.requires_grad and "lora_" in name
    }
    if trained:
        out.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: p.detach().float().cpu().contiguous() for name, p in trained.items()}, out / "adapters.safetensors"
        )


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def gate(reference: Path, other: Path) -> tuple[bool, str]:
    """Whether a run trains what the reference does, and by how much they differ."""
    want, got = read(reference), read(other)
    fall = 1 - got["losses"][-1] / got["losses"][0]
    apart = [abs(a - b) / b for a, b in zip(got["losses"], want["losses"], strict=True)]
    norms = [a / b for a, b in zip(got["grad_norms"], want["grad_norms"], strict=True)]
    cosine = _cosine(reference / "adapters.safetensors", other / "adapters.safetensors")
    # rounding grows along the steep curve: strict at first, looser later
    holds = (
        (fall >= 0.10 or got["data"] != "dense")
        and max(apart[:5]) <= 2e-4
        and max(apart) <= 5e-3
        and all(0.98 <= norm <= 1.02 for norm in norms)
        and (cosine is None or cosine >= 0.985)
    )
    said = f"loss falls {fall:.1%}, differs {max(apart[:5]):.1e} at first, {max(apart):.1e} at most; gradient norms {min(norms):.3f}-"
    return holds, f"{said}{max(norms):.3f}; adapters' cosine {'none' if cosine is None else f'{cosine:.4f}'}"


def _cosine(first: Path, second: Path) -> float | None:
    if not (first.exists() and second.exists()):
        return None
    import torch
    from safetensors.torch import load_file

    a, b = load_file(first), load_file(second)
    if a.keys() != b.keys():
        raise ValueError(f"{first} and {second} hold different adapters")
    x, y = (torch.cat([t[name].flatten().double() for name in sorted(t)]) for t in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


def _run(options: argparse.Namespace) -> None:
    names = Run.__dataclass_fields__
    run = Run(**{name: value for name, value in vars(options).items() if name in names})
    result = measure(run)
    run.out.mkdir(parents=True, exist_ok=True)
    (run.out / "result.json").write_text(json.dumps(result))
    print(
        f"{run.impl} {run.setting} {run.trainer}: {result['ms']} ms, {result['peak_gib']} GiB, losses {result['losses'][:3]} …"
    )


def _compare(options: argparse.Namespace) -> None:
    reference, *others = options.runs
    passed = []
    for folder in options.runs:
        holds, said = gate(reference, folder)
        passed += [folder] if holds else []
        print(f"{'ok ' if holds else 'BAD'} {folder.name}: {said}")
    if options.what == "record":
        with RESULTS.open("a") as file:
            file.writelines(
                json.dumps(read(f) | dict(run_id=options.run_id, commit=options.commit)) + "\n" for f in passed
            )
    if len(passed) < 1 + len(others):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("make")
    part.add_argument("--model", choices=SHAPES, required=True)
    part.add_argument("--out", type=Path, required=True)
    part.add_argument("--bits", type=int, choices=(4, 16), default=4)
    part = parts.add_parser("run")
    part.add_argument("--impl", choices=("hf", "liger", "unsloth", "fastlm"), required=True)
    part.add_argument("--checkpoint", type=Path, required=True)
    part.add_argument("--out", type=Path, required=True)
    part.add_argument("--setting", choices=("default", "recompute", "keep"), default="default")
    part.add_argument("--mode", choices=("qlora", "lora", "full"), default="qlora")
    for name, default in (("bs", 2), ("seq", 2048), ("accum", 1), ("steps", 20)):
        part.add_argument(f"--{name}", type=int, default=default)
    part.add_argument("--data", choices=("dense", "ragged-padded", "ragged-free", "ragged-packed"), default="dense")
    part.add_argument("--lengths", type=Path, help="JSON lines of text whose lengths ragged rows have")
    part.add_argument("--trainer", choices=("plain", "get_trainer"), default="plain")
    part.add_argument("--optim", default="adamw_8bit")
    part.add_argument("--attention", default="sdpa", help="attn_implementation of hf and liger")
    part.add_argument("--busy", action="store_true", help="measure too which share of the time the GPU computes")
    for name in ("gate", "record"):
        part = parts.add_parser(name)
        part.add_argument("runs", nargs="+", type=Path)
        if name == "record":
            part.add_argument("--run-id", required=True, help="one name for all runs of one start of one machine")
            part.add_argument("--commit", required=True)
    options = parser.parse_args()
    if options.what == "make":
        make(options.model, options.out, options.bits)
    elif options.what == "run":
        if options.trainer == "get_trainer" and options.impl != "fastlm":
            parser.error("--trainer get_trainer is fastlm's")
        _run(options)
    else:
        _compare(options)


if __name__ == "__main__":
    main()
