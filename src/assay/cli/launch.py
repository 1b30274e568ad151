"""`assay launch`: one command that takes a machine and keeps a run alive on it.

Here, as a Slurm job, or on a cluster that SkyPilot brings up. The work is done in the room `launch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption


def launch_command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe, or a launch file that names recipe, run and machine")
    ],
    on: Annotated[
        str | None, typer.Option("--on", metavar="WHERE", help="One of local, slurm, skypilot; default: the file's")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run folder, where RECIPE is a recipe")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes, one a GPU; default: the file's")
    ] = None,
    act: Annotated[
        str, typer.Option("--act", metavar="ACT", help="One of launch and, with skypilot, stop, start, down")
    ] = "launch",
    show: Annotated[bool, typer.Option("--show", help="Print what would be submitted, and submit nothing")] = False,
    json: JsonOption = False,
) -> None:
    """Take a machine, train, come back by itself

    Fetch, pre-flight, control, dry update, train; again after machine faults and preemption, never after a hold.
    """
    from assay.cli.show import as_json, console, note
    from assay.errors import AssayError, InputError
    from assay.launch import description, keeping, skypilot, slurm

    def tell(text: str) -> None:
        note(f"launch: {text}")

    if on is not None and on not in description.WHERE:
        raise InputError(f"--on is {on!r}; local, slurm or skypilot is expected")
    if act not in ("launch", "stop", "start", "down"):
        raise InputError(f"--act is {act!r}; launch, stop, start or down is expected")
    task = description.task(recipe, on, run, ranks)
    if task.launch.on != "skypilot" and act != "launch":
        raise InputError(f"--act {act} goes with skypilot; stop the run itself with: assay stop {task.run}")
    out = console()
    if task.launch.on == "slurm":
        if show:
            out.print(slurm.script(task))
            return
        job = slurm.submit(task, tell)
        as_json({"job": job}) if json else out.print(f"job {job} is queued; see squeue, and assay status {task.run}")
        return
    if task.launch.on == "skypilot":
        if show:
            out.print(skypilot.task_file(task, skypilot.left_alone(task)))
            return
        facts = skypilot.act(task, act, tell)
        as_json(facts) if json else out.print(f"{act}: {facts['job']}")
        raise SystemExit(facts["exit"])
    in_slurm = slurm.submitted()
    try:
        done = keeping.keep(task, tell, elsewhere=in_slurm)
    except AssayError as fault:
        tell(f"ended with exit code {fault.code}")  # for whoever follows from another machine
        raise
    if in_slurm:
        slurm.again(task, done, tell)
    code = done.last.code
    cause = "hold" if done.held else done.last.cause
    tell(f"ended with exit code {code}" + (f" ({cause})" if cause else ""))
    if json:
        as_json({
            "ok": code == 0, "job": f"local:{os.getpid()}", "exit": code, "cause": done.last.cause,
            "step": done.last.step, "allocation": done.allocation, "restarts": done.restarts,
        })  # fmt: skip
    raise SystemExit(code)
