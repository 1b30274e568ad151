"""The one way in which files and folders become visible: whole, or not at all.

Written beside their place under a temporary name, flushed to disk, then renamed; the folder
that holds the name is flushed too. Nothing that exists is ever replaced by `publish_folder` and `publish_new`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from assay.errors import InputError

MARK = ".partial-"


def publish_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path` atomically, replacing an older file of that name."""
    with _written_beside(path, data, mode) as temporary:
        os.replace(temporary, path)
    flush_folder(path.parent)


def publish_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """As `publish_file`, but nothing is replaced: InputError when something stands at `path`.

    Of several processes that publish one name at once, exactly one succeeds.
    """
    refuse_existing(path)
    with _written_beside(path, data, mode) as temporary:
        try:
            os.link(temporary, path)  # unlike a rename, this fails when the name was taken meanwhile
        except FileExistsError:
            refuse_existing(path)
            raise
        temporary.unlink()
    flush_folder(path.parent)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A flushed temporary file beside `path`; it is removed when the block fails."""
    temporary = path.with_name(f"{path.name}{MARK}{uuid.uuid4().hex[:12]}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; it becomes `path` when the block ends without error.

    Raises InputError when `path` exists: what is there is never replaced. After an error the
    temporary folder is removed; after a kill it stays, is named `*.partial-*`, and every reader
    ignores it.
    """
    temporary = begin_folder(path)
    try:
        yield temporary
        finish_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_folder(path: Path) -> Path:
    """The temporary folder beside `path` for `finish_folder`, where several writers fill it; InputError as above."""
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}{MARK}{uuid.uuid4().hex[:12]}")
    temporary.mkdir()
    return temporary


def finish_folder(temporary: Path, path: Path) -> None:
    """Flush what was written into `temporary`, then let it become `path`, which must not exist."""
    flush_tree(temporary)
    refuse_existing(path)
    os.rename(temporary, path)
    flush_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """InputError when something stands at `path`."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists already and is never replaced; choose another name")


def leftovers(folder: Path) -> list[Path]:
    """Half-written files and folders in `folder` that an interrupted process left."""
    return sorted(p for p in folder.iterdir() if MARK in p.name) if folder.is_dir() else []


def flush_file(path: Path) -> None:
    """Flush one file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(path: Path) -> None:
    """Flush a folder with everything below it."""
    for folder, _, names in os.walk(path):
        for name in names:
            flush_file(Path(folder) / name)
        flush_folder(Path(folder))


def flush_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename survives a power cut."""
    flush_file(path)
