"""Folders that are written whole: beside their target, and exchanged with it in one step of the file system.

Killed at any moment, the target is what it was or the new one, never a mixture. Files of the target that a save does not write stay in it:
they are linked into the new folder before the exchange.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

# of linux/fcntl.h and linux/fs.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# what a file system that cannot exchange two folders answers
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EPERM)


@contextlib.contextmanager
def staging(target: Path, replaces: re.Pattern[str] | None = None) -> Iterator[Path]:
    """A hidden folder whose files become those of `target` when the body succeeds; afterwards it is gone either way.

    Args:
        target: an absolute path; made if missing. Files in it of other names than those written stay.
        replaces: names of files at the target's top that do not stay, because they would be read with the new ones.

    Raises:
        ValueError: if `target` is a file, or a folder lies where a file must be written.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_directory must be a folder, got the file {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    older = target.with_name(f".{target.name}.replaced")
    if older.exists() and not target.exists():
        logger.warning("%s gets its name back: the save that was to replace it did not end", target)
        older.rename(target)
    # a mount point, or a folder that the user owns in one that he does not, cannot be exchanged
    is_exchanged = not os.path.ismount(target) and os.access(target.parent, os.W_OK)
    folder = (target.parent if is_exchanged else target) / f".{target.name}.saving"
    if folder.exists():
        logger.warning("removing %s, which a save that did not end left behind", folder)
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
        _publish(folder, target, older, replaces, is_exchanged)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path, older: Path, replaces: re.Pattern[str] | None, is_exchanged: bool) -> None:
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    blocked = [file for file in files if (target / file).is_dir()]
    if blocked:
        raise ValueError(f"{target / blocked[0]} is a folder, but a file of that name must be saved; move it away")
    for file in files:
        _sync(folder / file)
    if not target.exists():
        folder.rename(target)
    elif is_exchanged:
        _take_over(target, folder, replaces)
        _sync(folder)
        if not _exchange(folder, target):
            if older.exists():
                shutil.rmtree(older)
            target.rename(older)
            folder.rename(target)
            shutil.rmtree(older)
    else:
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / file, target / file)
        for path in target.iterdir():
            if replaces and replaces.fullmatch(path.name) and Path(path.name) not in files:
                path.unlink()
        _sync(target)
    _sync(target.parent)


def _take_over(target: Path, folder: Path, replaces: re.Pattern[str] | None) -> None:
    """Give the new folder the mode of the old one and, linked, the files that it has beyond the new ones."""

    def gone(directory: str, names: list[str]) -> list[str]:
        here = Path(directory).relative_to(target)
        return [
            name
            for name in names
            if (folder / here / name).is_file()
            or (here == Path() and replaces and replaces.fullmatch(name) and not (target / name).is_dir())
        ]

    shutil.copytree(target, folder, symlinks=True, ignore=gone, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        # a file system without hard links
        shutil.copy2(source, destination, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step, by Linux's renameat2; False where that cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.renameat2
    except AttributeError:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
