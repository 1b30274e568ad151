"""What a run and its ancestors were trained on: which updates of which queue, under which seed.

Taken from ledger, metrics and resolved recipes; the counting is `data.exposure`'s. An ancestor
whose run folder is not at hand is named as unaccounted, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.data.exposure import Consumed
from assay.data.freshness import Taken, consumed_before
from assay.data.queue import Queue, Slot, load, locate
from assay.errors import InputError
from assay.files.digest import digest_file
from assay.files.reading import read_object
from assay.recipe.schema import Recipe
from assay.run import metrics
from assay.run.folder import RunFolder, require_run
from assay.run.history import history
from assay.run.inputs import data_roots, queue_path
from assay.run.lost import Again


@dataclass(frozen=True)
class Consumption:
    """One run's updates; `recomputed` positions were done again after recoveries and are no new data."""

    run_id: str
    name: str
    consumed: Consumed
    recomputed: int
    roots: tuple[Path, ...]  # where its shards are looked for
    ledger: str  # digest of its ledger's bytes when it was read
    again: dict[str, Any] | None = None  # of the whole run: updates done again, their seconds and money
    continued: bool = False  # the run whose ancestor it is goes on in its order, through continue-from alone


def consumption(run: RunFolder, until: int | None = None) -> Consumption:
    """What one run consumed, as far as ledger and metrics say; with `until`, up to that step.

    Metrics are written every few updates, so updates that a kill left unwritten are not counted
    as recomputed. Raises InputError when this is no run or its queue is not at hand.
    """
    require_run(run)
    recipe = run.recipe()
    ledger = digest_file(run.ledger)
    told = history(run.ledger)
    reached = {segment.number: max(segment.first, segment.last or 0) for segment in told.segments}
    for saved in told.saved:
        reached[saved.segment] = max(reached.get(saved.segment, 0), saved.step)
    again = Again()
    for line in metrics.read(run.metrics):
        if metrics.completed(line):
            again.take(line)
        segment, update = line.get("segment"), line.get("update")
        if "loss" in line and isinstance(segment, int) and isinstance(update, int):
            reached[segment] = max(reached.get(segment, 0), update + 1)
    starts = [segment.first for segment in told.segments]
    stops = [reached[segment.number] for segment in told.segments]
    if until is not None:
        starts, stops = [min(start, until) for start in starts], [min(stop, until) for stop in stops]
    first = recipe.start.first_update
    last = max([first, *stops])
    done = sum(stop - start for start, stop in zip(starts, stops, strict=True))
    # What a machine did that had lost the run: done here again, as far as this run has come.
    done += sum(max(0, min(stop, last) - start) for one in told.orphaned for start, stop in one.body["updates"])
    queue = load(queue_path(run, recipe))
    return Consumption(
        run_id=told.run_id,
        name=recipe.name,
        consumed=Consumed(queue, recipe.data.seed, recipe.global_batch, first, last),
        recomputed=max(0, done - (last - first)) * recipe.positions_per_update,
        again=again.facts(told, recipe.positions_per_update),
        roots=tuple(data_roots(run, recipe)),
        ledger=ledger,
    )


def ancestry(run: RunFolder) -> tuple[list[Consumption], list[str]]:
    """The runs whose weights this one began from, nearest first, and the starts that lead to no run at hand."""
    return ancestry_of(run.recipe(), run.recipe_folder(), run.run_id())


def ancestry_of(recipe: Recipe, folder: Path, run_id: str | None = None) -> tuple[list[Consumption], list[str]]:
    """The same for a recipe whose relative paths start from `folder`; there need be no run of it yet."""
    ancestors: list[Consumption] = []
    unaccounted: list[str] = []
    seen = {run_id}
    continued = True
    while True:
        start = recipe.start
        source = start.continue_from or start.init_from
        if source is None:
            return ancestors, unaccounted
        continued = continued and start.continue_from is not None
        place = folder / source.path
        parent = _run_of(place)
        if parent is None:
            return ancestors, [*unaccounted, source.path]
        if parent.run_id() in seen:
            raise InputError(f"{parent.path} is its own ancestor; start.{start.kind} of some run in the line is wrong")
        seen.add(parent.run_id())
        recipe, folder = parent.recipe(), parent.recipe_folder()
        if queue_path(parent, recipe).is_file():
            step = start.continue_from.step if start.continue_from is not None else _step(place)
            ancestors.append(replace(consumption(parent, step), continued=continued))
        else:
            unaccounted.append(source.path)  # the run is here, but not the queue that says what its updates read


def _run_of(place: Path) -> RunFolder | None:
    """The run that `place` is the folder of, or a checkpoint folder inside; None when it is not here."""
    for path in (place, place.parent.parent):
        run = RunFolder(path)
        if run.ledger.is_file() and run.recipe_json.is_file():
            manifest = place / "manifest.json"
            stated = read_object(manifest, "a checkpoint's manifest").get("run_id") if manifest.is_file() else None
            # A checkpoint that was copied into the folder of another run does not make that one its run.
            return run if stated in (None, run.run_id()) else None
    return None


def taken_before(runs: Sequence[Consumption], queue: Queue, slot: Slot) -> list[Taken]:
    """What the runs consumed, for holding `slot` of `queue` against it.

    Left out is what both queues begin with: the slot is held against the earlier slots of its own queue
    anyway. A run that is continued, order and all, does not repeat the slot that it goes on in.
    """
    result = []
    for run in runs:
        theirs = run.consumed.queue.slots
        shared = 0
        while shared < min(slot.number, len(theirs)) and theirs[shared].digest == queue.slots[shared].digest:
            shared += 1
        if run.continued and shared == slot.number < len(theirs) and theirs[shared].digest == slot.digest:
            shared += 1
        first = max(run.consumed.first, theirs[shared - 1].end_update if shared else 0)
        if first < run.consumed.last:
            stretch = replace(run.consumed, first=first)
            facts = {"run_id": run.run_id, "first": first, "last": stretch.last}
            name = f"run {run.name} ({run.run_id[:8]}, updates {first:,}:{stretch.last:,})"
            result.append(consumed_before(name, facts, stretch, locate(stretch.queue, run.roots)))
    return result


def _step(checkpoint: Path) -> int:
    manifest = checkpoint / "manifest.json"
    step = read_object(manifest, "a checkpoint's manifest").get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InputError(f"{manifest}: step is {step!r}; an integer of at least 0 is expected")
    return step
