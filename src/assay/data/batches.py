"""Batches: the windows of an update, their ids, and the digests that prove two trainers equal.

A batch is a pure function of (queue, data seed, global batch, update); any update is read
directly. Ids are checked against the vocabulary when read. Nothing is shuffled, padded or kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data import fields
from assay.data.order import windows_available
from assay.data.queue import Queue, Slot, check_capacity, locate, missing, order_start
from assay.data.shard import Shard, little
from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, raw
from assay.files.reading import read_object


class Batches:
    """Reads the updates of one queue under one data seed and global batch.

    Opening checks manifests, sizes and that every slot holds the windows it needs; it does not hash.
    """

    def __init__(
        self, queue: Queue, roots: Iterable[Path], seed: int, global_batch: int, first_update: int = 0
    ) -> None:
        """Find the queue's shards (`locate`); DataError names those of them that are not here.

        Shards of slots that end before `first_update` may be gone: a run that is past them needs them no more.
        """
        places = list(roots) or [queue.path.parent]
        shards = locate(queue, places)
        needed = {part.shard for slot in queue.slots if slot.end_update > first_update for part in slot.parts}
        absent = [name for name in missing(queue, shards) if name in needed]
        if absent:
            once = {place.resolve(): place for place in reversed([queue.path.parent, *places])}
            searched = ", ".join(str(place) for place in reversed(once.values()))
            raise DataError(
                f"{queue.path}: {len(absent)} shard(s) are not on this machine, the first is {absent[0]}; "
                f"searched by hint and under {searched}: bring them there or name another root"
            )
        _check(seed, global_batch)
        for slot in queue.slots:
            check_capacity(queue, slot, global_batch, seed)
        self.queue = queue
        self.seed = seed
        self.global_batch = global_batch
        self.shards: Mapping[str, Shard] = shards
        self._joints = {slot.number: np.cumsum([0, *(p.tokens for p in slot.parts)]) for slot in queue.slots}

    @property
    def updates(self) -> int:
        """Updates that the queue holds: the first that cannot be read."""
        return self.queue.updates_total

    def windows(self, update: int) -> tuple[Slot, NDArray[np.int64]]:
        """The slot of an update and where its windows begin in the slot's stream, [global batch], in item order."""
        return windows_of(self.queue, self.seed, self.global_batch, update)

    def batch(self, update: int, rows: slice = slice(None)) -> NDArray[Any]:
        """The ids of an update, [global batch, block + 1], in the shard's dtype, little endian.

        `rows` are those items of it that a rank computes; the others are not read.
        Inputs are `[:, :-1]`, targets `[:, 1:]`; micro-batch i is rows [i × micro, (i + 1) × micro).
        Raises DataError for an update behind the queue's end or an id outside the vocabulary.
        """
        slot, starts = self.windows(update)
        starts = starts[rows]
        length = self.queue.block + 1
        batch = np.empty((len(starts), length), dtype=little(self.queue.dtype))
        joints = self._joints[slot.number]
        places = np.searchsorted(joints, starts, side="right") - 1
        for row, start, place in zip(batch, starts.tolist(), places.tolist(), strict=True):
            filled = 0
            while filled < length:  # once, or once more for each joint that the window crosses
                part = slot.parts[place]
                if part.shard not in self.shards:
                    raise DataError(f"update {update:,} reads shard {part.shard}, which is not on this machine")
                begin = part.start + start + filled - int(joints[place])
                taken = min(length - filled, part.stop - begin)
                row[filled : filled + taken] = self.shards[part.shard].ids[begin : begin + taken]
                filled += taken
                place += 1
        highest = int(batch.max())
        if highest >= self.queue.vocabulary:
            raise DataError(
                f"update {update:,} of {self.queue.path} holds the id {highest:,}, outside the vocabulary of "
                f"{self.queue.vocabulary:,}; the shard is damaged: run assay data verify on it"
            )
        return batch

    def digest(self, update: int) -> str:
        """The batch digest of an update; see `windows_digest`."""
        return windows_digest(self.batch(update))

    def order_start(self) -> bytes:
        """The order digest before update 0, 32 bytes."""
        return order_start(self.queue, self.seed)


def windows_of(queue: Queue, seed: int, global_batch: int, update: int) -> tuple[Slot, NDArray[np.int64]]:
    """The slot of an update and its window starts in the slot's stream; needs no bytes of data."""
    _check(seed, global_batch)
    slot, k = queue.slot_of(update)
    stream = slot.stream(seed, queue.block)
    return slot, stream.starts(k * global_batch, (k + 1) * global_batch)


def validation_windows(shard: Shard, block: int, start: int, stop: int) -> NDArray[Any]:
    """Windows [start, stop) of a validation shard at offset 0, [count, block + 1]; DataError when it ends before."""
    available = windows_available(shard.tokens, block, 0)
    if stop > available:
        raise DataError(f"{shard.path} holds {available:,} windows of block {block:,}, but {stop:,} are asked for")
    begins = np.arange(start, stop, dtype=np.int64)[:, None] * block
    windows: NDArray[Any] = shard.ids[begins + np.arange(block + 1, dtype=np.int64)]
    if windows.size and int(windows.max()) >= shard.vocabulary:
        raise DataError(f"{shard.path} holds the id {int(windows.max()):,}, outside its vocabulary; verify the shard")
    return windows


def row_digests(batch: NDArray[Any]) -> bytes:
    """The SHA-256 of each window (row) of a [rows, block + 1] array in the shard's dtype, 32 bytes each, joined.

    Ranks that hold different rows join their results in item order and give them to `joined_digest`.
    """
    rows = np.ascontiguousarray(batch, dtype=batch.dtype.newbyteorder("<"))
    return b"".join(hashlib.sha256(row.data).digest() for row in rows)


def joined_digest(rows: bytes) -> str:
    """The batch digest from the 32-byte digests of all windows in item order."""
    return PREFIX + hashlib.sha256(rows).hexdigest()


def windows_digest(batch: NDArray[Any]) -> str:
    """The batch digest: SHA-256 of the SHA-256 of each window, little endian, in the shard's dtype.

    Give it the very buffer that goes to the device, before any change of its type.
    """
    return joined_digest(row_digests(batch))


def order_next(previous: bytes, batch_digest: str) -> bytes:
    """The order digest after a batch: SHA-256 of the one before (32 bytes) and the batch digest (32 bytes)."""
    return hashlib.sha256(previous + raw(batch_digest)).digest()


def boundary_updates(queue: Queue) -> list[int]:
    """The first and the last update and both sides of every slot boundary, ascending."""
    edges = {edge for slot in queue.slots for edge in (slot.first_update, slot.end_update - 1)}
    return sorted(edges)


def read_expected(path: Path) -> dict[int, str]:
    """Update → batch digest from a file that `data batches --json` printed; InputError when it is not one."""
    record = read_object(path, "the output of assay data batches --json")
    result: dict[int, str] = {}
    for number, entry in enumerate(fields.objects(record, "batches", str(path))):
        where = f"{path}, batches[{number}]"
        result[fields.integer(entry, "update", where)] = fields.sha256(entry, "sha256", where)
    return result


def compare(digests: Mapping[int, str], expected: Mapping[int, str]) -> list[dict[str, Any]]:
    """The updates in which `expected` differs: `{update, sha256, expected}`; a digest is None where one is absent."""
    return [
        {"update": update, "sha256": digests.get(update), "expected": expected.get(update)}
        for update in sorted(digests.keys() | expected.keys())
        if digests.get(update) != expected.get(update)
    ]


def parse_updates(text: str) -> Sequence[int]:
    """`3,17` as update numbers."""
    try:
        updates = [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"updates are {text!r}; numbers with commas are expected, for example 3,17") from None
    if min(updates) < 0:
        raise InputError(f"updates are {text!r}; they are counted from zero")
    return updates


def _check(seed: int, global_batch: int) -> None:
    if seed < 0:
        raise InputError(f"the data seed is {seed}; an integer of 0 or more is expected")
    if global_batch < 1:
        raise InputError(f"the global batch is {global_batch}; 1 or more sequences are expected")
