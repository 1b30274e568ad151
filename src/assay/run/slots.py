"""The slots of a run's queue, checked before they are entered: against its validation shard and all its ancestors.

Finds out what a slot is to be held against and which checks the ledger has already; `data.checking` does
the work. It opens no run for writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from assay.data import checking
from assay.data.apart import HeldOut
from assay.data.checking import Against
from assay.data.freshness import queued_before
from assay.data.queue import Queue, Slot, locate
from assay.data.shard import Shard, open_shard
from assay.errors import DataError
from assay.ledger.ledger import read
from assay.recipe.schema import Recipe
from assay.run.consumption import Consumption, ancestry, ancestry_of, consumption, taken_before
from assay.run.folder import RunFolder

KIND = "slot.checked"


class SlotChecks:
    """Checks slots for a recipe whose relative paths start from `folder`, a run of it or none yet."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        path = recipe.data.validation
        self.validation = None if path is None else open_shard(folder / path)

    @cached_property
    def _ancestry(self) -> tuple[list[Consumption], list[str]]:
        return ancestry_of(self._recipe, self._folder)

    @cached_property
    def _held_out(self) -> HeldOut | None:
        return None if self.validation is None else HeldOut(self.validation)

    def against(self, queue: Queue, slot: Slot, shards: Mapping[str, Shard]) -> Against:
        """What the slot is held against; only a strict queue looks at what was taken before."""
        if queue.freshness != "strict":
            return Against(self.validation, [], [])
        ancestors, unknown = self._ancestry
        taken = [*queued_before(queue, slot, shards), *taken_before(ancestors, queue, slot)]
        return Against(self.validation, taken, [f"{start}: its run or its queue is not here" for start in unknown])

    def check(self, queue: Queue, slot: Slot, shards: Mapping[str, Shard], against: Against) -> dict[str, Any]:
        """The body of the receipt `slot.checked` for a slot whose bytes were verified; see `checking.check`."""
        where = f"slot {slot.number} of {queue.path}"
        counts = checking.check(queue, slot, shards, against, self._held_out, where)
        return {"slot": slot.number, **against.basis(queue, slot), **counts}


def past_checks(run: RunFolder) -> list[dict[str, Any]]:
    """The bodies of the receipts `slot.checked` that the run's ledger holds; none where there is no run yet."""
    return [receipt.body for receipt in read(run.ledger) if receipt.kind == KIND] if run.exists() else []


def checked(past: Iterable[Mapping[str, Any]], basis: Mapping[str, Any]) -> bool:
    """True when one of the past checks was of exactly this, and passed, or when there is nothing to hold it against."""
    if basis["validation"] is None and basis["freshness"] is None:
        return True
    return any(all(body.get(key) == value for key, value in basis.items()) for body in past)


def admit(queue: Queue, slot: Slot, runs: Sequence[RunFolder], roots: Iterable[Path]) -> list[str]:
    """Hold a slot that is proposed or to be appended against its queue and against the named runs.

    The shards at hand must fit the queue, pool included. A strict queue refuses (exit 3) what it holds already and
    what the runs and their ancestors were trained on; every queue refuses what the runs validate on. Returns a
    line for each thing that could not be compared. DataError when shards of the slot are needed and not here.
    """
    whole = replace(queue, slots=(*queue.slots, slot))
    shards = locate(whole, roots)
    consumed: dict[str, Consumption] = {}
    unknown: list[str] = []
    validations: dict[str, Shard] = {}
    for run in runs:
        ancestors, lost = ancestry(run)
        unknown += [f"{start}: its run or its queue is not here" for start in lost]
        consumed |= {one.run_id: one for one in [consumption(run), *ancestors]}
        named = run.recipe().data.validation
        if named is not None and (run.recipe_folder() / named).is_dir():
            shard = open_shard(run.recipe_folder() / named)
            validations[shard.sha256] = shard
        elif named is not None:
            unknown.append(f"{run.path}: its validation shard {named} is not here")
    strict = queue.freshness == "strict"
    if not strict and not validations:
        return unknown
    absent = [part.shard for part in slot.parts if part.shard not in shards]
    if absent:
        raise DataError(
            f"{queue.path}: shard {absent[0]} of slot {slot.number} is not on this machine, so its documents cannot be "
            "compared; name its folder with --root"
        )
    taken = [*queued_before(whole, slot, shards), *taken_before(list(consumed.values()), queue, slot)] if strict else []
    where = f"slot {slot.number} for {queue.path}"
    for validation in validations.values() or [None]:
        against = Against(validation, taken, unknown)
        checking.check(whole, slot, shards, against, HeldOut(validation) if validation else None, where)
    return Against(None, taken, unknown).not_compared(queue)
