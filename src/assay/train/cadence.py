"""`checkpoint.every: auto` in the trainer: chosen when a segment begins and again where a full checkpoint stands.

Rank 0 measures and chooses, all ranks take its number, and a receipt `cadence` says what it was and why. Between two
full checkpoints it never changes, so that the steps due follow from the ledger.
"""

from __future__ import annotations

import time
from decimal import Decimal

from assay.plan.cadence import rounded
from assay.run.cadence import measured, observed
from assay.run.history import history
from assay.train.trainer import Pace, Trainer

# Another choice is taken up when it is away from the one in force by more than this part of it: near the optimum the
# goodput is flat (a quarter off costs 3 % of what saving and redoing cost), and a cadence that wanders helps nobody.
APART = 0.25


def choose_cadence(trainer: Trainer) -> bool:
    """Choose for `auto`; True when the steps due are others now. Every rank calls it at the same step."""
    if isinstance(trainer.recipe.checkpoint.every, int):
        changed = trainer.cadence is not None  # an amendment stated it
        trainer.cadence = None
        return changed
    before = trainer.cadence
    trainer.cadence = trainer.ranks.lead(lambda: _chosen(trainer))
    return trainer.cadence != before


def _chosen(trainer: Trainer) -> int:
    """Rank 0: the number of updates, with its receipt when it is a new one."""
    if trainer.cadence is not None and trainer.started.position.step >= trainer.recipe.schedule.updates:
        return trainer.cadence  # nothing comes after it
    told = history(trainer.run.ledger)
    step, spent, now = trainer.started.position.step, trainer.spent.total, time.monotonic()
    if trainer.pace is None:
        trainer.pace = Pace(observed(told, trainer.run.metrics, trainer.segment), now, step, spent)
    pace = trainer.pace
    done = step - pace.step
    update: tuple[Decimal | None, str] = pace.before.update
    if done:
        update = rounded((spent - pace.seconds) / done), f"measured: mean of {done}"
    choice = measured(trainer.recipe, told, trainer.given, update, pace.before, now - pace.began)
    if done:
        pace.step, pace.seconds = step, spent
    if trainer.cadence is not None and abs(choice.every - trainer.cadence) <= APART * trainer.cadence:
        return trainer.cadence
    record = choice.record()
    trainer.ledger.append("cadence", {"segment": trainer.segment, "step": step, **record})
    why = "a hundredth of the schedule, until saves and updates are measured"
    if choice.by == "young":
        hours = f"{float(choice.between) / 3600:.3g} h between interruptions"
        why = f"save {choice.save:.3g} s, an update {choice.update:.3g} s, {hours}"
    trainer.tell(f"checkpoints every {choice.every:,} updates from here ({why})")
    return choice.every
