"""The training loop: one flat function, top to bottom.

For update u: windows, digest, micro-batches, lanes, canonical sum, one word between the ranks and one wait
for the device, check, clip, optimizer, metrics, then whatever this step is due: validation, checkpoint,
slot end. Every rank runs it alike; rank 0 alone writes. The host waits for the device once an update.
"""

from __future__ import annotations

import math
import time

import torch

from assay.errors import AssayError, NumbersError
from assay.recipe.schedule import rates
from assay.run.history import history
from assay.train import amending, spikes
from assay.train.agreement import agree, wait_for
from assay.train.cadence import choose_cadence
from assay.train.entering import enter_slot, next_queue
from assay.train.loss import arithmetic, window_loss
from assay.train.optimizers import scale_gradients, set_rates, tensor_norms
from assay.train.reduction import share, tree
from assay.train.saving import advance, catch_up, due_steps, interrupt, save_full, save_weights
from assay.train.telemetry import compare, due_norms, line_of, look_for_stragglers, values
from assay.train.trainer import Trainer
from assay.train.validation import validation_loss
from assay.train.watch import SAVE

COMPILING = 3  # updates at the start of a segment in which kernels may still be compiled


def train(trainer: Trainer, until: int | None) -> str:
    """Train from the start's position to the schedule's end, or to the step `until`; return "done" or "until".

    Raises Interrupted (75) after a save, DataError (4) after a save when the data ends, NumbersError
    (5) with the optimizer unchanged.
    """
    amending.adopt(trainer, opening=True)
    choose_cadence(trainer)
    recipe, started, device, ranks = trainer.recipe, trainer.started, trainer.device, trainer.ranks
    model, optimizers, position = started.model, started.optimizers, started.position
    mine, micro = share(recipe, ranks), recipe.batch.micro
    exchange, meters, clock = started.exchange, trainer.meters, trainer.meters.clock
    divisor = recipe.positions_per_update
    saved_steps = {item.step for item in history(trainer.run.ledger).line if item.kind == "full"}
    due, last, boundary = _terms(trainer, until)
    catch_up(trainer, saved_steps)
    slot, first = -1, position.step

    while position.step < last:
        began = time.perf_counter()
        update = position.step
        if trainer.trace:
            trainer.trace.at(update)
        clock.at("slot")
        if update == boundary:
            save_full(trainer, saved_steps)
            if not amending.adopt(trainer):
                raise amending.no_decay_stop(trainer)
            recipe, (due, last, boundary) = trainer.recipe, _terms(trainer, until)
            continue

        # A new slot: its bytes are the approved ones, or nothing is trained on them.
        if trainer.batches.updates <= update:
            with trainer.patient():
                next_queue(trainer, saved_steps)
            due = due_steps(trainer)
        if trainer.batches.queue.slot_of(update)[0].number != slot:
            try:
                with trainer.spent.on("slot"), trainer.patient():
                    slot = ranks.lead(lambda: enter_slot(trainer, trainer.started.position.step))
            except AssayError:
                if update > first:
                    save_full(trainer, saved_steps)  # what is done is not lost with what cannot begin
                raise

        # The batch: this rank's items, made while the update before was computed.
        clock.at("data")
        with trainer.spent.on("batch"):
            batch = trainer.feed.take(trainer.batches, update)
        tokens, documents = batch.tokens, batch.documents

        if trainer.hang:
            trainer.hang.begin(compiling=recipe.runtime.compile and update < first + COMPILING)

        # Gradients: micro-batches in ascending order within a lane, lanes joined by the tree, ranks at the owners.
        clock.at("compute")
        measured = due_norms(recipe, update)
        exchange.clear(measured)
        model.take_up(arithmetic(recipe))
        lane_sums = []
        for lane in range(mine.lanes):
            sums = torch.zeros(2, dtype=torch.float64, device=device)
            for index in range(lane * mine.accumulation, (lane + 1) * mine.accumulation):
                if ranks.size == 1 and trainer.watch.signalled():
                    interrupt(trainer, saved_steps, "signal")
                rows = slice(index * micro, (index + 1) * micro)
                nll, z = window_loss(model, recipe, tokens[rows], None if documents is None else documents[rows])
                exchange.before_backward(ends_lane=index + 1 == (lane + 1) * mine.accumulation)
                torch.autograd.backward((nll + recipe.loss.z * z) / divisor)
                sums += torch.stack((nll.detach(), z.detach())).double()
            exchange.close_lane()
            lane_sums.append(sums)
        model.let_go()
        clock.at("reduction")
        gradients = exchange.reduce()

        # All ranks learn the same, by the one wait for the device, before the optimizer changes anything.
        with trainer.spent.on("checks"):
            cause = trainer.watch.cause(trainer.ledger if ranks.first else None)
        told = agree(
            ranks, update, tree(lane_sums), tensor_norms(gradients), exchange.owner, cause, batch.digests,
            trainer.air.ready(), meters.facts(), values(exchange) if measured else None, lambda: clock.at("optimizer"),
        )  # fmt: skip
        meters.take(told.facts)
        loss, z_loss, grad_norm, cause = told.nll_sum / divisor, told.z_sum / divisor, told.grad_norm, told.cause
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            if trainer.metrics:
                trainer.metrics.add(line_of(trainer, update, loss, z_loss, told, {}, 0.0, None))
            stands = (
                "the last checkpoint stands"
                if saved_steps or trainer.air.flights
                else "no full checkpoint was saved yet"
            )
            raise NumbersError(
                f"update {update}: loss {loss}, gradient norm {grad_norm}; stopped before the optimizer changed "
                f"anything; {stands}: look at the batch (assay data batches) and the rates"
            )
        look_for_stragglers(trainer, update)
        rate, skipped = rates(recipe, update), spikes.watch(trainer, grad_norm)
        if not skipped:
            scale_gradients(gradients, torch.tensor(grad_norm, dtype=torch.float64), recipe.optimizer.grad_clip)
            set_rates(optimizers, rate)
            for optimizer in optimizers:
                optimizer.step()
        exchange.spread()
        clock.at("other")
        if trainer.hang:
            trainer.hang.done(time.perf_counter() - began)

        # The update is done: take it up, compare it with what it supersedes, write it down.
        with trainer.spent.on("order"):
            position.advance(told.batch_digest)
        step = position.step
        validation = None
        if recipe.evaluate.every is not None and step % recipe.evaluate.every == 0:
            assert trainer.validation is not None, "the schema refuses evaluation without a validation shard"
            windows = recipe.evaluate.batches * micro
            clock.at("validation")
            validation = validation_loss(model, trainer.validation, recipe, device, windows, ranks)
            clock.at("other")
        seconds = time.perf_counter() - began
        if trainer.metrics:
            with trainer.spent.on("metrics"):
                line = line_of(trainer, update, loss, z_loss, told, rate, seconds, validation, skipped)
                trainer.metrics.add(line)
                compare(trainer, line)
            trainer.progress.show(step, loss, seconds, divisor, validation.loss if validation else None)

        # Whatever this step is due.
        if trainer.ahead:
            with trainer.spent.on("ahead"):
                trainer.ahead.look()
        trainer.spent.total += time.perf_counter() - began
        clock.at("checkpoint")
        if told.ready:
            advance(trainer, saved_steps)  # the save that is in the air
        background = step < last and cause in (None, SAVE)
        if step in due["full"] or step == last or cause == SAVE:
            save_full(trainer, saved_steps, background)
            if amending.adopt(trainer) | choose_cadence(trainer):  # both, always
                recipe, (due, last, boundary) = trainer.recipe, _terms(trainer, until)
        if step in due["weights"]:
            save_weights(trainer, saved_steps, background)
        if cause not in (None, SAVE) and step < last:
            interrupt(trainer, saved_steps, cause)
    return "done" if position.step == recipe.schedule.updates else "until"


def prepare(trainer: Trainer) -> None:
    """Compile where the recipe says so, then one micro-batch forward and backward at full shape before anything counts.

    Memory suffices, or exit 71.
    """
    recipe, model = trainer.recipe, trainer.started.model
    if trainer.hang:
        trainer.hang.begin(compiling=True)
    if recipe.runtime.compile:
        model.compile_blocks()
    windows = torch.zeros(recipe.batch.micro, recipe.model.block + 1, dtype=torch.int64, device=trainer.device)
    model.take_up(arithmetic(recipe))
    nll, z = window_loss(model, recipe, windows, windows[:, 1:] if recipe.model.document_mask else None)
    trainer.started.exchange.before_backward(ends_lane=True)
    torch.autograd.backward(nll + recipe.loss.z * z)
    wait_for(nll.detach().reshape(1, 1))
    model.let_go()
    trainer.started.exchange.clear()


def _terms(trainer: Trainer, until: int | None) -> tuple[dict[str, set[int]], int, int | None]:
    """What the recipe in force sets: the steps due, the step to end at, and where a run without decay stops."""
    recipe = trainer.recipe
    last = recipe.schedule.updates if until is None else min(until, recipe.schedule.updates)
    trainer.progress.start(trainer.started.position.step, last)
    return due_steps(trainer), last, amending.boundary(recipe)
