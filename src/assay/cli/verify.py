"""`assay verify` and `assay bundle`: what an outside reader checks, and what they are given.

Both run without torch. The claims come from `release.verify`, the folder from `release.bundle`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


def verify_command(
    path: Annotated[Path, typer.Argument(metavar="RUN-or-BUNDLE", help="a run folder or a bundle")],
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="a folder in which shards lie; may be repeated")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="unverifiable claims count as failed (exit 6)")] = False,
    json: JsonOption = False,
) -> None:
    """Re-derive every claim, offline: exit 0 when none failed, 6 otherwise."""
    from assay.cli.show import as_json, console, note, table
    from assay.release.verify import verify

    report = verify(path, data or [], note)
    holds = report.holds(strict)
    if json:
        as_json({"ok": holds, **report.facts()})
    else:
        order = list(dict.fromkeys(claim.group for claim in report.claims))
        claims = sorted(report.claims, key=lambda claim: order.index(claim.group))
        rows = []
        group = ""
        for claim in claims:
            rows.append(("" if claim.group == group else claim.group, claim.claim, claim.result, claim.evidence))
            group = claim.group
        out = console()
        out.print(table("", ("", "claim", "result", "evidence"), rows))
        out.print(report.summary)
    if not holds:
        raise typer.Exit(6)


def bundle_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the folder to make; it must not exist")],
    step: Annotated[
        int | None, typer.Option(help="the step to bundle; default: the newest checkpoint that stands")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make the release folder: weights, recipe, queue, ledger, metrics, digests; unsigned."""
    from assay.cli.show import as_json, console, note, pairs
    from assay.release.bundle import bundle
    from assay.run.folder import RunFolder

    made = bundle(RunFolder(run), out, step, note)
    facts = {
        "step": made.step,
        "files": made.files,
        "head": made.head,
        "signed": False,
        "unsupported": made.unsupported,
    }
    if json:
        as_json(facts)
        return
    shown = {
        "bundle": out,
        "step": made.step,
        "ledger head": f"{made.head['seq']} {made.head['digest']}",
        "files": ", ".join(made.files),
        "signed": False,
        "not in this form": "; ".join(made.unsupported),
    }
    console().print(pairs("", shown))
    note(f"check it with: assay verify {out}   or: cd {out} && sha256sum -c SHA256SUMS")
