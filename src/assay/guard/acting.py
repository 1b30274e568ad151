"""The steps of a decision, done in their order, each recorded when it begins and when it is done.

Save, wait for the verified copy, hold, stop, prove that GPU billing ended, alarm; coming back: lift, take. Every step
may be begun again after the guard was killed in it. Waits are bounded in time and, by the reserve, in money.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from assay.guard.decision import Decision, Step
from assay.guard.policy import Event
from assay.guard.prices import moment, stamp, text
from assay.guard.watch import LONGEST_TICK, Guard, Seen, ToldToStop
from assay.ledger.ledger import Receipt
from assay.run import history

if TYPE_CHECKING:
    from assay.guard.providers import Listing

PROVE_SECONDS = 600  # a stop that did not end the billing by then is an alarm; it is asked for again at each look
OVERDUE: dict[str, Event] = {"save": "stale_copy", "copy": "stale_copy"}


def act(guard: Guard, decision: Decision, seen: Seen) -> bool:
    """Do what is left of an earlier decision, else this one's steps; True when some are left for the next look."""
    said = [one for one in seen.receipts if one.kind == "guard"]
    decided = [one for one in said if one.body.get("action") == "decided"]
    open_one = _unfinished(decided[-1], said) if decided else None
    if open_one is not None and _released(open_one, seen):
        guard.note("dropped", decision=open_one.body["decision"], reason="the hold was lifted")
        open_one = None
    if open_one is None:
        last = decided[-1].body if decided else {}
        same = (last.get("verb"), last.get("cause")) == (decision.verb, decision.cause)
        if same and decision.verb not in ("stop", "move", "take"):  # those ask for deeds again
            return False
        if not decision.steps and not decided:
            return False
        open_one = guard.note(
            "decided", decision=len(decided) + 1, verb=decision.verb, cause=decision.cause, reason=decision.reason,
            steps=[{"kind": step.kind, "about": step.about} for step in decision.steps],
            usd_per_billion_positions=_finite(decision.usd_per_billion), policy=guard.policy_sha256,
        )  # fmt: skip
        guard.site.tell(f"{decision.verb}: {decision.reason}")
    return not _Acting(guard, open_one, seen).work()


def _unfinished(decided: Receipt, said: list[Receipt]) -> Receipt | None:
    """The decision when some of its steps are not done, and it was not dropped."""
    number, steps = decided.body["decision"], decided.body["steps"]
    mine = [one.body for one in said if one.body.get("decision") == number and one.body.get("action") != "decided"]
    if any(one["action"] == "dropped" for one in mine):
        return None
    done = {one["step"] for one in mine if one.get("state") in ("done", "failed")}
    return decided if len(done) < len(steps) else None


def _released(decided: Receipt, seen: Seen) -> bool:
    """Whether somebody lifted the hold that this decision set."""
    number, held = decided.body["decision"], False
    for one in seen.receipts:
        held = held or (one.kind == "hold" and one.body.get("decision") == number)
        if held and one.kind == "released" and one.body.get("decision") != number:
            return True
    return False


def _finite(value: Decimal | None) -> str | None:
    return None if value is None or not value.is_finite() else text(value)


class _Acting:
    """The steps of one decision."""

    def __init__(self, guard: Guard, decided: Receipt, seen: Seen) -> None:
        self.guard, self.policy, self.body, self.seen = guard, guard.policy, decided.body, seen
        self.number: int = decided.body["decision"]
        self.looked = seen.at

    def work(self) -> bool:
        """Do every step that is not done; False when one must be tried again at the next look."""
        does: dict[str, Callable[[int, Step], bool]] = {
            "save": self._save, "copy": self._copy, "hold": self._hold, "stop": self._stop, "prove": self._prove,
            "lift": self._lift, "take": self._take, "alarm": self._alarm,
        }  # fmt: skip
        for place, one in enumerate(self.body["steps"]):
            if self._state(place) in ("done", "failed"):
                continue
            if not does[one["kind"]](place, Step(one["kind"], one["about"])):
                return False
        return True

    # Receipts of steps.

    def _said(self, place: int) -> list[dict[str, Any]]:
        return [
            one.body
            for one in self.guard.receipts()
            if one.kind == "guard" and one.body.get("decision") == self.number and one.body.get("step") == place
        ]

    def _state(self, place: int) -> str | None:
        said = self._said(place)
        return said[-1]["state"] if said else None

    def _record(self, place: int, state: str, **facts: Any) -> bool:
        kind = self.body["steps"][place]["kind"]
        self.guard.note(kind, decision=self.number, step=place, state=state, **facts)
        how = " ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
        self.guard.site.tell(f"{kind}: {state} {how}".rstrip())
        return True

    def _asked(self, place: int, **facts: Any) -> dict[str, Any]:
        """What was said when the step began; said now when this is the beginning."""
        said = [one for one in self._said(place) if one["state"] == "asked"]
        if not said:
            self._record(place, "asked", **facts)
            said = [one for one in self._said(place) if one["state"] == "asked"]
        return said[0]

    def _fail(self, place: int, event: Event, reason: str) -> bool:
        """Record that a step did not succeed in its time, and say so; the next step is done all the same."""
        kind = self.body["steps"][place]["kind"]
        self._record(place, "failed", reason=reason)
        self.guard.alarm(event, f"decision {self.number} {kind}", reason)
        return True

    def _wait(self, until: datetime, answer: Callable[[history.History], str | None]) -> str | None:
        """The first answer, asked at each tick; None when time, or the money that was kept for it, is over."""
        guard = self.guard
        while True:
            found = answer(history.gather(guard.receipts()))
            if found is not None:
                return found
            now = guard.now()
            if now >= until or self._money_is_over(now):
                return None
            if guard.site.told_to_stop():
                raise ToldToStop
            tick = min(float(self.policy.interval_seconds), LONGEST_TICK, max(0.1, (until - now).total_seconds()))
            guard.sleep(tick)
            if (guard.now() - self.looked).total_seconds() >= self.policy.interval_seconds:
                self.seen = guard.observe()
                self.looked = self.seen.at

    def _money_is_over(self, now: datetime) -> bool:
        """Whether waiting has used up what the reserve holds for a stop and a copy."""
        seen = self.seen
        if seen.bound is None:
            return False
        parts = seen.reserve["parts"]
        kept = sum((Decimal(parts[key]) for key in ("safe_stop", "full_copy") if parts.get(key)), Decimal(0))
        kept = kept or seen.purse.reserve / 2
        tick = timedelta(seconds=min(float(self.policy.interval_seconds), LONGEST_TICK))
        return seen.spent_by(now + tick) > seen.bound + kept

    # The steps.

    def _begun(self) -> datetime:
        """When the first of the steps that wait began: what bounds them all."""
        said = [self._said(place) for place, one in enumerate(self.body["steps"]) if one["kind"] in ("save", "copy")]
        times = [moment(one["at"]) for bodies in said for one in bodies]
        return min(times, default=moment(self.body["at"]))

    def _save(self, place: int, _: Step) -> bool:
        told = history.gather(self.guard.receipts())
        asked = self._asked(place, saves=len(told.saved))

        def saved(told: history.History) -> str | None:
            new = [item for item in told.saved[asked["saves"] :] if item.kind == "full"]
            if new:
                return f"step {new[-1].step}"
            segment = told.segments[-1] if told.segments else None
            if segment is None or segment.outcome is not None or self.seen.listing.billing_ended:
                return "nothing trains"
            full = [item for item in told.line if item.kind == "full"]
            reached = self.seen.account.reached
            return f"step {full[-1].step}" if full and reached is not None and full[-1].step >= reached else None

        until = moment(asked["at"]) + timedelta(seconds=self.policy.save_timeout_seconds)
        found = self._wait(until, saved)
        if found is None:
            return self._fail(place, "stale_copy", "the save that was asked for did not come")
        return self._record(place, "done", saved=found)

    def _copy(self, place: int, _: Step) -> bool:
        until = self._begun() + timedelta(seconds=self.policy.save_timeout_seconds)
        self._asked(place)
        found = self._wait(until, _copied)
        if found is None:
            return self._fail(
                place, "stale_copy", "the newest checkpoint has no verified copy in time; the disk is kept"
            )
        return self._record(place, "done", copy=found)

    def _hold(self, place: int, step: Step) -> bool:
        hold = history.gather(self.guard.receipts()).hold
        if hold is None:
            body = {
                "cause": "guard", "why": step.about, "reason": self.body["reason"], "decision": self.number,
                "at": stamp(self.guard.now()),
            }  # fmt: skip
            self.guard.site.journal.append("hold", body)
        return self._record(place, "done", why=step.about, stood=None if hold is None else hold.body["cause"])

    def _stop(self, place: int, _: Step) -> bool:
        """Let the trainer leave and the last copy be made, in what is left of the time, then stop the machine."""
        machine = self.guard.site.machine
        asked = self._asked(place, how=machine.can.stop, keeps_disk=machine.can.keeps_disk)
        short = timedelta(seconds=self.policy.interval_seconds + self.policy.machine.save_seconds)
        until = max(self._begun() + timedelta(seconds=self.policy.save_timeout_seconds), moment(asked["at"]) + short)
        listing = machine.look()
        if not listing.billing_ended and self._state(place) == "asked":
            self._wait(until, _left)
            listing = machine.look()
        if listing.billing_ended:
            return self._record(place, "done", listing=listing.state)
        reason = machine.stop()
        if reason is None:
            return self._record(place, "done", listing=None)
        if reason not in [one.get("reason") for one in self._said(place)]:
            self._record(place, "refused", reason=reason)
        self.guard.alarm("stop", f"decision {self.number} refused", f"the machine could not be stopped: {reason}")
        return False

    def _prove(self, place: int, _: Step) -> bool:
        """Listing and price must say that GPUs are billed no more; else the stop is asked for again."""
        machine = self.guard.site.machine
        asked = self._asked(place)
        until = moment(asked["at"]) + timedelta(seconds=PROVE_SECONDS)
        first = True
        while True:
            listing = machine.look()
            if listing.billing_ended:
                self.guard.observe()
                return self._record(place, "done", **_evidence(listing), price_proves=machine.can.price_proves)
            if self.guard.now() >= until or self.guard.site.told_to_stop():
                break
            first = False
            self.guard.sleep(min(float(self.policy.interval_seconds), LONGEST_TICK))
        if self.guard.site.told_to_stop() and self.guard.now() < until:
            raise ToldToStop
        self.guard.alarm(
            "stop", f"decision {self.number} unproven",
            f"GPU billing has not ended {PROVE_SECONDS} s after the stop (listed as {listing.state} {listing.reason})",
        )  # fmt: skip
        if self.seen.bound is not None and self.seen.spent_by(self.guard.now()) > self.seen.bound:
            self.guard.alarm(
                "overspend", f"decision {self.number} unproven", "the budget is used up, and billing goes on"
            )
        if first:  # it was overdue already: this is a later look
            reason = machine.stop()
            if reason is not None and reason not in [one.get("reason") for one in self._said(place)]:
                self._record(place, "refused", reason=reason)
        return False

    def _lift(self, place: int, step: Step) -> bool:
        hold = history.gather(self.guard.receipts()).hold
        if hold is not None and hold.body["cause"] == "guard":  # a person's hold is a person's to lift
            body = {
                "cause": "guard",
                "reason": self.body["reason"],
                "decision": self.number,
                "at": stamp(self.guard.now()),
            }
            self.guard.site.journal.append("released", body)
        return self._record(place, "done", why=step.about)

    def _take(self, place: int, step: Step) -> bool:
        start = self.guard.site.machine.start
        self._asked(place)
        if start is None:
            return self._record(place, "failed", reason="this provider's machine is started by a person")
        reason = start()
        return self._record(place, "done" if reason is None else "failed", reason=reason)

    def _alarm(self, place: int, step: Step) -> bool:
        event: Any = step.about
        self.guard.alarm(event, f"decision {self.number}", str(self.body["reason"]))
        return self._record(place, "done", event=step.about)


def _copied(told: history.History) -> str | None:
    """What became of the newest full checkpoint's copy; None while it is awaited."""
    full = [item for item in told.line if item.kind == "full"]
    if not full:
        return "nothing is saved"
    if full[-1].copy == history.SAFE:
        return f"step {full[-1].step}"
    return None if full[-1].copy == history.AWAITED else "the recipe asks for none"


def _left(told: history.History) -> str | None:
    """That training ended and its last checkpoint is copied; None before."""
    segment = told.segments[-1] if told.segments else None
    return None if segment is not None and segment.outcome is None else _copied(told)


def _evidence(listing: Listing) -> dict[str, Any]:
    price = None if listing.usd_per_hour is None else text(listing.usd_per_hour)
    return {"listing": listing.state, "usd_per_hour": price, "raw_sha256": listing.raw_sha256}
