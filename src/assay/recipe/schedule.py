"""The learning rate of every update, by the contract's formulas, and the rules under which a schedule may change.

Pure functions of the schedule and the update: no state, no numpy, no torch, so that a verifier
recomputes the very floats that the trainer used. Nothing here decides what a run does.

Words: u is the zero-based update, W the warm-up, T the scheduled updates, D the decay's first update,
r = min_lr ÷ lr the floor as a share of the peak.
"""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Literal

from pydantic import ValidationError

from assay.errors import InputError
from assay.recipe.fields import Conflict
from assay.recipe.schema import Recipe, Schedule, ScheduleKind

Decay = Literal["none", "linear", "cosine", "1-sqrt"]


def decay_start(schedule: Schedule) -> int | None:
    """D: the first update of a WSD decay, T − floor(decay_fraction × T) in decimal arithmetic; None: no decay.

    A cosine has no decay start: it falls from the end of the warm-up on.
    """
    return schedule.decay_at


def factor(schedule: Schedule, ratio: float, update: int, first_update: int = 0) -> float:
    """f(u): what every group's own peak is multiplied by at `update`.

    `ratio` is r; `first_update` the first update that this run does itself (from which a re-warm counts).
    Raises ValueError outside of first_update ≤ u < T.
    """
    if not first_update <= update < schedule.updates:
        raise ValueError(f"update {update} is outside of this run's updates {first_update}:{schedule.updates}")
    value = _shape(schedule, ratio, update)
    since = update - first_update
    if since < schedule.rewarm:
        value *= (since + 1) / schedule.rewarm
    return value


def _shape(schedule: Schedule, ratio: float, update: int) -> float:
    warmup, total = schedule.warmup, schedule.updates
    if update < warmup:
        return (update + 1) / warmup
    if schedule.kind is ScheduleKind.CONSTANT:
        return 1.0
    if schedule.kind is ScheduleKind.COSINE:
        return _cosine(ratio, (update - warmup) / (total - warmup))
    start = schedule.decay_at
    if start is None or update < start:
        return 1.0
    done = (update - start) / (total - start)
    if schedule.decay == "linear":
        return 1.0 - (1.0 - ratio) * done
    if schedule.decay == "cosine":
        return _cosine(ratio, done)
    return ratio + (1.0 - ratio) * (1.0 - sqrt(done))


def _cosine(ratio: float, done: float) -> float:
    return ratio + (1.0 - ratio) * (1.0 + cos(pi * done)) / 2.0


def rates(recipe: Recipe, update: int) -> dict[str, float]:
    """`lr` of an update, and `muon_lr` with Muon: each group's peak times the one factor."""
    optimizer = recipe.optimizer
    value = factor(recipe.schedule, floor_ratio(recipe), update, recipe.start.first_update)
    result = {"lr": optimizer.lr * value}
    if optimizer.muon_lr is not None:
        result["muon_lr"] = optimizer.muon_lr * value
    return result


def floor_ratio(recipe: Recipe) -> float:
    """r = min_lr ÷ lr; Muon's floor is its own peak times the same ratio."""
    return recipe.schedule.min_lr / recipe.optimizer.lr


def phase(schedule: Schedule, update: int) -> Literal["warmup", "constant", "decay"]:
    """The name of the stretch that an update lies in; a cosine is all decay after its warm-up."""
    if update < schedule.warmup:
        return "warmup"
    if schedule.kind is ScheduleKind.COSINE:
        return "decay"
    start = schedule.decay_at
    return "constant" if start is None or update < start else "decay"


def amended(schedule: Schedule, updates: int | None = None, decay: Decay | None = None) -> Schedule:
    """The schedule with another number of updates, another decay, or both, checked in full.

    Raises InputError when the result is no schedule.
    """
    changes: dict[str, object] = {}
    if updates is not None:
        changes["updates"] = updates
    if decay is not None:
        changes["decay"] = decay
    try:
        return Schedule.model_validate(schedule.model_dump() | changes)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        cause = fault.get("ctx", {}).get("error")
        reason = str(cause) if isinstance(cause, Conflict) else f"schedule.{fault['loc'][0]}: {fault['msg']}"
        raise InputError(f"the amended schedule is not valid: {reason}") from None


def amendable_before(old: Schedule, new: Schedule) -> int | None:
    """The change may be adopted at a step below this number; None: at any step.

    WSD: the smaller of the two decay starts. Cosine: the end of the warm-up, because its shape depends on T
    from there on. Constant: always.
    """
    if old.kind is ScheduleKind.COSINE:
        return min(old.warmup, new.warmup)
    starts = [start for start in (old.decay_at, new.decay_at) if start is not None]
    return min(starts, default=None)


def stopped_at_decay(old: Schedule, new: Schedule, step: int) -> bool:
    """True where a run with `intent: no-decay` stands, saved, at its decay start, and the change starts none earlier.

    It has done no update of the decay: there, and nowhere behind, the change may still be adopted.
    """
    return old.intent is not None and step == old.decay_at and (new.decay_at is None or new.decay_at >= step)


def amendment_fault(
    old: Schedule,
    new: Schedule,
    ratio: float,
    step: int,
    first_update: int = 0,
    allow_earlier_decay: bool = False,
) -> str | None:
    """Why the change from `old` to `new` may not be adopted at `step`; None when it may.

    Only `updates` and the decay may change; not past a decay start; the decay moves earlier only by consent;
    the rate is the same, to the last bit, on both sides of the step. A run with `intent: no-decay` that stands,
    stopped, at its decay start has done no update of the decay, so it may still move it or give up stopping there.
    """
    fixed = ("kind", "warmup", "min_lr", "rewarm", "intent")
    changed = [key for key in fixed if getattr(old, key) != getattr(new, key)]
    if changed:
        return f"schedule.{changed[0]} cannot be amended; only updates and the decay can"
    if step >= new.updates:
        return f"schedule.updates {new.updates} is not above the step {step} of the run"
    before, after = old.decay_at, new.decay_at
    stopped = stopped_at_decay(old, new, step)
    limit = amendable_before(old, new)
    if limit is not None and step >= limit and not stopped:
        return f"it may be adopted only at a step before {limit}, and the run is at step {step}"
    if after is not None and (before is None or after < before) and not allow_earlier_decay:
        was = "there was none" if before is None else f"it was {before}"
        return f"the decay would start earlier, at update {after} ({was}); --allow-earlier-decay consents to it"
    for update in (step - 1,) if stopped else (step - 1, step):
        if first_update <= update < min(old.updates, new.updates):
            rate_before = factor(old, ratio, update, first_update)
            rate_after = factor(new, ratio, update, first_update)
            if rate_before != rate_after:
                return f"the rate of update {update} would jump from {rate_before!r} to {rate_after!r} of the peak"
    return None
