"""Goodput against the cadence of full checkpoints on a trace of machines that come and go.

The trace is walked without knowing the future (cheapest zone, stay while it lasts, move at once), each machine begins
with a restart, and what was done since the last complete save is lost with it. Beside the fixed cadences stands the one
that `checkpoint.every: auto` chooses, from the whole trace, and from its first half for its second. Exit 1 when it
keeps less than 98 % of what the best fixed cadence keeps.

    python bench/cadence.py traces/h100x8-gcp-2025-10.csv [--update-seconds 2.62] [--restart-seconds 900]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from assay.cli.show import console, table
from assay.plan.cadence import choose, rounded
from assay.plan.trace import Stretch, Trace, between, read_trace, replay, stretches
from assay.recipe.load import load
from assay.recipe.schema import Recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "slayer1b-1.09.yaml"
SAVES = (Decimal(1), Decimal(10), Decimal(60))  # seconds for which training stands
SHOWN = (5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)  # fixed cadences of the first table, in updates
PROMISE = 0.98


@dataclass(frozen=True)
class Setting:
    """One update and one restart, in seconds, and the recipe whose bounds the choice keeps to."""

    recipe: Recipe
    update: Decimal
    restart: Decimal

    def goodput(self, walk: Sequence[Stretch], every: int, save: Decimal) -> float:
        """The useful share of the seconds in which a machine was held."""
        return replay(walk, every * self.update, save, self.restart).goodput

    def best(self, walk: Sequence[Stretch], save: Decimal) -> tuple[int, float]:
        """The best of all fixed cadences on a grid that is finer than it matters, beyond the bounds of auto too."""
        grid = sorted({max(1, round(1.08**power)) for power in range(150)})
        return max(((every, self.goodput(walk, every, save)) for every in grid), key=lambda one: (one[1], -one[0]))

    def auto(self, walk: Sequence[Stretch], save: Decimal) -> int:
        """What `checkpoint.every: auto` takes from the interruptions of this walk."""
        times = {"save": (save, "given"), "update": (self.update, "given")}
        return choose(self.recipe, between=(rounded(between(walk)), "trace"), **times).every


def main() -> int:
    """Walk, replay, print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--update-seconds", type=Decimal, default=Decimal("2.62144"))  # 1,048,576 at 400,000 a second
    parser.add_argument("--restart-seconds", type=Decimal, default=Decimal(900))
    asked = parser.parse_args()
    trace = read_trace(asked.trace)
    setting = Setting(load(RECIPE), asked.update_seconds, asked.restart_seconds)
    middle = (trace.start + trace.end) // 2
    walk, second = stretches(trace), stretches(trace, first=middle)
    rows = []
    for every in SHOWN:
        shares = [f"{setting.goodput(part, every, save):.2%}" for part in (walk, second) for save in SAVES]
        rows.append((f"{every:,}", f"{every * asked.update_seconds:,.0f} s", *shares))
    heads = [f"{name}, save {save} s" for name in ("all", "second half") for save in SAVES]
    console().print(table("goodput, moving between zones", ("every", "", *heads), rows))
    rows, kept = [], True
    for zone in (None, *trace.zones):
        for save in SAVES if zone is None else SAVES[1:2]:
            row, shares = compared(setting, trace, middle, zone, save)
            rows.append(row)
            kept &= zone is not None or min(shares) >= PROMISE
    columns = ("zone", "save", "between", "auto", "goodput", "best fixed", "goodput", "ratio", "from the first half",
               "goodput on the second", "best fixed", "goodput", "ratio")  # fmt: skip
    console().print(table("auto beside the best fixed cadence", columns, rows))
    print(f"moving between zones, auto keeps at least {PROMISE:.0%} of the best: {'yes' if kept else 'NO'}")
    return 0 if kept else 1


def compared(
    setting: Setting, trace: Trace, middle: int, zone: str | None, save: Decimal
) -> tuple[tuple[str, ...], list[float]]:
    """A row of the second table and its two ratios."""
    cells: list[str] = []
    ratios: list[float] = []
    whole = stretches(trace, zone=zone)
    halves = stretches(trace, last=middle, zone=zone), stretches(trace, first=middle, zone=zone)
    for seen, used in ((whole, whole), halves):
        if not seen or not used:
            cells += ["none seen", "", "", "", ""]
            continue
        every = setting.auto(seen, save)
        mine, (best, most) = setting.goodput(used, every, save), setting.best(used, save)
        ratios.append(mine / most)
        cells += [f"{every:,}", f"{mine:.2%}", f"{best:,}", f"{most:.2%}", f"{ratios[-1]:.4f}"]
    return (zone or "all, moving", f"{save} s", f"{between(whole) / 3600:,.1f} h", *cells), ratios


if __name__ == "__main__":
    sys.exit(main())
