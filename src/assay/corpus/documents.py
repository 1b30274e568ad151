"""From source files to documents: read, normalise, admit, filter, drop exact duplicates.

Every line of a source becomes either a document or a rejection with its stage, reason and evidence;
nothing is skipped silently. It does not tokenize and writes nothing.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from assay.corpus.description import Corpus, Filters, Source
from assay.errors import DataError, InputError
from assay.files.digest import digest_file
from assay.files.reading import inside, parse_json

LINE_LIMIT = 64 << 20
Stage = Literal["read", "normalise", "admission", "filters", "duplicates"]
STAGES: tuple[Stage, ...] = ("read", "normalise", "admission", "filters", "duplicates")


@dataclass(frozen=True)
class Document:
    """One text with its name. `key` decides its side; documents with one key stay together."""

    id: str
    source: str
    text: str
    title: str | None
    key: str
    licence: str | None
    line: int


@dataclass(frozen=True)
class Rejected:
    """A document that left, by name: its place in the source when it has no usable id."""

    id: str | None
    source: str
    line: int
    stage: Stage
    reason: str
    evidence: str


def source_path(source: Source, folder: Path) -> Path:
    """The file of a source; InputError when it leaves the description's folder, DataError when it is not there."""
    path = inside(folder, source.path, f"source {source.name!r}: path")
    if not path.is_file():
        raise DataError(f"source {source.name!r}: {path} is not there; get it, or correct `path` in the description")
    return path


def source_digest(source: Source, folder: Path) -> str:
    """Digest of the source's bytes; DataError when they are not the pinned ones."""
    found = digest_file(source_path(source, folder))
    if source.sha256 is not None and found != source.sha256:
        raise DataError(
            f"source {source.name!r}: {source.path} has the digest {found}, but {source.sha256} is pinned; "
            "restore the file, or pin what was reviewed anew"
        )
    return found


def refusal(source: Source, corpus: Corpus, folder: Path) -> tuple[str, str] | None:
    """Why a whole source may not enter, as (reason, evidence); None when its licence record admits it."""
    licence = source.licence
    if licence is None:
        return "licence_record_missing", "the source has no licence record"
    for part, value in (("spdx", licence.spdx), ("evidence", licence.evidence), ("decision", licence.decision)):
        if not (value or "").strip():
            return "licence_record_incomplete", f"the licence record has no {part}"
    if licence.spdx not in corpus.admission.licences:
        allowed = ", ".join(corpus.admission.licences)
        return "licence_not_admitted", f"{licence.spdx} is not among the admitted licences: {allowed}"
    for name in licence.files:
        if not inside(folder, name, f"source {source.name!r}: licence.files").is_file():
            return "licence_record_incomplete", f"the licence file {name} is not there"
    return None


def documents(corpus: Corpus, folder: Path) -> Iterator[Document | Rejected]:
    """All documents of a corpus, sources by name, lines in their order, each admitted or rejected.

    The order of sources in the description does not matter. Memory grows with the number of
    admitted documents (32 bytes of digest and the id), not with their length.
    """
    seen: dict[bytes, str] = {}
    for source in sorted(corpus.sources, key=lambda source: source.name):
        refused = refusal(source, corpus, folder)
        for item in read(source, source_path(source, folder), corpus.validation.key):
            yield _through(item, source, corpus, refused, seen) if isinstance(item, Document) else item


def _through(
    document: Document, source: Source, corpus: Corpus, refused: tuple[str, str] | None, seen: dict[bytes, str]
) -> Document | Rejected:
    """One read document through the stages that follow."""

    def reject(stage: Stage, reason: str, evidence: str) -> Rejected:
        return Rejected(document.id, document.source, document.line, stage, reason, evidence)

    text = unicodedata.normalize(corpus.normalise, document.text)
    if not text.strip():
        return reject("normalise", "empty", "the text holds nothing but white space")
    if refused is not None:
        return reject("admission", *refused)
    spdx = source.licence.spdx if source.licence is not None else None
    if document.licence is not None and document.licence != spdx:
        return reject("admission", "licence_differs", f"states {document.licence}, but its source {spdx}")
    outside = filtered(text, corpus.filters)
    if outside is not None:
        return reject("filters", *outside)
    name = hashlib.sha256(text.encode("utf-8")).digest()
    if name in seen:
        return reject("duplicates", "exact_duplicate", f"same text as {seen[name]}")
    seen[name] = f"{document.source}: {document.id}"
    return replace(document, text=text)


def filtered(text: str, filters: Filters) -> tuple[str, str] | None:
    """The filter that a normalised text does not pass, as (reason, evidence); lengths in Unicode characters."""
    if len(text) < filters.min_chars:
        return "too_short", f"{len(text)} characters, at least {filters.min_chars} are asked for"
    if filters.max_chars is not None and len(text) > filters.max_chars:
        return "too_long", f"{len(text)} characters, at most {filters.max_chars} are asked for"
    return None


def read(source: Source, path: Path, key: str | None) -> Iterator[Document | Rejected]:
    """The lines of a JSONL file as documents, each fault as a rejection with its line and byte.

    `key`: the column whose value keeps documents together; None: the id.
    Raises DataError when the file changes while it is read.
    """
    before = path.stat()
    names: set[bytes] = set()
    with path.open("rb") as file:
        for number, start, line in _lines(file):
            item = _document(source, key, number, start, line)
            if isinstance(item, Document):
                name = hashlib.blake2b(item.id.encode("utf-8"), digest_size=16).digest()
                if name in names:
                    item = Rejected(item.id, source.name, number, "read", "repeated_id", f"{_place(number, start)}")
                names.add(name)
            yield item
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"source {source.name!r}: {path} changed while it was read; build again when it is at rest")


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """(line number from 1, byte where it starts, its bytes or None when it is longer than the limit)."""
    number = start = 0
    while line := file.readline(LINE_LIMIT):
        number += 1
        length = len(line)
        whole: bytes | None = line
        while not line.endswith(b"\n") and (line := file.readline(LINE_LIMIT)):
            whole = None
            length += len(line)
        yield number, start, whole
        start += length


def _place(number: int, start: int) -> str:
    return f"line {number}, byte {start}"


def _document(source: Source, key: str | None, number: int, start: int, line: bytes | None) -> Document | Rejected:
    """One line as a document, or what is wrong with it."""
    place = _place(number, start)

    def reject(reason: str, evidence: str, name: str | None = None) -> Rejected:
        return Rejected(name, source.name, number, "read", reason, f"{place}: {evidence}")

    if line is None:
        return reject("line_too_long", f"more than {LINE_LIMIT} bytes")
    if not line.strip():
        return reject("blank_line", "no document on it")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return reject("not_utf8", f"{error.reason} at byte {start + error.start}")
    try:
        record = parse_json(text, "the line")
    except InputError as error:
        return reject("malformed_json", str(error))
    if not isinstance(record, dict):
        return reject("wrong_type", f"the line is {_kind(record)}, not an object")
    return _from_record(source, key, number, place, record)


def _from_record(
    source: Source, key: str | None, number: int, place: str, record: dict[str, Any]
) -> Document | Rejected:
    """A document from a JSON object by the source's columns."""
    columns = source.columns
    asked = {"id": columns.id, "text": columns.text, "title": columns.title, "licence": columns.licence, "key": key}
    found: dict[str, str | None] = {}
    name = record.get(columns.id) if isinstance(record.get(columns.id), str) else None
    if name is not None and not _encodable(name):
        name = None
    for role, column in asked.items():
        value = record.get(column) if column is not None else None
        if column is not None and value is None:
            return Rejected(name, source.name, number, "read", f"missing_{role}", f"{place}: no {column!r}")
        if value is not None and not isinstance(value, str):
            evidence = f"{place}: {column!r} is {_kind(value)}, not a string"
            return Rejected(name, source.name, number, "read", "wrong_type", evidence)
        if value is not None and not _encodable(value):
            evidence = f"{place}: {column!r} holds half a surrogate pair, which is no character"
            return Rejected(name, source.name, number, "read", "bad_unicode", evidence)
        found[role] = value
    name, text = found["id"], found["text"]
    assert name is not None  # `id` and `text` always have a column
    assert text is not None
    if not name.strip():
        return Rejected(None, source.name, number, "read", "missing_id", f"{place}: {columns.id!r} is empty")
    return Document(name, source.name, text, found["title"], found["key"] or name, found["licence"], number)


def _encodable(text: str) -> bool:
    """Whether a string from JSON has a UTF-8 form; a lone surrogate escape has none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    """A JSON value's kind as its author would say it."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
