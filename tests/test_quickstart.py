"""The demo: on a tiny model from end to end, and with the real one under `slow`."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

from orders import HELD_OUT, TRAINED, orders  # noqa: E402


def quickstart(*options: str) -> str:
    paths = [str(ROOT / folder) for folder in (".", "kernels")]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(paths)
    }
    command = [sys.executable, str(ROOT / "examples/quickstart.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_smoke(tmp_path):
    model = checkpoint.save(tmp_path / "model")
    output = quickstart("--smoke", "--model", str(model), "--output", str(tmp_path / "out"))
    assert "exact match before: 0.0 %" in output
    assert "exact match after:" in output
    assert "adapter reloaded: identical text" in output
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "out/merged/model.safetensors").is_file()
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_real_model_learns_the_task(tmp_path):
    start = time.monotonic()
    output = quickstart("--output", str(tmp_path / "out"))
    before, after, merged = (
        float(re.search(rf"{name}: (?:exact match )?([\d.]+) %", output)[1])
        for name in ("exact match before", "exact match after", "merged model reloaded")
    )
    assert before < 5 and after >= 80 and abs(merged - after) <= 2, output
    assert "adapter reloaded: identical text" in output
    print(f"{time.monotonic() - start:.0f} s")


def test_held_out_rows_share_nothing_with_training():
    for key in TRAINED:
        separator = "|" if key == "phrasings" else " "
        trained, held_out = (set(half[key].split(separator)) for half in (TRAINED, HELD_OUT))
        assert not trained & held_out, key
    assert not {row["prompt"] for row in orders(TRAINED, 640, 0)} & {row["prompt"] for row in orders(HELD_OUT, 120, 0)}


def test_rows_hold_what_their_answers_say():
    import json

    for half in (TRAINED, HELD_OUT):
        for row in orders(half, 100, 1):
            answer = json.loads(row["completion"])
            assert list(answer) == ["item", "quantity", "customer", "address"]
            assert all(str(value) in row["prompt"] for value in answer.values())
    assert orders(HELD_OUT, 5, 3) == orders(HELD_OUT, 5, 3) != orders(HELD_OUT, 5, 4)
