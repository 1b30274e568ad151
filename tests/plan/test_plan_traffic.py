"""What a mirror moves and costs, added up copy by copy, and the warning above a twentieth of the funds."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import InputError
from assay.plan.figures import plan
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe

TINY = Path("recipes/tiny.yaml")


def tiny(**mirror: Any) -> Recipe:
    recipe = recipes.load(TINY)
    found = recipes.resolved(recipe)
    found["checkpoint"] = found["checkpoint"] | {
        "every": 300,
        "weights_every": 700,
        "mirror": {"url": "s3://b"} | mirror,
    }
    return recipes.from_resolved(found, "tiny")


@given(every=st.integers(1, 9), verify=st.sampled_from(["readback", "stored"]), cents=st.integers(1, 99))
def test_each_copy_is_counted_once_and_read_back_once(every: int, verify: str, cents: int) -> None:
    recipe, price = tiny(every=every, verify=verify), Decimal(cents) / 100
    figures = plan(recipe, TINY.parent, usd_per_gb=price)
    sizes, steps, found = figures["disk_bytes"], figures["checkpoints"], figures["mirror"]
    copied = {step for at, step in enumerate(steps["full"]) if at % every == 0} | {steps["full"][-1]}
    total = len(copied) * sizes["full_checkpoint"] + len(steps["weights"]) * sizes["weights_checkpoint"]
    assert (found["full_copies"], found["bytes_sent"]) == (len(copied), total)
    assert found["bytes_read_back"] == (total if verify == "readback" else 0)
    assert abs(Decimal(found["usd_read_back"]) - Decimal(found["bytes_read_back"]) * price / 10**9) <= Decimal("0.005")


def test_above_a_twentieth_of_the_funds_it_warns_and_names_the_ways_out() -> None:
    def warned(funds: Decimal, **mirror: Any) -> list[str]:
        figures = plan(tiny(**mirror), TINY.parent, usd_per_gb=Decimal(50), funds=funds)
        return [one for one in figures["warnings"] if "reading copies back" in one]

    cost = Decimal(plan(tiny(), TINY.parent, usd_per_gb=Decimal(50))["mirror"]["usd_read_back"])
    assert cost > 0
    assert warned(cost * 21) == []
    [warning] = warned(cost * 10)
    assert f"costs {cost} dollars, 10.0 % of the funds: set checkpoint.mirror.verify to stored" in warning
    assert warned(cost * 10, verify="stored") == []
    with pytest.raises(InputError, match="--funds is given without --usd-per-gb"):
        plan(tiny(), TINY.parent, funds=Decimal(1))
    assert plan(recipes.load(TINY), TINY.parent, usd_per_gb=Decimal(1))["mirror"] is None
