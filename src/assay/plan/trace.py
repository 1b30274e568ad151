"""Availability traces of spot machines: what a run that moves between zones would have had of them.

A trace is CSV: `time,zone,available,usd_per_hour`, a row where something changed, the last row with a time alone for
the trace's end. `stretches` walks it; `replay` says what a cadence makes of the walk. Decides nothing about money.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path

from assay.errors import InputError
from assay.files.reading import read_text
from assay.plan.cadence import rounded
from assay.recipe.schema import Recipe

COLUMNS = ["time", "zone", "available", "usd_per_hour"]


@dataclass(frozen=True)
class Change:
    """From `second` on (since the epoch) a machine can (or cannot) be had in `zone`, at so much an hour."""

    second: int
    zone: str
    available: bool
    usd_per_hour: Decimal


@dataclass(frozen=True)
class Trace:
    """Changes in the order of time, and the second at which the trace ends."""

    changes: tuple[Change, ...]
    end: int

    @property
    def start(self) -> int:
        """The second of the first change."""
        return self.changes[0].second

    @property
    def zones(self) -> list[str]:
        """The names of the zones, sorted."""
        return sorted({change.zone for change in self.changes})


@dataclass(frozen=True)
class Stretch:
    """Seconds [start, stop) in which one machine was held; `interrupted` unless the trace ended first."""

    start: int
    stop: int
    interrupted: bool

    @property
    def seconds(self) -> int:
        """Its length."""
        return self.stop - self.start


@dataclass(frozen=True)
class Replay:
    """What the seconds of held machines went to: `useful` updates that stayed, saves, starts, and lost work."""

    useful: Decimal
    saving: Decimal
    starting: Decimal
    lost: Decimal

    @property
    def goodput(self) -> float:
        """The useful share of all seconds in which a machine was held; 0 when none was."""
        whole = self.useful + self.saving + self.starting + self.lost
        return float(self.useful / whole) if whole else 0.0


def read_trace(path: Path) -> Trace:
    """The trace at `path`; InputError names the line that is none."""
    try:
        rows = list(csv.reader(read_text(path, "a trace of availability").splitlines()))
    except csv.Error as fault:
        raise InputError(f"{path} is no table of comma-separated values: {fault}") from None
    if rows[0] != COLUMNS:
        raise InputError(f"{path}: the first line is {','.join(rows[0])!r:.80}; {','.join(COLUMNS)} is expected")
    changes: list[Change] = []
    end: int | None = None
    before = 0
    for number, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {number}"
        if end is not None:
            raise InputError(f"{where} comes after the row that ends the trace (a time alone)")
        if len(row) != len(COLUMNS):
            raise InputError(f"{where} has {len(row)} fields; {len(COLUMNS)} are expected: {','.join(COLUMNS)}")
        second = _second(row[0], where)
        if second < before:
            raise InputError(f"{where}: {row[0]} lies before the line above; rows are in the order of time")
        before = second
        if row[1:] == ["", "", ""]:
            end = second
        else:
            changes.append(Change(second, row[1], _flag(row[2], where), _price(row[3], where)))
    if not changes or end is None or end <= changes[0].second:
        raise InputError(f"{path} has no change, or no last row with the time alone at which the trace ends")
    return Trace(tuple(changes), end)


def stretches(
    trace: Trace, first: int | None = None, last: int | None = None, zone: str | None = None
) -> list[Stretch]:
    """The machines that a run would have held within the seconds [first, last), one after another.

    It takes the cheapest zone in which a machine can be had, stays while it can, moves at once when it is taken away,
    and waits where there is none. With `zone` it waits for that zone alone. What the future brings it does not know.
    """
    first = trace.start if first is None else first
    last = trace.end if last is None else last
    free: dict[str, Decimal] = {}
    held: str | None = None
    since = first
    found: list[Stretch] = []
    seconds = sorted({first, *(change.second for change in trace.changes if first < change.second < last)})
    waiting = list(trace.changes)
    for second in seconds:
        while waiting and waiting[0].second <= second:
            change = waiting.pop(0)
            if zone in (None, change.zone):
                if change.available:
                    free[change.zone] = change.usd_per_hour
                else:
                    free.pop(change.zone, None)
        if held is not None and held not in free:
            found.append(Stretch(since, second, True))
            held = None
        if held is None and free:
            held, since = min(free, key=lambda name: (free[name], name)), second
    if held is not None:
        found.append(Stretch(since, last, False))
    return found


def between(found: Sequence[Stretch]) -> Decimal:
    """Mean seconds between interruptions: held seconds by interruptions, counting one where none was seen."""
    return Decimal(sum(one.seconds for one in found)) / max(1, sum(one.interrupted for one in found))


def expected(path: Path) -> tuple[Decimal, str]:
    """Mean seconds between interruptions of a run that moves between the zones of the trace at `path`, with source."""
    walk = stretches(read_trace(path))
    if not walk:
        raise InputError(f"{path}: no machine was ever available in it, so that it says nothing of interruptions; take "
                         "a trace in which some were")  # fmt: skip
    losses = sum(one.interrupted for one in walk)
    return rounded(between(walk)), f"trace: {losses:,} interruptions of {len(walk):,} machines held one after another"


def stated(recipe: Recipe, folder: Path) -> tuple[Decimal, str] | None:
    """The same where the recipe states it or names a trace, else None; InputError when the trace is none."""
    auto = recipe.checkpoint.chosen_from
    if auto.interruption_hours is not None:
        return rounded(Decimal(repr(auto.interruption_hours)) * 3600), "given: checkpoint.auto.interruption_hours"
    return None if auto.trace is None else expected(folder / auto.trace)


def replay(found: Sequence[Stretch], interval: Decimal, save: Decimal, restart: Decimal) -> Replay:
    """What training makes of the stretches: each begins with `restart` seconds, then `interval` of updates, a save, …

    A save counts when it is complete; what was done since the last one is lost with the machine. `interval`, `save`
    and `restart` are seconds. Nobody warns of an interruption: that there is time for one more save is not presumed.
    """
    useful = saving = starting = lost = Decimal(0)
    for one in found:
        length = Decimal(one.seconds)
        begun = min(length, restart)
        starting += begun
        cycles = (length - begun) // (interval + save)
        rest = length - begun - cycles * (interval + save)
        useful += cycles * interval
        saving += cycles * save
        if one.interrupted:
            lost += rest
        else:
            useful += min(rest, interval)
            saving += rest - min(rest, interval)
    return Replay(useful, saving, starting, lost)


def _second(text: str, where: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None:
        raise InputError(f"{where}: {text!r:.40} is no time; RFC 3339 with Z or an offset is expected")
    return int(moment.timestamp())


def _flag(text: str, where: str) -> bool:
    if text not in ("0", "1"):
        raise InputError(f"{where}: available is {text!r:.20}; 0 or 1 is expected")
    return text == "1"


def _price(text: str, where: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation:
        price = Decimal(0)
    if not price.is_finite() or price <= 0:
        raise InputError(f"{where}: usd_per_hour is {text!r:.20}; a number above 0 is expected")
    return price
