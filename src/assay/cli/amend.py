"""`assay amend …`: propose a change of a running recipe, approve it, install it, list what there is.

Parses, calls `run.proposals` and shows; the trainer adopts. `assay amend RUN` is `assay amend propose RUN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from assay.cli.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from assay.run.proposals import Outlook

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The amendment, as assay amend list names it")]


class ProposeByDefault(TyperGroup):
    """A group whose first word may be left out: what is none of its commands is the run to propose for."""

    default = "propose"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name in front where no command is named."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)


amend_app = typer.Typer(cls=ProposeByDefault, no_args_is_help=True, rich_markup_mode=None)


@amend_app.callback()
def _amend() -> None:
    """Change a running recipe under the rules

    `assay amend RUN …` is `assay amend propose RUN …`, whose options `assay amend propose --help` shows.
    """


@amend_app.command("propose")
def propose_command(
    run: RunArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the ledger")],
    updates: Annotated[int | None, typer.Option(metavar="N", min=1, help="The scheduled updates")] = None,
    decay: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="One of none, linear, cosine and 1-sqrt; none removes it")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", metavar="N", min=1, help="The cadence of full checkpoints")
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="The code that is installed here, by its digest")] = False,
    allow_earlier_decay: Annotated[
        bool, typer.Option("--allow-earlier-decay", help="Consent to a decay that starts earlier")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Propose a change, or learn why not

    Several changes are one amendment: adopted together or not at all. Both learning-rate curves are shown.
    """
    from typing import cast, get_args

    from assay.cli import show
    from assay.errors import InputError
    from assay.recipe.schedule import Decay
    from assay.run.amendments import Changes
    from assay.run.folder import RunFolder
    from assay.run.proposals import propose
    from assay.run.provenance import code_identity

    if decay is not None and decay not in get_args(Decay):
        raise InputError(f"--decay is {decay!r}; {', '.join(get_args(Decay))} are allowed")
    digest = str(code_identity()["sha256"]) if code else None
    changes = Changes(updates, cast("Decay | None", decay), checkpoint_every, digest, allow_earlier_decay)
    outlook = propose(RunFolder(run), changes, reason)
    facts = outlook.facts
    if json:
        show.as_json({"ok": facts["allowed"], **facts})
    else:
        _show(run, changes.schedule, outlook)
    if not facts["allowed"]:
        show.note(f"assay: refused: {facts['reason']}")
        raise SystemExit(3)


def _show(run: Path, curved: bool, outlook: Outlook) -> None:
    from assay.cli import show
    from assay.run import curves

    facts, console = outlook.facts, show.console()
    if curved:
        for line in curves.text(outlook.old, outlook.new, outlook.step):
            console.print(line, markup=False)
    limit, role = facts["before_update"], facts["approval"]
    shown = {
        "amendment": facts["amendment"] or "none",
        "state": facts["state"],
        "may be adopted": "at any step" if limit is None else f"at a step before {limit:,}",
        "step now": facts["step"],
        "adoption expected at step": facts["adoption_expected_at"],
        "rate before": facts["lr_before"],
        "rate after": facts["lr_after"],
        "approval": f"of a {role}" if role else "not demanded",
        **({"prepared updates": _prepared(facts)} if curved else {}),
        "reason": facts["reason"],
        "curves": facts["image"] or "none",
    }
    console.print(show.pairs("", shown))
    if facts["allowed"]:
        name, sign = (
            facts["amendment"],
            f"assay amend approve {run} {facts['amendment']} --key KEY, then " if role else "",
        )
        console.print(f"next: {sign}assay amend install {run} {name}", markup=False)
        if not facts["in_time"]:
            show.note("the next full checkpoint comes too late for it; assay stop saves at once, a resume adopts")


def _prepared(facts: dict[str, Any]) -> str:
    """How far the queue reaches, and what it lacks for the schedule as amended."""
    if facts["prepared"] is None:
        return "the queue is not readable here"
    if not facts["missing"]:
        return f"{facts['prepared']:,}, enough for the schedule as amended"
    return f"{facts['prepared']:,}; {facts['missing']:,} are missing for the schedule as amended: append data in time"


@amend_app.command("approve")
def approve_command(
    run: RunArgument,
    amendment: IdArgument,
    key: Annotated[Path, typer.Option(metavar="FILE", help="The private key file of a reviewer or operator")],
    json: JsonOption = False,
) -> None:
    """Sign a proposal

    The envelope names the proposal by its digest; it lies in the run's folder and in the ledger.
    """
    from assay.ledger.keys import load_key
    from assay.run.folder import RunFolder
    from assay.run.proposals import approve

    _answer(f"approved {amendment} of {run}", approve(RunFolder(run), amendment, load_key(key)), json)


@amend_app.command("install")
def install_command(run: RunArgument, amendment: IdArgument, json: JsonOption = False) -> None:
    """Hand a proposal to the trainer

    It is adopted right after the next full checkpoint, or at the next start; refused without the demanded approval.
    """
    from assay.run.folder import RunFolder
    from assay.run.proposals import install

    _answer(f"installed {amendment} of {run}", install(RunFolder(run), amendment), json)


@amend_app.command("list")
def list_command(run: RunArgument, json: JsonOption = False) -> None:
    """Show a run's amendments"""
    from assay.cli import show
    from assay.run.folder import RunFolder
    from assay.run.proposals import listing

    found = listing(RunFolder(run))
    if json:
        show.as_json({"amendments": found})
        return
    if not found:
        show.console().print(f"{run} has no amendment", markup=False)
        return
    columns = ("amendment", "state", "changes", "before update", "approvals", "step", "reason")
    rows = (
        (
            one["amendment"],
            one["state"],
            _changes(one),
            "any" if one["before_update"] is None else one["before_update"],
            len(one["approved_by"]) if one["approval"] else "not demanded",
            "none" if one["step"] is None else one["step"],
            one["refused"] or one["reason"],
        )
        for one in found
    )
    show.console().print(show.table("", columns, rows))


def _changes(one: dict[str, Any]) -> str:
    parts = [f"{key.replace('_', ' ')} {one['old'].get(key)} → {value}" for key, value in one["changes"].items()
             if key in one["old"]]  # fmt: skip
    return ", ".join(parts)


def _answer(title: str, facts: dict[str, Any], json: bool) -> None:
    from assay.cli import show

    if json:
        show.as_json(facts)
        return
    shown = {key: facts[key] for key in ("amendment", "state", "sha256", "before_update", "approved_by")}
    shown["changes"] = _changes(facts)
    if shown["before_update"] is None:
        shown["before_update"] = "any step"
    if "envelope" in facts:
        shown["envelope"] = facts["envelope"]
    show.console().print(show.pairs(title, shown))
