"""Files to a mirror in content-addressed pieces, each compared after it was sent; and back, each compared on arrival.

A piece that is there already is not sent again, but compared all the same. Nothing is believed because it was sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from assay.errors import DataError
from assay.files.digest import PREFIX, digest
from assay.files.retry import Policy, Transient
from assay.files.stores import look, put
from assay.mirror.place import STORED, Place, md5
from assay.mirror.records import FileCopy, piece_name

Tell = Callable[[str, int, int | None, str], None]  # stage, done, in all when known, of what


@dataclass
class Pace:
    """Not more than `limit` bytes a second in the mean, both directions together; None: as fast as it goes."""

    limit: float | None
    policy: Policy
    free: float = 0.0

    def moved(self, count: int) -> None:
        """Wait until so many more bytes are within the limit."""
        if self.limit is None:
            return
        now = self.policy.clock()
        self.free = max(self.free, now) + count / self.limit
        self.policy.sleep(self.free - now)


@dataclass
class Sender:
    """Sends files; counts the bytes that were `sent`, `there` already, and read back."""

    place: Place
    verify: str
    piece: int
    pace: Pace
    sent: int = 0
    there: int = 0
    read_back: int = 0
    proved: set[str] = field(default_factory=set)

    def file(self, source: BinaryIO, size: int, moved: Callable[[int], None] = lambda _: None) -> FileCopy:
        """Send the next `size` bytes of an open file; DataError when it ends before."""
        whole = hashlib.sha256()
        pieces = []
        left = size
        while left:
            data = source.read(min(self.piece, left))
            if not data:
                raise DataError(f"a file ended {left:,} bytes before its end while it was copied")
            whole.update(data)
            pieces.append(digest(data))
            self._piece(pieces[-1], data)
            left -= len(data)
            moved(len(data))
        return FileCopy(size, PREFIX + whole.hexdigest(), tuple(pieces))

    def _piece(self, sha256: str, data: bytes) -> None:
        if sha256 in self.proved:
            return
        name = piece_name(sha256)
        key = self.place.key(name)
        damaged = False
        moved = 0

        def attempt() -> None:
            nonlocal damaged, moved
            found = look(self.place.store, key)
            if damaged or found is None or found.bytes != len(data):
                put(self.place.store, key, data)
                self.sent += len(data)
                moved += len(data)
            else:
                self.there += len(data)
            if self.verify == STORED:
                seen = look(self.place.store, key)
                if seen is None or (seen.bytes, seen.etag) != (len(data), md5(data)):
                    damaged = True
                    raise Transient("the store states another size or MD5 than was sent")
                return
            state = hashlib.sha256()
            self.place.piece(name, len(data), state.update)
            self.read_back += len(data)
            moved += len(data)
            if PREFIX + state.hexdigest() != sha256:
                damaged = True
                raise Transient("other bytes came back than were sent")

        self.place.tried(f"{self.place.url}/{name}", attempt)
        self.proved.add(sha256)
        self.pace.moved(moved)


def receive(
    place: Place, copy: FileCopy, piece: int, path: Path, name: str, moved: Callable[[int, bool], None]
) -> None:
    """Bring one file to `path`, going on with what lies there; `name` is how messages call it.

    `moved(bytes, fetched)` is told of every piece. DataError (exit 4) when the mirror holds other bytes than
    its record says, or the pieces do not make the file. Interrupted (cause network) at the deadline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = hashlib.sha256()
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        for index, wanted in enumerate(copy.pieces):
            size = min(piece, copy.bytes - index * piece)
            file.seek(index * piece)
            data = file.read(size)
            kept = len(data) == size and digest(data) == wanted
            if not kept:
                data = _fetched(place, wanted, size, name)
                file.seek(index * piece)
                file.write(data)
            whole.update(data)
            moved(size, not kept)
        file.truncate(copy.bytes)
    if PREFIX + whole.hexdigest() != copy.sha256:
        raise DataError(f"{name}: the pieces that its record names do not make the file with the digest {copy.sha256}")


def _fetched(place: Place, wanted: str, size: int, name: str) -> bytes:
    """A piece's bytes; the same wrong bytes twice are the mirror's, once may be the network's."""
    wrong: set[str] = set()

    def attempt() -> bytes:
        taken: list[bytes] = []
        place.piece(piece_name(wanted), size, taken.append)
        data = b"".join(taken)
        found = digest(data)
        if found == wanted:
            return data
        if found in wrong:
            raise DataError(
                f"{name}: {place.url}/{piece_name(wanted)} holds other bytes than its name says ({found}); that copy "
                "is damaged: take another step with --step, or another mirror"
            )
        wrong.add(found)
        raise Transient("other bytes came than were asked for")

    return place.tried(f"{place.url}/{piece_name(wanted)}", attempt)


def whole_lines(source: BinaryIO) -> int:
    """Bytes up to the last newline of a file that may be growing."""
    at = source.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - (1 << 16))
        source.seek(start)
        found = source.read(at - start).rfind(b"\n")
        if found >= 0:
            at = start + found + 1
            break
        at = start
    source.seek(0)
    return at
