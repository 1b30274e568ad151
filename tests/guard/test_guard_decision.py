"""The decision: what stops, in which order, what comes back, which zone is taken, and that it does not flap."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache

from hypothesis import example, given, settings
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
    needed,
    per_billion,
)
from assay.guard.policy import Policy, from_yaml

T0 = datetime(2026, 11, 1, tzinfo=UTC)
RATE = 120_000_000  # useful positions an hour
STEP = 300


@cache
def policy(extra: str = "") -> Policy:
    return from_yaml(
        "name: test\nmachine: {gpus: 8}\ninterval_seconds: 300\n"
        + ("" if "ceiling:" in extra else 'ceiling: {usd_per_billion_positions: "125"}\n')
        + extra,
        "test.yaml",
    )


def at(steps: float) -> datetime:
    return T0 + timedelta(seconds=STEP * steps)


def running(prices: list[str | None], extra: str = "", spent: str = "0", gained: int = RATE) -> Decision:
    """The decision after looks at these prices, of a machine that trains at `gained` an hour since the look before."""
    rest = (
        Point(at(k), None if price is None else Decimal(price), gained * (k + 1) * STEP // 3600)
        for k, price in enumerate(prices)
    )
    points = (Point(at(-1), Decimal(14), 0), *rest)
    history = History(points, Purse(Decimal(spent)), Allocation("here", at(-1), at(-1)))
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
    assert running(["14"] * 16, gained=0).usd_per_billion == Decimal("Infinity")


def test_a_start_is_not_judged_until_the_window_has_passed() -> None:
    looks = tuple(Point(at(k), Decimal(14), 0) for k in range(20))
    history = History(looks[:12], Purse(Decimal(0)), Allocation("here", T0, None))
    assert decide(history, policy(), at(11)).verb == "run"
    assert decide(replace(history, points=looks), policy(), at(19)).cause == "ceiling"


def after_a_restart(again: float, looks: int, price: str = "14") -> Decision:
    """A machine that does updates again for `again` looks after its start of three, then new ones at the full pace."""
    gained = (max(Decimal(0), k - 3 - Decimal(again)) * RATE * STEP / 3600 for k in range(looks))
    points = tuple(Point(at(k), Decimal(price), RATE + int(new)) for k, new in enumerate(gained))
    return decide(History(points, Purse(Decimal(0)), Allocation("here", T0, at(3))), policy(), at(looks - 1))


def test_updates_done_again_after_a_restart_are_a_start_and_not_a_price() -> None:
    for again in (0.9, 4, 6.5, 11):  # ten minutes to nearly an hour
        assert {after_a_restart(again, looks).verb for looks in range(4, 40)} == {"run"}
    # The first look at something new covers some of both; the price is judged from there on, and is the true one.
    assert after_a_restart(6.5, 11).usd_per_billion is None
    assert abs((after_a_restart(6.5, 12).usd_per_billion or 0) * RATE / 10**9 - 14) < Decimal("1e-5")
    assert after_a_restart(6.5, 15, "15.6").cause == "ceiling"


def test_an_hour_of_training_without_anything_new_is_no_start_any_more() -> None:
    assert after_a_restart(100, 18).verb == "run"
    assert after_a_restart(100, 19).cause == "ceiling"  # the window has passed at looks 15, 16, 17 and 18


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
    assert said.verb == ("stop" if spent + needed(price, history.purse, rules) > bound else "run")
    assert ahead(price, rules) == price * 3 * (rules.interval_seconds + rules.machine.save_seconds) / 3600


@settings(deadline=None)
@given(st.decimals("0", "400", places=2), st.decimals("1", "60", places=2), st.decimals("0", "50", places=2))
@example(Decimal(388), Decimal(20), Decimal(0))
def test_a_copy_that_takes_all_of_its_time_keeps_to_the_cap_also_with_a_small_reserve(
    spent: Decimal, price: Decimal, reserve: Decimal
) -> None:
    rules = from_yaml('name: t\nmachine: {gpus: 8}\ncap_usd: "400"\n', "t")
    history = History((Point(T0, price, 0),), Purse(spent, reserve), Allocation("here", T0))
    if decide(history, rules, T0).verb == "run":
        assert spent + ahead(price, rules) + price * rules.save_timeout_seconds / 3600 <= 400
        assert spent + ahead(price, rules) <= 400 - reserve


def test_the_budget_is_kept_without_readings_too() -> None:
    """At the last known price: of this allocation, of one before, or one that nobody confirmed since and is higher."""
    cap = 'cap_usd: "100"\nreserve: {usd: "0"}\n'
    silence: list[str | None] = ["14", *[None] * 20]
    assert running(silence, cap, spent="89").cause == "no_reading"  # the next look and a stop cost 3.62 + 7
    assert running(silence, cap, spent="90").cause == "budget"
    assert running([None] * 3, cap, spent="5000").cause == "budget"
    nothing = tuple(Point(at(k), None, 0) for k in range(13))
    history = History(nothing, Purse(Decimal(101)), Allocation("here", T0, None))
    assert decide(history, policy(cap), at(1)).cause == "budget"
    dearer = replace(nothing[2], unconfirmed=Decimal(50))
    history = History((Point(at(-1), Decimal(14), 0), *nothing[:2], dearer), Purse(Decimal(63)), history.allocation)
    assert decide(history, policy(cap), at(2)).cause == "budget"
    assert decide(replace(history, purse=Purse(Decimal(62))), policy(cap), at(2)).verb == "run"
    assert decide(replace(history, points=history.points[:-1]), policy(cap), at(1)).verb == "run"


def test_where_money_is_limited_and_no_price_was_ever_known_missing_readings_stop() -> None:
    nothing = tuple(Point(at(k), None, 0) for k in range(13))
    history = History(nothing, Purse(Decimal(0)), Allocation("here", T0, None))
    assert decide(history, policy(), at(12)).verb == "run"
    assert decide(history, policy('cap_usd: "100"\n'), at(11)).verb == "run"
    stop = decide(history, policy('cap_usd: "100"\n'), at(12))
    assert (stop.verb, stop.cause, kinds(stop)[-2:]) == ("stop", "no_reading", ["alarm", "alarm"])


def short(spent: str, *prices: str | None) -> Decision:
    """Stopped without a hold, after these looks, with 100 dollars in all."""
    points = tuple(Point(at(k), None if p is None else Decimal(p), 0) for k, p in enumerate(prices))
    zones = (Zone("here", True, T0, points[-1].usd_per_hour),)
    history = History(points, Purse(Decimal(spent)), None, None, zones)
    return decide(history, policy('cap_usd: "100"\nreserve: {usd: "0"}\nceiling: null\n'), at(len(prices) - 1))


def test_a_dear_moment_is_waited_for_and_a_purse_that_is_too_small_for_any_start_holds() -> None:
    wait = short("56", "14", "69.9")  # a start costs 15 + 10 minutes × 3 and half an hour's stop: 70.40, at 14 14.10
    assert (wait.verb, wait.cause, wait.steps) == ("wait", "budget", ())
    assert short("56", "14", "69.9", "14").verb == "take"
    assert kinds(short("56", "69.9", "69.9")) == ["hold", "alarm"]
    assert kinds(short("86", "14", "69.9")) == ["hold", "alarm"]


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


def test_without_a_measured_pace_nobody_can_say_which_price_is_low_enough() -> None:
    for price in ("500", "1"):
        said = held("ceiling", [price] * 9, rate=None)
        assert (said.verb, said.cause) == ("wait", "held")
        assert "a person lifts it" in said.reason
    assert held("ceiling", ["500"] * 4, rate=None, extra="ceiling: null\n").verb == "take"
    assert held("no_reading", ["1"] * 4, rate=None).verb == "take"


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
    # the next look and the copy of this machine, 3.62 + 7, the start of the other and what it needs, 3 + 3.10 + 6
    assert moving(0, "12", 'zones: {move_fraction: "0.9"}\ncap_usd: "22.71"\n').verb == "run"
    assert moving(0, "12", 'zones: {move_fraction: "0.9"}\ncap_usd: "22.72"\n').verb == "move"
