"""The one way to try again: exponential back-off with full jitter, Retry-After honoured, to a stated deadline.

What is worth another try says so by raising `Transient`; anything else ends the call at once. Clock, sleep and chance
are parameters. It does not know any protocol, and it never tries longer than it was told to.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from assay.errors import Interrupted

T = TypeVar("T")
KEPT = "what is done is kept: run the same command again and it goes on where it was"
SHORTEST = 1.0  # seconds that an attempt gets at least, the last one too: it may overrun the deadline by as much
PATIENCE = 30.0  # seconds for a connection, and between two reads, at most


class Transient(Exception):
    """A failure that another try may mend. `after`: the seconds that the far side asks to wait; `moved`: something
    new was brought before it failed, so that the deadline counts from now."""

    def __init__(self, reason: str, after: float | None = None, moved: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
        self.moved = moved


@dataclass(frozen=True)
class Policy:
    """How long to go on, in seconds: `deadline` without success, pauses up to `first`, doubled each time, to `most`.

    `chance(a, b)` is a random number in [a, b].
    """

    deadline: float = 600.0
    first: float = 0.5
    most: float = 30.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[float, float], float] = random.uniform

    def pause(self, failures: int, left: float, after: float | None) -> float | None:
        """Seconds to wait after so many failures in a row (1, 2, …) with `left` of the deadline; None: give up.

        Full jitter: anywhere in [0, min(most, first × 2^(failures − 1))], never beyond the deadline. `after` comes on
        top of nothing: the pause is at least as long, and when the deadline is nearer there is no use in waiting.
        """
        if left <= 0 or (after is not None and after > left):
            return None
        highest = min(self.most, self.first * 2.0 ** min(failures - 1, 60))
        return min(left, max(0.0, after or 0.0) + self.chance(0.0, highest))


def persist(what: str, attempt: Callable[[float], T], policy: Policy, way_out: str = KEPT) -> T:
    """What `attempt` returns, tried again after each `Transient` until the deadline has passed.

    `attempt` gets the seconds that are left, to bound its own time-outs by. The deadline counts from the beginning, or
    from the last failure that had `moved`. Raises Interrupted (cause `network`), which names `what`, the last
    reason and the way out; and whatever else `attempt` raises.
    """
    begin, failures = policy.clock(), 0
    while True:
        try:
            return attempt(max(SHORTEST, policy.deadline - (policy.clock() - begin)))
        except Transient as fault:
            now = policy.clock()
            if fault.moved:
                begin, failures = now, 0
            failures += 1
            pause = policy.pause(failures, policy.deadline - (now - begin), fault.after)
            if pause is None:
                raise Interrupted(
                    f"{what}: {fault.reason}; given up at the deadline of {policy.deadline:g} s; {way_out}", "network"
                ) from None
        policy.sleep(pause)


def patience(left: float) -> float:
    """The time-out of a connection and of a read: a quarter of what is left, so that one that hangs is not the last."""
    return max(SHORTEST, min(PATIENCE, left / 4))


def again(status: int) -> bool:
    """Whether an HTTP status may be another one the next time: time-out, too many requests, a fault of the server."""
    return status in (408, 429) or 500 <= status <= 599


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for: a number or a date (RFC 9110, 10.2.3); None without a valid one."""
    value = next((text for name, text in headers.items() if name.lower() == "retry-after"), "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:12])
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())
