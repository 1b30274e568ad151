"""Fresh data: a slot's ranges and documents held against what was consumed or queued before.

Ranges compare by shard digest alone; documents by their digests, which needs the shards' bytes. What
could not be compared is named. Whether a queue wants fresh data is its header's to say (`strict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.documents import NOTHING, Bounds, Digests, bounds, digest_pieces
from assay.data.exposure import Consumed, Exposure, Intervals, union
from assay.data.lookup import Lookup
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard
from assay.errors import Refused


@dataclass(frozen=True)
class Taken:
    """What was consumed or queued before: ranges by shard digest, ids under one tokenizer.

    `shards` are those of them whose bytes are on this machine.
    """

    name: str  # for people: "slot 3" or "run …, updates 0:40"
    facts: Mapping[str, Any]  # for receipts
    tokenizer: str
    ranges: Mapping[str, Intervals]
    shards: Mapping[str, Shard]

    def tokens(self) -> int:
        """Tokens of the shards that a comparison of documents reads."""
        return sum(self.shards[name].tokens for name in self.ranges if name in self.shards)


@dataclass(frozen=True)
class Mine:
    """The documents of a slot: digests [n, 2], and for each the shard (a number in `names`) and its number there."""

    names: list[str]
    digests: Digests
    shards: NDArray[np.int64]
    numbers: NDArray[np.int64]

    def place(self, row: int) -> tuple[str, int]:
        """Shard digest and document number of a row."""
        return self.names[int(self.shards[row])], int(self.numbers[row])


@dataclass
class Gather:
    """Takes up a slot's documents piece by piece."""

    names: list[str] = field(default_factory=list)
    digests: list[Digests] = field(default_factory=list)
    shards: list[NDArray[np.int64]] = field(default_factory=list)
    numbers: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, shard: str, first: int, digests: Digests, chosen: NDArray[np.bool_]) -> None:
        """The `chosen` ones of the documents `first`, … of a shard.

        Documents without any id are left out, for they repeat nothing.
        """
        if shard not in self.names:
            self.names.append(shard)
        kept = chosen & (digests != np.array(NOTHING, dtype=np.uint64)).any(axis=1)
        self.digests.append(digests[kept])
        self.numbers.append(np.flatnonzero(kept) + first)
        self.shards.append(np.full(int(kept.sum()), self.names.index(shard), dtype=np.int64))

    def done(self) -> Mine:
        """All of them."""
        empty = np.empty(0, np.int64)
        return Mine(
            self.names,
            np.concatenate([np.empty((0, 2), np.uint64), *self.digests]),
            np.concatenate([empty, *self.shards]),
            np.concatenate([empty, *self.numbers]),
        )


def ranges_of(slot: Slot) -> dict[str, Intervals]:
    """The tokens that a slot's parts name, by shard digest."""
    ends: dict[str, list[Intervals]] = {}
    for part in slot.parts:
        ends.setdefault(part.shard, []).append(_one(part.start, part.stop))
    return {name: union(items) for name, items in ends.items()}


def queued_before(queue: Queue, slot: Slot, shards: Mapping[str, Shard]) -> list[Taken]:
    """The earlier slots of the queue, each as something taken."""
    return [
        Taken(f"slot {one.number}", {"slot": one.number, "line": one.digest}, queue.tokenizer, ranges_of(one), shards)
        for one in queue.slots[: slot.number]
    ]


def consumed_before(name: str, facts: Mapping[str, Any], consumed: Consumed, shards: Mapping[str, Shard]) -> Taken:
    """The targets of a run's updates as something taken."""
    return Taken(name, facts, consumed.queue.tokenizer, Exposure([consumed]).by_shard(), shards)


def uncomparable(tokenizer: str, taken: Iterable[Taken]) -> list[str]:
    """What documents cannot be compared with, a line each: shards that are not here, ids of another tokenizer."""
    result = []
    for one in taken:
        if one.tokenizer != tokenizer:
            result.append(f"{one.name}: its ids are of tokenizer {one.tokenizer}")
            continue
        result += [f"{one.name}: shard {name} is not on this machine" for name in one.ranges if name not in one.shards]
    return result


def refuse_ranges(slot: Slot, taken: Sequence[Taken], where: str) -> None:
    """Refused when a range of the slot lies twice in it or was taken before; needs no bytes."""
    seen: list[tuple[str, Mapping[str, Intervals]]] = [(one.name, one.ranges) for one in taken]
    mine = ranges_of(slot)
    if sum(ranges.size for ranges in mine.values()) != slot.tokens:
        raise Refused(f"{where} holds a range twice; its queue is strict and takes fresh data only")
    for shard, ranges in mine.items():
        for name, others in seen:
            found = _first_common(ranges, others[shard]) if shard in others else None
            if found is not None:
                raise Refused(
                    f"{where} repeats tokens [{found[0]:,}, {found[1]:,}) of {shard}, which {name} took before; "
                    "its queue is strict and takes fresh data only: propose other ranges"
                )


def refuse_documents(mine: Mine, tokenizer: str, taken: Sequence[Taken], where: str) -> None:
    """Refused when a document of the slot lies twice in it, or was taken before under another address.

    The same document at the same address is the ranges' affair: the parts of a slot may cut one in two.
    Reads what was taken and is here, piece by piece; see `uncomparable` for the rest.
    """
    table = Lookup(mine.digests)
    for first, second in table.repeats():
        (shard, number), (other_shard, other) = mine.place(second), mine.place(first)
        raise Refused(
            f"{where} holds the same document twice: document {number:,} of {shard} equals document {other:,} of "
            f"{other_shard}; its queue is strict and takes fresh data only: build the corpus with exact duplicates out"
        )
    for one in taken:
        if one.tokenizer != tokenizer:
            continue
        for name in one.ranges:
            if name in one.shards:
                _refuse_of(mine, table, one, one.shards[name], where)


def _refuse_of(mine: Mine, table: Lookup, taken: Taken, shard: Shard, where: str) -> None:
    """The documents of one shard that were taken, against the slot's."""
    ranges = taken.ranges[shard.sha256]
    found = bounds(shard, int(ranges.starts[0]), int(ranges.stops[-1]), touched=True)
    inside = touched(found, ranges)
    for first, digests in digest_pieces(shard, found):
        for row, own in table.find(digests):
            number = first + row
            if inside[number - found.first] and mine.place(own) != (shard.sha256, number):
                own_shard, own_number = mine.place(own)
                raise Refused(
                    f"{where} repeats a document: document {own_number:,} of {own_shard} equals document {number:,} of "
                    f"{shard.sha256}, which {taken.name} took before; its queue is strict and takes fresh data only: "
                    "leave that document out"
                )


def touched(found: Bounds, ranges: Intervals) -> NDArray[np.bool_]:
    """Which of the documents have a token in the ranges."""
    at = np.searchsorted(ranges.stops, found.starts, side="right")
    inside = at < len(ranges.starts)
    result: NDArray[np.bool_] = inside & (ranges.starts[np.minimum(at, len(ranges.starts) - 1)] < found.stops)
    return result


def _first_common(one: Intervals, other: Intervals) -> tuple[int, int] | None:
    """The first stretch that two sets of intervals share."""
    at = np.searchsorted(other.stops, one.starts, side="right")
    inside = np.minimum(at, len(other.starts) - 1)
    both = np.flatnonzero((at < len(other.starts)) & (other.starts[inside] < one.stops))
    if not len(both):
        return None
    first, second = int(both[0]), int(inside[both[0]])
    return max(int(one.starts[first]), int(other.starts[second])), min(int(one.stops[first]), int(other.stops[second]))


def _one(start: int, stop: int) -> Intervals:
    return Intervals(np.array([start], dtype=np.int64), np.array([stop], dtype=np.int64))
