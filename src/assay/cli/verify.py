"""`assay verify` and `assay bundle`: what an outside reader checks, and what they are given.

Both run without torch. The claims come from `release.verify`, the folder from `release.bundle`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption, RunArgument


def verify_command(
    path: Annotated[Path, typer.Argument(metavar="RUN-OR-BUNDLE", help="A run folder or a bundle")],
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="DIR", help="A folder in which shards lie; may be repeated")
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="KEY", help="A public key that you accept, or its .pub file; may be repeated"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Unverifiable claims count as failed (exit 6)")] = False,
    json: JsonOption = False,
) -> None:
    """Derive every claim again, offline

    Exit 0 when no claim failed, 6 otherwise. Nothing is written, and PyTorch is not needed.
    """
    from assay.cli.show import as_json, console, note, table
    from assay.ledger.keys import read_public
    from assay.release.verify import verify

    report = verify(path, data or [], note, [read_public(key) for key in trust or []])
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
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The step to bundle; default: the newest checkpoint that stands")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The publisher's private key file, which signs the bundle")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make the folder that a stranger checks

    Weights, config, tokenizer, recipe, queue with its approvals, ledger, metrics, results, digests and a signature.
    """
    from assay.cli.show import as_json, console, note, pairs
    from assay.ledger.keys import load_key
    from assay.release.bundle import bundle
    from assay.run.folder import RunFolder

    made = bundle(RunFolder(run), out, step, note, None if key is None else load_key(key))
    facts = {
        "step": made.step,
        "files": made.files,
        "head": made.head,
        "signed": made.signed,
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
        "signed": made.signed,
        "not in this form": "; ".join(made.unsupported),
    }
    console().print(pairs("", shown))
    note(f"check it with: assay verify {out}   or: cd {out} && sha256sum -c SHA256SUMS")
