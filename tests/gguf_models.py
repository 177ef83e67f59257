"""Tiny models of the families that GGUF takes, tokenizers of both kinds, and how files are read."""

import json

import numpy as np
import pytest
import tiny
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

gguf = pytest.importorskip("gguf")

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "user asks a question and the assistant gives an answer",
    "please add 7 and 15. the sum isn't 2026, it's 22!",
    "línea ünïcode 我想在 apple 工作, naïve café",
    "def f(x):\n    return x + 1\n\n\nprint(f(3))",
] * 8
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = 448
# name of tiny.MODELS -> what differs there, so that llama.cpp computes the same
FAMILIES = {
    "llama": {},
    "llama-biases": {},
    "llama-tied-mha": {},
    "llama3-rope": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "phi3": dict(sliding_window=None),
    "phi3-longrope": {},
    "granite": {},
    "smollm3": dict(num_hidden_layers=5, no_rope_layers=None, use_sliding_window=False, layer_types=None, sliding_window=None),
}  # fmt: skip


def model(name, dtype=torch.float32, **over):
    return tiny.model(name, dtype, vocab_size=ROWS, **FAMILIES[name] | over)


def byte_level(splits=None, normalizer=None, ignore_merges=False, vocab_size=400):
    """A byte-level BPE tokenizer learnt from CORPUS; `splits` go before the letters of bytes."""
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.normalizer = normalizer
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits or isinstance(splits[-1], int))]
    if splits:
        made = [
            pre_tokenizers.Digits(individual_digits=True)
            if split == 0
            else pre_tokenizers.Split(Regex(split), "isolated")
            for split in splits
        ]
        steps = made + steps
    core.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return wrapped(core)


def sentencepiece(prefix=True, adds_bos=True, vocab_size=420):
    """A BPE tokenizer over ▁ with single bytes as a last resort, as a converted SentencePiece model is."""
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    core.train_from_iterator(
        [line.replace("我想在 apple 工作", "") for line in CORPUS],
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL + bytes_, show_progress=False),
    )
    # the trainer made the bytes special tokens; a converted model has them as plain pieces
    spec = json.loads(core.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(spec))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrapped(core)


def wrapped(core):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHATML
    return fast


def fields(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tensors(path):
    """Name -> (float32 values, name of the format)."""
    return {
        t.name: (
            torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32)).reshape(
                *[int(size) for size in reversed(t.shape)]
            ),
            t.tensor_type.name,
        )
        for t in gguf.GGUFReader(path).tensors
    }
