"""The known answers of the published runs, computed from the repository's recipes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from assay.data import queue as queues
from assay.plan.cadence import checkpoint_steps
from assay.plan.figures import mfu, perplexity, plan, spans
from assay.plan.parameters import count, shapes
from assay.recipe.load import from_resolved, load, resolved
from assay.recipe.schedule import amendable_before, amended, decay_start, factor, rates
from assay.recipe.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
L20 = load(RECIPES / "l20-edu-135m.yaml")
SLAYER = {number: load(RECIPES / f"slayer1b-{number}.yaml") for number in ("1.02", "1.08", "1.09")}


def figures(recipe: Recipe, **more: Any) -> dict[str, Any]:
    return plan(recipe, Path("/nowhere"), **more)


def test_l20_parameters_and_positions() -> None:
    plan_l20 = figures(L20)
    assert plan_l20["parameters"] == 134_515_008
    assert plan_l20["global_batch"] == 258
    assert plan_l20["positions_per_update"] == 528_384
    assert plan_l20["updates"] == 18_928
    assert plan_l20["planned_positions"] == 10_001_252_352
    assert L20.checkpoint.every == 1000
    assert 1000 * L20.positions_per_update == 528_384_000


@pytest.mark.parametrize(("rate", "dollars"), [("0.60", 43), ("1.00", 72), ("1.50", 108)])
def test_l20_hours_and_cost(rate: str, dollars: int) -> None:
    plan_l20 = figures(L20, tokens_per_second=Decimal(38587), usd_per_hour=Decimal(rate))
    assert f"{plan_l20['hours']:.1f}" == "72.0"
    assert round(Decimal(plan_l20["cost"]["usd"])) == dollars
    assert plan_l20["cost"]["usd_per_hour"] == rate
    assert {"storage", "network egress", "idle time", "engineering time"} <= set(plan_l20["cost_excludes"])


def test_l20_mfu_and_perplexity() -> None:
    # 119.5 TFLOP/s: dense bfloat16 of an NVIDIA L20 by the vendor's datasheet
    assert f"{mfu(38_541, figures(L20)['flops_per_position']['six_n'], 119.5e12):.1%}" == "26.0%"
    assert f"{perplexity(2.8731):.2f}" == "17.69"
    assert perplexity(1e9) == float("inf")


def test_l20_rates_begin_at_the_warm_up_and_end_near_a_tenth() -> None:
    assert rates(L20, 0) == {"lr": pytest.approx(4e-4 / 1000)}
    assert rates(L20, 1000) == {"lr": 4e-4}
    assert rates(L20, 18_927)["lr"] == pytest.approx(4e-5, rel=1e-6)


@pytest.mark.parametrize("number", ["1.02", "1.08", "1.09"])
def test_slayer_parameters_and_positions_per_update(number: str) -> None:
    recipe = SLAYER[number]
    assert recipe.model.ffn == 5462
    assert count(recipe.model) == 1_073_912_851
    assert recipe.positions_per_update == 1_048_576
    scalars = [name for name, shape in shapes(recipe.model).items() if shape == (1,)]
    assert len(scalars) == recipe.model.layers - 1


def test_updates_in_positions() -> None:
    assert figures(SLAYER["1.08"])["planned_positions"] == 1_792_016_384
    assert figures(SLAYER["1.02"])["planned_positions"] == 5_997_854_720
    per_update = SLAYER["1.09"].positions_per_update
    assert 13_848 * per_update == 14_520_680_448
    assert 95_000 * per_update == 99_614_720_000
    assert (
        -(-100_000_000_000 // per_update) == figures(SLAYER["1.09"], goal_positions=10**11)["shortfall"]["goal_updates"]
    )


def test_decay_starts() -> None:
    schedule = SLAYER["1.09"].schedule
    assert decay_start(schedule) == figures(SLAYER["1.09"])["decay_start"] == 96_000
    assert decay_start(amended(schedule, updates=80_000)) == 64_000
    assert decay_start(amended(schedule, updates=95_000)) == 76_000
    assert amendable_before(amended(schedule, updates=80_000), schedule) == 64_000
    assert decay_start(SLAYER["1.08"].schedule) == 1709 - 427
    assert decay_start(SLAYER["1.02"].schedule) is decay_start(L20.schedule) is None


def test_102_is_5_6_positions_a_parameter_and_constant() -> None:
    assert round(figures(SLAYER["1.02"])["positions_per_parameter"], 1) == 5.6
    assert {rates(SLAYER["1.02"], update)["lr"] for update in (2250, 3300, 4577, 5719)} == {6e-4}
    # as planned before step 3300: the first lowered update is the one that the source counts as step 4578
    value = resolved(SLAYER["1.02"])
    value["schedule"] |= {"kind": "wsd", "decay_fraction": 0.2, "decay": "1-sqrt"}
    planned = from_resolved(value, "planned").schedule
    lowered = next(update for update in range(2250, 5720) if factor(planned, 0.1, update, 2250) < 1)
    assert lowered + 1 == 4578
    assert decay_start(planned) in SLAYER["1.02"].checkpoint.extra


def test_102_saves_its_25_checkpoints() -> None:
    steps = checkpoint_steps(SLAYER["1.02"], [1801, 1793, 1795, 331])["full"]
    assert len(steps) == 25
    assert set(steps) == {*range(2400, 5701, 150), 4576, 5720}
    assert figures(SLAYER["1.02"])["checkpoints"]["count"] == 25


def test_108_and_l20_save_where_their_records_say() -> None:
    assert checkpoint_steps(SLAYER["1.08"], [1709])["full"] == [250, 500, 750, 1000, 1250, 1500, 1709]
    assert checkpoint_steps(L20, None)["full"] == [*range(1000, 18_001, 1000), 18_928]
    assert figures(L20)["disk_bytes"]["full_kept"] == 2


def test_109_saves_weights_at_each_5000_and_state_at_each_200() -> None:
    steps = checkpoint_steps(SLAYER["1.09"], [5000] * 19)
    assert steps["weights"] == list(range(5000, 120_001, 5000))
    assert steps["full"] == list(range(200, 120_001, 200))
    assert {9600, 11_600, 29_800} <= set(steps["full"])  # the resumes of the record
    assert steps["permanent"] == [*range(5000, 95_001, 5000), 120_000]


def test_packs_of_102() -> None:
    """The last pack is cut by the schedule: 331 of its updates are used."""
    used = spans([1801, 1793, 1795, 1801], SLAYER["1.02"].schedule.updates)
    assert [stop - start for start, stop in used] == [1801, 1793, 1795, 331]
    assert used[-1][1] == 5720
    # as the record counts them, from one and both ends included
    assert [(start + 1, stop) for start, stop in used] == [(1, 1801), (1802, 3594), (3595, 5389), (5390, 5720)]


def test_slot_c01_of_109(tmp_path: Path) -> None:
    recipe = SLAYER["1.09"]
    path = tmp_path / recipe.data.queue
    queue = queues.create(path, block=4096, dtype="uint16", vocabulary=32_768, tokenizer="slayer")
    parts = [
        queues.Part("sha256:" + "1" * 64, None, 0, 4_278_190_159, "en"),
        queues.Part("sha256:" + "1" * 64, None, 4_278_190_159, 4_278_190_159 + 1_069_547_741, "pl"),
    ]
    line = queues.propose(queue, updates=5000, parts=parts, global_batch=recipe.global_batch)
    queues.append(path, line, global_batch=recipe.global_batch)
    facts = plan(recipe, tmp_path, goal_positions=10**11)
    (slot,) = facts["slots"]
    assert slot["tokens"] == 5_347_737_900
    assert slot["windows_needed"] == 1_280_000
    assert slot["windows_available"] in (1_305_599, 1_305_600)
    assert slot["enough"]
    short = facts["shortfall"]
    assert short["prepared_positions"] == 5_242_880_000
    assert short["missing_updates"] == 115_000
    assert short["goal_missing_positions"] == 10**11 - 5_242_880_000
    assert any("5,000 of 120,000 scheduled updates" in warning for warning in facts["warnings"])
    assert any("not on this machine" in warning for warning in facts["warnings"])


def test_109_holds_the_pins_and_the_intent_of_its_record() -> None:
    recipe = SLAYER["1.09"]
    assert recipe.start.init_from is not None
    assert recipe.start.init_from.sha256 == recipe.pins.weights
    warnings = figures(recipe)["warnings"]
    assert any("stops, saved, at update 96,000" in warning for warning in warnings)
    assert figures(recipe)["inherited"]["positions"] is None
    assert figures(SLAYER["1.02"])["inherited"]["positions"] == 2250 * 1_048_576
