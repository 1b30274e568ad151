"""A price is a reading only if everything about it holds; units and currencies are part of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import VerificationError
from assay.files.digest import digest
from assay.guard.policy import Policy, Rate, from_yaml
from assay.guard.prices import (
    UNITS,
    NoReading,
    Reading,
    amount,
    body,
    factor,
    from_body,
    judge,
    per_machine_hour,
    read,
    to_usd,
)

NOW = datetime(2026, 11, 11, 15, 29, tzinfo=UTC)
EUR = Rate(usd=Decimal("1.08"), source="ECB", date="2026-11-11")
POLICY = from_yaml('name: p\nmachine: {gpus: 8}\nstale_seconds: 900\njump_factor: "2"\n', "p")

prices = st.decimals(min_value="0.0001", max_value="100000", places=6, allow_nan=False, allow_infinity=False)
units = st.sampled_from(sorted(UNITS))
machines = st.integers(1, 64)


def stated(value: object, **changes: Any) -> Reading | NoReading:
    """What a provider states, of eight GPUs, in US dollars per machine-hour unless said otherwise."""
    told = {"unit": "machine-hour", "currency": "USD", "source": "a", "fetched": NOW, "gpus": 8, "rates": {"EUR": EUR},
            "raw": b"raw"}  # fmt: skip
    return read(value, **(told | changes))


def reading(value: object, **changes: Any) -> Reading:
    found = stated(value, **changes)
    assert isinstance(found, Reading), found
    return found


def refused(found: Reading | NoReading) -> str:
    assert isinstance(found, NoReading), found
    return found.reason


@given(prices, machines)
def test_per_gpu_is_per_machine_times_its_gpus(value: Decimal, gpus: int) -> None:
    for span in ("second", "hour", "month"):
        one = per_machine_hour(value, f"machine-{span}", gpus)
        assert per_machine_hour(value, f"machine-{span}", gpus) == one, "a machine's price does not depend on its GPUs"
        assert per_machine_hour(value, f"gpu-{span}", gpus) == per_machine_hour(value * gpus, f"machine-{span}", gpus)


@given(prices, machines)
def test_an_hour_has_3600_seconds_and_a_month_730_hours(value: Decimal, gpus: int) -> None:
    for thing in ("machine", "gpu"):
        hour = per_machine_hour(value, f"{thing}-hour", gpus)
        assert per_machine_hour(value, f"{thing}-second", gpus) == hour * 3600
        assert per_machine_hour(value * 730, f"{thing}-month", gpus) == hour


@given(prices, units, machines)
def test_conversion_is_the_rational_number_to_28_digits(value: Decimal, unit: str, gpus: int) -> None:
    thing, seconds = UNITS[unit]
    exact = Fraction(value) * (gpus if thing == "gpu" else 1) * 3600 / seconds
    assert abs(Fraction(per_machine_hour(value, unit, gpus)) - exact) <= exact / 10**26


@given(prices, prices, units, machines)
def test_conversion_keeps_the_order_of_prices(one: Decimal, other: Decimal, unit: str, gpus: int) -> None:
    first, second = (per_machine_hour(value, unit, gpus) for value in (one, other))
    assert (first < second) == (one < other)


@given(prices, st.decimals(min_value="0.001", max_value="1000", places=4, allow_nan=False, allow_infinity=False))
def test_another_currency_counts_at_its_stated_rate_and_keeps_it(value: Decimal, usd: Decimal) -> None:
    rate = Rate(usd=usd, source="central bank", date="2026-11-11")
    assert to_usd(value, "PLN", {"PLN": rate}) == (value * usd, rate)
    found = reading(value, currency="PLN", rates={"PLN": rate})
    assert (found.value, found.stated, found.rate) == (value * usd, value, rate)


def test_us_dollars_need_no_rate_and_other_currencies_are_no_reading_without_one() -> None:
    assert reading("23.92").rate is None
    for currency in ("GBP", "", None, "usd", 3, "€"):
        assert "currency" in refused(stated("23.92", currency=currency))


def test_a_machine_price_said_to_be_per_gpu_is_eight_times_over_and_the_unit_says_so() -> None:
    assert reading("2.99", unit="gpu-hour").value == reading("23.92", unit="machine-hour").value
    for unit in ("hour", "gpu", "", None, "gpu-day", 8):
        assert "unit" in refused(stated("2.99", unit=unit))


@pytest.mark.parametrize(
    "value",
    [None, "", "  ", "NaN", "-NaN", "sNaN", "inf", "-Infinity", "0", "0.00", "-0", "-1.5", 0, 0.0, -2, True, False,
     [], {}, "free", "1,50", "$2", "1e99", "0x10", "1_000", "٣", "9" * 5000],
)  # fmt: skip
def test_what_is_no_positive_number_is_no_reading(value: object) -> None:
    assert isinstance(amount(10**5000), str), "Python refuses to print so many digits"
    found = stated(value)
    assert refused(found)
    assert isinstance(found, NoReading)
    assert found.raw_sha256 == digest(b"raw"), "what came is kept as a digest"


@given(st.one_of(st.text("0123456789.eE+-_, naif٣", max_size=9), st.floats(), st.integers(), st.booleans()))
def test_whatever_is_stated_gives_a_positive_price_or_a_reason(value: object) -> None:
    found = amount(value)
    assert found if isinstance(found, str) else found > 0


def test_a_machine_of_more_than_a_million_million_dollars_an_hour_is_no_reading() -> None:
    assert isinstance(stated("1e12"), Reading)
    for value, unit in (("1000000000001", "machine-hour"), ("1e11", "machine-second"), ("2e11", "gpu-hour")):
        assert "more than 1,000,000,000,000 US dollars" in refused(stated(value, unit=unit))


@given(prices)
def test_a_json_number_is_the_number_that_stood_there(value: Decimal) -> None:
    assert amount(float(value)) == value


@given(prices, units, st.sampled_from(["USD", "EUR"]), st.booleans(), st.booleans())
def test_receipts_hold_readings_exactly(value: Decimal, unit: str, currency: str, listed: bool, timed: bool) -> None:
    found = reading(value, unit=unit, currency=currency, catalogue=listed, valid=NOW if timed else None)
    assert from_body(body(found)) == found


def test_receipts_hold_that_there_was_none() -> None:
    found = stated("0")
    assert from_body(body(found)) == found
    assert body(found)["usd_per_hour"] is None
    jumped = judged(reading(90), reading(20))
    assert from_body(body(jumped)) == jumped
    del (old := body(jumped))["unconfirmed_usd_per_hour"]
    assert from_body(old) == NoReading(jumped.reason, "a", NOW, digest(b"raw")), "written before there was the key"
    for damaged in ({}, {**body(reading(1)), "usd_per_hour": "x"}, {**body(reading(1)), "fetched": "2026-11-11"}):
        with pytest.raises(VerificationError):
            from_body(damaged)


def judged(candidate: Reading | NoReading, *previous: Reading, second: tuple[Reading | NoReading, ...] = ()) -> Any:
    return judge(previous, candidate, POLICY, NOW, second)


def test_an_old_reading_is_none_by_the_providers_time_before_ours() -> None:
    def at(seconds: int) -> datetime:
        return NOW - timedelta(seconds=seconds)

    assert isinstance(judged(reading(20, fetched=at(900))), Reading)
    assert "old" in refused(judged(reading(20, fetched=at(901))))
    assert "old" in refused(judged(reading(20, valid=at(901)))), "fetched now, but the provider says it is older"
    assert isinstance(judged(reading(20, fetched=at(-60))), Reading), "clocks may differ a little"
    assert "to come" in refused(judged(reading(20, fetched=at(-61))))
    assert "to come" in refused(judged(reading(20, valid=at(-61))))


@given(prices, prices)
def test_a_jump_beyond_the_factor_up_or_down_is_no_reading(last: Decimal, value: Decimal) -> None:
    found = judged(reading(value), reading(last))
    assert isinstance(found, Reading) == (max(value, last) <= 2 * min(value, last))
    assert factor(value, last) == factor(last, value) >= 1


def test_a_second_source_makes_a_jump_believable_if_it_says_so_itself() -> None:
    last, candidate = reading(20), reading(50)
    assert "jumped from 20 to 50" in refused(judged(candidate, last))
    assert judged(candidate, last, second=(reading(48, source="b"),)) == candidate
    for useless in (
        reading(50),  # the same source again
        reading(21, source="b"),  # it says that nothing jumped
        reading(31, source="b"),  # nearer to the old price
        reading(150, source="b"),  # far beyond
        reading(48, source="b", fetched=NOW - timedelta(hours=1)),  # of another time
        reading(48, source="b", catalogue=True),  # a list price knows nothing of now
        stated(None, source="b"),
    ):
        assert "no second source" in refused(judged(candidate, last, second=(useless,)))


def test_a_price_that_stays_up_after_a_jump_stays_unbelieved_without_a_second_source() -> None:
    last = reading(20)
    assert [isinstance(judged(reading(value), last), NoReading) for value in (50, 50, 51)] == [True] * 3


def test_a_refused_price_is_kept_as_what_the_machine_may_cost() -> None:
    assert judged(reading(90), reading(20)).unconfirmed == 90
    assert judged(reading(2), reading(20)).unconfirmed == 20, "the higher of both"
    assert judged(reading(90, fetched=NOW - timedelta(hours=1)), reading(20)).unconfirmed is None, (
        "it is of another time"
    )


def test_the_first_reading_has_nothing_to_jump_from() -> None:
    assert isinstance(judged(reading("99999")), Reading)


def test_what_was_no_reading_stays_none() -> None:
    none = stated("")
    assert judged(none, reading(20)) is none


def test_the_policy_is_what_decides() -> None:
    wide: Policy = from_yaml('name: p\nmachine: {gpus: 8}\njump_factor: "10"\n', "p")
    assert isinstance(judge([reading(20)], reading(150), wide, NOW), Reading)
