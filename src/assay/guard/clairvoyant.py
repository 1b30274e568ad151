"""The least that a trace's useful hours could have cost anybody who knew its future, under the simulator's rules.

What is left above it is what a policy may still gain. The plan is exact for its number of useful hours: dynamic
programming over the trace's changes and the policy's looks, with a price for the useful hour that is raised until the
plan trains long enough. It is a yardstick, of no use to a guard.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

from assay.guard.budget import disk_time
from assay.guard.decision import SECONDS_PER_HOUR, exact_seconds
from assay.guard.policy import Policy
from assay.guard.traces import Trace


@dataclass(frozen=True)
class Plan:
    """The cheapest way to its own number of useful seconds; dollars, and how often a machine was started.

    `least`: what the number of useful seconds that was asked for costs anybody at the very least.
    """

    spent: Decimal
    useful: Decimal
    starts: int
    least: Decimal = Decimal(0)

    @property
    def usd_per_useful_hour(self) -> Decimal | None:
        """US dollars per hour in which the machine trained; None when it never did."""
        return self.spent * SECONDS_PER_HOUR / self.useful if self.useful else None


@dataclass(frozen=True)
class _Market:
    """The trace cut at `times`: per zone the price between two of them, None where no machine can be had."""

    times: list[datetime]
    lengths: list[Decimal]
    prices: list[list[Decimal | None]]
    ready: list[int]  # the first time at which a machine that was launched at this one trains
    starts: list[list[Decimal | None]]  # per zone what that start costs, None where the machine does not live so long


def optimum(
    trace: Trace,
    policy: Policy,
    begin: datetime | None = None,
    end: datetime | None = None,
    useful: Decimal = Decimal(0),
) -> Plan | None:
    """The cheapest plan with at least `useful` seconds of training; None when no plan reaches so many.

    A machine is launched at a change of the trace or one of the policy's looks, of `interval_seconds`; where no price
    is stated it costs its zone's last one. Disks cost what they cost the simulator. Of plans with more hours than asked
    the one with the least cost per further hour is meant, which is also the cheapest for its own hours.
    """
    first, last = begin or trace.start, end or trace.end
    # A disk costs this anyhow, and so much more while its machine is paid for.
    stopped = disk_time(policy, stopped=True, seconds=exact_seconds(first, last)) or Decimal(0)
    hour = Decimal(SECONDS_PER_HOUR)
    more_paid = (disk_time(policy, stopped=False, seconds=hour) or Decimal(0)) - (
        disk_time(policy, stopped=True, seconds=hour) or Decimal(0)
    )
    market = _cut(trace, policy, first, last, more_paid)
    save = Decimal(policy.machine.save_seconds)
    known = [price for zone in market.prices for price in zone if price is not None]
    if not known:
        return None
    # What a useful hour is worth is raised from below the cheapest (nothing is done) to where everything is done;
    # between two plans lies, at the worth at which they are equal, a better one or none.
    worthless = min(known) / 2 if min(known) > 0 else 2 * min(known) - 1
    less, more = _plan(market, worthless, save), _plan(market, 1_000_000 * max(known), save)
    if more.useful < useful or not more.useful:
        return None
    while True:
        worth = (more.spent - less.spent) * SECONDS_PER_HOUR / (more.useful - less.useful)
        between = _plan(market, worth, save)
        gain = worth * (between.useful - less.useful) / SECONDS_PER_HOUR - (between.spent - less.spent)
        if gain <= Decimal("1e-9") or between.useful in (less.useful, more.useful):
            slope = (more.spent - less.spent) / (more.useful - less.useful)
            least = max(less.spent + slope * (useful - less.useful), Decimal(0))
            return replace(more, spent=more.spent + stopped, least=least + stopped)
        if between.useful >= max(useful, Decimal(1)):
            more = between
        else:
            less = between


def _cut(trace: Trace, policy: Policy, begin: datetime, end: datetime, more_paid: Decimal) -> _Market:
    looks, step = [begin], timedelta(seconds=policy.interval_seconds)
    while looks[-1] + step < end:
        looks.append(looks[-1] + step)
    times = sorted({*looks, *(change.time for change in trace.changes if begin < change.time < end), end})
    restart = timedelta(seconds=policy.machine.restart_seconds)
    times = sorted({*times, *(time + restart for time in times if time + restart < end)})
    prices: dict[str, list[Decimal | None]] = {}
    stated: dict[str, Decimal] = {}
    for change in trace.changes:
        if change.usd_per_hour is not None:
            stated[change.zone] = change.usd_per_hour + more_paid
        row = prices.setdefault(change.zone, [None] * (len(times) - 1))
        at = bisect_left(times, change.time) if change.time > begin else 0
        row[at:] = [stated.get(change.zone) if change.available else None] * (len(row) - at)
    lengths = [exact_seconds(one, other) for one, other in pairwise(times)]
    ready = [bisect_left(times, time + restart) for time in times]
    rows = list(prices.values())
    starts = [[_start(row, lengths, i, ready[i]) for i in range(len(row))] for row in rows]
    return _Market(times, lengths, rows, ready, starts)


def _start(prices: list[Decimal | None], lengths: list[Decimal], first: int, ready: int) -> Decimal | None:
    """What a machine costs from one time to another, × seconds ÷ hour; None when it is lost before or just then."""
    if ready >= len(prices):
        return None
    paid = Decimal(0)
    for price, length in zip(prices[first:ready], lengths[first:ready], strict=True):
        if price is None:
            return None
        paid += price * length
    return None if prices[ready] is None else paid


def _plan(market: _Market, worth: Decimal, save: Decimal) -> Plan:
    """The plan with the largest (worth × useful hours − cost), from the end backwards; all × seconds ÷ hour.

    `free[i]`: the best from time i on without a machine; `held[z]`: with a machine that trains in zone z.
    Each value is (gain, cost, useful, starts).
    """
    nothing = (Decimal(0), Decimal(0), Decimal(0), 0)
    last = len(market.lengths)
    free = [nothing] * (last + 1)
    held = [[nothing] * (last + 1) for _ in market.prices]
    for i in range(last - 1, -1, -1):
        best, length = free[i + 1], market.lengths[i]
        for zone, prices in enumerate(market.prices):
            price = prices[i]
            if price is None:
                continue
            then = held[zone][i + 1] if i + 1 < last and prices[i + 1] is not None else None
            if then is None:  # lost, or the end: the save's seconds are gone, at the end they are not
                lost = save if i + 1 < last else Decimal(0)
                after = free[i + 1]
                then = (after[0] - worth * lost, after[1], after[2] - lost, after[3])
            held[zone][i] = _add(then, worth, length, price, length)
            paid = market.starts[zone][i]
            if paid is not None:
                start = held[zone][market.ready[i]]
                best = max(best, (start[0] - paid, start[1] + paid, start[2], start[3] + 1))
        free[i] = best
        for zone, prices in enumerate(market.prices):
            if prices[i] is not None:
                leave = (best[0] - worth * save, best[1], best[2] - save, best[3])
                held[zone][i] = max(held[zone][i], leave)
    _, cost, useful, starts = free[0]
    return Plan(cost / SECONDS_PER_HOUR, useful, starts)


def _add(
    value: tuple[Decimal, Decimal, Decimal, int], worth: Decimal, useful: Decimal, price: Decimal, paid: Decimal
) -> tuple[Decimal, Decimal, Decimal, int]:
    gain, cost, seconds, starts = value
    return gain + worth * useful - price * paid, cost + price * paid, seconds + useful, starts


def facts(plan: Plan | None, useful: Decimal) -> dict[str, Any] | None:
    """A plan for so many useful seconds as plain JSON data; None where there is none, or none is needed."""
    if plan is None or not useful:
        return None
    return {
        "spent": format(plan.spent, ".2f"),
        "useful_hours": format(plan.useful / SECONDS_PER_HOUR, ".2f"),
        "usd_per_useful_hour": format(plan.usd_per_useful_hour or Decimal(0), ".4f"),
        "starts": plan.starts,
        "least_usd_per_useful_hour": format(plan.least * SECONDS_PER_HOUR / useful, ".4f"),
    }
