"""What the shipped policies save on a real trace of spot machines, beside the plain rule and the optimum.

Run it as `.venv/bin/python bench/guard.py TRACE [--choose]`, TRACE being 8 × H100 on GCP in October 2025 (see
docs/guard.md). `--choose` repeats the choice of the parameters on the first half (a quarter of an hour). The figures
are of the second half, of which the choice saw nothing. It asserts nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from itertools import product
from pathlib import Path

from assay.cli import show
from assay.files.shared import shared
from assay.guard import clairvoyant, simulator, traces
from assay.guard.decision import Decision, History, decide, offers
from assay.guard.policy import Policy, Zones, load

SETTLE = (0, 600, 1200, 1800, 3600, 7200)  # seconds; the same for each loss
MEMORY = (43_200, 86_400, 172_800, 259_200, 604_800)
MOST = ("15", "17", "19")  # dollars an hour: two zones, four, nine
MOVE = (None, Decimal("0.95"))
STARTS = range(0, 121, 24)  # hours after the trace's begin, each simulated to the end of the first half
DRAWS = 200
PLAIN = "plain-17"


def main() -> None:
    """Choose where asked, then print the table of the second half."""
    trace = traces.load(Path(sys.argv[1]))
    middle = half(trace)
    if "--choose" in sys.argv:
        choose(Path(sys.argv[1]))
    names = ("spot-patient", "spot-steady", PLAIN)
    policies = [load(shared(f"policies/{name}.yaml")) for name in names]
    outcomes = {rules.name: simulator.simulate(trace, rules, middle, trace.end) for rules in policies}
    plain = policies[-1]
    drawn = [simulator.simulate(trace, plain, middle, trace.end, any_zone(seed)) for seed in range(DRAWS)]
    any_spent, any_useful = sum(one.spent for one in drawn), sum(one.useful for one in drawn)
    per_draw = sorted(one.usd_per_useful_hour or Decimal("Infinity") for one in drawn)
    mean = sum(per_draw, Decimal(0)) / DRAWS
    base = outcomes[PLAIN].usd_per_useful_hour
    assert base is not None
    rows = []
    for name, one in outcomes.items():
        rows.append(row(name, one.spent, one.useful, one.starts, one.interruptions, base, mean))
    rows.append(row(f"{PLAIN}, any zone, mean of {DRAWS}", any_spent / DRAWS, any_useful / DRAWS,
                    sum(one.starts for one in drawn) / DRAWS, sum(one.interruptions for one in drawn) / DRAWS,
                    base, mean))  # fmt: skip
    for name, one in outcomes.items():
        plan = clairvoyant.optimum(trace, plain, middle, trace.end, one.useful)
        assert plan is not None
        rows.append(
            row(f"optimum, at least the hours of {name}", plan.spent, plan.useful, plan.starts, "-", base, mean)
        )
    columns = ("rule", "dollars", "useful hours", "dollars a useful hour", "starts", "losses",
               "less than plain, cheapest", "less than plain, any")  # fmt: skip
    console = show.console()
    console.print(show.table(f"{middle:%Y-%m-%d %H:%M} to {trace.end:%Y-%m-%d %H:%M} UTC", columns, rows))
    console.print(f"plain, any zone: {per_draw[0]:.3f} to {per_draw[-1]:.3f} dollars a useful hour, mean {mean:.3f}")


def row(
    name: str, spent: Decimal, useful: Decimal, starts: object, lost: object, base: Decimal, mean: Decimal
) -> list[object]:
    """One rule's figures and how much less it costs than the plain rule in its two readings."""
    per_hour = spent * 3600 / useful
    return [name, f"{spent:,.2f}", f"{useful / 3600:.1f}", f"{per_hour:.3f}", starts, lost,
            f"{100 * (1 - per_hour / base):.2f} %", f"{100 * (1 - per_hour / mean):.2f} %"]  # fmt: skip


def half(trace: traces.Trace) -> datetime:
    """The middle of the trace, at a full ten minutes."""
    looks = (trace.end - trace.start) // timedelta(minutes=10)
    return trace.start + timedelta(minutes=10) * (looks // 2)


def any_zone(seed: int) -> simulator.Decide:
    """The plain rule to the letter: of the zones that may be taken any one."""
    dice = random.Random(seed)  # noqa: S311 - a simulation

    def answer(history: History, policy: Policy, now: datetime) -> Decision:
        said = decide(history, policy, now)
        if said.verb != "take":
            return said
        zone = dice.choice(offers(history, policy, now)).name
        return replace(said, zone=zone)

    return answer


def grid() -> Iterator[Zones]:
    """Every combination that differs: without a price per loss the memory does not matter."""
    for most, move, settle, loss, memory in product(MOST, MOVE, SETTLE, SETTLE, MEMORY):
        if (loss == 0 and memory != MEMORY[0]) or (most == "15" and move is not None):
            continue
        yield Zones(max_usd_per_hour=Decimal(most), settle_seconds=settle, settle_seconds_per_loss=loss,
                    memory_seconds=memory, avoid_seconds=0, move_fraction=move)  # fmt: skip


@cache
def read(path: Path) -> traces.Trace:
    """The trace, read once a process."""
    return traces.load(path)


def judged(path: Path, zones: Zones) -> tuple[Decimal, Decimal]:
    """Dollars and useful seconds over all starts of the first half."""
    trace, plain = read(path), load(shared(f"policies/{PLAIN}.yaml"))
    policy = plain.model_copy(update={"zones": zones})
    spent = useful = Decimal(0)
    for hours in STARTS:
        one = simulator.simulate(trace, policy, trace.start + timedelta(hours=hours), half(trace))
        spent, useful = spent + one.spent, useful + one.useful
    return spent, useful


def choose(path: Path) -> None:
    """Print the combinations that cost least on the first half, for three floors of useful hours."""
    every = list(grid())
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(judged, [path] * len(every), every, chunksize=8))
    _, most = judged(path, load(shared(f"policies/{PLAIN}.yaml")).zones)
    for floor in (Decimal(0), Decimal("0.75"), Decimal("0.9"), Decimal("0.98")):
        kept = [(spent * 3600 / useful, useful, zones) for (spent, useful), zones in zip(found, every, strict=True)
                if useful >= floor * most and useful]  # fmt: skip
        rows = [
            (f"{per_hour:.4f}", f"{100 * useful / most:.1f} %", zones.max_usd_per_hour, zones.settle_seconds,
             zones.settle_seconds_per_loss, zones.memory_seconds, zones.move_fraction or "never")
            for per_hour, useful, zones in sorted(kept, key=lambda one: one[0])[:5]
        ]  # fmt: skip
        title = f"first half, {len(every)} combinations, at least {floor} of the plain rule's useful hours"
        columns = ("dollars a useful hour", "useful hours", "most", "settle", "per loss", "memory", "move below")
        show.console().print(show.table(title, columns, rows))


if __name__ == "__main__":
    main()
