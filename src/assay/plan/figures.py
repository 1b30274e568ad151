"""Every figure that follows from a recipe, before anything is spent.

`plan` answers with the contract's keys, whether the data exists or not; what cannot be known is None
and `warnings` says why. It measures nothing, and an estimate is called one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import InputError
from assay.files.reading import read_object
from assay.plan import trace
from assay.plan.cadence import BETWEEN_SECONDS, Choice, checkpoint_steps, choose, disk, goodput, presumed_save, rounded
from assay.plan.memory import memory_by_ranks
from assay.plan.parameters import count
from assay.plan.traffic import traffic, warning
from assay.recipe.load import from_resolved
from assay.recipe.schedule import decay_start
from assay.recipe.schema import Recipe

if TYPE_CHECKING:
    from assay.data.queue import Queue

COST_EXCLUDES = (
    "storage",
    "network egress",
    "idle time",
    "updates done again after recoveries",
    "validation, controls and saving",
    "engineering time",
)


@dataclass(frozen=True)
class Saves:
    """What is known before a run: seconds of a save, hours between interruptions, a trace of them."""

    save_seconds: Decimal | None = None
    interruption_hours: Decimal | None = None
    trace: Path | None = None


def flops_per_position(recipe: Recipe) -> dict[str, int]:
    """`six_n` = 6 × all parameters (Kaplan et al. 2020); `attention` = 12 × layers × width × block (PaLM, appendix B).

    Forward and backward; activations that are computed again are not counted.
    """
    model = recipe.model
    return {"six_n": 6 * count(model), "attention": 12 * model.layers * model.width * model.block}


def mfu(tokens_per_second: float, flops: int, peak: float) -> float:
    """Model FLOPs utilisation as a fraction: positions per second × FLOPs per position ÷ `peak` FLOP/s.

    `peak` is the dense rate of all GPUs in the arithmetic used. Above 1 the peak or the speed is wrong: InputError.
    """
    if not (peak > 0 and math.isfinite(peak) and tokens_per_second >= 0):
        raise InputError(f"the peak is {peak} FLOP/s and the speed {tokens_per_second} tokens/s; both must be positive")
    value = tokens_per_second * flops / peak
    if value > 1:
        raise InputError(f"an MFU of {value:.0%} is impossible; the peak of {peak:g} FLOP/s is not that of these GPUs")
    return value


def perplexity(loss: float) -> float:
    """e to the mean cross-entropy in nats; infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def rank_refusal(recipe: Recipe, ranks: int) -> str:
    """Why so many ranks cannot run the recipe, with the numbers that can."""
    allowed = ", ".join(str(count) for count in recipe.rank_counts)
    reason = f"batch.lanes is {recipe.batch.lanes}, and the lanes are shared out evenly"
    if recipe.reduction == "fast":
        reason = f"an update has {recipe.batch.accumulation * recipe.batch.lanes} micro-batches to share out evenly"
    return f"{ranks} ranks cannot run this recipe: {reason}; {allowed} ranks can"


def hours(positions: int, tokens_per_second: Decimal) -> Decimal:
    """Hours to train so many positions at a constant speed."""
    return Decimal(positions) / tokens_per_second / 3600


def spans(slot_updates: Sequence[int], updates: int) -> list[tuple[int, int]]:
    """The half-open update ranges in which a run of so many updates reads each slot; unused slots are left out."""
    result, begin = [], 0
    for length in slot_updates:
        if begin >= updates:
            break
        result.append((begin, min(begin + length, updates)))
        begin += length
    return result


def plan(
    recipe: Recipe,
    folder: Path,
    tokens_per_second: Decimal | None = None,
    usd_per_hour: Decimal | None = None,
    goal_positions: int | None = None,
    ranks: int | None = None,
    saves: Saves | None = None,
    usd_per_gb: Decimal | None = None,
    funds: Decimal | None = None,
) -> dict[str, Any]:
    """All derived figures as plain JSON data, with the keys of the contract's `plan` row.

    `folder` is the recipe's own, from which its paths count. Raises InputError when a speed, rate or goal
    makes no sense, when the queue that is there is no queue, or when it does not fit the recipe's block or vocabulary.
    """
    _positive("--tokens-per-second", tokens_per_second)
    _positive("--usd-per-hour", usd_per_hour)
    _positive("--usd-per-gb", usd_per_gb)
    _positive("--funds", funds)
    if goal_positions is not None and goal_positions < 1:
        raise InputError(f"--goal-positions is {goal_positions}; a number of at least 1 is expected")
    parameters, per_update, updates = count(recipe.model), recipe.positions_per_update, recipe.schedule.updates
    first = recipe.start.first_update
    positions = per_update * (updates - first)
    queue = _queue(recipe, folder)
    slot_updates = None if queue is None else [slot.updates for slot in queue.slots]
    auto = _auto(recipe, folder, tokens_per_second, saves or Saves())
    stated = recipe.checkpoint.every
    every = stated if isinstance(stated, int) else auto.every
    steps = checkpoint_steps(recipe, slot_updates, every)
    duration = None if tokens_per_second is None else hours(positions, tokens_per_second)
    inherited = _inherited(recipe, folder)
    disk_bytes = disk(recipe, steps)
    sizes = disk_bytes["full_checkpoint"], disk_bytes["weights_checkpoint"]
    mirror = traffic(recipe, steps, *sizes, usd_per_gb, funds)
    return {
        "name": recipe.name,
        "start": recipe.start.kind,
        "schedule": recipe.schedule.kind.value,
        "parameters": parameters,
        "positions_per_update": per_update,
        "updates": updates,
        "first_update": first,
        "planned_positions": per_update * updates,
        "positions_of_this_run": positions,
        "positions_per_parameter": round(per_update * updates / parameters, 3),
        "decay_start": decay_start(recipe.schedule),
        "warmup": recipe.schedule.warmup,
        "global_batch": recipe.global_batch,
        "block": recipe.model.block,
        "micro_batches": _micro_batches(recipe),
        "flops_per_position": flops_per_position(recipe),
        "memory_bytes": memory_by_ranks(recipe),
        "disk_bytes": disk_bytes,
        "mirror": mirror,
        "checkpoints": {**steps, "count": len(steps["full"]), "every": every},
        "cadence": _cadence(every, isinstance(stated, int), auto),
        "slots": None if queue is None else _slots(recipe, queue),
        "hours": None if duration is None else float(_rounded(duration, "0.01")),
        "cost": _cost(duration, usd_per_hour),
        "cost_excludes": list(COST_EXCLUDES),
        "inherited": inherited,
        "shortfall": _shortfall(recipe, queue, inherited, goal_positions),
        "warnings": _warnings(recipe, folder, queue, inherited)
        + warning(mirror)
        + ([rank_refusal(recipe, ranks)] if ranks is not None and ranks not in recipe.rank_counts else [])
        + (["--usd-per-hour without --tokens-per-second gives no cost"] if usd_per_hour and duration is None else []),
    }


def _auto(recipe: Recipe, folder: Path, tokens_per_second: Decimal | None, saves: Saves) -> Choice:
    """What `checkpoint.every: auto` takes, with what is given here, stated in the recipe, or presumed."""
    _positive("--save-seconds", saves.save_seconds)
    _positive("--interruption-hours", saves.interruption_hours)
    if saves.interruption_hours is not None and saves.trace is not None:
        raise InputError("--interruption-hours and --trace both say how often machines go away; leave one out")
    between = (BETWEEN_SECONDS, "presumed: one interruption a day")
    if saves.interruption_hours is not None:
        between = (rounded(saves.interruption_hours * 3600), "given: --interruption-hours")
    elif saves.trace is not None:
        between = trace.expected(saves.trace)
    else:
        between = trace.stated(recipe, folder) or between
    update: tuple[Decimal | None, str] = (None, "not known without --tokens-per-second")
    if tokens_per_second is not None:
        update = (rounded(recipe.positions_per_update / tokens_per_second), "given: --tokens-per-second")
    save = presumed_save(recipe)
    if saves.save_seconds is not None:
        save = (rounded(saves.save_seconds), "given: --save-seconds")
    return choose(recipe, save=save, update=update, between=between)


def _cadence(every: int, stated: bool, auto: Choice) -> dict[str, Any]:
    """The cadence in force, whether the recipe states it, its expected goodput, and what `auto` takes and why."""
    expected = None
    if auto.update is not None and auto.save is not None:
        expected = f"{goodput(auto.update * every, auto.save, auto.between):.4f}"
    return {"every": every, "stated": stated, "goodput": expected, "auto": auto.record()}


def _positive(option: str, value: Decimal | None) -> None:
    if value is not None and not (value.is_finite() and value > 0):
        raise InputError(f"{option} is {value}; a number above 0 is expected")


def _rounded(value: Decimal, to: str) -> Decimal:
    return value.quantize(Decimal(to), rounding=ROUND_HALF_UP)


def _cost(duration: Decimal | None, usd_per_hour: Decimal | None) -> dict[str, str] | None:
    if duration is None or usd_per_hour is None:
        return None
    return {"usd": str(_rounded(duration * usd_per_hour, "0.01")), "usd_per_hour": str(usd_per_hour)}


def _micro_batches(recipe: Recipe) -> dict[str, Any]:
    batch = recipe.batch
    return {
        "sequences": batch.micro,
        "per_update": batch.accumulation * batch.lanes,
        "per_lane": batch.accumulation,
        "lanes": batch.lanes,
        "per_rank": {str(ranks): batch.accumulation * batch.lanes // ranks for ranks in recipe.rank_counts},
    }


def _queue(recipe: Recipe, folder: Path) -> Queue | None:
    path = folder / recipe.data.queue
    if not path.exists() and not path.is_symlink():
        return None
    from assay.data import queue as queues  # brings numpy: a quarter of a second that a plan without data need not pay

    queue = queues.load(path)
    for key, ours, theirs in (
        ("block", recipe.model.block, queue.block),
        ("vocabulary", recipe.model.vocabulary, queue.vocabulary),
    ):
        if (theirs > ours) if key == "vocabulary" else (theirs != ours):
            rule = "at least the queue's" if key == "vocabulary" else "the queue's"
            raise InputError(f"model.{key} is {ours}, but {path} has {key} {theirs}; the recipe's must be {rule}")
    return queue


def _slots(recipe: Recipe, queue: Queue) -> list[dict[str, Any]]:
    """One entry a slot: its updates, those that the schedule reaches, its tokens, and whether they suffice."""
    reached = spans([slot.updates for slot in queue.slots], recipe.schedule.updates)
    result = []
    for index, slot in enumerate(queue.slots):
        begin, end = reached[index] if index < len(reached) else (slot.first_update, slot.first_update)
        stream = slot.stream(recipe.data.seed, queue.block)
        needed = (end - begin) * recipe.global_batch
        result.append(
            {
                "slot": slot.number,
                "updates": slot.updates,
                "first_update": slot.first_update,
                "used_updates": end - begin,
                "tokens": slot.tokens,
                "epochs": slot.epochs,
                "windows_needed": needed,
                # exact by the seed; for absurdly many epochs the least that any seed gives, so that a plan ends at once
                "windows_available": stream.capacity() if slot.epochs <= 1000 else stream.least(),
                "enough": stream.holds(needed),
            }
        )
    return result


def _inherited(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What the start brings along, in positions; None where it cannot be known from here.

    After `init_from` it is known when the parent run lies there and itself began from nothing.
    """
    start = recipe.start
    if start.continue_from is not None:
        step = start.continue_from.step
        source = f"{step:,} updates of the parent run, which the planned positions include"
        positions: int | None = step * recipe.positions_per_update
    elif start.init_from is not None:
        positions, source = _parent_positions(folder / start.init_from.path)
    else:
        positions, source = 0, "nothing: random weights"
    within = start.continue_from is not None
    return {"start": start.kind, "positions": positions, "in_planned_positions": within, "source": source}


def _parent_positions(checkpoint: Path) -> tuple[int | None, str]:
    manifest, recipe_file = checkpoint / "manifest.json", checkpoint.parent.parent / "recipe.json"
    if not manifest.is_file() or not recipe_file.is_file():
        return None, "the parent run is not at hand, and its exposure is not in the recipe"
    step = read_object(manifest, "a checkpoint's manifest").get("step")
    parent = from_resolved(read_object(recipe_file, "a run's recipe"), str(recipe_file))
    if type(step) is not int or step < 0:
        raise InputError(f"{manifest}: step is {step!r}; an integer of at least 0 is expected")
    if parent.start.kind == "init-from":
        return None, f"the parent {parent.name} itself began from other weights"
    return step * parent.positions_per_update, f"{step:,} updates of {parent.name}"


def _shortfall(recipe: Recipe, queue: Queue | None, inherited: dict[str, Any], goal: int | None) -> dict[str, Any]:
    """Prepared input against the schedule and against a goal, in positions.

    Without a queue nothing is prepared. What a continued run has behind it needs no input any more.
    A goal counts what is inherited when that is known, and this run alone when it is not.
    """
    per_update, updates, first = recipe.positions_per_update, recipe.schedule.updates, recipe.start.first_update
    prepared = 0 if queue is None else queue.updates_total
    missing = updates - max(prepared, first)
    result: dict[str, Any] = {
        "prepared_updates": prepared,
        "prepared_positions": prepared * per_update,
        "missing_updates": max(0, missing),
        "missing_positions": max(0, missing) * per_update,
        "goal_positions": goal,
    }
    if goal is None:
        return {**result, "goal_missing_positions": None, "goal_updates": None, "goal_unscheduled_positions": None}
    before = 0 if inherited["in_planned_positions"] else (inherited["positions"] or 0)
    return {
        **result,
        "goal_missing_positions": max(0, goal - before - max(prepared, first) * per_update),
        "goal_updates": -(-max(0, goal - before) // per_update),
        "goal_unscheduled_positions": max(0, goal - before - updates * per_update),
    }


def _warnings(recipe: Recipe, folder: Path, queue: Queue | None, inherited: dict[str, Any]) -> list[str]:
    result = []
    data, schedule, start = recipe.data, recipe.schedule, recipe.start
    if queue is None:
        result.append(f"{folder / data.queue} is not there yet: nothing is prepared, slots and their ends are unknown")
    elif queue.updates_total < schedule.updates:
        result.append(
            f"the queue holds data for {queue.updates_total:,} of {schedule.updates:,} scheduled updates; "
            f"{schedule.updates - queue.updates_total:,} updates are missing"
        )
    if queue is not None:
        result += [
            f"slot {slot['slot']} is too short: {slot['windows_needed']:,} windows are needed, "
            f"{slot['windows_available']:,} are there; allow more epochs or add data"
            for slot in _slots(recipe, queue)
            if not slot["enough"]
        ]
        from assay.data import queue as queues  # see `_queue`

        roots = [folder / root for root in data.roots] or [queue.path.parent]
        absent = queues.missing(queue, queues.locate(queue, [root for root in roots if root.is_dir()]))
        if absent:
            result.append(f"{len(absent)} shard(s) of the queue are not on this machine, the first is {absent[0]}")
    if data.validation is None:
        result.append("data.validation is null: no validation loss will be known")
    elif not (folder / data.validation).exists():
        result.append(f"{folder / data.validation} is not there yet: validation cannot run")
    source = start.init_from or start.continue_from
    if source is not None:
        if source.sha256 is None:
            result.append(f"start.{start.kind.replace('-', '_')}.sha256 is null: the start is not pinned")
        if not (folder / source.path).exists():
            result.append(f"{folder / source.path} is not there yet: the run cannot start")
        if inherited["positions"] is None:
            result.append(
                f"inherited positions are unknown: {inherited['source']}; a goal is counted over this run alone"
            )
    without_start = ("weights", "config") if source is None else ()
    unpinned = [name for name, value in recipe.pins if value is None and name not in without_start]
    if unpinned:
        result.append(f"not pinned: {', '.join(unpinned)}")
    begin = decay_start(schedule)
    if schedule.intent == "no-decay" and begin is not None and begin < schedule.updates:
        result.append(
            f"intent no-decay: the run stops, saved, at update {begin:,} unless a reviewer allows the decay; "
            f"{begin * recipe.positions_per_update:,} positions are reached by then"
        )
    if recipe.control.path is not None and not (folder / recipe.control.path).exists():
        result.append(f"{folder / recipe.control.path} is not there yet: the control cannot run")
    if recipe.reduction == "fast":
        result.append("reduction fast: the same bits on another number of GPUs are not promised")
    if not recipe.runtime.deterministic:
        result.append("runtime.deterministic is false: the same bits are not promised")
    return result
