"""When checkpoints are saved, what they take on disk, and how often to save where machines go away.

`checkpoint_steps` is the one answer for plan and trainer alike, and `choose` the one choice for `every: auto`;
both are pure. Which checkpoints are removed again is the trainer's work; here only the most that can stand is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import accumulate
from typing import Any, Literal

from assay.plan.memory import MASTER, optimizer_bytes
from assay.plan.parameters import count
from assay.recipe.schema import Recipe

# What is presumed until it was given or measured, and said so wherever it is used.
BETWEEN_SECONDS = Decimal(24 * 3600)  # a machine that is taken away once a day
BYTES_PER_SECOND = 500_000_000  # a save onto one solid-state disk; a network disk is slower, several disks are faster
SHORTEST_SAVE = Decimal("0.05")  # a dozen small files, each flushed to the disk


@dataclass(frozen=True)
class Choice:
    """A cadence for `checkpoint.every: auto` and what it was chosen from; seconds are decimal.

    `save` is how long training stands for one save, `whole` how long the save takes until it counts, `update` one
    update, `between` the mean time between interruptions; None: not known. Each has the word for where it is from.
    """

    every: int
    by: Literal["young", "schedule"]
    scheduled: int
    least: int
    most: int
    save: Decimal | None
    save_from: str
    whole: Decimal | None
    update: Decimal | None
    update_from: str
    between: Decimal
    between_from: str

    @property
    def interval(self) -> Decimal | None:
        """Seconds of training between two saves."""
        return None if self.update is None else self.update * self.every

    @property
    def goodput(self) -> float | None:
        """The expected share of the training time that stays; see `goodput`."""
        if self.interval is None or self.save is None:
            return None
        return goodput(self.interval, self.save, self.between)

    def record(self) -> dict[str, Any]:
        """As receipts and the plan hold it: seconds as decimal strings, the goodput to four digits."""
        expected = self.goodput
        return {
            "every": self.every,
            "by": self.by,
            "scheduled": self.scheduled,
            "least": self.least,
            "most": self.most,
            "save_seconds": _text(self.save),
            "save_from": self.save_from,
            "whole_save_seconds": _text(self.whole),
            "update_seconds": _text(self.update),
            "update_from": self.update_from,
            "between_seconds": _text(self.between),
            "between_from": self.between_from,
            "goodput": None if expected is None else f"{expected:.4f}",
        }


def choose(
    recipe: Recipe,
    *,
    save: tuple[Decimal | None, str],
    update: tuple[Decimal | None, str],
    between: tuple[Decimal, str],
    whole: Decimal | None = None,
) -> Choice:
    """Updates between two full checkpoints by Young's formula, within the recipe's `least` and `most`.

    √(2 · save seconds · mean seconds between interruptions) of training, J. W. Young, "A first order approximation
    to the optimum checkpoint interval", Communications of the ACM 17 (1974). Never sooner than a save takes as a
    whole, since one save is in flight at a time. Without a save's or an update's seconds: a hundredth of the schedule.
    """
    auto, updates = recipe.checkpoint.chosen_from, recipe.schedule.updates
    cadence = _bounded(updates, auto.least, auto.most, save[0], whole, update[0], between[0])
    by: Literal["young", "schedule"] = "schedule" if save[0] is None or update[0] is None else "young"
    return Choice(cadence, by, updates, auto.least, auto.most, *save, whole, *update, *between)


def follows(record: Mapping[str, Any]) -> int:
    """The cadence that a record's own figures give, for whoever checks it; ValueError or KeyError when it is none."""

    def seconds(key: str) -> Decimal | None:
        return None if record[key] is None else Decimal(record[key])

    between = Decimal(record["between_seconds"])
    times = seconds("save_seconds"), seconds("whole_save_seconds"), seconds("update_seconds")
    return _bounded(int(record["scheduled"]), int(record["least"]), int(record["most"]), *times, between)


def _bounded(
    updates: int,
    least: int,
    most: int,
    save: Decimal | None,
    whole: Decimal | None,
    update: Decimal | None,
    between: Decimal,
) -> int:
    if save is None or not update:
        return max(least, min(most, updates // 100))
    wanted = int((young(save, between) / update).to_integral_value())
    lasts = int(((whole or Decimal(0)) / update).to_integral_value(ROUND_CEILING))
    return max(least, min(most, max(wanted, lasts)))


def young(save: Decimal, between: Decimal) -> Decimal:
    """Young's interval in seconds: √(2 · save · between)."""
    return (2 * save * between).sqrt()


def goodput(interval: Decimal, save: Decimal, between: Decimal) -> float:
    """The expected share of the time that goes into updates which stay: the rest is saved, or lost and done again.

    τ ÷ (M · (e^((τ + δ) ÷ M) − 1)) for interruptions that come at random, M seconds apart in the mean: J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), without the restart,
    on which no cadence has an influence.
    """
    exponent = (interval + save) / between
    if exponent > 700:  # beyond what a float holds, and nothing is left anyway
        return 0.0
    return float(interval / (between * (exponent.exp() - 1)))


def every(recipe: Recipe) -> int:
    """The cadence in updates where nothing is measured: as stated, or for `auto` a hundredth of the schedule in bounds.

    A hundredth bounds what a recovery can lose to one per cent of the run, and `most` bounds it for long runs.
    """
    stated, auto = recipe.checkpoint.every, recipe.checkpoint.chosen_from
    if isinstance(stated, int):
        return stated
    return _bounded(recipe.schedule.updates, auto.least, auto.most, None, None, None, BETWEEN_SECONDS)


def checkpoint_steps(
    recipe: Recipe, slot_updates: Sequence[int] | None, cadence: int | None = None
) -> dict[str, list[int]]:
    """Steps at which state is saved: `full`, `weights`, and `permanent`, the full ones that retention spares.

    Full: multiples of `cadence` (None: of what `every` says), the `extra` steps, the ends of slots (with `slot_ends`,
    when `slot_updates`, each slot's number of updates, is known) and the final step. Weights alone: multiples of
    `weights_every`. Steps are absolute: a run that continues another one at step N saves only above N. Permanent:
    extra steps, slot ends and the final one.
    """
    first, last = recipe.start.first_update, recipe.schedule.updates
    ends = list(accumulate(slot_updates)) if slot_updates and recipe.checkpoint.slot_ends else []
    permanent = {step for step in (*recipe.checkpoint.extra, *ends, last) if first < step <= last}
    full = permanent | set(_multiples(cadence or every(recipe), first, last))
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


def presumed_save(recipe: Recipe) -> tuple[Decimal, str]:
    """Seconds of a save that nobody measured: the bytes of a full checkpoint at `BYTES_PER_SECOND`."""
    full = MASTER * count(recipe.model) + optimizer_bytes(recipe)
    words = f"presumed: {BYTES_PER_SECOND / 1e6:,.0f} MB/s"
    return max(rounded(Decimal(full) / BYTES_PER_SECOND), SHORTEST_SAVE), words


def rounded(seconds: Decimal | float) -> Decimal:
    """Seconds to the microsecond, as receipts hold them, so that a choice follows from its record exactly."""
    return Decimal(seconds).quantize(Decimal("0.000001"))


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


def _text(seconds: Decimal | None) -> str | None:
    return None if seconds is None else format(seconds.normalize(), "f")
