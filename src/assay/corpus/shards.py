"""From tokenized pieces to what a corpus folder holds: shards, the names of all admitted and of all rejected.

Everything is in corpus order. While the rejected are listed, every number of every piece is seen to be
admitted or rejected exactly once. Text is not seen here any more.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from assay.corpus import pieces as work
from assay.corpus.description import Corpus
from assay.corpus.pieces import Rows, Stage
from assay.corpus.selection import Quota, Taking, expect_every_language, quotas
from assay.corpus.sources import Piece
from assay.corpus.stages import IDS, INDEX, KEPT, LEFT, part_names, rejected_row
from assay.data.shard import Shard, dtype_for, little, write_shard
from assay.data.shard import Source as Range

REJECTED = "rejected.parquet"
_LISTED = [field for field in work.REJECTED if field.name != "number"]
_GROUP = 1 << 16  # rejections in a row group of the list
_COUNTED = 1 << 20  # ids that are counted at a time


@dataclass
class Counts:
    """What the documents of a shard add up to, by source."""

    admitted: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)
    lossy: Counter[tuple[str, str, int | None]] = field(default_factory=Counter)  # source, reason, byte

    def count(self, source: str, row: dict[str, Any]) -> None:
        """One more document."""
        self.admitted[source] += 1
        self.tokens[source] += row["tokens"]
        self.text_bytes[source] += row["text_bytes"]
        if row["lossy"] is not None:
            self.lossy[source, row["lossy"], row["lossy_byte"]] += 1

    def add(self, other: Counts) -> None:
        """The documents of another shard as well."""
        self.admitted.update(other.admitted)
        self.tokens.update(other.tokens)
        self.text_bytes.update(other.text_bytes)
        self.lossy.update(other.lossy)


@dataclass(frozen=True)
class Written:
    """One shard and what is in it."""

    shard: Shard
    counts: Counts


@dataclass(frozen=True)
class Part:
    """What a process needs to write one shard."""

    number: int
    corpus: Corpus
    pieces: tuple[Piece, ...]
    encoded: Stage
    target: Stage | None
    tokenizer: str
    vocabulary: int
    end_of_text: int
    folder: Path

    @property
    def name(self) -> str:
        """The shard's name."""
        return part_names(self.corpus)[self.number]


def listing(folder: Path, part: str) -> Path:
    """Where the admitted documents of a part are listed until the lists are joined."""
    return folder / f"admitted-{part}.jsonl"


def available(corpus: Corpus, pieces: list[Piece], encoded: Stage) -> Counter[tuple[int, str]]:
    """Tokens by (part, language of the source), validation included."""
    counts = Counter[tuple[int, str]]()
    for piece in pieces:
        table = work.column(encoded.opened(piece.number, INDEX), ["part", "tokens"])
        parts, tokens = table["part"].to_numpy(), table["tokens"].to_numpy()
        language = corpus.sources[piece.source].language
        for part in np.unique(parts).tolist():
            counts[part, language] += int(tokens[parts == part].sum())
    return counts


def documents_of(corpus: Corpus, pieces: list[Piece], encoded: Stage) -> Counter[int]:
    """Documents by part."""
    counts = Counter[int]()
    for piece in pieces:
        parts = work.column(encoded.opened(piece.number, INDEX), ["part"])["part"].to_numpy()
        for part, count in enumerate(np.bincount(parts.astype(np.int64), minlength=corpus.shards + 1).tolist()):
            counts[part] += count
    return counts


def select(corpus: Corpus, pieces: list[Piece], encoded: Stage, stage: Stage) -> Quota | None:
    """Let the documents go that the target or the mix has no room for; None: everything is taken.

    Raises DataError when the mix cannot be kept because a shard has nothing of a language.
    """
    tokens = available(corpus, pieces, encoded)
    expect_every_language(corpus, tokens)
    quota = quotas(corpus, tokens)
    if quota is None:
        return None
    taking = Taking(corpus, quota)
    for piece in pieces:
        source = corpus.sources[piece.source]

        def write(place: Callable[[str], Path], piece: Piece = piece) -> dict[str, Any]:
            with Rows(place(LEFT), work.REJECTED) as refused:
                columns = ["number", "id", "file", "position", "part", "tokens"]
                for row in work.rows(encoded.opened(piece.number, INDEX), columns):
                    source = corpus.sources[piece.source]
                    if not taking.take(row["part"], source.language, row["tokens"]):
                        evidence = taking.evidence(row["part"], source.language)
                        refused.add(rejected_row(row, source.name, "target", "quota_reached", evidence))
            return {"rejected": refused.count}

        if stage.receipt(piece.number) is None:
            stage.make(piece.number, write)
            continue
        gone = set(_numbers(stage.opened(piece.number, LEFT)))
        for row in work.rows(encoded.opened(piece.number, INDEX), ["number", "part", "tokens"]):
            taken = taking.take(row["part"], source.language, row["tokens"])
            assert taken == (row["number"] not in gone), "the selection of an earlier build was another one"
    return quota


def entered(encoded: Stage, target: Stage | None, piece: int) -> set[int]:
    """The numbers of the documents of a piece that enter a shard."""
    gone = set(_numbers(target.opened(piece, LEFT))) if target is not None else set()
    return set(_numbers(encoded.opened(piece, INDEX))) - gone


def write_part(part: Part) -> Written:
    """Write one shard and list its documents."""
    ranges: list[Range] = []
    sizes = array("Q")
    licences: list[set[str]] = []
    counts = Counts()
    dtype = little(dtype_for(part.vocabulary))

    def encoded() -> Iterator[NDArray[Any]]:
        reached = 0
        with listing(part.folder, part.name).open("w", encoding="utf-8", newline="\n") as file:
            for piece, row, ids in _taken(part, dtype):
                source = part.corpus.sources[piece.source]
                stop = reached + len(ids)
                if ranges and ranges[-1].name == source.name:
                    ranges[-1] = replace(ranges[-1], stop=stop)
                else:
                    ranges.append(Range(source.name, reached, stop, source.language, None, source.revision))
                    licences.append(set())
                licences[-1].add(row["licence"])
                file.write(work.as_line(_named(row, source.name, part.name, reached, stop)))
                reached = stop
                sizes.append(row["text_bytes"])
                counts.count(source.name, row)
                yield ids
        for place, found in enumerate(licences):
            # Several licences in one stretch hold together; each document's own is in the list.
            ranges[place] = replace(ranges[place], licence=" AND ".join(sorted(found)))

    shard = write_shard(
        part.folder / part.name,
        encoded(),
        vocabulary=part.vocabulary,
        tokenizer=part.tokenizer,
        end_of_text=part.end_of_text,
        pool=part.corpus.pool,
        sources=ranges,
        text_bytes=sizes,
    )
    return Written(shard, counts)


def _taken(part: Part, dtype: np.dtype[Any]) -> Iterator[tuple[Piece, dict[str, Any], NDArray[Any]]]:
    """The documents of a part with their ids, in corpus order."""
    for piece in part.pieces:
        index = part.encoded.opened(piece.number, INDEX)
        mine = work.column(index, ["part"])["part"].to_numpy() == part.number
        if not bool(mine.any()):
            continue
        gone = set(_numbers(part.target.opened(piece.number, LEFT))) if part.target is not None else set()
        with part.encoded.path(piece.number, IDS).open("rb") as file, pq.ParquetFile(index) as table:
            # A few rows at a time: a piece may be a compressed file of any size.
            for batch in table.iter_batches(1024):
                for row in batch.filter(pa.array(batch["part"].to_numpy() == part.number)).to_pylist():
                    if row["number"] not in gone:
                        file.seek(row["start"] * dtype.itemsize)
                        yield piece, row, np.frombuffer(file.read(row["tokens"] * dtype.itemsize), dtype=dtype)


def _named(row: dict[str, Any], source: str, part: str, start: int, stop: int) -> dict[str, Any]:
    """An admitted document in the list."""
    named = {
        "id": row["id"],
        "source": source,
        "file": row["file"],
        "position": row["position"],
        "title": row["title"],
        "licence": row["licence"],
        "shard": part,
        "start": start,
        "stop": stop,
        "text_bytes": row["text_bytes"],
        "lossy": row["lossy"] is not None,
    }
    if row["lossy"] is not None:
        named["lossy_reason"], named["lossy_at"] = row["lossy"], row["lossy_at"]
    return named


def _numbers(path: Path) -> list[int]:
    numbers: list[int] = work.column(path, ["number"])["number"].to_pylist()
    return numbers


def token_counts(shard: Shard) -> NDArray[np.int64]:
    """How often each id occurs in a shard, [vocabulary]."""
    counts = np.zeros(shard.vocabulary, dtype=np.int64)
    for at in range(0, shard.tokens, _COUNTED):
        counts += np.bincount(shard.ids[at : at + _COUNTED], minlength=shard.vocabulary)
    return counts


@dataclass
class Accounts:
    """What became of all documents: read by source, rejected by source, stage and reason."""

    read: Counter[str] = field(default_factory=Counter)
    rejected: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def documents(self) -> int:
        """All items of all sources."""
        return self.read.total()


def list_rejected(
    corpus: Corpus, pieces: list[Piece], cleaned: Stage, since: tuple[Stage, ...], encoded: Stage | None, path: Path
) -> Accounts:
    """Write `rejected.parquet` in corpus order and count; `since`: the stages after cleaning, in their order.

    `encoded` is the one among `since` that tokenized; None: the build went only up to the stages before it.
    Every number of a piece must be admitted or rejected once: AssertionError otherwise, because that is a bug.
    """
    accounts = Accounts()
    with pq.ParquetWriter(path, pa.schema(_LISTED), compression="zstd", compression_level=3) as writer:
        waiting: list[Any] = []
        for piece in pieces:
            source = corpus.sources[piece.source].name
            record = cleaned.receipt(piece.number)
            assert record is not None  # it was cleaned
            accounts.read[source] += record["items"]
            tables = [pq.read_table(stage.opened(piece.number, LEFT)) for stage in (cleaned, *since)]
            table = pa.concat_tables(tables).sort_by("number")
            if encoded is None:
                kept, after = cleaned.opened(piece.number, KEPT), since
            else:
                kept, after = encoded.opened(piece.number, INDEX), since[since.index(encoded) + 1 :]
            gone = [number for stage in after for number in _numbers(stage.opened(piece.number, LEFT))]
            admitted = np.setdiff1d(np.array(_numbers(kept), dtype=np.int64), np.array(gone, dtype=np.int64))
            numbers = np.sort(np.concatenate([table["number"].to_numpy(), admitted]))
            whole = np.array_equal(numbers, np.arange(record["items"]))
            assert whole, f"a document of piece {piece.number} was lost or doubled"
            for stage, reason in zip(table["stage"].to_pylist(), table["reason"].to_pylist(), strict=True):
                accounts.rejected[source, stage, reason] += 1
            waiting.append(table.drop_columns(["number"]))
            if sum(each.num_rows for each in waiting) >= _GROUP:
                writer.write_table(pa.concat_tables(waiting), row_group_size=_GROUP)
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting), row_group_size=_GROUP)
    return accounts
