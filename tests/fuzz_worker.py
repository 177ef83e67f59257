"""Damaged and hostile configs, loaded one after another: `python fuzz_worker.py FOLDER COUNT SEED`.

Each load must end within seconds, by an error or a model, in a live process that ran nothing of what the configs say. Prints one line of
JSON: how many loads ended how. Exits with 1, and says after which config, if one took too long.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import checkpoint
import peft
import torch
import transformers

import fastlm
from fastlm import FastLanguageModel

SECONDS = 10
FILES = ("config.json", "tokenizer_config.json", "adapter_config.json", "generation_config.json")
# what an error may be: what users see says which file or field is wrong
ERRORS = (ValueError, TypeError, OSError, NotImplementedError, ImportError)


def base(folder: Path) -> dict[str, Path]:
    """A model, and an adapter on it."""
    model = checkpoint.save(folder / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = folder / "adapter"
    peft.get_peft_model(loaded, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])).save_pretrained(adapter)
    return {"model": model, "adapter": adapter}


def values(chance: random.Random, canary: str) -> object:
    """A value that has no business in a config, or may have."""
    code = f"llama\n__import__('os').system('touch {canary}')"
    deep: object = 1
    for _ in range(chance.choice([3, 50])):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return chance.choice(
        [
            None, True, False, 0, 1, -1, 2, 7, 63, 2**31, 2**63, 10**9, 10**30, 0.5, -1e300, float("nan"), float("inf"), "", "x",
            "float32", "llama", "bert", "auto", "gelu", "../../secret", "/etc/passwd", "a" * 10_000, "\x00", "é\u202e", code, [], {},
            [code], {code: code}, {"": ""}, [None] * 5, list(range(1000)), deep, "{{ 7 * 7 }}", f"$(touch {canary})", f"`touch {canary}`",
        ]
    )  # fmt: skip


def places(tree: object) -> list[tuple[object, object]]:
    """Every (container, key) of a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in list(items):
        found.append((tree, key))
        found += places(value)
    return found


def mutated(content: dict, chance: random.Random, canary: str) -> str:
    tree = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        # most of a tokenizer.json is its vocabulary: choose a level first
        container, key = chance.choice(places(tree) if chance.random() < 0.5 else [(tree, key) for key in tree])
        what = chance.random()
        if what < 0.7:
            container[key] = values(chance, canary)
        elif what < 0.85:
            del container[key]
        else:
            tree[
                chance.choice(
                    ["auto_map", "quantization_config", "model_type", "tie_word_embeddings", "x", "torch_dtype"]
                )
            ] = values(chance, canary)
        if not tree:
            break
    text = json.dumps(tree)
    if chance.random() < 0.05:
        text = text[: chance.randrange(len(text) + 1)]
    return text


def run(folder: Path, count: int, seed: int) -> None:
    chance, canary = random.Random(seed), str(folder / "canary")
    wholes = base(folder)
    contents = {
        name: json.loads((wholes["adapter" if name.startswith("adapter") else "model"] / name).read_text())
        for name in FILES
    }
    ended: collections.Counter[str] = collections.Counter()
    longest = 0.0
    for number in range(count):
        name = chance.choices(FILES, (6, 3, 4, 1))[0]
        kind = "adapter" if name.startswith("adapter") else "model"
        place = folder / "case"
        shutil.copytree(wholes[kind], place)
        text = mutated(contents[name], chance, canary)
        (place / name).write_text(text)
        signal.alarm(SECONDS)
        start = time.perf_counter()
        try:
            FastLanguageModel.from_pretrained(str(place), load_in_16bit=True, dtype="float32")
            how = "loaded"
        except ERRORS as error:
            how = type(error).__name__
        except Exception as error:
            how = f"other: {type(error).__name__} {name} {str(error)[:120]} {text[:300] if len(text) < 3000 else ''}"
        signal.alarm(0)
        longest = max(longest, time.perf_counter() - start)
        ended[how] += 1
        if Path(canary).exists():
            print(f"code of a config ran: number {number}, {name}: {text}")
            sys.exit(1)
        shutil.rmtree(place)
    print(json.dumps(dict(ended=ended, longest_s=round(longest, 2))))


def too_long(*_) -> None:
    raise SystemExit(f"a load took more than {SECONDS} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, too_long)
    # an honest model of this size needs a hundredth of this
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, resource.RLIM_INFINITY))
    with contextlib.redirect_stderr(open(os.devnull, "w")) if "-v" not in sys.argv else contextlib.nullcontext():
        assert fastlm.__all__
        run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
