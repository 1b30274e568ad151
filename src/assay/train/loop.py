"""The training loop: one flat function, top to bottom.

For update u: windows, digest, micro-batches, lanes, canonical sum, one word between the ranks and one wait
for the device, check, clip, optimizer, metrics, then whatever this step is due: validation, checkpoint,
slot end. Every rank runs it alike; rank 0 alone writes. The host waits for the device once an update.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from assay.checkpoint import manifest as manifests
from assay.checkpoint.retention import remove, surplus
from assay.checkpoint.save import Facts, document, save
from assay.data import approval
from assay.data import queue as queues
from assay.data.batches import Batches, row_digests
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard, open_shard
from assay.errors import AssayError, DataError, Interrupted, NumbersError, Refused
from assay.files.digest import digest_file
from assay.ledger.ledger import Ledger, now
from assay.plan.cadence import checkpoint_steps
from assay.recipe import load as recipes
from assay.recipe.schedule import phase, rates
from assay.recipe.schema import Recipe
from assay.run import metrics as lines
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.metrics import MetricsWriter
from assay.train import amending, numerics
from assay.train.agreement import agree, wait_for
from assay.train.ahead import Ahead
from assay.train.batch import documents_of, to_device
from assay.train.hang import HangWatch
from assay.train.loss import window_loss
from assay.train.optimizers import scale_gradients, set_rates, tensor_norms
from assay.train.owned import gather_state
from assay.train.progress import Progress
from assay.train.ranks import Ranks
from assay.train.reduction import share, tree
from assay.train.start import Started
from assay.train.validation import validation_loss
from assay.train.watch import Watch

# Two segments that promise other bits than each other still agree about a loss to this many nats.
LOSS_TOLERANCE = 0.00005
COMPILING = 3  # updates at the start of a segment in which kernels may still be compiled


@dataclass
class Spent:
    """Seconds inside updates, by what they went to; `accounting` is all that a bare loop would not do."""

    total: float = 0.0
    accounting: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the block's seconds as accounting."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.accounting += seconds
        self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass
class Trainer:
    """What the loop works on; made by the worker, used here alone. Of the ranks, the first alone has `metrics`."""

    ranks: Ranks
    run: RunFolder
    recipe: Recipe
    recipe_folder: Path
    ledger: Ledger
    segment: int
    started: Started
    batches: Batches
    validation: Shard | None
    device: torch.device
    watch: Watch
    hang: HangWatch | None
    metrics: MetricsWriter | None
    progress: Progress
    superseded: dict[int, dict[str, Any]]
    same_bits: Callable[[int], bool]
    tell: Callable[[str], None]
    spent: Spent = field(default_factory=Spent)
    ahead: Ahead | None = None  # the first rank's: what is known of the slots to come

    def patient(self) -> AbstractContextManager[None]:
        """Around what may take any time without being a hang."""
        return self.hang.pause() if self.hang else nullcontext()


def train(trainer: Trainer, until: int | None) -> str:
    """Train from the start's position to the schedule's end, or to the step `until`; return "done" or "until".

    Raises Interrupted (75) after a save, DataError (4) after a save when the data ends, NumbersError
    (5) with the optimizer unchanged.
    """
    amending.adopt(trainer, opening=True)
    recipe, started, device, ranks = trainer.recipe, trainer.started, trainer.device, trainer.ranks
    model, optimizers, position = started.model, started.optimizers, started.position
    mine, micro = share(recipe, ranks), recipe.batch.micro
    items = slice(mine.first * micro, (mine.first + mine.micro_batches) * micro)
    exchange = started.exchange
    divisor = recipe.positions_per_update
    saved_steps = {item.step for item in history(trainer.run.ledger).line if item.kind == "full"}
    due, last, boundary = _terms(trainer, until)
    slot, first = -1, position.step

    while position.step < last:
        began = time.perf_counter()
        update = position.step
        if update == boundary:
            _save_full(trainer, saved_steps)
            if not amending.adopt(trainer):
                raise amending.no_decay_stop(trainer)
            recipe, (due, last, boundary) = trainer.recipe, _terms(trainer, until)
            continue

        # A new slot: its bytes are the approved ones, or nothing is trained on them.
        if trainer.batches.updates <= update:
            with trainer.patient():
                _next_queue(trainer, saved_steps)
            due = _due(trainer)
        if trainer.batches.queue.slot_of(update)[0].number != slot:
            try:
                with trainer.spent.on("slot"), trainer.patient():
                    slot = ranks.lead(lambda: _enter_slot(trainer, trainer.started.position.step))
            except AssayError:
                if update > first:
                    _save_full(trainer, saved_steps)  # what is done is not lost with what cannot begin
                raise

        # The batch: this rank's items. The buffer that is hashed is the buffer that goes to the device.
        ids = trainer.batches.batch(update, items)
        with trainer.spent.on("digest"):
            digests = row_digests(ids)
        tokens = to_device(ids, device)
        documents = documents_of(trainer.batches, update, device, items) if recipe.model.document_mask else None

        if trainer.hang:
            trainer.hang.begin(compiling=recipe.runtime.compile and update < first + COMPILING)

        # Gradients: micro-batches in ascending order within a lane, lanes joined by the tree, ranks at the owners.
        exchange.clear()
        lane_sums = []
        for lane in range(mine.lanes):
            sums = torch.zeros(2, dtype=torch.float64, device=device)
            for index in range(lane * mine.accumulation, (lane + 1) * mine.accumulation):
                if ranks.size == 1 and trainer.watch.signalled():
                    _interrupt(trainer, saved_steps, "signal")
                rows = slice(index * micro, (index + 1) * micro)
                nll, z = window_loss(model, recipe, tokens[rows], None if documents is None else documents[rows])
                exchange.before_backward(ends_lane=index + 1 == (lane + 1) * mine.accumulation)
                torch.autograd.backward((nll + recipe.loss.z * z) / divisor)
                sums += torch.stack((nll.detach(), z.detach())).double()
            exchange.close_lane()
            lane_sums.append(sums)
        gradients = exchange.reduce()

        # All ranks learn the same, by the one wait for the device, before the optimizer changes anything.
        with trainer.spent.on("checks"):
            cause = trainer.watch.cause(trainer.ledger if ranks.first else None)
        told = agree(ranks, update, tree(lane_sums), tensor_norms(gradients), exchange.owner, cause, digests)
        loss, z_loss, grad_norm, cause = told.nll_sum / divisor, told.z_sum / divisor, told.grad_norm, told.cause
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            if trainer.metrics:
                trainer.metrics.add(_line(trainer, update, loss, z_loss, grad_norm, {}, 0.0, None))
            stands = "the last checkpoint stands" if saved_steps else "no full checkpoint was saved yet"
            raise NumbersError(
                f"update {update}: loss {loss}, gradient norm {grad_norm}; stopped before the optimizer changed "
                f"anything; {stands}: look at the batch (assay data batches) and the rates"
            )
        scale_gradients(gradients, torch.tensor(grad_norm, dtype=torch.float64), recipe.optimizer.grad_clip)
        rate = rates(recipe, update)
        set_rates(optimizers, rate)
        for optimizer in optimizers:
            optimizer.step()
        exchange.spread()
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
            validation, _ = validation_loss(model, trainer.validation, recipe, device, windows, ranks)
        seconds = time.perf_counter() - began
        if trainer.metrics:
            with trainer.spent.on("metrics"):
                line = _line(trainer, update, loss, z_loss, grad_norm, rate, seconds, validation)
                trainer.metrics.add(line)
                _compare(trainer, line)
            trainer.progress.show(step, loss, seconds, divisor, validation)

        # Whatever this step is due.
        if trainer.ahead:
            with trainer.spent.on("ahead"):
                trainer.ahead.look()
        trainer.spent.total += time.perf_counter() - began
        if step in due["full"] or step == last:
            _save_full(trainer, saved_steps)
            if amending.adopt(trainer):
                recipe, (due, last, boundary) = trainer.recipe, _terms(trainer, until)
        if step in due["weights"]:
            _save(trainer, "weights")
        if cause is not None and step < last:
            _interrupt(trainer, saved_steps, cause)
    return "done" if position.step == recipe.schedule.updates else "until"


def prepare(trainer: Trainer) -> None:
    """Compile where the recipe says so, then one micro-batch forward and backward at full shape before anything counts.

    Memory suffices, or exit 71.
    """
    recipe, model = trainer.recipe, trainer.started.model
    if trainer.hang:
        trainer.hang.begin(compiling=True)
    if recipe.runtime.compile:
        for block in model.blocks:
            block.compile()
    windows = torch.zeros(recipe.batch.micro, recipe.model.block + 1, dtype=torch.int64, device=trainer.device)
    nll, z = window_loss(model, recipe, windows, windows[:, 1:] if recipe.model.document_mask else None)
    trainer.started.exchange.before_backward(ends_lane=True)
    torch.autograd.backward(nll + recipe.loss.z * z)
    wait_for(nll.detach().reshape(1, 1))
    trainer.started.exchange.clear()


def _terms(trainer: Trainer, until: int | None) -> tuple[dict[str, set[int]], int, int | None]:
    """What the recipe in force sets: the steps due, the step to end at, and where a run without decay stops."""
    recipe = trainer.recipe
    last = recipe.schedule.updates if until is None else min(until, recipe.schedule.updates)
    trainer.progress.start(trainer.started.position.step, last)
    return _due(trainer), last, amending.boundary(recipe)


def _due(trainer: Trainer) -> dict[str, set[int]]:
    """Steps at which full and weights checkpoints are due, and the permanent ones, with the queue as it is now."""
    steps = checkpoint_steps(trainer.recipe, [slot.updates for slot in trainer.batches.queue.slots])
    return {kind: set(found) for kind, found in steps.items()}


def _line(
    trainer: Trainer,
    update: int,
    loss: float,
    z_loss: float,
    grad_norm: float,
    rate: dict[str, float],
    seconds: float,
    validation: float | None,
) -> dict[str, Any]:
    peak, used = numerics.memory(trainer.device)
    line: dict[str, Any] = {
        "update": update,
        "segment": trainer.segment,
        "time": now(),
        "loss": loss,
        "lr": rate.get("lr"),
        "muon_lr": rate.get("muon_lr"),
        "grad_norm": grad_norm,
        "seconds": seconds,
        "tokens_per_second": trainer.recipe.positions_per_update / seconds if seconds else None,
        "memory_peak": peak,
        "memory_used": used,
        "order_digest": trainer.started.position.order_digest,
    }
    if trainer.recipe.loss.z:
        line["z_loss"] = trainer.recipe.loss.z * z_loss
    if validation is not None:
        line["validation_loss"] = validation
    return line


def _compare(trainer: Trainer, line: dict[str, Any]) -> None:
    """Hold an update that was done again against the one it supersedes; a difference is a receipt and an alarm."""
    older = trainer.superseded.pop(line["update"], None)
    if older is None:
        return
    exact = trainer.same_bits(int(older["segment"]))
    wrong = [key for key in ("order_digest", "lr") if older.get(key) != line[key]]
    if older["loss"] is None or (
        older["loss"] != line["loss"] if exact else abs(older["loss"] - line["loss"]) > LOSS_TOLERANCE
    ):
        wrong.append("loss")
    if wrong:
        body = {
            "alarm": "recomputed update differs",
            "update": line["update"],
            "segment": line["segment"],
            "superseded_segment": older["segment"],
            "keys": wrong,
            "bits": "promised" if exact else "not claimed",
            "before": {key: json.dumps(older.get(key)) for key in wrong},
            "after": {key: json.dumps(line.get(key)) for key in wrong},
        }
        trainer.ledger.append("alarm", body)
        trainer.tell(f"ALARM: update {line['update']} done again differs from before in {', '.join(wrong)}")


def _next_queue(trainer: Trainer, saved_steps: set[int]) -> None:
    """The queue's end is reached: take up slots appended since, or save and stop, or wait for them."""
    ranks, told = trainer.ranks, list[str]()
    _save_full(trainer, saved_steps)  # whatever the queue holds now, what is done is not lost
    while True:
        slots = ranks.lead(lambda: _appended(trainer, told))
        if slots is not None:
            if not ranks.first:
                trainer.batches = _batches(trainer, first_slots(queues.load(trainer.batches.queue.path), slots))
            return
        cause = ranks.lead(lambda: trainer.watch.cause(trainer.ledger))
        if cause is not None:
            _interrupt(trainer, saved_steps, cause)
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


def _enter_slot(trainer: Trainer, update: int) -> int:
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
    if cause is not None:
        step = trainer.started.position.step
        raise Interrupted(f"stopped at step {step} ({cause}), while slot {slot.number} was verified; saved", cause)


def _save_full(trainer: Trainer, saved_steps: set[int]) -> None:
    """A full checkpoint of the present step, unless this very step stands; then retention."""
    step = trainer.started.position.step
    if trainer.metrics:
        with trainer.spent.on("ledger"):
            trainer.metrics.seal(f"step {step}")
    if trainer.ranks.lead(lambda: step in saved_steps):
        return
    _save(trainer, "full")
    if not trainer.ranks.first:
        return
    saved_steps.add(step)
    gone = surplus(history(trainer.run.ledger).line, trainer.recipe.checkpoint.keep, _due(trainer)["permanent"])
    for item in remove(trainer.run.path, trainer.ledger, gone, trainer.tell):
        saved_steps.discard(item.step)


def _save(trainer: Trainer, kind: str) -> None:
    """Write a checkpoint, then its receipt; the ranks hand their part to rank 0, which writes."""
    recipe, position, exchange = trainer.recipe, trainer.started.position, trainer.started.exchange
    weights = exchange.weights()
    optimizer = gather_state(trainer.ranks, exchange.owned, trainer.started.optimizers) if kind == "full" else None
    if not trainer.ranks.first:
        return
    told = history(trainer.run.ledger)
    facts = Facts(
        run_id=told.run_id,
        step=position.step,
        segment=trainer.segment,
        phase=phase(recipe.schedule, max(position.step - 1, 0)),
        time=now(),
        recipe=recipes.digest(recipe),
        order_digest=position.order_digest,
        ledger=trainer.ledger.head,
    )
    documents = {manifests.CONFIG: document(recipe.model.model_dump(mode="json"))}
    if kind == "full":
        queue = trainer.batches.queue
        entered = queue.slot_of(position.step - 1)[0].number + 1 if position.step else 0
        cursor = queue.slot_of(position.step) if position.step < queue.updates_total else None
        state = {
            "step": position.step,
            "segment": trainer.segment,
            "order_digest": position.order_digest,
            "recent": position.recent,
            "cursor": {"slot": cursor[0].number, "update": cursor[1]} if cursor else None,
            "data_seed": recipe.data.seed,
            "global_batch": recipe.global_batch,
            "queue_prefix": queue.prefix(entered),
            "rng": {"cpu": bytes(torch.get_rng_state().numpy()).hex()},
        }
        documents |= {
            manifests.STATE: document(state),
            manifests.RECIPE: document(recipes.resolved(recipe)),
            manifests.QUEUE: queue.prefix_bytes(entered),
        }
    parent = trainer.run.checkpoints if kind == "full" else trainer.run.weights
    manifest = save(
        parent, facts, weights, optimizer, documents, {item.weights_sha256: item.step for item in told.saved}
    )
    body = {
        "checkpoint": kind,
        "step": position.step,
        "segment": trainer.segment,
        "folder": f"{parent.name}/{manifest.folder.name}",
        "manifest_sha256": digest_file(manifest.folder / manifests.MANIFEST),
        "state_sha256": manifest.state_sha256,
        "weights_sha256": manifest.weights_sha256,
        "order_digest": position.order_digest,
        "bytes": sum(item["bytes"] for item in manifest.files.values()),
    }
    trainer.ledger.append("checkpoint.saved", body)
    trainer.tell(f"saved {body['folder']} ({kind}, {body['bytes'] / 1e6:,.1f} MB)")


def _interrupt(trainer: Trainer, saved_steps: set[int], cause: str) -> None:
    """Save what is done and leave with exit 75; a half-done update has changed nothing."""
    _save_full(trainer, saved_steps)
    step = trainer.started.position.step
    raise Interrupted(f"stopped at step {step} ({cause}); the state is saved", cause)


def open_validation(recipe: Recipe, folder: Path) -> Shard | None:
    """The validation shard that the recipe names, or None."""
    return None if recipe.data.validation is None else open_shard(folder / recipe.data.validation)


def superseded(run: RunFolder, step: int) -> dict[int, dict[str, Any]]:
    """Updates from `step` on that an earlier segment did already, by update."""
    return {update: line for update, line in lines.by_update(run.metrics).items() if update >= step}
