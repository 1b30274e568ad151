"""What a launcher does after a training process ended, and which places it leaves alone: pure functions.

The exit codes of the contract decide, the same failure twice ends it, and a place that just failed is not taken at
once again. Nothing here waits, reads a clock or starts anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from assay.errors import DataError, Interrupted, MachineError
from assay.files.retry import Policy
from assay.launch.description import Restarts

Act = Literal["end", "again", "data"]
CONTROL, MACHINE, PREEMPTED = "control", "machine", "preempted"  # why a place is remembered
FETCH = "fetch"  # the cause of an end whose run could not be brought from its mirror
STANDING = ("stop", "guard")  # causes that only a person lifts
MEMORY = timedelta(days=1)  # failures that are older count no longer


@dataclass(frozen=True)
class End:
    """How one training process ended: its code, the cause with 75, its step, and the run's newest saved step by then.

    `exact`: the step is the one at which it ended; otherwise the newest in the metrics, which lag behind.
    """

    code: int
    cause: str | None = None
    step: int | None = None
    saved: int | None = None
    exact: bool = True


@dataclass(frozen=True)
class Next:
    """What comes next: `end`; `again` after a pause of `seconds`; or wait for `data`. `reason` is for people."""

    act: Act
    reason: str
    seconds: float = 0.0


def after(ends: Sequence[End], limits: Restarts, policy: Policy, *, held: bool = False, asked: bool = False) -> Next:
    """What to do after the last of `ends`, oldest first.

    `held`: a hold stands on the run; `asked`: the launcher itself was told to stop. `policy` draws the pause.
    """
    last = ends[-1]
    if last.code == 0:
        return Next("end", "it is done")
    if asked:
        return Next("end", "the launcher was asked to stop")
    if last.code not in (DataError.code, MachineError.code, Interrupted.code):
        return Next("end", f"exit code {last.code} is never restarted")
    if last.code == DataError.code and last.cause == FETCH:
        return Next(
            "end", "the data are here, but not what the run would go on from: its copies on the mirror do not hold"
        )
    if held or last.cause in STANDING:
        return Next("end", "a hold stands on the run until assay release lifts it")
    if last.code != Interrupted.code and (count := same_again(ends)) >= (2 if last.exact else 3):
        at = (
            "before the first update"
            if last.step is None
            else f"{'at' if last.exact else 'soon after'} update {last.step:,}"
        )
        times = {2: "second", 3: "third"}.get(count, f"{count}th")
        return Next("end", f"exit code {last.code} {at} for the {times} time: trying again would not mend it")
    row = in_a_row(ends)
    if row > limits.most:
        return Next("end", f"restarts.most is {limits.most}, and no checkpoint was saved in that many restarts")
    if last.code == DataError.code:
        return Next("data", "data are missing")
    pause = policy.pause(row, float("inf"), limits.first_seconds / 2)
    return Next("again", last.cause or "a fault of the machine", pause or 0.0)


def same_again(ends: Sequence[End]) -> int:
    """How many of the last ends were the same failure: code and step, and as well known; at least 1."""
    last = ends[-1]
    others = (
        n
        for n, end in enumerate(reversed(ends))
        if (end.code, end.step, end.exact) != (last.code, last.step, last.exact)
    )
    return next(others, len(ends))


def in_a_row(ends: Sequence[End]) -> int:
    """How many of the last ends came without a checkpoint that was newer than all before; at least 1."""
    row, best = 0, -1
    for end in ends:
        saved = -1 if end.saved is None else end.saved
        row = 1 if saved > best else row + 1
        best = max(best, saved)
    return max(row, 1)


@dataclass(frozen=True)
class Failure:
    """A place (a zone, or the salted digest of a host) that failed, when, and why."""

    place: str
    why: str
    time: datetime


def avoided(failures: Iterable[Failure], now: datetime, cool_down: timedelta) -> dict[str, datetime]:
    """Places that are not to be taken yet, each with the moment from which it may be.

    A place cools down from its last failure for `cool_down`, doubled for every other failure of the day before it, at
    most a day. Times in the future (another machine's clock) count as now.
    """
    times: dict[str, list[datetime]] = {}
    for one in failures:
        times.setdefault(one.place, []).append(min(one.time, now))
    result = {}
    for place, moments in times.items():
        last = max(moments)
        count = sum(last - moment < MEMORY for moment in moments)
        until = last + min(cool_down * 2 ** min(count - 1, 30), MEMORY)
        if until > now:
            result[place] = until
    return result
