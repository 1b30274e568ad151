"""From a piece of a source to documents: JSON Lines (plain, gzip, zstd), parquet, plain text files.

Every line, row or file becomes either a document or a rejection with its position, reason and evidence;
nothing is skipped silently. It does not judge what it reads and writes nothing.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

import zstandard

from assay.corpus.description import Filters, Source
from assay.corpus.sources import File, Piece, asked_columns, fault_of
from assay.errors import DataError, InputError
from assay.files.reading import parse_json

LINE_LIMIT = 64 << 20  # bytes of a line or of a text file
BATCH_ROWS = 256
_ARROW_BYTES = 1 << 20
_ZSTD_BYTES = 256  # compressed bytes at a time: they hold 64 blocks at most, which is 8 MiB of text
_MARK = "\ufeff"  # the byte order mark that some editors begin a file with
_EMPTY = "the file is empty, not even a compressed stream of nothing"
Stage = Literal[
    "read",
    "normalise",
    "admission",
    "language",
    "filters",
    "duplicates",
    "decontamination",
    "near duplicates",
    "tokenize",
    "target",
]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Document:
    """One text with its name. `key` decides its side; documents with one key stay together.

    `position` counts lines or rows of `file` from 1. `values`: what the predicates look at.
    """

    id: str
    source: str
    text: str
    title: str | None
    key: str
    licence: str | None
    file: str
    position: int
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejected:
    """A document that left, by name: its place in the source when it has no usable id."""

    id: str | None
    source: str
    file: str
    position: int
    stage: Stage
    reason: str
    evidence: str


def reject(document: Document, stage: Stage, reason: str, evidence: str) -> Rejected:
    """The document's rejection."""
    return Rejected(document.id, document.source, document.file, document.position, stage, reason, evidence)


@dataclass(frozen=True)
class Reading:
    """How the records of a source become documents: its columns, the key, the columns that predicates look at."""

    source: Source
    key: str | None
    values: tuple[str, ...] = ()

    @staticmethod
    def of(source: Source, filters: Filters, key: str | None) -> Reading:
        """For a source under these filters; `key`: the column that keeps documents together, None: the id."""
        return Reading(source, key, tuple(sorted({predicate.column for predicate in filters.columns})))


def read(reading: Reading, piece: Piece) -> Iterator[Document | Rejected]:
    """The documents of a piece in their order, each fault as a rejection with its position.

    Raises DataError when a file is not what it was when it was hashed.
    """
    for file in piece.files:
        _expect_same(reading.source, file)
        if piece.kind == "lines":
            with file.path.open("rb") as plain:
                plain.seek(piece.start)
                yield from _lines(reading, file, plain, piece.first, piece.start, piece.stop)
        elif piece.kind == "stream":
            yield from _stream(reading, file)
        elif piece.kind == "groups":
            yield from _groups(reading, file, piece)
        elif piece.kind == "texts":
            yield _text(reading, file)
        else:
            evidence = f"the file cannot be read: {piece.fault}"
            yield Rejected(None, reading.source.name, file.name, 0, "read", "broken_file", evidence)
        _expect_same(reading.source, file)


def _expect_same(source: Source, file: File) -> None:
    try:
        state = file.path.stat()
    except OSError as error:
        raise DataError(f"source {source.name!r}: {file.path} is gone: {error.strerror}; restore it") from None
    if (state.st_size, state.st_mtime_ns) != (file.bytes, file.mtime):
        raise DataError(
            f"source {source.name!r}: {file.path} changed while it was read; build again when it is at rest"
        )


def _lines(
    reading: Reading, file: File, data: BinaryIO, number: int, start: int, stop: int | None
) -> Iterator[Document | Rejected]:
    """Lines from `start` up to the byte `stop`, or to the end of the stream."""
    while (stop is None or start < stop) and (line := data.readline(LINE_LIMIT)):
        length = len(line)
        whole: bytes | None = line
        while not line.endswith(b"\n") and (line := data.readline(LINE_LIMIT)):
            whole = None
            length += len(line)
        yield _from_line(reading, file.name, number, start, whole)
        number += 1
        start += length


def _stream(reading: Reading, file: File) -> Iterator[Document | Rejected]:
    """Lines of a compressed file; where the stream breaks, one rejection says so."""
    number, start = 0, 0
    if not file.bytes:
        yield Rejected(None, reading.source.name, file.name, 1, "read", "broken_stream", _EMPTY)
        return
    faults = (OSError, EOFError, zlib.error, zstandard.ZstdError)
    with _decompressed(file.path) as data:
        while True:
            try:
                line = data.readline(LINE_LIMIT)
                length = len(line)
                whole: bytes | None = line
                while line and not line.endswith(b"\n") and (line := data.readline(LINE_LIMIT)):
                    whole = None
                    length += len(line)
            except faults as error:
                evidence = f"after line {number}: {fault_of(error)}; nothing behind it can be read"
                source = reading.source.name
                yield Rejected(None, source, file.name, number + 1, "read", "broken_stream", evidence)
                return
            if not length:
                return
            number += 1
            yield _from_line(reading, file.name, number, start, whole)
            start += length


@contextmanager
def _decompressed(path: Path) -> Iterator[BinaryIO]:
    """A compressed file's bytes; a cut stream raises EOFError."""
    with path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as inner:
                yield cast(BinaryIO, inner)
        else:
            with io.BufferedReader(cast(io.RawIOBase, _Zstd(file)), 1 << 20) as buffered:
                yield cast(BinaryIO, buffered)


class _Zstd(io.RawIOBase):
    """The frames of a zstd file one after another; unlike the library's reader it notices a cut frame.

    The library gives out at once all that its input holds, so the input is what bounds the memory.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        """True: it is only read."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target`; 0 at the end. Raises EOFError for a cut frame, ZstdError for wrong bytes."""
        while not self._ready:
            rest = b"" if self._frame is None or not self._frame.eof else self._frame.unused_data
            data = rest or self._file.read(_ZSTD_BYTES)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed stream ends in the middle of a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(data)
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _text(reading: Reading, file: File) -> Document | Rejected:
    """A text file as one document, named by its path below the source."""
    name, source = file.name, reading.source.name

    def refuse(reason: str, evidence: str) -> Rejected:
        return Rejected(name, source, name, 1, "read", reason, evidence)

    if file.path.suffix in (".gz", ".zst"):
        if not file.bytes:
            return refuse("broken_stream", _EMPTY)
        try:
            with _decompressed(file.path) as stream:
                data = stream.read(LINE_LIMIT + 1)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            return refuse("broken_stream", fault_of(error))
    else:
        with file.path.open("rb") as plain:
            data = plain.read(LINE_LIMIT + 1)
    if len(data) > LINE_LIMIT:
        return refuse("text_too_long", f"more than {LINE_LIMIT} bytes")
    try:
        text = data.decode("utf-8").removeprefix(_MARK)
    except UnicodeDecodeError as error:
        return refuse("not_utf8", f"{error.reason} at byte {error.start}")
    title = name.rsplit("/", 1)[-1].split(".")[0] or name
    return Document(name, source, text, title, name, None, name, 1)


def _groups(reading: Reading, file: File, piece: Piece) -> Iterator[Document | Rejected]:
    """The rows of row groups; rows that cannot be read are rejected one by one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = asked_columns(reading.source, reading.key)
    wanted = [*columns, *(column for column in reading.values if column not in columns)]
    row = piece.first
    with pq.ParquetFile(file.path, page_checksum_verification=True, buffer_size=_ARROW_BYTES) as parquet:
        names = set(parquet.schema_arrow.names)
        present = [column for column in wanted if column in names]
        for group in range(piece.start, piece.stop):
            stop = row + parquet.metadata.row_group(group).num_rows
            fault = "the pages hold fewer rows than the footer states"
            try:
                for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=present):
                    for record in _records(batch):
                        yield _from_row(reading, file.name, row, record)
                        row += 1
            except (pa.ArrowException, OSError) as error:
                fault = fault_of(error)
            while row < stop:
                evidence = f"row {row}, row group {group}: {fault}"
                yield Rejected(None, reading.source.name, file.name, row, "read", "broken_row_group", evidence)
                row += 1


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a record batch; strings as bytes, because parquet does not promise that they are UTF-8.

    A value that Python cannot hold stands as `_Unreadable`: a date of the year 100,000, a bad byte deep in a list.
    """
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        elif pa.types.is_string_view(column.type):
            column = column.cast(pa.binary_view())
        columns.append(_values(column))
    names = batch.schema.names
    for values in zip(*columns, strict=True) if columns else ({} for _ in range(batch.num_rows)):
        yield dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class _Unreadable:
    """A value of a row that cannot be had, and why."""

    reason: str
    fault: str


def _values(column: Any) -> list[Any]:
    """The values of an Arrow column; one by one where they cannot be had all together."""
    import pyarrow as pa

    # What as_py is seen to raise: UnicodeDecodeError is a ValueError, an unknown time zone a KeyError.
    faults = (pa.ArrowException, ValueError, OverflowError, KeyError)
    try:
        values: list[Any] = column.to_pylist()
    except faults:
        values = []
        for value in column:
            try:
                values.append(value.as_py())
            except faults as error:
                reason = "not_utf8" if isinstance(error, UnicodeDecodeError) else "broken_value"
                values.append(_Unreadable(reason, fault_of(error)))
    return values


def _from_row(reading: Reading, file: str, row: int, record: dict[str, Any]) -> Document | Rejected:
    """One row as a document, or what is wrong with it."""

    def refuse(column: str, reason: str, fault: str) -> Rejected:
        name = record.get(reading.source.columns.id or "")
        known = name if isinstance(name, str) else None
        return Rejected(known, reading.source.name, file, row, "read", reason, f"row {row}: {column!r}: {fault}")

    for column, value in record.items():
        if isinstance(value, _Unreadable):
            return refuse(column, value.reason, value.fault)
        if isinstance(value, bytes):
            try:
                record[column] = value.decode("utf-8")
            except UnicodeDecodeError as error:
                return refuse(column, "not_utf8", f"{error.reason} at byte {error.start} of its value")
    return _from_record(reading, file, row, f"row {row}", record)


def _from_line(reading: Reading, file: str, number: int, start: int, line: bytes | None) -> Document | Rejected:
    """One line as a document, or what is wrong with it."""
    place = f"line {number}, byte {start}"

    def refuse(reason: str, evidence: str) -> Rejected:
        return Rejected(None, reading.source.name, file, number, "read", reason, f"{place}: {evidence}")

    if line is None:
        return refuse("line_too_long", f"more than {LINE_LIMIT} bytes")
    # Anywhere else than at the start of the file the mark is text.
    bare = line.removeprefix(_MARK.encode("utf-8")) if start == 0 else line
    if not bare.strip():
        return refuse("blank_line", "no document on it")
    try:
        text = bare.decode("utf-8")
    except UnicodeDecodeError as error:
        return refuse("not_utf8", f"{error.reason} at byte {start + len(line) - len(bare) + error.start}")
    try:
        record = parse_json(text, "the line")
    except InputError as error:
        return refuse("malformed_json", str(error))
    if not isinstance(record, dict):
        return refuse("wrong_type", f"the line is {_kind(record)}, not an object")
    return _from_record(reading, file, number, place, record)


def _from_record(reading: Reading, file: str, position: int, place: str, record: dict[str, Any]) -> Document | Rejected:
    """A document from a record by the source's columns."""
    columns, source = reading.source.columns, reading.source.name
    asked = {"id": columns.id, "text": columns.text, "title": columns.title, "licence": columns.licence,
             "key": reading.key}  # fmt: skip
    found: dict[str, str | None] = {}
    given = record.get(columns.id) if columns.id is not None else f"{file}:{position}"
    name = given if isinstance(given, str) else None

    def refuse(reason: str, evidence: str) -> Rejected:
        return Rejected(name, source, file, position, "read", reason, f"{place}: {evidence}")

    for role, column in asked.items():
        value = record.get(column) if column is not None else None
        if column is not None and value is None:
            return refuse(f"missing_{role}", f"no {column!r}")
        if value is not None and not isinstance(value, str):
            return refuse("wrong_type", f"{column!r} is {_kind(value)}, not a string")
        found[role] = value
    text = found["text"]
    assert name is not None  # a record without one was refused above
    assert text is not None
    if not name.strip():
        return Rejected(None, source, file, position, "read", "missing_id", f"{place}: {columns.id!r} is empty")
    values = {column: record[column] for column in reading.values if column in record}
    return Document(
        name, source, text, found["title"], found["key"] or name, found["licence"], file, position, values
    )  # fmt: skip


def _kind(value: object) -> str:
    """A JSON value's kind as its author would say it."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
