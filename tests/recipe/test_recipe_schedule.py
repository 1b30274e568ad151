"""The schedule is the contract's formulas, and the amendment rules follow from them."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi, sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import InputError
from assay.recipe.schedule import amendable_before, amended, amendment_fault, decay_start, factor, phase
from assay.recipe.schema import Schedule


def schedule(**keys: Any) -> Schedule:
    return Schedule.model_validate({"kind": "wsd", "updates": 1000, "warmup": 10, "decay_fraction": 0.2} | keys)


@st.composite
def schedules(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = ("wsd", "constant", "cosine"),
    decays: tuple[str, ...] = ("none", "linear", "cosine", "1-sqrt"),
) -> Schedule:
    updates = draw(st.integers(2, 120))
    warmup = draw(st.integers(0, updates - 2))
    kind = draw(st.sampled_from(kinds))
    keys: dict[str, Any] = {"kind": kind, "updates": updates, "warmup": warmup}
    if kind == "wsd":
        keys["decay"] = draw(st.sampled_from(decays))
        if keys["decay"] != "none":
            keys["decay_start"] = draw(st.integers(warmup, updates - 1))
    return Schedule.model_validate(keys)


ratios = st.floats(0, 1, allow_nan=False)


@pytest.mark.parametrize(("updates", "start"), [(80_000, 64_000), (95_000, 76_000), (120_000, 96_000)])
def test_decay_starts_of_the_slayer_line(updates: int, start: int) -> None:
    assert decay_start(schedule(updates=updates, warmup=2000)) == start


def test_decay_start_is_decimal_not_binary() -> None:
    # 0.29 × 100 is 28.999… in binary floats, which would start the decay one update late
    assert decay_start(schedule(updates=100, decay_fraction=0.29)) == 71
    assert int(0.29 * 100) == 28


def test_warm_up_is_the_same_for_every_kind() -> None:
    for kind in ("wsd", "constant", "cosine"):
        keys = {"kind": kind, "updates": 100, "warmup": 4} | ({"decay_fraction": 0.2} if kind == "wsd" else {})
        line = Schedule.model_validate(keys)
        assert [factor(line, 0.1, u) for u in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_each_decay_at_its_middle() -> None:
    at = {name: factor(schedule(decay=name), 0.1, 900) for name in ("linear", "cosine", "1-sqrt")}
    assert at["linear"] == pytest.approx(1 - 0.9 * 0.5, rel=1e-15)
    assert at["cosine"] == pytest.approx(0.1 + 0.9 * (1 + cos(pi * 0.5)) / 2, rel=1e-15)
    assert at["1-sqrt"] == pytest.approx(0.1 + 0.9 * (1 - sqrt(0.5)), rel=1e-15)
    assert factor(schedule(decay="none", decay_fraction=None), 0.1, 999) == 1.0
    cosine = Schedule(kind="cosine", updates=1010, warmup=10)  # type: ignore[arg-type]
    assert factor(cosine, 0.1, 510) == pytest.approx(0.55, rel=1e-15)


@given(schedules(), ratios)
def test_bounds_and_monotony(line: Schedule, ratio: float) -> None:
    values = [factor(line, ratio, u) for u in range(line.updates)]
    rise, fall = values[: line.warmup], values[line.warmup :]
    assert rise == sorted(rise)
    assert all(0 < value <= 1 for value in rise)
    assert fall[0] == pytest.approx(1.0)
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(fall))
    assert all(ratio - 1e-15 <= value <= 1 for value in fall)


@given(schedules(("wsd",), ("linear", "cosine", "1-sqrt")), ratios)
def test_the_decay_begins_without_a_jump(line: Schedule, ratio: float) -> None:
    start = decay_start(line)
    assert start is not None
    assert factor(line, ratio, start) == pytest.approx(1.0, abs=1e-15)
    assert phase(line, start) == "decay"
    assert start == 0 or phase(line, start - 1) in ("warmup", "constant")


@given(st.integers(2, 300), st.data())
def test_constant_part_does_not_depend_on_the_total(updates: int, data: st.DataObject) -> None:
    """What makes an amendment before the decay harmless: the two curves are one up to the earlier decay start."""
    old = schedule(updates=updates, warmup=0, decay_fraction=0.5)
    new = amended(old, updates=data.draw(st.integers(2, 300)))
    limit = amendable_before(old, new)
    assert limit == min(old.updates - old.updates // 2, new.updates - new.updates // 2)
    assert limit is not None
    assert all(factor(old, 0.1, u) == factor(new, 0.1, u) for u in range(limit))


def test_rewarm_multiplies_and_counts_from_this_runs_first_update() -> None:
    line = schedule(rewarm=4, warmup=0)
    assert [factor(line, 0.1, u, first_update=100) for u in range(100, 106)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="outside"):
        factor(line, 0.1, 99, first_update=100)
    inside_warm_up = schedule(rewarm=4, warmup=8)
    assert factor(inside_warm_up, 0.1, 1) == (2 / 8) * (2 / 4)


def test_an_update_beyond_the_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        factor(schedule(), 0.1, 1000)


def test_80000_to_120000_may_be_adopted_before_64000() -> None:
    old = schedule(updates=80_000, warmup=2000)
    new = amended(old, updates=120_000)
    assert amendable_before(old, new) == 64_000
    assert amendment_fault(old, new, 0.1, 63_999) is None
    assert "before 64000" in str(amendment_fault(old, new, 0.1, 64_000))


def test_removing_the_decay_is_possible_only_before_it() -> None:
    planned = schedule(updates=5720, warmup=300, decay_fraction=0.2, decay="1-sqrt")
    constant = amended(planned, decay="none")
    start = decay_start(planned)
    assert start is not None
    assert amendable_before(planned, constant) == start
    assert amendment_fault(planned, constant, 0.1, 3300) is None
    assert amendment_fault(planned, constant, 0.1, start) is not None
    assert amended(constant, decay="1-sqrt") == planned


def test_an_earlier_decay_needs_consent() -> None:
    old = schedule(updates=1000)
    new = amended(old, updates=500)
    assert "--allow-earlier-decay" in str(amendment_fault(old, new, 0.1, 100))
    assert amendment_fault(old, new, 0.1, 100, allow_earlier_decay=True) is None
    assert amendment_fault(old, new, 0.1, 600, allow_earlier_decay=True) is not None


def test_cosine_changes_only_in_its_warm_up_and_constant_always() -> None:
    cosine = Schedule.model_validate({"kind": "cosine", "updates": 100, "warmup": 10})
    longer = amended(cosine, updates=200)
    assert amendment_fault(cosine, longer, 0.1, 9) is None
    assert amendment_fault(cosine, longer, 0.1, 10) is not None
    constant = Schedule.model_validate({"kind": "constant", "updates": 100})
    assert amendable_before(constant, amended(constant, updates=90)) is None
    assert amendment_fault(constant, amended(constant, updates=90), 0.1, 89) is None
    assert amendment_fault(constant, amended(constant, updates=90), 0.1, 90) is not None


def test_nothing_else_can_be_amended() -> None:
    old = schedule()
    assert "warmup" in str(amendment_fault(old, schedule(warmup=20), 0.1, 0))
    with pytest.raises(InputError, match="warmup is 10; it must be below"):
        amended(old, updates=10)
    with pytest.raises(InputError, match="belongs to kind wsd"):
        amended(Schedule.model_validate({"kind": "constant", "updates": 5}), decay="linear")
