"""`assay data exposure`: how many source positions a run, its ancestors or a queue's updates were trained on.

Parses, calls `data.exposure` and `run.consumption`, shows tables or prints JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RootOption
from assay.cli.shards import roots_of

if TYPE_CHECKING:
    from assay.data.exposure import Declared
    from assay.run.consumption import Consumption

DeclaredOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:BOUND:POSITIONS:EVIDENCE",
        help="An ancestor without a ledger: exact, at-least or at-most so many, by a file or its digest",
    ),
]


def exposure_command(
    path: Annotated[Path, typer.Argument(metavar="RUN-OR-QUEUE", help="A run folder or a queue file")],
    seed: Annotated[int | None, typer.Option(metavar="S", help="The data seed (for a queue)")] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="B", help="Sequences in one update (for a queue)")] = None,
    updates: Annotated[str | None, typer.Option(metavar="A:B", help="Updates, half-open (for a queue)")] = None,
    slot: Annotated[int, typer.Option(metavar="K", help="The slot whose stream the ranges are offsets in")] = 0,
    ranges: Annotated[
        list[str] | None, typer.Option("--range", metavar="A:B", help="Range in that stream, half-open")
    ] = None,
    ancestry: Annotated[bool, typer.Option("--ancestry", help="Count the runs that this one began from too")] = False,
    declared: DeclaredOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count what was trained on

    Source positions by source, language and range, distinct and repeated; the data need not be here. With
    --ancestry also what of this run's data an ancestor had been trained on before.
    """
    from assay.cli import show
    from assay.data import exposure
    from assay.data import queue as queues
    from assay.errors import InputError

    ancestors: list[Consumption] = []
    unaccounted: list[str] = []
    if path.is_dir():
        from assay.run import consumption as runs
        from assay.run.folder import RunFolder

        if (seed, global_batch, updates) != (None, None, None):
            raise InputError(f"{path} is a run, which states its own seed, global batch and updates; leave them out")
        run = RunFolder(path)
        own = runs.consumption(run)
        ancestors, unaccounted = runs.ancestry(run) if ancestry else ([], [])
        consumed, recomputed, again = own.consumed, own.recomputed, own.again
        places = [*own.roots, *(root or [])]
    else:
        if not path.exists():
            raise InputError(f"{path} does not exist; a run folder or a queue file is expected there")
        if seed is None or global_batch is None or updates is None:
            raise InputError("a queue needs --seed, --global-batch and --updates A:B; a run folder states them itself")
        if ancestry:
            raise InputError(f"--ancestry is given for the queue {path}; only a run has ancestors")
        first, last = exposure.parse_interval(updates, "--updates")
        consumed, recomputed = exposure.Consumed(queues.load(path), seed, global_batch, first, last), 0
        places, again = roots_of(path, root), None
    asked = [exposure.parse_interval(text, "--range") for text in ranges or []]
    terms = [exposure.parse_declared(text) for text in declared or []]
    shards = queues.locate(consumed.queue, places)
    for ancestor in ancestors:
        shards = {**queues.locate(ancestor.consumed.queue, [*ancestor.roots, *(root or [])]), **shards}
    counted = exposure.Exposure([consumed, *(ancestor.consumed for ancestor in ancestors)], shards)
    facts = {**counted.facts(consumed.queue, slot, asked), "recomputed": recomputed, "recomputed_work": again}
    if ancestors:
        facts["already"] = exposure.already(
            exposure.Exposure([consumed], shards),
            exposure.Exposure((ancestor.consumed for ancestor in ancestors), shards),
            counted,
        )
    if ancestry or terms:
        facts["ancestors"] = [_ancestor(one) for one in ancestors]
        facts["unaccounted"] = unaccounted
        facts["declared"] = [term.facts() for term in terms]
        facts["positions_with_declared"] = counted.total.positions + sum(term.positions for term in terms)
        facts["bound"] = exposure.bound_of(terms, unaccounted)
    if as_json:
        show.as_json(facts)
        return
    whose = f"of updates {consumed.first:,}:{consumed.last:,}{' and of its ancestors' if ancestors else ''}"
    _show(whose, counted, facts)
    _show_ancestry(facts, terms)
    show.console().print(f"recomputed: {recomputed:,}")
    if again and again["updates"]:
        from assay.run.lost import in_words

        show.console().print(f"updates done again: {in_words(again)}")
    show.console().print(exposure.METHOD)


def _ancestor(one: Consumption) -> dict[str, Any]:
    """What one ancestor was trained on, up to the step that this line took of it."""
    taken = one.consumed
    positions = (taken.last - taken.first) * taken.global_batch * taken.queue.block
    return {"run_id": one.run_id, "name": one.name, "first": taken.first, "last": taken.last, "positions": positions}


def _show(whose: str, counted: Any, facts: dict[str, Any]) -> None:
    from assay.cli import show

    columns = ("", "positions", "distinct", "repeated")
    rows = [("all", *counted.total.facts().values())]
    rows += [(f"source {name}", *each.values()) for name, each in facts["by_source"].items()]
    rows += [(f"language {name}", *each.values()) for name, each in facts["by_language"].items()]
    rows += [
        (f"range [{r['start']:,}, {r['stop']:,})", r["positions"], r["distinct"], r["repeated"])
        for r in facts["ranges"]
    ]
    show.console().print(show.table(f"source positions {whose}", columns, rows))


def _show_ancestry(facts: dict[str, Any], terms: list[Declared]) -> None:
    from assay.cli import show

    console = show.console()
    for ancestor in facts.get("ancestors", ()):
        stretch = f"updates {ancestor['first']:,}:{ancestor['last']:,}, {ancestor['positions']:,} positions"
        console.print(f"ancestor {ancestor['name']} (run {ancestor['run_id'][:8]}): {stretch}")
    if "already" in facts:
        columns = ("", "distinct", "of them in an ancestor before")
        rows = [("all", facts["already"]["distinct"], facts["already"]["in_ancestors"])]
        rows += [(f"source {name}", *each.values()) for name, each in facts["already"]["by_source"].items()]
        console.print(show.table("source positions of this run that were trained on already", columns, rows))
    for term in terms:
        console.print(
            f"declared, without a ledger: {term.name}, {term.bound} {term.positions:,} positions, by {term.evidence}"
        )
    named = {term.name for term in terms}
    for start in facts.get("unaccounted", ()):
        if start in named:
            console.print(f"{start} is no run at hand; the declared term of that name stands for it")
        else:
            console.print(
                f"not accounted for: what {start} was trained on; its run folder is not here. If its positions are "
                f"known otherwise, declare them: --declared {start}:BOUND:POSITIONS:EVIDENCE"
            )
    if "bound" in facts and (terms or facts["unaccounted"]):
        bound = facts["bound"] or "neither at least nor at most"
        console.print(f"in all, with declared terms: {bound} {facts['positions_with_declared']:,} positions")
