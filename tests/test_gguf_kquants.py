"""K-quants: bytes equal to llama.cpp's own, layout as gguf's dequantizers read it, mixtures and fallbacks."""

import hashlib

import numpy as np
import pytest
import torch

from fastlm.export import gguf_kquants, gguf_types
from fastlm.export.gguf_types import Shape, choose_format

gguf = pytest.importorskip("gguf")

# SHA-256 of what llama.cpp's ggml_quantize_chunk (as of llama-cpp-python 0.3.36, x86-64) writes for `weight()`
DIGESTS = {
    "Q2_K": "80cde55df83103f4fae3783d8686fe088c3d9b157d3438da534262edcf71b2a3",
    "Q3_K": "207d51bfc12eeed126663427733053be273d37a3fabc1775b45dff89be741170",
    "Q4_K": "96de8fa66cc3532f4d30d2d5189c53ce6957d6060210e7d193df37d08657d407",
    "Q5_K": "acc1371cf760e2b852345459930bb2e0c1828f24c11a628e8e552faf5230ce63",
    "Q6_K": "67ac194411fa5b4b07ea999969e9834e4bdc588e5ef2d75d3f89b46dba977065",
}


def weight():
    """[8, 1024] float32 by integer arithmetic alone: bell-shaped values of many sizes, sparse, constant, zero and coarse blocks."""
    index = torch.arange(8 * 1024, dtype=torch.int64)
    total = sum(((index * (4 * i + 3) + 977 * i) * 2654435761 % 2**32) // 2**8 for i in range(4))
    x = (total - 2**25).double() / 2**25
    x = x * 2.0 ** ((index // 32 % 7) - 6)
    x[256:512] = 0
    x[512:544] = 0
    x[544:576] = 0.015625
    x[768:1024] *= (index[768:1024] % 19) == 0
    x[1024:1280] = ((index[1024:1280] * 7919) % 15 - 7).double() / 64
    x[1280:1536] = x[1280:1536].abs()
    x[1536:1792] = -x[1536:1792].abs() - 0.25
    # one block so small beside the others that its stored scale is zero
    x[1792:1824] = x[1792:1824] * 2.0**-20
    return x.float().reshape(8, 1024)


def dequantized(data, name):
    return torch.from_numpy(gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", list(gguf_kquants.KQUANTS))
def test_bytes_are_llama_cpps(name):
    made = gguf_kquants.quantize(weight(), name)
    assert hashlib.sha256(made.numpy().tobytes()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize(
    ("name", "error"), [("Q2_K", 0.32), ("Q3_K", 0.16), ("Q4_K", 0.08), ("Q5_K", 0.04), ("Q6_K", 0.019)]
)
def test_layout_is_what_gguf_reads(name, error):
    """The relative error of a normal distribution is that of so many bits; a wrong layout gives more than one."""
    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(0))
    read = dequantized(gguf_kquants.quantize(x, name).numpy(), name)
    assert read.shape == x.shape
    assert (read - x).norm() < error * x.norm()
    # every place of a super-block on its own
    by_place = ((read - x).reshape(-1, 256).square().mean(0) / x.reshape(-1, 256).square().mean(0)).sqrt()
    assert by_place.max() < 1.6 * error


@pytest.mark.parametrize("name", list(gguf_kquants.KQUANTS))
def test_chunks_dtypes_and_strides_do_not_matter(name, monkeypatch):
    x = weight().bfloat16()
    whole = gguf_kquants.quantize(x.float(), name)
    monkeypatch.setitem(gguf_kquants._CHUNK, "cpu", 768)
    assert torch.equal(gguf_kquants.quantize(x, name), whole)
    assert torch.equal(gguf_kquants.quantize(x.t().contiguous().t(), name), whole)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 256 values for Q4_K, got 128"):
        gguf_kquants.quantize(torch.zeros(2, 128), "Q4_K")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(gguf_kquants.KQUANTS))
def test_the_gpu_writes_the_same_bytes(name):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    for values in (x, weight()):
        assert torch.equal(gguf_kquants.quantize(values.cuda(), name), gguf_kquants.quantize(values, name))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K"])
def test_encoded_tensors_are_read_back(name):
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    made = gguf_types.encode(x, name, torch.device("cpu"))
    assert made.nbytes == np.prod(gguf_types.byte_shape((6, 256), name))
    error = {
        "F32": 0,
        "F16": 5e-4,
        "BF16": 4e-3,
        "Q8_0": 6e-3,
        "Q4_0": 0.1,
        "Q4_1": 0.09,
        "Q5_0": 0.05,
        "Q5_1": 0.045,
        "Q6_K": 0.02,
    }
    assert (dequantized(made, name) - x).norm() <= error[name] * x.norm()


def test_half_precision_does_not_overflow_silently():
    with pytest.raises(ValueError, match=r"beyond float16's range.*'bf16'"):
        gguf_types.encode(torch.tensor([[1e6] * 32]), "F16", torch.device("cpu"))


# --- which tensor gets which format ---

LAYERS = 32
UNTIED = Shape(n_layers=LAYERS, n_groups=4, is_70b=False, has_head=True)


def formats(method, part, shape=UNTIED, n_columns=4096):
    return [choose_format(method, f"blk.{i}.{part}.weight", 2, n_columns, shape) for i in range(shape.n_layers)]


def test_more_bits_of_q4_k_m_go_to_the_layers_that_llama_cpp_gives_them():
    """The first and last eighth, and every third between."""
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for part in ("attn_v", "ffn_down"):
        assert [i for i, kind in enumerate(formats("q4_k_m", part)) if kind == "Q6_K"] == more
    for part in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert set(formats("q4_k_m", part)) == {"Q4_K"}
    assert choose_format("q4_k_m", "token_embd.weight", 2, 4096, UNTIED) == "Q4_K"
    assert choose_format("q4_k_m", "output.weight", 2, 4096, UNTIED) == "Q6_K"


def test_other_mixtures():
    assert set(formats("q6_k", "ffn_down")) == {"Q6_K"}
    assert formats("q4_k_s", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert formats("q3_k_m", "attn_v") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert formats("q3_k_m", "ffn_down") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert set(formats("q3_k_m", "attn_output")) == {"Q4_K"} and set(formats("q3_k_m", "ffn_up")) == {"Q3_K"}
    assert set(formats("q2_k", "attn_v")) == {"Q4_K"}
    assert set(formats("q2_k", "attn_v", Shape(32, 1, False, True))) == {"Q3_K"}
    assert formats("q5_k_m", "attn_qkv")[4:7] == ["Q5_K", "Q5_K", "Q6_K"]
    large = Shape(n_layers=80, n_groups=8, is_70b=True, has_head=True)
    assert set(formats("q4_k_m", "attn_v", large)) == {"Q5_K", "Q6_K"}


def test_a_tied_embedding_is_as_good_as_an_output():
    tied = Shape(n_layers=LAYERS, n_groups=4, is_70b=False, has_head=False)
    for method, kind in (("q4_k_m", "Q6_K"), ("q4_0", "Q6_K"), ("q8_0", "Q8_0"), ("f16", "F16"), ("bf16", "BF16")):
        assert choose_format(method, "token_embd.weight", 2, 2048, tied) == kind
    assert choose_format("q4_0", "token_embd.weight", 2, 2080, tied) == "Q8_0"


def test_rows_without_whole_blocks_fall_back():
    smaller = {"q2_k": "Q4_0", "q3_k_s": "Q4_0", "q4_k_s": "Q5_0", "q5_k_s": "Q5_1", "q6_k": "Q8_0", "q4_0": "Q4_0"}
    for method, kind in smaller.items():
        assert choose_format(method, "blk.20.ffn_up.weight", 2, 896, UNTIED) == kind
        assert choose_format(method, "blk.20.ffn_up.weight", 2, 100, UNTIED) == "F16"
    assert choose_format("q8_0", "blk.0.ffn_up.weight", 2, 100, UNTIED) == "F16"
    assert choose_format("q4_k_m", "output.weight", 2, 896, UNTIED) == "Q8_0"


def test_vectors_and_norms_stay_float32():
    for method in gguf_types.METHODS:
        assert choose_format(method, "blk.0.attn_q.bias", 1, 4096, UNTIED) == "F32"
        assert choose_format(method, "blk.0.attn_q_norm.weight", 2, 128, UNTIED) == "F32"


def test_names_of_methods():
    assert gguf_types.parse_methods("Q4_K_M") == ["q4_k_m"]
    assert gguf_types.parse_methods(["quantized", "q4_k", "f16", "fast_quantized"]) == ["q4_k_m", "f16", "q8_0"]
    with pytest.raises(ValueError, match=r"'q4_k_m'.*got 'iq2_xs'"):
        gguf_types.parse_methods(["q8_0", "iq2_xs"])
    for wrong in (None, [], 4, ["q8_0", None]):
        with pytest.raises(TypeError, match="a name or a list of names"):
            gguf_types.parse_methods(wrong)
