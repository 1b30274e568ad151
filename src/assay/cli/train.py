"""`assay train`, `preflight`, `status`, `stop`, `release`, `abandon`: the operator's commands.

Pre-flight comes before anything is written; the start mode is decided here and said aloud.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RecipeArgument, RunArgument
from assay.errors import Heard

if TYPE_CHECKING:
    from assay.launch import local
    from assay.launch.checks import Check
    from assay.run.folder import RunFolder

RanksOption = Annotated[
    int, typer.Option("--ranks", metavar="N", min=1, help="Processes on this machine, one a GPU; N divides batch.lanes")
]
ReasonOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Why, for the ledger")]


def train(
    recipe: RecipeArgument,
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="The run folder; it is created for a new run")],
    start: Annotated[str, typer.Option(metavar="MODE", help="One of new, resume and auto")] = "new",
    from_step: Annotated[
        int | None, typer.Option(metavar="N", help="With resume: the full checkpoint to go on from")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="STEP", help="Stop, saved, at this step, or at the end of a slot: slot-end")
    ] = None,
    ranks: RanksOption = 1,
    profile: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Write a trace of K updates into the segment's logs")
    ] = None,
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="How long a stop may take after a signal")] = 25.0,
    hang_after: Annotated[
        float, typer.Option(metavar="SECONDS", help="The least time without an update that is called a hang")
    ] = 600.0,
) -> None:
    """Train, after pre-flight

    The exit code says what happened: 0 done, 3 refused, 4 data, 5 numbers, 71 the machine, 75 interrupted and saved.
    """
    # All that `_job` imports, while a signal is still answered by `main`: nothing began that had to be ended in order.
    import assay.launch.arrival
    import assay.launch.preflight
    import assay.run.proposals  # noqa: F401
    from assay.launch import local

    with _stoppable() as stop:
        job = _job(recipe, run, start, from_step, until, ranks, profile, grace, hang_after, stop)
        stop.obey()
        code = 0 if job is None else local.train(job)
    raise SystemExit(code)


@dataclass
class _Stop:
    """Whether a signal asked to stop, and the run that this process may write once pre-flight let it through."""

    asked: bool = False
    run: RunFolder | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:  # a second one finds the first being answered
            self.asked = True
            raise Heard

    def obey(self) -> None:
        """Stop where the exception of `hear` was lost, as it is in a finalizer."""
        if self.asked:
            raise Heard


@contextlib.contextmanager
def _stoppable() -> Iterator[_Stop]:
    """SIGTERM and Ctrl-C end what comes before the ranks, and the processes that it started, with 75.

    Nothing changes the exit code after the block: signals are ignored.
    """
    from assay.errors import Interrupted
    from assay.launch import local

    stop = _Stop()
    for number in local.STOPS:
        signal.signal(number, stop.hear)
    try:
        yield stop
    except (Exception, KeyboardInterrupt, SystemExit) as fault:
        local.ignore_signals()
        if not stop.asked:
            raise
        message = str(fault) if isinstance(fault, Interrupted) else local.STOPPED
        raise (local.stopped(stop.run, message=message) if stop.run else Interrupted(message, "signal")) from None
    finally:
        local.ignore_signals()


def _job(
    recipe: Path,
    run: Path,
    start: str,
    from_step: int | None,
    until: str | None,
    ranks: int,
    profile: int | None,
    grace: float,
    hang_after: float,
    stop: _Stop,
) -> local.Job | None:
    """Everything of `train` before the ranks: options, arrival, pre-flight, duties; None: nothing is left to train."""
    from assay.checkpoint.permission import permit
    from assay.cli.progress import progress
    from assay.errors import InputError, Refused
    from assay.launch import arrival, local
    from assay.launch.preflight import preflight, receipt, refusals
    from assay.recipe import load as recipes
    from assay.run.folder import RunFolder, create
    from assay.run.history import history
    from assay.run.proposals import goes_on, scheduled

    if start not in ("new", "resume", "auto"):
        raise InputError(f"--start is {start!r}; new, resume or auto is expected")
    if until is not None and until != "slot-end" and not (until.isascii() and until.isdigit()):
        raise InputError(f"--until is {until!r}; a step or slot-end is expected")
    if not 0 <= grace < math.inf:
        raise InputError(f"--grace is {grace:g}; a number of seconds from 0 on is expected")
    if not 1 <= hang_after < math.inf:
        raise InputError(f"--hang-after is {hang_after:g}; a number of seconds from 1 on is expected")
    if from_step is not None and start == "new":
        raise InputError("--from-step goes with --start resume: it names the checkpoint to go on from")
    folder = RunFolder(run)
    loaded = recipes.load(recipe)
    with progress() as tell:
        brought = arrival.arrive(loaded, _folder(recipe), folder, start == "auto", tell)
    told = history(folder.ledger) if folder.exists() else None
    begun = told is not None and bool(told.segments)
    since = told.last.seq if told is not None and told.last is not None else -1
    if start == "new" and begun:
        raise Refused(f"{run} holds a run already; go on with --start resume, or choose another folder for a new run")
    if start == "resume" and not folder.exists():
        raise Refused(f"{run} holds no run to resume; start one with --start new")
    if until is not None and until != "slot-end":
        updates = scheduled(folder, loaded)
        if int(until) > updates:
            raise InputError(
                f"--until is {until}; the schedule has {updates:,} updates: name a step up to there, or leave it out"
            )
    if start == "auto":
        origin = f" of what {loaded.checkpoint.mirror.url} holds" if brought and loaded.checkpoint.mirror else ""
        print(f"--start auto took {'resume' if begun else 'new'}{origin}", file=sys.stderr)
    if begun and from_step is None and history(folder.ledger).ended and not goes_on(folder):
        permit(folder, loaded, history(folder.ledger))
        print(f"{run} has ended: its schedule is done; nothing is left to train", file=sys.stderr)
        return None
    checks = preflight(loaded, _folder(recipe), folder, ranks, from_step)
    if refused := refusals(checks):
        _refuse(refused)
    stop.run = folder
    if not folder.exists():
        create(run, recipe, loaded)
    ledger = folder.open_ledger()
    ledger.append("preflight", receipt(checks))
    for body in [body for check in checks for body in check.receipts]:
        ledger.append("slot.checked", body)
    print("PRE-FLIGHT OK", file=sys.stderr)
    arrival.take_over(loaded, folder)
    arrival.catch_up(folder)
    command = ["assay", *sys.argv[1:]]
    # Compilation may take six times as long as the longest update, as the contract has it.
    hang = (hang_after, 6 * hang_after)
    return local.Job(folder, recipe, begun, from_step, until, grace, command, ranks, since, profile, hang)


def preflight_command(
    recipe: RecipeArgument,
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="The run folder that the launch would use")] = Path(
        "runs/new"
    ),
    ranks: RanksOption = 1,
    json: JsonOption = False,
) -> None:
    """Make all checks of a launch

    Everything that can be known to be wrong before a device is touched. Nothing is written.
    """
    from assay.cli.show import as_json, console, table
    from assay.launch.preflight import as_facts, preflight, refusals
    from assay.recipe import load as recipes
    from assay.run.folder import RunFolder

    checks = preflight(recipes.load(recipe), _folder(recipe), RunFolder(run), ranks)
    refused = refusals(checks)
    if json:
        as_json({"ok": not refused, "checks": as_facts(checks)})
    else:
        out = console()
        out.print(table("", ("check", "result", "detail"), ((c.name, c.result, c.detail) for c in checks)))
        if not refused:
            out.print("PRE-FLIGHT OK")
    if refused and json:
        raise SystemExit(_code(refused))
    if refused:
        _refuse(refused)


def status_command(
    run: RunArgument,
    copy_hours: Annotated[
        float | None,
        typer.Option(metavar="HOURS", min=0, help="Warn when the newest verified copy is older than that"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show where a run stands

    Seven numbers, each under its own name, none in place of another.
    """
    from assay.cli.progress import clock
    from assay.cli.show import as_json, console, pairs
    from assay.run.folder import RunFolder
    from assay.run.lost import in_words
    from assay.run.status import status

    facts = status(RunFolder(run), None if copy_hours is None else copy_hours * 3600)
    if json:
        as_json(facts)
        return
    starts = [facts[key] for key in ("start", "last_start") if facts[key]]
    begun = [f"{start['mode']} @ {start['step']:,}" for start in (starts if facts["segments"] > 1 else starts[:1])]
    shown = {
        "run": f"{facts['name']} ({facts['run_id']})",
        "state": facts["state"] + (f" by a {facts['hold']}" if facts["hold"] else ""),
        "start": ", last ".join(begun) if begun else "not started",
        "scheduled updates": facts["scheduled"],
        "projected updates": facts["projected"] if facts["projected"] is not None else "nobody stated an estimate",
        "affordable updates": facts["affordable"] if facts["affordable"] is not None else facts["affordable_unknown"],
        "reported updates": facts["reported"] if facts["reported"] is not None else "none yet",
        "saved updates": facts["saved"] if facts["saved"] is not None else "none yet",
        "mirrored updates": f"{facts['mirrored']:,} (saved {clock(facts['mirrored_age_seconds'])} ago)"
        if facts["mirrored"] is not None
        else "no verified copy",
        "prepared updates": facts["prepared"] if facts["prepared"] is not None else "the queue is not readable here",
        "loss": f"{facts['loss']:.4f}" if facts["loss"] is not None else "none yet",
        "order digest": f"{facts['order_digest']} at step {facts['reported']:,}"
        if facts["order_digest"]
        else "none yet",
        "checkpoint every": f"{facts['checkpoint_every']:,} updates",
        "updates done again": in_words(facts["recomputed"]),
        "tokens per second": _speed(facts["tokens_per_second"]),
        "MFU": _mfu(facts),
        "segments": facts["segments"],
        "bits": f"{facts['bits']} (of the newest segment)" if facts["bits"] else "none yet",
        "last process": _ending(facts["ending"]),
        "alarms": facts["alarms"],
        "last contact": facts["last_contact"],
    }
    if facts["orphaned"]:
        shown["orphaned"] = "; ".join(
            f"{one['receipts']:,} receipts and {one['updates']:,} updates of lease {one['lease']}, in {one['folder']}"
            for one in facts["orphaned"]
        )
    for key, name in (("skipped", "skipped updates"), ("stragglers", "stragglers")):
        if facts[key]:
            shown[name] = facts[key]
    if facts["noise_scale"] is not None:
        shown["gradient noise scale"] = f"{facts['noise_scale']:,.0f} positions"
    waiting = [f"{one['amendment']} {one['state']}" for one in facts["amendments"]]
    if waiting:
        shown["amendments"] = ", ".join(waiting)
    console().print(pairs("", shown))
    for warning in facts["warnings"]:
        console().print(f"warning: {warning}", markup=False)


def _ending(ending: dict[str, Any] | None) -> str:
    if ending is None:
        return "no end is recorded"
    words = f"{ending['outcome']} ({ending['cause']})" if ending["cause"] else ending["outcome"]
    return f"{words}, exit {ending['code']}" + (f": {ending['message']}" if ending["message"] else "")


def _speed(speed: dict[str, Any]) -> str:
    """The mean after warm-up where there is one, else over all, and what pauses make of it."""
    warm = speed["after_warm_up"]["without_pauses"] is not None
    found = speed["after_warm_up" if warm else "all"]
    if found["without_pauses"] is None:
        return "not measured"
    over = f"after the first {speed['warm_up_updates']} updates of each segment" if warm else "warm-up included"
    return f"{found['without_pauses']:,.0f} ({over}; {found['with_pauses']:,.0f} with pauses)"


def _mfu(facts: dict[str, Any]) -> str:
    peak = facts["peak"]
    if peak is None or peak["flops_per_second"] is None:
        return "unknown: no peak is known of this device in this arithmetic" if peak else "not measured"
    if facts["mfu"] is None:
        return "not measured"
    return f"{facts['mfu']:.1%} of {peak['flops_per_second'] / 1e12:,.1f} TFLOP/s ({peak['source']})"


def stop_command(
    run: RunArgument,
    reason: ReasonOption = None,
    json: JsonOption = False,
) -> None:
    """Save, stop and hold a run

    The hold stands until `assay release` lifts it.
    """
    _act(run, "stop", reason, json)


def release_command(
    run: RunArgument,
    reason: ReasonOption = None,
    json: JsonOption = False,
) -> None:
    """Lift a hold, so that the run may resume"""
    _act(run, "release", reason, json)


def abandon_command(
    run: RunArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the ledger")],
    json: JsonOption = False,
) -> None:
    """Close a run's history for ever"""
    _act(run, "abandon", reason, json)


def _act(path: Path, act: str, reason: str | None, json: bool) -> None:
    from assay.cli.show import as_json, console
    from assay.run import owner
    from assay.run.folder import RunFolder
    from assay.run.status import reported

    run = RunFolder(path)
    if act == "stop":
        done = owner.stop(run, reason)
    elif act == "release":
        done = owner.release(run, reason)
    else:
        done = owner.abandon(run, reason or "")
    step = reported(run.metrics).step
    if json:
        as_json({"step": step, "receipt": done.seq})
    else:
        words = {"stop": "will save and stop" if owner.is_owned(run) else "is held", "release": "is released"}
        at = "nothing reported yet" if step is None else f"last reported step {step}"
        console().print(f"{path} {words.get(act, 'is abandoned')} (receipt {done.seq}, {at})")


def _folder(recipe: Path) -> Path:
    """The folder that the recipe's paths count from, as the user wrote it, so that messages show what was typed."""
    return recipe.resolve().parent if recipe.is_symlink() else recipe.parent


def _refuse(refused: list[Check]) -> None:
    for one in refused:
        print(f"assay: pre-flight: {one.name}: {one.detail}", file=sys.stderr)
    raise SystemExit(_code(refused))


def _code(refused: list[Check]) -> int:
    """A refusal's own code when all agree (missing data is 4); otherwise 3."""
    codes = {one.code for one in refused}
    return codes.pop() if len(codes) == 1 else 3
