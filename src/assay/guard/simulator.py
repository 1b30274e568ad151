"""What a policy would have done: a price and availability trace, replayed against the guard's own decisions.

`decide` is the function that the guard uses; it sees the past and the present of the trace, never its future. A
machine is paid for from its launch to its end. After `restart_seconds` it trains, at `positions_per_second`; a save
takes `save_seconds` in which it does not. When its zone ceases to be available it is lost, and the save fits into the
provider's notice. Nothing is run, fetched or written here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from assay.errors import InputError
from assay.guard import decision
from assay.guard.budget import disk_time
from assay.guard.decision import (
    SECONDS_PER_HOUR,
    Allocation,
    Decision,
    History,
    Hold,
    Point,
    Purse,
    Zone,
    exact_seconds,
)
from assay.guard.policy import Policy, Reserve
from assay.guard.traces import Change, Trace

Decide = Callable[[History, Policy, datetime], Decision]
COMPARED = (
    "gpus", "restart_seconds", "save_seconds", "interval_seconds", "positions_per_second",
    "disk_gb", "disk_usd_per_gb_month_running", "disk_usd_per_gb_month_stopped",
)  # fmt: skip
WASTE = ("first start", "restart after a loss", "restart after a move", "restart after a stop", "saves")


@dataclass(frozen=True)
class Piece:
    """A stretch of time: `start` (paid, before the first update) or `train`, in which zone."""

    kind: str
    zone: str
    begin: datetime
    end: datetime


@dataclass(frozen=True)
class Outcome:
    """What came of it. Money in US dollars; `waste` by cause is part of `spent`, `disk` too; times in seconds."""

    policy: str
    begin: datetime
    end: datetime
    decision: Decision
    readings: int
    spent: Decimal
    disk: Decimal
    positions: int
    useful: Decimal
    paid: Decimal
    starts: int
    interruptions: int
    moves: int
    stops: int
    waste: dict[str, Decimal]
    pieces: tuple[Piece, ...]

    @property
    def usd_per_useful_hour(self) -> Decimal | None:
        """US dollars per hour in which the machine trained; None when it never did."""
        return self.spent * SECONDS_PER_HOUR / self.useful if self.useful else None


@dataclass
class _World:
    """The simulated state between two moments. Money is kept in dollars × seconds ÷ hour, which is exact."""

    zones: dict[str, Zone] = field(default_factory=dict)
    allocation: Allocation | None = None
    hold: Hold | None = None
    price: Decimal = Decimal(0)  # of the allocation's zone, the last that was stated
    clock: datetime = datetime.min
    paid: Decimal = Decimal(0)
    useful: Decimal = Decimal(0)
    spent: Decimal = Decimal(0)
    start_cause: str = WASTE[0]
    next_cause: str = WASTE[0]
    waste: dict[str, Decimal] = field(default_factory=lambda: dict.fromkeys(WASTE, Decimal(0)))
    pieces: list[Piece] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("starts", "lost", "moves", "stops"), 0))


def simulate(
    trace: Trace,
    policy: Policy,
    begin: datetime | None = None,
    end: datetime | None = None,
    decide: Decide = decision.decide,
) -> Outcome:
    """Replay the trace from `begin` to `end` (default: all of it); what came before `begin` is known as past.

    InputError when the policy cannot be judged: without `machine.positions_per_second`, or a time outside the trace.
    """
    first, last = begin or trace.start, end or trace.end
    if not trace.start <= first < last <= trace.end:
        raise InputError(f"{first.isoformat()} to {last.isoformat()} is not within the trace, which goes from "
                         f"{trace.start.isoformat()} to {trace.end.isoformat()}")  # fmt: skip
    rate = policy.machine.positions_per_second
    if rate is None:
        raise InputError(f"policy {policy.name}: machine.positions_per_second is null; the simulator needs an estimate")
    world = _World(clock=first)
    changes, step = deque(trace.changes), timedelta(seconds=policy.interval_seconds)
    points, tick = list[Point](), first
    readings, trained, said = 0, False, Decision("wait", "none", "nothing was asked")
    while changes and changes[0].time < first:
        _see(world, changes.popleft(), policy)
    while True:
        now = min(changes[0].time, tick) if changes else tick
        if now >= last:
            break
        _advance(world, now)
        if changes and changes[0].time == now:
            _see(world, changes.popleft(), policy)
            continue
        positions = int(world.useful * rate)
        price = _shown_price(world, policy)
        readings += price is not None
        points.append(Point(now, price, positions))
        trained = trained or world.useful > 0
        history = History(
            tuple(points),
            _purse(world, policy, now - first),
            world.allocation,
            world.hold,
            tuple(world.zones.values()),
            Decimal(rate * SECONDS_PER_HOUR) if trained else None,
        )
        said = decide(history, policy, now)
        _act(world, said, policy, now, last)
        tick = now + step
    _advance(world, last)
    _settle(world, last)
    disk = _disk(world, policy, last - first)
    spent = world.spent / SECONDS_PER_HOUR + disk
    counts = world.counts
    return Outcome(
        policy.name, first, last, said, readings, spent, disk, int(world.useful * rate), world.useful, world.paid,
        counts["starts"], counts["lost"], counts["moves"], counts["stops"],
        {cause: amount / SECONDS_PER_HOUR for cause, amount in world.waste.items()}, tuple(world.pieces),
    )  # fmt: skip


def facts(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain JSON data: money as decimal strings, hours with two places."""
    per_hour, billion = outcome.usd_per_useful_hour, None
    if outcome.positions:
        billion = outcome.spent * decision.BILLION / outcome.positions
    return {
        "policy": outcome.policy,
        "decision": {"verb": outcome.decision.verb, "cause": outcome.decision.cause, "reason": outcome.decision.reason},
        "readings": outcome.readings,
        "spent": _money(outcome.spent),
        "positions": outcome.positions,
        "interruptions": outcome.interruptions,
        "starts": outcome.starts,
        "moves": outcome.moves,
        "stops": outcome.stops,
        "useful_hours": _hours(outcome.useful),
        "paid_hours": _hours(outcome.paid),
        "waiting_hours": _hours(exact_seconds(outcome.begin, outcome.end) - outcome.paid),
        "usd_per_useful_hour": None if per_hour is None else format(per_hour, ".4f"),
        "usd_per_billion_positions": None if billion is None else format(billion, ".4f"),
        "waste_usd": {cause: _money(amount) for cause, amount in outcome.waste.items()},
        "disk_usd": _money(outcome.disk),
    }


def unequal(policies: Sequence[Policy]) -> dict[str, list[Any]]:
    """What the policies state differently about machine and looks: key to the values in the policies' order.

    Where it is not empty, a table of them compares more than their rules.
    """
    stated = [{**policy.machine.model_dump(mode="json"), "interval_seconds": policy.interval_seconds}
              for policy in policies]  # fmt: skip
    keys = [key for key in COMPARED if any(one[key] != stated[0][key] for one in stated)]
    return {key: [one[key] for one in stated] for key in keys}


def _see(world: _World, change: Change, policy: Policy) -> None:
    """A zone's new offer; a machine there that cannot be had any more is lost."""
    old = world.zones.get(change.zone)
    losses = old.losses if old else ()
    if old is None or old.available != change.available:
        since = change.time
        if old is not None and not change.available:
            horizon = change.time - timedelta(seconds=policy.zones.memory_seconds)
            losses = (*(loss for loss in losses if loss > horizon), change.time)
    else:
        since = old.since
    failures = old.failures if old else ()
    zone = Zone(change.zone, change.available, since, change.usd_per_hour, losses, failures)
    world.zones[change.zone] = zone
    if world.allocation is None or world.allocation.zone != change.zone:
        return
    if change.usd_per_hour is not None:
        world.price = change.usd_per_hour
    if not change.available:
        world.counts["lost"] += 1
        world.zones[change.zone] = replace(zone, failures=(*failures, change.time))
        saved = min(Decimal(policy.machine.save_seconds), _trained(world, change.time))
        world.useful -= saved
        world.waste["saves"] += saved * world.price
        _settle(world, change.time)
        world.next_cause = "restart after a loss"


def _act(world: _World, said: Decision, policy: Policy, now: datetime, last: datetime) -> None:
    """Do what was decided, at once and without failure."""
    for step in said.steps:
        if step.kind == "hold":
            world.hold = Hold(step.about, now)
        elif step.kind == "lift":
            world.hold = None
    if said.verb in ("stop", "move") and world.allocation is not None:
        until = min(now + timedelta(seconds=policy.machine.save_seconds), last)
        if world.allocation.training is not None and world.allocation.training <= now:
            seconds = exact_seconds(now, until)
            world.paid += seconds
            world.spent += seconds * world.price
            world.waste["saves"] += seconds * world.price
            world.clock = until
        world.counts["stops" if said.verb == "stop" else "moves"] += 1
        world.next_cause = f"restart after a {said.verb}"
        _settle(world, now)
    if said.verb in ("take", "move") and said.zone is not None and world.clock < last:
        zone, start = world.zones[said.zone], world.clock
        assert zone.usd_per_hour is not None
        world.price, world.start_cause = zone.usd_per_hour, world.next_cause
        world.allocation = Allocation(said.zone, start, start + timedelta(seconds=policy.machine.restart_seconds))
        world.counts["starts"] += 1


def _advance(world: _World, now: datetime) -> None:
    """Let time pass: the machine is paid for, and trains once it has started."""
    if now <= world.clock:
        return
    allocation = world.allocation
    if allocation is not None:
        assert allocation.training is not None
        seconds = exact_seconds(world.clock, now)
        useful = exact_seconds(max(world.clock, allocation.training), now) if now > allocation.training else Decimal(0)
        world.paid += seconds
        world.useful += useful
        world.spent += seconds * world.price
        world.waste[world.start_cause] += (seconds - useful) * world.price
    world.clock = now


def _settle(world: _World, now: datetime) -> None:
    """End the allocation, if there is one, and note its pieces."""
    allocation = world.allocation
    if allocation is None:
        return
    assert allocation.training is not None
    begins = min(allocation.training, now)
    world.pieces.append(Piece("start", allocation.zone, allocation.since, begins))
    if now > begins:
        world.pieces.append(Piece("train", allocation.zone, begins, now))
    world.allocation = None


def _trained(world: _World, now: datetime) -> Decimal:
    allocation = world.allocation
    if allocation is None or allocation.training is None or allocation.training >= now:
        return Decimal(0)
    return exact_seconds(allocation.training, now)


def _shown_price(world: _World, policy: Policy) -> Decimal | None:
    """What a look shows: the machine's own price, or of those that could be had the lowest."""
    if world.allocation is not None:
        return world.zones[world.allocation.zone].usd_per_hour
    most = policy.zones.max_usd_per_hour
    prices = [zone.usd_per_hour for zone in world.zones.values() if zone.available and zone.usd_per_hour is not None]
    return min((price for price in prices if most is None or price <= most), default=None)


def _purse(world: _World, policy: Policy, passed: timedelta) -> Purse:
    return Purse(world.spent / SECONDS_PER_HOUR + _disk(world, policy, passed), _reserve(world, policy))


def _reserve(world: _World, policy: Policy) -> Decimal:
    """As the budget computes it; nobody measured a copy here, so it takes `save_timeout_seconds` and no egress."""
    if isinstance(policy.reserve, Reserve):
        return policy.reserve.usd
    machine = policy.machine
    price = world.price if world.allocation is not None else _shown_price(world, policy) or Decimal(0)
    seconds = policy.interval_seconds + machine.save_seconds + policy.save_timeout_seconds + machine.restart_seconds
    days = Decimal(machine.disk_days * 24 * SECONDS_PER_HOUR)
    return price * seconds / SECONDS_PER_HOUR + (disk_time(policy, stopped=True, seconds=days) or 0)


def _disk(world: _World, policy: Policy, passed: timedelta) -> Decimal:
    """What the disk cost: while the machine was paid for and while it was not, where the policy states that."""
    waited = max(Decimal(passed // timedelta(microseconds=1)) / 1_000_000 - world.paid, Decimal(0))
    running = disk_time(policy, stopped=False, seconds=world.paid) or Decimal(0)
    return running + (disk_time(policy, stopped=True, seconds=waited) or Decimal(0))


def _money(amount: Decimal) -> str:
    return format(amount, ".2f")


def _hours(seconds: Decimal) -> str:
    return format(seconds / SECONDS_PER_HOUR, ".2f")
