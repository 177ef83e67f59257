"""Two processes, under DDP or sharded by FSDP, compute what one does with the batches of both. Gloo, on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import ddp_worker
import fsdp_worker
import tiny
import torch
import training

ROOT = Path(__file__).parents[1]


def run_two_processes(folder: Path, worker: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What each of two processes ended up with: all cases run in one start of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / worker), str(folder)]
    processes = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_are_one(tmp_path):
    """Gradients under DDP, and weights and losses after a trainer's steps, on both ranks and against one process.

    One process takes the rows of both: the halves hold different numbers of tokens, which count alike.
    """
    ranks = run_two_processes(tmp_path, "ddp_worker.py")
    batch, n_items = ddp_worker.four_rows()
    _, gradients = tiny.loss_and_gradients(training.ours(), batch, num_items_in_batch=n_items)
    wanted = dict.fromkeys(ddp_worker.GRADIENTS, gradients)
    wanted |= {name: ddp_worker.weights(tmp_path, 4, **case) for name, case in ddp_worker.TRAINERS.items()}
    assert_equal(ranks, wanted)


def test_two_sharded_processes_are_one(tmp_path):
    """Layers under FSDP's `fully_shard`: weights are whole only while their layer runs, forward and backward, on each rank.

    Hooks of FSDP on a layer leave it a block; what is sharded inside a layer is called as a module, and the report says so.
    """
    ranks = run_two_processes(tmp_path, "fsdp_worker.py")
    assert_equal(ranks, {name: fsdp_worker.one_process(**case) for name, case in fsdp_worker.CASES.items()})


def assert_equal(ranks, wanted) -> None:
    assert set(ranks[0]) == set(ranks[1]) == set(wanted)
    for case, want in wanted.items():
        got = ranks[0][case]
        assert set(got) == set(want) and want, case
        for name in want:
            assert torch.equal(got[name], ranks[1][case][name]), f"{case}: {name} differs between the ranks"
            assert tiny.relative(got[name], want[name]) <= 1e-5, f"{case}: {name} differs from one process"
