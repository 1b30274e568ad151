"""One rank's process: prepare, start, train, and, as rank 0, record how it ended.

Every end is a receipt and `outcome.json`, written by rank 0 before it leaves; the other ranks leave after it, or at
once with a word for it when the fault is their own. Leaving is abrupt on purpose, so that nothing in
tear-down can change the exit code. The parent (see `launch.local`) keeps the output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from assay.checkpoint.permission import permit
from assay.checkpoint.retention import clear_half_written, clear_unrecorded
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.errors import AssayError, InputError, Interrupted, MachineError, NumbersError, Refused
from assay.ledger.ledger import Ledger
from assay.plan.figures import rank_refusal
from assay.plan.trace import stated
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run import bits
from assay.run.folder import RunFolder, address_digest
from assay.run.history import History, history
from assay.run.metrics import MetricsWriter
from assay.run.outcome import Fault, fault_of, faults, leave_fault, way_on, write_outcome
from assay.run.owner import is_owned, own
from assay.run.provenance import provenance
from assay.run.speed import exact
from assay.train import amending, control, numerics
from assay.train.ahead import Ahead
from assay.train.entering import first_slots
from assay.train.faults import of_device
from assay.train.feed import Feed
from assay.train.hang import Bounds, HangWatch
from assay.train.loop import prepare, train
from assay.train.meters import Meters, SlowBounds, Stragglers
from assay.train.nvml import Sensor
from assay.train.progress import Progress
from assay.train.ranks import LostRanks, Ranks, join, of_peers
from assay.train.reduction import share
from assay.train.saving import landed
from assay.train.start import Started, begin
from assay.train.telemetry import superseded
from assay.train.tracing import Trace
from assay.train.trainer import Trainer
from assay.train.validation import open_validation
from assay.train.watch import Watch, stopped

WORD_SECONDS = 3.0  # how long rank 0 waits for the word of a rank that it lost


@dataclass(frozen=True)
class Place:
    """This process among the ranks: as the parent said, or as the variables of torch's own launcher do."""

    rank: int = 0
    size: int = 1
    local: int = 0
    meeting: Path | None = None  # where the ranks meet and leave their faults
    parent: int | None = None
    bounds: Bounds | None = None  # None: nobody watches for a hang
    grace: float | None = None  # seconds that a stop may take after a signal; None: nobody counts them
    since: int | None = None  # the ledger's head before pre-flight; None: nobody made one
    slow: SlowBounds = field(default_factory=SlowBounds)


def main() -> None:
    """Run the job that the arguments describe; the process ends with the contract's exit code."""
    parser = argparse.ArgumentParser(prog="assay.train.worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--until")
    parser.add_argument("--profile", type=int)
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--token", default="", help="ties outcome.json to this process")
    parser.add_argument("--command", default="[]", help="the command as JSON, for the receipt")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--meeting", type=Path, help="the folder where the ranks of this machine meet")
    parser.add_argument("--parent", type=int, help="the process that started this one")
    parser.add_argument("--grace", type=float)
    parser.add_argument("--since", type=int)
    parser.add_argument("--hang-seconds", type=float, default=Bounds.update)
    parser.add_argument("--hang-seconds-compiling", type=float, default=Bounds.compile)
    job = parser.parse_args()
    bounds = Bounds(job.hang_seconds, job.hang_seconds_compiling)
    if job.rank is None and "RANK" in os.environ:  # torch's own launcher
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        place = Place(rank, size, local, bounds=bounds)
    else:
        place = Place(
            job.rank or 0, job.ranks or 1, job.rank or 0, job.meeting, job.parent, bounds, job.grace, job.since
        )
    code = run_job(job, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(job: argparse.Namespace, place: Place | None = None) -> int:
    """Train as the rank at `place` (default: the only one); rank 0 owns the run and records the outcome."""
    place = place or Place()
    if place.rank > 0:
        return _follow(job, place)
    run = RunFolder(job.run)
    try:
        with own(run):
            return _owned(run, job, place)
    except AssayError as fault:  # before anything was begun: nothing to record but the outcome
        _tell(f"assay: {fault}")
        if not is_owned(run):  # the outcome belongs to the owner
            write_outcome(run, job.token, fault.code, str(fault), None, None)
        return fault.code
    except OSError as fault:  # not even the end could be recorded
        _tell(f"assay: {_refusal(fault)}")
        return MachineError.code


def _owned(run: RunFolder, job: argparse.Namespace, place: Place) -> int:
    """Prepare the run's files, then train; every end from here on is a receipt."""
    watch = Watch(place.parent, place.grace)
    recipe = recipes.load(job.recipe)
    ledger = run.open_ledger()  # before it is read: a hold that comes in between is seen by the watch
    told = history(run.ledger)
    held = told.hold if told.hold and place.since is not None and told.hold.seq > place.since else None
    permit(run, recipe, replace(told, hold=None) if held else told)
    recipe = amending.own_recipe(run, recipe)
    for parent in (run.checkpoints, run.weights):
        clear_half_written(parent, _tell)
    clear_unrecorded(run.path, run.ledger, told, _tell)
    sealed_to = max((int(receipt.body["stop"]) for receipt in told.sealed), default=0)
    with closing(MetricsWriter(run.metrics, ledger, sealed_to, recipe.log.every)) as metrics:
        segment = Segment(run, recipe, ledger, metrics, len(told.segments) + 1)
        try:
            if held:  # it asks this very start to stop; one that stood before it forbids it
                words = f"stopped before training began by a {held.body['cause']}; lift the hold with: assay release"
                raise stopped(held.body["cause"], f"{words} {run.path}")
            return _train(segment, job, told, watch, place)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded and has its code
            fault = answer(error)
            return _ended(segment, job, _word_of_the_lost(run, place, fault) if isinstance(fault, LostRanks) else fault)


def _follow(job: argparse.Namespace, place: Place) -> int:
    """A rank other than 0: train along, write nothing, and leave after rank 0 or with a word for it."""
    watch, ranks = Watch(place.parent), Ranks(place.rank, place.size)
    run = RunFolder(job.run)
    try:
        hang = _hang_watch(place, run, len(history(run.ledger).segments) + 1, watch)  # rank 0 opens it after `join`
        recipe = amending.own_recipe(run, recipes.load(job.recipe))
        _demand_ranks(recipe, place.size)
        device = numerics.switch_on(recipe, place.local)
        ranks = join(place.rank, place.size, place.local, device, place.meeting)
        trainer, _, until = _trainer(job, ranks, recipe, device, watch, hang, None, None, place.slow)
        _to_the_end(trainer, until)
    except Exception as error:  # noqa: BLE001 - whatever it is, it has its code
        fault = answer(error)
        _tell(f"assay: {fault}")
        if isinstance(fault, LostRanks):  # whoever was lost, or the parent for it, says why
            return fault.code
        shared = isinstance(fault, NumbersError | Interrupted | Refused) or fault in ranks.led
        if not shared or ranks.words is None:  # this rank's alone, or they have not met
            if place.meeting:
                leave_fault(place.meeting, Fault(place.rank, fault.code, f"rank {place.rank}: {fault}"))
            return fault.code
        ranks.farewell()
        return fault.code
    ranks.farewell()
    return 0


def answer(error: Exception) -> AssayError:
    """Any exception as a fault of the contract; a bug is recorded as such, with its traceback in the log."""
    if isinstance(error, AssayError):
        return error
    if isinstance(error, OSError):
        return MachineError(_refusal(error))
    if failed := of_device(error):
        return failed
    if isinstance(error, RuntimeError) and (lost := of_peers(error)):
        return lost  # by a collective of torch's own, as those of sharded models are
    traceback.print_exception(error)
    return AssayError(f"internal fault ({type(error).__name__}): a bug; see the log")


def _word_of_the_lost(run: RunFolder, place: Place, lost: LostRanks) -> AssayError:
    """What the rank that was lost, or the parent in its place, said of its end; without a word, that it was lost."""
    deadline = time.monotonic() + WORD_SECONDS
    while place.meeting and time.monotonic() < deadline:
        for word in faults(place.meeting):
            return fault_of(word.code, word.message)
        time.sleep(0.05)
    return LostRanks(f"{lost}; {way_on(run)}")


@dataclass
class Segment:
    """The segment that this process writes; `started` is None until the start was proved and recorded."""

    run: RunFolder
    recipe: Recipe
    ledger: Ledger
    metrics: MetricsWriter
    number: int
    started: Started | None = None
    meters: Meters | None = None

    def measured(self) -> dict[str, Any]:
        """Positions per second and energy of this segment, for receipts and outcome; None: not measured."""
        if self.meters is None:
            return {"tokens_per_second": None, "energy_joules": None}
        speed, joules = self.meters.speed.facts(self.recipe.positions_per_update), self.meters.joules
        return {"tokens_per_second": exact(speed), "energy_joules": None if joules is None else f"{joules:.3f}"}


def _trainer(
    job: argparse.Namespace,
    ranks: Ranks,
    recipe: Recipe,
    device: torch.device,
    watch: Watch,
    hang: HangWatch | None,
    segment: Segment | None,
    told: History | None,
    slow: SlowBounds,
) -> tuple[Trainer, dict[str, Any], int | None]:
    """Start and prove the start, on every rank; `segment` and `told` are rank 0's. Returns numerics and end as well."""
    run, folder = RunFolder(job.run), job.recipe.resolve().parent
    path = folder / recipe.data.queue
    given: tuple[Decimal, str] | None = None

    def first() -> dict[str, Any]:
        assert segment is not None
        assert told is not None
        nonlocal given
        given = stated(recipe, folder)  # a trace is read once: what becomes of the file later changes nothing
        before = told.segments[-1].body["numerics"]["promise"].get("threads") if told.segments else None
        slots = len(queues.load(path).slots)
        return {"segment": segment.number, "slots": slots, "threads": numerics.keep_threads(device, ranks.size, before)}

    def goes_on() -> None:
        if hang:
            hang.begin(compiling=True)  # each part of the start has the long bound

    goes_on()
    shared = ranks.lead(first)
    if not ranks.first:
        numerics.keep_threads(device, ranks.size, shared["threads"])
    numerics.refuse_strangers(ranks, recipe)
    goes_on()
    control.demand(run, recipe, folder, ranks, device, segment.ledger if segment else None)
    queue = first_slots(queues.load(path), shared["slots"])
    roots = [folder / root for root in recipe.data.roots]
    batches = Batches(queue, roots, recipe.data.seed, recipe.global_batch)
    goes_on()
    started = begin(run, recipe, folder, queue, batches, device, job.resume, job.from_step, ranks)
    until = ranks.lead(lambda: _until(job.until, queue, started.position.step))  # before a segment is opened
    devices: list[str] = ranks.collect(numerics.identity(run, device))
    facts = numerics.describe(run, recipe, device, devices, ranks.backend)
    facts["peak"] = numerics.peak_of_all(ranks, recipe, device, devices)
    facts["promise"] = numerics.of_all(ranks, facts["promise"])
    kin: set[int] = set()
    if told:  # rank 0 alone writes and compares
        source = bits.taken_from(started.mode, started.evidence)
        facts["bits"], kin = bits.mark(told, source, facts["promise"]), bits.family(told, source, facts["promise"])
    goal = "the scheduled end" if job.until is None else f"--until {job.until}"
    progress = Progress(job.terminal, recipe.log.every, goal)
    trainer = Trainer(
        ranks=ranks,
        run=run,
        recipe=recipe,
        recipe_folder=folder,
        ledger=segment.ledger if segment else run.open_ledger(),
        segment=shared["segment"],
        started=started,
        batches=batches,
        trace=Trace(job.profile, run.logs(shared["segment"]), ranks.rank, device, progress.note)
        if job.profile
        else None,
        feed=Feed(device, share(recipe, ranks).items(recipe.batch.micro), recipe.model.document_mask),
        validation=open_validation(recipe, folder),
        device=device,
        watch=watch,
        hang=hang,
        metrics=segment.metrics if segment else None,
        progress=progress,
        superseded=superseded(run, started.position.step) if segment else {},
        same_bits=lambda number: number in kin,
        tell=progress.note,
        meters=Meters(
            device, devices, Sensor(numerics.uuid(device)), Stragglers(slow), facts["peak"]["flops_per_second"]
        ),
        given=given,
    )
    return trainer, facts, until


def _to_the_end(trainer: Trainer, until: int | None) -> str:
    """Prepare and train, on every rank; nothing that runs beside the loop is left, whatever ended it."""
    with ExitStack() as beside:
        beside.callback(trainer.feed.close)
        beside.callback(trainer.meters.sensor.close)
        if trainer.trace:
            beside.callback(trainer.trace.close)
        beside.callback(trainer.air.close)
        prepare(trainer)
        with landed(trainer):
            return train(trainer, until)


def _demand_ranks(recipe: Recipe, ranks: int) -> None:
    """Refused before the ranks meet: under torch's own launcher no pre-flight was made."""
    if ranks not in recipe.rank_counts:
        raise Refused(rank_refusal(recipe, ranks))


def _hang_watch(place: Place, run: RunFolder, segment: int, watch: Watch) -> HangWatch | None:
    """Watch from now on, with the long bound: a rank may be lost before the ranks have met."""
    if place.bounds is None:
        return None
    logs = run.logs(segment)
    logs.mkdir(parents=True, exist_ok=True)

    def tell(words: str) -> None:
        if place.meeting:
            leave_fault(place.meeting, Fault(place.rank, MachineError.code, f"rank {place.rank} hangs: {words}"))
        _tell(f"assay: {words}")

    hang = HangWatch(place.bounds, logs, place.rank, watch.orphaned, tell)
    hang.begin(compiling=True)
    return hang


def _train(segment: Segment, job: argparse.Namespace, told: History, watch: Watch, place: Place) -> int:
    """Rank 0: start, prove, record, train to the end; return exit code 0."""
    run, recipe, ledger = segment.run, segment.recipe, segment.ledger
    hang = _hang_watch(place, run, segment.number, watch)
    _demand_ranks(recipe, place.size)
    device = numerics.switch_on(recipe, place.local)
    ranks = join(place.rank, place.size, place.local, device, place.meeting)
    trainer, facts, until = _trainer(job, ranks, recipe, device, watch, hang, segment, told, place.slow)
    started, segment.meters = trainer.started, trainer.meters
    _open(segment, started, facts, json.loads(job.command))
    segment.started = started
    with closing(Ahead(run, job.recipe, ledger, trainer.tell)) as trainer.ahead:
        end = _to_the_end(trainer, until)
    trainer.meters.finish()
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
        **segment.measured(),
    }
    ledger.append("end", body)
    message = "the schedule is done" if end == "done" else f"stopped where --until said, at step {position.step}"
    _tell(f"{message}; order digest {position.order_digest}")
    write_outcome(run, job.token, 0, message, position.step, ledger.head, measured=segment.measured())
    return 0


def _ended(segment: Segment, job: argparse.Namespace, fault: AssayError) -> int:
    """Record an end before the schedule's: the receipt, the outcome, one sentence; return the exit code."""
    position = segment.started.position if segment.started else None
    cause = fault.cause if isinstance(fault, Interrupted) else None
    body: dict[str, Any] = {"before_start": True}  # no segment was opened, so none is closed
    if position is not None:
        body = {"segment": segment.number, "step": position.step, "order_digest": position.order_digest}
        body |= segment.measured()
    step = position.step if position else None
    words, head = str(fault), None
    try:
        segment.metrics.seal("interruption")
        if cause is not None:
            segment.ledger.append("interrupted", body | {"cause": cause})
        else:
            segment.ledger.append("failed", body | {"code": fault.code})
        head = segment.ledger.head
    except AssayError as second:  # such as a ledger that another hand broke; the first fault is told all the same
        words = _with_second(words, str(second))
    except OSError as second:  # such as a full disk, on which no outcome can be written either
        _tell(f"assay: {_with_second(words, _refusal(second))}")
        return MachineError.code
    _tell(f"assay: {words}")
    write_outcome(segment.run, job.token, fault.code, words, step, head, cause, segment.measured())
    return fault.code


def _with_second(words: str, second: str) -> str:
    """One sentence of a fault and of what kept its end from being recorded, which may be the same."""
    return words if second in words else f"{words}; its end could not be recorded: {second}"


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
        "resolved": _exact(_stated(segment.recipe, segment.run)),
        "evidence": started.evidence,
        "numerics": facts,
        **provenance(segment.run, command),
    }
    segment.ledger.append("recovery" if started.mode == "resume" else "start", body)
    for note in started.notes:
        _tell(note)
    _tell(words[started.mode])


def _stated(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """The resolved recipe as receipts have it: the mirror's address, often a path of this machine, as a digest."""
    value = recipes.resolved(recipe)
    if recipe.checkpoint.mirror is not None:
        value["checkpoint"]["mirror"]["url"] = address_digest(run, recipe.checkpoint.mirror.url)
    return value


def _exact(value: Any) -> Any:
    """The resolved recipe with its floats as the shortest decimal strings that read back to the same bits."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    return [_exact(inner) for inner in value] if isinstance(value, list) else value


def _until(word: str | None, queue: queues.Queue, step: int) -> int | None:
    if word is None:
        return None
    if word == "slot-end":
        return queue.slot_of(step)[0].end_update
    if int(word) < step:
        raise InputError(f"--until {word} lies behind step {step}, which is done; name a later step, or --from-step")
    return int(word)


def _refusal(fault: OSError) -> str:
    """What the operating system refused (a full disk, most often), in one sentence."""
    return f"{fault.filename or 'a file of the run'} could not be written or read: {fault.strerror or fault}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
