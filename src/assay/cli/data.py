"""`assay data …`: shards, queue, order, batches and exposure on the command line.

Parses, calls the room and shows tables or one JSON object; rooms are imported inside the commands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.approve import approve_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.data.queue import Part, Queue, Slot
    from assay.data.shard import Shard, Source
    from assay.run.consumption import Consumption

data_app = typer.Typer(help="Shards, queue, order, batches, exposure.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
QueueFile = Annotated[Path, typer.Argument(help="The queue file.", show_default=False)]
Roots = Annotated[list[Path] | None, typer.Option("--root", help="Where shards are looked for, besides the hints.")]
Seed = Annotated[int, typer.Option(help="The data seed.")]
GlobalBatch = Annotated[int, typer.Option(help="Sequences in one update.")]


@data_app.command("inspect")
def inspect_command(path: Annotated[Path, typer.Argument(help="A shard folder.")], as_json: AsJson = False) -> None:
    """Show a shard's manifest, after checking sizes; nothing is hashed."""
    from dataclasses import asdict

    from assay.cli import show
    from assay.data.shard import open_shard

    shard = open_shard(path)
    facts = {**_shard_facts(shard), "problems": None, "sources": [asdict(source) for source in shard.sources]}
    if as_json:
        show.as_json(facts)
        return
    show.console().print(show.pairs(str(path), _shard_facts(shard)))
    columns = ("source", "start", "stop", "language", "licence", "revision")
    rows = [["unknown" if v is None else v for v in source.values()] for source in facts["sources"]]
    show.console().print(show.table("", columns, rows))


@data_app.command("verify")
def verify_command(
    paths: Annotated[list[Path], typer.Argument(help="Shard folders, or queue files with all their shards.")],
    root: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Re-hash shards and check every promise of the format; exit 4 when something does not hold."""
    from assay.cli import show
    from assay.data import approval
    from assay.data import queue as queues
    from assay.data.shard import open_shard, verify_shard
    from assay.errors import DataError

    approved: list[dict[str, Any]] = []
    shards: list[Shard] = []
    problems: list[str] = []
    for path in paths:
        try:
            if path.is_file():
                queue = queues.load(path)
                signed, lacking = approval.survey(queue)
                approved.extend({"queue": str(path), **entry} for entry in signed)
                problems.extend(lacking)
                found = queues.locate(queue, _roots(path, root))
                shards.extend(found.values())
                problems.extend(f"{path}: shard {name} is not here" for name in queues.missing(queue, found))
            else:
                shards.append(open_shard(path))
        except DataError as fault:  # one damaged shard does not keep the others from being looked at
            problems.append(str(fault))
    whole = not problems
    entries = []
    for shard in shards:
        show.note(f"reading {shard.path} ({shard.tokens:,} tokens)")
        wrong = verify_shard(shard)
        entries.append({"path": str(shard.path), **_shard_facts(shard), "problems": wrong})
        problems.extend(f"{shard.path}: {text}" for text in wrong)
    counts = [shard.documents for shard in shards]
    facts = {
        "ok": not problems,
        "tokens": sum(shard.tokens for shard in shards) if whole else None,
        "documents": sum(count for count in counts if count is not None) if whole and None not in counts else None,
        "dtype": shards[0].dtype if len(shards) == 1 else None,
        "sha256": shards[0].sha256 if len(shards) == 1 else None,
        "problems": problems,
        "shards": entries,
        "approvals": approved,
    }
    if as_json:
        show.as_json(facts)
    else:
        rows = [(e["path"], e["tokens"], e["documents"], e["dtype"], e["sha256"], len(e["problems"])) for e in entries]
        show.console().print(show.table("", ("shard", "tokens", "documents", "dtype", "sha256", "problems"), rows))
        for text in problems:
            show.note(f"assay: {text}")
    if problems:
        raise typer.Exit(4)


@data_app.command("adopt")
def adopt_command(
    files: Annotated[list[Path], typer.Argument(help="TOKENS [DOCUMENTS] OUT: the pack's files and the new folder.")],
    vocabulary: Annotated[int, typer.Option(help="Largest id that can occur, added tokens included, plus one.")],
    tokenizer: Annotated[str, typer.Option(help="Digest or name of the tokenizer.")],
    end_of_text: Annotated[int, typer.Option(help="The id that ends every document.")],
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32; by default what the vocabulary needs.")] = None,
    pool: Annotated[str, typer.Option(help="The pool that the data belongs to.")] = "base",
    source: Annotated[list[str] | None, typer.Option(help="NAME, or NAME:STOP for each of several, in order.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Language of each source, in order.")] = None,
    licence: Annotated[list[str] | None, typer.Option(help="Licence of each source, in order.")] = None,
    revision: Annotated[list[str] | None, typer.Option(help="Revision of each source, in order.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take over train.bin and docs.idx, or a headerless .bin, without copying; everything is read and checked once."""
    from assay.cli import show
    from assay.data.shard import adopt, dtype_for
    from assay.errors import InputError

    if len(files) not in (2, 3):
        raise InputError(f"{len(files)} path(s) given; TOKENS OUT or TOKENS DOCUMENTS OUT is expected")
    chosen = dtype or dtype_for(vocabulary)
    shard = adopt(
        files[0],
        files[1] if len(files) == 3 else None,
        files[-1],
        dtype=chosen,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        pool=pool,
        sources=_sources(files[0], chosen, source or ["adopted"], language or [], licence or [], revision or []),
    )
    facts = {**_shard_facts(shard), "problems": []}
    if as_json:
        show.as_json(facts)
    else:
        show.console().print(show.pairs(f"adopted {shard.path}", facts))


@data_app.command("create")
def create_command(
    queue: QueueFile,
    shard: Annotated[Path, typer.Option(help="A shard that gives dtype, vocabulary, tokenizer and pool.")],
    block: Annotated[int, typer.Option(help="Context length in tokens.")],
    pool: Annotated[str | None, typer.Option(help="The pool, where it is not the shard's.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse data that the queue holds already.")] = False,
    reviewer: Annotated[
        list[str] | None, typer.Option(help="Public key, or its .pub file, of one who may approve slots; repeat it.")
    ] = None,
    threshold: Annotated[int | None, typer.Option(help="Approvals by different reviewers that a slot needs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Begin a queue: its header line, no slots."""
    from assay.cli import show
    from assay.data.queue import create
    from assay.data.shard import open_shard
    from assay.errors import InputError
    from assay.ledger.keys import read_public

    if threshold is not None and not reviewer:
        raise InputError("--threshold is given without --reviewer; name the keys of those who may approve")
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
        trust={"reviewer": keys, "threshold": 1 if threshold is None else threshold} if keys else None,
    )
    shown = ("block", "dtype", "vocabulary", "tokenizer", "pool", "freshness", "trust", "head")
    facts = {"queue": str(queue), **{key: getattr(made, key) for key in shown}}
    if as_json:
        show.as_json(facts)
    else:
        if made.trust is not None:
            facts["trust"] = f"{made.trust['threshold']} of {len(keys)} reviewer(s) approve each slot"
        show.console().print(show.pairs(f"created {queue}", {k: v for k, v in facts.items() if v is not None}))


@data_app.command("propose")
def propose_command(
    queue: QueueFile,
    shards: Annotated[list[str], typer.Argument(help="SHARD or SHARD:START:STOP, in order.")],
    global_batch: GlobalBatch,
    updates: Annotated[int, typer.Option(help="Updates of the slot.")],
    epochs: Annotated[int, typer.Option(help="How often the slot's data may be read.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Check the capacity for this data seed exactly.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the exact next line of the queue; nothing is written."""
    from assay.cli import show
    from assay.data import queue as queues

    now = queues.load(queue)
    line = queues.propose(
        now, updates=updates, parts=_parts(now, shards), global_batch=global_batch, epochs=epochs, seed=seed
    )
    slot = queues.next_slot(now, line, "the proposed line")
    facts = _slot_facts(now, slot, global_batch, seed, now.head)
    if as_json:
        show.as_json({**facts, "line": line.decode(), "line_sha256": slot.digest})
        return
    sys.stdout.buffer.write(line + b"\n")
    show.note(
        f"slot {slot.number}: {slot.tokens:,} tokens, {facts['windows_needed']:,} windows needed, "
        f"{facts['windows_available']:,} available; save the line to a file for assay data append"
    )


data_app.command("approve")(approve_command)


@data_app.command("append")
def append_command(
    queue: QueueFile,
    line: Annotated[list[str], typer.Argument(help="The file with the proposed line; with --updates: shards.")],
    global_batch: Annotated[int | None, typer.Option(help="Sequences in one update; checks the capacity.")] = None,
    updates: Annotated[int | None, typer.Option(help="Updates of the slot: propose and append at once.")] = None,
    epochs: Annotated[int, typer.Option(help="How often the slot's data may be read.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Check the capacity for this data seed exactly.")] = None,
    as_json: AsJson = False,
) -> None:
    """Append exactly those bytes to the queue, under its lock, when it has the approvals that the header demands."""
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
    slot = queues.append(queue, content, global_batch=global_batch, seed=seed)
    facts = {
        **_slot_facts(now, slot, global_batch, seed, slot.digest),
        "approved_by": list(approval.demand(now, slot)) if now.trust else None,
    }
    if as_json:
        show.as_json(facts)
    else:
        facts["approved_by"] = ", ".join(facts["approved_by"] or ["nobody: the queue demands no approval"])
        show.console().print(show.pairs(f"appended to {queue}", facts))


@data_app.command("order")
def order_command(
    queue: QueueFile,
    seed: Seed,
    slot: Annotated[int, typer.Option(help="Slot number, from zero.")],
    epoch: Annotated[int, typer.Option(help="Epoch of the slot, from zero.")] = 0,
    first: Annotated[int, typer.Option(help="How many window indices are shown.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Show the order of one slot's epoch; the data need not be here."""
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
    queue: QueueFile,
    seed: Seed,
    global_batch: GlobalBatch,
    updates: Annotated[str | None, typer.Option(help="Update numbers, 3,17; default: slot boundaries.")] = None,
    expect: Annotated[Path | None, typer.Option(help="What data batches --json printed elsewhere.")] = None,
    chain: Annotated[bool, typer.Option("--chain", help="Order digest after the last update too.")] = False,
    run: Annotated[Path | None, typer.Option(help="Write the comparison as a receipt into this run's ledger.")] = None,
    root: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Batch digests without training; with --expect compared with another trainer's (exit 6 when they differ)."""
    from assay.cli import show
    from assay.data import batches as reading
    from assay.data import queue as queues
    from assay.errors import InputError
    from assay.files.digest import PREFIX

    if run is not None and expect is None:
        raise InputError("--run is given without --expect; a receipt states a comparison")
    now = queues.load(queue)
    expected = reading.read_expected(expect) if expect is not None else None
    opened = reading.Batches(now, _roots(queue, root), seed, global_batch)
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


@data_app.command("exposure")
def exposure_command(
    path: Annotated[Path, typer.Argument(help="A run folder or a queue file.")],
    seed: Annotated[int | None, typer.Option(help="The data seed (for a queue).")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences in one update (for a queue).")] = None,
    updates: Annotated[str | None, typer.Option(help="A:B, half-open (for a queue).")] = None,
    slot: Annotated[int, typer.Option(help="The slot whose stream the ranges are offsets in.")] = 0,
    ranges: Annotated[list[str] | None, typer.Option("--range", help="a:b in that stream, half-open.")] = None,
    ancestry: Annotated[bool, typer.Option("--ancestry", help="Count the runs that this one began from too.")] = False,
    declared: Annotated[
        list[str] | None, typer.Option(help="NAME:POSITIONS of an ancestor without a ledger; added, never merged.")
    ] = None,
    root: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Positions by source, language and range, distinct and repeated; the data need not be here."""
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
        consumed, recomputed = own.consumed, own.recomputed
        places = [*own.roots, *(root or [])]
    else:
        if seed is None or global_batch is None or updates is None:
            raise InputError("a queue needs --seed, --global-batch and --updates A:B; a run folder states them itself")
        if ancestry:
            raise InputError(f"--ancestry is given for the queue {path}; only a run has ancestors")
        first, last = exposure.parse_interval(updates, "--updates")
        consumed, recomputed = exposure.Consumed(queues.load(path), seed, global_batch, first, last), 0
        places = _roots(path, root)
    asked = [exposure.parse_interval(text, "--range") for text in ranges or []]
    terms = [exposure.parse_declared(text) for text in declared or []]
    shards = queues.locate(consumed.queue, places)
    for ancestor in ancestors:
        shards = {**queues.locate(ancestor.consumed.queue, ancestor.roots), **shards}
    counted = exposure.Exposure([consumed, *(ancestor.consumed for ancestor in ancestors)], shards)
    facts = {**counted.facts(consumed.queue, slot, asked), "recomputed": recomputed}
    if ancestry or terms:
        facts["ancestors"] = [
            {"run_id": a.run_id, "name": a.name, "first": a.consumed.first, "last": a.consumed.last} for a in ancestors
        ]
        facts["unaccounted"] = unaccounted
        facts["declared"] = [{"name": name, "positions": positions} for name, positions in terms]
        facts["positions_with_declared"] = counted.total.positions + sum(positions for _, positions in terms)
    if as_json:
        show.as_json(facts)
        return
    columns = ("", "positions", "distinct", "repeated")
    console = show.console()
    rows = [("all", *counted.total.facts().values())]
    rows += [(f"source {name}", *counts.facts().values()) for name, counts in counted.by_source().items()]
    rows += [(f"language {name}", *counts.facts().values()) for name, counts in counted.by_language().items()]
    rows += [
        (f"range [{r['start']:,}, {r['stop']:,})", r["positions"], r["distinct"], r["repeated"])
        for r in facts["ranges"]
    ]
    console.print(show.table(f"source positions of updates {consumed.first:,}:{consumed.last:,}", columns, rows))
    for ancestor in ancestors:
        console.print(f"ancestor {ancestor.name}: updates {ancestor.consumed.first:,}:{ancestor.consumed.last:,}")
    for name, positions in terms:
        console.print(f"declared, without a ledger: {name} {positions:,}")
    if terms:
        console.print(f"with declared terms: {facts['positions_with_declared']:,}")
    for start in unaccounted:
        console.print(f"not accounted for: what {start} was trained on; its run folder is not here")
    console.print(f"recomputed: {recomputed:,}\n{exposure.METHOD}")


def _receipt(run: Path, facts: dict[str, Any], expect: Path) -> None:
    from assay.files.digest import digest_file
    from assay.run.folder import RunFolder

    body = {key: facts[key] for key in ("batches", "differences", "seed", "global_batch", "head")}
    RunFolder(run).open_ledger().append("batches.checked", {**body, "expected": digest_file(expect)})


def _parts(queue: Queue, shards: Sequence[str]) -> list[Part]:
    from assay.data.queue import parts_of
    from assay.data.shard import open_shard
    from assay.errors import InputError

    parts: list[Part] = []
    for text in shards:
        name, *ends = text.rsplit(":", 2) if text.count(":") >= 2 and not Path(text).exists() else [text]
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise InputError(f"{text!r} is not SHARD or SHARD:START:STOP with START and STOP in tokens")
        parts.extend(parts_of(queue, open_shard(Path(name)), *(int(end) for end in ends)))
    return parts


def _sources(
    tokens_file: Path, dtype: str, names: list[str], languages: list[str], licences: list[str], revisions: list[str]
) -> list[Source]:
    """Sources from `NAME` or `NAME:STOP`, one after another; the last one ends with the file."""
    from assay.data.shard import Source, little
    from assay.errors import InputError

    if not tokens_file.is_file():
        raise InputError(f"{tokens_file} does not exist or is no file; a file of token ids is expected there")
    for option, values in (("--language", languages), ("--licence", licences), ("--revision", revisions)):
        if values and len(values) != len(names):
            raise InputError(f"{option} is given {len(values)} times for {len(names)} sources; give it once for each")
    tokens = tokens_file.stat().st_size // little(dtype).itemsize if dtype in ("uint16", "uint32") else 0
    sources: list[Source] = []
    at = 0
    for number, text in enumerate(names):
        name, colon, end = text.rpartition(":")
        last = number == len(names) - 1
        if not (colon and end.isdigit()) and not last:
            raise InputError(f"--source {text!r} does not say where it stops; NAME:STOP is expected before the last")
        stop = int(end) if colon and end.isdigit() else tokens
        more = [values[number] if values else None for values in (languages, licences, revisions)]
        sources.append(Source(name if colon and end.isdigit() else text, at, stop, *more))
        at = stop
    return sources


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


def _shard_facts(shard: Shard) -> dict[str, Any]:
    return {
        "tokens": shard.tokens,
        "documents": shard.documents,
        "dtype": shard.dtype,
        "sha256": shard.sha256,
        "vocabulary": shard.vocabulary,
        "tokenizer": shard.tokenizer,
        "end_of_text": shard.end_of_text,
        "pool": shard.pool,
    }


def _roots(queue: Path, roots: list[Path] | None) -> list[Path]:
    """Where shards are looked for: the roots given, else the queue's own folder."""
    return roots or [queue.parent]
