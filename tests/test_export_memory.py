"""Memory of a merged save beyond the live model: one file and little more, however many layers there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes")
ROOT = Path(__file__).resolve().parent.parent
GIBIBYTE = 1024


def measure(folder, **settings):
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests"))
    # the allocator gives freed blocks of any size back: what counts is what is in use
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= dict(PYTHONPATH=path, MALLOC_MMAP_THRESHOLD_="65536", CUDA_VISIBLE_DEVICES="")
    command = [
        sys.executable,
        str(ROOT / "tests" / "merge_memory_worker.py"),
        json.dumps(settings | dict(folder=str(folder))),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(settings, found)
    return found


SMALL = dict(vocab_size=2048, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4)


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    """Five times as many files: the same memory, of about one."""
    save = dict(max_shard_size="16MB")
    few, many = (measure(tmp_path, num_hidden_layers=n, save=save, **SMALL) for n in (4, 20))
    assert many["written_mib"] > few["written_mib"] + 100
    beyond = [found["peak_mib"] - found["live_mib"] for found in (few, many)]
    # one file, and what a block of rows is worked on in: up to eight arrays of 4 Mi entries
    assert max(beyond) < 120 and beyond[1] < beyond[0] + 32, beyond


@pytest.mark.slow
def test_three_layers_of_70b(tmp_path):
    """Llama-3-70B's shapes: files of 5 GB, a head of 2 GB, and at most 1 GiB beside one file."""
    shapes = dict(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8
    )
    found = measure(tmp_path, num_hidden_layers=3, save=dict(max_shard_size="5GB"), **shapes)
    assert found["written_mib"] > 8800
    assert found["peak_mib"] - found["live_mib"] <= 5e9 / 2**20 + GIBIBYTE, found
