"""Exposure: how many positions of each source, language and range were trained on, distinct and repeated.

Counted over targets in shard coordinates (digest, index), across slots, epochs and runs; distinct
is the size of the union. Needs no token: the order alone says it. Recomputed updates are the
caller's to count, and positions are source positions, never a number of unique tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.order import Piece, Stream
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard
from assay.errors import DataError, InputError
from assay.files.digest import digest, is_digest
from assay.files.reading import read_bytes

UNKNOWN = "unknown"
BOUNDS = ("exact", "at least", "at most")
METHOD = (
    "source positions, counted over targets in shard coordinates (digest, index); a window that starts at s covers "
    "the targets s + 1 to s + block; distinct is the size of the union over slots, epochs and runs; "
    "not a count of unique tokens"
)

Ends = NDArray[np.int64]


@dataclass(frozen=True)
class Consumed:
    """Updates [first, last) that one run took from a queue with a data seed and a global batch."""

    queue: Queue
    seed: int
    global_batch: int
    first: int
    last: int


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [starts, stops), ascending and disjoint."""

    starts: Ends
    stops: Ends

    @property
    def size(self) -> int:
        """How many integers the intervals hold."""
        return int((self.stops - self.starts).sum())

    def covered(self, starts: Ends, stops: Ends) -> Ends:
        """How many integers of each of the intervals [starts, stops) these hold, in whatever order they come."""
        lengths = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.stops - self.starts)])
        ends = np.concatenate([np.zeros(1, np.int64), self.stops])

        def below(places: Ends) -> Ends:
            begun = np.searchsorted(self.starts, places, side="left")
            result: Ends = lengths[begun] - np.maximum(ends[begun] - places, 0)
            return result

        return below(stops) - below(starts)

    def cut(self, low: int, high: int, move: int = 0) -> Intervals:
        """The intersection with [low, high), every end moved by `move`."""
        first = int(np.searchsorted(self.stops, low, side="right"))
        last = int(np.searchsorted(self.starts, high, side="left"))
        starts = np.maximum(self.starts[first:last], low) + move
        return Intervals(starts, np.minimum(self.stops[first:last], high) + move)


@dataclass(frozen=True)
class Counts:
    """Positions, and how many of them are distinct."""

    positions: int
    distinct: int

    def facts(self) -> dict[str, int]:
        """As the contract's JSON: positions, distinct, repeated."""
        return {"positions": self.positions, "distinct": self.distinct, "repeated": self.positions - self.distinct}


@dataclass(frozen=True)
class Fragment:
    """A piece of a slot's stream, [low, high), with one shard, source and language; it begins there at `index`."""

    low: int
    high: int
    shard: str
    index: int
    source: str
    language: str


@dataclass(frozen=True)
class _Label:
    shard: str
    source: str
    language: str


class Exposure:
    """The exposure of everything in `consumed`, ready to be asked by source, language and range."""

    def __init__(self, consumed: Iterable[Consumed], shards: Mapping[str, Shard] | None = None) -> None:
        """Languages come from the manifests in `shards` (digest → shard); elsewhere they are "unknown".

        Raises DataError when a queue holds fewer updates or windows than were consumed.
        """
        self._shards = shards or {}
        self._seen: dict[_Label, list[Intervals]] = {}
        for item in consumed:
            self._add(item)

    @property
    def total(self) -> Counts:
        """All positions."""
        return self._count(self._seen)

    def by_source(self) -> dict[str, Counts]:
        """Counts of every source, by name."""
        names = sorted({label.source for label in self._seen})
        return {name: self._count(label for label in self._seen if label.source == name) for name in names}

    def by_language(self) -> dict[str, Counts]:
        """Counts of every language, by name."""
        names = sorted({label.language for label in self._seen})
        return {name: self._count(label for label in self._seen if label.language == name) for name in names}

    def by_shard(self) -> dict[str, Intervals]:
        """The targets that were trained on, by shard digest, each once."""
        ends: dict[str, list[Intervals]] = {}
        for label, items in self._seen.items():
            ends.setdefault(label.shard, []).extend(items)
        return {name: union(items) for name, items in ends.items()}

    def range(self, queue: Queue, slot: int, start: int, stop: int) -> Counts:
        """Counts of the tokens [start, stop) of a slot's stream, wherever in `consumed` they were targets."""
        if not 0 <= slot < len(queue.slots):
            raise InputError(f"{queue.path} has {len(queue.slots)} slot(s); slot {slot} is not among them")
        tokens = queue.slots[slot].tokens
        if not 0 <= start < stop <= tokens:
            raise InputError(f"{start}:{stop} is not a range of the {tokens:,} tokens of slot {slot} of {queue.path}")
        wanted: dict[str, list[Intervals]] = {}
        for piece in fragments(queue.slots[slot], {}):
            low, high = max(piece.low, start), min(piece.high, stop)
            if low < high:
                move = piece.index - piece.low
                wanted.setdefault(piece.shard, []).append(_one(low + move, high + move))
        positions = distinct = 0
        for shard, asked in wanted.items():
            seen = [item for label, items in self._seen.items() if label.shard == shard for item in items]
            whole = union(seen)
            asked_once = union(asked)
            for low, high in zip(asked_once.starts.tolist(), asked_once.stops.tolist(), strict=True):
                positions += sum(item.cut(low, high).size for item in seen)
                distinct += whole.cut(low, high).size
        return Counts(positions, distinct)

    def facts(self, queue: Queue, slot: int, ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The keys of `data exposure`, but for `recomputed`."""
        return {
            **self.total.facts(),
            "by_source": {name: counts.facts() for name, counts in self.by_source().items()},
            "by_language": {name: counts.facts() for name, counts in self.by_language().items()},
            "ranges": [
                {"start": low, "stop": high, **self.range(queue, slot, low, high).facts()} for low, high in ranges
            ],
            "method": METHOD,
        }

    def _add(self, item: Consumed) -> None:
        if not 0 <= item.first <= item.last:
            raise InputError(f"updates {item.first}:{item.last} are not a stretch; first:last, half-open, is expected")
        if item.last > item.queue.updates_total:
            raise DataError(
                f"{item.queue.path} holds {item.queue.updates_total:,} updates, but {item.last:,} are accounted for: "
                f"{item.last - item.queue.updates_total:,} are missing; name the queue that the run read"
            )
        for slot in item.queue.slots:
            first, last = max(item.first, slot.first_update), min(item.last, slot.end_update)
            if first >= last:
                continue
            stream = slot.stream(item.seed, item.queue.block)
            begin = (first - slot.first_update) * item.global_batch
            end = (last - slot.first_update) * item.global_batch
            pieces = fragments(slot, self._shards)
            for part in stream.pieces(begin, end):
                targets = covered(stream, part)
                for piece in pieces:
                    inside = targets.cut(piece.low, piece.high, piece.index - piece.low)
                    if len(inside.starts):
                        label = _Label(piece.shard, piece.source, piece.language)
                        self._seen.setdefault(label, []).append(inside)

    def _count(self, labels: Iterable[_Label]) -> Counts:
        by_shard: dict[str, list[Intervals]] = {}
        for label in labels:
            by_shard.setdefault(label.shard, []).extend(self._seen[label])
        positions = sum(item.size for items in by_shard.values() for item in items)
        return Counts(positions, sum(union(items).size for items in by_shard.values()))


def already(own: Exposure, ancestors: Exposure, both: Exposure) -> dict[str, Any]:
    """Distinct positions of a run, and how many of them its ancestors were trained on, in all and by source.

    The intersection is |own| + |ancestors| − |union|.
    """

    def facts(mine: Counts, theirs: Counts, whole: Counts) -> dict[str, int]:
        return {"distinct": mine.distinct, "in_ancestors": mine.distinct + theirs.distinct - whole.distinct}

    nothing, theirs, whole = Counts(0, 0), ancestors.by_source(), both.by_source()
    by_source = {name: facts(mine, theirs.get(name, nothing), whole[name]) for name, mine in own.by_source().items()}
    return {**facts(own.total, ancestors.total, both.total), "by_source": by_source}


def covered(stream: Stream, piece: Piece) -> Intervals:
    """The targets, as stream indices, of items [start, stop) of one epoch; neighbouring windows become one interval."""
    offset, windows = stream.size(piece.epoch)
    first = offset + 1
    if piece.start == 0 and piece.stop == windows:  # the whole epoch, in whatever order
        return _one(first, first + windows * stream.block)
    taken = np.zeros(windows + 2, dtype=np.int8)
    taken[stream.epoch(piece.epoch).permutation[piece.start : piece.stop] + 1] = 1
    edges = np.flatnonzero(np.diff(taken))  # window numbers at which a run begins or has ended, in turn
    return Intervals(first + edges[0::2] * stream.block, first + edges[1::2] * stream.block)


def fragments(slot: Slot, shards: Mapping[str, Shard]) -> list[Fragment]:
    """The slot's stream cut at its parts and, where the manifest is known, at changes of language."""
    result: list[Fragment] = []
    at = 0
    for part in slot.parts:
        spans = [(part.start, part.stop, UNKNOWN)]
        if part.shard in shards:
            spans = [
                (max(source.start, part.start), min(source.stop, part.stop), source.language or UNKNOWN)
                for source in shards[part.shard].sources
                if source.start < part.stop and part.start < source.stop
            ]
        for start, stop, language in spans:
            low = at + start - part.start
            result.append(Fragment(low, low + stop - start, part.shard, start, part.source, language))
        at += part.tokens
    return result


def union(items: Sequence[Intervals]) -> Intervals:
    """The union of several sets of intervals."""
    if len(items) == 1:
        return items[0]
    starts = np.concatenate([item.starts for item in items] or [np.empty(0, np.int64)])
    stops = np.concatenate([item.stops for item in items] or [np.empty(0, np.int64)])
    if not len(starts):
        return Intervals(starts, stops)
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    apart = np.flatnonzero(starts[1:] > reach[:-1]) + 1
    return Intervals(starts[np.concatenate([[0], apart])], reach[np.concatenate([apart - 1, [len(reach) - 1]])])


def parse_interval(text: str, what: str) -> tuple[int, int]:
    """`a:b` as two integers, 0 ≤ a < b."""
    first, colon, last = text.replace("_", "").partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise InputError(f"{what} is {text!r}; a:b is expected, for example 0:1709")
    if int(first) >= int(last):
        raise InputError(f"{what} is {text!r}, which is empty; a < b is expected")
    return int(first), int(last)


@dataclass(frozen=True)
class Declared:
    """What somebody declares about an ancestor that has no ledger, with the digest of the evidence for it."""

    name: str
    bound: str  # one of BOUNDS: how the positions bound what it was trained on
    positions: int
    evidence: str

    def facts(self) -> dict[str, Any]:
        """As a record."""
        return {"name": self.name, "bound": self.bound, "positions": self.positions, "evidence": self.evidence}


def parse_declared(text: str) -> Declared:
    """`NAME:BOUND:POSITIONS:EVIDENCE`; the evidence is a file, whose digest counts, or a digest itself."""
    name, bound, positions, evidence = [*text.split(":", 3), "", "", ""][:4]
    bound, digits = bound.replace("-", " "), positions.replace("_", "")
    if not (name and bound in BOUNDS and digits.isascii() and digits.isdigit() and evidence):
        raise InputError(
            f"--declared is {text!r}; NAME:BOUND:POSITIONS:EVIDENCE is expected, BOUND one of exact, at-least, "
            "at-most, EVIDENCE a file or its digest, for example 1.07:at-least:14520680448:card-1.07.md"
        )
    if not is_digest(evidence):
        evidence = digest(read_bytes(Path(evidence), "the evidence of --declared"))
    return Declared(name, bound, int(digits), evidence)


def bound_of(terms: Iterable[Declared], unaccounted: Iterable[str]) -> str | None:
    """How counted positions and declared terms together bound the whole; None: from neither side.

    A start that leads to no run at hand adds an unknown number, unless a term of its name stands for it.
    """
    terms = list(terms)
    open_ends = set(unaccounted) - {term.name for term in terms}
    kinds = {term.bound for term in terms} | ({"at least"} if open_ends else set())
    kinds.discard("exact")
    return None if len(kinds) > 1 else next(iter(kinds), "exact")


def _one(start: int, stop: int) -> Intervals:
    return Intervals(np.array([start], dtype=np.int64), np.array([stop], dtype=np.int64))
