"""Which steps are due a checkpoint, and how the loop saves one: copy, files, receipt, then retention.

Every rank calls alike and writes the tensors that it owns; rank 0 alone writes receipts. Where host memory
suffices training goes on from a copy while a thread writes; one save is in the air. What is half-done has
changed nothing: an interruption saves the last whole update.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.copies import Copies, bytes_of, not_finite
from assay.checkpoint.retention import remove, surplus
from assay.checkpoint.room import demand_space, free_memory
from assay.checkpoint.save import Facts, Part, Place, as_machine_fault, begin, document, give_up, write_part
from assay.errors import AssayError, Interrupted, NumbersError, Refused
from assay.files.digest import digest_file
from assay.ledger.ledger import now
from assay.plan.cadence import checkpoint_steps
from assay.plan.memory import state_bytes
from assay.recipe import load as recipes
from assay.recipe.schedule import phase
from assay.run.history import history
from assay.train import amending
from assay.train.faults import of_device
from assay.train.flight import Flight, join_parts
from assay.train.optimizers import state_tensors
from assay.train.trainer import Trainer
from assay.train.watch import stopped

MOST_OF_FREE = 0.9  # of the host memory that is free, for copies


def due_steps(trainer: Trainer) -> dict[str, set[int]]:
    """Steps at which full and weights checkpoints are due, and the permanent ones, with the queue as it is now."""
    slots = [slot.updates for slot in trainer.batches.queue.slots]
    steps = checkpoint_steps(trainer.recipe, slots, trainer.cadence)
    return {kind: set(found) for kind, found in steps.items()}


def save_full(trainer: Trainer, saved_steps: set[int], background: bool = False) -> None:
    """A full checkpoint of the present step, unless this very step stands; then retention.

    It stands when this returns. With `background` training goes on while it is written (`advance` takes it further),
    where host memory suffices and no amendment waits for it.
    """
    if trainer.hang:
        trainer.hang.begin(compiling=True)  # a save has the long bound, also one in the middle of an update
    land(trainer, saved_steps)
    step = trainer.started.position.step
    trainer.watch.wish = None
    if trainer.metrics:
        with trainer.spent.on("ledger"):
            trainer.metrics.seal(f"step {step}")

    def look() -> dict[str, bool]:
        return {"stands": step in saved_steps, "background": background and not amending.waiting(trainer)}

    told = trainer.ranks.lead(look)
    if not told["stands"]:
        _begin(trainer, "full", told["background"])
        if not told["background"]:
            land(trainer, saved_steps)


def save_weights(trainer: Trainer, saved_steps: set[int], background: bool = False) -> None:
    """A weights checkpoint of the present step; `background` as for a full one, whose copies it shares."""
    if any(flight.facts.step != trainer.started.position.step for flight in trainer.air.flights):
        land(trainer, saved_steps)
    _begin(trainer, "weights", background)
    if not background:
        land(trainer, saved_steps)


def catch_up(trainer: Trainer, saved_steps: set[int]) -> None:
    """After a recovery: the weights and the retention that were due at this step when the machine went away."""
    step, weights = trainer.started.position.step, trainer.started.evidence.get("weights_sha256")

    def due() -> bool:
        return step in due_steps(trainer)["weights"] and not any(
            (item.kind, item.step, item.weights_sha256) == ("weights", step, weights)
            for item in history(trainer.run.ledger).standing
        )

    if trainer.started.mode == "resume":
        if trainer.ranks.lead(due):
            save_weights(trainer, saved_steps)
        if trainer.ranks.first:
            _clean_up(trainer, saved_steps)


def advance(trainer: Trainer, saved_steps: set[int]) -> None:
    """Take the oldest save in the air one step further; every rank calls it, at best when all are ready for it.

    First all ranks' parts are joined, then, the folder published, come the receipt and retention. A fault of the
    thread is raised here, on every rank; after any fault nothing is in the air.
    """
    flight = trainer.air.flights[0]
    began = time.perf_counter()
    try:
        if not flight.joined:
            join_parts(trainer.air, flight, trainer.ranks)
            flight.stall += time.perf_counter() - began
            return
        trainer.ranks.lead(lambda: _record(trainer, flight, began))
    except BaseException:
        if trainer.ranks.first:
            for lost in trainer.air.flights:
                trainer.air.do(partial(give_up, lost.place), True).result()  # when the thread is done with it
        trainer.air.flights.clear()
        raise
    trainer.air.flights.pop(0)
    if flight.kind == "full" and trainer.ranks.first:
        saved_steps.add(flight.facts.step)
        _clean_up(trainer, saved_steps)


def land(trainer: Trainer, saved_steps: set[int]) -> None:
    """Wait until nothing is in the air; every rank calls it at the same step."""
    while trainer.air.flights:
        advance(trainer, saved_steps)


@contextmanager
def landed(trainer: Trainer) -> Iterator[None]:
    """Around training: what is in the air when it ends by a fault still becomes a checkpoint, where that can be.

    With several ranks for faults that all of them raise alike; after others, such as a lost rank, rank 0 still records
    what needs no word of the others any more. Nothing here hides the fault: it keeps its code and its words.
    """
    try:
        yield
    except Exception as error:
        ranks = trainer.ranks
        try:
            if trainer.hang:
                trainer.hang.begin(compiling=True)
            if ranks.size == 1 or isinstance(error, NumbersError | Interrupted | Refused) or error in ranks.led:
                land(trainer, set())
            elif ranks.first:
                for flight in trainer.air.flights:
                    if flight.joined:
                        _record(trainer, flight, time.perf_counter())
        except Exception as second:  # noqa: BLE001 - whatever it is, the first fault is the one that counts
            words = str(second) if isinstance(second, AssayError) else f"{type(second).__name__}: {second}"
            with suppress(OSError):  # where nobody listens
                trainer.tell(f"a save in the air was lost as well: {words}")
        raise


def _demand_finite(trainer: Trainer) -> None:
    """NumbersError, on every rank, when a weight or a value of the optimizer is not finite: that is never saved.

    The check before the optimizer cannot see what the optimizer then makes of sound gradients. Once a step.
    """
    step = trainer.started.position.step
    if trainer.air.finite == step:
        return
    owned, optimizers = trainer.started.exchange.owned, trainer.started.optimizers
    wrong = not_finite({**dict(owned.named_parameters()), **state_tensors(owned, optimizers)})
    for rank, name in enumerate(trainer.ranks.collect(min(wrong, default=None))):
        if name is not None:
            raise NumbersError(
                f"step {step}: {name} (of rank {rank}) holds a value that is not finite and is not saved; the "
                "checkpoint before it stands: lower the rates, or look at the batches (assay data batches)"
            )
    trainer.air.finite = step


def _begin(trainer: Trainer, kind: str, background: bool) -> None:
    """Start one checkpoint: each rank's part of a full one, all weights by rank 0 of a weights one."""
    began = time.perf_counter()
    _demand_finite(trainer)
    recipe, position, ranks = trainer.recipe, trainer.started.position, trainer.ranks
    parent = trainer.run.checkpoints if kind == "full" else trainer.run.weights
    parts = ranks.size if kind == "full" else 1
    begun: list[tuple[Facts, Place, dict[str, int]]] = []

    def begin_folder() -> dict[str, Any]:
        promised = sum(flight.unwritten(state_bytes(recipe, flight.kind)) for flight in trainer.air.flights)
        demand_space(parent, manifests.folder_name(position.step), state_bytes(recipe, kind), promised)
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
        place = begin(parent, facts)
        # One digest never stands under two steps, unless every update between them was skipped, as recorded.
        others = {one.weights_sha256: one.step for one in told.saved if not told.unchanged(one.step, position.step)}
        begun.append((facts, place, others))
        return {"facts": vars(facts), "temporary": place.temporary.name, "folder": place.folder.name}

    told = ranks.lead(begin_folder)
    if begun:
        facts, place, weights_steps = begun[0]
    else:
        facts, weights_steps = Facts(**told["facts"]), {}
        place = Place(parent / told["temporary"], parent / told["folder"])
    exchange = trainer.started.exchange
    weights = exchange.weights() if kind == "weights" else {}
    model = weights if kind == "weights" else dict(exchange.owned.named_parameters())
    optimizer = state_tensors(exchange.owned, trainer.started.optimizers) if kind == "full" else None
    copied = _copied(trainer, kind, model | (optimizer or {})) if background else None
    documents = _documents(trainer, kind) if ranks.first else {}

    def part() -> Part:
        if kind == "weights" and not ranks.first:
            return Part({}, {}, {})
        tensors = model | (optimizer or {})
        try:
            if copied is not None:
                tensors, wait = copied
                wait()
            began = time.perf_counter()
            written = write_part(
                place,
                {name: tensors[name] for name in model},
                None if optimizer is None else {name: tensors[name] for name in optimizer},
                documents,
                ranks.rank,
                parts,
            )
        except (RuntimeError, MemoryError) as fault:  # on its way from the device: a fault that every rank learns of
            raise of_device(fault) or fault from None
        if kind == "full":
            trainer.air.wrote = time.perf_counter() - began
        return written

    asynchronous = copied is not None
    flight = Flight(kind, facts, place, trainer.air.do(part, asynchronous), weights_steps, asynchronous, began)
    trainer.air.flights.append(flight)
    flight.stall = time.perf_counter() - began


def _copied(
    trainer: Trainer, kind: str, tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]] | None:
    """Copies of the present values, and what waits for them; None, on every rank, where there is no memory for them.

    What the copies of this very step hold already is not copied again.
    """
    air, ranks, step = trainer.air, trainer.ranks, trainer.started.position.step
    exchange = trainer.started.exchange
    alone = ranks.size == 1
    if kind == "weights" and not alone and trainer.recipe.runtime.engine == "fsdp":
        return None  # gathered for this one file, which then is written at once
    key = "weights" if kind == "weights" and not alone else "state"
    like = tensors if ranks.first or kind == "full" else {}
    if key == "state":
        like = dict(exchange.owned.named_parameters()) | state_tensors(exchange.owned, trainer.started.optimizers)
    if key not in air.copies and not _allocate(trainer, key, like):
        return None
    copies = air.copies[key]
    if key == "state" and air.held is not None and air.held[0] == step:
        return air.held[1], copies.wait
    taken = copies.take(tensors if key == "state" else like)
    if key == "state":
        air.held = (step, taken) if kind == "full" else None
    return taken, copies.wait


def _allocate(trainer: Trainer, key: str, like: dict[str, Tensor]) -> bool:
    """Memory for copies of `like` on every rank, or on none: asked of each machine for all its ranks together."""
    ranks = trainer.ranks
    everyone = ranks.collect([socket.gethostname(), bytes_of(like), free_memory()])
    why = None
    for host in dict.fromkeys(name for name, _, _ in everyone):
        needed = sum(bytes_ for name, bytes_, _ in everyone if name == host)
        free = min((left for name, _, left in everyone if name == host and left is not None), default=None)
        if free is not None and needed > MOST_OF_FREE * free:
            why = f"{needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB of host memory are free"
    if why is None:
        try:
            made = Copies(like)
        except (RuntimeError, MemoryError):  # the machine said that it had more
            made = None
        if all(ranks.collect(made is not None)):
            assert made is not None
            trainer.air.copies[key] = made
            return True
        why = "the host memory that was free could not be had"
    if why is not None and key not in trainer.air.told and ranks.first:
        trainer.tell(f"training stands still while checkpoints are written: {why} for copies of the {key}")
    trainer.air.told.add(key)
    return False


def _documents(trainer: Trainer, kind: str) -> dict[str, bytes]:
    """The small files of a checkpoint: the model's shape, and of a full one state, recipe and consumed queue."""
    recipe, position, queue = trainer.recipe, trainer.started.position, trainer.batches.queue
    documents = {manifests.CONFIG: document(recipe.model.model_dump(mode="json"))}
    if kind == "weights":
        return documents
    entered = queue.slot_of(position.step - 1)[0].number + 1 if position.step else 0
    cursor = queue.slot_of(position.step) if position.step < queue.updates_total else None
    state = {
        "step": position.step,
        "segment": trainer.segment,
        "order_digest": position.order_digest,
        "recent": position.recent,
        "spikes": {"norms": position.norms, "skipped": position.skipped},
        "cursor": {"slot": cursor[0].number, "update": cursor[1]} if cursor else None,
        "data_seed": recipe.data.seed,
        "global_batch": recipe.global_batch,
        "queue_prefix": queue.prefix(entered),
        "rng": {"cpu": bytes(torch.get_rng_state().numpy()).hex()},
    }
    return documents | {
        manifests.STATE: document(state),
        manifests.RECIPE: document(recipes.resolved(recipe)),
        manifests.QUEUE: queue.prefix_bytes(entered),
    }


def _record(trainer: Trainer, flight: Flight, began: float) -> None:
    """Rank 0: the receipt, once the folder is published."""
    assert flight.manifest is not None
    manifest = flight.manifest.result()
    moment = time.perf_counter()
    with as_machine_fault(f"the receipt of {manifest.folder}"):
        body = {
            "checkpoint": flight.kind,
            "step": manifest.step,
            "segment": manifest.segment,
            "folder": f"{manifest.folder.parent.name}/{manifest.folder.name}",
            "manifest_sha256": digest_file(manifest.folder / manifests.MANIFEST),
            "state_sha256": manifest.state_sha256,
            "weights_sha256": manifest.weights_sha256,
            "order_digest": manifest.order_digest,
            "bytes": sum(item["bytes"] for item in manifest.files.values()),
            "asynchronous": flight.asynchronous,
            # decimal strings: from the copy to this receipt, and how much of it training stood still
            "seconds": f"{moment - flight.began:.6f}",
            "stall_seconds": f"{flight.stall + moment - began:.6f}",
        }
        trainer.ledger.append("checkpoint.saved", body)
    trainer.tell(f"saved {body['folder']} ({flight.kind}, {body['bytes'] / 1e6:,.1f} MB)")


def _clean_up(trainer: Trainer, saved_steps: set[int]) -> None:
    """Rank 0: retention, now that a newer checkpoint is safe."""
    gone = surplus(history(trainer.run.ledger).line, trainer.recipe.checkpoint.keep, due_steps(trainer)["permanent"])
    for item in remove(trainer.run.path, trainer.ledger, gone, trainer.tell):
        saved_steps.discard(item.step)


def interrupt(trainer: Trainer, saved_steps: set[int], cause: str) -> None:
    """Save what is done and leave, 75 or, where another machine took the run, 3; a half-done update changed nothing.

    Where a save was in the air at a signal and the grace has no room left for a second one, the first is the save.
    """
    step, in_air = trainer.started.position.step, any(flight.kind == "full" for flight in trainer.air.flights)
    if trainer.hang:
        trainer.hang.begin(compiling=True)
    land(trainer, saved_steps)

    def newest() -> int | None:
        left = trainer.watch.left()
        return max(saved_steps) if in_air and left is not None and trainer.air.wrote > left else None

    stands = trainer.ranks.lead(newest)
    if stands is not None and stands < step:
        raise stopped(
            cause,
            f"stopped at step {step} ({cause}); the state of step {stands} is saved, and --grace has no time for "
            "another save: the updates after it are done again by the next start",
        )
    save_full(trainer, saved_steps)
    raise stopped(cause, f"stopped at step {step} ({cause}); the state is saved")
