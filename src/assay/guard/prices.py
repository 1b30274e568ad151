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
from assay.recipe.fields import short

SECONDS_PER_HOUR = 3600
SECONDS_PER_MONTH = 730 * SECONDS_PER_HOUR  # 8,760 h ÷ 12, as the large providers count
# What a unit is of, and the seconds that it lasts.
UNITS: dict[str, tuple[str, int]] = {
    f"{thing}-{span}": (thing, seconds)
    for thing in ("machine", "gpu")
    for span, seconds in (("second", 1), ("hour", SECONDS_PER_HOUR), ("month", SECONDS_PER_MONTH))
}
SKEW = timedelta(seconds=60)  # a clock may be so far ahead of ours
FIXED = "fixed"  # the source of a price in a contract: it never jumps, and is mended in the policy
LONGEST_REASON = 400  # characters: reasons quote foreign words, and stand in receipts


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
    """That no price could be had, from whom, when, and why; the digest of what came, if something came.

    `unconfirmed`: a price was read that nobody confirmed; until then the machine may cost so many US dollars an hour,
    the higher of that price and of the one that it contradicts.
    """

    reason: str
    source: str
    fetched: datetime
    raw_sha256: str | None = None
    unconfirmed: Decimal | None = None

    def __post_init__(self) -> None:
        """Cut a reason that is too long to be read."""
        if len(self.reason) > LONGEST_REASON:
            object.__setattr__(self, "reason", self.reason[: LONGEST_REASON - 1] + "…")


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
        return NoReading(f"the unit is {short(unit)}; known are {', '.join(UNITS)}", source, fetched, sha256)
    if not isinstance(currency, str) or (currency != "USD" and currency not in rates):
        reason = f"the currency is {short(currency)}, for which the policy's rates state no rate with source and date"
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

    A change by more than `jump_factor`, up or down, from the source's own last price needs a reading of another source
    (`second`) that is not stale and lies nearer to the candidate than to that price, by ratio, and within that factor
    of it. A first reading of its source needs one only where the others contradict it by more than that factor. A
    catalogue neither confirms nor contradicts a live price, and what a contract fixes needs nobody.
    """
    if isinstance(candidate, NoReading):
        return candidate
    most = policy.jump_factor

    def none(reason: str, unconfirmed: Decimal | None = None) -> NoReading:
        return NoReading(reason, candidate.source, candidate.fetched, candidate.raw_sha256, unconfirmed)

    reason = stale(candidate, policy, now)
    if reason is not None:
        return none(reason)
    if candidate.source == FIXED:
        return candidate
    others = [
        one.value
        for one in second
        if isinstance(one, Reading)
        and one.source != candidate.source
        and (candidate.catalogue or not one.catalogue)
        and stale(one, policy, now) is None
    ]
    agreeing = [one for one in others if factor(one, candidate.value) <= most]
    before = own(previous, candidate)
    if before is None:
        if agreeing or not others:
            return candidate
        return none(
            f"it is the first of its source and says {text(candidate.value)} usd_per_hour, beyond jump_factor "
            f"{text(most)} from the {text(max(others))} of another source",
            max(candidate.value, *others),
        )
    last = before.value
    near = [one for one in agreeing if factor(one, candidate.value) < factor(one, last)]
    if near or factor(candidate.value, last) <= most:
        return candidate
    return none(
        f"it jumped from {text(last)} to {text(candidate.value)} usd_per_hour, beyond jump_factor {text(most)}, and "
        "no second source agrees",
        max(candidate.value, last),
    )


def own(previous: Sequence[Reading], candidate: Reading) -> Reading | None:
    """The newest of earlier readings that is of the candidate's source: prices of two sources are no jump."""
    return next((one for one in reversed(previous) if one.source == candidate.source), None)


def body(found: Reading | NoReading) -> dict[str, Any]:
    """The body of a receipt `price`; see `from_body`."""
    if isinstance(found, NoReading):
        return {
            "usd_per_hour": None, "reason": found.reason, "source": found.source, "fetched": stamp(found.fetched),
            "raw_sha256": found.raw_sha256,
            "unconfirmed_usd_per_hour": None if found.unconfirmed is None else text(found.unconfirmed),
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
            most = said.get("unconfirmed_usd_per_hour")
            unconfirmed = None if most is None else Decimal(most)
            return NoReading(str(said["reason"]), str(said["source"]), fetched, said["raw_sha256"], unconfirmed)
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
        raise ValueError(f"{short(stated)} is not a time")
    try:
        at = datetime.fromisoformat(stated)
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: in UTC it lies outside the years 1 to 9999
        raise ValueError(f"{short(stated)} is not a time such as 2026-11-11T15:29:00Z") from None
    raise ValueError(f"{short(stated)} is a time without its offset from UTC")
