"""`assay data overlap`: how much of a new corpus was consumed by runs or is queued already.

Parses, calls `corpus.overlap` and shows tables or prints JSON; progress goes to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.exposure import DeclaredOption
from assay.cli.options import JsonOption, RootOption

if TYPE_CHECKING:
    from assay.data.queue import Queue
    from assay.run.consumption import Consumption

SHOW_AFTER = 2.0  # seconds between two lines of progress


def overlap_command(
    shards: Annotated[list[str], typer.Argument(metavar="SHARDS", help="SHARD or SHARD:START:STOP, the new corpus")],
    queue: Annotated[Path | None, typer.Option(metavar="QUEUE", help="Compare with all that this queue holds")] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Compare with what it and its ancestors consumed; may be repeated"),
    ] = None,
    declared: DeclaredOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report, for data approve")] = None,
    threshold: Annotated[
        float, typer.Option(metavar="X", help="Estimated similarity from which texts are near")
    ] = 0.75,
    exact: Annotated[bool, typer.Option("--exact", help="Look for equal documents alone")] = False,
    examples: Annotated[int, typer.Option(metavar="N", min=0, help="Examples of each source and kind")] = 3,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare new data with what came before

    Documents that are equal (by their token ids) or near (MinHash) to earlier ones, by source, in source positions.
    """
    from assay.cli import show
    from assay.corpus import overlap
    from assay.data import queue as queues
    from assay.data.exposure import parse_declared
    from assay.errors import InputError
    from assay.files.publish import refuse_existing
    from assay.run.consumption import ancestry, consumption
    from assay.run.folder import RunFolder

    if queue is None and not run:
        raise InputError("nothing to compare with; give --queue QUEUE, --run RUN, or both")
    if out is not None:
        refuse_existing(out)
    near = None if exact else overlap.parameters(threshold)
    new = [_range(text) for text in shards]
    terms = [parse_declared(text) for text in declared or []]
    now = queues.load(queue) if queue is not None else None
    runs: list[Consumption] = []
    unaccounted: list[str] = []
    for path in run or []:
        folder = RunFolder(path)
        line, open_ends = ancestry(folder)
        runs += [one for one in (consumption(folder), *line) if one not in runs]
        unaccounted += [start for start in open_ends if start not in unaccounted]
    facts = overlap.report(
        new, runs, now, _located(runs, now, root or []), near=near, unaccounted=unaccounted, declared=terms,
        examples=examples, tell=_progress(),
    )  # fmt: skip
    if out is not None:
        overlap.save(out, facts)
    if as_json:
        show.as_json(facts)
        return
    show_report(facts)
    if out is not None:
        show.console().print(f"report: {out}; a reviewer signs it with assay data approve --overlap {out}")


def show_report(facts: dict[str, Any]) -> None:
    """The report for people."""
    from assay.cli import show

    console = show.console()
    console.print(show.table(_title(facts), _COLUMNS, _rows(facts)))
    for each in facts["examples"]:
        places = f"document {each['document']:,} of {each['shard'][:19]} ({each['source']})"
        earlier = f"document {each['earlier']['document']:,} of {each['earlier']['shard'][:19]}"
        like = "equals" if each["kind"] == "exact" else f"is like, by {each['similarity']},"
        had = f"{each['positions_consumed']:,} of its {each['tokens']:,} tokens consumed, "
        console.print(f"{places} {like} {earlier}: {had}{each['positions_queued']:,} queued")
    apart = facts["not_compared"]
    for each in apart["shards"]:
        counts = f"{each['positions_consumed']:,} positions consumed, {each['positions_queued']:,} queued"
        console.print(f"not compared: shard {each['shard']} ({counts}): {each['why']}")
    for start in apart["unaccounted"]:
        console.print(f"not compared: what {start} was trained on; its run folder is not here")
    for term in apart["declared"]:
        what = f"{term['name']}, {term['bound']} {term['positions']:,} positions, by {term['evidence']}"
        console.print(f"not compared, declared: {what}")
    if apart["near"]:
        console.print("not compared: near documents; --exact was given")
    else:
        found, least = facts["parameters"]["recall_at_threshold"], facts["parameters"]["parameters"]["threshold"]
        console.print(
            f"near: estimated similarity of at least {least}; of pairs just there {found} are expected to be found"
        )
    console.print(
        "consumed, queued: tokens of which some earlier copy was trained on or is queued, each once (near: estimated "
        "from the most similar document); source positions, not a count of unique tokens"
    )


_COLUMNS = ("", "documents", "tokens", "consumed", "queued")


def _title(facts: dict[str, Any]) -> str:
    runs = (
        ", ".join(f"{one['name']} ({one['run_id'][:8]}) {one['first']:,}:{one['last']:,}" for one in facts["runs"])
        or "no run"
    )
    queue = "no queue" if facts["queue"] is None else f"a queue of {facts['queue']['slots']} slot(s)"
    return f"new documents against {runs} and {queue}; in source positions"


def _rows(facts: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, each in (("all", facts["total"]), *((f"source {n}", one) for n, one in facts["by_source"].items())):
        for kind in ("exact", "near", "fresh"):
            counts = each[kind]
            if name == "all" or counts["documents"]:
                had = (counts.get("positions_consumed", 0), counts.get("positions_queued", 0))
                rows.append((f"{name}: {kind}", counts["documents"], counts["tokens"], *had))
    return rows


def _range(text: str) -> Any:
    """`SHARD` or `SHARD:START:STOP` as a range of an opened shard."""
    from assay.corpus.overlap import Range
    from assay.data.shard import open_shard
    from assay.errors import InputError

    name, *ends = text.rsplit(":", 2) if text.count(":") >= 2 and not Path(text).exists() else [text]
    if not all(end.isascii() and end.isdigit() for end in ends):
        raise InputError(f"{text!r} is not SHARD or SHARD:START:STOP with START and STOP in tokens")
    shard = open_shard(Path(name))
    start, stop = (int(end) for end in ends) if ends else (0, shard.tokens)
    if not 0 <= start < stop <= shard.tokens:
        raise InputError(f"{shard.path}: [{start:,}, {stop:,}) is not a range of its {shard.tokens:,} tokens")
    return Range(shard, start, stop)


def _located(runs: list[Consumption], queue: Queue | None, root: list[Path]) -> dict[str, Any]:
    """The shards of runs and queue that are on this machine."""
    from assay.data.queue import locate

    found = locate(queue, root or [queue.path.parent]) if queue is not None else {}
    for one in runs:
        found = {**locate(one.consumed.queue, [*one.roots, *root]), **found}
    return found


def _progress() -> Callable[[str, int, int], None]:
    """Tells on standard error, every two seconds, how far it is."""
    from assay.cli.show import note

    last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SHOW_AFTER:
            last = time.monotonic()
            note(f"{what}: {done:,} of {total:,} tokens")

    return tell
