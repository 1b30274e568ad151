"""Looking at a built corpus: its receipt, samples of admitted documents, rejected ones by reason.

Text is decoded from the shards, so that what is shown is what a model will see. Changes nothing.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from assay.corpus.documents import STAGES, Stage
from assay.corpus.pieces import SUFFIX, rows
from assay.corpus.receipt import ADMITTED, FORMAT, RECEIPT, TOKENIZER
from assay.corpus.shards import REJECTED
from assay.corpus.tokenizer import FILE, Tokenizer, decode, load
from assay.data.shard import Shard, open_shard
from assay.errors import DataError, InputError
from assay.files.digest import digest_file
from assay.files.reading import inside, parse_json, read_object


@dataclass(frozen=True)
class Sample:
    """An admitted document with its place and the beginning of its text as decoded from the shard."""

    id: str
    source: str
    title: str | None
    shard: str
    tokens: int
    text: str


def receipt(out: Path) -> dict[str, Any]:
    """The receipt of a built corpus; InputError when `out` is none, DataError when its lists were changed."""
    if not out.exists() and out.with_name(out.name + SUFFIX).is_dir():
        raise InputError(f"the build of {out} is not finished; run `assay corpus build` again: it goes on where it was")
    if not out.is_dir():
        raise InputError(f"{out} is not a folder; name the OUT of `assay corpus build`")
    record = read_object(out / RECEIPT, "the receipt of a corpus")
    if record.get("format") != FORMAT:
        raise InputError(f"{out / RECEIPT}: format is {record.get('format')!r}; {FORMAT} is expected")
    files = record.get("files")
    if not isinstance(files, dict):
        raise InputError(f"{out / RECEIPT}: the key 'files' is missing; build the corpus again")
    for name in (ADMITTED, REJECTED):
        path = out / name
        if not path.is_file():
            raise DataError(f"{path} is missing; build the corpus again")
        if digest_file(path) != files.get(name):
            raise DataError(f"{path} is not the file that {RECEIPT} names by digest; build the corpus again")
    return record


def samples(out: Path, count: int, source: str | None = None, characters: int = 400) -> list[Sample]:
    """`count` admitted documents, of one source if asked, always the same ones of a corpus, in listed order."""
    facts = receipt(out)
    _expect_source(facts, source, out)
    chosen = heapq.nsmallest(
        count,
        (record for record in records(out / ADMITTED) if source in (None, record["source"])),
        key=lambda record: hashlib.sha256(f"{record['source']}\0{record['id']}".encode()).digest(),
    )
    tokenizer = load(out / TOKENIZER / FILE, facts["tokenizer"]["end_of_text"])
    shards = {name: open_shard(inside(out, name, "shard")) for name in {record["shard"] for record in chosen}}
    chosen.sort(key=lambda record: (record["shard"], record["start"]))
    return [_sample(record, shards[record["shard"]], tokenizer, characters) for record in chosen]


def rejected(
    out: Path, count: int, source: str | None = None, reason: str | None = None
) -> tuple[dict[tuple[str, str], int], list[dict[str, Any]]]:
    """How many documents left by (stage, reason), stages in order, and `count` of each with its evidence.

    Always the same ones of a corpus, from all over it. Raises InputError for a source or reason that it has not.
    """
    facts = receipt(out)
    _expect_source(facts, source, out)
    if reason is not None and reason not in facts["rejected"]:
        known = ", ".join(facts["rejected"]) or "nothing was rejected"
        raise InputError(f"{out} has no document that left as {reason!r}; there is: {known}")
    left = Counter[tuple[str, str]]()
    chosen: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by a number that looks random, the largest first
    shown: dict[int, dict[str, Any]] = {}
    for place, record in enumerate(rows(out / REJECTED, size=4096)):
        if source not in (None, record["source"]) or reason not in (None, record["reason"]):
            continue
        name = record["stage"], record["reason"]
        left[name] += 1
        mine = chosen.setdefault(name, [])
        heapq.heappush(mine, (-_drawn(record), place))
        shown[place] = record
        if len(mine) > count:
            del shown[heapq.heappop(mine)[1]]

    def order(stage: str, reason: str) -> tuple[int, str]:
        return STAGES.index(cast(Stage, stage)), reason

    by_reason = dict(sorted(left.items(), key=lambda item: order(*item[0])))
    in_order = [shown[place] for place in sorted(shown)]
    return by_reason, sorted(in_order, key=lambda record: order(record["stage"], record["reason"]))


def _drawn(record: dict[str, Any]) -> int:
    """A number that looks random and depends on the document alone."""
    name = f"{record['source']}\0{record['file']}\0{record['position']}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _sample(record: dict[str, Any], shard: Shard, tokenizer: Tokenizer, characters: int) -> Sample:
    ids = shard.ids[record["start"] : record["stop"]]
    text = decode(tokenizer, (int(i) for i in ids))
    cut = text if len(text) <= characters else text[: characters - 1] + "…"
    return Sample(record["id"], record["source"], record["title"], record["shard"], len(ids), cut)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a list that `receipt` has compared with its digest."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            record = parse_json(line, f"{path}, line {number}")
            assert isinstance(record, dict)
            yield record


def _expect_source(facts: dict[str, Any], source: str | None, out: Path) -> None:
    known = sorted(facts.get("by_source") or {})
    if source is not None and source not in known:
        raise InputError(f"{out} has no source {source!r}; it has {', '.join(known)}")
