"""The benchmarks' dry runs: what they would time, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | dict(
    PYTHONPATH=os.pathsep.join(str(ROOT / p) for p in (".", "kernels")), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
)


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)


def test_every_op_runs_beside_torch(tmp_path):
    done = run("ops.py", "--small", "--only", "rms_norm", "nf4_decode", "linear_cross_entropy", "--without-compile")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {tuple(line[:4]) for line in lines if line[3] in ("fastlm", "torch")} == {
        (op, "typical", direction, impl)
        for op, directions in (("rms_norm", ("forward", "backward")), ("nf4_decode", ("forward",)), ("linear_cross_entropy", ("both",)))
        for direction in directions
        for impl in ("fastlm", "torch")
    }  # fmt: skip
    assert all(line[4] == "runs" for line in lines)


def test_times_need_a_name_and_a_gpu():
    done = run("ops.py", "--only", "rms_norm")
    assert done.returncode == 2 and ("--small" in done.stderr or "--run-id" in done.stderr)
