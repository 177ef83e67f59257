"""Set before any test imports Triton or a hub client: kernels run in Triton's interpreter where there is no GPU."""

import contextlib
import os

# tiny models gain nothing from threads, and tests run side by side
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config, items):
    """`gpu` tests need a GPU; asking for them by mark on a machine without one is an error of theirs, not a skip."""
    if torch.cuda.is_available() or "gpu" in (config.getoption("-m") or ""):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU (make test-gpu)"))


@pytest.fixture(params=["torch", "interpreter"])
def path(request):
    """CPU tensors through the torch path, then through the kernels."""
    from fastlm_kernels import _launch

    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process: the gpu tests run the kernels")
    with _launch.interpreting() if request.param == "interpreter" else contextlib.nullcontext():
        yield request.param
