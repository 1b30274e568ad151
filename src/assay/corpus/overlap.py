"""How much of a new corpus is in what was consumed or queued before: exact and near documents, by source.

Compares whole documents by their token ids; the report says which positions of the earlier ones were trained
on, what could not be compared, and by which parameters. It judges nothing: who may append is the reviewer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus import duplicates
from assay.corpus.alike import STREAM, signed
from assay.corpus.duplicates import Parameters
from assay.corpus.earlier import NONE, Before, Earlier, Tell, earlier, expect_bytes, interval
from assay.data.documents import bounds, digests_of, pieces
from assay.data.exposure import Declared, union
from assay.data.queue import Queue
from assay.data.reports import OVERLAP_FORMAT
from assay.data.shard import Shard
from assay.errors import InputError
from assay.files.publish import publish_new
from assay.run.consumption import Consumption

KINDS = ("exact", "near", "fresh")
METHOD = (
    "documents are compared whole, by their token ids without end of text; exact: an earlier document has the same "
    "ids; near: no exact one, and the estimated Jaccard similarity of their runs of ids to the most similar earlier "
    "document reaches the threshold; fresh: neither. Earlier documents are those of which at least one position was "
    "trained on (consumed: targets of updates that a run or an ancestor did) or that a queue holds, if only in part. "
    "positions_consumed and positions_queued count the tokens of the new documents that some earlier copy had trained "
    "on or queued, each once; for near ones they are estimated as tokens times the earlier document's share. "
    "A document cut by the range is compared whole and counted with its tokens inside. These are source positions, "
    "not a count of unique tokens."
)


@dataclass(frozen=True)
class Range:
    """Tokens [start, stop) of a shard of the new corpus."""

    shard: Shard
    start: int
    stop: int


@dataclass
class _Sum:
    """Documents of one kind and source."""

    documents: int = 0
    tokens: int = 0
    positions_consumed: int = 0
    positions_queued: int = 0

    def add(self, tokens: int, consumed: int, queued: int) -> None:
        """One more document."""
        self.documents += 1
        self.tokens += tokens
        self.positions_consumed += consumed
        self.positions_queued += queued


def parameters(threshold: float) -> Parameters:
    """For finding documents from this estimated similarity on: below 0.75 with shorter bands, or few would be found."""
    bands, rows = (16, 8) if threshold >= Parameters.threshold else (32, 4)
    return Parameters(bands=bands, rows=rows, threshold=threshold)


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The ranges with those of one shard joined where they touch or overlap, by shard in the order given."""
    shards = {one.shard.sha256: one.shard for one in ranges}
    result = []
    for name, shard in shards.items():
        spans = union([interval(one.start, one.stop) for one in ranges if one.shard.sha256 == name])
        result += [
            Range(shard, low, high) for low, high in zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
        ]
    return result


def report(
    new: Sequence[Range],
    runs: Sequence[Consumption],
    queue: Queue | None,
    shards: Mapping[str, Shard],
    *,
    near: Parameters | None,
    unaccounted: Sequence[str] = (),
    declared: Sequence[Declared] = (),
    examples: int = 3,
    tell: Tell = lambda what, done, total: None,
) -> dict[str, Any]:
    """The report `assay-overlap/1` of the new ranges against these runs (ancestors among them) and this queue.

    `shards`: those of runs and queue that are on this machine, by digest. `unaccounted` and `declared`: ancestors
    without a ledger, which cannot be compared and are named. `examples`: how many of each source and kind.
    Raises InputError when the new shards have several tokenizers, DataError for bytes that are not what they were.
    """
    ranges = merged(new)
    tokenizers = sorted({one.shard.tokenizer for one in ranges})
    if len(tokenizers) != 1:
        raise InputError(
            f"the new shards have {len(tokenizers)} tokenizers, {', '.join(tokenizers)}; report on each alone"
        )
    before = Before.of(runs, queue)
    here = {**shards, **{one.shard.sha256: one.shard for one in ranges}}
    found = earlier(before, here, tokenizers[0], near, tell)
    sums: dict[str, dict[str, _Sum]] = {}
    shown: list[dict[str, Any]] = []
    total, done = sum(one.stop - one.start for one in ranges), 0
    parts = []
    for one in ranges:
        name = one.shard.sha256
        if name not in found.names:
            expect_bytes(one.shard)
        documents = 0
        for document in _compared(one, found):
            documents += 1
            by_kind = sums.setdefault(document.source, {kind: _Sum() for kind in KINDS})
            by_kind[document.kind].add(document.tokens, document.consumed, document.queued)
            if document.kind != "fresh" and by_kind[document.kind].documents <= examples:
                shown.append(document.facts(name, found))
        spans = [of.get(name, NONE).cut(one.start, one.stop).size for of in (before.consumed, before.queued)]
        parts.append(
            {"shard": name, "start": one.start, "stop": one.stop, "documents": documents,
             "same_range_consumed": spans[0], "same_range_queued": spans[1]}
        )  # fmt: skip
        tell("compare", done := done + one.stop - one.start, total)
    return {
        "format": OVERLAP_FORMAT,
        "parts": parts,
        "queue": None
        if queue is None
        else {"queue": queue.header_digest, "head": queue.head, "slots": len(queue.slots)},
        "runs": [run_facts(run) for run in runs],
        "total": _totals(list(sums.values())),
        "by_source": {name: _totals([by_kind]) for name, by_kind in sorted(sums.items())},
        "earlier": {
            "documents": len(found.start),
            "distinct": len(found.distinct) if near is not None else None,
            "positions_consumed": sum(spans.size for spans in before.consumed.values()),
            "positions_queued": sum(spans.size for spans in before.queued.values()),
            "shards": found.names,
        },
        "examples": shown,
        "not_compared": {
            "shards": found.apart,
            "unaccounted": list(unaccounted),
            "declared": [term.facts() for term in declared],
            "near": near is None,
        },
        "tokenizer": tokenizers[0],
        "parameters": None if near is None else _method(near),
        "method": METHOD,
    }


@dataclass(frozen=True)
class _Document:
    """One new document as it was found: its tokens inside the range, and those of them that were had before."""

    number: int
    source: str
    kind: str
    tokens: int
    consumed: int = 0
    queued: int = 0
    row: int = -1  # the earlier document
    similarity: str = "1"

    def facts(self, shard: str, found: Earlier) -> dict[str, Any]:
        """As an example."""
        place = {"shard": found.names[found.shard[self.row]], "document": int(found.number[self.row])}
        return {
            "kind": self.kind,
            "source": self.source,
            "shard": shard,
            "document": self.number,
            "tokens": self.tokens,
            "positions_consumed": self.consumed,
            "positions_queued": self.queued,
            "earlier": place,
            "similarity": self.similarity,
        }


def _compared(one: Range, found: Earlier) -> Iterator[_Document]:
    """Each document with a token in the range, in order."""
    within = bounds(one.shard, one.start, one.stop, touched=True)
    for low, high, ids in pieces(one.shard, within):
        starts, stops = within.starts[low:high], within.stops[low:high]
        first = np.maximum(starts, one.start) - starts
        last = np.minimum(stops, one.stop) - starts
        copies = dict(found.equal(digests_of(ids, starts, stops, one.shard.end_of_text)))
        others = np.array([row for row in range(high - low) if row not in copies], np.int64)
        near = _near(found, ids, starts[others] - starts[0], stops[others] - starts[0], one.shard.end_of_text)
        alike = {int(others[at]): match for at, match in near.items()}
        for row in range(high - low):
            number, source = within.first + low + row, one.shard.source_at(int(starts[row] + first[row])).name
            tokens = int(last[row] - first[row])
            if row in copies:
                consumed, queued = found.positions(copies[row], int(first[row]), int(last[row]))
                yield _Document(number, source, "exact", tokens, consumed, queued, int(copies[row][0]))
            elif row in alike:
                other, similarity = alike[row]
                length = int(found.stop[other] - found.start[other])
                had = found.positions(np.array([other]), 0, length)
                consumed, queued = (tokens * each // length for each in had)
                yield _Document(number, source, "near", tokens, consumed, queued, other, similarity)
            else:
                yield _Document(number, source, "fresh", tokens)


def _near(
    found: Earlier, ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], end_of_text: int
) -> dict[int, tuple[int, str]]:
    """Of documents ids[starts:stops], by their number here: the earlier document that is most similar, and how much."""
    if found.alike is None or not len(found.distinct) or not len(starts):
        return {}
    which, asked = signed(ids, starts, stops, end_of_text, found.alike.parameters)
    best, equal = found.alike.find(asked)
    permutations = found.alike.parameters.permutations
    return {
        int(which[at]): (int(found.distinct[best[at]]), f"{int(equal[at]) / permutations:.4f}")
        for at in np.flatnonzero(best >= 0).tolist()
    }


def _method(near: Parameters) -> dict[str, Any]:
    """What near depends on, and the share of pairs right at the threshold that a band is expected to bring together."""
    recall = f"{near.recall(near.threshold):.3f}"
    return {**duplicates.method(near), "stream": STREAM, "recall_at_threshold": recall}


def _totals(sums: Sequence[Mapping[str, _Sum]]) -> dict[str, Any]:
    """All documents and tokens, and each kind's."""
    kinds = {kind: _Sum() for kind in KINDS}
    for by_kind in sums:
        for kind, one in by_kind.items():
            into = kinds[kind]
            into.documents += one.documents
            into.tokens += one.tokens
            into.positions_consumed += one.positions_consumed
            into.positions_queued += one.positions_queued
    facts = {kind: asdict(one) for kind, one in kinds.items()}
    for key in ("positions_consumed", "positions_queued"):
        del facts["fresh"][key]  # none was, by what fresh means
    return {
        "documents": sum(one.documents for one in kinds.values()),
        "tokens": sum(one.tokens for one in kinds.values()),
        **facts,
    }


def run_facts(run: Consumption) -> dict[str, Any]:
    """What identifies the updates that one run did: no path, no host."""
    taken = run.consumed
    return {
        "run_id": run.run_id,
        "name": run.name,
        "ledger": run.ledger,
        "queue": taken.queue.header_digest,
        "head": taken.queue.head,
        "seed": taken.seed,
        "global_batch": taken.global_batch,
        "first": taken.first,
        "last": taken.last,
    }


def save(path: Path, facts: Mapping[str, Any]) -> None:
    """Publish the report as the new file `path`: the bytes that a reviewer signs by their digest."""
    data = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    publish_new(path, data.encode("utf-8"))
