"""Assembles every CASE's kernels for every supported GPU, without one: `python tests/aot_build.py [--cc 9.0] [--json]`.

Runs in its own process, never under Triton's interpreter. A build is good if it assembles, keeps nothing in local memory
(no spilled registers, no stack) and stays within the shared memory of its chip. Prints a table of what each one takes.
Half precision is bfloat16, or float16 on chips without it; float32 is built for 9.0 alone, and so is every kernel with
integer arguments of 1, which Triton compiles as constants.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# must not be set before Triton is imported: it would make interpreted functions of the kernels
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fastlm_kernels as package
from fastlm_kernels._case import Build
from fastlm_kernels._launch import SHARED_MEMORY_BYTES
from fastlm_kernels.testing import cases

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass
class Job:
    case: str
    cc: tuple[int, int]
    dtype: str
    build: Build
    # integer arguments of 1 are to compile, whatever such strides would take
    has_ones: bool = False

    def key(self) -> tuple:
        build = self.build
        return (build.kernel.__name__, *map(str, (build.signature, build.constants, build.num_warps)), self.cc)


@dataclasses.dataclass
class Result:
    """What one build takes; `problem` is empty if it is good."""

    case: str
    cc: tuple[int, int]
    dtype: str
    kernel: str
    constants: dict
    num_warps: int
    registers: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


def of_ones(build: Build) -> Build:
    """The build that Triton makes where all integer arguments that it specialises are 1."""
    fixed = {parameter.name for parameter in build.kernel.params if parameter.do_not_specialize}
    ones = [name for name, kind in build.signature.items() if kind == "i32" and name not in fixed]
    return dataclasses.replace(
        build,
        signature=build.signature | dict.fromkeys(ones, "constexpr"),
        constants=build.constants | dict.fromkeys(ones, 1),
        multiples_of_16=tuple(name for name in build.multiples_of_16 if name not in ones),
    )


def jobs(ccs: list[tuple[int, int]], dtypes: list[str], only: str = "") -> list[Job]:
    """All different builds of the cases whose name contains `only`; dtypes: "half", "fp32"."""
    found: dict[tuple, Job] = {}
    for case in cases():
        if case.builds is None or only not in case.name:
            continue
        for cc in ccs:
            names = {"half": "fp16" if cc < (8, 0) else "bf16", "fp32": "fp32"}
            for dtype in (names[name] for name in dtypes if name == "half" or cc == (9, 0)):
                for build in case.builds(cc, DTYPES[dtype]):
                    job = Job(case.name, cc, dtype, build)
                    found.setdefault(job.key(), job)
    # the first build of a kernel is the one with the most branches
    first = {job.build.kernel: job for job in reversed(found.values()) if job.cc == (9, 0) and job.dtype == "bf16"}
    ones = [dataclasses.replace(job, build=of_ones(job.build), has_ones=True) for job in first.values()]
    return [*found.values(), *ones]


def _assemble(job: Job) -> tuple[int, int, int]:
    """Registers, bytes of local memory and bytes of shared memory."""
    build = job.build
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(build.signature.items())
        if kind.startswith("*") or (kind != "constexpr" and name in build.multiples_of_16)
    }
    source = ASTSource(build.kernel, signature=build.signature, constexprs=build.constants, attrs=aligned)
    options = {"num_warps": build.num_warps, "enable_fp_fusion": build.enable_fp_fusion}
    target = GPUTarget("cuda", 10 * job.cc[0] + job.cc[1], 32)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, static, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups()
    )
    # STACK counts spilled registers; the static part of shared memory is what the driver reserves
    return registers, stack + local, max(static, compiled.metadata.shared)


def run(job: Job) -> Result:
    build = job.build
    result = Result(job.case, job.cc, job.dtype, build.kernel.__name__, dict(build.constants), build.num_warps)
    start = time.perf_counter()
    try:
        result.registers, result.local_bytes, result.shared_bytes = _assemble(job)
    except Exception as error:  # whatever the compiler says is the finding
        result.problem = f"does not assemble: {type(error).__name__}: {error}"
    result.seconds = round(time.perf_counter() - start, 2)
    if job.has_ones:
        return result
    limit = SHARED_MEMORY_BYTES[job.cc]
    if result.local_bytes:
        result.problem = f"spills: {result.local_bytes} bytes of local memory a thread"
    elif result.shared_bytes > limit:
        result.problem = f"{result.shared_bytes} bytes of shared memory, the chip has {limit}"
    return result


_todo: list[Job] = []


def _run_index(index: int) -> Result:
    return run(_todo[index])


def run_all(todo: list[Job], processes: int) -> list[Result]:
    """Runs all jobs, in order, with an empty compiler cache."""
    _todo[:] = todo
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # forked, so that the workers find the kernels, which cannot be sent to them
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            return pool.map(_run_index, range(len(todo)), chunksize=1)


def kernels_without_builds() -> list[str]:
    """Kernels of the package that no CASE builds."""
    modules = [
        importlib.import_module(f"fastlm_kernels.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    kernels = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    return sorted(kernels - {job.build.kernel.__name__ for job in jobs([(9, 0)], ["half"])})


def _row(result: Result) -> str:
    constants = " ".join(f"{name}={value}" for name, value in result.constants.items())
    return (
        f"{result.cc[0]}.{result.cc[1]:<3} {result.dtype}  {result.kernel:32} warps {result.num_warps:2}  "
        f"registers {result.registers:3}  shared {result.shared_bytes:6}  {result.seconds:5.2f} s  "
        f"{result.problem or 'ok'}  {constants}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cc", nargs="*", help="compute capabilities, as 7.5 9.0; all by default")
    parser.add_argument("--dtype", nargs="*", choices=("half", "fp32"), default=["half", "fp32"])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of the table")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    ccs = [tuple(map(int, cc.split("."))) for cc in options.cc] if options.cc else list(SHARED_MEMORY_BYTES)
    results = run_all(jobs(ccs, options.dtype, options.case), options.processes)
    if options.json:
        rows = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"results": rows, "kernels_without_builds": kernels_without_builds()}))
    else:
        print(f"triton {triton.__version__}")
        print("\n".join(map(_row, results)))
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
