"""Time every op of fastlm_kernels at real models' shapes, beside torch, torch.compile and the libraries that have the op.

    python benchmarks/ops.py --run-id ID --commit SHA [--only rms_norm glu] [--output ops.jsonl] [--small] [--without-compile]

Each op is first checked against float64 (`fastlm_kernels.testing`); what is wrong is not timed. A time is that of the device: rounds
over several sets of inputs, together larger than the cache, replayed as one CUDA graph, or queued as they are where the op waits for
the device. The share is of a ceiling that the same run measured: a large copy, or a large matrix product. `--small` is a dry run on any
device, with the tests' shapes and without times.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlm_kernels._case import Case, Inputs, Shape
from fastlm_kernels.attention import attention, attention_backend
from fastlm_kernels.testing import cases, check_case

RESULTS = Path(__file__).parent / "results" / "ops.jsonl"
DTYPE = torch.bfloat16
# several times the second-level cache of a data-centre GPU
_ROTATED_BYTES = 400 * 2**20
_REPLAYS = 20
# ops that ask the device how many rows have a label
_WAITING = "linear_"


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: bytes read and written by a copy of 2 GiB, and a bfloat16 matrix product, each per second."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, n_bytes: float, flops: float) -> float:
        """The least time for so many bytes and operations."""
        return 1e3 * max(n_bytes / self.bytes_per_s, flops / self.flops_per_s)


def _waits(call: Callable[[], Any]) -> bool:
    """Whether torch sees the call wait for the device, which no graph can."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _times_ms(make_rounds: Callable[[], list[Callable[[], Any]]], waits: bool = False) -> list[float]:
    """Milliseconds a call, each over one replay of a graph of all rounds.

    Args:
        make_rounds: makes the calls, on the stream that they are captured on.
        waits: the calls wait for the device, and are queued as they are.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = None
    with torch.cuda.stream(stream):
        rounds = make_rounds()
        for call in rounds + rounds:
            call()
        waits = waits or _waits(rounds[0])
    torch.cuda.synchronize()
    if not waits:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in rounds:
                call()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(_REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            if graph is not None:
                graph.replay()
            else:
                for call in rounds:
                    call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(rounds))
    return times[2:]


def _copied_bytes_per_s() -> float:
    source = torch.randn(2**30, device="cuda", dtype=DTYPE)
    target = torch.empty_like(source)
    # a kernel: a graph leaves plain copies to the copy engine, which is slower
    ms = statistics.median(_times_ms(lambda: [lambda: torch.neg(source, out=target)]))
    return 2 * source.numel() * source.element_size() / ms * 1e3


def _product_flops_per_s(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=DTYPE) for _ in range(2))
    ms = statistics.median(_times_ms(lambda: [lambda: a @ b]))
    return 2 * size**3 / ms * 1e3


def measure_ceilings() -> Ceilings:
    return Ceilings(_copied_bytes_per_s(), _product_flops_per_s())


def _liger(case: Case) -> dict[str, Callable[..., Any]]:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
        return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    functions: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, weight, eps, **_: LigerRMSNormFunction.apply(x, weight, eps),
        "glu": lambda gate, up, **_: LigerSiLUMulFunction.apply(gate, up),
        "rope": turned,
        "cross_entropy": lambda logits, labels, **_: LigerCrossEntropyFunction.apply(logits, labels, None)[0],
        "linear_cross_entropy": lambda hidden, weight, labels, **_: LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, labels
        )[0],
    }
    return {"liger": functions[case.name]} if case.name in functions else {}


def _bitsandbytes(case: Case) -> dict[str, Callable[..., Any]]:
    if case.name != "nf4_decode":
        return {}
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    made: dict[int, Any] = {}

    def decoded(weight: Any, dtype: torch.dtype) -> Tensor:
        # of the same size; what it holds takes no time
        if id(weight) not in made:
            dense = torch.randn(weight.shape, device=weight.packed.device, dtype=dtype)
            made[id(weight)] = quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
        return dequantize_4bit(*made[id(weight)])

    return {"bitsandbytes": decoded}


def _attention_backends(case: Case, inputs: Inputs) -> dict[str, Callable[..., Any]]:
    """Each library that serves this call, by its name: ours picks one of them."""
    if not case.name.startswith("attention"):
        return {}
    found = {}
    options = {k: v for k, v in inputs.items() if k not in ("scale",)}
    chosen = attention_backend(
        **{k: v for k, v in options.items() if k in ("q", "k", "v", "layout", "window", "softcap")}
    )
    for name in ("flash_attention_4", "cudnn", "flash", "torch_varlen", "triton"):
        if name == chosen:
            continue
        try:
            attention(**inputs, backend=name)
        except (ValueError, RuntimeError):
            # it cannot serve this call
            continue
        found[f"backend {name}"] = lambda name=name, **given: attention(**given, backend=name)
    return found


def implementations(case: Case, inputs: Inputs, compiles: bool) -> dict[str, Callable[..., Any]]:
    """Name -> what computes the op from the case's inputs."""
    found = {"fastlm": case.op, "torch": case.eager}
    if compiles and not case.name.startswith("nf4"):
        found["torch.compile"] = torch.compile(case.eager, dynamic=False)
    for package, make in (("liger-kernel", _liger), ("bitsandbytes", _bitsandbytes)):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= make(case)
    return found | _attention_backends(case, inputs)


def _bytes(inputs: Inputs) -> int:
    return sum(v.numel() * v.element_size() for v in inputs.values() if isinstance(v, Tensor))


def _input_sets(case: Case, shape: Shape, device: torch.device) -> list[Inputs]:
    """Enough sets of inputs that a round over them leaves none in the cache."""
    generator = torch.Generator().manual_seed(0)
    first = case.make(shape, DTYPE, device, generator)
    n_sets = min(8, max(1, math.ceil(_ROTATED_BYTES / max(1, _bytes(first)))))
    return [first] + [case.make(shape, DTYPE, device, generator) for _ in range(n_sets - 1)]


def _forward(function: Callable[..., Any], inputs: Inputs, gradients: tuple[str, ...]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function(**inputs)

    return call


def _backward(function: Callable[..., Any], inputs: Inputs, gradients: tuple[str, ...]) -> Callable[[], Any]:
    leaves = [inputs[name].detach().requires_grad_() for name in gradients]
    outputs = function(**(inputs | dict(zip(gradients, leaves, strict=True))))
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
    weights = [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, weights, retain_graph=True)


def _both(function: Callable[..., Any], inputs: Inputs, gradients: tuple[str, ...]) -> Callable[[], Any]:
    def call() -> Any:
        return _backward(function, inputs, gradients)()

    return call


Make = Callable[[Callable[..., Any], Inputs, tuple[str, ...]], Callable[[], Any]]
Ideal = Callable[[Shape, int], tuple[float, float]]


def _rounds(
    make: Make, function: Callable[..., Any], sets: list[Inputs], gradients: tuple[str, ...]
) -> list[Callable[[], Any]]:
    return [make(function, inputs, gradients) for inputs in sets]


def _passes(case: Case) -> Iterator[tuple[str, Make, tuple[str, ...], Ideal]]:
    """What is timed of an op: gradients of activations alone, since weights are frozen where adapters train."""
    activations = tuple(name for name in case.gradients if "weight" not in name and name != "bias")
    if case.ideal is None:
        return
    if activations and case.ideal_backward is None:
        yield "both", _both, activations, case.ideal
        return
    yield "forward", _forward, (), case.ideal
    if activations and case.ideal_backward is not None:
        yield "backward", _backward, activations, case.ideal_backward


def rows_of(
    case: Case, ceilings: Ceilings | None, device: torch.device, compiles: bool = True
) -> Iterator[dict[str, Any]]:
    """A row for each shape, implementation and direction; without ceilings, of the tests' shape and without times."""
    shapes = {"typical": case.shapes["typical"]} if ceilings is None else case.bench_shapes
    dtype = torch.float32 if device.type == "cpu" else DTYPE
    check_case(case, case.shapes["typical"], dtype, device)
    for label, shape in shapes.items():
        sets = _input_sets(case, shape, device)
        for name, function in implementations(case, sets[0], compiles).items():
            for direction, make, gradients, ideal in _passes(case):
                row: dict[str, Any] = dict(op=case.name, shape=label, impl=name, direction=direction)
                try:
                    make_rounds = functools.partial(_rounds, make, function, sets, gradients)
                    if ceilings is None:
                        make_rounds()[0]()
                        yield row
                        continue
                    times = sorted(_times_ms(make_rounds, waits=case.name.startswith(_WAITING)))
                except (RuntimeError, TypeError, ValueError) as error:
                    yield row | dict(error=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
                    continue
                n_bytes, flops = ideal(shape, torch.finfo(DTYPE).bits // 8)
                p20, p50, p80 = (times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
                yield row | dict(
                    p20_ms=p20, p50_ms=p50, p80_ms=p80, gb_s=n_bytes / p50 / 1e6, tflop_s=flops / p50 / 1e9,
                    share=ceilings.floor_ms(n_bytes, flops) / p50,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-id", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", nargs="*", help="names of ops")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further op after so many")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        parser.error("times need a CUDA GPU; --small is a dry run without times")
    if not options.small and not (options.run_id and options.commit):
        parser.error("--run-id and --commit name the measurement")
    ceilings = None if options.small else measure_ceilings()
    facts = dict(run_id=options.run_id, commit=options.commit, torch=torch.__version__, date=time.strftime("%Y-%m-%d"))
    if ceilings is not None:
        facts |= dict(
            gpu=torch.cuda.get_device_name(), triton=importlib.metadata.version("triton"),
            copy_gb_s=ceilings.bytes_per_s / 1e9, gemm_tflop_s=ceilings.flops_per_s / 1e12,
        )  # fmt: skip
        print(f"copy {ceilings.bytes_per_s / 1e9:.0f} GB/s, matrix product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    chosen = [case for case in cases() if case.bench_shapes and (not options.only or case.name in options.only)]
    start, wrong = time.perf_counter(), []
    for case in chosen:
        if time.perf_counter() - start > options.seconds:
            print(f"{case.name} and what follows: no time left")
            break
        try:
            for row in rows_of(case, ceilings, device, not options.without_compile):
                if not options.small:
                    with options.output.open("a") as file:
                        file.write(json.dumps(row | facts) + "\n")
                measured = (
                    f"{row['p50_ms']:9.4f} ms {row['share']:6.1%}" if "p50_ms" in row else row.get("error", "runs")
                )
                print(
                    f"{row['op']:22s} {row['shape']:28s} {row['direction']:8s} {row['impl']:26s} {measured}", flush=True
                )
        except AssertionError as error:
            wrong.append(case.name)
            print(f"{case.name}: wrong, and not timed: {error}")
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
