"""One rank's process: prepare, start, train, and record how it ended.

Every end is a receipt and `outcome.json`, written before the process leaves; leaving is abrupt on
purpose, so that nothing in tear-down can change the exit code. The parent (see `launch.local`)
keeps the output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.checkpoint.permission import permit
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.errors import AssayError, InputError, Interrupted, MachineError
from assay.files.publish import leftovers, publish_file
from assay.ledger.ledger import Ledger, now
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder
from assay.run.history import History, history
from assay.run.metrics import MetricsWriter
from assay.run.owner import is_owned, own
from assay.run.provenance import provenance
from assay.run.status import reported
from assay.train import amending, numerics
from assay.train.loop import Trainer, open_validation, superseded, train, wait_for
from assay.train.loss import window_loss
from assay.train.progress import Progress
from assay.train.start import Started, begin
from assay.train.watch import Watch


def main() -> None:
    """Run the job that the arguments describe; the process ends with the contract's exit code."""
    parser = argparse.ArgumentParser(prog="assay.train.worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--until")
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--token", required=True, help="ties outcome.json to this process")
    parser.add_argument("--command", required=True, help="the command as JSON, for the receipt")
    job = parser.parse_args()
    code = run_job(job)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(job: argparse.Namespace) -> int:
    """Own the run, train it, record the outcome; return the exit code."""
    run = RunFolder(job.run)
    try:
        with own(run):
            return _owned(run, job)
    except AssayError as fault:  # before anything was begun: nothing to record but the outcome
        _tell(f"assay: {fault}")
        if not is_owned(run):  # the outcome belongs to the owner
            _outcome(run, job.token, fault.code, str(fault), None, None)
        return fault.code
    except OSError as fault:  # not even the end could be recorded
        _tell(f"assay: {_refusal(fault)}")
        return MachineError.code


def _owned(run: RunFolder, job: argparse.Namespace) -> int:
    """Prepare the run's files, then train; every end from here on is a receipt."""
    watch = Watch()
    recipe = recipes.load(job.recipe)
    ledger = run.open_ledger()  # before it is read: a hold that comes in between is seen by the watch
    told = history(run.ledger)
    permit(run, recipe, told)
    recipe = amending.own_recipe(run, recipe)
    for rest in [*leftovers(run.checkpoints), *leftovers(run.weights)]:
        _tell(f"{rest.name} was left half-written by an interrupted save; it is ignored")
    sealed_to = max((int(receipt.body["stop"]) for receipt in told.sealed), default=0)
    with closing(MetricsWriter(run.metrics, ledger, sealed_to, recipe.log.every)) as metrics:
        segment = Segment(run, recipe, ledger, metrics, len(told.segments) + 1)
        try:
            return _train(segment, job, told, watch)
        except AssayError as fault:
            return _ended(segment, job, fault)
        except OSError as fault:
            return _ended(segment, job, MachineError(_refusal(fault)))
        except (MemoryError, torch.OutOfMemoryError) as fault:
            words = f"out of memory: {_first_line(fault)}; use a smaller batch.micro, or runtime.recompute"
            return _ended(segment, job, MachineError(words))
        except torch.AcceleratorError as fault:
            return _ended(segment, job, MachineError(f"the device failed: {_first_line(fault)}; run elsewhere"))
        except Exception as fault:  # noqa: BLE001 - a bug: recorded as such, with its traceback in the log
            traceback.print_exc()
            return _ended(segment, job, AssayError(f"internal fault ({type(fault).__name__}): a bug; see the log"))


@dataclass
class Segment:
    """The segment that this process writes; `started` is None until the start was proved and recorded."""

    run: RunFolder
    recipe: Recipe
    ledger: Ledger
    metrics: MetricsWriter
    number: int
    started: Started | None = None


def _train(segment: Segment, job: argparse.Namespace, told: History, watch: Watch) -> int:
    """Start, prove, record, train to the end; return exit code 0."""
    run, recipe, ledger = segment.run, segment.recipe, segment.ledger
    device = numerics.switch_on(recipe)
    folder = job.recipe.resolve().parent
    queue = queues.load(folder / recipe.data.queue)
    roots = [folder / root for root in recipe.data.roots]
    batches = Batches(queue, roots, recipe.data.seed, recipe.global_batch)
    started = begin(run, recipe, folder, queue, batches, device, job.resume, job.from_step)
    facts = numerics.describe(run, recipe, device)
    _open(segment, started, facts, json.loads(job.command))
    segment.started = started
    promises = {one.number: one.body["numerics"]["promise"] for one in told.segments}
    goal = "the scheduled end" if job.until is None else f"--until {job.until}"
    progress = Progress(job.terminal, recipe.log.every, goal)
    trainer = Trainer(
        run=run,
        recipe=recipe,
        recipe_folder=folder,
        ledger=ledger,
        segment=segment.number,
        started=started,
        batches=batches,
        validation=open_validation(recipe, folder),
        device=device,
        watch=watch,
        metrics=segment.metrics,
        progress=progress,
        superseded=superseded(run, started.position.step),
        same_bits=lambda number: facts["bits"] == "promised" and promises.get(number) == facts["promise"],
        tell=progress.note,
    )
    if recipe.runtime.compile:
        for block in started.model.blocks:
            block.compile()
    _dry_update(trainer)
    end = train(trainer, _until(job.until, trainer))
    segment.metrics.seal("end")
    position, spent = started.position, trainer.spent
    body = {
        "cause": end,
        "step": position.step,
        "segment": segment.number,
        "order_digest": position.order_digest,
        "microseconds": {
            "updates": round(spent.total * 1e6),
            "accounting": round(spent.accounting * 1e6),
            **{f"accounting_{name}": round(value * 1e6) for name, value in spent.parts.items()},
        },
    }
    ledger.append("end", body)
    message = "the schedule is done" if end == "done" else f"stopped where --until said, at step {position.step}"
    _tell(f"{message}; order digest {position.order_digest}")
    _outcome(run, job.token, 0, message, position.step, ledger.head)
    return 0


def _ended(segment: Segment, job: argparse.Namespace, fault: AssayError) -> int:
    """Record an end before the schedule's: the receipt, the outcome, one sentence; return the exit code."""
    segment.metrics.seal("interruption")
    position = segment.started.position if segment.started else None
    cause = fault.cause if isinstance(fault, Interrupted) else None
    body: dict[str, Any] = {"before_start": True}  # no segment was opened, so none is closed
    if position is not None:
        body = {"segment": segment.number, "step": position.step, "order_digest": position.order_digest}
    if cause is not None:
        segment.ledger.append("interrupted", body | {"cause": cause})
    else:
        segment.ledger.append("failed", body | {"code": fault.code})
    _tell(f"assay: {fault}")
    step = position.step if position else None
    _outcome(segment.run, job.token, fault.code, str(fault), step, segment.ledger.head, cause)
    return fault.code


def _open(segment: Segment, started: Started, facts: dict[str, Any], command: list[str]) -> None:
    """The receipt of the segment's beginning, and the line that says which start it was."""
    step = started.position.step
    words = {
        "scratch": "SCRATCH",
        "init-from": f"INIT-FROM {started.evidence.get('weights_file')} @ 0",
        "continue-from": f"CONTINUE {started.evidence.get('parent', {}).get('run_id')} @ {step}",
        "resume": f"RESUME @ {step}",
    }
    body = {
        "segment": segment.number,
        "mode": started.mode,
        "step": step,
        "order_digest": started.position.order_digest,
        "recipe": recipes.digest(segment.recipe),
        "resolved": _exact(recipes.resolved(segment.recipe)),
        "evidence": started.evidence,
        "numerics": facts,
        **provenance(segment.run, command),
    }
    segment.ledger.append("recovery" if started.mode == "resume" else "start", body)
    for note in started.notes:
        _tell(note)
    _tell(words[started.mode])


def _exact(value: Any) -> Any:
    """The resolved recipe with its floats as the shortest decimal strings that read back to the same bits."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    return [_exact(inner) for inner in value] if isinstance(value, list) else value


def _dry_update(trainer: Trainer) -> None:
    """One micro-batch forward and backward at full shape before anything counts: memory suffices, or exit 71."""
    recipe, model = trainer.recipe, trainer.started.model
    windows = torch.zeros(recipe.batch.micro, recipe.model.block + 1, dtype=torch.int64, device=trainer.device)
    nll, z = window_loss(model, recipe, windows, windows[:, 1:] if recipe.model.document_mask else None)
    torch.autograd.backward(nll + recipe.loss.z * z)
    wait_for(nll.detach().reshape(1))
    for parameter in model.parameters():
        parameter.grad = None


def _until(word: str | None, trainer: Trainer) -> int | None:
    if word is None:
        return None
    if word == "slot-end":
        return trainer.batches.queue.slot_of(trainer.started.position.step)[0].end_update
    step = trainer.started.position.step
    if int(word) < step:
        raise InputError(f"--until {word} lies behind step {step}, which is done; name a later step, or --from-step")
    return int(word)


def _outcome(
    run: RunFolder,
    token: str,
    code: int,
    message: str,
    step: int | None,
    head: dict[str, Any] | None,
    cause: str | None = None,
) -> None:
    """`outcome.json`: how this process ended, for the parent and for people."""
    body = {
        "code": code,
        "cause": cause,
        "message": message,
        "step": step,
        "time": now(),
        "ledger": head,
        "token": token,
        "last_reported": _last_reported(run),
    }
    publish_file(run.outcome, (json.dumps(body, indent=1) + "\n").encode())


def _first_line(fault: BaseException) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]


def _last_reported(run: RunFolder) -> int | None:
    """The newest step of the metrics, or None where they cannot be read: that may be the very fault to record."""
    try:
        return reported(run.metrics).step
    except (AssayError, OSError):
        return None


def _refusal(fault: OSError) -> str:
    """What the operating system refused (a full disk, most often), in one sentence."""
    return f"{fault.filename or 'a file of the run'} could not be written or read: {fault.strerror or fault}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
