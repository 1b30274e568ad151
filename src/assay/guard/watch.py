"""The guard: a thin loop that looks at run, price and provider, asks `decide`, and has its steps done.

All that it knows between two looks stands in receipts, so that one that was killed anywhere goes on where they end.
Its time never runs backwards. It trains nothing, and steers the trainer by receipts alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from assay.errors import Refused
from assay.files.lock import take
from assay.guard import adapters, alarms, budget, prices
from assay.guard.decision import Allocation, Decision, History, Hold, Point, Purse, Zone, decide, limit
from assay.guard.journal import Journal
from assay.guard.meter import Meter, State, Use
from assay.guard.policy import Event, Policy, policy_digest
from assay.guard.prices import NoReading, Reading, moment, stamp
from assay.guard.providers import Access, Listing
from assay.ledger.ledger import Receipt
from assay.run import accounts, history, inbox, metrics
from assay.run.folder import RunFolder

LOCK_FILE = "guard.lock"
LONGEST_TICK = 5.0  # seconds between two looks at receipts while a step is waited for
RETRY_SECONDS = 30  # between two looks while steps are not done
GIVE_UP = timedelta(days=1)  # an alarm that reached a target in no look of a day is no longer sent there
PACE_HOURS = 24


@dataclass(frozen=True)
class Clock:
    """The time of day, a clock that no one sets, and a pause; tests bring their own."""

    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    steady: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


@dataclass(frozen=True)
class Site:
    """What a guard works with: see `cli.guard`. `folder` is the policy's own; `environ` holds keys of providers."""

    run: RunFolder
    policy: Policy
    folder: Path
    journal: Journal
    machine: Access
    clock: Clock = field(default_factory=Clock)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    told_to_stop: Callable[[], bool] = lambda: False
    heart: bool = True  # whether it gives the sign of life
    tell: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Seen:
    """One look. `paid`: GPUs are billed, or nobody can say that they are not; `bound`: what may be spent in all."""

    at: datetime
    receipts: Sequence[Receipt]
    told: history.History
    account: accounts.Account
    listing: Listing
    paid: bool
    price: Reading | NoReading
    allocation: Allocation | None
    purse: Purse
    bound: Decimal | None
    reserve: dict[str, Any]
    positions: int
    usd_per_hour: Decimal | None

    def spent_by(self, at: datetime) -> Decimal:
        """What will have been spent by then, at the last known price."""
        seconds = Decimal(max(0.0, (at - self.at).total_seconds()))
        return self.purse.spent + (self.usd_per_hour or Decimal(0)) * seconds / prices.SECONDS_PER_HOUR


class ToldToStop(Exception):
    """The guard itself was asked to end; what it was doing stands in receipts."""


@contextlib.contextmanager
def alone(run: RunFolder) -> Iterator[None]:
    """Be the run's only guard while the block lasts; Refused (exit 3) when there is one."""
    with (run.path / LOCK_FILE).open("ab") as file:
        if not take(file, 0.5):
            raise Refused(f"{run.path} has a guard already; end that one first")
        yield


class Guard:
    """One guard of one run."""

    def __init__(self, site: Site) -> None:
        """Take up the time that earlier guards reached; a clock that was set back does not bring it back."""
        self.site, self.run, self.policy = site, site.run, site.policy
        recipe = site.run.recipe()
        self._first, self._positions = recipe.start.first_update, recipe.positions_per_update
        self._steady = site.clock.steady()
        theirs, mine = site.journal.receipts()
        times = [one.body["at"] for one in (*theirs, *mine) if isinstance(one.body.get("at"), str)]
        self._at = max([site.clock.wall(), *map(moment, times[-50:])])
        self.policy_sha256 = policy_digest(site.policy)
        self._last_try: dict[tuple[str, str], dict[str, str | None]] = {}

    def now(self) -> datetime:
        """The time: at least what has passed since it was asked last, or the clock's where that is later."""
        steady = self.site.clock.steady()
        self._at = max(self._at + timedelta(seconds=max(0.0, steady - self._steady)), self.site.clock.wall())
        self._steady = steady
        return self._at

    def watch(self, *, once: bool = False) -> tuple[Decision, Seen]:
        """Look, decide, act, every `interval_seconds`, until told to stop or the run's history is over."""
        while True:
            decision, seen, pending = self.look()
            over = (seen.told.ended or seen.told.abandoned is not None) and not seen.paid
            if once or over or self.site.told_to_stop():
                break
            pause = min(self.policy.interval_seconds, RETRY_SECONDS) if pending else self.policy.interval_seconds
            self.sleep(pause)
            if self.site.told_to_stop():
                break
        return decision, self.observe()  # the steps may have changed what was seen

    def look(self) -> tuple[Decision, Seen, bool]:
        """One look and what follows from it; whether steps are left for the next one."""
        from assay.guard import acting  # it needs this module's names

        seen = self.observe()
        decision = decide(self.history(seen), self.policy, seen.at)
        pending = False
        try:
            pending = acting.act(self, decision, seen)
        except ToldToStop:
            pending = True
        self._conditions(seen)
        self._send_again()
        return decision, seen, pending

    def sleep(self, seconds: float) -> None:
        """Pause, in pieces, so that a wish to stop is heard and the sign of life goes on."""
        left = float(seconds)
        while left > 0 and not self.site.told_to_stop():
            piece = min(left, 1.0 if seconds <= LONGEST_TICK else LONGEST_TICK)
            self.site.clock.sleep(piece)
            left -= piece
            self.beat()

    def beat(self) -> None:
        """The sign of life that a dead-man switch on the node waits for."""
        if not self.site.heart:
            return
        rule = self.policy.dead_man
        facts = {
            "time": stamp(self.now()),
            "policy": self.policy_sha256,
            "after_seconds": rule.after_seconds if rule else None,
        }
        inbox.beat(self.run, facts)

    def note(self, action: str, **facts: Any) -> Receipt:
        """A receipt `guard`."""
        return self.site.journal.append("guard", {"action": action, "at": stamp(self.now()), **facts})

    def receipts(self) -> list[Receipt]:
        """The run's receipts, and what this guard said that the run has not taken up."""
        theirs, mine = self.site.journal.receipts()
        return [*theirs, *mine]

    # What there is to see.

    def observe(self) -> Seen:
        """Look at the provider, the price, the run; meter what was spent since the last look."""
        self.beat()
        at = self.now()
        theirs, mine = self.site.journal.receipts()
        told = history.gather([*theirs, *mine])
        meter = Meter(self.run, self.policy)
        meter.see(mine)
        read = [one.body for one in (*theirs, *mine) if one.kind == "price" and "at" in one.body]
        listing = self.site.machine.look()
        before = next((one["listing"]["state"] for one in reversed(read) if one["listing"]["state"] != "unknown"), None)
        state_known = listing.state if listing.state != "unknown" else before
        paid = state_known not in ("stopped", "gone")
        previous = [prices.from_body(one) for one in read if one["usd_per_hour"] is not None][-1:]
        valid = [one for one in previous if isinstance(one, Reading)]
        price = adapters.current(self.policy, self.site.folder, valid, self.site.clock.wall(), self.site.environ)
        usd = price.value if isinstance(price, Reading) else valid[-1].value if valid else budget.last_price(told)
        reserve = budget.reserve(self.run, told, self.policy, usd)
        name, since = self._allocation(meter.account, read, at)
        training = self._training(since) if paid else None
        self._charge(meter, name, since, at, paid, training, price, reserve)
        account = meter.account
        positions = max(0, (account.reached or self._first) - self._first) * self._positions
        shown = {"state": listing.state, "usd_per_hour": _text(listing.usd_per_hour), "reason": listing.reason}
        body = {**prices.body(price), "at": stamp(at), "positions": positions, "listing": shown}
        said = self.site.journal.append("price", body)
        purse = self._purse(account, reserve)
        return Seen(
            at, [*theirs, *mine, said], told, account, listing, paid, price,
            Allocation(self.policy.machine.provider, since, training) if paid else None,
            purse, limit(purse, self.policy), reserve, positions, usd,
        )  # fmt: skip

    def history(self, seen: Seen) -> History:
        """What `decide` may know of it."""
        read = [one.body for one in seen.receipts if one.kind == "price" and "at" in one.body]
        points = tuple(
            Point(
                moment(one["at"]),
                _decimal(one["usd_per_hour"]),
                one["positions"],
                _decimal(one.get("unconfirmed_usd_per_hour")),
            )
            for one in read
        )
        hold = seen.told.hold
        stands = None
        if hold is not None:
            why = hold.body.get("why") if hold.body["cause"] == "guard" else None
            stands = Hold(str(why or hold.body["cause"]), moment(hold.body.get("at") or hold.time))
        zones: tuple[Zone, ...] = ()
        if self.site.machine.start is not None and not seen.told.ended and seen.told.abandoned is None:
            fresh = seen.price.value if isinstance(seen.price, Reading) else None
            zones = (Zone(self.policy.machine.provider, True, points[0].time, fresh),)
        return History(points, seen.purse, seen.allocation, stands, zones, self._pace(seen.account))

    def _purse(self, account: accounts.Account, reserve: dict[str, Any]) -> Purse:
        """A reserve that nobody can state keeps back everything: it is not nothing."""
        stated = account.reserve_usd if reserve["usd"] is None else Decimal(reserve["usd"])
        if stated is None:
            bounds = [one for one in (self.policy.cap_usd, account.received) if one is not None]
            stated = min(bounds, default=Decimal(0))
        return Purse(account.spent or Decimal(0), stated, account.received)

    def _allocation(
        self, account: accounts.Account, read: Sequence[Mapping[str, Any]], at: datetime
    ) -> tuple[str | None, datetime]:
        """The newest allocation's name and since when it is paid for; without receipts of one, since the first look."""
        begun = [(one["began"], name) for name, one in account.allocations.items() if "began" in one]
        if begun:
            since, name = max(begun)
            return name, accounts.instant(since)
        return None, moment(read[0]["at"]) if read else at

    def _training(self, since: datetime) -> datetime | None:
        """When the allocation's first update was done; None before."""
        for line in metrics.updates(self.run.metrics):
            if moment(line["time"]) >= since:
                return moment(line["time"])
        return None

    def _charge(
        self, meter: Meter, name: str | None, since: datetime, at: datetime, paid: bool, training: datetime | None,
        price: Reading | NoReading, reserve: dict[str, Any],
    ) -> None:  # fmt: skip
        """Meter the time since the last look, also of allocations that came to their end in between."""
        account, journal = meter.account, self.site.journal
        first = account.spends[0].start if account.spends else None
        for other, one in list(account.allocations.items()):
            metered = account.until.get(other)
            ended, began = one.get("ended"), one.get("began")
            known = metered is not None or (first is not None and began is not None and began >= first)
            if ended is None or not known or (metered or 0) >= ended or (other == name and paid):
                continue
            before = _state([spend for spend in account.spends if spend.allocation == other])
            if before != "stopped":
                use = Use(other, before, price)
                meter.charge(journal, use, accounts.instant(ended), since=accounts.instant(began or ended))
        last = _state([spend for spend in account.spends if spend.allocation == name])
        ended = account.allocations.get(name or "", {}).get("ended")
        if not paid and last != "stopped" and name in account.until and ended is None:
            meter.charge(journal, Use(name, last, price), at, since=since, reserve=reserve)  # when it ended, nobody saw
        state: State = "stopped" if not paid else "provisioning" if training is None else "running"
        meter.charge(journal, Use(name, state, price), at, since=since if paid else at, reserve=reserve)

    def _pace(self, account: accounts.Account) -> Decimal | None:
        """Useful positions an hour, of the newest hours in which a machine ran."""
        useful, length = 0, 0
        for one in reversed(account.spends):
            if one.state == "running":
                useful, length = useful + one.useful, length + one.stop - one.start
            if length >= PACE_HOURS * accounts.HOUR:
                break
        return Decimal(useful * self._positions) * accounts.HOUR / length if useful and length else None

    # Alarms.

    def alarm(self, event: Event, about: str, text: str) -> None:
        """Say it once: an alarm of the same event about the same thing stands in the receipts already."""
        if any(one.kind == "alarm" and (one.body["alarm"], one.body.get("about")) == (event, about)
               for one in self.receipts()):  # fmt: skip
            return
        to = alarms.targets(self.policy, event)
        body = {"alarm": event, "about": about, "text": text, "at": stamp(self.now()), "to": to}
        self.site.journal.append("alarm", body)
        self.site.tell(f"ALARM {event}: {text}")
        self._send(body, to)

    def _send(self, body: Mapping[str, Any], to: Sequence[str]) -> None:
        if not to:
            return
        facts = {"run": self.run.recipe().name, "run_id": self.run.run_id(), **body}
        tried = alarms.send(self.policy, to, facts, self.site.folder, self.site.environ)
        key = (str(body["alarm"]), str(body["about"]))
        if tried != self._last_try.get(key):
            self._last_try[key] = tried
            delivered = sorted(name for name, reason in tried.items() if reason is None)
            failed = {name: reason for name, reason in sorted(tried.items()) if reason is not None}
            self.note("told", alarm=key[0], about=key[1], delivered=delivered, failed=failed)

    def _send_again(self) -> None:
        """What did not arrive is sent again at each look, for a day."""
        told: dict[tuple[str, str], set[str]] = {}
        receipts = self.receipts()
        for one in receipts:
            if one.kind == "guard" and one.body.get("action") == "told":
                told.setdefault((one.body["alarm"], one.body["about"]), set()).update(one.body["delivered"])
        for one in receipts:
            if one.kind != "alarm" or "to" not in one.body or self.now() - moment(one.body["at"]) > GIVE_UP:
                continue
            missing = [
                name for name in one.body["to"] if name not in told.get((one.body["alarm"], one.body["about"]), ())
            ]
            self._send({key: value for key, value in one.body.items() if key != "inbox"}, missing)

    def _conditions(self, seen: Seen) -> None:
        """Alarms that no decision is about: stale copy, stalled updates, failed control, failed training, idle bill."""
        told, rules = seen.told, self.policy
        over = told.ended or told.abandoned is not None
        if over and seen.paid:
            self.alarm("stop", "over", "the run's history is over, and its machine is still there: stop it")
        for control in told.controls[-1:]:
            if control.body.get("passed") is False:
                self.alarm(
                    "failed_control", f"receipt {control.seq}", "a control failed: this machine is not to be used"
                )
        if over or not told.segments:
            return
        segment = told.segments[-1]
        if segment.outcome == "failed":
            self.alarm("stop", f"segment {segment.number}", f"training failed with code {segment.closing.get('code')}")
        if told.hold is not None:
            return
        copies = [one for one in told.line if one.kind == "full" and one.copy == history.SAFE]
        since = moment(copies[-1].time if copies else told.segments[0].opened)
        if (seen.at - since).total_seconds() > rules.copy_seconds:
            what = f"the newest verified copy is of step {copies[-1].step}" if copies else "no verified copy exists"
            self.alarm("stale_copy", f"step {copies[-1].step if copies else None}", f"{what}, since {stamp(since)}")
        if segment.outcome is None:
            newest = max((moment(one["time"]) for one in metrics.updates(self.run.metrics)), default=None)
            last = max(moment(segment.opened), newest or moment(segment.opened))
            if (seen.at - last).total_seconds() > rules.stalled_seconds:
                self.alarm("stalled", f"since {stamp(last)}", f"no update since {stamp(last)}")


def facts(decision: Decision, seen: Seen) -> dict[str, Any]:
    """The contract's keys of `assay guard`."""
    readings = [one.body for one in seen.receipts if one.kind == "price" and one.body["usd_per_hour"] is not None]
    return {
        "decision": {
            "verb": decision.verb, "cause": decision.cause, "reason": decision.reason,
            "usd_per_billion_positions": _text(decision.usd_per_billion),
        },
        "readings": len(readings),
        "spent": _text(seen.purse.spent.quantize(budget.CENT)),
        "may_spend": _text(None if seen.bound is None else seen.bound.quantize(budget.CENT)),
        "positions": seen.positions,
        "interruptions": sum(one.outcome == "interrupted" for one in seen.told.segments),
        "listing": seen.listing.state,
        "billing_ended": seen.listing.billing_ended,
        "hold": seen.told.hold.body["cause"] if seen.told.hold else None,
    }  # fmt: skip


def _state(spends: Sequence[accounts.Spend]) -> State:
    last = spends[-1].state if spends else "provisioning"
    return "stopped" if last == "stopped" else "running" if last == "running" else "provisioning"


def _decimal(value: str | None) -> Decimal | None:
    return None if value is None else Decimal(value)


def _text(value: Decimal | None) -> str | None:
    if value is None:
        return None
    return prices.text(value) if value.is_finite() else str(value)
