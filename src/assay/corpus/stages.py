"""The stages of a build, each from pieces to pieces: clean, exact duplicates, decontamination, tokens.

Every function here makes one piece (in any process) or walks over all of them in corpus order. What leaves is
written down with the number that it had in its piece, so that nothing can leave twice or be lost.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus import pieces as work
from assay.corpus import reserved
from assay.corpus import tokenizer as tokenizers
from assay.corpus.admission import Gate, gate
from assay.corpus.decontamination import Contamination, HeldOut
from assay.corpus.description import Corpus
from assay.corpus.documents import Document, Reading, Rejected, read
from assay.corpus.pieces import Rows, Stage
from assay.corpus.reserved import Reserved
from assay.corpus.sources import Piece
from assay.corpus.tokenizer import Tokenizer
from assay.data.shard import dtype_for, little
from assay.files.reading import inside

VALIDATION = "validation"
KEPT, LEFT, INDEX, IDS = "documents.parquet", "rejected.parquet", "tokens.parquet", "ids.bin"
FINDINGS = "findings.parquet"
_NAMED = 512  # names of documents in memory at a time


def part_names(corpus: Corpus) -> list[str]:
    """The shards of a corpus: `train-00`, `train-01`, … and `validation`."""
    return [*(f"train-{number:02}" for number in range(corpus.shards)), VALIDATION]


def part_of(key: str, corpus: Corpus) -> str:
    """The shard of all documents with this key: a function of the key and the description, of nothing else."""
    return part_names(corpus)[_part(key, corpus)]


def _part(key: str, corpus: Corpus) -> int:
    if _share(VALIDATION, key) < int(corpus.validation.fraction * 2**64):
        return corpus.shards
    return _share("shard", key) % corpus.shards


def _share(purpose: str, key: str) -> int:
    """A number below 2^64 that looks random and depends on purpose and key alone."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{key}".encode()).digest()[:8], "big")


def left(number: int, item: Rejected) -> dict[str, Any]:
    """A rejection as a row."""
    return {"number": number, **item.__dict__}


# --- clean: read → normalise → admission → language → filters


@dataclass(frozen=True)
class Clean:
    """What a process needs to clean one piece."""

    corpus: Corpus
    folder: Path
    stage: Stage
    piece: Piece


_GATES: dict[tuple[Path, int], Gate] = {}  # of this process, by stage and source: title records are read once
_RESERVED: dict[Path, Reserved] = {}  # of this process, by stage


def _gate(task: Clean) -> Gate:
    name = task.stage.folder, task.piece.source
    if task.stage.folder not in _RESERVED:
        _RESERVED.clear()
        _RESERVED[task.stage.folder] = reserved.read(task.corpus.admission.reserved, task.corpus.pool, task.folder)
    if name not in _GATES:
        if len(_GATES) >= 16:
            _GATES.clear()
        source = task.corpus.sources[task.piece.source]
        _GATES[name] = gate(source, task.corpus, task.folder, _RESERVED[task.stage.folder])
    return _GATES[name]


def clean(task: Clean) -> dict[str, Any]:
    """Read one piece and let through what may enter; the receipt says how many items there were."""

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        door = _gate(task)
        reading = Reading.of(door.source, door.filters, task.corpus.validation.key)
        number = -1
        with Rows(place(KEPT), work.DOCUMENTS) as kept, Rows(place(LEFT), work.REJECTED) as refused:
            for number, item in enumerate(read(reading, task.piece)):
                passed = door.through(item) if isinstance(item, Document) else item
                if isinstance(passed, Document):
                    kept.add(_row(number, passed, task.piece.source), len(passed.text))
                else:
                    refused.add(left(number, passed))
        return {"items": number + 1, "kept": kept.count, "rejected": refused.count}

    return task.stage.make(task.piece.number, write)


def _row(number: int, document: Document, source: int) -> dict[str, Any]:
    name = hashlib.blake2b(f"{source}\0{document.id}".encode(), digest_size=16).digest()
    text = hashlib.sha256(document.text.encode("utf-8")).digest()[:16]
    return {
        "number": number,
        "id": document.id,
        "file": document.file,
        "position": document.position,
        "title": document.title,
        "key": document.key,
        "licence": document.licence,
        "id_digest": name,
        "text_digest": text,
        "text": document.text,
    }


# --- what is still in


@dataclass(frozen=True)
class Standing:
    """The cleaned pieces and the stages that let documents go since."""

    cleaned: Stage
    since: tuple[Stage, ...] = ()

    def gone(self, piece: int) -> set[int]:
        """Numbers of the documents of a piece that left since it was cleaned."""
        numbers = set[int]()
        for stage in self.since:
            numbers.update(work.column(stage.opened(piece, LEFT), ["number"])["number"].to_pylist())
        return numbers

    def rows(self, piece: int, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
        """These columns of the documents of a piece that are still in; always with `number`."""
        gone = self.gone(piece)
        for row in work.rows(self.cleaned.opened(piece, KEPT), ["number", *columns]):
            if row["number"] not in gone:
                yield row

    def then(self, stage: Stage) -> Standing:
        """As this, after one more stage."""
        return Standing(self.cleaned, (*self.since, stage))


def rejected_row(row: dict[str, Any], source: str, stage: str, reason: str, evidence: str) -> dict[str, Any]:
    """The rejection of a document of a piece; `row` has number, id, file and position."""
    named = {name: row[name] for name in ("number", "id", "file", "position")}
    return {**named, "source": source, "stage": stage, "reason": reason, "evidence": evidence}


# --- exact duplicates


def firsts(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each row of 128-bit digests, [n, 2], the index of the first row that is equal: [n]."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal rows stay in their order
    ordered = digests[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first_of = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))] if len(order) else order
    result = np.empty(len(order), dtype=np.int64)
    result[order] = first_of
    return result


def exact_duplicates(
    corpus: Corpus, pieces: list[Piece], standing: Standing, stage: Stage, told: Callable[[int], None] = lambda _: None
) -> None:
    """Let every document go whose id or text an earlier one of the corpus has.

    About 110 bytes a document of the corpus are held for the while: 16 of digests, the rest to sort them.
    """
    if all(stage.receipt(piece.number) is not None for piece in pieces):
        return
    counts = [work.count(standing.cleaned.opened(piece.number, KEPT)) for piece in pieces]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    first_name = firsts(_digests(pieces, standing.cleaned, "id_digest", starts))
    told(int(starts[-1]) // 4)
    own = np.arange(len(first_name))
    first_text = own.copy()
    if corpus.duplicates.exact:
        valid = np.flatnonzero(first_name == own)  # a second document of one id does not make its text taken
        first_text[valid] = valid[firsts(_digests(pieces, standing.cleaned, "text_digest", starts)[valid])]
    told(int(starts[-1]) // 2)  # the other half is writing
    doubled = (first_name != own) | (first_text != own)
    wanted = np.unique(np.concatenate([first_name[first_name != own], first_text[first_text != own]]))
    columns = ["number", "id", "file", "position"]
    with _names(corpus, pieces, standing.cleaned, starts, wanted) as name:

        def leaving(piece: Piece) -> Iterator[dict[str, Any]]:
            begin, end = int(starts[piece.number]), int(starts[piece.number + 1])
            at = np.flatnonzero(doubled[begin:end]) + begin
            source = corpus.sources[piece.source].name
            table = work.column(standing.cleaned.opened(piece.number, KEPT), columns).take(at - begin)
            rows = (row for batch in table.to_batches(_NAMED) for row in batch.to_pylist())
            for index, row in zip(at.tolist(), rows, strict=True):
                if first_name[index] != index:
                    reason, evidence = "repeated_id", f"same id as {name(int(first_name[index]))}"
                else:
                    reason, evidence = "exact_duplicate", f"same text as {name(int(first_text[index]))}"
                yield rejected_row(row, source, "duplicates", reason, evidence)

        for piece in pieces:
            leave(stage, piece, leaving(piece))
            told((int(starts[-1]) + int(starts[piece.number + 1])) // 2)


def leave(stage: Stage, piece: Piece, leaving: Iterable[dict[str, Any]]) -> None:
    """Make a piece of a stage that lets these documents go."""

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        with Rows(place(LEFT), work.REJECTED) as refused:
            for row in leaving:
                refused.add(row)
        return {"rejected": refused.count}

    stage.make(piece.number, write)


def _digests(pieces: list[Piece], cleaned: Stage, name: str, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A column of 16-byte values of all pieces as [n, 2]; piece p begins at `starts[p]`."""
    values = np.empty((int(starts[-1]), 2), dtype=np.uint64)
    for piece in pieces:
        at = int(starts[piece.number])
        for chunk in work.column(cleaned.opened(piece.number, KEPT), [name])[name].chunks:
            found = np.frombuffer(chunk.buffers()[1], dtype="<u8").reshape(-1, 2)
            values[at : at + len(chunk)] = found[chunk.offset : chunk.offset + len(chunk)]
            at += len(chunk)
    return values


@contextmanager
def _names(
    corpus: Corpus, pieces: list[Piece], cleaned: Stage, starts: NDArray[np.int64], wanted: NDArray[np.int64]
) -> Iterator[Callable[[int], str]]:
    """How to call the documents at these places of the corpus, `wanted` ascending.

    The names wait in a file of the work folder: of each only where it ends is held, 8 bytes.
    """
    ends, reached = np.zeros(len(wanted) + 1, dtype=np.int64), 0
    with TemporaryFile(dir=cleaned.folder) as file:
        for piece in pieces:
            begin, end = int(starts[piece.number]), int(starts[piece.number + 1])
            first, last = np.searchsorted(wanted, (begin, end)).tolist()
            if first == last:
                continue
            source = corpus.sources[piece.source].name
            table = work.column(cleaned.opened(piece.number, KEPT), ["id", "position"]).take(wanted[first:last] - begin)
            at = first
            for batch in table.to_batches(_NAMED):
                for row in batch.to_pylist():
                    reached += file.write(f"{source}: {row['id']} at {row['position']}".encode())
                    at += 1
                    ends[at] = reached

        def name(index: int) -> str:
            at = int(np.searchsorted(wanted, index))
            file.seek(int(ends[at]))
            return file.read(int(ends[at + 1] - ends[at])).decode()

        yield name


# --- decontamination


@dataclass(frozen=True)
class Decontaminate:
    """What a process needs to look for held-out items in one piece."""

    corpus: Corpus
    folder: Path
    standing: Standing
    stage: Stage
    piece: Piece


_HELD_OUT: dict[Path, HeldOut] = {}  # of this process, by stage


def held_out(corpus: Corpus, folder: Path) -> HeldOut:
    """The held-out sets of a description; InputError for one that cannot be read."""
    asked = corpus.decontamination
    assert asked is not None  # only asked for where there are some
    paths = [inside(folder, path, "decontamination.held_out") for path in asked.held_out]
    return HeldOut.load(paths, asked.fields, asked.n, asked.near)


def decontaminate(task: Decontaminate) -> dict[str, Any]:
    """Let the documents of one piece go that hold a held-out item; what was found stands beside them."""

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        if task.stage.folder not in _HELD_OUT:
            _HELD_OUT.clear()
            _HELD_OUT[task.stage.folder] = held_out(task.corpus, task.folder)
        sets = _HELD_OUT[task.stage.folder]
        source = task.corpus.sources[task.piece.source].name
        looked = 0
        with Rows(place(LEFT), work.REJECTED) as refused, Rows(place(FINDINGS), work.FINDINGS) as findings:
            for row in task.standing.rows(task.piece.number, ["id", "file", "position", "text"]):
                looked += 1
                found = sets.find(row["text"])
                if not found:
                    continue
                reason = f"held_out_{found[0].kind}"
                refused.add(rejected_row(row, source, "decontamination", reason, found[0].evidence()))
                for one in found:
                    findings.add({"number": row["number"], "document": f"{source}: {row['id']}", **one.__dict__})
        return {"documents": looked, "rejected": refused.count}

    return task.stage.make(task.piece.number, write)


def found_items(corpus: Corpus, folder: Path, pieces: list[Piece], stage: Stage) -> tuple[HeldOut, int]:
    """The held-out sets with all findings recorded in corpus order, and how many documents left."""
    sets, documents = held_out(corpus, folder), 0
    for piece in pieces:
        by_number = dict[int, list[Contamination]]()
        names = dict[int, str]()
        for row in work.rows(stage.opened(piece.number, FINDINGS)):
            number = row.pop("number")
            names[number] = row.pop("document")
            by_number.setdefault(number, []).append(Contamination(**row))
        for number, findings in by_number.items():
            sets.record(names[number], findings)
        documents += len(by_number)
    return sets, documents


# --- tokens


@dataclass(frozen=True)
class Tokenize:
    """What a process needs to tokenize one piece."""

    corpus: Corpus
    tokenizer: Path
    name: str  # of the tokenizer, in messages
    standing: Standing
    stage: Stage
    piece: Piece


_TOKENIZERS: dict[tuple[Path, str], Tokenizer] = {}


def _tokenizer(task: Tokenize) -> Tokenizer:
    name = task.tokenizer, task.corpus.end_of_text
    if name not in _TOKENIZERS:
        _TOKENIZERS.clear()
        _TOKENIZERS[name] = tokenizers.from_bytes(task.tokenizer.read_bytes(), task.corpus.end_of_text, task.name)
    return _TOKENIZERS[name]


def tokenize(task: Tokenize) -> dict[str, Any]:
    """Encode one piece: the ids of its documents one after another, an index of them, those that left as lossy."""

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        tokenizer = _tokenizer(task)
        dtype = little(dtype_for(tokenizer.vocabulary))
        source = task.corpus.sources[task.piece.source].name
        columns = ["id", "file", "position", "title", "key", "licence", "text"]
        reached = 0
        with (
            place(IDS).open("wb") as ids_file,
            Rows(place(INDEX), work.TOKENS) as index,
            Rows(place(LEFT), work.REJECTED) as refused,
        ):
            for batch in batches(task.standing.rows(task.piece.number, columns)):
                coded = tokenizers.round_trip(tokenizer, [row["text"] for row in batch])
                for row, (ids, lossy) in zip(batch, coded, strict=True):
                    if lossy is not None and task.corpus.lossy == "reject":
                        what = "behind its end" if lossy.byte is None else f"0x{lossy.byte:02x}"
                        evidence = f"{lossy.reason} from byte {lossy.at} ({what}) when decoded"
                        refused.add(rejected_row(row, source, "tokenize", "lossy", evidence))
                        continue
                    ids_file.write(ids.astype(dtype).tobytes())
                    index.add(
                        {
                            **{name: row[name] for name in ("number", "id", "file", "position", "title", "licence")},
                            "part": _part(row["key"], task.corpus),
                            "start": reached,
                            "tokens": len(ids),
                            "text_bytes": len(row["text"].encode("utf-8")),
                            "lossy": lossy.reason if lossy is not None else None,
                            "lossy_at": lossy.at if lossy is not None else None,
                            "lossy_byte": lossy.byte if lossy is not None else None,
                        }
                    )
                    reached += len(ids)
        return {"documents": index.count, "tokens": reached, "rejected": refused.count}

    return task.stage.make(task.piece.number, write)


def batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Documents in lists of about `tokenizer.BATCH_CHARACTERS`, in their order."""
    batch: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row["text"])
        if size >= tokenizers.BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def training_texts(corpus: Corpus, pieces: list[Piece], standing: Standing) -> Iterator[str]:
    """The training documents (never validation) in corpus order."""
    for piece in pieces:
        for row in standing.rows(piece.number, ["key", "text"]):
            if _part(row["key"], corpus) != corpus.shards:
                yield row["text"]


def part_counts(corpus: Corpus, pieces: list[Piece], standing: Standing) -> Counter[str]:
    """How many documents each part would get."""
    names, counts = part_names(corpus), Counter[str]()
    for piece in pieces:
        for row in standing.rows(piece.number, ["key"]):
            counts[names[_part(row["key"], corpus)]] += 1
    return counts
