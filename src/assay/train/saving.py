"""Which steps are due a checkpoint, and how the loop writes one: state, receipt, then retention.

Every rank calls alike; rank 0 alone writes. What is half-done has changed nothing: an interruption saves
the last whole update.
"""

from __future__ import annotations

import torch

from assay.checkpoint import manifest as manifests
from assay.checkpoint.retention import remove, surplus
from assay.checkpoint.save import Facts, document, save
from assay.files.digest import digest_file
from assay.ledger.ledger import now
from assay.plan.cadence import checkpoint_steps
from assay.recipe import load as recipes
from assay.recipe.schedule import phase
from assay.run.history import history
from assay.train.owned import gather_state
from assay.train.trainer import Trainer
from assay.train.watch import stopped


def due_steps(trainer: Trainer) -> dict[str, set[int]]:
    """Steps at which full and weights checkpoints are due, and the permanent ones, with the queue as it is now."""
    slots = [slot.updates for slot in trainer.batches.queue.slots]
    steps = checkpoint_steps(trainer.recipe, slots, trainer.cadence)
    return {kind: set(found) for kind, found in steps.items()}


def save_full(trainer: Trainer, saved_steps: set[int]) -> None:
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
    gone = surplus(history(trainer.run.ledger).line, trainer.recipe.checkpoint.keep, due_steps(trainer)["permanent"])
    for item in remove(trainer.run.path, trainer.ledger, gone, trainer.tell):
        saved_steps.discard(item.step)


def catch_up(trainer: Trainer, due: dict[str, set[int]]) -> None:
    """On a resume: the weights that were due at this very step, when the interruption came before they were saved."""
    step = trainer.started.position.step

    def missing() -> bool:
        line = history(trainer.run.ledger).line
        return step in due["weights"] and not any(item.kind == "weights" and item.step == step for item in line)

    if trainer.started.mode == "resume" and trainer.ranks.lead(missing):
        save_weights(trainer)


def save_weights(trainer: Trainer) -> None:
    """A weights checkpoint of the present step."""
    _save(trainer, "weights")


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


def interrupt(trainer: Trainer, saved_steps: set[int], cause: str) -> None:
    """Save what is done and leave, 75 or, where another machine took the run, 3; a half-done update changed nothing."""
    save_full(trainer, saved_steps)
    step = trainer.started.position.step
    raise stopped(cause, f"stopped at step {step} ({cause}); the state is saved")
