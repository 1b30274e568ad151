"""The money of a run as its receipts state it: funds, bills, metered spend and reserve, and what follows from them.

Estimates and bills stay two things. Spent counts a bill for what it covers and the estimate for the rest. What was not
measured stays null and is named. All arithmetic is decimal; it writes nothing and asks no provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from assay.errors import VerificationError
from assay.ledger.ledger import Receipt

KINDS = ("funds", "bill", "spend", "allocation")
# What is metered, by the group that a bill covers.
GROUPS: dict[str, tuple[str, ...]] = {
    "gpu": ("gpu_useful", "gpu_recomputed", "gpu_overhead", "gpu_provisioning"),
    "disk": ("disk_running", "disk_stopped"),
    "egress": ("egress",),
}
PARTS = tuple(part for parts in GROUPS.values() for part in parts)
MICROSECONDS = 1_000_000
HOUR = 3600 * MICROSECONDS
# The pace of money is taken from the newest so much machine time: a day has the provider's ups and downs in it.
PACE = 24 * HOUR
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Fund:
    """Money received for one purpose of this run."""

    seq: int
    usd: Decimal
    date: str
    purpose: str
    reference: str | None


@dataclass(frozen=True)
class Bill:
    """A provider's bill for [start, stop) (microseconds since 1970) of some groups; allocation None: of all."""

    seq: int
    usd: Decimal
    start: int
    stop: int
    covers: tuple[str, ...]
    allocation: str | None
    provider: str | None


@dataclass(frozen=True)
class Spend:
    """One interval [start, stop) of an allocation, in US dollars by part; None: not measured.

    `useful` and `recomputed` count updates. `usd_per_hour` None: no price was known, so that the GPU parts are None;
    `seq` -1: nobody metered it, see `Account.unmetered`.
    """

    seq: int
    allocation: str | None
    state: str
    start: int
    stop: int
    usd: dict[str, Decimal | None]
    usd_per_hour: Decimal | None
    useful: int
    recomputed: int

    def share(self, part: str, microseconds: int) -> Decimal:
        """What so much of the interval cost of one part; nothing where it was not measured."""
        return (self.usd[part] or Decimal(0)) * microseconds / (self.stop - self.start)

    @property
    def seconds(self) -> Decimal:
        """How long the interval is."""
        return Decimal(self.stop - self.start) / MICROSECONDS


@dataclass
class Account:
    """Everything about money that a ledger states, in order; replaced statements are left out."""

    funds: list[Fund] = field(default_factory=list)
    bills: list[Bill] = field(default_factory=list)
    spends: list[Spend] = field(default_factory=list)
    # What `allocation` receipts say of each, `began` and `ended` in microseconds among it.
    allocations: dict[str, dict[str, Any]] = field(default_factory=dict)
    reserve: dict[str, Any] | None = None  # the newest statement: `usd` (or null), `how`, `parts`
    until: dict[str | None, int] = field(default_factory=dict)  # metered so far, by allocation
    prices: dict[str | None, Decimal] = field(default_factory=dict)  # the last reading metered with, by allocation
    late: tuple[int, int] = (0, 0)  # microseconds of useful and recomputed updates that the next interval takes up
    reached: int | None = None  # updates below this were done at least once while somebody metered
    metrics_bytes: int = 0  # of the metrics file, taken up by the meter
    first_reached: int | None = None  # the updates that were done before metering began
    # The higher price that was read and that nobody confirmed, since the last reading; by allocation.
    unconfirmed: dict[str | None, Decimal] = field(default_factory=dict)
    highest: Decimal | None = None  # the highest price an hour: what GPU time without any price is counted at

    @property
    def purpose(self) -> str | None:
        """What the funds are for."""
        return self.funds[0].purpose if self.funds else None

    @property
    def received(self) -> Decimal | None:
        """Funds in US dollars; None when none were entered."""
        return sum((one.usd for one in self.funds), Decimal(0)) if self.funds else None

    @property
    def unmetered(self) -> list[Spend]:
        """GPU time of stated allocations that no interval covers, at the price that was stated or read for each.

        An allocation that is not said to have ended lasted, as far as is known, until another began, or until the
        newest time that was metered.
        """
        met: dict[str | None, list[Spend]] = {}
        for one in self.spends:
            met.setdefault(one.allocation, []).append(one)
        found = []
        known = max(self.until.values(), default=None)
        for name, said in self.allocations.items():
            if "began" not in said:
                continue
            later = [one["began"] for one in self.allocations.values() if one.get("began", 0) > said["began"]]
            end = said.get("ended", min(later, default=known))
            stated = [one for one in (_price(said), self.prices.get(name)) if one is not None]
            for start, stop in _gaps(said["began"], end or said["began"], [*met.get(name, ()), *met.get(None, ())]):
                none = dict[str, Decimal | None].fromkeys(PARTS)
                found.append(Spend(-1, name, "running", start, stop, none, max(stated, default=None), 0, 0))
        return found

    @property
    def nobody_meters(self) -> str | None:
        """The newest allocation when it has not ended and nothing of it was metered: what it costs is not known."""
        began = [(one["began"], name) for name, one in self.allocations.items() if "began" in one]
        if not began:
            return None
        start, name = max(began)
        met = any(one.allocation in (name, None) and one.stop > start for one in self.spends)
        return None if met or "ended" in self.allocations[name] else name

    @property
    def unpriced(self) -> int:
        """Microseconds of GPU time for which no price was known and that no bill covers."""
        return sum(
            one.stop - one.start - self._billed(one, "gpu")
            for one in (*self.spends, *self.unmetered)
            if one.usd["gpu_useful"] is None and one.usd_per_hour is None
        )

    @property
    def priced(self) -> bool:
        """Whether every second of GPU time has a price or a bill."""
        return self.highest is not None or not self.unpriced

    @property
    def estimated(self) -> Decimal | None:
        """What was metered, by all parts that were measured; None when nothing was, or GPU time at no known price."""
        return total([self.cost(one) for one in self.spends]) if self.spends else None

    @property
    def billed(self) -> Decimal | None:
        """The sum of the bills; None when none was entered."""
        return sum((one.usd for one in self.bills), Decimal(0)) if self.bills else None

    def cost(self, spend: Spend, group: str | None = None, microseconds: int | None = None) -> Decimal | None:
        """What an interval is estimated to have cost, of one group or of all, or so much of it.

        GPU time without a price is counted at `highest`, and is None while there is none; what else was not measured
        is nothing, and is named by `not_measured`.
        """
        length = spend.stop - spend.start if microseconds is None else microseconds
        parts = PARTS if group is None else GROUPS[group]
        known = sum((spend.share(part, length) for part in parts), Decimal(0))
        if group in (None, "gpu") and spend.usd["gpu_useful"] is None and length:
            price = self.highest if spend.usd_per_hour is None else spend.usd_per_hour
            return None if price is None else known + price * length / HOUR
        return known

    @property
    def spent(self) -> Decimal | None:
        """Bills, the estimate of what no bill covers, and GPU time that nobody metered; None when there is none of it.

        It is at least so much, and more, while `priced` is False or `nobody_meters` the newest allocation.
        """
        intervals = [*self.spends, *self.unmetered]
        if not intervals and not self.bills:
            return None
        whole = self.billed or Decimal(0)
        for one in intervals:
            for group in GROUPS:
                left = one.stop - one.start - self._billed(one, group)
                whole += self.cost(one, group, left) or Decimal(0)
        return whole

    def _billed(self, spend: Spend, group: str) -> int:
        """Microseconds of the interval that a bill covers."""
        bills = [bill for bill in self.bills if group in bill.covers and bill.allocation in (None, spend.allocation)]
        return _overlap(spend.start, spend.stop, bills)

    @property
    def remaining(self) -> Decimal | None:
        """Funds, less spent, less the reserve; None while one of them is unknown."""
        reserve = self.reserve_usd
        if self.received is None or reserve is None or not self.priced or self.nobody_meters is not None:
            return None
        return self.received - (self.spent or Decimal(0)) - reserve

    @property
    def reserve_usd(self) -> Decimal | None:
        """The reserve that was stated last."""
        usd = self.reserve["usd"] if self.reserve else None
        return None if usd is None else Decimal(usd)

    def pace(self) -> tuple[Decimal, int] | None:
        """US dollars, all causes of spend included, and useful updates, of the newest 24 hours of machine time.

        None when no update was useful in them, or they cost nothing or nobody knows what.
        """
        usd, useful, length = Decimal(0), 0, 0
        for one in sorted([*self.spends, *self.unmetered], key=lambda one: one.stop, reverse=True):
            if length >= PACE:
                break
            cost = self.cost(one)
            if cost is None:
                return None
            usd, useful = usd + cost, useful + one.useful
            length += one.stop - one.start if one.state != "stopped" else 0
        return (usd, useful) if useful and usd > 0 else None

    def affordable(self, step: int | None) -> int | None:
        """The step that the remaining money reaches from `step` at the present pace; None while one is unknown."""
        remaining, pace = self.remaining, self.pace()
        if step is None or remaining is None or pace is None:
            return None
        usd, useful = pace
        return step + max(0, int(remaining * useful // usd))

    def unknown(self, step: int | None) -> str | None:
        """Why `affordable` is not known, or None when it is."""
        if self.received is None:
            return "no budget stated"
        if self.reserve_usd is None:
            return "not measured: no reserve is stated"
        if not self.priced:
            return "not measured: GPU time was spent at a price that nobody knows"
        if self.nobody_meters is not None:
            return f"not measured: nobody has metered allocation {self.nobody_meters} yet"
        if step is None or self.pace() is None:
            return "not measured: no useful update was metered yet"
        return None

    def estimate_of(self, bill: Bill) -> Decimal | None:
        """What was metered of what the bill covers; None when nothing was, or GPU time at a price that nobody knows."""
        met = [
            (one, min(one.stop, bill.stop) - max(one.start, bill.start))
            for one in self.spends
            if one.start < bill.stop and bill.start < one.stop and bill.allocation in (None, one.allocation)
        ]
        if not met:
            return None
        return total([self.cost(one, group, length) for one, length in met for group in bill.covers])

    def not_measured(self) -> list[str]:
        """The parts of the spend that some interval has no figure for."""
        missing = [part for part in PARTS if any(one.usd[part] is None for one in self.spends)]
        return [*(["gpu"] if "gpu_useful" in missing else []), *(part for part in missing if part[:3] != "gpu")]


def account(receipts: Iterable[Receipt]) -> Account:
    """The account of receipts in order; other kinds are passed over. VerificationError for what Assay did not write."""
    result = Account()
    for receipt in receipts:
        if receipt.kind in KINDS:
            take(result, receipt)
    return result


def take(result: Account, receipt: Receipt) -> None:
    """Add one receipt of `KINDS`."""
    said = receipt.body
    try:
        if receipt.kind == "funds":
            fund = Fund(receipt.seq, decimal(said["usd"]), said["date"], said["purpose"], said.get("reference"))
            result.funds = [one for one in result.funds if one.seq != said.get("replaces")] + [fund]
            result.reserve = said.get("reserve") or result.reserve
        elif receipt.kind == "bill":
            bill = Bill(
                receipt.seq, decimal(said["usd"]), moment(said["start"]), moment(said["stop"]), tuple(said["covers"]),
                said["allocation"], said["provider"],
            )  # fmt: skip
            if not bill.start < bill.stop or not set(bill.covers) <= set(GROUPS):
                raise ValueError("a bill covers a period and known groups")
            result.bills = [one for one in result.bills if one.seq != said.get("replaces")] + [bill]
        elif receipt.kind == "spend":
            _spend(result, receipt, said)
        elif isinstance(said.get("allocation"), str):
            known = result.allocations.setdefault(said["allocation"], {})
            known.update(said)
            if said.get("event") in ("began", "ended"):
                known[said["event"]] = moment(said["time"])
            _price(known)
        if result.reserve is not None and result.reserve["usd"] is not None:
            decimal(result.reserve["usd"])
    except (KeyError, TypeError, ValueError, OverflowError, InvalidOperation) as fault:
        raise VerificationError(f"receipt {receipt.seq} ({receipt.kind}) was not written by Assay: {fault!r}") from None


def _spend(result: Account, receipt: Receipt, said: Mapping[str, Any]) -> None:
    """A metered interval, cut where another guard metered the same time or the same updates before."""
    usd = {part: None if said["usd"][part] is None else decimal(said["usd"][part]) for part in PARTS}
    price = None if said["usd_per_hour"] is None else decimal(said["usd_per_hour"])
    start, stop, allocation = moment(said["start"]), moment(said["stop"]), said["allocation"]
    if not start < stop:
        raise ValueError("an interval begins before it ends")
    seen = said["metrics"]
    if result.reached is None:
        result.reached = result.first_reached = int(seen["first"])
    useful = max(0, int(seen["reached"]) - max(result.reached, int(seen["first"])))
    recomputed = int(seen["recomputed"]) if int(seen["start"]) >= result.metrics_bytes else 0
    result.reached = max(result.reached, int(seen["reached"]))
    result.metrics_bytes = max(result.metrics_bytes, int(seen["stop"]))
    result.reserve = said["reserve"] or result.reserve
    result.late = int(said["late"]["useful"]), int(said["late"]["recomputed"])
    read = said["price"] or {}
    if read.get("usd_per_hour") is not None:
        result.prices[allocation] = decimal(read["usd_per_hour"])
    if read.get("read"):
        result.unconfirmed.pop(allocation, None)
    if read.get("unconfirmed_usd_per_hour") is not None:
        result.unconfirmed[allocation] = decimal(read["unconfirmed_usd_per_hour"])
    whole = Spend(receipt.seq, allocation, said["state"], start, stop, usd, price, useful, recomputed)
    if price is not None:
        result.highest = max(price, result.highest or price)
    begin = max(start, result.until.get(allocation, start))
    if begin < stop:
        cut = {part: None if usd[part] is None else whole.share(part, stop - begin) for part in PARTS}
        result.spends.append(replace(whole, start=begin, usd=cut))
        result.until[allocation] = stop


def _price(allocation: Mapping[str, Any]) -> Decimal | None:
    """What a launcher says that a machine costs an hour."""
    stated = allocation.get("usd_per_machine_hour")
    return None if stated is None else decimal(stated)


def _gaps(start: int, stop: int, spends: Iterable[Spend]) -> list[tuple[int, int]]:
    """The parts of [start, stop) that no interval covers."""
    found, at = [], start
    for begin, end in sorted((one.start, one.stop) for one in spends):
        if at < min(begin, stop):
            found.append((at, min(begin, stop)))
        at = max(at, end)
    return [*found, (at, stop)] if at < stop else found


def total(values: Sequence[Decimal | None]) -> Decimal | None:
    """Their sum; None when one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known, Decimal(0)) if len(known) == len(values) else None


def _overlap(start: int, stop: int, bills: Iterable[Bill]) -> int:
    """Microseconds of [start, stop) that at least one bill covers."""
    covered, at = 0, start
    for begin, end in sorted((max(bill.start, start), min(bill.stop, stop)) for bill in bills):
        begin = max(begin, at)
        if begin < end:
            covered, at = covered + end - begin, end
    return covered


def decimal(stated: object) -> Decimal:
    """A decimal string of a receipt; ValueError for anything else."""
    if not isinstance(stated, str) or not (value := Decimal(stated)).is_finite():
        raise ValueError(f"{stated!r} is not a decimal string")
    return value


def moment(stamp: object) -> int:
    """Microseconds since 1970 of a time as receipts hold it; ValueError for anything else."""
    if not isinstance(stamp, str) or (at := datetime.fromisoformat(stamp)).tzinfo is None:
        raise ValueError(f"{stamp!r} is not a time in UTC")
    return (at - _EPOCH) // timedelta(microseconds=1)


def instant(microseconds: int) -> datetime:
    """The time that `moment` made a number of."""
    return _EPOCH + timedelta(microseconds=microseconds)
