"""What a run's own ledger and metrics say about saves, interruptions and lost work."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from small import Project

from assay.errors import VerificationError
from assay.ledger.ledger import Receipt
from assay.plan.cadence import BETWEEN_SECONDS, every, presumed_save
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.cadence import between, in_force, observed, save_seconds
from assay.run.folder import RunFolder, create
from assay.run.history import History, gather
from assay.run.lost import Again, in_words, price
from assay.run.status import status


def told(*receipts: tuple[int, str, dict[str, Any]]) -> History:
    """A history of receipts at these minutes of one hour."""
    head = Receipt(0, "2026-11-30T10:00:00.000Z", "run.created", {"run_id": "r", "recipe": "d"}, "0")
    rest = [
        Receipt(seq, f"2026-11-30T10:{minute:02d}:00.000Z", kind, body, str(seq))
        for seq, (minute, kind, body) in enumerate(receipts, start=1)
    ]
    return gather([head, *rest])


def opened(segment: int, step: int = 0) -> dict[str, Any]:
    return {"segment": segment, "mode": "resume", "step": step, "evidence": {}}


def saved(**keys: Any) -> dict[str, Any]:
    named = dict.fromkeys(("folder", "manifest_sha256", "weights_sha256", "order_digest"), "x")
    return {"segment": 1, "step": 1, "checkpoint": "full", "state_sha256": None, **named, **keys}


def lines(path: Path, *told: tuple[int, int, int, float | None]) -> Path:
    """Metrics of (segment, update, minute, seconds)."""
    with path.open("w") as file:
        for segment, update, minute, seconds in told:
            stamp = f"2026-11-30T10:{minute:02d}:00.000Z"
            line = {"update": update, "segment": segment, "time": stamp, "loss": 1.0, "order_digest": "d"}
            file.write(json.dumps(line | ({} if seconds is None else {"seconds": seconds})) + "\n")
    return path


@pytest.fixture
def recipe(project: Project) -> Recipe:
    return recipes.load(project.recipe(checkpoint={"every": "auto"}))


def test_interruptions_are_ends_that_nobody_wished_for(tmp_path: Path, recipe: Recipe) -> None:
    history = told(
        (0, "start", opened(1)), (10, "interrupted", {"segment": 1, "step": 1, "cause": "preempted"}),
        (11, "recovery", opened(2)), (13, "interrupted", {"segment": 2, "step": 1, "cause": "stop"}),
        (14, "recovery", opened(3)), (15, "end", {"segment": 3, "step": 1, "cause": "until"}),
        (16, "recovery", opened(4)), (18, "failed", {"segment": 4, "step": 1, "code": 71}),
        (19, "recovery", opened(5)), (20, "failed", {"segment": 5, "step": 1, "code": 5}),
        (21, "recovery", opened(6)),  # killed with its machine: the metrics say how long it lived
        (40, "recovery", opened(7)),
    )  # fmt: skip
    seen = observed(history, lines(tmp_path / "m", (6, 0, 25, 2.0), (6, 1, 26, 4.0), (6, 2, 27, 3.0)), 7)
    assert seen.interruptions == 3, "preempted, a machine fault, and one that said nothing"
    assert seen.seconds == 60 * (10 + 2 + 1 + 2 + 1 + 6)
    assert seen.update[0] == 3
    mean, words = between(None, seen, 60.0)
    assert mean == (BETWEEN_SECONDS + 60 * 23) / 4
    assert "observed: 3" in words


def test_the_save_time_is_that_of_receipts_and_presumed_before_the_first(recipe: Recipe) -> None:
    assert save_seconds(told(), recipe) == (presumed_save(recipe), None)
    assert save_seconds(told((1, "checkpoint.saved", saved())), recipe) == (presumed_save(recipe), None)
    few = [saved(stall_seconds=stall, seconds="9.5") for stall in ("100", "0.5", "0.7", "0.6", "0.4", "0.8")]
    weights = saved(checkpoint="weights", stall_seconds="50")
    history = told(*((1, "checkpoint.saved", body) for body in (*few, weights)))
    assert save_seconds(history, recipe) == ((Decimal("0.6"), "measured: median of 5"), Decimal("9.5"))
    with pytest.raises(VerificationError, match="'soon' as its stall_seconds"):
        save_seconds(told((1, "checkpoint.saved", saved(stall_seconds="soon"))), recipe)


def test_the_cadence_in_force_is_the_newest_receipt_s_unless_one_is_stated(project: Project, recipe: Recipe) -> None:
    chosen = told(
        (1, "cadence", {"segment": 1, "step": 0, "every": 40}), (2, "cadence", {"segment": 1, "step": 40, "every": 17})
    )
    assert in_force(recipe, chosen) == 17
    assert in_force(recipe, told()) == every(recipe)
    assert in_force(recipes.load(project.recipe(checkpoint={"every": 6})), chosen) == 6


def test_work_that_was_lost_is_counted_with_its_seconds_and_at_the_newest_price(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m", *((1, update, 0, 1.0) for update in range(10)),  # killed behind the checkpoint of step 6
        *((2, update, 1, 2.0) for update in range(6, 8)), *((3, update, 2, 4.0) for update in range(6, 12)),
    )  # fmt: skip
    again = Again()
    for line in map(json.loads, path.read_text().splitlines()):
        again.take(line)
    free = again.facts(told(), 100)
    assert (free["updates"], free["positions"], free["seconds"]) == (2 + 4, 600, 2 * 2.0 + 4 * 4.0)
    assert (free["usd"], free["differing"]) == (None, 0)
    assert "cost not measured" in in_words(free)
    prices = told(
        (1, "price", {"usd_per_hour": "9"}),
        (2, "price", {"usd_per_hour": "18.00"}),
        (3, "alarm", {"alarm": "recomputed update differs"}),
    )
    paid = again.facts(prices, 100)
    assert Decimal(paid["usd"]) == Decimal(20) * 18 / 3600 == Decimal("0.1")
    assert "1 DIFFER" in in_words(paid)
    again.take({"update": 3})
    assert again.facts(prices, 100)["seconds"] is again.facts(prices, 100)["usd"] is None, "one of them was not timed"


@pytest.mark.parametrize("stated", [None, "", "free", "0", "-1", "NaN", "Infinity", 17])
def test_a_price_that_is_none_is_not_measured(stated: object) -> None:
    assert price(told((1, "price", {"usd_per_hour": stated}))) is None
    assert price(told((1, "price", {}))) is None


def test_without_a_reading_lost_work_costs_what_was_metered_with_or_what_the_machine_was_said_to_cost() -> None:
    def here(*receipts: tuple[str, dict[str, Any]]) -> str | None:
        found = price(told(*((number, kind, body) for number, (kind, body) in enumerate(receipts, 1))))
        return None if found is None else str(found)

    stated = ("allocation", {"event": "began", "usd_per_machine_hour": "7"})
    silent = ("allocation", {"event": "began", "usd_per_machine_hour": None})
    metered, unpriced = ("spend", {"usd_per_hour": "8"}), ("spend", {"usd_per_hour": None})
    assert here(silent, unpriced) is None
    assert here(stated, silent) == "7"
    assert here(metered, unpriced, stated) == "8"
    assert here(("price", {"usd_per_hour": "9"}), metered, stated) == "9"
    assert here(("price", {"usd_per_hour": None}), metered, stated) == "8", "a look that found no price"


def test_status_tells_what_was_done_again(project: Project) -> None:
    path = project.recipe(schedule__updates=30)
    run: RunFolder = create(project.path / "lost", path, recipes.load(path))
    lines(run.metrics, (1, 0, 0, 0.5), (1, 1, 0, 0.5), (2, 1, 1, 0.25), (2, 2, 1, 0.25))
    run.open_ledger().append("price", {"usd_per_hour": "7200"})
    found = status(run)
    assert found["recomputed"] | {"positions": 0} == {
        "updates": 1, "positions": 0, "seconds": 0.25, "usd": "0.5000", "usd_per_hour": "7200", "differing": 0,
    }  # fmt: skip
    assert found["checkpoint_every"] == 6
