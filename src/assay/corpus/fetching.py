"""One remote file on its way into the work folder: gone on with by range, compared with what is stated, published.

A file counts when its receipt lies beside it. Wrong bytes are thrown away and fetched again, and nobody else sees them.
It knows neither the hub nor object stores.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from assay.files.digest import PREFIX, canonical
from assay.files.publish import flush_file, flush_folder, publish_file
from assay.files.retry import Policy, Transient, persist

FORMAT = "assay-corpus-remote/1"
PART = ".part"
PINNED = "pinned"  # checked by nothing but the description's digest of the whole source
_READ = 1 << 20
_CHECKS = {
    "sha256": "SHA-256",
    "git": "git blob SHA-1",
    "md5": "MD5 of its ETag (where a bucket's encryption makes that another number, pin `sha256`)",
}


@dataclass(frozen=True)
class Far:
    """A file as the far side states it: `check` says what `value` is (sha256, git, md5), or that only the size is
    known (size); `etag` names an object's version."""

    name: str
    place: str
    bytes: int
    check: str
    value: str | None
    etag: str | None = None


@dataclass(frozen=True)
class Listed:
    """The wanted files of a place in the order of their names, and how many others lie there."""

    files: tuple[Far, ...]
    passed_over: int = 0
    one: bool = False  # the place is a file, not a folder


class Origin(Protocol):
    """Where files come from."""

    @property
    def address(self) -> str:
        """How messages name it."""

    @property
    def settled(self) -> bool:
        """Whether what was listed once can never change."""

    def listed(self, folder: Path, policy: Policy) -> Listed:
        """What lies there now; `folder` keeps what had to be fetched to know it."""

    def chunks(self, far: Far, offset: int, left: float) -> Iterator[bytes]:
        """A file's bytes from `offset` on; Transient for what another try may mend."""


def part_of(place: Path) -> Path:
    """Where a file grows until it is whole."""
    return place.with_name(place.name + PART)


def receipt_of(place: Path) -> Path:
    """Where a file's receipt stands: what was stated, its SHA-256, how its bytes were checked."""
    return place.with_name(place.name + ".json")


def fetched(
    origin: Origin,
    far: Far,
    place: Path,
    policy: Policy,
    pinned: bool = False,
    moved: Callable[[int], None] = lambda here: None,
) -> Path:
    """The file at `place`, brought there whole if it is not yet; its receipt says how its bytes were checked.

    A part of an earlier process is gone on with where its digest is stated; without one (an object in several parts)
    it is begun anew. `pinned`: the source's digest is pinned, so that an ETag that is no MD5 need not end the build.
    """
    if receipt_of(place).is_file() and place.is_file() and place.stat().st_size == far.bytes:
        return place
    part = part_of(place)
    if place.is_file():  # published, but killed before its receipt
        os.replace(place, part)
    if far.check == "size":
        part.unlink(missing_ok=True)
    fetch = _Fetch(origin, far, part, pinned, moved)
    sha256, checked = persist(f"{origin.address}: {far.name}", fetch.attempt, policy)
    flush_file(part)
    os.replace(part, place)
    flush_folder(place.parent)
    record = {"format": FORMAT, **asdict(far), "sha256": sha256, "checked": checked}
    publish_file(receipt_of(place), canonical(record) + b"\n")
    return place


class _Fetch:
    """One file on its way: how far it came, and which wrong copies were seen."""

    def __init__(self, origin: Origin, far: Far, part: Path, pinned: bool, moved: Callable[[int], None]) -> None:
        self._origin, self._far, self._part, self._pinned, self._moved = origin, far, part, pinned, moved
        self._furthest = self._size()
        self._wrong = set[str]()

    def _size(self) -> int:
        return self._part.stat().st_size if self._part.is_file() else 0

    def attempt(self, left: float) -> tuple[str, str]:
        """The digest of the whole file and what it was checked by; Transient otherwise."""
        wanted = self._far.bytes
        if self._size() > wanted:
            self._part.unlink()
        try:
            self._append(left)
        except Transient as fault:
            raise Transient(fault.reason, fault.after, self._further()) from None
        size = self._size()
        if size < wanted:
            raise Transient(f"the body ends after {size:,} of {wanted:,} bytes", moved=self._further())
        if size == wanted:
            return self._expect_stated()
        self._part.unlink()
        raise Transient(f"more than the stated {wanted:,} bytes came")

    def _append(self, left: float) -> None:
        """Bytes behind those that are here, never many more than are stated."""
        here = self._size()
        with self._part.open("ab") as file:
            if here == self._far.bytes:
                return
            for chunk in self._origin.chunks(self._far, here, left):
                file.write(chunk)
                here += len(chunk)
                self._moved(min(here, self._far.bytes))
                if here > self._far.bytes:
                    return

    def _further(self) -> bool:
        """Whether more of the file is here than ever before. A second copy of wrong bytes is not more."""
        size = self._size()
        before, self._furthest = self._furthest, max(self._furthest, size)
        return size > before

    def _expect_stated(self) -> tuple[str, str]:
        far = self._far
        self._furthest = far.bytes
        sha256, other = _digests(self._part, far)
        if far.check == "size" or far.value == (sha256 if far.check == "sha256" else other):
            return PREFIX + sha256, far.check
        if far.check == "md5" and self._pinned and sha256 in self._wrong:
            return PREFIX + sha256, PINNED  # the ETag is no MD5, then; `_expect_pin` judges these bytes
        self._wrong.add(sha256)
        self._part.unlink()
        raise Transient(f"the bytes that came do not have the stated {_CHECKS[far.check]}")


def _digests(path: Path, far: Far) -> tuple[str, str | None]:
    """SHA-256 of a file, and what else the far side states, in hex."""
    sha256 = hashlib.sha256()
    other = hashlib.new({"git": "sha1"}.get(far.check, "md5"), usedforsecurity=False)
    if far.check == "git":
        other.update(f"blob {far.bytes}\0".encode())
    with path.open("rb") as file:
        while block := file.read(_READ):
            sha256.update(block)
            if far.check in ("git", "md5"):
                other.update(block)
    return sha256.hexdigest(), other.hexdigest()
