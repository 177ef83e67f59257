"""Checkpoint folders that are whole or are not there: written aside, listed in a manifest, renamed at the end, verified before use.

A folder that is being written is `.checkpoint-500.writing`, one whose replacement is being published `.checkpoint-500.replaced`, and a
damaged one that a run went past `.checkpoint-500.damaged`: transformers takes none of them for a checkpoint, and rotates none away.

A trainer that writes straight into `checkpoint-500` can have it marked instead: the folder holds a file `.writing` until it is sealed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from fastlm import files

logger = logging.getLogger(__name__)

MANIFEST = "fastlm_manifest.json"
# written last by transformers' Trainer: a folder of its own without it was never finished
TRAINER_STATE = "trainer_state.json"
# lies in a folder that is being written under its final name
MARK = ".writing"
_FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ASIDE = re.compile(r"\.(checkpoint-\d+)\.(writing|replaced)")


def manifest(folder: str) -> dict[str, Any]:
    """What a folder holds: `{"format": 1, "files": {relative name with slashes: {"size": bytes, "sha256": hex digits}}}`.

    The manifest itself and the mark are left out. Reads every file once.
    """
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    described = {name: dict(size=path.stat().st_size, sha256=_sha256(path)) for name, path in named.items()}
    for own in (MANIFEST, MARK):
        described.pop(own, None)
    return {"format": _FORMAT, "files": described}


def stage_of(final: str) -> str:
    """The folder beside `final` in which it is written, as `<stage>/<name of final>`."""
    return _aside(final, "writing")


def begin(final: str) -> None:
    """Make the stage of `final`, empty. What a save that was cut left there is removed, and that is logged."""
    stage = stage_of(final)
    if os.path.isdir(stage):
        logger.warning("removing %s, which a save that did not end left behind: it is written again", stage)
        shutil.rmtree(stage)
    os.makedirs(stage)


def publish(part: str, final: str) -> int:
    """Make a written folder durable, list its files in a manifest and give it its name, in one rename.

    Killed at any moment, it leaves `final` as it was, whole and new, or (while an older `final` is replaced) the older one under a name
    from which `newest_whole` restores it.

    Args:
        part: the folder that was written, on the file system of `final`.
        final: the name it gets.

    Returns:
        Bytes of its files.

    Raises:
        OSError: if the disk refuses; `final` is then as it was.
    """
    n_bytes = _make_durable(part)
    older = _aside(final, "replaced")
    if os.path.isdir(final):
        if os.path.isdir(older):
            shutil.rmtree(older)
        os.rename(final, older)
    os.replace(part, final)
    _fsync(os.path.dirname(os.path.abspath(final)))
    if os.path.isdir(older):
        logger.warning("%s was there before and is replaced", final)
        shutil.rmtree(older)
    return n_bytes


def _make_durable(folder: str) -> int:
    """Write the manifest of a folder and have the disk keep every file. Returns their bytes."""
    listed = manifest(folder)
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(listed, file, indent=1)
    for directory, _, names in os.walk(folder, topdown=False):
        for name in names:
            _fsync(os.path.join(directory, name))
        _fsync(directory)
    return sum(file["size"] for file in listed["files"].values())


def mark(folder: str) -> None:
    """Say that a folder is being written, before its first file is. Made if it is not there."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, MARK).touch()
    _fsync(folder)


def seal(folder: str) -> int:
    """List the files of a folder that is written now, make them durable, and take the mark off. Returns their bytes."""
    n_bytes = _make_durable(folder)
    unmark(folder)
    return n_bytes


def unmark(folder: str) -> None:
    """Take the mark off, and remove the folder if nothing was written into it."""
    Path(folder, MARK).unlink(missing_ok=True)
    if os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
        return
    _fsync(folder)


def set_marked_aside(output_dir: str) -> None:
    """Rename the checkpoints of saves that did not end, so that none is taken for the newest. Those never marked are left alone.

    A folder whose save ended, and whose mark a kill left, loses the mark instead.
    """
    for path in sorted(Path(output_dir).glob("checkpoint-*")):
        if not (_CHECKPOINT.fullmatch(path.name) and (path / MARK).exists()):
            continue
        try:
            verify(str(path))
        except ValueError as error:
            aside = _set_aside(str(path))
            logger.warning("%s was not saved to its end and is renamed to %s: %s", path, os.path.basename(aside), error)
            continue
        unmark(str(path))


def discard(final: str) -> int:
    """Remove the stage of a save that failed. Returns the bytes that it held."""
    stage = Path(stage_of(final))
    n_bytes = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file())
    shutil.rmtree(stage, ignore_errors=True)
    return n_bytes


def verify(folder: str) -> None:
    """Check that a checkpoint folder is what was saved.

    With a manifest: every file in it is there and has its size and SHA-256; further files are not looked at. Without one (saved by
    others): the trainer's state, the safetensors headers and the ends of torch's zip files can be read.

    Raises:
        ValueError: naming the first file that is missing, cut or changed, and what to do.
    """
    try:
        if not os.path.isdir(folder):
            raise ValueError(f"{folder} is not a folder: there is no checkpoint to resume from")
        if os.path.exists(os.path.join(folder, MANIFEST)):
            _verify_listed(folder)
        else:
            _verify_headers(folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}. Resume from another checkpoint") from error


def newest_whole(output_dir: str) -> str | None:
    """The checkpoint of the highest step that passes `verify`, or None if the folder holds none at all.

    Damaged ones above it are logged and renamed to `.checkpoint-<step>.damaged`, so that neither a rotation of checkpoints nor another
    program takes them for the newest. A checkpoint whose replacement was never published gets its name back.

    Raises:
        ValueError: naming all, with what is wrong with each, if there are some and none is whole. None is renamed then.
    """
    if not os.path.isdir(output_dir):
        return None
    _restore(output_dir)
    steps = [int(match[1]) for name in os.listdir(output_dir) if (match := _CHECKPOINT.fullmatch(name))]
    found = [os.path.join(output_dir, f"checkpoint-{step}") for step in sorted(steps, reverse=True)]
    damaged: dict[str, str] = {}
    for folder in filter(os.path.isdir, found):
        try:
            verify(folder)
        except ValueError as error:
            damaged[folder] = str(error)
            continue
        for bad, reason in damaged.items():
            aside = _set_aside(bad)
            logger.warning("%s is passed over and renamed to %s: %s", bad, os.path.basename(aside), reason)
        if damaged:
            logger.warning("resuming from %s", folder)
        return folder
    if damaged:
        raise ValueError(f"no checkpoint in {output_dir} is whole:\n" + "\n".join(damaged.values()))
    return None


def _verify_listed(folder: str) -> None:
    path = os.path.join(folder, MANIFEST)
    listed = files.read_json(path)
    if listed.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {listed.get('format')!r}, this release reads {_FORMAT}: update fastlm")
    described = listed.get("files")
    if not isinstance(described, dict):
        raise ValueError(f"{path} is damaged: it lists no files. Resume from another checkpoint")
    for name, entry in described.items():
        if os.path.isabs(name) or ".." in name.split("/") or not isinstance(entry, dict):
            raise ValueError(f"{path} is damaged: its entry {name!r} describes no file of the folder")
        file = Path(folder, name)
        if not file.is_file():
            raise ValueError(f"{file} is missing, {MANIFEST} lists it. Resume from another checkpoint")
        size = file.stat().st_size
        if size != entry.get("size"):
            raise ValueError(
                f"{file} is damaged: {size} bytes, {entry.get('size')} were saved. Resume from another checkpoint"
            )
        if _sha256(file) != entry.get("sha256"):
            raise ValueError(
                f"{file} is damaged: its bytes are not those that were saved. Resume from another checkpoint, or delete "
                f"{MANIFEST} if you changed the file yourself"
            )


def _verify_headers(folder: str) -> None:
    state = os.path.join(folder, TRAINER_STATE)
    if not os.path.isfile(state):
        raise ValueError(f"{state} is missing: the save did not end. Resume from another checkpoint")
    files.read_json(state)
    for index in sorted(Path(folder).glob("*.safetensors.index.json")):
        files.check_weights(folder, index.name.removesuffix(".safetensors.index.json"), allow_pickle=True)
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix == ".safetensors":
            files.safetensors_header(str(path))
        elif path.suffix in (".pt", ".pth", ".bin") and path.is_file():
            _check_torch_file(path)


def _check_torch_file(path: Path) -> None:
    """Refuse an empty file and a zip without its end. torch.save writes zips; the older format has no end to look for."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start or (start == b"PK\x03\x04" and not zipfile.is_zipfile(path)):
        raise ValueError(f"{path} is damaged: it is cut at {path.stat().st_size} bytes. Resume from another checkpoint")


def _restore(output_dir: str) -> None:
    """Give a checkpoint back the name that a kill took from it between two renames, and tell of other leftovers."""
    for name in sorted(os.listdir(output_dir)):
        match = _ASIDE.fullmatch(name)
        if match is None:
            continue
        path, final = os.path.join(output_dir, name), os.path.join(output_dir, match[1])
        if match[2] == "replaced" and not os.path.exists(final):
            logger.warning("%s gets its name %s back: the save that was to replace it did not end", path, match[1])
            os.rename(path, final)
        elif not os.listdir(path):
            # its content was published
            os.rmdir(path)
        else:
            logger.warning("%s is left of a save that did not end; it is no checkpoint and can be deleted", path)


def _set_aside(folder: str) -> str:
    """Rename a damaged checkpoint; returns the new name. An earlier one of the same step stays too."""
    aside = _aside(folder, "damaged")
    n = 1
    while os.path.exists(aside):
        n += 1
        aside = _aside(folder, f"damaged-{n}")
    os.rename(folder, aside)
    return aside


def _aside(final: str, what: str) -> str:
    parent, name = os.path.split(final)
    return os.path.join(parent, f".{name}.{what}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
