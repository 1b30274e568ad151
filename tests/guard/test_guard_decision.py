"""The decision: what stops, in which order, what comes back, which zone is taken, and that it does not flap."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.guard.decision import (
    Allocation,
    Decision,
    History,
    Hold,
    Point,
    Purse,
    Zone,
    ahead,
    decide,
    limit,
    per_billion,
)
from assay.guard.policy import Policy, from_yaml

T0 = datetime(2026, 11, 1, tzinfo=UTC)
RATE = 120_000_000  # useful positions an hour
STEP = 300


@cache
def policy(extra: str = "") -> Policy:
    return from_yaml(
        'name: test\nmachine: {gpus: 8}\nceiling: {usd_per_billion_positions: "125"}\ninterval_seconds: 300\n' + extra,
        "test.yaml",
    )


def at(steps: float) -> datetime:
    return T0 + timedelta(seconds=STEP * steps)


def running(prices: list[str | None], extra: str = "", spent: str = "0", gained: int = RATE) -> Decision:
    """The decision after looks at these prices, of a machine that has trained at `gained` an hour since the first."""
    points = tuple(
        Point(at(k), None if price is None else Decimal(price), gained * k * STEP // 3600)
        for k, price in enumerate(prices)
    )
    history = History(points, Purse(Decimal(spent)), Allocation("here", T0, T0))
    return decide(history, policy(extra), at(len(prices) - 1))


def kinds(decision: Decision) -> list[str]:
    return [step.kind for step in decision.steps]


def test_four_readings_in_a_row_above_the_ceiling_stop_and_three_do_not() -> None:
    # 15 dollars an hour for 120 million positions an hour are 125 dollars per 10^9
    assert running(["14", "15.6", "15.6", "15.6"]).verb == "run"
    stop = running(["14", "15.6", "15.6", "15.6", "15.6"])
    assert (stop.verb, stop.cause) == ("stop", "ceiling")
    assert stop.usd_per_billion == Decimal(130)
    assert kinds(stop) == ["save", "copy", "hold", "stop", "prove", "alarm"]


def test_one_reading_at_the_ceiling_breaks_the_row_and_a_missing_one_does_not() -> None:
    assert running(["14", "16", "16", "15", "16", "16"]).verb == "run"
    assert running(["14", "16", "16", None, "16", "16"]).verb == "stop"
    assert running(["14", "16", "16", None, None, "16"]).verb == "run"


def test_the_number_of_readings_is_the_policys() -> None:
    assert running(["14", "16", "16"], "readings: 2\n").verb == "stop"
    assert running(["14", "16", "16"], "readings: 3\n").verb == "run"


def test_recomputed_positions_are_not_useful_so_the_same_price_is_above() -> None:
    prices = ["14"] * 5
    assert running(prices, gained=RATE).verb == "run"
    assert running(prices, gained=RATE * 9 // 10).verb == "stop"
    assert running(prices, gained=0).usd_per_billion == Decimal("Infinity")


def test_a_start_is_not_judged_until_the_window_has_passed() -> None:
    looks = tuple(Point(at(k), Decimal(14), 0) for k in range(20))
    history = History(looks[:12], Purse(Decimal(0)), Allocation("here", T0, None))
    assert decide(history, policy(), at(11)).verb == "run"
    assert decide(replace(history, points=looks), policy(), at(19)).cause == "ceiling"


def test_the_window_looks_back_so_far_and_no_further() -> None:
    points = tuple(Point(at(k), Decimal(12), RATE * min(k, 12) * STEP // 3600) for k in range(30))
    history = History(points, Purse(Decimal(0)), Allocation("here", T0, T0))
    assert per_billion(history, policy(), 30)[12] > per_billion(history, policy(), 30)[11]
    assert per_billion(history, policy(), 1) == [Decimal("Infinity")]  # nothing gained within the last hour


@settings(deadline=None)
@given(st.decimals("0", "400", places=2), st.decimals("1", "60", places=2), st.decimals("0", "50", places=2))
def test_the_budget_stops_before_the_next_look_could_cross_it(spent: Decimal, price: Decimal, reserve: Decimal) -> None:
    rules = from_yaml('name: t\nmachine: {gpus: 8}\ncap_usd: "400"\n', "t")
    history = History((Point(T0, price, 0),), Purse(spent, reserve), Allocation("here", T0))
    bound = limit(history.purse, rules)
    assert bound == 400 - reserve
    said = decide(history, rules, T0)
    assert said.verb == ("stop" if spent + ahead(price, rules) > bound else "run")
    assert ahead(price, rules) == price * 3 * (rules.interval_seconds + rules.machine.save_seconds) / 3600


@settings(deadline=None)
@given(st.decimals("0", "900", places=2), st.decimals("0", "900", places=2), st.decimals("0", "500", places=2),
       st.booleans())  # fmt: skip
def test_more_money_never_makes_it_more_careful(one: Decimal, other: Decimal, spent: Decimal, paying: bool) -> None:
    low, high = sorted((one, other))

    def verb(cap: Decimal) -> str:
        rules = from_yaml(f'name: t\nmachine: {{gpus: 8}}\ncap_usd: "{cap}"\n', "t")
        zones = (Zone("here", True, T0, Decimal(20)),)
        allocation = Allocation("here", T0, T0) if paying else None
        return decide(History((Point(T0, Decimal(20), 0),), Purse(spent), allocation, None, zones), rules, T0).verb

    order = ["stop", "wait", "run", "take"]
    assert order.index(verb(low)) <= order.index(verb(high))


def test_money_goes_before_readings_and_readings_before_the_ceiling() -> None:
    prices = ["14", "16", "16", "16", "16"]
    assert running(prices, 'cap_usd: "100"\n', spent="99").cause == "budget"
    assert running(prices, 'cap_usd: "100"\n', spent="50").cause == "ceiling"


def test_without_readings_it_alarms_or_stops_as_the_policy_says() -> None:
    silence: list[str | None] = ["14", *[None] * 12]
    alarm = running(silence)
    assert (alarm.verb, kinds(alarm)) == ("run", ["alarm"])
    stop = running(silence, "no_reading: {after_seconds: 3600, action: stop}\n")
    assert (stop.verb, stop.cause) == ("stop", "no_reading")
    assert running(silence[:-1], "no_reading: {after_seconds: 3600, action: stop}\n").verb == "run"


def held(cause: str, prices: list[str | None], rate: int | None = RATE, extra: str = "") -> Decision:
    points = tuple(Point(at(k), None if p is None else Decimal(p), 0) for k, p in enumerate(prices))
    zones = (Zone("here", True, T0, Decimal(prices[-1] or 1)),)
    per_hour = None if rate is None else Decimal(rate)
    history = History(points, Purse(Decimal(0)), None, Hold(cause, at(-1)), zones, per_hour)
    return decide(history, policy(extra), at(len(prices) - 1))


def test_it_comes_back_after_readings_well_below_the_ceiling() -> None:
    assert held("ceiling", ["14.9"] * 9).verb == "wait"  # below the ceiling is not enough: 0.9 × 15 = 13.5
    assert held("ceiling", ["13.5"] * 3).verb == "wait"
    assert held("ceiling", ["13.5", "13.5", "13.6", "13.5"]).verb == "wait"
    back = held("ceiling", ["16", "13.5", "13.5", "13.5", "13.5"])
    assert (back.verb, kinds(back)) == ("take", ["lift", "take"])


def test_what_a_person_or_the_budget_stopped_a_person_lifts() -> None:
    for cause in ("budget", "stop", "guard", "anything"):
        assert held(cause, ["1"] * 9).cause == "held"
    assert held("no_reading", ["1"] * 4).verb == "take"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["13.6", "14.9", "15", "15.1", "17"]), min_size=1, max_size=60))
def test_prices_around_the_ceiling_do_not_make_it_flap(prices: list[str]) -> None:
    """Between 0.9 of the ceiling and beyond it stops once and stays stopped, however the prices go."""
    verbs = []
    allocation: Allocation | None = Allocation("here", T0, T0)
    hold, points = None, list[Point]()
    for k, text in enumerate(prices):
        points.append(Point(at(k), Decimal(text), RATE * k * STEP // 3600))
        zones = (Zone("here", True, T0, Decimal(text)),)
        said = decide(
            History(tuple(points), Purse(Decimal(0)), allocation, hold, zones, Decimal(RATE)), policy(), at(k)
        )
        if said.verb == "stop":
            allocation, hold = None, Hold("ceiling", at(k))
        verbs.append(said.verb)
    assert verbs.count("stop") <= 1
    assert "take" not in verbs


def offered(zones: tuple[Zone, ...], extra: str = "", now: float = 20) -> str | None:
    return decide(History((), Purse(Decimal(0)), None, None, zones, Decimal(RATE)), policy(extra), at(now)).zone


def test_the_cheapest_zone_is_taken_and_of_equals_the_one_longest_available() -> None:
    a, b, c = (Zone(name, True, at(k), Decimal(p)) for name, k, p in (("a", 0, "9"), ("b", 3, "8"), ("c", 2, "8")))
    assert offered((a, b, c)) == "c"
    assert offered((a, b, replace(c, available=False))) == "b"
    assert offered((a, replace(b, usd_per_hour=None), replace(c, usd_per_hour=None))) == "a"
    assert offered((a, b, c), 'zones: {max_usd_per_hour: "7.99"}\n') is None


def test_a_zone_above_the_ceiling_is_not_taken() -> None:
    assert offered((Zone("a", True, T0, Decimal("15.00")),)) == "a"
    assert offered((Zone("a", True, T0, Decimal("15.01")),)) is None


def test_a_zone_that_failed_us_or_was_lost_is_not_taken_at_once() -> None:
    zone = Zone("a", True, at(10), Decimal(9))
    rules = "zones: {avoid_seconds: 3000, settle_seconds: 600, settle_seconds_per_loss: 900, memory_seconds: 6000}\n"
    assert offered((zone,), rules, 12) == "a"
    assert offered((zone,), rules, 11.9) is None
    failed = replace(zone, failures=(at(5),))
    assert offered((failed,), rules, 14.9) is None
    assert offered((failed,), rules, 15) == "a"
    lost = replace(zone, losses=(at(1), at(9)))
    assert offered((lost,), rules, 17.9) is None
    assert offered((lost,), rules, 18) == "a"
    assert offered((replace(lost, losses=(at(-5), at(1))),), rules, 15) == "a"  # one is forgotten, one is not
    assert offered((lost, replace(zone, name="b", usd_per_hour=Decimal(12))), rules, 17) == "b"


def moving(training: float | None, other: str, extra: str = 'zones: {move_fraction: "0.9"}\n') -> Decision:
    zones = (Zone("here", True, T0, Decimal(14)), Zone("there", True, T0, Decimal(other)))
    start = None if training is None else at(training)
    points = tuple(Point(at(k), Decimal(14), RATE * k * STEP // 3600) for k in range(4))
    allocation = Allocation("here", T0, start)
    return decide(History(points, Purse(Decimal(0)), allocation, None, zones), policy(extra), at(3))


def test_a_move_needs_a_much_better_price_and_a_machine_that_trains() -> None:
    move = moving(0, "12.6")
    assert (move.verb, move.zone) == ("move", "there")
    assert kinds(move) == ["save", "copy", "stop", "prove", "take"]
    assert moving(0, "12.61").verb == "run"
    assert moving(None, "2").verb == "run"
    assert moving(4, "2").verb == "run"
    assert moving(0, "2", "").verb == "run"
    assert moving(0, "12", 'zones: {move_fraction: "0.9"}\ncap_usd: "5"\n').verb == "run"
