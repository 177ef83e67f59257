"""The example of chat data runs from top to bottom."""

import os
import subprocess
import sys
from pathlib import Path

import checkpoint

ROOT = Path(__file__).resolve().parent.parent


def test_chat_data(tmp_path):
    model = checkpoint.save(tmp_path / "model")
    command = [
        sys.executable,
        str(ROOT / "examples/chat_data.py"),
        "--smoke",
        "--model",
        str(model),
        "--output",
        str(tmp_path),
    ]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "32 of 33 rows of the form alpaca" in done.stderr
    assert "dropped 1: the answer is missing (the first is row 32)" in done.stdout
    question = "<|im_start|>user\nName the capital of the country.\n\nFrance<|im_end|>\n<|im_start|>assistant\n"
    assert question + "⟦The capital of France is Paris.<|im_end|>⟧\n" in done.stdout
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
