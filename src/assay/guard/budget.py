"""The budget of a run: funds and bills that people enter, and the reserve that a safe end needs.

Each is a receipt, bound to this run and to one purpose; a wrong one is replaced, never removed. Amounts are decimal and
positive. What was spent is metered elsewhere (`meter`); what follows from all of it is `run.accounts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

from assay.errors import AssayError, InputError, Refused
from assay.files.digest import digest, digest_file
from assay.guard.policy import MOST, MOST_DIGITS, Policy, Rate
from assay.guard.policy import Reserve as SetReserve
from assay.guard.prices import SECONDS_PER_HOUR, SECONDS_PER_MONTH, stamp, text, to_usd
from assay.ledger.ledger import FILE, Receipt, read
from assay.plan.cadence import checkpoint_steps, disk
from assay.run import accounts
from assay.run.folder import RunFolder, require_run
from assay.run.history import History, history

CENT = Decimal("0.01")
NANO = Decimal("1e-9")  # of a dollar: finer than any price of a second, and no endless fractions in the ledger
GB = 10**9
_EXACT = Context(prec=100)  # a product of large amounts has more digits than the default carries


@dataclass(frozen=True)
class Money:
    """An amount as somebody stated it; another currency than US dollars comes with its rate."""

    amount: Decimal
    currency: str = "USD"
    rate: Rate | None = None

    @property
    def usd(self) -> Decimal:
        """The amount in US dollars; InputError when it is not positive, too large or without the rate that it needs."""
        if not self.amount.is_finite() or self.amount <= 0:
            raise InputError(f"--amount is {self.amount}; an amount above 0 is expected")
        if len(self.amount.as_tuple().digits) > MOST_DIGITS or not -MOST_DIGITS < self.amount.adjusted() < MOST_DIGITS:
            raise InputError(f"--amount has more than {MOST_DIGITS} digits")
        if (self.currency == "USD") != (self.rate is None):
            need = "takes no rate" if self.rate else "needs --usd-per-unit, --rate-source and --rate-date"
            raise InputError(f"--currency {self.currency} {need}")
        usd = to_usd(self.amount, self.currency, {self.currency: self.rate} if self.rate else {})[0]
        if not NANO <= usd <= MOST:
            raise InputError(f"--amount is {usd:.3E} US dollars; from {NANO:f} to {MOST:,f} are expected")
        return usd

    def body(self) -> dict[str, Any]:
        """The keys of a receipt."""
        rate = self.rate.model_dump(mode="json") if self.rate else None
        return {"usd": text(self.usd), "amount": text(self.amount), "currency": self.currency, "rate": rate}


def fund(
    run: RunFolder,
    money: Money,
    *,
    purpose: str,
    received: str | None = None,
    reference: str | None = None,
    reserve: dict[str, Any] | None = None,
    replaces: int | None = None,
) -> Receipt:
    """Money received for this run, on the day `received` (default: today), as a receipt `funds`.

    All funds of a run have one purpose, so that what was given for one thing is not spent on another. `reference` is
    the transfer's name; only its digest is kept, and it may be entered once, in this run and in those beside it.
    Raises Refused for another purpose or a reference that was entered before, InputError for what makes no sense.
    """
    require_run(run)
    if not purpose.strip() or not purpose.isprintable():
        raise InputError(f"--purpose is {purpose!r}; printable text that is not empty is expected")
    told = history(run.ledger)
    money_of_run = accounts.account(told.money)
    standing = [one for one in money_of_run.funds if one.seq != replaces]
    _replaced(replaces, [one.seq for one in money_of_run.funds], "funds")
    others = {one.purpose for one in standing} - {purpose}
    if others:
        raise Refused(
            f"the funds of {run.path} are for {others.pop()!r}, and these are for {purpose!r}; what is given for one "
            "purpose is not spent on another: fund a run of its own"
        )
    named = None if reference is None else digest(reference.strip().encode())
    if named is not None:
        _refuse_twice(run, named, standing)
    body = {
        **money.body(), "date": _day(received, "--date"), "purpose": purpose, "reference": named, "reserve": reserve,
        "replaces": replaces,
    }  # fmt: skip
    return run.open_ledger().append("funds", body)


def bill(
    run: RunFolder,
    money: Money,
    *,
    start: datetime,
    stop: datetime,
    covers: Iterable[str] = tuple(accounts.GROUPS),
    allocation: str | None = None,
    provider: str | None = None,
    file: Path | None = None,
    replaces: int | None = None,
) -> Receipt:
    """A provider's bill for [start, stop) as a receipt `bill`, with what was metered for the same and the difference.

    `covers` are groups of `accounts.GROUPS`; `allocation` None: all. Refused when a bill that stands covers some of
    the same time of the same; InputError for what makes no sense.
    """
    require_run(run)
    groups = tuple(group for group in accounts.GROUPS if group in set(covers))
    unknown = sorted(set(covers) - set(accounts.GROUPS))
    if unknown or not groups:
        raise InputError(f"--covers is {', '.join(unknown) or 'empty'}; allowed are {', '.join(accounts.GROUPS)}")
    if not start < stop:
        raise InputError(f"--from is {stamp(start)} and --to {stamp(stop)}; a bill's period begins before it ends")
    if stop > datetime.now(UTC):  # it would cover what is spent from now on, as if that were paid for
        raise InputError(f"--to is {stamp(stop)}, which is still to come; a bill is for what has passed")
    told = accounts.account(history(run.ledger).money)
    _replaced(replaces, [one.seq for one in told.bills], "bill")
    names = {one.allocation for one in told.spends} | set(told.allocations)
    if allocation is not None and names and allocation not in names:
        raise InputError(f"--allocation is {allocation!r}; no allocation of that name was metered or stated")
    new = accounts.Bill(
        -1, money.usd, accounts.moment(stamp(start)), accounts.moment(stamp(stop)), groups, allocation, provider
    )
    for old in told.bills:
        same = old.allocation is None or allocation is None or old.allocation == allocation
        both = set(old.covers) & set(groups)
        if old.seq != replaces and same and both and old.start < new.stop and new.start < old.stop:
            raise Refused(
                f"the bill of receipt {old.seq} covers {', '.join(sorted(both))} of some of that time already; replace "
                f"it with --replaces {old.seq}, or state other times, --covers or --allocation"
            )
    estimate = told.estimate_of(new)
    body = {
        **money.body(), "start": stamp(start), "stop": stamp(stop), "covers": list(groups), "allocation": allocation,
        "provider": provider, "file": None if file is None else digest_file(file), "replaces": replaces,
        "estimated_usd": None if estimate is None else text(nano(estimate)),
        "difference_usd": None if estimate is None else text(nano(new.usd - estimate)),
    }  # fmt: skip
    return run.open_ledger().append("bill", body)


def reserve(run: RunFolder, told: History, policy: Policy, usd_per_hour: Decimal | None) -> dict[str, Any]:
    """What must be left for a safe end, as receipts hold it: `usd` (null: no price is known), `how`, `parts`, `from`.

    Set by the policy, or the sum of: one safe stop (until the guard looks again, and a save), one full copy (the
    machine's time for it, and egress), `disk_days` of the stopped machine's disk, one restart. A copy takes what the
    newest one took, `save_timeout_seconds` where that is unknown or longer; it has that one's bytes, else what the
    plan says. A part that is null is not in the sum.
    """
    if isinstance(policy.reserve, SetReserve):
        return {"usd": text(policy.reserve.usd), "how": "set", "parts": {}, "from": {}}
    machine = policy.machine
    size, took = _copy(run, told)
    most = policy.save_timeout_seconds  # for longer nobody waits
    used = {
        "usd_per_hour": None if usd_per_hour is None else text(usd_per_hour),
        "stop_seconds": policy.interval_seconds + machine.save_seconds,
        "copy_seconds": most if took is None else min(most, took),
        "copy_seconds_measured": took is not None and took <= most,
        "copy_bytes": size,
        "disk_days": machine.disk_days,
        "restart_seconds": machine.restart_seconds,
    }

    def time(key: str) -> Decimal | None:
        return None if usd_per_hour is None else usd_per_hour * Decimal(str(used[key])) / SECONDS_PER_HOUR

    parts = {
        "safe_stop": time("stop_seconds"),
        "full_copy": time("copy_seconds"),
        "full_copy_egress": egress(policy, size),
        "disk_days": disk_time(policy, stopped=True, seconds=Decimal(machine.disk_days * 24 * SECONDS_PER_HOUR)),
        "restart": time("restart_seconds"),
    }
    whole = sum((value for value in parts.values() if value is not None), Decimal(0))
    shown = {name: None if value is None else text(nano(value)) for name, value in parts.items()}
    usd = None if usd_per_hour is None else text(nano(whole))
    return {"usd": usd, "how": "computed", "parts": shown, "from": used}


def stated_reserve(usd: Decimal) -> dict[str, Any]:
    """A reserve that somebody sets; InputError when it is negative, or no amount of dollars and nano-dollars."""
    if not usd.is_finite() or not 0 <= usd <= MOST or usd.as_tuple().exponent < -MOST_DIGITS:  # type: ignore[operator]
        raise InputError(f"--reserve-usd is {usd}; an amount from 0 to {MOST:,f} is expected")
    return {"usd": text(usd), "how": "set", "parts": {}, "from": {}}


def nano(value: Decimal) -> Decimal:
    """An amount to the nano-dollar, however large it is."""
    return value.quantize(NANO, context=_EXACT)


def egress(policy: Policy, size: int | None) -> Decimal | None:
    """What it costs to send so many bytes out, in US dollars; None where the policy states no price or size is None."""
    rate = policy.machine.egress_usd_per_gb
    return None if rate is None or size is None else rate * size / GB


def disk_time(policy: Policy, *, stopped: bool, seconds: Decimal) -> Decimal | None:
    """What the machine's disk costs for so long, in US dollars; None where the policy does not state size and price."""
    machine = policy.machine
    rate = machine.disk_usd_per_gb_month_stopped if stopped else machine.disk_usd_per_gb_month_running
    return None if rate is None or machine.disk_gb is None else rate * machine.disk_gb * seconds / SECONDS_PER_MONTH


def last_price(told: History) -> Decimal | None:
    """The last price, in US dollars per machine-hour, that anything was metered with."""
    money = accounts.account(told.money)
    return next((one.usd_per_hour for one in reversed(money.spends) if one.usd_per_hour is not None), None)


def _copy(run: RunFolder, told: History) -> tuple[int, int | None]:
    """Bytes of a full copy, and the seconds that the newest one took to its proof, if there is one.

    It began when it was saved, or when the copy before it was proved: copies are made one after another.
    """
    saved = {one.manifest_sha256: one.time for one in told.saved if one.kind == "full"}
    for place, receipt in reversed(list(enumerate(told.mirrored))):
        begun = saved.get(receipt.body["manifest_sha256"])
        if begun and type(receipt.body.get("bytes")) is int:
            times = [begun, *(one.time for one in told.mirrored[max(0, place - 1) : place])]
            took = (accounts.moment(receipt.time) - max(map(accounts.moment, times))) // accounts.MICROSECONDS
            return receipt.body["bytes"], max(0, took)
    recipe = run.recipe()
    return int(disk(recipe, checkpoint_steps(recipe, None))["full_checkpoint"]), None


def _replaced(replaces: int | None, standing: list[int], kind: str) -> None:
    if replaces is not None and replaces not in standing:
        there = ", ".join(map(str, standing)) or "none is there"
        raise InputError(f"--replaces is {replaces}; the receipts {kind} that stand are: {there}")


def _refuse_twice(run: RunFolder, named: str, standing: list[accounts.Fund]) -> None:
    """Refused when a transfer of that reference is entered in this run or in one beside it already."""
    if any(one.reference == named for one in standing):
        raise Refused(f"a transfer of that reference is entered in {run.path} already; it is the same money")
    here = run.path.resolve()
    for other in sorted(here.parent.glob(f"*/{FILE}")):
        if other.parent == here:
            continue
        try:
            funds = accounts.account(one for one in read(other) if one.kind == "funds").funds
        except AssayError:  # another run's damage is that run's matter
            continue
        if any(one.reference == named for one in funds):
            raise Refused(f"a transfer of that reference funds {other.parent}; it is the same money, and stays there")


def _day(stated: str | None, option: str) -> str:
    """A day that has come, as YYYY-MM-DD."""
    today = datetime.now(UTC).date()
    try:
        day = today if stated is None else date.fromisoformat(stated)
    except ValueError:
        raise InputError(f"{option} is {stated!r}; a date such as 2026-11-11 is expected") from None
    if (day - today).days > 1:  # a day may have begun already where the money was received
        raise InputError(f"{option} is {day}, which is still to come; funds are entered when they are received")
    return day.isoformat()
