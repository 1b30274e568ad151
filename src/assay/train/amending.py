"""Adoption: where installed amendments become the schedule that the running process trains with.

One rank decides from the ledger, all ranks apply the same decision before the next update. The rule is that of
`run.amendments`; what the receipt says was read back from the running process. It proposes and approves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assay.errors import InputError, MachineError, Refused
from assay.recipe import load as recipes
from assay.recipe.schedule import decay_start, rates
from assay.recipe.schema import Recipe
from assay.run.amendments import REFUSED, Amendment, adoption_fault, amended_recipe, amendments, apply, values
from assay.run.folder import RunFolder
from assay.run.history import ADOPTED, History, history
from assay.train.optimizers import set_rates

if TYPE_CHECKING:
    from assay.train.trainer import Trainer


def own_recipe(run: RunFolder, given: Recipe) -> Recipe:
    """The recipe that was given, or is in force, with the schedule that the run was created with.

    An operator may resume with the amended recipe in hand (`permit` allows exactly those): adoptions then are
    applied to the run's own schedule, as they were when they were adopted.
    """
    return given.model_copy(update={"schedule": run.recipe().schedule})


def adopt(trainer: Trainer, opening: bool = False) -> bool:
    """Adopt what is installed, at the step that a full checkpoint has just saved or given back; True when some was.

    Called right after a full checkpoint is published, and once at the start (`opening`), where what the line of
    training had adopted before comes into force again. What the rule forbids by now is refused, with a receipt,
    and training goes on as before. Every rank calls it at the same step.
    """
    first = trainer.recipe
    while True:
        decision = trainer.ranks.lead(lambda: decide(trainer))
        if opening:
            first = trainer.recipe = _with(trainer.recipe, decision["before"])
            opening = False
        if decision["kind"] is None:
            _forget_other_schedules(trainer)
            return trainer.recipe != first
        before = trainer.recipe
        trainer.recipe = _with(trainer.recipe, decision["after"])
        alike = trainer.ranks.collect(recipes.digest(trainer.recipe))
        if len(set(alike)) > 1:
            raise MachineError(f"the ranks adopted different recipes ({', '.join(alike)}); the last checkpoint stands")
        read_back = _read_back(trainer, before) if decision["kind"] == ADOPTED else {}
        if trainer.ranks.first:
            trainer.ledger.append(decision["kind"], decision["body"] | read_back)
            trainer.tell(decision["words"])


def _forget_other_schedules(trainer: Trainer) -> None:
    """Updates that an abandoned branch did at other rates, by an amendment, are not done again but done otherwise.

    From the first of them on there is nothing to compare with. Without any adoption a rate that differs stays a fault.
    """
    if not trainer.superseded or not any(one.kind == ADOPTED for one in history(trainer.run.ledger).amendments):
        return
    for update in sorted(trainer.superseded):
        mine = _rates(trainer.recipe, update)
        if mine is None or mine["lr"] != trainer.superseded[update]["lr"]:
            for later in [one for one in trainer.superseded if one >= update]:
                del trainer.superseded[later]
            return


def decide(trainer: Trainer) -> dict[str, Any]:
    """Test the amendment that was installed first, of those that wait, at this step; plain JSON data.

    `before` and `after` are what can be amended, as it is in force and as it will be; `kind` and `body` are the
    receipt to write, None when nothing waits that can be decided here.
    """
    told = history(trainer.run.ledger)
    step, own, adopted = trainer.started.position.step, trainer.run.recipe(), told.segments[-1].adopted
    recipe = apply(own, told, adopted)
    if not any("checkpoint_every" in one.body["changes"] for one in adopted):  # then the recipe given now has a say
        recipe = _with(recipe, {**_amendable(recipe), "every": trainer.recipe.checkpoint.every})
    same = {"before": _amendable(recipe), "after": _amendable(recipe), "kind": None}
    saved = [item for item in told.line if item.kind == "full" and item.step == step]
    code = str(told.segments[-1].body["code"]["sha256"])
    pending = _pending(told)
    if not saved or not pending:
        return same
    one = min(pending, key=lambda one: one.installed.seq if one.installed else 0)
    body: dict[str, Any] = {
        "amendment": one.id,
        "sha256": one.sha256,
        "step": step,
        "segment": trainer.segment,
        "checkpoint": saved[-1].manifest_sha256,
    }
    fault = adoption_fault(own, recipe, code, one, step)
    if fault is None:
        try:
            new = amended_recipe(recipe, one.changes)
            _with(trainer.recipe, _amendable(new))
        except InputError as unfit:  # the recipe given now has steps that the amended schedule has not
            fault = str(unfit)
    if fault is not None:
        words = f"amendment {one.id} is refused: {fault}"
        return same | {"kind": REFUSED, "body": body | {"reason": fault}, "words": words}
    words = f"amendment {one.id} is adopted at step {step}: {_in_words(recipe, new, one)}"
    return same | {
        "after": _amendable(new),
        "kind": ADOPTED,
        "body": body | _change(recipe, new, one),
        "words": words,
    }


def waiting(trainer: Trainer) -> bool:
    """Rank 0: whether an amendment could be adopted where the next full checkpoint stands."""
    return bool(_pending(history(trainer.run.ledger)))


def _pending(told: History) -> list[Amendment]:
    """Installed and undecided; new code is adopted by the process that runs it alone."""
    code = str(told.segments[-1].body["code"]["sha256"])
    return [one for one in amendments(told, told.tip) if one.pending and one.changes.code in (None, code)]


def _amendable(recipe: Recipe) -> dict[str, Any]:
    """What amendments change of a recipe, as JSON data."""
    return {"schedule": recipe.schedule.model_dump(mode="json"), "every": recipe.checkpoint.every}


def _with(recipe: Recipe, changed: dict[str, Any]) -> Recipe:
    whole = recipes.resolved(recipe)
    whole["schedule"], whole["checkpoint"]["every"] = changed["schedule"], changed["every"]
    return recipes.from_resolved(whole, "the amended recipe")


def no_decay_stop(trainer: Trainer) -> Refused:
    """The stop of a run that is meant to have no decay, with the ways out."""
    place, step = trainer.run.path, trainer.started.position.step
    return Refused(
        f"stopped at step {step}, saved: the decay begins here, and schedule.intent is no-decay; extend the run "
        f"(assay amend {place} --updates N), remove the decay (--decay none), or have a reviewer allow it (--decay "
        f"{trainer.recipe.schedule.decay})"
    )


def boundary(recipe: Recipe) -> int | None:
    """The update before which a run that is meant to have no decay stops; None: it has no such stop."""
    return decay_start(recipe.schedule) if recipe.schedule.intent == "no-decay" else None


def _change(old: Recipe, new: Recipe, one: Amendment) -> dict[str, Any]:
    """Old and new values of everything that can be amended, and where the decay starts."""
    before, after = values(old, None), values(new, None)
    keys = ("updates", "decay", "checkpoint_every")
    return {
        "changes": one.changes.record(),
        **{f"{key}_old": before[key] for key in keys},
        **{f"{key}_new": after[key] for key in keys},
        "code_new": one.changes.code,
        "decay_start_old": decay_start(old.schedule),
        "decay_start_new": decay_start(new.schedule),
        "decay_allowed": old.schedule.intent is not None and new.schedule.intent is None,
    }


def _read_back(trainer: Trainer, before: Recipe) -> dict[str, Any]:
    """Rate, cadence and code as the processes have them: the rates from the optimizers of all ranks that will use them.

    Every rank calls it: of one rank's tensors there may be none that Muon treats.
    """
    step = trainer.started.position.step
    old, new = _rates(before, step), _rates(trainer.recipe, step)
    if new is not None:
        set_rates(trainer.started.optimizers, new)
    mine = [repr(float(group["lr"])) for one in trainer.started.optimizers for group in one.param_groups]
    everyone = trainer.ranks.collect(mine)
    return {
        "rates_before": _text(old),
        "rates_after": _text(new),
        "running": {
            "rates": sorted({rate for found in everyone for rate in found}),
            "updates": trainer.recipe.schedule.updates,
            "checkpoint_every": trainer.recipe.checkpoint.every,
            "code": history(trainer.run.ledger).segments[-1].body["code"]["sha256"],
        },
    }


def _rates(recipe: Recipe, step: int) -> dict[str, float] | None:
    return rates(recipe, step) if step < recipe.schedule.updates else None


def _text(found: dict[str, float] | None) -> dict[str, str] | None:
    """Rates as receipts hold them: the shortest decimal strings that read back to the same bits."""
    return None if found is None else {key: repr(value) for key, value in found.items()}


def _in_words(old: Recipe, new: Recipe, one: Amendment) -> str:
    before, after = values(old, None), values(new, None)
    parts = [f"{key} {before[key]} → {after[key]}" for key in before if before[key] != after[key]]
    if old.schedule.intent is not None and new.schedule.intent is None:
        parts.append("the decay is allowed")
    if one.changes.code is not None:
        parts.append(f"code {one.changes.code}")
    return ", ".join(parts) or "nothing is otherwise than before"
