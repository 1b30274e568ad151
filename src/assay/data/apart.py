"""Validation kept apart from training: documents of a slot that are validation documents, exact or near.

Exact by the document's digest, near by the runs of eight token ids that two documents share. It sees
ids under one tokenizer, never text: another case or spelling is the corpus's decontamination to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.documents import NOTHING, bounds, digests_of, pieces
from assay.data.lookup import Lookup
from assay.data.shard import Shard

RUN = 8  # ids in a run
# Two documents are near when they share this share of the runs of the one with fewer. Every edited id takes up
# to eight runs away, so 0.8 bears an edit each 36 ids or one of a fifth of the text. Of 565 pages of GNOME's
# help the closest pair of different pages (one device beside another in the same words) shares 0.799.
SHARE = 0.8
LEAST = 32  # runs; a document with fewer (39 ids or less) is compared exactly alone: set phrases would do for near
COMMON = 16  # a run in more validation documents than these is a set phrase and does not count on either side
RULE = f"assay-apart/1: equal digests, or {SHARE} of the {RUN}-id runs of the shorter, at least {LEAST}"

_FEWEST = -(-LEAST * round(SHARE * 10) // 10)  # shared runs below which no two documents are near
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing


@dataclass(frozen=True)
class Find:
    """Document `document` of the shard holds (or is held by) document `held_out` of the validation shard."""

    document: int
    held_out: int
    shared: int | None  # runs that both have; None: the two are equal
    runs: int | None  # runs of the one that has fewer

    def words(self) -> str:
        """The evidence for people."""
        if self.shared is None or self.runs is None:
            return f"document {self.document:,} equals validation document {self.held_out:,}"
        return (
            f"document {self.document:,} shares {self.shared:,} of {self.runs:,} runs of {RUN} ids "
            f"({self.shared / self.runs:.3f}) with validation document {self.held_out:,}"
        )


class HeldOut:
    """The validation documents, ready to be looked for; takes about 100 bytes of memory for each of their ids."""

    def __init__(self, shard: Shard) -> None:
        """Read the validation shard once; DataError when its files are not what they were."""
        self.shard = shard
        found = bounds(shard)
        digests, places, hashes = [], [], []
        for low, high, ids in pieces(shard, found):
            starts, stops = found.starts[low:high], found.stops[low:high]
            digests.append(digests_of(ids, starts, stops, shard.end_of_text))
            runs = _runs(ids)
            begins = starts[0] + np.arange(len(runs))
            owners = np.searchsorted(stops, begins, side="right")
            whole = begins + RUN <= _texts(ids, starts, stops, shard.end_of_text)[owners]
            hashes.append(runs[whole])
            places.append(owners[whole] + low)
        self._digests = Lookup(np.concatenate(digests))
        self._index(np.concatenate(hashes), np.concatenate(places), len(found))

    def _index(self, hashes: NDArray[np.uint64], places: NDArray[np.int64], documents: int) -> None:
        """Distinct runs, for each the validation documents that hold it, and for each document its countable runs."""
        order = np.lexsort((places, hashes))
        hashes, places = hashes[order], places[order]
        again = np.zeros(len(hashes), dtype=bool)
        again[1:] = (hashes[1:] == hashes[:-1]) & (places[1:] == places[:-1])
        hashes, places = hashes[~again], places[~again]
        self._hashes, begins, counts = np.unique(hashes, return_index=True, return_counts=True)
        self._begins = np.append(begins, len(hashes)).astype(np.int64)
        self._owners = places
        self._common = counts > COMMON
        countable = ~np.repeat(self._common, counts)
        self._countable = np.bincount(places[countable], minlength=documents)
        # Two tables say of nearly every other run that it is not there: by its first bits, then by its last ones.
        bits = min(max(int(16 * len(self._hashes)).bit_length(), 16), 28)
        self._shift, self._mask = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
        self._first, self._last = np.zeros(1 << bits, dtype=bool), np.zeros(1 << bits, dtype=bool)
        self._first[self._hashes >> self._shift] = True
        self._last[self._hashes & self._mask] = True

    def look(
        self, ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], first: int, digests: Any
    ) -> Iterator[Find]:
        """Finds among the documents `first`, … that follow one another in `ids`, in order; see `documents.pieces`."""
        equal: set[int] = set()
        texts = _texts(ids, starts, stops, self.shard.end_of_text)
        for row, held_out in self._digests.find(digests):
            if tuple(digests[row].tolist()) != NOTHING:
                equal.add(row)
                yield Find(first + row, held_out, None, None)
        yield from (find for find in self._near(ids, starts, texts, first) if find.document - first not in equal)

    def _near(
        self, ids: NDArray[Any], starts: NDArray[np.int64], texts: NDArray[np.int64], first: int
    ) -> Iterator[Find]:
        runs = _runs(ids)
        # A run across two documents holds an end-of-text id, which no run of a validation document holds.
        maybe = np.flatnonzero(self._first.take((runs >> self._shift).view(np.int64)))
        maybe = maybe[self._last[runs[maybe] & self._mask]]
        if not len(maybe) or not len(self._hashes):
            return
        hits = np.minimum(np.searchsorted(self._hashes, runs[maybe]), len(self._hashes) - 1)
        there = self._hashes[hits] == runs[maybe]
        rows = np.searchsorted(starts, starts[0] + maybe[there], side="right") - 1
        pairs = np.unique(rows * len(self._hashes) + hits[there])  # each run once a document
        rows, hits = np.divmod(pairs, len(self._hashes))
        common = np.bincount(rows[self._common[hits]], minlength=len(starts))
        counted = ~self._common[hits] & (np.bincount(rows, minlength=len(starts)) - common >= _FEWEST)[rows]
        rows, hits = rows[counted], hits[counted]
        # Each (document, run) becomes one line for each validation document that holds the run.
        lines = self._begins[hits + 1] - self._begins[hits]
        within = np.arange(lines.sum()) - np.repeat(np.cumsum(lines) - lines, lines)
        holders = self._owners[np.repeat(self._begins[hits], lines) + within]
        keys, shared = np.unique(np.repeat(rows, lines) * len(self._countable) + holders, return_counts=True)
        best: dict[int, Find] = {}
        for key, both in zip(keys[shared >= _FEWEST].tolist(), shared[shared >= _FEWEST].tolist(), strict=True):
            row, held_out = divmod(key, len(self._countable))
            own = runs[starts[row] - starts[0] : max(texts[row] - RUN + 1 - starts[0], 0)]
            fewer = min(int(self._countable[held_out]), len(np.unique(own)) - int(common[row]))
            if fewer >= LEAST and _enough(both, fewer):
                other = best.get(row)
                if other is None or both * (other.runs or 1) > (other.shared or 0) * fewer:
                    best[row] = Find(first + row, held_out, both, fewer)
        yield from best.values()


def _enough(shared: int, fewer: int) -> bool:
    """Whether `shared` is at least SHARE of `fewer`, without rounding: 28 of 35 is."""
    return shared * 10 >= fewer * round(SHARE * 10)


def _texts(ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Where each document's text ends: at its end-of-text id, where it has one."""
    result: NDArray[np.int64] = stops - (ids[stops - starts[0] - 1] == end)
    return result


def _runs(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """A 64-bit hash of the run of RUN ids from each place on, [len(ids) − RUN + 1]; built by doubling."""
    if len(ids) < RUN:
        return np.empty(0, np.uint64)
    hashes = _TABLE.take(ids) if ids.dtype.itemsize == 2 else _mixed(ids)
    factor, length = _FACTOR, 1
    while length < RUN:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor, length = factor * factor % (1 << 64), 2 * length
    return hashes


def _mixed(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Ids as 64-bit numbers whose bits look like coins (the finalizer of SplitMix64)."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


_TABLE = _mixed(np.arange(1 << 16))  # all ids of 16 bits: to look one up is faster than to compute it
