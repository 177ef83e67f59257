"""Files that training does not change come byte for byte from where the model was loaded: tokenizer, chat template, generation settings.

A library that reads such a file and writes it again seldom writes the same bytes, and a tokenizer that was called keeps the padding and
truncation of its last call. What is the same as its source, read again, is therefore copied from it; what was changed on
purpose (a chat template, new tokens) is written as it is now.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastlm import tokenization

logger = logging.getLogger(__name__)

# beside those that a class names itself
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json",
)  # fmt: skip
# parts of tokenizer.json that a call sets
_OF_CALLS = ("padding", "truncation")
_GENERATION = "generation_config.json"


def _folder_of(name: Any, file: str) -> Path | None:
    """The local folder of a model's files: a directory, or the cache of a hub repository; None if it is not here."""
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        return None
    if os.path.isdir(name):
        return Path(name)
    try:
        found = try_to_load_from_cache(os.fspath(name), file)
    except HFValidationError:
        # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def save_tokenizer(tokenizer: Any, folder: Path, n_embeddings: int) -> None:
    """Save a tokenizer or processor; the files of a tokenizer that is as it was loaded are copies of its source's.

    Args:
        tokenizer: saved by its own `save_pretrained`; None for none.
        folder: an empty folder, or one without its files.
        n_embeddings: rows of the model's embedding, which decided on a padding token when fastlm loaded it.
    """
    if tokenizer is None:
        return
    before = _listed(folder)
    tokenizer.save_pretrained(os.fspath(folder))
    written = sorted(_listed(folder) - before)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    source = _folder_of(tokenizer.name_or_path, "tokenizer_config.json")
    if source is None:
        return
    same = _unchanged(tokenizer, source, folder, written, n_embeddings)
    if same == set(written):
        for name in written:
            (folder / name).unlink()
        names = {*TOKENIZER_FILES, *type(tokenizer).vocab_files_names.values(), *written}
        _copy(source, folder, names)
        return
    _copy(source, folder, same)
    logger.info("the tokenizer differs from %s in %s, which are written anew", source, sorted(set(written) - same))


def _listed(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _copy(source: Path, folder: Path, names: set[str]) -> None:
    for name in sorted(names):
        if (source / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def _unchanged(tokenizer: Any, source: Path, folder: Path, written: list[str], n_embeddings: int) -> set[str]:
    """Those of the written files that the source's tokenizer, loaded again and saved, has too: as stock or as fastlm loads it."""
    try:
        fresh = type(tokenizer).from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("the tokenizer's source %s cannot be read again: %s", source, error)
        return set()
    found: set[str] = set()
    for as_loaded_here in (False, True):
        if as_loaded_here:
            tokenization.choose_padding(fresh, n_embeddings)
        with tempfile.TemporaryDirectory() as scratch:
            fresh.save_pretrained(scratch)
            same = {name for name in written if _is_same(folder / name, Path(scratch, name))}
        found = max(found, same, key=len)
    return found


def _is_same(one: Path, other: Path) -> bool:
    if not other.is_file():
        return False
    if one.read_bytes() == other.read_bytes():
        return True
    if one.name != "tokenizer.json":
        return False
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in (one, other)]
    for content in contents:
        for part in _OF_CALLS:
            content.pop(part, None)
    return bool(contents[0] == contents[1])


def save_generation_config(base: PreTrainedModel, folder: Path) -> None:
    """Save how the model generates: the source's file if the settings are those, else as transformers writes it."""
    if not base.can_generate():
        return
    live = copy.deepcopy(base.generation_config)
    source = _folder_of(base.config.name_or_path, _GENERATION)
    if source is not None and (source / _GENERATION).is_file():
        fresh = GenerationConfig.from_pretrained(source, local_files_only=True)
        if _settings(fresh) == _settings(live):
            shutil.copyfile(source / _GENERATION, folder / _GENERATION)
            return
        logger.info("the generation settings differ from those of %s and are written anew", source)
    live.save_pretrained(folder)


def _settings(config: GenerationConfig) -> dict[str, Any]:
    settings: dict[str, Any] = config.to_dict()
    settings.pop("transformers_version", None)
    return settings
