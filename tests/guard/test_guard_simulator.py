"""The simulator: hand-made traces with known answers, and what no trace may do to budget, bound and blindness."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import InputError
from assay.guard.clairvoyant import optimum
from assay.guard.decision import Decision, History, decide
from assay.guard.policy import Policy, from_yaml
from assay.guard.simulator import Outcome, facts, simulate
from assay.guard.traces import Change, Trace

T0 = datetime(2026, 11, 1, tzinfo=UTC)
MINUTES = 10


@cache
def policy(extra: str = "", machine: str = "save_seconds: 10") -> Policy:
    return from_yaml(
        f"name: test\nmachine: {{gpus: 8, positions_per_second: 1000, {machine}}}\ninterval_seconds: 600\n{extra}",
        "test",
    )


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def trace(end: float, *rows: tuple[float, str, int, str | None]) -> Trace:
    changes = (Change(at(when), zone, bool(up), None if usd is None else Decimal(usd)) for when, zone, up, usd in rows)
    return Trace(tuple(changes), T0, at(end))


def test_a_lost_machine_is_paid_for_until_then_and_its_start_is_waste() -> None:
    done = simulate(trace(180, (0, "a", 1, "12"), (0, "b", 1, "18"), (75, "a", 0, "12")), policy())
    # a: 75 minutes, of which 15 start and 10 seconds save; b from the next look, minute 80: 100 minutes, 15 start
    assert done.spent == Decimal(75 * 12 + 100 * 18) / 60
    assert done.useful == 75 * 60 - 900 - 10 + 100 * 60 - 900
    assert done.positions == 1000 * done.useful
    assert (done.starts, done.interruptions, done.moves, done.stops) == (2, 1, 0, 0)
    assert done.waste["first start"] == 3
    assert done.waste["restart after a loss"] == Decimal("4.5")
    assert done.waste["saves"] == Decimal(120) / 3600
    assert done.usd_per_useful_hour == done.spent * 3600 / done.useful


def test_a_machine_that_is_lost_before_its_first_update_trained_nothing() -> None:
    done = simulate(trace(60, (0, "a", 1, "12"), (14, "a", 0, "12")), policy())
    assert (done.useful, done.spent, done.waste["first start"]) == (0, Decimal("2.8"), Decimal("2.8"))
    assert facts(done)["usd_per_useful_hour"] is None


def test_a_move_pays_a_save_and_a_start() -> None:
    rules = policy('zones: {move_fraction: "0.9"}\n')
    done = simulate(trace(240, (0, "a", 1, "12"), (65, "b", 1, "6")), rules)
    # a until minute 70 and 10 seconds for the save, then b
    assert done.moves == 1
    assert done.spent == (Decimal(4210 * 12) + Decimal(240 * 60 - 4210) * 6) / 3600
    assert done.useful == 70 * 60 - 900 + 240 * 60 - 4210 - 900


def test_what_happened_before_the_begin_is_remembered_and_what_comes_is_not_known() -> None:
    rules = policy("zones: {settle_seconds_per_loss: 3600, memory_seconds: 36000}\n")
    rows = [(0.0, "a", 1, "12"), (5.0, "a", 0, "12"), (6.0, "a", 1, "12"), (200.0, "a", 0, "12")]
    whole = trace(300, *rows)
    done = simulate(whole, rules, at(20))
    assert done.pieces[0].begin == at(70)  # available since minute 6, an hour for the one loss, looks at 20, 30, …
    with pytest.raises(InputError, match="not within the trace"):
        simulate(whole, rules, at(-1))


def test_a_price_above_the_ceiling_stops_it_once_and_a_low_one_brings_it_back() -> None:
    # 1,000 positions a second are 3.6 million an hour; 14.4 dollars an hour are 4,000 dollars per 10^9
    rules = policy('ceiling: {usd_per_billion_positions: "4000"}\n')
    prices = [(0, "12"), (120, "15"), (240, "14"), (360, "15"), (480, "12")]
    done = simulate(trace(720, *((when, "a", 1, usd) for when, usd in prices)), rules)
    assert (done.stops, done.starts) == (1, 2)
    first, second = (piece for piece in done.pieces if piece.kind == "start")
    assert first.begin == T0
    assert done.pieces[1].end == at(150)  # looks at 120, 130, 140 and 150 are above
    assert second.begin == at(510)  # at 480, 490, 500 and 510 it is at most 0.9 × 14.4


def test_a_price_that_is_missing_does_not_switch_the_budget_off() -> None:
    """The simulated machine goes on costing its last price; the guard goes on counting it."""
    market = trace(2880, (0, "a", 1, "20"), (30, "a", 1, None))
    done = simulate(market, policy('cap_usd: "100"\nreserve: {usd: "0"}\n'))
    assert done.decision.cause == "held"
    assert 70 < done.spent <= 100


def test_readings_count_however_long_the_silence_between_them() -> None:
    # 50 dollars an hour are 13,889 dollars per 10^9; a price once an hour, nothing at the five looks between
    rows = [(10 * k, "a", 1, "50" if k % 6 == 0 else None) for k in range(1, 100)]
    done = simulate(trace(1000, (0, "a", 1, "10"), *rows), policy('ceiling: {usd_per_billion_positions: "4000"}\n'))
    assert done.stops == 1
    assert done.pieces[-1].end == at(240)


def test_a_dear_moment_does_not_end_a_run_that_could_pay_a_usual_start() -> None:
    market = trace(2880, (0, "a", 1, "14"), (240, "a", 0, "14"), (240, "b", 1, "69.9"), (260, "b", 0, "69.9"),
                   (260, "a", 1, "14"))  # fmt: skip
    done = simulate(market, policy('cap_usd: "100"\nreserve: {usd: "0"}\nzones: {avoid_seconds: 0}\n'))
    assert [piece.zone for piece in done.pieces] == ["a"] * 4
    assert done.starts == 2
    assert 56 + 14 < done.spent <= 100


Row = tuple[int, str, bool, Decimal | None]
ROWS = st.lists(
    st.tuples(st.integers(0, 600), st.sampled_from("abc"), st.booleans(),
              st.decimals("10", "29.9", places=2) | st.none()),
    min_size=1, max_size=30,
)  # fmt: skip


def made(rows: list[Row]) -> Trace:
    changes = tuple(Change(at(when), *rest) for when, *rest in sorted(rows, key=lambda row: row[0]))
    return Trace((Change(T0, "a", True, Decimal(15)), *changes), T0, at(900))


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(0, 300), st.integers(0, 40), st.booleans())
def test_it_never_spends_beyond_the_budget_less_the_reserve(
    rows: list[Row], cap: int, reserve: int, moves: bool
) -> None:
    """Prices rise by less than the jump factor of 3 between two looks; the last stop's save is included."""
    zones = 'zones: {move_fraction: "0.95"}\n' if moves else ""
    done = simulate(made(rows), policy(f'cap_usd: "{cap}"\nreserve: {{usd: "{reserve}"}}\n{zones}'))
    assert done.spent <= max(cap - reserve, 0)
    assert done.positions == int(done.useful * 1000)
    assert 0 <= done.useful <= done.paid


def test_a_price_that_nearly_triples_right_after_a_look_does_not_break_the_budget() -> None:
    market = trace(900, (0, "a", 1, "10"), (121, "a", 1, "29.9"))
    for quarters in range(60, 180):  # stops before, at and after the jump
        cap = Decimal(quarters) / 4
        done = simulate(market, policy(f'cap_usd: "{cap}"\nreserve: {{usd: "0"}}\n'))
        assert done.spent <= cap


@settings(deadline=None, max_examples=40)
@given(ROWS, st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_money_changes_nothing_until_it_is_short(rows: list[Row], one: int, other: int, moves: bool) -> None:
    """Up to the first look at which the smaller purse says that it is, both purses do the same.

    Later the larger one may train less: it pays for a dear start where the smaller one waits for a cheap one.
    """
    zones = 'zones: {move_fraction: "0.95"}\n' if moves else ""

    def verbs(cap: int) -> list[tuple[str, str, str | None]]:
        said = list[tuple[str, str, str | None]]()

        def heard(history: History, rules: Policy, now: datetime) -> Decision:
            found = decide(history, rules, now)
            said.append((found.verb, found.cause, found.zone))
            return found

        simulate(made(rows), policy(f'cap_usd: "{cap}"\n{zones}'), decide=heard)
        return said

    low, high = (verbs(cap) for cap in sorted((one, other)))
    for less, more in zip(low, high, strict=True):
        if less != more:
            assert less[1] == "budget" or (less[0], more[0]) == ("run", "move")  # a move that cannot be paid for
            break


@settings(deadline=None, max_examples=40)
@given(ROWS, ROWS, st.sampled_from(["", 'zones: {move_fraction: "0.9", settle_seconds: 900}\n']))
def test_the_future_changes_nothing(rows: list[Row], future: list[Row], zones: str) -> None:
    """Whatever comes after minute 600, what was done and spent until then is the same."""
    rules = policy(zones)
    later: list[Row] = [(when + 601, zone, up, usd) for when, zone, up, usd in future]
    one = simulate(made(rows), rules, end=at(600))
    other = simulate(made([*rows, *later]), rules, end=at(600))
    assert (one.spent, one.positions, one.pieces) == (other.spent, other.positions, other.pieces)
    whole = simulate(made([*rows, *later]), rules)
    assert whole.pieces[: max(len(one.pieces) - 1, 0)] == one.pieces[:-1]


DISK = 'disk_gb: 730, disk_usd_per_gb_month_running: "2", disk_usd_per_gb_month_stopped: "1"'


def least(found: Outcome, market: Trace, rules: Policy) -> Decimal:
    plan = optimum(market, rules, useful=found.useful)
    assert plan is not None
    return plan.least


@settings(deadline=None, max_examples=25)
@given(ROWS, st.sampled_from(["", 'zones: {move_fraction: "0.9"}\n', 'zones: {max_usd_per_hour: "17"}\n',
                              "zones: {settle_seconds: 1800}\n"]),
       st.sampled_from(["save_seconds: 0", f"save_seconds: 0, {DISK}"]))  # fmt: skip
def test_nobody_is_cheaper_than_the_optimum(rows: list[Row], zones: str, machine: str) -> None:
    market, rules = made(rows), policy(zones, machine)
    done = simulate(market, rules)
    if done.useful:
        assert least(done, market, rules) <= done.spent + Decimal("1e-9")


def test_the_optimum_waits_for_what_a_blind_rule_cannot_know() -> None:
    market = trace(600, (0, "a", 1, "20"), (60, "a", 0, "20"), (60, "b", 1, "10"))
    rules = policy("", "save_seconds: 0")
    plan = optimum(market, rules)
    assert plan is not None
    assert (plan.spent, plan.useful, plan.starts) == (90, 540 * 60 - 900, 1)  # b alone, from minute 60 to 600
    everything = optimum(market, rules, useful=Decimal(540 * 60))
    assert everything is not None
    assert (everything.spent, everything.useful, everything.starts) == (110, 600 * 60 - 1800, 2)
    assert optimum(market, rules, useful=Decimal(600 * 60)) is None


def test_the_optimum_pays_the_last_price_where_none_is_stated_and_the_disk() -> None:
    market = trace(120, (0, "a", 1, "12"), (20, "a", 1, None), (60, "a", 0, None))
    done, plan = simulate(market, policy()), optimum(market, policy("", DISK))
    assert plan is not None
    assert (done.spent, done.useful) == (12, 45 * 60 - 10)
    assert (plan.spent, plan.useful) == (12 + 3, 45 * 60 - 10)


def test_disks_are_paid_for_running_and_stopped_where_the_policy_states_them() -> None:
    market = trace(120, (0, "a", 1, "12"), (60, "a", 0, "12"))
    done, bare = simulate(market, policy("", DISK)), simulate(market, policy())
    assert done.disk == 3  # an hour at 2 dollars and an hour at 1
    assert done.spent == bare.spent + 3


def test_a_computed_reserve_is_kept_back() -> None:
    # 600 + 10 + 1,800 + 900 seconds at 36 dollars an hour are 33.10; the next look at three times the price 18.30
    market = trace(900, (0, "a", 1, "36"))
    done = simulate(market, policy('cap_usd: "100"\n'))
    assert done.decision.cause == "held"
    assert Decimal(100) - Decimal("33.1") - Decimal("18.3") - 6 < done.spent <= Decimal(100) - Decimal("33.1")


def test_an_estimate_that_is_missing_is_named() -> None:
    rules = from_yaml("name: bare\nmachine: {gpus: 8}\n", "bare.yaml")
    with pytest.raises(InputError, match=r"bare: machine\.positions_per_second is null"):
        simulate(trace(60, (0, "a", 1, "12")), rules)
