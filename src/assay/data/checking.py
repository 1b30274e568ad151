"""One slot checked before anything is trained on it: bytes as approved, data fresh, validation kept apart.

Refuses with the evidence or returns the counts for a receipt. What it costs and what it stands on
(`basis`) can be told without reading a token, so that nothing is checked twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.data import apart, freshness
from assay.data.documents import bounds, digests_of, pieces
from assay.data.freshness import Gather, Taken
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard, verify_shard
from assay.errors import DataError, Refused

_SHOWN = 3  # finds that a message names


@dataclass(frozen=True)
class Against:
    """What a slot is held against: the validation shard, what was taken before, and what nobody can look into."""

    validation: Shard | None
    taken: Sequence[Taken]
    unknown: Sequence[str]  # ancestors without a ledger here

    def basis(self, queue: Queue, slot: Slot) -> dict[str, Any]:
        """Everything that the outcome of a check depends on, for its receipt; reads nothing."""
        strict = queue.freshness == "strict"
        return {
            "line": slot.digest,
            "validation": self.validation.sha256 if self.validation else None,
            "apartness": apart.RULE if self.validation else None,
            "freshness": queue.freshness,
            "against": [dict(one.facts) for one in self.taken] if strict else [],
            "not_compared": self.not_compared(queue) if strict else [],
        }

    def not_compared(self, queue: Queue) -> list[str]:
        """What documents could not be compared with, a line each."""
        return [*self.unknown, *freshness.uncomparable(queue.tokenizer, self.taken)]


def reads(queue: Queue, slot: Slot, shards: Mapping[str, Shard], against: Against) -> int:
    """About how many tokens a check goes through."""
    own = sum(shards[name].tokens for name in {part.shard for part in slot.parts} if name in shards)
    return own + (sum(one.tokens() for one in against.taken) if queue.freshness == "strict" else 0)


def verify_bytes(slot: Slot, shards: Mapping[str, Shard]) -> None:
    """DataError unless every shard of the slot has the bytes that its digest names."""
    for name in dict.fromkeys(part.shard for part in slot.parts):
        found = verify_shard(shards[name])
        if found:
            raise DataError(
                f"slot {slot.number} is not entered: {shards[name].path}: {found[0]}; bring the approved bytes back"
            )


def check(
    queue: Queue,
    slot: Slot,
    shards: Mapping[str, Shard],
    against: Against,
    held_out: apart.HeldOut | None,
    where: str,
) -> dict[str, Any]:
    """Check a slot whose bytes were verified; the counts for its receipt.

    `held_out` is the validation shard of `against`, opened once. Refused (exit 3) with the evidence when the
    slot holds a validation document, or when a strict queue would repeat data.
    """
    strict = queue.freshness == "strict"
    if strict:
        freshness.refuse_ranges(slot, against.taken, where)
    if against.validation is not None:
        refuse_validation_shard(queue, slot, against.validation, where)
    gather, documents, tokens = Gather(), 0, 0
    ranges = freshness.ranges_of(slot)
    finds: list[str] = []
    for name in ranges if strict or held_out else ():
        found = bounds(shards[name], int(ranges[name].starts[0]), int(ranges[name].stops[-1]), touched=True)
        inside = freshness.touched(found, ranges[name])
        for low, high, ids in pieces(shards[name], found):
            starts, stops = found.starts[low:high], found.stops[low:high]
            digests = digests_of(ids, starts, stops, shards[name].end_of_text)
            kept = inside[low:high]
            documents += int(kept.sum())
            tokens += int((stops - starts)[kept].sum())
            if strict:
                gather.add(name, found.first + low, digests, kept)
            if held_out is not None:
                for find in held_out.look(ids, starts, stops, found.first + low, digests):
                    if kept[find.document - found.first - low]:
                        finds.append(f"{find.words()} in shard {name}")
    if finds:
        more = f" (and {len(finds) - _SHOWN:,} more)" if len(finds) > _SHOWN else ""
        raise Refused(
            f"{where} holds validation data: {'; '.join(finds[:_SHOWN])}{more}; what is validated on is never trained "
            "on: leave these documents out (corpus build, held_out), or hold out others"
        )
    if strict:
        freshness.refuse_documents(gather.done(), queue.tokenizer, against.taken, where)
    return {"documents": documents, "tokens": tokens}


def refuse_validation_shard(queue: Queue, slot: Slot, validation: Shard, where: str) -> None:
    """Refused when a part reads the validation shard itself, or its ids cannot be compared; reads nothing."""
    if any(part.shard == validation.sha256 for part in slot.parts):
        raise Refused(f"{where} reads the validation shard {validation.path} itself; hold out other data")
    if validation.tokenizer != queue.tokenizer:
        raise Refused(
            f"{validation.path} was made with tokenizer {validation.tokenizer!r}, but {queue.path} takes "
            f"{queue.tokenizer!r}; validation under another tokenizer says nothing: make it with the queue's"
        )
