"""`assay data inspect`, `data verify`, `data adopt`: looking at shards, hashing them again, taking over packs.

Parses, calls `data.shard` and shows tables or one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RootOption

if TYPE_CHECKING:
    from assay.data.shard import Shard, Source


def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="SHARD", help="A shard folder")], as_json: JsonOption = False
) -> None:
    """Show a shard's manifest

    Sizes are checked; nothing is hashed.
    """
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


def verify_command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATHS", help="Shard folders, or queue files with all their shards")
    ],
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hash shards again and check them

    Every promise of the format is checked; exit 4 when something does not hold.
    """
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
                found = queues.locate(queue, roots_of(path, root))
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


def adopt_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="TOKENS [DOCUMENTS] OUT: the pack's files and the new folder")
    ],
    vocabulary: Annotated[
        int, typer.Option(metavar="V", help="Largest id that can occur, added tokens included, plus one")
    ],
    tokenizer: Annotated[str, typer.Option(metavar="NAME", help="Digest or name of the tokenizer")],
    end_of_text: Annotated[int, typer.Option(metavar="ID", help="The id that ends every document")],
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Either uint16 or uint32; default: what the vocabulary needs")
    ] = None,
    pool: Annotated[str, typer.Option(metavar="NAME", help="The pool that the data belongs to")] = "base",
    source: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name, or NAME:STOP for each of several, in order")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Language of each source, in order")
    ] = None,
    licence: Annotated[list[str] | None, typer.Option(metavar="SPDX", help="Licence of each source, in order")] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Revision of each source, in order")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take over a public pack without copying

    Either train.bin and docs.idx, or a headerless .bin; everything is read and checked once.
    """
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


def roots_of(queue: Path, roots: list[Path] | None) -> list[Path]:
    """Where shards are looked for: the roots given, else the queue's own folder."""
    return roots or [queue.parent]


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
