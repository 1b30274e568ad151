"""`assay data approve`: a reviewer signs the exact next line of a queue.

Parses, calls `data.approval` and shows what was signed; nothing is appended here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.cli.options import JsonOption, RootOption

if TYPE_CHECKING:
    from assay.data.queue import Queue


def approve_command(
    line: Annotated[Path, typer.Argument(metavar="LINE", help="The file with the line that data propose printed")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="The reviewer's private key file")],
    queue: Annotated[
        Path | None,
        typer.Option(metavar="QUEUE", help="The queue; default: the one beside LINE whose head the line names"),
    ] = None,
    licences: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report on licences, signed by its digest")
    ] = None,
    overlap: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report on overlap, signed by its digest")
    ] = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign exactly that line for its queue

    The approval names the line by its digest, so it fits one queue at one head; it lies beside the queue.
    """
    from dataclasses import replace

    from assay.cli import show
    from assay.data import approval
    from assay.data import queue as queues
    from assay.files.reading import read_bytes
    from assay.ledger.keys import keyid, load_key, public_key

    content = read_bytes(line, "the line that propose printed").removesuffix(b"\n")
    now = queues.load(queue) if queue is not None else _beside(line, content)
    slot = queues.next_slot(now, content, str(line))
    private = load_key(key)
    shards = queues.locate(replace(now, slots=(slot,)), root or [now.path.parent])
    path, signed = approval.approve(now, slot, private, shards, licences=licences, overlap=overlap)
    found = {name for one in approval.approvals(now, slot) for name in one.reviewers}
    trust = approval.trust_of(now.trust, str(now.path))
    facts = {
        "slot": slot.number,
        "tokens": slot.tokens,
        "line_sha256": slot.digest,
        "queue": str(now.path),
        "head": now.head,
        "keyid": keyid(public_key(private)),
        "envelope": str(path),
        "approvals": len(found),
        "approvals_needed": trust.threshold if trust else 0,
        **{name: signed[name] for name in ("licences", "shards_not_here", "licences_report", "overlap_report")},
    }
    if as_json:
        show.as_json(facts)
        return
    for name in ("licences", "shards_not_here", "licences_report", "overlap_report"):
        del facts[name]
    console = show.console()
    console.print(show.pairs(f"approved slot {slot.number} of {now.path}", facts))
    columns = ("source", "language", "licence", "revision", "tokens")
    rows = [["unknown" if value is None else value for value in entry.values()] for entry in signed["licences"]]
    console.print(show.table("", columns, rows))
    for name in signed["shards_not_here"]:
        console.print(f"its licences are not stated: shard {name} is not here")
    for name in ("licences_report", "overlap_report"):
        console.print(f"{name.replace('_', ' ')}: {signed[name] or 'none given'}")


def _beside(line: Path, content: bytes) -> Queue:
    """The queue in the folder of `line` whose head the line names as `previous`."""
    from assay.data import queue as queues
    from assay.errors import AssayError, InputError
    from assay.files.reading import parse_json

    record = parse_json(content, str(line))
    previous = record.get("previous") if isinstance(record, dict) else None
    found = []
    for path in sorted(line.parent.glob("*.jsonl")):
        try:
            one = queues.load(path)
        except AssayError:
            continue  # another kind of file
        if one.head == previous:
            found.append(one)
    if len(found) != 1:
        raise InputError(f"{len(found)} queues in {line.parent} stand at the head that {line} names; give --queue")
    return found[0]
