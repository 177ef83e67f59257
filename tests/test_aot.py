"""Every kernel assembles for every supported GPU: no spilled registers, shared memory within the chip's.

The builds run in a process of their own, since Triton cannot compile where its interpreter is on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from fastlm_kernels._launch import SHARED_MEMORY_BYTES

CHIPS = [pytest.param(cc, id=f"sm{cc[0]}{cc[1]}") for cc in SHARED_MEMORY_BYTES]


def _assembled(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("aot_build.py")
    run = subprocess.run(
        [sys.executable, script, "--json", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert run.stdout, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def half_precision():
    return _assembled("--dtype", "half")


def _check(report, cc):
    results = [result for result in report["results"] if tuple(result["cc"]) == cc]
    assert results
    problems = [f"{r['kernel']} {r['constants']}: {r['problem']}" for r in results if r["problem"]]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("cc", CHIPS)
def test_half_precision(half_precision, cc):
    _check(half_precision, cc)


def test_every_kernel_is_built(half_precision):
    assert half_precision["kernels_without_builds"] == []


@pytest.mark.slow
def test_float32():
    _check(_assembled("--dtype", "fp32", "--cc", "9.0"), (9, 0))
