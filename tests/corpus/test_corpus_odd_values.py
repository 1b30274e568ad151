"""Values and files that a library cannot give, or gives too much of, cost their document and no others."""

from __future__ import annotations

import gzip
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_samples import built, description, left, lines, records, source

from assay.corpus import documents as room
from assay.corpus.description import check
from assay.corpus.documents import Document, Reading, Rejected, read
from assay.corpus.sources import survey
from assay.corpus.workers import Workers
from assay.errors import InputError

LATE = 1 << 60  # microseconds: some 36,000 years, where Python's dates end with the year 9999


def items(folder: Path, column: str | None = None, **changes: Any) -> list[Document | Rejected]:
    """All items of one source; `column` is looked at by a predicate."""
    asked = {} if column is None else {"columns": [{"column": column, "at_least": 3}]}
    corpus = check(description([source("a", columns={}, **changes)], filters=asked), "corpus.yaml")
    reading = Reading.of(corpus.sources[0], corpus.filters, None)
    with Workers(1) as workers:
        _, pieces = survey(corpus, folder, workers)
    return [item for piece in pieces for item in read(reading, piece)]


def rows(folder: Path, name: str, values: Any) -> None:
    """Three rows of parquet, with these values in a column of this name."""
    table = pa.table({"id": ["a", "b", "c"], "text": ["one", "two", "three"]})
    at = table.column_names.index(name) if name in table.column_names else None
    table = table.append_column(name, values) if at is None else table.set_column(at, name, values)
    pq.write_table(table, folder / "a.parquet", use_dictionary=False)


@pytest.mark.parametrize(
    ("name", "values", "reason", "told"),
    [
        ("text", pa.array([b"good", b"bad \xff", b"fine"]).cast(pa.binary_view()).view(pa.string_view()),
         "not_utf8", "'text': invalid start byte at byte 4"),
        ("made", pa.array([0, LATE, 1], pa.timestamp("us")), "broken_value", "'made': "),
        ("made", pa.array([[b"x"], [b"\xff"], []]).cast(pa.list_(pa.string()), safe=False), "not_utf8", "'made': "),
    ],
)  # fmt: skip
def test_a_parquet_value_that_cannot_be_had_costs_its_row(
    tmp_path: Path, name: str, values: Any, reason: str, told: str
) -> None:
    rows(tmp_path, name, values)
    first, second, third = items(tmp_path, "made", path="a.parquet", format="parquet")
    assert isinstance(first, Document)
    assert isinstance(third, Document)
    assert isinstance(second, Rejected)
    assert (second.id, second.position, second.stage, second.reason) == ("b", 2, "read", reason)
    assert second.evidence.startswith(f"row 2: {told}")


def test_scores_of_any_kind_of_number_are_compared_and_one_that_is_none_is_counted(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": [str(number) for number in range(20)],
            "text": [f"the text number {number}, of a length that is enough" for number in range(20)],
            "score": pa.array([Decimal(number) / 4 for number in range(20)], pa.decimal128(9, 2)),
        }
    )
    pq.write_table(table, tmp_path / "b.parquet")
    long = (
        b'{"id": "long", "page": "1", "title": "t", "text": "a text of some length", "score": 1' + b"0" * 400 + b"}\n"
    )
    scored = {"columns": [{"column": "score", "at_least": 3}]}
    sources = [source("a", filters=scored), source("b", path="b.parquet", format="parquet", columns={}, filters=scored)]
    data = lines([{**record, "score": 4} for record in records(20)]) + long
    facts = built(tmp_path, description(sources, shards=1, validation={"fraction": 0.3}), {"a": data})
    assert facts["rejected"] == {"column_not_numeric": 1, "column_too_low": 12}
    [refused] = [row for row in left(tmp_path / "out") if row["source"] == "a"]
    assert (refused["id"], refused["position"], refused["reason"]) == ("long", 21, "column_not_numeric")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["one"]), pa.array(["other"])]
    pq.write_table(pa.table(columns, names=["id", "text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet has two columns 'text'; rename or drop one"):
        items(tmp_path, path="a.parquet", format="parquet")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_a_compressed_file_of_no_bytes_is_counted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    [only] = items(tmp_path, path=name, format="text" if ".txt" in name else "jsonl")
    assert isinstance(only, Rejected)
    assert (only.file, only.position, only.reason) == (name, 1, "broken_stream")


def test_a_few_bytes_that_decompress_to_very_many_are_read_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LINE_LIMIT", 1 << 20)
    data = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28)) + zstandard.compress(b"\n" + lines(records(2)))
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert len(data) < 1 << 15
    tracemalloc.start()
    first, *rest = items(tmp_path, path="a.jsonl.zst")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(first, Rejected)
    assert first.reason == "line_too_long"
    assert [item.id for item in rest if isinstance(item, Document)] == ["en/0", "en/1"]
    assert peak < 1 << 26  # of 1 << 28 bytes


@pytest.mark.parametrize(("name", "packed"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_the_byte_order_mark_that_begins_a_file_is_no_part_of_its_first_line(
    tmp_path: Path, name: str, packed: Any
) -> None:
    mark = "\ufeff".encode()
    one, two, three = lines(records(3)).splitlines(keepends=True)
    (tmp_path / name).write_bytes(packed(mark + one + two + mark + three))
    first, second, third = items(tmp_path, path=name)
    assert [first.id, second.id] == ["en/0", "en/1"]
    assert isinstance(third, Rejected)  # inside a file it is no mark
    (tmp_path / name).write_bytes(packed(mark + b'{"id": "\xff"}\n'))
    [only] = items(tmp_path, path=name)
    assert isinstance(only, Rejected)
    assert only.evidence.endswith("at byte 11")  # 3 of the mark, 8 before the wrong one


def test_a_text_file_loses_its_byte_order_mark_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeff\ufeffone".encode())
    [only] = items(tmp_path, path="a.txt", format="text")
    assert isinstance(only, Document)
    assert only.text == "\ufeffone"
