"""Where machines go away, `checkpoint.every: auto` saves about as often as the best fixed cadence would have."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import InputError
from assay.plan.cadence import BETWEEN_SECONDS, choose, every, follows, goodput, young
from assay.plan.figures import Saves, plan
from assay.plan.trace import Change, Stretch, Trace, between, expected, replay, stated, stretches
from assay.recipe.load import from_resolved, load, resolved
from assay.recipe.schema import Recipe

TINY = load(Path(__file__).parents[2] / "recipes" / "tiny.yaml")
HEAD = "time,zone,available,usd_per_hour\n"
SECONDS = st.decimals("0.001", 100_000, places=3)


def auto(**keys: Any) -> Recipe:
    """The tiny recipe with `every: auto`; `keys` are those of `checkpoint.auto`."""
    value = resolved(TINY)
    value["checkpoint"] |= {"every": "auto", "auto": keys}
    return from_resolved(value, "recipe")


BOUNDED = auto(least=3, most=700)


@given(SECONDS, SECONDS, SECONDS, st.none() | SECONDS)
def test_a_choice_lies_in_its_bounds_and_follows_from_its_own_record(
    save: Decimal, update: Decimal, between: Decimal, whole: Decimal | None
) -> None:
    choice = choose(BOUNDED, save=(save, "a"), update=(update, "b"), between=(between, "c"), whole=whole)
    assert 3 <= choice.every <= 700
    assert follows(choice.record()) == choice.every
    if 3 < choice.every < 700:
        away = abs(choice.every * update - young(save, between))
        assert away <= update / 2 or (
            whole is not None and choice.every * update >= whole > (choice.every - 1) * update
        )


@pytest.mark.parametrize("unknown", ["save", "update"])
def test_without_a_measure_it_is_a_hundredth_of_the_schedule_in_the_same_bounds(unknown: str) -> None:
    known: dict[str, Any] = {"save": (Decimal(1), "a"), "update": (Decimal(1), "b"), unknown: (None, "not measured")}
    for bounds, wanted in (({}, TINY.schedule.updates // 100), ({"least": 50}, 50), ({"most": 7}, 7)):
        choice = choose(auto(**bounds), between=(BETWEEN_SECONDS, "c"), **known)
        assert (choice.every, choice.by, choice.goodput) == (wanted, "schedule", None)
        assert follows(choice.record()) == wanted == every(auto(**bounds))


@given(st.integers(1, 30), st.integers(200, 100_000))
def test_youngs_interval_is_where_the_expected_goodput_is_flat(save: int, between: int) -> None:
    best = young(Decimal(save), Decimal(between))

    def at(factor: str) -> float:
        return goodput(best * Decimal(factor), Decimal(save), Decimal(between))

    assert at("1") > max(at("0.5"), at("2"))
    assert 1 - goodput(best, Decimal(save), Decimal(between)) < 3 * (2 * save / between) ** 0.5


def poisson(mean: float, seed: int, count: int = 4000) -> list[Stretch]:
    """Machines whose lives are drawn at random, `mean` seconds in the mean."""
    draw, moment, found = random.Random(seed), 0, []
    for _ in range(count):
        length = max(1, round(draw.expovariate(1 / mean)))
        found.append(Stretch(moment, moment + length, True))
        moment += length
    return found


def test_the_expected_goodput_is_what_a_replay_of_random_lives_comes_to() -> None:
    for save, interval in ((5, 100), (20, 400), (60, 2000)):
        seen = replay(poisson(7200, 1), Decimal(interval), Decimal(save), Decimal(0)).goodput
        assert seen == pytest.approx(goodput(Decimal(interval), Decimal(save), Decimal(7200)), abs=0.01)


@pytest.mark.parametrize("save", [1, 10, 60])
@pytest.mark.parametrize("mean", [3600, 20_000])
def test_auto_keeps_98_percent_of_the_best_fixed_cadence_also_with_yesterdays_rate(save: int, mean: int) -> None:
    lives = poisson(mean, seed=save, count=600)
    first, second = lives[:300], lives[300:]
    update, restart = Decimal("2.5"), Decimal(900)
    for seen, used in ((lives, lives), (first, second)):
        choice = choose(auto(), save=(Decimal(save), ""), update=(update, ""), between=(between(seen), ""))
        mine = replay(used, choice.every * update, Decimal(save), restart).goodput
        best = max(replay(used, round(1.2**power) * update, Decimal(save), restart).goodput for power in range(55))
        assert mine >= 0.98 * best


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 500), st.integers(0, 100), st.integers(0, 1000),
)  # fmt: skip
def test_a_replay_accounts_for_every_second(
    lives: list[tuple[int, bool]], interval: int, save: int, restart: int
) -> None:
    walk = [Stretch(0, length, interrupted) for length, interrupted in lives]
    seen = replay(walk, Decimal(interval), Decimal(save), Decimal(restart))
    assert seen.useful + seen.saving + seen.starting + seen.lost == sum(length for length, _ in lives)
    assert min(seen.useful, seen.saving, seen.starting, seen.lost) >= 0


def test_a_walk_takes_the_cheapest_zone_stays_and_moves_when_it_must() -> None:
    price = Decimal(1)
    changes = (
        Change(0, "dear", True, 3 * price), Change(0, "cheap", True, price),
        Change(10, "cheaper", True, price / 2),  # is not moved to: the machine at hand still runs
        Change(30, "cheap", False, price), Change(40, "dear", False, 3 * price), Change(50, "cheaper", False, price),
        Change(70, "dear", True, 3 * price),
    )  # fmt: skip
    trace = Trace(changes, 100)
    assert stretches(trace) == [Stretch(0, 30, True), Stretch(30, 50, True), Stretch(70, 100, False)]
    assert stretches(trace, zone="dear") == [Stretch(0, 40, True), Stretch(70, 100, False)]
    assert stretches(trace, first=45, last=60) == [Stretch(45, 50, True)]
    assert between(stretches(trace)) == Decimal(80) / 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "the first line is"),
        (HEAD + "2025-10-04T00:10:00Z,z,1\n", "line 2 has 3 fields"),
        (HEAD + "2025-10-04T00:10:00,z,1,2\n", "is no time"),
        (HEAD + "yesterday,z,1,2\n", "line 2: 'yesterday' is no time"),
        (HEAD + "2025-10-04T00:10:00Z,z,yes,2\n", "available is 'yes'"),
        (HEAD + "2025-10-04T00:10:00Z,z,1,free\n", "usd_per_hour is 'free'"),
        (HEAD + "2025-10-04T00:10:00Z,z,1,2\n", "no last row"),
        (HEAD + "2025-10-04T00:10:00Z,,,\n", "has no change"),
        (HEAD + "2025-10-04T00:10:00Z,z,1,2\n2025-10-04T00:00:00Z,,,\n", "line 3: .* lies before"),
        (HEAD + "2025-10-04T00:10:00Z,z,1,2\n2025-10-04T00:20:00Z,,,\n2025-10-04T00:30:00Z,z,1,2\n", "line 4 comes"),
        (HEAD + "2025-10-04T00:10:00Z,z,1," + "2" * (1 << 18), "is no table of comma-separated values: field larger"),
        (HEAD + "2025-10-04T00:10:00Z,z,0,2\n2025-10-04T00:20:00Z,,,\n", "no machine was ever available"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        expected(path)


def test_interruptions_are_taken_as_given_from_a_trace_or_presumed_and_the_plan_says_which(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "2025-10-04T00:00:00Z,z,1,2\n2025-10-04T05:00:00Z,z,0,2\n2025-10-04T06:00:00Z,,,\n")
    speed = Decimal(TINY.positions_per_update)  # an update a second

    def planned(recipe: Recipe, **saves: Any) -> dict[str, Any]:
        found: dict[str, Any] = plan(recipe, tmp_path, speed, saves=Saves(Decimal(8), **saves))["cadence"]
        return found

    ways = {
        "given: --interruption-hours": planned(auto(), interruption_hours=Decimal(5)),
        "trace: 1 interruptions": planned(auto(), trace=path),
        "given: checkpoint.auto": planned(auto(interruption_hours=5.0)),
        "trace: 1 interruptions of 1 machines": planned(auto(trace="trace.csv")),
    }
    for words, facts in ways.items():
        assert facts["auto"]["between_from"].startswith(words)
        assert facts["every"] == round((2 * 8 * 5 * 3600) ** 0.5) == 537
        assert (
            facts["goodput"] == facts["auto"]["goodput"] == f"{goodput(Decimal(537), Decimal(8), Decimal(18000)):.4f}"
        )
    assert planned(auto())["auto"]["between_from"].startswith("presumed")
    kept = planned(TINY, interruption_hours=Decimal(5))
    assert (kept["every"], kept["stated"], kept["auto"]["every"]) == (TINY.checkpoint.every, True, 537)
    assert kept["goodput"] < kept["auto"]["goodput"]
    assert stated(auto(), tmp_path) is None


def test_what_says_it_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave one out"):
        plan(TINY, tmp_path, saves=Saves(interruption_hours=Decimal(1), trace=tmp_path))
    with pytest.raises(InputError, match="--save-seconds is 0"):
        plan(TINY, tmp_path, saves=Saves(save_seconds=Decimal(0)))
    with pytest.raises(InputError, match=r"checkpoint\.auto\.least is 9"):
        auto(least=9, most=8)
    with pytest.raises(InputError, match=r"checkpoint\.auto\.trace is"):
        auto(trace="a.csv", interruption_hours=1.0)
