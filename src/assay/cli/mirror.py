"""`assay mirror` and `assay fetch`: copies of a run off its machine, proved; and back onto a new one.

Both run without torch. The work is done in the room `mirror`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption, RunArgument

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Where copies lie: s3://, gs:// or az://BUCKET/PREFIX, or a folder")
]
DeadlineOption = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="How long a failing store is tried before exit 75")
]


def mirror_command(
    run: RunArgument,
    url: UrlArgument,
    once: Annotated[bool, typer.Option("--once", help="Copy what there is, then end")] = False,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="MB/S", min=0.001, help="At most so many megabytes a second, both ways")
    ] = None,
    deadline: DeadlineOption = 600.0,
    verify: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="One of readback and stored; default: as the recipe says, else readback"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Copy a run off its machine, beside training

    Each checkpoint is read back and hashed before its commit record and receipt. Ends when the run's schedule is done,
    or with exit 3, as the trainer does, when another machine took the run.
    """
    from assay.cli.progress import progress
    from assay.cli.show import as_json, console
    from assay.errors import InputError
    from assay.files.retry import Policy
    from assay.mirror.copying import mirror, verified_by
    from assay.run.folder import RunFolder, require_run

    folder = RunFolder(run)
    require_run(folder)
    how = verify or verified_by(folder)
    if how not in ("readback", "stored"):
        raise InputError(f"--verify is {how!r}; readback or stored is expected")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: saved, exit code 75
    with progress() as tell:
        done = mirror(
            folder, url, once=once, policy=Policy(deadline), verify=how,
            bandwidth=None if bandwidth is None else bandwidth * 1e6, tell=tell,
        )  # fmt: skip
    facts = {
        "copied": done.copied, "verified": done.verified, "bytes": done.bytes, "step": done.step,
        "bytes_there": done.skipped, "bytes_read_back": done.read_back, "removed": done.removed,
        "warnings": list(done.notes),
    }  # fmt: skip
    if json:
        as_json(facts)
        return
    word = "read back and hashed" if how == "readback" else "stored, not verified"
    newest = "" if done.step is None else f", the newest full one of step {done.step:,}"
    console().print(
        f"{done.copied:,} checkpoint(s) copied to {url}, {word}{newest}; {done.bytes / 1e6:,.1f} MB sent, "
        f"{done.skipped / 1e6:,.1f} MB were there"
        + (f"; {done.removed:,} older cop{'y' if done.removed == 1 else 'ies'} removed there" if done.removed else ""),
        markup=False,
    )  # fmt: skip
    for note in done.notes:
        console().print(f"warning: {note}", markup=False)


def fetch_command(
    url: UrlArgument,
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder to make; it must not exist")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The step to bring; default: the newest full checkpoint with a copy")
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder here that the recipe's paths count from; default: DIR/project"),
    ] = None,
    deadline: DeadlineOption = 600.0,
    json: JsonOption = False,
) -> None:
    """Bring a run back, every byte compared

    Ledger, recipe, metrics, queue and one checkpoint, so that training goes on. Shards come from where data is kept.
    """
    from assay.cli.progress import progress
    from assay.cli.show import as_json, console
    from assay.files.retry import Policy
    from assay.mirror.fetching import fetch

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with progress() as tell:
        done = fetch(url, path, policy=Policy(deadline), step=step, project=project, tell=tell)
    copied = int(done.step is not None)
    if json:
        as_json({
            "copied": copied, "verified": copied, "bytes": done.bytes, "bytes_there": done.kept, "run_id": done.run_id,
            "step": done.step, "checkpoint": done.kind, "folder": done.folder, "missing_shards": done.missing,
        })  # fmt: skip
        return
    out = console()
    what = (
        "no checkpoint, since none was saved" if done.step is None else f"{done.kind} checkpoint of step {done.step:,}"
    )
    out.print(f"{path}: run {done.run_id}, {what}; {done.bytes / 1e6:,.1f} MB fetched and compared", markup=False)
    if done.missing:
        out.print(f"{len(done.missing)} shard(s) of its queue are not here; bring them below a root of the recipe: "
                  f"{', '.join(done.missing)}", markup=False)  # fmt: skip
    home = project or path / "project"
    if done.kind != "weights":
        out.print(f"go on with: assay train {home / 'recipe.yaml'} --run {path} --start auto", markup=False)
