"""When checkpoints are saved, and what they take on disk.

`checkpoint_steps` is the one answer for plan and trainer alike; it is pure. Which of them are
removed again is the trainer's work; here only the most that can stand at one time is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, Literal

from assay.plan.memory import MASTER, optimizer_bytes
from assay.plan.parameters import count
from assay.recipe.schema import Recipe


def every(recipe: Recipe) -> int:
    """The full checkpoints' cadence in updates; `auto` is a hundredth of the schedule, from 1 to 1,000.

    A hundredth bounds what a recovery can lose to one per cent of the run; a thousand updates bound it
    for long runs. No price or speed is known here, so it is a rule of thumb that the recipe can replace.
    """
    stated = recipe.checkpoint.every
    return stated if isinstance(stated, int) else max(1, min(1000, recipe.schedule.updates // 100))


def checkpoint_steps(recipe: Recipe, slot_updates: Sequence[int] | None) -> dict[str, list[int]]:
    """Steps at which state is saved: `full`, `weights`, and `permanent`, the full ones that retention spares.

    Full: multiples of `every`, the `extra` steps, the ends of slots (with `slot_ends`, when `slot_updates`,
    each slot's number of updates, is known) and the final step. Weights alone: multiples of `weights_every`.
    Steps are absolute: a run that continues another one at step N saves only above N. Permanent: extra
    steps, slot ends and the final one.
    """
    first, last = recipe.start.first_update, recipe.schedule.updates
    ends = list(accumulate(slot_updates)) if slot_updates and recipe.checkpoint.slot_ends else []
    permanent = {step for step in (*recipe.checkpoint.extra, *ends, last) if first < step <= last}
    full = permanent | set(_multiples(every(recipe), first, last))
    weights = _multiples(recipe.checkpoint.weights_every, first, last) if recipe.checkpoint.weights_every else range(0)
    return {"full": sorted(full), "weights": list(weights), "permanent": sorted(permanent)}


def _multiples(step: int, first: int, last: int) -> range:
    return range((first // step + 1) * step, last + 1, step)


def disk(recipe: Recipe, steps: dict[str, list[int]]) -> dict[str, Any]:
    """Bytes on disk: one checkpoint of each kind, and the most that can stand at one time, one being written included.

    Counted are the tensors; manifests and headers add well under one per cent. Metrics, ledger and logs are not in it.
    """
    weights = MASTER * count(recipe.model)
    full = weights + optimizer_bytes(recipe)
    standing = most_standing(steps["full"], set(steps["permanent"]), recipe.checkpoint.keep)
    return {
        "full_checkpoint": full,
        "weights_checkpoint": weights,
        "full_kept": standing,
        "weights_kept": len(steps["weights"]),
        "in_flight": 1,
        "total": (standing + 1) * full + len(steps["weights"]) * weights,
    }


def most_standing(full: Sequence[int], permanent: Collection[int], keep: int | Literal["all"]) -> int:
    """The most full checkpoints that stand after a clean-up: the newest `keep` and the permanent ones before them."""
    if keep == "all":
        return len(full)
    older = most = 0
    for index in range(len(full)):
        if index >= keep and full[index - keep] in permanent:
            older += 1
        most = max(most, older + min(keep, index + 1))
    return most
