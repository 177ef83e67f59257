"""The name under which llama.cpp knows how a byte-level tokenizer splits text before it merges.

A GGUF file holds no pattern, only a name whose pattern is part of llama.cpp. It is found by the splits of the tokenizer itself, so
that a vocabulary that was extended or trained anew is recognised too; splits without an entry are looked up by what a known
tokenizer makes of a test text, as llama.cpp's own converter does. Patterns, test text and digests are those of llama-vocab.cpp
and conversion/base.py in llama.cpp (https://github.com/ggml-org/llama.cpp, MIT licence).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"


def _cased(digits: str, ending: str) -> str:
    upper_first = f"{_START}{_UPPER}*{_LOWER}+{ending}"
    upper_only = f"{_START}{_UPPER}+{_LOWER}*{ending}"
    return rf"{upper_first}|{upper_only}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"


# the pattern inside tokenizers' ByteLevel, and that of its Digits
_BYTE_LEVEL = "byte-level"
_DIGIT = r"\p{N}"
# splits in order, whether whole words skip the merges -> name; None where it makes no difference
_BY_SPLITS: Mapping[tuple[tuple[str, ...], bool | None], str] = {
    ((_BYTE_LEVEL,), None): "gpt-2",
    ((_DIGIT, _BYTE_LEVEL), None): "smollm",
    ((_words(r"\p{N}{1,3}"),), True): "llama-bpe",
    ((_words(r"\p{N}{1,3}"),), False): "dbrx",
    ((_words(r"\p{N}"),), None): "qwen2",
    ((_cased(r"\p{N}", ""),), None): "tekken",
    ((_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),), None): "gpt-4o",
}
_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d\U0001f32b"
    "\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 33333 333333 3333333"
    " 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2"
    "\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= \u043d"
    "\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''`"
    "``````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make i"
    "t, 'D you like some tea? We'Ve a'lL"
)
# SHA-256 of the ids of the test text -> name
_BY_DIGEST: Mapping[str, str] = {
    "1431a23e583c97432bc230bff598d103ddb5a1f89960c8f1d1051aaa944d0b35": "minerva-7b",  # sapienzanlp/Minerva-7B-base-v1.0
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",  # Qwen/Qwen3-Embedding-0.6B
    "1444df51289cfa8063b96f0e62b1125440111bc79a52003ea14b6eac7016fd5f": "qwen35",  # openbmb/MiniCPM-V-4_6
    "0fe1cf6eda062318a1af7270f3331a85c539a01778ff948e24388e949c5282f4": "gpt-2",  # evilfreelancer/ruGPT3XL
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",  # meta-llama/Meta-Llama-3-8B
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",  # deepseek-ai/deepseek-llm-7b-base
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",  # deepseek-ai/deepseek-coder-6.7b-base
    "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",  # tiiuae/Falcon3-7B-Base
    "35d91631860c815f952d711435f48d356ebac988362536bed955d43bfa436e34": "starcoder",  # bigcode/starcoder2-3b
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",  # openai-community/gpt2
    "6221ad2852e85ce96f791f476e0b390cf9b474c9e3d1362f53a24a06dc8220ff": "refact",  # smallcloudai/Refact-1_6-base
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",  # Qwen/Qwen1.5-7B
    "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",  # databricks/dbrx-base
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",  # abacusai/Smaug-Llama-3-70B-Instruct
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",  # mistralai/Mistral-Nemo-Base-2407
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",  # HuggingFaceTB/SmolLM-135M
    "d4c8f286ea6b520b3d495c4455483cfa2302c0cfcd4be05d781b6a8a0a7cdaf1": "megrez",  # Infinigence/Megrez-3B-Instruct
    "877081d19cf6996e2c4ff0e1236341e9b7bde288f5311a56a937f0afbbb3aeb5": "deepseek-v3",  # deepseek-ai/DeepSeek-V3
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",  # deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",  # Xenova/gpt-4o
    "7dec86086fcc38b66b7bc1575a160ae21cf705be7718b9d5598190d7c12db76f": "superbpe",  # UW/OLMo2-8B-SuperBPE-t180k
    "1994ffd01900cfb37395608534236ecd63f2bd5995d6cb1004dda1af50240f15": "trillion",  # trillionlabs/Trillion-7B-preview
    "0e9433cbbb161f89e264eb32e8e64bfe69e834973ffca5d41d3948a604a3e2a3": "pixtral",  # mistral-community/pixtral-12b
    "d5f1dd6f980fec569fb218a81a7658ac45fc56b38c5a0adeb1c232fbe04ef5ec": "seed-coder",  # ByteDance-Seed/Seed-Coder-8B-Base
    "b0a6b1c0bd5998ebd9df08611efde34a4ff03faed45ae09c43e6b31ebd4b94cf": "a.x-4.0",  # skt/A.X-4.0
    "f6791d196f87ce6b56a7d234be618e0d58f8cda3549416635b2bebcd22cd95c4": "midm-2.0",  # K-intelligence/Midm-2.0-Base-Instruct
    "a1e163ecab2e718a4c829d1148b6e86824ec36163bb71941c3dca9cd5ac25756": "mellum",  # JetBrains/Mellum-4b-base
    "4a2e2abae11ca2b86d570fc5b44be4d5eb5e72cc8f22dd136a94b37da83ab665": "kormo",  # KORMo-Team/KORMo-tokenizer
    "d30d75d9059f1aa2c19359de71047b3ae408c70875e8a3ccf8c5fba56c9d8af4": "qwen35",  # Qwen/Qwen3.5-9B-Instruct
}


def _splits(spec: Any) -> list[str] | None:
    """Patterns of a pre-tokenizer of tokenizer.json in order, or None if one of its steps is of another kind."""
    if spec is None:
        return []
    kind = spec["type"]
    if kind == "Sequence":
        parts = [_splits(part) for part in spec["pretokenizers"]]
        return None if None in parts else [pattern for part in parts if part is not None for pattern in part]
    if kind == "ByteLevel":
        return [_BYTE_LEVEL] if spec["use_regex"] else []
    if kind == "Digits":
        return [_DIGIT] if spec["individual_digits"] else None
    is_plain = (spec.get("behavior"), spec.get("invert")) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and is_plain and "Regex" in spec["pattern"]:
        return [spec["pattern"]["Regex"]]
    return None


def pre_tokenizer_name(spec: Mapping[str, Any], encode: Any) -> str:
    """The value of tokenizer.ggml.pre.

    Args:
        spec: what tokenizer.json holds.
        encode: the ids of a text, with special tokens, as a list.

    Raises:
        ValueError: if llama.cpp has no name for it.
    """
    splits = _splits(spec["pre_tokenizer"])
    if splits is not None:
        for skips in (None, bool(spec["model"].get("ignore_merges"))):
            name = _BY_SPLITS.get((tuple(splits), skips))
            if name is not None:
                return name
    name = _BY_DIGEST.get(sha256(str(encode(_TEXT)).encode()).hexdigest())
    if name is None:
        raise ValueError(
            f"the tokenizer splits text in a way that GGUF has no name for: {splits or spec['pre_tokenizer']}. Save with "
            f"save_pretrained_merged, and convert that folder with a llama.cpp that knows this tokenizer"
        )
    return name
