"""GGUF files against llama.cpp itself: `make test-gguf`, which builds llama-cpp-python from its source package.

Blocks and mixtures are compared with its quantizer, logits, tokens and adapters of every family with the merged model, and a real
model's perplexity and answer. Not collected with the other tests: they need no compiler.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny
import torch
import transformers as tf
from exported import shake
from gguf_models import CORPUS, FAMILIES, byte_level, gguf, model, sentencepiece
from peft import LoraConfig, get_peft_model

from fastlm.export import gguf_types
from fastlm.export.gguf import save_pretrained_gguf

ROOT = Path(__file__).resolve().parent.parent
BASE = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
BASE.ggml_quantize_chunk.restype = ctypes.c_size_t
BASE.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
QUANTIZED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# llama.cpp keeps keys and values in float16, whatever the weights are
CACHE_ERROR = 3e-3


def values(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4096, generator=generator) * 0.02
    if kind == "bfloat16":
        return x.bfloat16().float()
    if kind == "heavy tails":
        return x * torch.exp(torch.randn(256, 4096, generator=generator))
    if kind == "rows of many sizes":
        return x * torch.exp(3 * torch.randn(256, 1, generator=generator))
    if kind == "one sign":
        return x.abs() + 0.01
    return x


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "heavy tails", "rows of many sizes", "one sign"])
def test_blocks(name, kind):
    x, kinds = values(kind), gguf.GGMLQuantizationType
    made = gguf_types.encode(x, name, torch.device("cpu"))
    want = np.zeros_like(made)
    BASE.ggml_quantize_chunk(int(kinds[name]), x.data_ptr(), want.ctypes.data, 0, *x.shape, None)
    size = gguf.GGML_QUANT_SIZES[kinds[name]][1]
    equal = (made.reshape(-1, size) == want.reshape(-1, size)).all(1).mean()
    ours, theirs = (np.linalg.norm(gguf.quants.dequantize(data, kinds[name]) - x.numpy()) for data in (made, want))
    print(f"{name} {kind}: {100 * equal:.3f} % of blocks equal, RMSE {ours / theirs:.6f} of llama.cpp's")
    assert equal >= 0.99 and ours <= 1.02 * theirs


def quantize(source, target, method):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(gguf.LlamaFileType[gguf_types.METHODS[method][0]]), 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0


MIXED = {
    "llama": ("llama", dict(hidden_size=256, intermediate_size=512, num_hidden_layers=12)),
    "grouped": ("llama", dict(hidden_size=256, intermediate_size=352, num_hidden_layers=9, num_key_value_heads=1)),
    "tied": ("llama-tied-mha", dict(hidden_size=256, intermediate_size=288, num_hidden_layers=17)),
    "qwen2": ("qwen2", dict(hidden_size=160, intermediate_size=512, num_hidden_layers=5)),
    "gemma2": ("gemma2", dict(hidden_size=256, intermediate_size=512, layer_types=None, num_hidden_layers=8)),
    "phi3": ("phi3", dict(hidden_size=256, intermediate_size=256, num_hidden_layers=8)),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_mixtures_and_fallbacks(name, tmp_path):
    """Every tensor of every method in the format, and with the bytes, that llama.cpp makes of the float32 file."""
    family, over = MIXED[name]
    methods = [method for method in gguf_types.METHODS if method != "f32"]
    source, *files = save_pretrained_gguf(model(family, **over), tmp_path, byte_level(), ["f32", *methods])
    for method, file in zip(methods, files, strict=True):
        quantize(source, tmp_path / "theirs.gguf", method)
        theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
        ours = {t.name: t for t in gguf.GGUFReader(file).tensors}
        kinds = {key: (tensor.tensor_type.name, ours[key].tensor_type.name) for key, tensor in theirs.items()}
        assert set(ours) == set(theirs) and not {key: pair for key, pair in kinds.items() if pair[0] != pair[1]}, method
        for key, tensor in theirs.items():
            size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
            blocks = [t.data.reshape(-1).view(np.uint8).reshape(-1, size) for t in (tensor, ours[key])]
            assert (blocks[0] == blocks[1]).all(1).mean() >= 0.99, (method, key)


def run(file, ids, **settings):
    """llama.cpp's logits of one row."""
    loaded = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, n_threads=1, verbose=False, **settings)
    loaded.eval(list(ids))
    logits = torch.from_numpy(loaded.scores[: len(ids)].copy())
    loaded.close()
    return logits


def error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits(name, tmp_path):
    """Relative to the logits' size, beside what the same rounding of the weights does to transformers' own logits."""
    made = tiny.with_lora(model(name))
    files = save_pretrained_gguf(made, tmp_path, byte_level(), ["f32", "f16", "q8_0"])
    ids = tiny.ids(1, 40)
    with torch.no_grad():
        want = made(input_ids=ids).logits[0]
    found = [error(run(file, ids[0].tolist()), want) for file in files]
    print(name, *(f"{value:.1e}" for value in found))
    assert found[0] < CACHE_ERROR and found[1] < 2 * CACHE_ERROR and found[2] < 0.05


@pytest.mark.parametrize(
    "settings",
    [{}, dict(use_rslora=True), dict(rank_pattern={"q_proj": 2}, target_modules=["q_proj", "embed_tokens"])],
    ids=["plain", "rslora", "patterns-embedding"],
)
def test_adapters(settings, tmp_path):
    base = model("llama")
    (plain,) = save_pretrained_gguf(base, tmp_path, byte_level(), "f32", model_name="base")
    made = shake(
        get_peft_model(base, LoraConfig(r=4, lora_alpha=12, **{"target_modules": tiny.LINEAR} | settings))
    ).eval()
    (adapter,) = save_pretrained_gguf(made, tmp_path, save_method="lora")
    ids = tiny.ids(1, 30)
    with torch.no_grad():
        want = made(input_ids=ids).logits[0]
    assert error(run(plain, ids[0].tolist()), want) > 0.05
    assert error(run(plain, ids[0].tolist(), lora_path=str(adapter)), want) < CACHE_ERROR


TEXTS = [
    *CORPUS[:5],
    "Hello  there,\n\n   it's 2026!\t'LL go. 12345 x₂",
    "naïve café — 我想在apple工作 😀",
    "",
    "    indented\n",
]
PATTERN = tf.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
TOKENIZERS = {
    "gpt-2": byte_level,
    "digits": lambda: byte_level([0]),
    "qwen2": lambda: byte_level([PATTERN]),
    "llama-3": lambda: byte_level([PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")], ignore_merges=True),
    "sentencepiece": sentencepiece,
    "sentencepiece-no-prefix": lambda: sentencepiece(prefix=False, adds_bos=False),
}


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_tokens(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]()
    (file,) = save_pretrained_gguf(model("llama"), tmp_path, tokenizer, "q8_0")
    loaded = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert loaded.tokenize(text.encode(), add_bos=True) == tokenizer(text)["input_ids"], text
    chat = [{"role": "user", "content": "what is 7 and 15?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    want = tokenizer(text, add_special_tokens=False)["input_ids"]
    if kind.startswith("sentencepiece"):
        # transformers puts the space of a text's start behind special tokens too, in some releases; llama.cpp at the start alone
        return
    assert loaded.tokenize(text.encode(), add_bos=False, special=True) == want


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples/smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.smollm2()


STORY = (
    "The lighthouse stood at the end of a narrow strip of land, and its lamp had been dark for eleven years. Every evening the old "
    "keeper climbed the stairs anyway, cleaned the glass, and looked out over the water. In the harbour people said that he was "
    "waiting for a ship. He told the children that he was waiting for the weather, because weather always comes back."
)


# method -> what rounding the weights may change in the mean negative log-likelihood of STORY: two to five times the largest change
# that was measured with three adapters (0.0002, 0.0083, 0.019, 0.024)
WEIGHTS_ERROR = {"f16": 0.001, "q8_0": 0.025, "q6_k": 0.04, "q4_k_m": 0.1}
# and what llama.cpp adds, which rounds activations to 8 bits beside quantized weights (measured: 0.002 to 0.024)
ACTIVATIONS_ERROR = 0.05


def test_a_real_model(smollm2, tmp_path):
    """Perplexity of a text and a greedy answer of a 135M model with a small random adapter."""
    tokenizer = tf.AutoTokenizer.from_pretrained(smollm2)
    base = tf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    torch.manual_seed(0)
    made = shake(get_peft_model(base, LoraConfig(r=8, lora_alpha=8, target_modules=tiny.LINEAR)), "lora_B", std=0.002)
    files = save_pretrained_gguf(made.eval(), tmp_path, tokenizer, list(WEIGHTS_ERROR))
    ids = tokenizer(STORY)["input_ids"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def nll(logits):
        return float(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:])))

    @torch.no_grad()
    def stock(model):
        return nll(model(input_ids=torch.tensor([ids])).logits[0])

    want = stock(made)
    answer = made.generate(input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    answer = tokenizer.decode(answer, skip_special_tokens=True)
    for method, file in zip(WEIGHTS_ERROR, files, strict=True):
        weights = stock(tf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32))
        loaded = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
        loaded.eval(ids)
        got = nll(torch.from_numpy(loaded.scores[: len(ids)].copy()))
        loaded.reset()
        said = loaded.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"]
        loaded.close()
        print(
            f"{method}: perplexity {np.exp(got):.3f}, {np.exp(weights):.3f} in transformers, merged {np.exp(want):.3f}: {said!r}"
        )
        assert abs(weights - want) < WEIGHTS_ERROR[method], method
        assert abs(got - weights) < (0.001 if method == "f16" else ACTIVATIONS_ERROR), method
        # a model of this size answers otherwise after the smallest change of its weights
        assert said == answer or method != "f16", (said, answer)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rA", "-p", "no:cacheprovider", *sys.argv[1:]]))
