"""What the guard does next: one pure function of what was seen, the policy and the time.

The loop that watches a run and the simulator ask the same function; what it answers is data, and they act. It reads
no clock, no file and no network, and remembers nothing: all that counts is in the `History`.

**Ceiling.** A reading's price is brought to US dollars per 10^9 useful positions by the positions that the trailing
window gained, beginning at the allocation's first new position: a start is waste, not a price, and so are the updates
done again after it, until a window has passed. `readings` valid readings of this allocation in a row above the ceiling
stop it. Readings that are none neither count nor break the row.
**Budget.** The last point at which a stop still keeps to the limit, should the price rise by `jump_factor` until the
next look, is the last point: spending beyond the limit (cap or funds, less the reserve) would need a larger jump. It
is kept without readings too, by the last known price; where none is known and a limit is, missing readings stop.
**Coming back.** A stop by the ceiling or by missing readings is lifted by `resume.readings` valid readings in a row
at or below `resume.fraction` of the ceiling. What the budget or a person stopped, a person lifts; also what the
ceiling stopped before a pace was measured, for then nobody can say which price is low enough.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Literal

from assay.guard.policy import Event, Policy

BILLION = 1_000_000_000
SECONDS_PER_HOUR = 3600
Verb = Literal["run", "wait", "take", "move", "stop"]
Cause = Literal["none", "ceiling", "budget", "no_reading", "held", "zones", "price"]
Kind = Literal["save", "copy", "hold", "stop", "prove", "lift", "take", "alarm"]
LIFTED_BY_PRICE: tuple[str, ...] = ("ceiling", "no_reading")


@dataclass(frozen=True)
class Point:
    """One look: the price of the machine (stopped: of the best offer), None for no reading; useful positions so far.

    `unconfirmed`: a price that was read and that no second source confirmed; it counts for the budget alone.
    """

    time: datetime
    usd_per_hour: Decimal | None
    positions: int
    unconfirmed: Decimal | None = None


@dataclass(frozen=True)
class Zone:
    """One place that sells the machine: whether one could be had since when, at which price, and when not any more.

    `losses`: when it ceased to be available, to anybody, rising. `failures`: when it preempted us or failed control.
    """

    name: str
    available: bool
    since: datetime
    usd_per_hour: Decimal | None
    losses: tuple[datetime, ...] = ()
    failures: tuple[datetime, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """The machine that is being paid for; `training`: its first update's time, None before."""

    zone: str
    since: datetime
    training: datetime | None = None


@dataclass(frozen=True)
class Hold:
    """A stop that stands: `ceiling`, `budget`, `no_reading`, or another word for what a person set."""

    cause: str
    since: datetime


@dataclass(frozen=True)
class Purse:
    """Money in US dollars: received (None: not limited by funds), spent, and kept back."""

    spent: Decimal
    reserve: Decimal = Decimal(0)
    funds: Decimal | None = None


@dataclass(frozen=True)
class History:
    """All that a decision may know. `points` rise in time and cover the window; `positions_per_hour`: as last measured
    while training, None before; what a stopped run's offers are judged by."""

    points: tuple[Point, ...]
    purse: Purse
    allocation: Allocation | None = None
    hold: Hold | None = None
    zones: tuple[Zone, ...] = ()
    positions_per_hour: Decimal | None = None


@dataclass(frozen=True)
class Step:
    """One thing to do, in its place; `about` is a zone, a hold's cause or an alarm's event."""

    kind: Kind
    about: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do and why. `steps` are to be done in their order, each recorded; empty for `run` and `wait`.

    `usd_per_billion`: the newest valid reading per 10^9 useful positions, None where none was measured.
    """

    verb: Verb
    cause: Cause
    reason: str
    steps: tuple[Step, ...] = ()
    zone: str | None = None
    usd_per_billion: Decimal | None = None


def decide(history: History, policy: Policy, now: datetime) -> Decision:
    """The next action: see the module's docstring for the rules."""
    return _stopped(history, policy, now) if history.allocation is None else _paying(history, policy, now)


def limit(purse: Purse, policy: Policy) -> Decimal | None:
    """What may be spent in all: the smaller of cap and funds, less the reserve; None without either."""
    bounds = [bound for bound in (policy.cap_usd, purse.funds) if bound is not None]
    return min(bounds) - purse.reserve if bounds else None


def ahead(usd_per_hour: Decimal, policy: Policy) -> Decimal:
    """What may be spent until the next look and a save after it, should the price rise by `jump_factor` at once."""
    seconds = policy.interval_seconds + policy.machine.save_seconds
    return usd_per_hour * policy.jump_factor * seconds / SECONDS_PER_HOUR


def needed(usd_per_hour: Decimal, purse: Purse, policy: Policy) -> Decimal:
    """What must be left of the limit to go on until the next look: `ahead`, and what the reserve lacks of a stop.

    A stop waits up to `save_timeout_seconds` for the verified copy; a reserve that was set may not cover that.
    """
    return ahead(usd_per_hour, policy) + max(_copying(usd_per_hour, policy) - purse.reserve, Decimal(0))


def per_billion(history: History, policy: Policy, most: int) -> list[Decimal]:
    """US dollars per 10^9 useful positions at the last `most` points that can be judged, the newest last.

    Infinity where the window gained no position. Points of other allocations, without a valid reading, and those up to
    the first new position (until the window has passed since the launch or the first update) cannot be judged.
    """
    points, found = _of_allocation(history), list[Decimal]()
    for index in range(len(points) - 1, -1, -1):
        price = _price(points, index, history, policy)
        if price is not None:
            found.append(price)
        if len(found) == most:
            break
    return found[::-1]


def settled(zone: Zone, policy: Policy, now: datetime) -> bool:
    """Whether a zone has been available for as long as its losses ask, and did not fail us of late."""
    rules = policy.zones
    lost = len(zone.losses) - bisect_right(zone.losses, now - timedelta(seconds=rules.memory_seconds))
    asked = rules.settle_seconds + lost * rules.settle_seconds_per_loss
    failed = any(_seconds(failure, now) < rules.avoid_seconds for failure in zone.failures)
    return zone.available and not failed and _seconds(zone.since, now) >= asked


def offers(history: History, policy: Policy, now: datetime) -> list[Zone]:
    """The zones that may be taken now, best first: the cheapest, and of those the one longest available."""
    ceiling, rate, most = policy.ceiling, history.positions_per_hour, policy.zones.max_usd_per_hour
    found = []
    for zone in history.zones:
        price = zone.usd_per_hour
        if price is None or (most is not None and price > most) or not settled(zone, policy, now):
            continue
        if ceiling is not None and rate is not None and price * BILLION > ceiling.usd_per_billion_positions * rate:
            continue
        found.append((price, zone.since, zone.name, zone))
    return [zone for *_, zone in sorted(found, key=lambda one: one[:3])]


def _paying(history: History, policy: Policy, now: datetime) -> Decision:
    allocation, points = history.allocation, _of_allocation(history)
    assert allocation is not None
    row = per_billion(history, policy, policy.readings if policy.ceiling else 1)
    newest = row[-1] if row else None
    last = next((point for point in reversed(points) if point.usd_per_hour is not None), None)
    if history.hold is not None:
        return _stop("held", f"the hold of {history.hold.cause} stands", history.hold.cause, (), newest)
    bound, known = limit(history.purse, policy), _known(history.points)
    if bound is not None:
        next_look = Decimal(0) if known is None else needed(known, history.purse, policy)
        if history.purse.spent + next_look > bound:
            reason = f"{history.purse.spent:.2f} dollars are spent and the next look may cost {next_look:.2f}"
            return _stop("budget", f"{reason}; {bound:.2f} may be spent", "budget", ("overspend",), newest)
    silent = _seconds(last.time if last is not None else allocation.since, now)
    if silent >= policy.no_reading.after_seconds:
        reason = f"no valid reading for {silent:,.0f} s"
        blind = bound is not None and known is None
        if policy.no_reading.action == "stop" or blind:
            reason += ", and without any price nobody can keep to the budget" if blind else ""
            return _stop("no_reading", reason, "no_reading", ("no_reading",), newest)
        return Decision("run", "no_reading", reason, (Step("alarm", "no_reading"),), allocation.zone, newest)
    if policy.ceiling is not None:
        ceiling = policy.ceiling.usd_per_billion_positions
        if len(row) == policy.readings and all(price > ceiling for price in row):
            reason = f"{policy.readings} readings in a row above {ceiling} dollars per 10^9 positions"
            return _stop("ceiling", reason, "ceiling", (), newest)
    better = _better(history, policy, now)
    if better is not None:
        steps = (Step("save"), Step("copy"), Step("stop"), Step("prove"), Step("take", better.name))
        reason = f"{better.name} costs {better.usd_per_hour} dollars an hour"
        return Decision("move", "price", reason, steps, better.name, newest)
    return Decision("run", "none", "nothing speaks against it", (), allocation.zone, newest)


def _stopped(history: History, policy: Policy, now: datetime) -> Decision:
    lift: tuple[Step, ...] = ()
    if history.hold is not None:
        cause = history.hold.cause
        if cause == "ceiling" and policy.ceiling is not None and history.positions_per_hour is None:
            return Decision("wait", "held", "the hold of ceiling stands; no pace was measured that a price could be "
                            "judged by, so a person lifts it")  # fmt: skip
        if cause not in LIFTED_BY_PRICE or not _back(history, history.hold, policy):
            return Decision("wait", "held", f"the hold of {cause} stands")
        lift = (Step("lift", history.hold.cause),)
    found = offers(history, policy, now)
    if not found:
        return Decision("wait", "zones", "no zone may be taken now")
    best = found[0]
    assert best.usd_per_hour is not None
    bound, start = limit(history.purse, policy), _start(best.usd_per_hour, history, policy)
    if bound is not None and history.purse.spent + start > bound:
        reason = f"{history.purse.spent:.2f} dollars are spent and a start costs {start:.2f}; {bound:.2f} may be spent"
        if history.purse.spent + _start(_lowest(history, best.usd_per_hour), history, policy) <= bound:
            return Decision("wait", "budget", f"{reason}; at the lowest price that was seen a start would fit")
        return Decision("wait", "budget", reason, (Step("hold", "budget"), Step("alarm", "overspend")))
    reason = f"{best.name} costs {best.usd_per_hour} dollars an hour"
    return Decision("take", "price", reason, (*lift, Step("take", best.name)), best.name)


def _stop(cause: Cause, reason: str, hold: str, alarms: tuple[Event, ...], price: Decimal | None) -> Decision:
    """A safe stop: ask for a save, wait for its verified copy, hold, stop, ask until the billing has ended."""
    told = tuple(Step("alarm", event) for event in (*alarms, "stop"))
    steps = (Step("save"), Step("copy"), Step("hold", hold), Step("stop"), Step("prove"), *told)
    return Decision("stop", cause, reason, steps, None, price)


def _better(history: History, policy: Policy, now: datetime) -> Zone | None:
    """A zone that is worth a move: only from a machine that trains, so that no start is thrown away."""
    allocation, fraction = history.allocation, policy.zones.move_fraction
    if fraction is None or allocation is None or allocation.training is None or allocation.training > now:
        return None
    present = next((zone.usd_per_hour for zone in history.zones if zone.name == allocation.zone), None)
    best = next((zone for zone in offers(history, policy, now) if zone.name != allocation.zone), None)
    if present is None or best is None or best.usd_per_hour is None or best.usd_per_hour > fraction * present:
        return None
    bound = limit(history.purse, policy)
    both = ahead(present, policy) + _copying(present, policy) + _start(best.usd_per_hour, history, policy)
    return None if bound is not None and history.purse.spent + both > bound else best


def _start(usd_per_hour: Decimal, history: History, policy: Policy) -> Decimal:
    """What must be left for a new machine: its start, and what going on needs."""
    start = usd_per_hour * policy.machine.restart_seconds / SECONDS_PER_HOUR
    return start + needed(usd_per_hour, history.purse, policy)


def _copying(usd_per_hour: Decimal, policy: Policy) -> Decimal:
    """What a machine costs while its last save and the verified copy are waited for, at the longest."""
    return usd_per_hour * policy.save_timeout_seconds / SECONDS_PER_HOUR


def _known(points: Sequence[Point]) -> Decimal | None:
    """The last price that was read, of this allocation or before; what nobody confirmed since counts where higher."""
    unconfirmed = list[Decimal]()
    for point in reversed(points):
        if point.usd_per_hour is not None:
            return max((point.usd_per_hour, *unconfirmed))
        if point.unconfirmed is not None:
            unconfirmed.append(point.unconfirmed)
    return max(unconfirmed, default=None)


def _lowest(history: History, present: Decimal) -> Decimal:
    """The lowest price that was ever seen, of the zones' last ones too."""
    seen = [*(point.usd_per_hour for point in history.points), *(zone.usd_per_hour for zone in history.zones)]
    return min((price for price in seen if price is not None), default=present)


def _back(history: History, hold: Hold, policy: Policy) -> bool:
    """Whether enough valid readings in a row since the stop were low enough."""
    after = history.points[bisect_right(history.points, hold.since, key=_time) :]
    row = [point.usd_per_hour for point in after if point.usd_per_hour is not None][-policy.resume.readings :]
    if len(row) < policy.resume.readings:
        return False
    if policy.ceiling is None or history.positions_per_hour is None:
        return True  # there is nothing to compare with: readings came back
    most = policy.resume.fraction * policy.ceiling.usd_per_billion_positions * history.positions_per_hour
    return all(price * BILLION <= most for price in row)


def _of_allocation(history: History) -> Sequence[Point]:
    since = history.allocation.since if history.allocation else None
    return () if since is None else history.points[bisect_left(history.points, since, key=_time) :]


def _price(points: Sequence[Point], index: int, history: History, policy: Policy) -> Decimal | None:
    point, allocation = points[index], history.allocation
    assert allocation is not None
    if point.usd_per_hour is None:
        return None
    first = point.time - timedelta(seconds=policy.window_seconds)
    if allocation.training is None or allocation.training > point.time:
        return None if allocation.since > first else Decimal("Infinity")
    # Updates done again gain nothing; the look at which the first new ones are seen covers some of both.
    new = bisect_right(points, points[0].positions, hi=index + 1, key=_positions)
    if new > index:
        return None if allocation.training > first else Decimal("Infinity")
    begin = max(new, bisect_left(points, first, key=_time))
    if begin == index:
        return None
    gained = point.positions - points[begin].positions
    if gained <= 0:
        return Decimal("Infinity")
    return point.usd_per_hour * BILLION * exact_seconds(points[begin].time, point.time) / SECONDS_PER_HOUR / gained


def _time(point: Point) -> datetime:
    return point.time


def _positions(point: Point) -> int:
    return point.positions


def exact_seconds(earlier: datetime, later: datetime) -> Decimal:
    """The time between as an exact number of seconds."""
    return Decimal((later - earlier) // timedelta(microseconds=1)) / 1_000_000


def _seconds(earlier: datetime, later: datetime) -> float:
    return (later - earlier).total_seconds()
