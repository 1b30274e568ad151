"""The one chain primitive: JSON Lines in which each record names the digest of the line before.

Ledger and queue are both such files. Lines are written as RFC 8785 JSON, flushed to the disk
before the append returns; verification hashes the raw bytes and never re-serialises. The chain
knows nothing about what its records mean.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from assay.errors import AssayError, Refused, VerificationError
from assay.files.digest import canonical_exact, digest
from assay.files.lock import take
from assay.files.publish import flush_folder, publish_file
from assay.files.reading import parse_json

LINE_LIMIT = 16 << 20


@dataclass(frozen=True)
class Link:
    """One verified line: its place (from zero), the record, the digest of its bytes, the offset after it."""

    number: int
    record: dict[str, Any]
    digest: str
    end: int


@dataclass(frozen=True)
class Head:
    """The end of a chain: how many lines it has, the digest of the last, and its size in bytes."""

    lines: int
    digest: str
    size: int


def read(
    path: Path,
    first: str | None,
    *,
    fault: type[AssayError] = VerificationError,
    after: Head | None = None,
) -> Iterator[Link]:
    """Yield the lines one after another, each verified against the one before.

    `first` is what line 0 names as `previous`; None when line 0 is a header without one.
    `after` continues behind a head that was verified before. Bytes behind the last newline are
    a torn tail and are ignored. Raises `fault` with file and line for whatever does not chain.
    """
    number, previous, offset = (after.lines, after.digest, after.size) if after else (0, first, 0)
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if offset > file.tell():
            raise fault(f"{path} has {file.tell():,} bytes but had {offset:,} before: lines at its end are missing")
        file.seek(offset)
        for line in _lines(file, path, fault):
            where = f"{path}, line {number + 1}"
            content = line[:-1]
            record = _record(content, where, fault)
            if (number > 0 or first is not None) and record.get("previous") != previous:
                seq = record.get("seq")
                receipt = f" (receipt seq {seq})" if type(seq) is int else ""  # a line's number is one more
                raise fault(
                    f"{where} does not chain{receipt}: it names {record.get('previous')!r} as the line before, "
                    f"which has {previous!r}; a line was edited, removed, inserted or moved here or just before"
                )
            offset += len(line)
            previous = digest(content)
            yield Link(number, record, previous, offset)
            number += 1


def head(path: Path, first: str | None, *, fault: type[AssayError] = VerificationError) -> Head:
    """Verify the whole chain and return its end; an empty file has `first` (or "") as digest."""
    last = Head(0, first or "", 0)
    for link in read(path, first, fault=fault):
        last = Head(link.number + 1, link.digest, link.end)
    return last


@contextlib.contextmanager
def lock(path: Path, wait: float = 60.0) -> Iterator[BinaryIO]:
    """The file, opened for appending under an exclusive lock that dies with this process.

    Raises Refused when the lock is not had within `wait` seconds.
    """
    with path.open("r+b") as file:
        if not take(file, wait):
            raise Refused(f"{path} is locked by another process for {wait:.0f} s; end it first")
        yield file  # closing the file gives the lock back


def move_torn_tail(path: Path, file: BinaryIO, end: int) -> int:
    """Move bytes behind `end` (an unterminated line) into a file beside; return how many there were.

    The bytes are copied and flushed before the chain is cut, so that they are never lost.
    Call it under the lock.
    """
    file.seek(end)
    tail = file.read()
    if not tail:
        return 0
    number = 1
    while (aside := path.with_name(f"{path.name}.torn-{number:02d}")).exists():
        number += 1
    publish_file(aside, tail)
    file.truncate(end)
    file.flush()
    os.fsync(file.fileno())
    return len(tail)


def append(file: BinaryIO, last: Head, make: Callable[[Head], dict[str, Any]]) -> Head:
    """Append one record at `last`, flushed to the disk; `make` gets the head to name it.

    Call it under the lock, after `last` was brought up to date. The record is written in one
    call, so that a kill leaves the old chain or a torn tail, never a wrong line.
    """
    content = canonical_exact(make(last))
    file.seek(last.size)
    file.write(content + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return Head(last.lines + 1, digest(content), last.size + len(content) + 1)


def create(path: Path) -> None:
    """An empty chain; FileExistsError when there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.fsync(descriptor)
    os.close(descriptor)
    flush_folder(path.parent)


def _lines(file: BinaryIO, path: Path, fault: type[AssayError]) -> Iterator[bytes]:
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise fault(f"{path} has a line above {LINE_LIMIT:,} bytes; it is not a chain that Assay wrote")
        if not line.endswith(b"\n"):
            return
        yield line


def _record(content: bytes, where: str, fault: type[AssayError]) -> dict[str, Any]:
    try:
        record = parse_json(content, where)
    except AssayError as error:
        raise fault(str(error)) from None
    if not isinstance(record, dict):
        raise fault(f"{where} holds {type(record).__name__}, not a JSON object")
    return record
