"""Price readings: what was stated, by whom and when, and what it means in US dollars a machine-hour.

Zero, blank, NaN, negative, stale, from the future, of a unit or currency that is not known, or jumped without a second
source: each is a `NoReading` with its reason, never a cheap price. It asks nobody: see `adapters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from assay.errors import VerificationError
from assay.files.digest import digest
from assay.guard.policy import MOST, MOST_DIGITS, Policy, Rate

SECONDS_PER_HOUR = 3600
SECONDS_PER_MONTH = 730 * SECONDS_PER_HOUR  # 8,760 h ÷ 12, as the large providers count
# What a unit is of, and the seconds that it lasts.
UNITS: dict[str, tuple[str, int]] = {
    f"{thing}-{span}": (thing, seconds)
    for thing in ("machine", "gpu")
    for span, seconds in (("second", 1), ("hour", SECONDS_PER_HOUR), ("month", SECONDS_PER_MONTH))
}
SKEW = timedelta(seconds=60)  # a clock may be so far ahead of ours


@dataclass(frozen=True)
class Reading:
    """A price: `value` in US dollars per hour of the whole machine, and what it was computed from.

    `stated` is in `currency` per `unit` (see `UNITS`), `fetched` and `valid` (the provider's own time, or None) are
    UTC. `catalogue`: a list price, not what a machine costs now. `rate` stands for every currency but US dollars.
    """

    value: Decimal
    stated: Decimal
    unit: str
    currency: str
    rate: Rate | None
    source: str
    fetched: datetime
    valid: datetime | None
    raw_sha256: str
    catalogue: bool = False

    @property
    def at(self) -> datetime:
        """When the price held: by the provider's word, else when it was fetched."""
        return self.valid or self.fetched


@dataclass(frozen=True)
class NoReading:
    """That no price could be had, from whom, when, and why; the digest of what came, if something came."""

    reason: str
    source: str
    fetched: datetime
    raw_sha256: str | None = None


def per_machine_hour(value: Decimal, unit: str, gpus: int) -> Decimal:
    """A price per `unit` as a price per hour of a machine with so many GPUs; KeyError when there is no such unit.

    Exact but for a month's division by 730, which has 28 digits.
    """
    thing, seconds = UNITS[unit]
    return value * (gpus if thing == "gpu" else 1) * SECONDS_PER_HOUR / seconds


def to_usd(value: Decimal, currency: str, rates: Mapping[str, Rate]) -> tuple[Decimal, Rate | None]:
    """The amount in US dollars and the rate that made it so; KeyError for a currency without a stated rate."""
    if currency == "USD":
        return value, None
    rate = rates[currency]
    return value * rate.usd, rate


def amount(stated: object) -> Decimal | str:
    """The decimal number that a provider stated, as text or as a JSON number, or why it is none that can be used.

    A float is taken by its shortest text, which is what stood in the JSON for up to 15 digits.
    """
    if stated is None or (isinstance(stated, str) and not stated.strip()):
        return "no price is stated"
    if isinstance(stated, bool) or not isinstance(stated, (str, int, float, Decimal)):
        return f"the price is {type(stated).__name__}, not a number"
    try:
        plain = str(stated).strip()
        number = Decimal(plain if plain.isascii() and "_" not in plain else "")
    except (InvalidOperation, ValueError):  # ValueError: Python refuses to write integers above 4,300 digits
        return "the price is not a number" + (f" but {stated[:40]!r}" if isinstance(stated, str) else "")
    if not number.is_finite():
        return f"the price is {number}"
    if number <= 0:
        return f"the price is {number}; what costs nothing or less is no price"
    if len(number.as_tuple().digits) > MOST_DIGITS or not -MOST_DIGITS < number.adjusted() < MOST_DIGITS:
        return f"the price has more than {MOST_DIGITS} digits"
    return number


def read(
    stated: object,
    *,
    unit: object,
    currency: object,
    source: str,
    fetched: datetime,
    gpus: int,
    rates: Mapping[str, Rate],
    raw: bytes,
    valid: datetime | None = None,
    catalogue: bool = False,
) -> Reading | NoReading:
    """What was stated as a `Reading` for a machine with `gpus` GPUs, or why it is none."""
    number, sha256 = amount(stated), digest(raw)
    if isinstance(number, str):
        return NoReading(number, source, fetched, sha256)
    if not isinstance(unit, str) or unit not in UNITS:
        return NoReading(f"the unit is {unit!r}; known are {', '.join(UNITS)}", source, fetched, sha256)
    if not isinstance(currency, str) or (currency != "USD" and currency not in rates):
        reason = f"the currency is {currency!r}, for which the policy's rates state no rate with source and date"
        return NoReading(reason, source, fetched, sha256)
    usd, rate = to_usd(number, currency, rates)
    value = per_machine_hour(usd, unit, gpus)
    if value > MOST:
        return NoReading(f"the price is more than {MOST:,f} US dollars an hour", source, fetched, sha256)
    return Reading(value, number, unit, currency, rate, source, fetched, valid, sha256, catalogue)


def stale(candidate: Reading, policy: Policy, now: datetime) -> str | None:
    """Why a reading is of another time than now, or None."""
    age = now - candidate.at
    if age > timedelta(seconds=policy.stale_seconds):
        return f"it is {age.total_seconds():,.0f} s old; stale_seconds is {policy.stale_seconds:,}"
    if age < -SKEW or candidate.fetched - now > SKEW:
        return f"it is of {candidate.at.isoformat()}, which is still to come"
    return None


def factor(one: Decimal, other: Decimal) -> Decimal:
    """How many times the larger of two prices is the smaller; at least 1."""
    return max(one, other) / min(one, other)


def judge(
    previous: Sequence[Reading],
    candidate: Reading | NoReading,
    policy: Policy,
    now: datetime,
    second: Sequence[Reading | NoReading] = (),
) -> Reading | NoReading:
    """The candidate if it may be relied on, else why not. `previous` are valid readings, the newest last.

    A change by more than `jump_factor`, up or down, needs a reading of another source (`second`) that is not stale and
    lies nearer to the candidate than to the previous price, by ratio, and within that factor of it. A catalogue
    does not confirm a live price.
    """
    if isinstance(candidate, NoReading):
        return candidate
    reason = stale(candidate, policy, now)
    if reason is None and previous and factor(candidate.value, previous[-1].value) > policy.jump_factor:
        last = previous[-1].value
        agreeing = [
            one
            for one in second
            if isinstance(one, Reading)
            and one.source != candidate.source
            and (candidate.catalogue or not one.catalogue)
            and stale(one, policy, now) is None
            and factor(one.value, candidate.value) <= policy.jump_factor
            and factor(one.value, candidate.value) < factor(one.value, last)
        ]
        if not agreeing:
            reason = (
                f"it jumped from {text(last)} to {text(candidate.value)} usd_per_hour, beyond jump_factor "
                f"{text(policy.jump_factor)}, and no second source agrees"
            )
    return candidate if reason is None else NoReading(reason, candidate.source, candidate.fetched, candidate.raw_sha256)


def body(found: Reading | NoReading) -> dict[str, Any]:
    """The body of a receipt `price`; see `from_body`."""
    if isinstance(found, NoReading):
        return {
            "usd_per_hour": None, "reason": found.reason, "source": found.source, "fetched": stamp(found.fetched),
            "raw_sha256": found.raw_sha256,
        }  # fmt: skip
    return {
        "usd_per_hour": text(found.value), "stated": text(found.stated), "unit": found.unit, "currency": found.currency,
        "rate": found.rate.model_dump(mode="json") if found.rate else None, "source": found.source,
        "fetched": stamp(found.fetched), "valid": stamp(found.valid) if found.valid else None,
        "raw_sha256": found.raw_sha256, "catalogue": found.catalogue,
    }  # fmt: skip


def from_body(said: Mapping[str, Any]) -> Reading | NoReading:
    """What a receipt `price` says; VerificationError when `body` did not write it."""
    try:
        fetched = moment(said["fetched"])
        if said["usd_per_hour"] is None:
            return NoReading(str(said["reason"]), str(said["source"]), fetched, said["raw_sha256"])
        rate = None if said["rate"] is None else Rate.model_validate(said["rate"])
        valid = None if said["valid"] is None else moment(said["valid"])
        return Reading(
            Decimal(said["usd_per_hour"]), Decimal(said["stated"]), str(said["unit"]), str(said["currency"]), rate,
            str(said["source"]), fetched, valid, str(said["raw_sha256"]), said["catalogue"] is True,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, InvalidOperation) as fault:
        raise VerificationError(f"a receipt price was not written by Assay: {fault!r}") from None


def text(value: Decimal) -> str:
    """A decimal as receipts hold it: no exponent, no zeros at the end of a fraction."""
    plain = format(value, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def stamp(at: datetime) -> str:
    """UTC, RFC 3339, to the microsecond where there is one."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def moment(stated: object) -> datetime:
    """The time that RFC 3339 text states, in UTC; ValueError when it states none with its offset."""
    if not isinstance(stated, str):
        raise ValueError(f"{stated!r} is not a time")
    at = datetime.fromisoformat(stated)
    if at.tzinfo is None:
        raise ValueError(f"{stated!r} is a time without its offset from UTC")
    return at.astimezone(UTC)
