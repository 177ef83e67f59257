"""nf4_decode beyond its CASE: bitsandbytes' own decoding, caller's buffers, unaligned weights, errors."""

import dataclasses
import math

import pytest
import torch

from fastlm_kernels import _launch
from fastlm_kernels.nf4 import CODE, NF4Weight, nf4_decode, nf4_decode_reference

CANARY = 12345.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(params=["torch", "interpreter"])
def path(request):
    if request.param == "torch":
        yield request.param
    elif torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process: the gpu tests run the kernels")
    else:
        with _launch.interpreting():
            yield request.param


def _weight(shape, blocksize=64):
    generator = torch.Generator().manual_seed(0)
    n_values = math.prod(shape)
    packed = torch.randint(0, 256, ((n_values + 1) // 2,), dtype=torch.uint8, generator=generator)
    return NF4Weight(packed, torch.rand(-(-n_values // blocksize), generator=generator), shape, blocksize)


def _quantized(shape, dtype, is_nested, device="cpu", blocksize=64):
    functional = pytest.importorskip("bitsandbytes").functional
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
    packed, state = functional.quantize_4bit(
        dense, blocksize=blocksize, quant_type="nf4", compress_statistics=is_nested
    )
    nested = {}
    if is_nested:
        nested = dict(
            nested_absmax=state.state2.absmax, nested_code=state.state2.code, nested_offset=state.offset,
            nested_blocksize=state.state2.blocksize,
        )  # fmt: skip
    weight = NF4Weight(packed, state.absmax, tuple(shape), blocksize, dtype=dtype, **nested)
    return weight, functional.dequantize_4bit(packed, state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shape", [(64, 320), (12, 100), (3, 7), (257, 64)], ids=str)
def test_equals_bitsandbytes(path, shape, is_nested, dtype):
    weight, expected = _quantized(shape, DTYPES[dtype], is_nested)
    got = nf4_decode(weight, DTYPES[dtype])
    # the interpreter truncates float32 to bfloat16 on a store where hardware rounds: one unit in the last place
    tolerance = 2.0**-7 if (path, dtype) == ("interpreter", "bf16") else 0.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shape", [(1024, 4096), (576, 1536), (257, 1000)], ids=str)
def test_equals_bitsandbytes_on_the_gpu(shape, is_nested, dtype):
    weight, expected = _quantized(shape, DTYPES[dtype], is_nested, "cuda")
    assert torch.equal(nf4_decode(weight, DTYPES[dtype]), expected)


@pytest.mark.gpu
def test_does_not_wait_for_the_gpu():
    weight, _ = _quantized((256, 256), torch.bfloat16, True, "cuda")
    nf4_decode(weight, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        nf4_decode(weight, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("blocksize", [32, 128, 4096])
def test_every_value_of_the_code_and_other_block_sizes(path, blocksize):
    packed = (torch.arange(8192, dtype=torch.int32) % 256).to(torch.uint8)
    weight = NF4Weight(packed, torch.ones(16384 // blocksize), (128, 128), blocksize)
    expected = torch.tensor([CODE[nibble] for byte in range(256) for nibble in (byte >> 4, byte & 15)]).repeat(32)
    assert torch.equal(nf4_decode(weight, torch.float32).view(-1), expected)
    scaled = _weight((33, 128), blocksize)
    torch.testing.assert_close(nf4_decode(scaled, torch.float32).double(), nf4_decode_reference(scaled))


@pytest.mark.parametrize("shape", [(5, 24), (5, 10), (5, 7)], ids=["words", "bytes", "odd"])
def test_rows_of_a_larger_buffer_are_filled_and_nothing_else(path, shape):
    weight = _weight(shape)
    buffer = torch.full((shape[0] + 2, shape[1] + 16), CANARY)
    out = buffer[1:-1, : shape[1]]
    assert nf4_decode(weight, torch.float32, out=out) is out
    torch.testing.assert_close(out.double(), nf4_decode_reference(weight), rtol=1e-6, atol=0.0)
    out.fill_(CANARY)
    assert (buffer == CANARY).all()


@pytest.mark.parametrize("shape", [(8, 24), (3, 3), (1, 1), (513, 16)], ids=str)
def test_nothing_is_written_past_the_end(path, shape):
    weight = _weight(shape)
    buffer = torch.full((math.prod(shape) + 64,), CANARY)
    out = buffer[: math.prod(shape)].view(shape)
    nf4_decode(weight, torch.float32, out=out)
    torch.testing.assert_close(out.double(), nf4_decode_reference(weight), rtol=1e-6, atol=0.0)
    assert (buffer[math.prod(shape) :] == CANARY).all()


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_packed_bytes_may_start_anywhere(path, offset):
    weight = _weight((4, 32))
    moved = torch.cat((weight.packed.new_zeros(offset), weight.packed))[offset:]
    shifted = dataclasses.replace(weight, packed=moved)
    assert torch.equal(nf4_decode(shifted, torch.float32), nf4_decode(weight, torch.float32))


def test_wrong_fields_are_named():
    weight = _weight((4, 32))
    with pytest.raises(ValueError, match=r"packed of a weight \(4, 32\) must be 64 .* got 63"):
        dataclasses.replace(weight, packed=weight.packed[:63])
    with pytest.raises(
        ValueError, match=r"absmax .* must be 2 contiguous torch.float32 values, got 2 of torch.float16"
    ):
        dataclasses.replace(weight, absmax=weight.absmax.half())
    with pytest.raises(ValueError, match="got 48 and 256"):
        dataclasses.replace(weight, blocksize=48)
    with pytest.raises(ValueError, match="together"):
        dataclasses.replace(weight, nested_absmax=torch.ones(1))
    with pytest.raises(ValueError, match=r"out must be \[4, 32\] torch.float32 on cpu, got \(4, 31\)"):
        nf4_decode(weight, torch.float32, out=torch.empty(4, 31))
    with pytest.raises(ValueError, match=r"\(1, 4\)"):
        nf4_decode(weight, torch.float32, out=torch.empty(32, 4).t())
