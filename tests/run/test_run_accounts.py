"""Money adds up: funds, bills, estimates and reserve stay apart, nothing is counted twice, unknown is never zero."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import VerificationError
from assay.ledger.ledger import Receipt
from assay.run.accounts import GROUPS, HOUR, PARTS, Account, account, instant, moment

START = moment("2026-11-10T00:00:00Z")
HOURS = st.integers(0, 20)
FEW = settings(max_examples=40)


def at(hours: float) -> str:
    return instant(START + round(hours * HOUR)).isoformat().replace("+00:00", "Z")


def funds(usd: str = "500", **more: Any) -> tuple[str, dict[str, Any]]:
    return "funds", {"usd": usd, "date": "2026-11-10", "purpose": "main", "reference": None, "reserve": None} | more


def bill(usd: str, start: float, stop: float, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"usd": usd, "start": at(start), "stop": at(stop), "covers": list(GROUPS), "allocation": None}
    return "bill", {**body, "provider": None, "replaces": None} | more


def spend(
    start: float, stop: float, usd: dict[str, str | None] | None = None, **more: Any
) -> tuple[str, dict[str, Any]]:
    """An interval of eight GPUs at 20 dollars an hour, useful as a whole, unless said otherwise."""
    parts: dict[str, str | None] = dict.fromkeys(PARTS, "0")
    parts |= usd if usd is not None else {"gpu_useful": format(Decimal(str(stop - start)) * 20, "f")}
    reached = more.pop("reached", 0)
    seen = {"start": 0, "stop": 0, "first": 0, "reached": reached, "useful": 0, "recomputed": 0} | more.pop(
        "metrics", {}
    )
    return "spend", {
        "allocation": "a", "state": "running", "start": at(start), "stop": at(stop), "usd": parts, "usd_per_hour": "20",
        "price": {"usd_per_hour": "20"}, "metrics": seen, "late": {"useful": 0, "recomputed": 0}, "reserve": None,
    } | more  # fmt: skip


def told(*receipts: tuple[str, dict[str, Any]]) -> Account:
    return account(Receipt(seq, at(0), kind, body, "") for seq, (kind, body) in enumerate(receipts))


def reserve(usd: str | None) -> dict[str, Any]:
    return {"usd": usd, "how": "set", "parts": {}, "from": {}}


def test_nothing_stated_is_unknown_and_not_zero() -> None:
    money = told()
    assert (money.received, money.estimated, money.billed, money.spent, money.remaining) == (None,) * 5
    assert money.unknown(3) == "no budget stated"
    assert told(funds()).unknown(3) == "not measured: no reserve is stated"
    assert told(funds(reserve=reserve("25"))).remaining == 475
    assert told(funds(reserve=reserve("25"))).affordable(3) is None, "no update was metered"


def test_affordable_updates_follow_from_useful_updates_per_dollar() -> None:
    money = told(funds("500", reserve=reserve("20")), spend(0, 2, reached=100))
    assert (money.estimated, money.remaining) == (40, 440)
    assert money.affordable(100) == 100 + 440 * 100 // 40
    assert money.unknown(100) is None


@FEW
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12),
       st.integers(1, 2000))  # fmt: skip
def test_recomputed_updates_cost_and_buy_nothing(intervals: list[tuple[int, int, int]], received: int) -> None:
    """Each interval: hours, new updates, updates done again. What is affordable never overspends what remains."""
    receipts, at_hour, reached = [funds(str(received), reserve=reserve("7"))], 0, 0
    for number, (hours, new, again) in enumerate(intervals):
        seen = {"start": number, "stop": number + 1, "recomputed": again}
        receipts.append(spend(at_hour, at_hour + hours, reached=reached + new, metrics=seen))
        at_hour, reached = at_hour + hours, reached + new
    money = told(*receipts)
    assert money.estimated == 20 * at_hour
    assert sum(one.useful for one in money.spends) == reached
    assert sum(one.recomputed for one in money.spends) == sum(again for _, _, again in intervals)
    pace, affordable = money.pace(), money.affordable(reached)
    assert (affordable is None) == (pace is None)
    if pace is not None and affordable is not None and money.remaining is not None:
        usd, useful = pace
        more = affordable - reached
        assert more >= 0
        assert more * usd <= max(money.remaining, 0) * useful, "so many cost no more than remains"
        assert (more + 1) * usd > money.remaining * useful, "one more would"


def test_the_pace_is_that_of_the_newest_day_of_machine_time() -> None:
    dear = spend(0, 24, {"gpu_useful": "9600"}, reached=100)
    halt = spend(24, 100, {"disk_stopped": "5"}, state="stopped", reached=100)
    money = told(dear, halt, spend(100, 124, reached=300))
    assert money.pace() == (480, 200), "the dear day is out of it"
    money = told(dear, halt, spend(100, 112, reached=300))
    assert money.pace() == (240 + 5 + 9600, 300), "half a day is not enough, and what stands between counts"


def test_a_bill_counts_for_what_it_covers_and_the_estimate_for_the_rest() -> None:
    parts = {"gpu_useful": "100", "disk_running": "10", "egress": "1"}
    receipts = [funds("500", reserve=reserve("0")), spend(0, 10, parts), spend(10, 20, parts)]
    assert told(*receipts).spent == 222
    whole = told(*receipts, bill("90", 0, 10))
    assert (whole.estimated, whole.billed, whole.spent, whole.remaining) == (222, 90, 90 + 111, 500 - 201)
    assert told(*receipts, bill("90", 0, 10, covers=["gpu"])).spent == 90 + 11 + 111
    assert told(*receipts, bill("90", 5, 15, covers=["gpu"])).spent == 90 + 50 + 50 + 22, "half of each interval"
    assert told(*receipts, bill("90", 0, 10, allocation="b")).spent == 90 + 222, "a bill for another allocation"
    assert told(bill("90", 0, 10)).spent == 90


@FEW
@given(st.lists(st.tuples(HOURS, st.integers(1, 8), st.sampled_from(sorted(GROUPS))), max_size=6))
def test_no_hour_is_paid_twice_and_none_is_lost(bills: list[tuple[int, int, str]]) -> None:
    """Bills of nothing leave the estimates of the hours that none covers, for each group."""
    parts: dict[str, str | None] = {"gpu_useful": "3", "disk_running": "5", "egress": "7"}
    worth = {"gpu": 3, "disk": 5, "egress": 7}
    money = told(*(spend(hour, hour + 1, parts) for hour in range(20)),
                 *(bill("0", start, start + length, covers=[group]) for start, length, group in bills))  # fmt: skip
    left = sum(
        worth[group]
        for group in GROUPS
        for hour in range(20)
        if not any(what == group and start <= hour < start + length for start, length, what in bills)
    )
    assert money.spent == left
    assert money.estimated == 20 * 15


def test_the_difference_is_between_the_bill_and_the_estimate_of_the_same() -> None:
    parts = {"gpu_useful": "100", "disk_running": "10", "egress": "1"}
    money = told(spend(0, 10, parts), bill("60", 5, 30, covers=["gpu", "disk"]), bill("1", 20, 30))
    assert [money.estimate_of(one) for one in money.bills] == [55, None]


def test_a_replaced_statement_counts_no_more() -> None:
    money = told(funds("5000"), funds("500", replaces=0), bill("9", 0, 1), bill("8", 0, 1, replaces=2))
    assert (money.received, money.billed) == (500, 8)


@FEW
@given(st.lists(st.tuples(HOURS, st.integers(1, 10)), min_size=1, max_size=8))
def test_two_guards_that_meter_the_same_time_charge_it_once(intervals: list[tuple[int, int]]) -> None:
    money = told(*(spend(start, start + length) for start, length in sorted(intervals)))
    hours = {hour for start, length in intervals for hour in range(start, start + length)}
    assert money.estimated == 20 * len(hours)


def test_two_guards_that_saw_the_same_updates_count_them_once() -> None:
    seen = {"start": 0, "stop": 900, "recomputed": 4}
    money = told(spend(0, 1, reached=50, metrics=seen), spend(1, 2, reached=60, metrics=seen))
    assert [(one.useful, one.recomputed) for one in money.spends] == [(50, 4), (10, 0)]


def test_other_allocations_run_at_the_same_time() -> None:
    money = told(spend(0, 10), spend(2, 12, {"disk_stopped": "3"}, allocation="b", state="stopped"))
    assert money.estimated == 203


def test_gpu_time_without_a_price_is_not_free() -> None:
    none = dict.fromkeys(GROUPS["gpu"], None)
    first = spend(0, 2, none, usd_per_hour=None, price=None)
    alone = told(funds(reserve=reserve("0")), first)
    assert (alone.remaining, alone.affordable(1), alone.unpriced) == (None, None, 2 * HOUR)
    assert "nobody knows" in str(alone.unknown(1))
    later = told(funds(reserve=reserve("0")), first, spend(2, 3, usd_per_hour="24"))
    assert later.remaining == 500 - 20 - 2 * 24, "counted at the highest price that was known"
    assert later.not_measured() == ["gpu"]


def test_what_is_not_measured_is_named() -> None:
    money = told(spend(0, 1, {"egress": None}), spend(1, 2, {"disk_running": None}))
    assert money.not_measured() == ["disk_running", "egress"]


def test_the_newest_reserve_counts_and_a_null_changes_nothing() -> None:
    money = told(funds(reserve=reserve("9")), spend(0, 1, reserve=reserve("12")), funds(), spend(1, 2))
    assert money.reserve_usd == 12


@pytest.mark.parametrize(
    "receipt",
    [
        funds("NaN"), funds("x"), ("funds", {}), ("funds", {**funds()[1], "usd": 5}), bill("1", 2, 2), bill("1", 3, 2),
        bill("1", 0, 1, covers=["all"]), spend(1, 1), spend(0, 1, usd_per_hour="Infinity"), ("spend", {}),
        spend(0, 1, metrics={"reached": None}), ("spend", {**spend(0, 1)[1], "start": "yesterday"}),
        ("spend", {**spend(0, 1)[1], "stop": "2026-11-10T01:00:00"}),
        funds(reserve={"how": "set"}),
    ],
)  # fmt: skip
def test_what_assay_did_not_write_is_named(receipt: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(VerificationError, match=rf"receipt 0 \({receipt[0]}\)"):
        told(receipt)


@given(st.integers(-(10**15), 4 * 10**15))
def test_times_are_microseconds_exactly(microseconds: int) -> None:
    assert moment(instant(microseconds).isoformat()) == microseconds
    assert instant(microseconds + 1) - instant(microseconds) == timedelta(microseconds=1)


def allocation(name: str, event: str, hour: float, price: str | None = None) -> tuple[str, dict[str, Any]]:
    return "allocation", {"allocation": name, "event": event, "time": at(hour), "usd_per_machine_hour": price}


def test_an_allocation_that_nobody_metered_is_not_free() -> None:
    budget = funds(reserve=reserve("0"))
    first = (allocation("a", "began", 0), spend(0, 1, reached=10), allocation("a", "ended", 1))
    stated = told(budget, *first, allocation("b", "began", 2, "36"), allocation("b", "ended", 7, "36"))
    assert [(one.allocation, one.start, one.stop) for one in stated.unmetered] == [("b", moment(at(2)), moment(at(7)))]
    assert (stated.estimated, stated.spent, stated.remaining) == (20, 20 + 5 * 36, 500 - 200)
    assert stated.pace() == (200, 10), "its updates were paid for too"
    unstated = told(budget, *first, allocation("b", "began", 2), allocation("b", "ended", 7))
    assert unstated.spent == 20 + 5 * 20, "at the highest price that was read"
    assert told(budget, allocation("b", "began", 2), allocation("b", "ended", 7)).remaining is None
    billed = told(
        budget, *first, allocation("b", "began", 2), allocation("b", "ended", 7), bill("9", 2, 4, covers=["gpu"])
    )
    assert billed.spent == 20 + 9 + 3 * 20


def test_time_between_two_guards_and_before_the_first_look_is_counted() -> None:
    money = told(allocation("a", "began", 0, "36"), spend(1, 2), spend(4, 5), allocation("a", "ended", 6, "36"))
    assert [(one.stop - one.start) // HOUR for one in money.unmetered] == [1, 2, 1]
    assert money.spent == 40 + 4 * 36
    assert not told(allocation("a", "began", 0), spend(0, 6, allocation=None), allocation("a", "ended", 6)).unmetered


def test_what_an_allocation_costs_that_still_runs_and_nobody_meters_is_not_known() -> None:
    receipts = [funds(reserve=reserve("0")), spend(0, 1, reached=10), allocation("b", "began", 2, "36")]
    money = told(*receipts)
    assert (money.nobody_meters, money.remaining) == ("b", None)
    assert "allocation b" in str(money.unknown(3))
    assert told(*receipts, spend(2, 3, allocation="b")).remaining == 500 - 40
    lost = told(*receipts, allocation("c", "began", 12, "1"), spend(12, 13, allocation="c"))
    assert lost.spent == 40 + 10 * 36, "it may have lasted until the next one began"


def test_gpu_time_without_any_price_is_null_everywhere_until_a_bill_covers_it() -> None:
    none = spend(0, 2, dict.fromkeys(GROUPS["gpu"], None), usd_per_hour=None, price=None)
    paid = bill("9", 0, 1, covers=["gpu"])
    money = told(funds(reserve=reserve("0")), none, paid)
    assert (money.estimated, money.estimate_of(money.bills[0]), money.pace(), money.unpriced) == (
        None,
        None,
        None,
        HOUR,
    )
    assert (money.priced, money.remaining, money.spent) == (False, None, 9)
    whole = told(funds(reserve=reserve("0")), none, bill("9", 0, 2, covers=["gpu"]))
    assert (whole.priced, whole.remaining) == (True, 491)
