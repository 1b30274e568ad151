"""Entering a slot: its bytes are proved before the first of its batches, and what to do where the queue ends.

Rank 0 proves and writes the receipt, the others follow. What cannot begin loses nothing that is done: the
loop saves first.
"""

from __future__ import annotations

import time
from dataclasses import replace

from assay.data import approval
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.queue import Queue, Slot
from assay.errors import DataError, Refused
from assay.train.saving import interrupt, save_full
from assay.train.trainer import Trainer
from assay.train.watch import SAVE, stopped


def next_queue(trainer: Trainer, saved_steps: set[int]) -> None:
    """The queue's end is reached: take up slots appended since, or save and stop, or wait for them."""
    ranks, told = trainer.ranks, list[str]()
    save_full(trainer, saved_steps)  # whatever the queue holds now, what is done is not lost
    while True:
        slots = ranks.lead(lambda: _appended(trainer, told))
        if slots is not None:
            if not ranks.first:
                trainer.batches = _batches(trainer, first_slots(queues.load(trainer.batches.queue.path), slots))
            return
        cause = ranks.lead(lambda: trainer.watch.cause(trainer.ledger))
        if cause not in (None, SAVE):  # what is done is saved already
            interrupt(trainer, saved_steps, cause)
        time.sleep(1.0)


def _appended(trainer: Trainer, told: list[str]) -> int | None:
    """Rank 0: the number of slots once there are more than before, already taken up here; None: wait for them.

    What is waited for is told when it is another thing than the last of `told`: waiting may never mend a fault.
    """
    old, wait = trainer.batches.queue, trainer.recipe.data.when_missing == "wait"
    why = f"waiting for the data of slot {len(old.slots)} of {old.path} (data.when_missing: wait)"
    queue = queues.load(old.path)
    if queue.prefix_bytes(len(old.slots)) != old.content:
        raise DataError(f"{queue.path}: the slots that were consumed have other bytes now; restore the queue")
    if len(queue.slots) > len(old.slots):
        approval.check_slots(queue)
        held_out = trainer.validation.sha256 if trainer.validation else None
        if any(part.shard == held_out for slot in queue.slots for part in slot.parts):
            raise Refused(f"{queue.path}: a new slot reads the validation shard; append other data")
        try:
            trainer.batches = _batches(trainer, queue)
            return len(queue.slots)
        except DataError as fault:
            if not wait:
                raise
            why += f"; {fault}"
    elif not wait:
        queue.slot_of(trainer.started.position.step)  # raises with the exact shortfall
    if why not in told[-1:]:
        told.append(why)
        trainer.tell(why)
    return None


def _batches(trainer: Trainer, queue: Queue) -> Batches:
    data = trainer.recipe.data
    return Batches(queue, [trainer.recipe_folder / root for root in data.roots], data.seed, trainer.recipe.global_batch)


def first_slots(queue: Queue, count: int) -> Queue:
    """The queue as rank 0 saw it, should somebody have appended since."""
    return replace(queue, slots=queue.slots[:count], content=queue.prefix_bytes(count))


def enter_slot(trainer: Trainer, update: int) -> int:
    """Rank 0: prove the slot before the first of its batches; the receipt names slot and update."""
    slot, k = trainer.batches.queue.slot_of(update)
    assert trainer.ahead is not None, "the rank that writes has one"
    queue, shards = trainer.batches.queue, trainer.batches.shards
    verified = trainer.ahead.verify(queue, slot, shards, lambda: _meanwhile(trainer, slot))
    body = {
        "slot": slot.number,
        "update": update,
        "within": k,
        "line": slot.digest,
        "segment": trainer.segment,
        "shards": list(dict.fromkeys(part.shard for part in slot.parts)),
        "verified": verified,
    }
    if trainer.batches.queue.trust:
        body["approved_by"] = list(approval.demand(trainer.batches.queue, slot))
    trainer.ledger.append("slot.entered", body)
    trainer.ahead.begin(queue, slot, shards)
    return slot.number


def _meanwhile(trainer: Trainer, slot: Slot) -> None:
    """While a slot is verified: a signal or a hold ends the wait; the loop saves what is done."""
    cause = trainer.watch.cause(trainer.ledger)
    if cause is not None and cause != SAVE:
        step = trainer.started.position.step
        raise stopped(cause, f"stopped at step {step} ({cause}), while slot {slot.number} was verified; saved")
