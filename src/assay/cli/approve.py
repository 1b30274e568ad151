"""`assay data approve`: a reviewer signs the exact next line of a queue.

Parses, calls `data.approval` and shows what was signed; nothing is appended here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RootOption

if TYPE_CHECKING:
    from assay.data.queue import Queue


def approve_command(
    line: Annotated[Path, typer.Argument(metavar="LINE", help="The file with the line that data propose printed")],
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The reviewer's private key file")] = None,
    queue: Annotated[
        Path | None,
        typer.Option(metavar="QUEUE", help="The queue; default: the one beside LINE whose head the line names"),
    ] = None,
    licences: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report on licences, signed by its digest")
    ] = None,
    overlap: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The report of data overlap on this line, signed by digest and key figures"),
    ] = None,
    only_show: Annotated[bool, typer.Option("--show", help="Show what would be signed; sign nothing")] = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign exactly that line for its queue

    The approval names the line by its digest, so it fits one queue at one head; it lies beside the queue. Licences
    and overlap are shown before anything is signed; a report on overlap must be about this line and this head.
    """
    from dataclasses import replace

    from assay.cli import show
    from assay.data import approval
    from assay.data import queue as queues
    from assay.errors import InputError
    from assay.files.reading import read_bytes
    from assay.ledger.keys import keyid, load_key, public_key

    if (key is None) != only_show:
        raise InputError("--key FILE signs, --show only looks; exactly one of the two is expected")
    content = read_bytes(line, "the line that propose printed").removesuffix(b"\n")
    now = queues.load(queue) if queue is not None else _beside(line, content)
    slot = queues.next_slot(now, content, str(line))
    private = load_key(key) if key is not None else None
    shards = queues.locate(replace(now, slots=(slot,)), root or [now.path.parent])
    about = {
        "slot": slot.number,
        "tokens": slot.tokens,
        "line_sha256": slot.digest,
        "queue": str(now.path),
        "head": now.head,
    }

    def look(signed: dict[str, Any]) -> None:
        if not as_json:
            show.console().print(show.pairs(f"slot {slot.number} of {now.path}", about))
            _show_grounds(signed)

    if private is None:
        signed = approval.predicate(now, slot, shards, licences=licences, overlap=overlap)
        look(signed)
        done: dict[str, Any] = {"keyid": None, "envelope": None}
    else:
        path, signed = approval.approve(now, slot, private, shards, licences=licences, overlap=overlap, look=look)
        done = {"keyid": keyid(public_key(private)), "envelope": str(path)}
    found = {name for one in approval.approvals(now, slot) for name in one.reviewers}
    trust = approval.trust_of(now.trust, str(now.path))
    done |= {"approvals": len(found), "approvals_needed": trust.threshold if trust else 0}
    if as_json:
        show.as_json({**about, **done, **{name: signed[name] for name in _GROUNDS}})
    elif private is None:
        show.console().print("nothing is signed")
    else:
        show.console().print(show.pairs(f"approved slot {slot.number} of {now.path}", done))


_GROUNDS = ("licences", "by_licence", "shards_not_here", "licences_report", "overlap_report", "overlap")


def _show_grounds(signed: dict[str, Any]) -> None:
    """Licences and overlap, as they are signed."""
    from assay.cli import show

    console = show.console()
    columns = ("source", "language", "licence", "revision", "tokens")
    rows = [["not stated" if value is None else value for value in entry.values()] for entry in signed["licences"]]
    console.print(show.table("", columns, rows))
    stated = [f"{entry['licence'] or 'not stated'} {entry['tokens']:,}" for entry in signed["by_licence"]]
    console.print(f"tokens by licence: {', '.join(stated)}")
    for name in signed["shards_not_here"]:
        console.print(f"its licences are not stated: shard {name} is not here")
    console.print(f"licences report: {signed['licences_report'] or 'none given'}")
    console.print(f"overlap report: {signed['overlap_report'] or 'none given'}")
    figures = signed["overlap"]
    if figures is None:
        return
    columns = ("overlap, in source positions", "documents", "tokens", "consumed", "queued")
    kinds = [(kind, *figures[kind].values()) for kind in ("exact", "near")]
    console.print(show.table("", columns, [*kinds, ("fresh", *figures["fresh"].values(), 0, 0)]))
    runs = ", ".join(run[:8] for run in figures["runs"]) or "no run"
    console.print(f"compared with {runs} and with the queue at the head above")
    apart = figures["not_compared"]
    whats = {"shards": "shard(s)", "unaccounted": "ancestor(s) without a run folder", "declared": "declared term(s)"}
    gaps = [f"{apart[key]} {what}" for key, what in whats.items() if apart[key]]
    gaps += ["near documents"] if apart["near"] else []
    console.print(f"not compared: {', '.join(gaps) or 'nothing that is known of'}")


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
