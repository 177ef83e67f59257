"""A run that is killed, terminated, evaluated, generated from, switched and saved in between ends as the one that nobody disturbed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training

ROOT = Path(__file__).resolve().parent.parent
TO_THE_BIT = 0.0
# what one evaluation, one save and the allocator's own pieces may leave behind, once
FLAT_BYTES = 32 * 2**20


def soak(folder: Path, steps: int) -> dict:
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "kernels", ROOT / "tests"))
    command = [sys.executable, str(ROOT / "tests" / "soak_worker.py"), str(folder), str(steps)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120 + steps
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result = torch.load(folder / "result.pt", weights_only=True)
    training.assert_same_weights(result["disturbed_weights"], result["weights"], TO_THE_BIT)
    return result


def test_two_hundred_disturbed_steps(tmp_path):
    result = soak(tmp_path, 200)
    assert {"kill", "terminate", "evaluate", "save", "generate", "switch"} <= set(result["disturbances"])
    assert set(result["ends"]) == {0, 143, -9}


@pytest.mark.slow
def test_two_thousand_disturbed_steps_in_flat_memory(tmp_path):
    result = soak(tmp_path, 2000)
    assert result["growth_bytes"] <= FLAT_BYTES, result["growth_bytes"]
