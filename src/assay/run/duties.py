"""What is due at a step and has no receipt yet: evaluations and exports that somebody asked for, and copies.

An order is a receipt, so that it outlives the machine; what was done is told from the receipts of the doing. Whoever
comes back finds what was due when the machine went away, and does it once. It does nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from assay.data import queue as queues
from assay.errors import InputError
from assay.ledger.ledger import Receipt, read
from assay.plan.cadence import checkpoint_steps
from assay.run.amendments import effective
from assay.run.cadence import in_force
from assay.run.folder import RunFolder, require_run
from assay.run.history import AWAITED, SAFE, Saved, gather, history
from assay.run.inputs import queue_path

EVALUATION, EXPORT, MIRROR = "evaluation", "export", "mirror"
DONE, DUE, GONE, COMING = "done", "due", "gone", "coming"


@dataclass(frozen=True)
class Duty:
    """One act at one step: done, due, gone (no checkpoint of it is left, or will be), or coming (not reached).

    `removed`: the checkpoint is due, and stands on the mirror alone.
    """

    act: str
    step: int
    state: str
    folder: str | None = None  # of the checkpoint that it is about
    removed: Saved | None = field(default=None, compare=False)


def order(run: RunFolder, act: str, steps: Sequence[int], weights: bool) -> Receipt:
    """Ask for an act at these steps, or at every weights checkpoint; InputError for an order of nothing."""
    require_run(run)
    if act not in (EVALUATION, EXPORT):
        raise InputError(f"--ask is {act!r}; {EVALUATION} or {EXPORT} is expected (copies follow from the recipe)")
    if bool(steps) == weights:
        raise InputError("--ask needs either --at STEP, once or more, or --weights: at every weights checkpoint")
    if any(step < 1 for step in steps):
        raise InputError(f"--at is {min(steps)}; a number of completed updates, 1 or more, is expected")
    return run.open_ledger().append("duty", {"act": act, "steps": sorted(set(steps)), "weights": weights})


def unsaved(run: RunFolder, steps: Sequence[int]) -> list[int]:
    """Of these steps those that have no checkpoint and get none, as the recipe and its cadence stand."""
    told = history(run.ledger)
    recipe = effective(run.recipe(), told)
    queue = queue_path(run, recipe)
    slots = [slot.updates for slot in queues.load(queue).slots] if queue.is_file() else None
    due = checkpoint_steps(recipe, slots, in_force(recipe, told))
    line = told.up_to(told.tip)
    saved = {item.step for item in told.saved if item.manifest_sha256 in line}
    coming = {step for step in (*due["full"], *due["weights"]) if step > max(saved, default=0)}
    return sorted({step for step in steps if not (step in saved or (step in coming and not told.ended))})


def duties(run: RunFolder) -> list[Duty]:
    """Everything that was ordered or follows from the recipe, oldest step first, each once."""
    require_run(run)
    receipts = list(read(run.ledger))
    told = gather(receipts)
    line, standing = told.up_to(told.tip), {item.manifest_sha256 for item in told.standing}
    copied = {one.body["manifest_sha256"] for one in told.copies} if told.mirror else set()
    saved = [item for item in told.saved if item.manifest_sha256 in line]
    done = {
        (one.kind, one.body.get("step"), one.body.get("weights_sha256"))
        for one in receipts
        if one.kind == EXPORT or (one.kind == EVALUATION and one.body.get("suite") == "validation")
    }
    # Checkpoints are saved in the order of their steps: none is made any more of a step that one lies behind.
    reached = math.inf if told.ended or told.abandoned else max((item.step for item in saved), default=0)
    found: dict[tuple[str, int], Duty] = {}
    for one in receipts:
        if one.kind != "duty":
            continue
        act, asked = str(one.body["act"]), {int(step) for step in one.body["steps"]}
        wanted = [item for item in saved if item.step in asked or (one.body["weights"] and item.kind == "weights")]
        for item in wanted:
            duty = Duty(act, item.step, GONE, item.folder)
            if (act, item.step, item.weights_sha256) in done:
                duty = Duty(act, item.step, DONE, item.folder)
            elif item.manifest_sha256 in standing:
                duty = Duty(act, item.step, DUE, item.folder)
            elif item.manifest_sha256 in copied:
                duty = Duty(act, item.step, DUE, item.folder, removed=item)
            older = found.get((act, item.step))
            if older is None or older.state == GONE or (older.removed and duty.state != GONE):
                found[act, item.step] = duty
        for step in asked - {item.step for item in wanted}:
            found.setdefault((act, step), Duty(act, step, GONE if step <= reached else COMING))
    for item in told.line:
        if item.kind == "full" and item.copy in (SAFE, AWAITED):
            found[MIRROR, item.step] = Duty(MIRROR, item.step, DONE if item.copy == SAFE else DUE, item.folder)
    return sorted(found.values(), key=lambda duty: (duty.step, duty.act))
