"""What is due at a step and has no receipt yet: evaluations and exports that somebody asked for, and copies.

An order is a receipt, so that it outlives the machine; what was done is told from the receipts of the doing. Whoever
comes back finds what was due when the machine went away, and does it once. It does nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.errors import InputError
from assay.ledger.ledger import Receipt, read
from assay.run.folder import RunFolder, require_run
from assay.run.history import AWAITED, SAFE, gather

EVALUATION, EXPORT, MIRROR = "evaluation", "export", "mirror"
DONE, DUE, GONE, COMING = "done", "due", "gone", "coming"


@dataclass(frozen=True)
class Duty:
    """One act at one step: done, due, gone (its checkpoint is no more), or coming (the step is not reached)."""

    act: str
    step: int
    state: str
    folder: str | None = None  # of the checkpoint that it is about


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


def duties(run: RunFolder) -> list[Duty]:
    """Everything that was ordered or follows from the recipe, oldest step first, each once."""
    require_run(run)
    receipts = list(read(run.ledger))
    told = gather(receipts)
    line, standing = told.up_to(told.tip), {item.manifest_sha256 for item in told.standing}
    saved = [item for item in told.saved if item.manifest_sha256 in line]
    done = {
        (one.kind, one.body.get("step"), one.body.get("weights_sha256"))
        for one in receipts
        if one.kind == EXPORT or (one.kind == EVALUATION and one.body.get("suite") == "validation")
    }
    found: dict[tuple[str, int], Duty] = {}
    for one in receipts:
        if one.kind != "duty":
            continue
        act, asked = str(one.body["act"]), {int(step) for step in one.body["steps"]}
        wanted = [item for item in saved if item.step in asked or (one.body["weights"] and item.kind == "weights")]
        for item in wanted:
            state = GONE
            if (act, item.step, item.weights_sha256) in done:
                state = DONE
            elif item.manifest_sha256 in standing:
                state = DUE
            older = found.get((act, item.step))
            if older is None or older.state == GONE:
                found[act, item.step] = Duty(act, item.step, state, item.folder)
        for step in asked - {item.step for item in wanted}:
            found.setdefault((act, step), Duty(act, step, COMING))
    for item in told.line:
        if item.kind == "full" and item.copy in (SAFE, AWAITED):
            found[MIRROR, item.step] = Duty(MIRROR, item.step, DONE if item.copy == SAFE else DUE, item.folder)
    return sorted(found.values(), key=lambda duty: (duty.step, duty.act))
