"""Reports that a reviewer signs with a line: that they are about this very line, and what they come to.

A report on overlap (`assay-overlap/1`) is made by `assay data overlap`; it is taken at its word here, and is
computed again by whoever doubts it. Licences are summed up from the manifests of the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.data import fields
from assay.errors import InputError, Refused
from assay.files.digest import digest
from assay.files.reading import parse_json, read_bytes

if TYPE_CHECKING:
    from assay.data.queue import Part, Queue, Slot
    from assay.data.shard import Shard

OVERLAP_FORMAT = "assay-overlap/1"
_LIMIT = 1 << 30
_COUNTS = ("documents", "tokens", "positions_consumed", "positions_queued")


def evidence(path: Path, what: str) -> str:
    """The digest of any report."""
    return digest(read_bytes(path, what, _LIMIT))


def overlap_report(path: Path, queue: Queue, slot: Slot) -> tuple[str, dict[str, Any]]:
    """(digest, key figures) of a report on the overlap of the line's data, compared with the queue at its head.

    Raises InputError for a file that is no such report, Refused for one about other ranges, another queue, or
    another head.
    """
    data = read_bytes(path, "a report on overlap", _LIMIT)
    record, where = parse_json(data, str(path)), str(path)
    if not isinstance(record, dict) or record.get("format") != OVERLAP_FORMAT:
        shown = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise InputError(
            f"{path}: format is {shown!r:.60}; {OVERLAP_FORMAT!r} is expected: make it with assay data overlap"
        )
    stated = [
        (fields.sha256(each, "shard", where), fields.integer(each, "start", where), fields.integer(each, "stop", where))
        for each in fields.objects(record, "parts", where)
    ]
    wrong = _other_ranges(joined(stated), joined([(part.shard, part.start, part.stop) for part in slot.parts]))
    if wrong is not None:
        raise Refused(f"{path} is not about the data of slot {slot.number} of {queue.path}: {wrong}; make it again")
    if fields.present(record, "queue", where) is None:
        raise Refused(f"{path} was made without the queue; make it again with --queue {queue.path}")
    compared = fields.mapping(record, "queue", where)
    if fields.sha256(compared, "queue", where) != queue.header_digest:
        raise Refused(f"{path} compares with another queue than {queue.path}; make it again with --queue {queue.path}")
    if fields.sha256(compared, "head", where) != queue.head:
        raise Refused(
            f"{path} compares with the head {compared['head']}, but {queue.path} stands at {queue.head}; make it again"
        )
    return digest(data), _key_figures(record, where)


def _key_figures(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What of a report goes into the signed statement: totals, against whom, and how much was not compared."""
    total = fields.mapping(record, "total", where)
    kinds = {
        kind: {key: fields.integer(fields.mapping(total, kind, where), key, where) for key in keys}
        for kind, keys in (("exact", _COUNTS), ("near", _COUNTS), ("fresh", _COUNTS[:2]))
    }
    apart = fields.mapping(record, "not_compared", where)
    missing = {}
    for key in ("shards", "unaccounted", "declared"):
        entries = fields.present(apart, key, where)
        if not isinstance(entries, list):
            raise InputError(f"{where}: not_compared.{key} is {entries!r:.60}; a list is expected")
        missing[key] = len(entries)
    runs = fields.present(record, "runs", where)
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise InputError(f"{where}: runs is {runs!r:.60}; a list of objects is expected")
    return {
        **{key: fields.integer(total, key, where) for key in ("documents", "tokens")},
        **kinds,
        "runs": [fields.text(run, "run_id", where) for run in runs],
        "not_compared": {**missing, "near": fields.present(apart, "near", where) is not False},
    }


def joined(ranges: Sequence[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Ranges (shard, start, stop) by shard, ascending, those that touch or overlap as one."""
    result: dict[str, list[tuple[int, int]]] = {}
    for shard, start, stop in sorted(ranges):
        spans = result.setdefault(shard, [])
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return result


def _other_ranges(stated: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """How the ranges of a report differ from those of a line, or None."""
    for shard in sorted(stated.keys() | expected.keys()):
        if stated.get(shard) != expected.get(shard):
            has, wants = ("".join(f"[{low:,}, {high:,})" for low, high in of.get(shard, [])) or "nothing"
                          for of in (stated, expected))  # fmt: skip
            return f"of shard {shard} it has {has}, the line {wants}"
    return None


def licences(parts: Sequence[Part], shards: Mapping[str, Shard]) -> list[dict[str, Any]]:
    """Tokens by source, language, licence and revision, as the manifests of the shards that are here say.

    What no manifest states, or lies in a shard that is not here, stands under null: the tokens add up to the slot's.
    Raises Refused where a line names another source than the manifest.
    """
    tokens: dict[tuple[str, str | None, str | None, str | None], int] = {}
    for part in parts:
        if part.shard not in shards:
            unknown = part.source, None, None, None
            tokens[unknown] = tokens.get(unknown, 0) + part.tokens
            continue
        for source in shards[part.shard].sources:
            inside = min(part.stop, source.stop) - max(part.start, source.start)
            if inside <= 0:
                continue
            if source.name != part.source:
                raise Refused(
                    f"the line calls tokens [{part.start:,}, {part.stop:,}) of {part.shard} {part.source!r}, but its "
                    f"manifest {source.name!r}; propose the line again with assay data propose"
                )
            name = source.name, source.language, source.licence, source.revision
            tokens[name] = tokens.get(name, 0) + inside
    keys = ("source", "language", "licence", "revision")
    return [{**dict(zip(keys, name, strict=True)), "tokens": count} for name, count in tokens.items()]


def by_licence(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same by licence alone, most tokens first, those without a stated one last."""
    sums: dict[str | None, int] = {}
    for entry in entries:
        sums[entry["licence"]] = sums.get(entry["licence"], 0) + entry["tokens"]
    order = sorted(sums.items(), key=lambda item: (item[0] is None, -item[1], item[0] or ""))
    return [{"licence": licence, "tokens": tokens} for licence, tokens in order]
