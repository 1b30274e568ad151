"""`assay data …`: queue, order, batches and exposure on the command line; shards are in `cli.shards`.

Parses, calls the room and shows tables or one JSON object; rooms are imported inside the commands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.approve import approve_command
from assay.cli.exposure import exposure_command
from assay.cli.options import JsonOption, QueueArgument, RootOption
from assay.cli.overlap import overlap_command
from assay.cli.shards import adopt_command, inspect_command, roots_of, verify_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.data.queue import Part, Queue, Slot

data_app = typer.Typer(help="Shards, queue, order, batches, exposure", no_args_is_help=True, rich_markup_mode=None)

Seed = Annotated[int, typer.Option(metavar="S", help="The data seed")]
GlobalBatch = Annotated[int, typer.Option(metavar="B", help="Sequences in one update")]
Epochs = Annotated[int, typer.Option(metavar="E", help="How often the slot's data may be read")]
RunsOption = Annotated[
    list[Path] | None,
    typer.Option("--run", metavar="RUN", help="A run whose data and validation the slot must not repeat; repeatable"),
]
CapacitySeed = Annotated[int | None, typer.Option(metavar="S", help="Check the capacity for this data seed exactly")]


data_app.command("inspect")(inspect_command)
data_app.command("verify")(verify_command)
data_app.command("adopt")(adopt_command)


@data_app.command("create")
def create_command(
    queue: QueueArgument,
    shard: Annotated[
        Path, typer.Option(metavar="SHARD", help="A shard that gives dtype, vocabulary, tokenizer and pool")
    ],
    block: Annotated[int, typer.Option(metavar="N", help="Context length in tokens")],
    pool: Annotated[str | None, typer.Option(metavar="NAME", help="The pool, where it is not the shard's")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse data that was taken before, by range or document")
    ] = False,
    reviewer: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Public key, or its .pub file, of one who may approve; may be repeated"),
    ] = None,
    threshold: Annotated[
        int | None, typer.Option(metavar="N", help="Approvals by different reviewers that a slot needs")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--demand-overlap", help="An approval counts only with a report of data overlap")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Begin a queue: its header, no slots"""
    from assay.cli import show
    from assay.data.queue import create
    from assay.data.shard import open_shard
    from assay.errors import InputError
    from assay.ledger.keys import read_public

    if threshold is not None and not reviewer:
        raise InputError("--threshold is given without --reviewer; name the keys of those who may approve")
    if overlap and not reviewer:
        raise InputError("--demand-overlap is given without --reviewer; name the keys of those who may approve")
    keys = [read_public(text) for text in reviewer or []]
    like = open_shard(shard)
    made = create(
        queue,
        block=block,
        dtype=like.dtype,
        vocabulary=like.vocabulary,
        tokenizer=like.tokenizer,
        pool=pool or like.pool,
        freshness="strict" if strict else None,
        trust=_trust(keys, threshold, overlap) if keys else None,
    )
    shown = ("block", "dtype", "vocabulary", "tokenizer", "pool", "freshness", "trust", "head")
    facts = {"queue": str(queue), **{key: getattr(made, key) for key in shown}}
    if as_json:
        show.as_json(facts)
    else:
        if made.trust is not None:
            grounds = ", with a report on overlap" if overlap else ""
            facts["trust"] = f"{made.trust['threshold']} of {len(keys)} reviewer(s) approve each slot{grounds}"
        show.console().print(show.pairs(f"created {queue}", {k: v for k, v in facts.items() if v is not None}))


@data_app.command("propose")
def propose_command(
    queue: QueueArgument,
    shards: Annotated[list[str], typer.Argument(metavar="SHARDS", help="SHARD or SHARD:START:STOP, in order")],
    global_batch: GlobalBatch,
    updates: Annotated[int, typer.Option(metavar="N", help="Updates of the slot")],
    epochs: Epochs = 1,
    seed: CapacitySeed = None,
    run: RunsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the exact next line of a queue

    Nothing is written. Refused (exit 3): what a strict queue holds or the runs and their ancestors took already,
    and what the runs validate on.
    """
    from assay.cli import show
    from assay.data import queue as queues

    now = queues.load(queue)
    line = queues.propose(
        now, updates=updates, parts=_parts(now, shards), global_batch=global_batch, epochs=epochs, seed=seed
    )
    slot = queues.next_slot(now, line, "the proposed line")
    unseen = _admit(now, slot, run, root, shards)
    facts = {**_slot_facts(now, slot, global_batch, seed, now.head), "not_compared": unseen}
    if as_json:
        show.as_json({**facts, "line": line.decode(), "line_sha256": slot.digest})
        return
    sys.stdout.buffer.write(line + b"\n")
    for thing in unseen:
        show.note(f"not compared: {thing}")
    show.note(
        f"slot {slot.number}: {slot.tokens:,} tokens, {facts['windows_needed']:,} windows needed, "
        f"{facts['windows_available']:,} available; save the line to a file for assay data append"
    )


data_app.command("approve")(approve_command)


@data_app.command("append")
def append_command(
    queue: QueueArgument,
    line: Annotated[
        list[str], typer.Argument(metavar="LINE", help="The file with the proposed line; with --updates: shards")
    ],
    global_batch: Annotated[
        int | None, typer.Option(metavar="B", help="Sequences in one update; checks the capacity")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(metavar="N", help="Updates of the slot: propose and append at once")
    ] = None,
    epochs: Epochs = 1,
    seed: CapacitySeed = None,
    run: RunsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Append exactly that line to its queue

    Under the queue's lock, and only with the approvals that its header demands. Refused as by propose.
    """
    from assay.cli import show
    from assay.data import approval
    from assay.data import queue as queues
    from assay.errors import InputError
    from assay.files.reading import read_bytes

    now = queues.load(queue)
    if updates is None:
        if len(line) != 1:
            raise InputError(f"{len(line)} lines given; one file is expected, or shards with --updates")
        content = read_bytes(Path(line[0]), "the line that propose printed").removesuffix(b"\n")
    elif global_batch is None:
        raise InputError("--updates is given without --global-batch; both are needed to propose a slot")
    else:
        content = queues.propose(
            now, updates=updates, parts=_parts(now, line), global_batch=global_batch, epochs=epochs, seed=seed
        )
    unseen = _admit(now, queues.next_slot(now, content, "the line to append"), run, root, line if updates else [])
    slot = queues.append(queue, content, global_batch=global_batch, seed=seed)
    facts = {
        **_slot_facts(now, slot, global_batch, seed, slot.digest),
        "not_compared": unseen,
        "approved_by": list(approval.demand(now, slot)) if now.trust else None,
    }
    if as_json:
        show.as_json(facts)
    else:
        facts["approved_by"] = ", ".join(facts["approved_by"] or ["nobody: the queue demands no approval"])
        facts["not_compared"] = "; ".join(unseen) or None
        show.console().print(show.pairs(f"appended to {queue}", {k: v for k, v in facts.items() if v is not None}))


@data_app.command("order")
def order_command(
    queue: QueueArgument,
    seed: Seed,
    slot: Annotated[int, typer.Option(metavar="K", help="Slot number, from zero")],
    epoch: Annotated[int, typer.Option(metavar="E", help="Epoch of the slot, from zero")] = 0,
    first: Annotated[int, typer.Option(metavar="N", help="How many window indices are shown")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Show which window comes when

    The order of one slot's epoch; the data need not be here.
    """
    from assay.cli import show
    from assay.data import order
    from assay.data import queue as queues
    from assay.errors import InputError

    now = queues.load(queue)
    if not 0 <= slot < len(now.slots):
        raise InputError(f"{queue} has {len(now.slots)} slot(s); slot {slot} is not among them")
    if not 0 <= epoch < now.slots[slot].epochs:
        raise InputError(f"slot {slot} of {queue} has {now.slots[slot].epochs} epoch(s); epoch {epoch} is not allowed")
    stream = now.slots[slot].stream(seed, now.block)
    found = stream.epoch(epoch)
    facts = {
        "offset": found.offset,
        "windows": found.windows,
        "indices": found.permutation[: max(first, 0)].tolist(),
        "sha256": order.indices_digest(found.permutation),
    }
    if as_json:
        show.as_json(facts)
    else:
        facts["indices"] = ", ".join(str(index) for index in found.permutation[: max(first, 0)])
        show.console().print(show.pairs(f"order of slot {slot}, epoch {epoch}, seed {seed}", facts))


@data_app.command("batches")
def batches_command(
    queue: QueueArgument,
    seed: Seed,
    global_batch: GlobalBatch,
    updates: Annotated[
        str | None, typer.Option(metavar="LIST", help="Update numbers such as 3,17; default: slot boundaries")
    ] = None,
    expect: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What data batches --json printed elsewhere")
    ] = None,
    chain: Annotated[bool, typer.Option("--chain", help="Order digest after the last update too")] = False,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Write the comparison as a receipt into this run's ledger")
    ] = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute batch digests without training

    With --expect they are compared with another trainer's: exit 6 when they differ.
    """
    from assay.cli import show
    from assay.data import batches as reading
    from assay.data import queue as queues
    from assay.errors import InputError
    from assay.files.digest import PREFIX

    if run is not None and expect is None:
        raise InputError("--run is given without --expect; a receipt states a comparison")
    now = queues.load(queue)
    expected = reading.read_expected(expect) if expect is not None else None
    opened = reading.Batches(now, roots_of(queue, root), seed, global_batch)
    if updates is not None:
        wanted = sorted(set(reading.parse_updates(updates)))
        expected = {u: found for u, found in expected.items() if u in wanted} if expected is not None else None
    else:
        wanted = sorted(expected) if expected is not None else reading.boundary_updates(now)
    digests: dict[int, str] = {}
    order = opened.order_start()
    for update in range(max(wanted, default=-1) + 1) if chain else wanted:
        found = opened.digest(update)
        order = reading.order_next(order, found)
        if update in wanted:
            digests[update] = found
        if chain and update % 100 == 0 and sys.stderr.isatty():
            print(f"\r{update:,} of {max(wanted):,} updates", end="", file=sys.stderr, flush=True)
    differences = reading.compare(digests, expected) if expected is not None else []
    facts: dict[str, Any] = {
        "ok": not differences,
        "batches": [{"update": update, "sha256": found} for update, found in digests.items()],
        "differences": differences if expected is not None else None,
        "seed": seed,
        "global_batch": global_batch,
        "head": now.head,
    }
    if chain:
        facts["order_digest"] = PREFIX + order.hex()
    if run is not None and expect is not None:
        _receipt(run, facts, expect)
    if as_json:
        show.as_json(facts)
    else:
        wrong = {entry["update"] for entry in differences}
        verdicts = {u: "" if expected is None else "differs" if u in wrong else "equal" for u in digests}
        rows = [(str(update), found, verdicts[update]) for update, found in digests.items()]
        rows += [(str(e["update"]), "not computed here", "differs") for e in differences if e["sha256"] is None]
        show.console().print(show.table("", ("update", "batch digest", ""), rows))
        if chain:
            show.console().print(f"order digest after update {max(wanted):,}: {facts['order_digest']}")
        if differences:
            show.note(f"assay: {len(differences)} of {len(expected or ())} batches differ from {expect}")
    if differences:
        raise typer.Exit(6)


data_app.command("exposure")(exposure_command)
data_app.command("overlap")(overlap_command)


def _trust(keys: list[str], threshold: int | None, overlap: bool) -> dict[str, Any]:
    demanded = {"overlap": "required"} if overlap else {}
    return {"reviewer": keys, "threshold": 1 if threshold is None else threshold, **demanded}


def _receipt(run: Path, facts: dict[str, Any], expect: Path) -> None:
    from assay.files.digest import digest_file
    from assay.run.folder import RunFolder

    body = {key: facts[key] for key in ("batches", "differences", "seed", "global_batch", "head")}
    RunFolder(run).open_ledger().append("batches.checked", {**body, "expected": digest_file(expect)})


def _admit(queue: Queue, slot: Slot, runs: list[Path] | None, root: list[Path] | None, shards: list[str]) -> list[str]:
    from assay.run.folder import RunFolder
    from assay.run.slots import admit

    places = [*roots_of(queue.path, root), *(Path(_split(text)[0]) for text in shards)]
    return admit(queue, slot, [RunFolder(path) for path in runs or []], places)


def _split(text: str) -> list[str]:
    """SHARD or SHARD:START:STOP as one or three texts."""
    return text.rsplit(":", 2) if text.count(":") >= 2 and not Path(text).exists() else [text]


def _parts(queue: Queue, shards: Sequence[str]) -> list[Part]:
    from assay.data.queue import parts_of
    from assay.data.shard import open_shard
    from assay.errors import InputError

    parts: list[Part] = []
    for text in shards:
        name, *ends = _split(text)
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise InputError(f"{text!r} is not SHARD or SHARD:START:STOP with START and STOP in tokens")
        parts.extend(parts_of(queue, open_shard(Path(name)), *(int(end) for end in ends)))
    return parts


def _slot_facts(queue: Queue, slot: Slot, global_batch: int | None, seed: int | None, head: str) -> dict[str, Any]:
    from assay.data.queue import available_windows

    return {
        "slot": slot.number,
        "updates": slot.updates,
        "epochs": slot.epochs,
        "first_update": slot.first_update,
        "tokens": slot.tokens,
        "windows_needed": None if global_batch is None else slot.updates * global_batch,
        "windows_available": available_windows(queue, slot, seed),
        "head": head,
    }
