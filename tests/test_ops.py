"""Every op's CASE: Triton kernels in the interpreter here, on the chip under `gpu`, and the torch path of a CPU."""

import contextlib

import pytest
import torch

from fastlm_kernels import _launch
from fastlm_kernels.testing import cases, check_case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Triton's interpreter truncates float32 to bfloat16 on a store where hardware rounds: one unit in the last place.
INTERPRETER_SLACK = {"fp32": 0.0, "fp16": 0.0, "bf16": 2.0**-7}


def _params():
    for case in cases():
        for shape_id, shape in case.shapes.items():
            for dtype_id in DTYPES:
                for strided in (False, True) if case.strided else (False,):
                    name = f"{case.name}-{dtype_id}-{shape_id}" + ("-strided" if strided else "")
                    yield pytest.param(case, shape, dtype_id, strided, id=name)


@pytest.mark.parametrize("case,shape,dtype,strided", list(_params()))
@pytest.mark.parametrize("path", ["torch", "interpreter"])
def test_op_is_no_worse_than_torch(case, shape, dtype, strided, path):
    if path == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process: the gpu tests run the kernels")
    with _launch.interpreting() if path == "interpreter" else contextlib.nullcontext():
        slack = INTERPRETER_SLACK[dtype] if path == "interpreter" else 0.0
        check_case(case, shape, DTYPES[dtype], "cpu", strided=strided, slack=slack)


@pytest.mark.gpu
@pytest.mark.parametrize("case,shape,dtype,strided", list(_params()))
def test_op_on_the_gpu(case, shape, dtype, strided):
    check_case(case, shape, DTYPES[dtype], "cuda", strided=strided)


MODEL_SHAPES = [
    pytest.param(c, shape, id=f"{c.name}-{name}") for c in cases() for name, shape in c.bench_shapes.items()
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case,shape", MODEL_SHAPES)
def test_op_on_the_gpu_at_model_shapes(case, shape, dtype):
    # so many values need no second draw to tell an error from chance
    check_case(case, shape, DTYPES[dtype], "cuda", draws=1)
