"""The documents that were consumed or queued before, ready to be asked for copies and for like ones.

Read from the shards that are on this machine, by token ids, under one tokenizer; the others are named. How much of
each document was consumed or queued is known to the token. It says nothing of a new corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus.alike import Alike, signed
from assay.corpus.duplicates import Parameters
from assay.data.documents import NOTHING, bounds, digests_of, pieces
from assay.data.exposure import Exposure, Intervals, union
from assay.data.queue import Queue
from assay.data.shard import DOCUMENTS, TOKENS, Shard
from assay.errors import DataError
from assay.files.digest import digest_file
from assay.run.consumption import Consumption

NONE = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
_MANY = 8  # copies of one document, from which on their union is kept

Tell = Callable[[str, int, int], None]  # what, tokens done, tokens in all


@dataclass(frozen=True)
class Before:
    """What was consumed and what is queued: the distinct tokens of each shard (digest), in its coordinates."""

    consumed: Mapping[str, Intervals]
    queued: Mapping[str, Intervals]

    @staticmethod
    def of(runs: Sequence[Consumption], queue: Queue | None) -> Before:
        """Of these runs (ancestors are among them) and this queue."""
        parts: dict[str, list[Intervals]] = {}
        for slot in queue.slots if queue is not None else ():
            for part in slot.parts:
                parts.setdefault(part.shard, []).append(interval(part.start, part.stop))
        consumed = Exposure(run.consumed for run in runs).by_shard()
        return Before(consumed, {name: union(spans) for name, spans in parts.items()})

    @property
    def shards(self) -> list[str]:
        """Digests of all shards, in the order of first use."""
        return list(dict.fromkeys((*self.consumed, *self.queued)))


@dataclass
class Earlier:
    """The documents that were consumed or queued, wholly or in part: digests, places, and how much of each.

    Memory for each document: 56 bytes, and for each with other ids than those before it the 704 bytes of `Alike`.
    """

    before: Before
    names: list[str]  # shard digests that `shard` counts
    shard: NDArray[np.int32]
    number: NDArray[np.int32]  # of the document in its shard
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    high: NDArray[np.uint64]  # the digests' first halves, ascending
    low: NDArray[np.uint64]
    order: NDArray[np.int64]  # rows in the order of the digests
    alike: Alike | None = None
    distinct: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # rows that `alike` holds
    apart: list[dict[str, Any]] = field(default_factory=list)  # shards that could not be compared, and why
    _unions: dict[tuple[int, int], tuple[Intervals, Intervals]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory that the index takes."""
        arrays = (self.shard, self.number, self.start, self.stop, self.high, self.low, self.order, self.distinct)
        return sum(array.nbytes for array in arrays) + (self.alike.bytes if self.alike is not None else 0)

    def equal(self, digests: NDArray[np.uint64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(row of `digests`, the earlier documents with that digest, ascending) for each that there is."""
        first = np.searchsorted(self.high, digests[:, 0], "left")
        last = np.searchsorted(self.high, digests[:, 0], "right")
        for row in np.flatnonzero(last > first).tolist():
            span = slice(int(first[row]), int(last[row]))
            rows = self.order[span][self.low[span] == digests[row, 1]]
            if len(rows) and (int(digests[row, 0]), int(digests[row, 1])) != NOTHING:
                yield row, rows

    def positions(self, rows: NDArray[np.int64], low: int, high: int) -> tuple[int, int]:
        """(consumed, queued): how many of the tokens [low, high) of a document some of its copies `rows` had."""
        key = int(rows[0]), len(rows)
        unions = self._unions.get(key)
        if unions is None:
            unions = self._copies(self.before.consumed, rows), self._copies(self.before.queued, rows)
            if len(rows) > _MANY:
                self._unions[key] = unions
        return unions[0].cut(low, high).size, unions[1].cut(low, high).size

    def _copies(self, of: Mapping[str, Intervals], rows: NDArray[np.int64]) -> Intervals:
        """The tokens, counted from the document's begin, that at least one of its copies had."""
        spans = []
        for row in rows.tolist():
            start, stop = int(self.start[row]), int(self.stop[row])
            spans.append(of.get(self.names[self.shard[row]], NONE).cut(start, stop, -start))
        return union(spans)


def earlier(
    before: Before, shards: Mapping[str, Shard], tokenizer: str, near: Parameters | None, tell: Tell
) -> Earlier:
    """Read the earlier documents from the shards that are here, twice; `near` None: for exact comparison alone.

    Raises DataError when a shard's bytes are not those that its manifest names.
    """
    used, apart = _comparable(before, shards, tokenizer)
    total, done = sum(shards[name].tokens for name in used), 0
    kept, digests = [np.empty((4, 0), np.int64)], [np.empty((0, 2), np.uint64)]
    for place, name in enumerate(used):
        expect_bytes(shards[name])
        for first, starts, stops, ids, keep in _touched(shards[name], before, name):
            numbers = first + np.flatnonzero(keep)
            kept.append(np.stack([np.full(len(numbers), place), numbers, starts[keep], stops[keep]]))
            digests.append(digests_of(ids, starts, stops, shards[name].end_of_text)[keep])
        tell("digests of earlier documents", done := done + shards[name].tokens, total)
    table, halves = np.concatenate(kept, axis=1), np.concatenate(digests)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal ones stay in their order
    high, low = halves[order, 0], halves[order, 1]
    begins = np.ones(len(order), bool)
    begins[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    result = Earlier(before, used, table[0].astype(np.int32), table[1].astype(np.int32), table[2], table[3],
                     high, low, order, apart=apart)  # fmt: skip
    if near is not None:
        wanted = np.zeros(len(order), bool)
        wanted[order[begins]] = True
        result.distinct, result.alike = _sign(result, wanted, shards, near, tell)
    return result


def _comparable(before: Before, shards: Mapping[str, Shard], tokenizer: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(the shards whose documents can be compared, what is not compared and why)."""
    used, apart = [], []
    for name in before.shards:
        if name not in shards:
            why = "its bytes are not on this machine"
        elif shards[name].tokenizer != tokenizer:
            why = f"it was made with another tokenizer ({shards[name].tokenizer})"
        else:
            used.append(name)
            continue
        consumed, queued = before.consumed.get(name, NONE).size, before.queued.get(name, NONE).size
        apart.append({"shard": name, "positions_consumed": consumed, "positions_queued": queued, "why": why})
    return used, apart


def _touched(
    shard: Shard, before: Before, name: str
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[Any], NDArray[np.bool_]]]:
    """Pieces of a shard: (first document, starts, stops, ids, which of the documents were consumed or queued)."""
    found = bounds(shard)
    keep = np.zeros(len(found), bool)
    for spans in (before.consumed.get(name, NONE), before.queued.get(name, NONE)):
        keep |= spans.covered(found.starts, found.stops) > 0
    for low, high, ids in pieces(shard, found):
        if keep[low:high].any():
            yield low, found.starts[low:high], found.stops[low:high], ids, keep[low:high]


def _sign(
    found: Earlier, wanted: NDArray[np.bool_], shards: Mapping[str, Shard], near: Parameters, tell: Tell
) -> tuple[NDArray[np.int64], Alike]:
    """The rows of the wanted documents that have a signature, and the table of these."""
    rows, all_signatures = (
        np.empty(int(wanted.sum()), np.int64),
        np.empty((int(wanted.sum()), near.permutations), np.uint32),
    )
    filled = reached = done = 0
    for name in found.names:
        for _, starts, _, ids, keep in _touched(shards[name], found.before, name):
            mine = reached + np.flatnonzero(wanted[reached : reached + int(keep.sum())])
            base = int(starts[0])
            begin, end = found.start[mine] - base, found.stop[mine] - base
            which, made = signed(ids, begin, end, shards[name].end_of_text, near)
            rows[filled : filled + len(which)] = mine[which]
            all_signatures[filled : filled + len(which)] = made
            filled += len(which)
            reached += int(keep.sum())
        tell(
            "signatures of earlier documents",
            done := done + shards[name].tokens,
            sum(shards[n].tokens for n in found.names),
        )
    return rows[:filled], Alike.of(all_signatures[:filled], near)


def expect_bytes(shard: Shard) -> None:
    """DataError unless the shard's token ids and document ends have the digests that its manifest names."""
    for name in (TOKENS, DOCUMENTS):
        if name in shard.digests and digest_file(shard.path / name) != shard.digests[name]:
            raise DataError(
                f"{shard.path / name} has other bytes than its manifest names; restore it, or run assay data verify"
            )


def interval(start: int, stop: int) -> Intervals:
    """The integers [start, stop)."""
    return Intervals(np.array([start], np.int64), np.array([stop], np.int64))
