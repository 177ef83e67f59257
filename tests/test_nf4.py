"""NF4 decoding beyond the CASEs: bitsandbytes' own decoding, callers' buffers, stacks, unaligned weights, errors."""

import dataclasses
import math

import pytest
import torch

from fastlm_kernels import nf4
from fastlm_kernels.nf4 import CODE, NF4Weight, nf4_decode, nf4_decode_reference, nf4_decode_stacked

CANARY = 12345.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _weight(shape, blocksize=64):
    generator = torch.Generator().manual_seed(0)
    n_values = math.prod(shape)
    packed = torch.randint(0, 256, ((n_values + 1) // 2,), dtype=torch.uint8, generator=generator)
    return NF4Weight(packed, torch.rand(-(-n_values // blocksize), generator=generator), shape, blocksize)


def _quantized(shape, dtype, is_nested, device="cpu", blocksize=64, seed=0):
    functional = pytest.importorskip("bitsandbytes").functional
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)
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


# Rows of each weight, their columns, and extra columns of the buffer. Columns are a multiple of 64 or none of 16: between
# them bitsandbytes' own decoding on a CPU reads the absmax of other blocks.
STACKS = {
    "grouped-heads": ((96, 32, 32), 64, 0),
    "augmented": ((96, 32, 32), 64, 16),
    "two-in-several-programs": ((70, 75), 128, 8),
    "four": ((16, 8, 24, 3), 40, 24),
    "seven": ((8,) * 7, 24, 0),
    "odd-columns": ((3, 5, 4), 7, 0),
    "odd-columns-augmented": ((3, 50, 40, 9), 45, 3),
    "even-columns-augmented": ((5, 6), 10, 5),
    "an-empty-weight": ((0, 9, 0, 5), 24, 8),
    "one": ((12,), 64, 4),
}


def _stack(name, dtype, is_nested, device="cpu"):
    rows, n_cols, extra = STACKS[name]
    pairs = [_quantized((n, n_cols), DTYPES[dtype], is_nested, device, seed=i) for i, n in enumerate(rows)]
    buffer = torch.full((sum(rows) + 3, n_cols + extra), CANARY, dtype=DTYPES[dtype], device=device)
    return [weight for weight, _ in pairs], torch.cat([expected for _, expected in pairs]), buffer


def _check_stack(weights, expected, buffer, tolerance=0.0):
    canary = buffer[-1, -1].item()
    assert nf4_decode_stacked(weights, buffer) is buffer
    n_rows, n_cols = expected.shape
    torch.testing.assert_close(buffer[:n_rows, :n_cols], expected, rtol=tolerance, atol=0.0)
    buffer[:n_rows, :n_cols] = canary
    assert (buffer == canary).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", STACKS)
def test_stack_equals_bitsandbytes_and_touches_nothing_else(path, name, is_nested, dtype):
    # the interpreter truncates where hardware rounds, as above
    tolerance = 2.0**-7 if (path, dtype) == ("interpreter", "bf16") else 0.0
    _check_stack(*_stack(name, dtype, is_nested), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", STACKS)
def test_stack_equals_bitsandbytes_on_the_gpu(name, is_nested, dtype):
    _check_stack(*_stack(name, dtype, is_nested, "cuda"))


@pytest.mark.parametrize("count,launches", [(1, 1), (2, 1), (3, 1), (4, 1), (7, 2)])
def test_weights_of_one_layout_share_a_launch(count, launches, monkeypatch):
    launched = []
    monkeypatch.setattr(nf4, "runs_triton", lambda x: True)
    monkeypatch.setattr(nf4, "_launch", lambda weights, out: launched.append(len(weights)))
    nf4_decode_stacked([_weight((8, 64)) for _ in range(count)], torch.empty(8 * count, 64))
    assert len(launched) == launches and sum(launched) == count


def test_weights_of_different_layouts_stack(path):
    plain, coarse = _weight((6, 64)), _weight((4, 64), blocksize=128)
    nested, expected = _quantized((8, 64), torch.float32, True)
    moved = dataclasses.replace(plain, packed=torch.cat((plain.packed.new_zeros(1), plain.packed))[1:])
    weights = [plain, moved, coarse, coarse, nested]
    buffer = torch.full((33, 70), CANARY)
    truth = torch.cat([*(nf4_decode(weight, torch.float32) for weight in weights[:-1]), expected])
    _check_stack(weights, truth, buffer)


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


def test_wrong_stacks_are_named():
    weight = _weight((4, 32))
    with pytest.raises(ValueError, match="at least one weight"):
        nf4_decode_stacked([], torch.empty(4, 32))
    with pytest.raises(ValueError, match=r"32 columns.* got \(4, 16\)"):
        nf4_decode_stacked([weight, _weight((4, 16))], torch.empty(8, 32))
    with pytest.raises(ValueError, match=r"8 rows and 32 columns .* shape \(7, 32\)"):
        nf4_decode_stacked([weight, weight], torch.empty(7, 32))
    with pytest.raises(ValueError, match=r"strides \(1, 8\)"):
        nf4_decode_stacked([weight, weight], torch.empty(32, 8).t())
    with pytest.raises(ValueError, match="lie on meta"):
        nf4_decode_stacked([weight], torch.empty(4, 32, device="meta"))
