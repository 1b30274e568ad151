"""What a run's ledger says about its saves and interruptions, for the choice of `checkpoint.every: auto`.

`measured` gathers it and `plan.cadence.choose` draws the conclusion; the cadence in force is what the newest receipt
`cadence` of the line of training says. Nothing is written here, and nothing is timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from statistics import median
from typing import Any

from assay.errors import Interrupted, MachineError, VerificationError
from assay.plan import cadence
from assay.plan.cadence import BETWEEN_SECONDS, Choice, choose, presumed_save, rounded
from assay.recipe.schema import Recipe
from assay.run import metrics
from assay.run.history import History, Segment

# Ends that a cadence is meant for: the machine went away or failed. A stop, a hold, an --until is somebody's wish.
LOSSES = ("preempted", "signal", "network")
SAVES = 5  # the newest saves whose median counts: one slow save moves nothing
UPDATES = 100  # and as many updates


@dataclass(frozen=True)
class Observed:
    """Interruptions of earlier segments, the seconds in which they trained, and an update's seconds with source."""

    interruptions: int
    seconds: float
    update: tuple[Decimal | None, str]


def observed(told: History, lines: Path, segment: int) -> Observed:
    """What the segments before `segment` saw; `lines` are the metrics, which tell when a killed one ended."""
    seen: dict[int, str] = {item.segment: item.time for item in told.saved}
    pace: deque[float] = deque(maxlen=UPDATES)
    for line in metrics.updates(lines):
        seen[line["segment"]] = max(seen.get(line["segment"], ""), line["time"])
        if isinstance(line.get("seconds"), float):
            pace.append(line["seconds"])
    earlier = [one for one in told.segments if one.number < segment]
    seconds = 0.0
    for one in earlier:
        stop = one.closed or seen.get(one.number, one.opened)
        seconds += max(0.0, _moment(stop) - _moment(one.opened))
    update = (rounded(median(pace)), f"measured: median of {len(pace)}") if pace else (None, "not measured")
    return Observed(sum(map(_interrupted, earlier)), seconds, update)


def _interrupted(segment: Segment) -> bool:
    if segment.outcome == "interrupted":
        return segment.cause in LOSSES
    if segment.outcome == "failed":
        return segment.closing.get("code") in (MachineError.code, Interrupted.code)
    return segment.outcome is None  # killed, and nobody was left to say so


def between(given: tuple[Decimal, str] | None, before: Observed, running: float) -> tuple[Decimal, str]:
    """Mean seconds between interruptions and where they are from: `given` by recipe or trace, or the run itself.

    `running` are the seconds of the present segment. Until a run has seen many interruptions, one a day is presumed and
    counts like one that was seen.
    """
    if given is not None:
        return given
    seconds = BETWEEN_SECONDS + Decimal(before.seconds + running)
    words = f"observed: {before.interruptions}, and one a day presumed"
    return rounded(seconds / (before.interruptions + 1)), words


def save_seconds(told: History, recipe: Recipe) -> tuple[tuple[Decimal, str], Decimal | None]:
    """How long training stands for a full save, with its source, and how long the save takes until it counts.

    The median of the newest saves, as their receipts state it; before the first, what its bytes would take.
    """
    bodies = [one.body for one in told.saves if one.body["checkpoint"] == "full"][-SAVES:]
    stalls = [value for body in bodies if (value := _first(body, "stall_seconds", "seconds")) is not None]
    wholes = [value for body in bodies if (value := _first(body, "seconds", "stall_seconds")) is not None]
    if not stalls:
        return presumed_save(recipe), None
    return (rounded(median(stalls)), f"measured: median of {len(stalls)}"), rounded(median(wholes))


def measured(
    recipe: Recipe,
    told: History,
    given: tuple[Decimal, str] | None,
    update: tuple[Decimal | None, str],
    before: Observed,
    running: float,
) -> Choice:
    """The cadence that the run's own figures give; `update` are the seconds of one update and their source.

    `given`: the mean seconds between interruptions that the recipe or its trace states.
    """
    save, whole = save_seconds(told, recipe)
    return choose(recipe, save=save, whole=whole, update=update, between=between(given, before, running))


def in_force(recipe: Recipe, told: History) -> int:
    """The cadence of `recipe` in the run: as stated, or for `auto` as it was last chosen."""
    if isinstance(recipe.checkpoint.every, int) or told.cadence is None:
        return cadence.every(recipe)
    return int(told.cadence.body["every"])


def _first(body: Mapping[str, Any], *keys: str) -> Decimal | None:
    for key in keys:
        if body.get(key) is not None:
            try:
                value = Decimal(str(body[key]))
            except InvalidOperation:
                value = Decimal(-1)
            if not value.is_finite() or value < 0:
                raise VerificationError(f"a receipt checkpoint.saved says {body[key]!r:.40} as its {key}")
            return value
    return None


def _moment(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        raise VerificationError(f"the time {stamp!r:.40} is not RFC 3339; Assay did not write it") from None
