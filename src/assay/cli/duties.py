"""`assay duties RUN`: what is due at a step and has no receipt yet, and the doing of it.

Parses, calls `run.duties`, and does what is due by the functions behind `assay evaluate` and `assay export`.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from assay.cli.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from assay.run.duties import Duty
    from assay.run.folder import RunFolder
    from assay.run.history import Saved

LOCK_FILE = "duties.lock"


def duties_command(
    run: RunArgument,
    ask: Annotated[str | None, typer.Option(metavar="ACT", help="Order one: evaluation or export")] = None,
    at: Annotated[list[int] | None, typer.Option(metavar="STEP", help="With --ask: at this step; repeatable")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="With --ask: at every weights checkpoint")] = False,
    do: Annotated[bool, typer.Option("--do", help="Do what is due, each once")] = False,
    json: JsonOption = False,
) -> None:
    """Show, order or do what is due at a step

    Evaluations on the validation shard and exports that were ordered, and copies. A start does what was left undone.
    """
    from assay.cli.show import as_json, console, note, table
    from assay.errors import InputError
    from assay.run.duties import duties, order, unsaved
    from assay.run.folder import RunFolder

    folder = RunFolder(run)
    if ask is not None:
        order(folder, ask, at or [], weights)
        for step in unsaved(folder, at or []):
            note(f"warning: step {step:,} has no checkpoint and gets none as the recipe stands: no {ask} can be done")
    elif at or weights:
        raise InputError("--at and --weights go with --ask: they say when what is asked for is due")
    done = _do(folder) if do else []
    found = duties(folder)
    if json:
        rows = [{"act": one.act, "step": one.step, "state": one.state, "folder": one.folder} for one in found]
        as_json({"duties": rows, "done": [{"act": one.act, "step": one.step} for one in done]})
        return
    out = console()
    if not found:
        out.print("nothing was ordered, and the recipe has no mirror")
        return
    out.print(table("", ("step", "duty", "state"), ((one.step, one.act, one.state) for one in found)))


def _do(run: RunFolder) -> list[Duty]:
    """Do every evaluation and export that is due, oldest first; `assay mirror` does the copies."""
    from assay.errors import Refused
    from assay.files.lock import take
    from assay.run.duties import DUE, EVALUATION, MIRROR, duties

    done: list[Duty] = []
    with (run.path / LOCK_FILE).open("ab") as lock:
        if not take(lock, 0.5):
            raise Refused(f"the duties of {run.path} are being done by another process; let that one end")
        while due := [one for one in duties(run) if one.state == DUE and one.act != MIRROR and one not in done]:
            if due[0].removed is not None:
                _bring_back(run, due[0].removed)
            (_evaluate if due[0].act == EVALUATION else _export)(run, due[0])
            done.append(due[0])
    return done


def _bring_back(run: RunFolder, item: Saved) -> None:
    """A checkpoint that a fetch left behind, or that retention took, from the recipe's mirror."""
    from assay.cli.progress import progress
    from assay.errors import Refused
    from assay.files.retry import Policy
    from assay.mirror.fetching import bring_back

    stated = run.recipe().checkpoint.mirror
    if stated is None:
        raise Refused(f"{item.folder} stands on a mirror alone that {run.recipe_json} does not name; name the mirror "
                      "when the run begins, or ask for another step")  # fmt: skip
    with progress() as tell:
        bring_back(run, stated.url, item, policy=Policy(), tell=tell)


def _evaluate(run: RunFolder, duty: Duty) -> None:
    from assay.cli.evaluate import evaluate_validation
    from assay.cli.show import note

    assert duty.folder is not None
    note(f"due at step {duty.step:,}: evaluation of {duty.folder}")
    evaluate_validation(run.path / duty.folder)


def _export(run: RunFolder, duty: Duty) -> None:
    from assay.cli.show import note
    from assay.evaluate.subject import open_subject
    from assay.release.export import export

    assert duty.folder is not None
    note(f"due at step {duty.step:,}: export of {duty.folder}")
    out = run.path / "exports" / f"step-{duty.step:06d}"
    if out.exists():
        shutil.rmtree(out)  # of a process that ended before its receipt: nothing names it
    export(open_subject(run.path / duty.folder), out, tell=note)
