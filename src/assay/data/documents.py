"""The documents inside a shard: where they begin and end, and a 128-bit digest of each from its ids alone.

Reads through files in bounded pieces, never through maps, so that a file cut meanwhile is a fault and
not a crash. Two digests compare only under one tokenizer; which documents belong together is not said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.shard import DOCUMENTS, TOKENS, Shard, little
from assay.errors import DataError

PIECE = 1 << 18  # ids held at a time, where no document is longer; their 64-bit hashes fit into the cache

# A longer document is taken in pieces of this length, each a document of its own: memory stays bounded even for a
# pack that holds no end-of-text id at all.
LONGEST = 1 << 20

Digests = NDArray[np.uint64]

# The digest of a document without any id: nothing that could be repeated.
_NOTHING = hashlib.sha256(b"").digest()[:16]
NOTHING = (int.from_bytes(_NOTHING[:8], "big"), int.from_bytes(_NOTHING[8:], "big"))


@dataclass(frozen=True)
class Bounds:
    """Documents `first`, `first` + 1, … of a shard: tokens [starts, stops), the end-of-text id included."""

    first: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


def bounds(shard: Shard, start: int = 0, stop: int | None = None, *, touched: bool = False) -> Bounds:
    """The documents that lie whole in the tokens [start, stop); with `touched` those with any token in it.

    Takes 8 bytes of memory for each document of the shard. Where the shard does not know its documents
    (an adopted pack), they end at each end-of-text id. Documents above LONGEST ids are cut. DataError when
    the files are not what they were.
    """
    stop = shard.tokens if stop is None else stop
    if not 0 <= start <= stop <= shard.tokens:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens; [{start:,}, {stop:,}) is not a range of them")
    ends = _ends(shard)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    if touched:
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(begins, stop, side="left"))
    else:
        first = int(np.searchsorted(begins, start, side="left"))
        last = int(np.searchsorted(ends, stop, side="right"))
    last = max(first, last)
    return Bounds(first, begins[first:last], ends[first:last])


def document_digests(shard: Shard, start: int = 0, stop: int | None = None, *, touched: bool = False) -> Digests:
    """Digests of the whole documents in [start, stop), uint64 [n, 2]; with `touched` of those with a token in it.

    The first 16 bytes of the SHA-256 over the document's ids as little-endian uint32, end-of-text
    excluded, as two big-endian numbers: equal ids give equal digests whatever dtype stores them. Row i
    belongs to document `bounds(…).first` + i. DataError when the files are not what they were.
    """
    found = bounds(shard, start, stop, touched=touched)
    return np.concatenate([np.empty((0, 2), np.uint64), *(part for _, part in digest_pieces(shard, found))])


def digest_pieces(shard: Shard, found: Bounds, size: int = PIECE) -> Iterator[tuple[int, Digests]]:
    """The same piece by piece: (number of the first document of the piece, digests [k, 2]), in order."""
    for low, high, ids in pieces(shard, found, size):
        yield found.first + low, digests_of(ids, found.starts[low:high], found.stops[low:high], shard.end_of_text)


def digests_of(ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], end_of_text: int) -> Digests:
    """Digests [k, 2] of documents that follow one another in `ids`; their places count from the shard's begin."""
    data = memoryview(ids.astype("<u4").tobytes())
    lengths = stops - starts[0]
    texts = (lengths - (ids[lengths - 1] == end_of_text)) * 4
    begins = (starts - starts[0]) * 4
    digests = b"".join(
        hashlib.sha256(data[begin:end]).digest()[:16]
        for begin, end in zip(begins.tolist(), texts.tolist(), strict=True)
    )
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def pieces(shard: Shard, found: Bounds, size: int = PIECE) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(low, high, ids of the documents [low, high) of `found`), about `size` ids or one longer document at a time."""
    low = 0
    while low < len(found):
        high = int(np.searchsorted(found.stops, int(found.starts[low]) + size, side="right"))
        high = min(max(high, low + 1), len(found))
        yield low, high, read_ids(shard, int(found.starts[low]), int(found.stops[high - 1]))
        low = high


def read_ids(shard: Shard, start: int, stop: int) -> NDArray[Any]:
    """The ids [start, stop) of a shard, read from the file; DataError when it does not hold them."""
    return _read(shard, TOKENS, little(shard.dtype), start, stop - start)


def _ends(shard: Shard) -> NDArray[np.int64]:
    """The end of each document, ascending, the last at the shard's end."""
    if shard.documents is not None:
        ends = _read(shard, DOCUMENTS, np.dtype("<u8"), 0, shard.documents).astype(np.int64)
    else:
        found = [
            np.flatnonzero(read_ids(shard, low, min(low + PIECE, shard.tokens)) == shard.end_of_text) + low + 1
            for low in range(0, shard.tokens, PIECE)
        ]
        ends = np.concatenate([np.empty(0, np.int64), *found])
        if not len(ends) or ends[-1] != shard.tokens:
            ends = np.append(ends, shard.tokens)
    if ends[-1] != shard.tokens or not bool(np.all(np.diff(ends, prepend=0) > 0)):
        raise DataError(f"{shard.path / DOCUMENTS} does not rise to the shard's end; run assay data verify on it")
    lengths = np.diff(ends, prepend=0)
    cuts = [
        np.arange(ends[at] - lengths[at] + LONGEST, ends[at], LONGEST)
        for at in np.flatnonzero(lengths > LONGEST).tolist()
    ]
    return np.union1d(ends, np.concatenate(cuts)) if cuts else ends


def _read(shard: Shard, name: str, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
    path = shard.path / name
    try:
        with path.open("rb") as file:
            file.seek(start * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore the shard's files") from None
    if len(data) != count * dtype.itemsize:
        raise DataError(f"{path} ends before item {start + count:,}; it was cut: restore the shard's files")
    return np.frombuffer(data, dtype=dtype)
