"""Every format gives the same documents, every fault of a file is counted with its place, pieces lose nothing."""

from __future__ import annotations

import gzip
import io
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_samples import description, lines, records, source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.corpus import sources as room
from assay.corpus.admission import gate, predicates
from assay.corpus.description import Corpus, Filters, check
from assay.corpus.documents import Document, Reading, Rejected, read
from assay.corpus.sources import Piece, survey
from assay.corpus.workers import Workers
from assay.errors import DataError, InputError

RECORDS = records(60)
ROWS = 20  # rows of a row group


def pieces_of(corpus: Corpus, folder: Path) -> list[Piece]:
    with Workers(1) as workers:
        return survey(corpus, folder, workers)[1]


def items(folder: Path, **changes: Any) -> list[Document | Rejected]:
    """All items of one source."""
    corpus = check(description([source("a", **changes)], filters={}), "corpus.yaml")
    one = corpus.sources[0]
    reading = Reading.of(one, corpus.filters, None)
    return [item for piece in pieces_of(corpus, folder) for item in read(reading, piece)]


def texts(found: list[Document | Rejected]) -> list[tuple[str, str]]:
    return [(item.id, item.text) for item in found if isinstance(item, Document)]


def parquet(given_records: list[dict[str, Any]], **options: Any) -> bytes:
    """Records as parquet, `ROWS` to a row group."""
    file = io.BytesIO()
    table = pa.Table.from_pylist(given_records)
    pq.write_table(table, file, row_group_size=ROWS, compression="zstd", **options)
    return file.getvalue()


def zstd(data: bytes, frames: int = 3) -> bytes:
    """Data as so many zstd frames."""
    step = len(data) // frames + 1
    return b"".join(zstandard.ZstdCompressor().compress(data[at : at + step]) for at in range(0, len(data), step))


EXPECTED = [(record["id"], record["text"]) for record in RECORDS]


@pytest.mark.parametrize(
    ("name", "data", "changes"),
    [
        ("a.jsonl", lines(RECORDS), {}),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS)), {}),
        ("a.jsonl.zst", zstd(lines(RECORDS)), {}),
        ("a.parquet", parquet(RECORDS), {"format": "parquet"}),
    ],
)
def test_each_format_gives_the_same_documents_in_the_same_order(
    tmp_path: Path, name: str, data: bytes, changes: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(data)
    found = items(tmp_path, path=name, **changes)
    assert texts(found) == EXPECTED
    assert [(item.file, item.position) for item in found] == [(name, n) for n in range(1, 61)]


def test_a_folder_is_read_in_the_order_of_its_names_and_tells_what_it_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "deep").mkdir(parents=True)
    for name, part in (("deep/1.jsonl.zst", RECORDS[40:]), ("b.jsonl.gz", RECORDS[20:40]), ("a.jsonl", RECORDS[:20])):
        data = lines(part)
        pack = {"zst": zstd, "gz": gzip.compress}.get(name.rsplit(".", 1)[-1], bytes)
        (folder / name).write_bytes(pack(data))
    (folder / "README.md").write_text("not a document", encoding="utf-8")
    found = items(tmp_path, path="a")
    assert texts(found) == EXPECTED
    assert [item.file for item in found] == ["a.jsonl"] * 20 + ["b.jsonl.gz"] * 20 + ["deep/1.jsonl.zst"] * 20
    corpus = check(description([source("a", path="a")]), "")
    with Workers(1) as workers:
        [one], _ = survey(corpus, tmp_path, workers)
    assert (len(one.files), one.passed_over) == (3, 1)


def test_text_files_are_documents_named_by_their_path(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "b.txt").write_text("second", encoding="utf-8")
    (folder / "a.txt").write_text("first", encoding="utf-8")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"trzeci"))
    (folder / "d.txt").write_bytes(b"bad \xff byte")
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"cut" * 999)[:-9])
    found = items(tmp_path, path="a", format="text", columns={})
    assert texts(found) == [("a.txt", "first"), ("c.txt.gz", "trzeci"), ("in/b.txt", "second")]
    assert [item.title for item in found if isinstance(item, Document)] == ["a", "c", "b"]
    left = [(item.id, item.reason, item.evidence) for item in found if isinstance(item, Rejected)]
    assert left[0] == ("d.txt", "not_utf8", "invalid start byte at byte 4")
    assert left[1][:2] == ("e.txt.gz", "broken_stream")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20), st.integers(1, 90))
def test_lines_are_the_same_items_however_the_file_is_cut(tmp_path: Path, given_lines: list[bytes], size: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(given_lines))
    whole = items(tmp_path, path="a.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "PIECE_BYTES", size)
        assert items(tmp_path, path="a.jsonl") == whole


def test_row_groups_are_the_same_items_however_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(RECORDS))
    whole = items(tmp_path, path="a.parquet", format="parquet")
    corpus = check(description([source("a", path="a.parquet", format="parquet")]), "")
    assert len(pieces_of(corpus, tmp_path)) == 1
    monkeypatch.setattr(room, "PIECE_BYTES", 1)
    assert len(pieces_of(corpus, tmp_path)) == 3
    assert items(tmp_path, path="a.parquet", format="parquet") == whole


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_cut_stream_keeps_what_could_be_read_and_says_where_it_ends(tmp_path: Path, kind: str, cut: int) -> None:
    data = gzip.compress(lines(RECORDS)) if kind == "gz" else zstd(lines(RECORDS), frames=2)
    data = data[:-1] if cut == 1 else data[: len(data) * 3 // 4]
    (tmp_path / f"a.jsonl.{kind}").write_bytes(data)
    found = items(tmp_path, path=f"a.jsonl.{kind}")
    *before, last = found
    assert texts(before) == EXPECTED[: len(before)]
    assert isinstance(last, Rejected)
    assert (last.reason, last.position) == ("broken_stream", len(before) + 1)
    assert f"after line {len(before)}" in last.evidence


def test_wrong_bytes_in_a_stream_are_one_rejection(tmp_path: Path) -> None:
    for kind in ("gz", "zst"):
        (tmp_path / f"a.jsonl.{kind}").write_bytes(b"these are no compressed bytes")
        [only] = items(tmp_path, path=f"a.jsonl.{kind}")
        assert isinstance(only, Rejected)
        assert (only.reason, only.position) == ("broken_stream", 1)


def test_a_broken_row_group_costs_its_rows_by_number_and_no_others(tmp_path: Path) -> None:
    data = bytearray(parquet(RECORDS, write_page_checksum=True, use_dictionary=False))
    facts = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(1).column(3)
    assert facts.path_in_schema == "text"
    at = facts.data_page_offset + facts.total_compressed_size - 9  # behind the header with its statistics
    data[at] ^= 0xFF
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    found = items(tmp_path, path="a.parquet", format="parquet")
    assert texts(found) == EXPECTED[:20] + EXPECTED[40:]
    left = [item for item in found if isinstance(item, Rejected)]
    assert [item.position for item in left] == list(range(21, 41))
    assert {item.reason for item in left} == {"broken_row_group"}
    assert left[0].evidence.startswith("row 21, row group 1: ")


def test_a_parquet_file_without_its_end_is_one_rejection(tmp_path: Path) -> None:
    for name, data in (("cut", parquet(RECORDS)[:-40]), ("text", b"no parquet at all"), ("empty", b"")):
        (tmp_path / f"{name}.parquet").write_bytes(data)
        [only] = items(tmp_path, path=f"{name}.parquet", format="parquet")
        assert isinstance(only, Rejected)
        assert (only.reason, only.position) == ("broken_file", 0)
        assert str(tmp_path) not in only.evidence


def test_bad_utf8_in_a_parquet_cell_costs_its_row(tmp_path: Path) -> None:
    cells = [b"good", b"bad \xff", "też".encode()]
    wrong = pa.array(cells, pa.binary()).cast(pa.string(), safe=False)
    table = pa.table({"id": ["a", "b", "c"], "title": ["t"] * 3, "text": wrong})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    first, second, third = items(tmp_path, path="a.parquet", format="parquet")
    assert isinstance(second, Rejected)
    assert (second.id, second.reason, second.position) == ("b", "not_utf8", 2)
    assert "'text': invalid start byte at byte 4" in second.evidence
    assert texts([first, third]) == [("a", "good"), ("c", "też")]


def test_rows_with_other_types_and_without_values_are_rejected_by_name(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", None, "c"], "title": ["t"] * 3, "text": [None, "x", "y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = items(tmp_path, path="a.parquet", format="parquet")
    assert [getattr(item, "reason", "ok") for item in found] == ["missing_text", "missing_id", "ok"]
    pq.write_table(pa.table({"id": ["a"], "title": ["t"], "text": [["no", "text"]]}), tmp_path / "a.parquet")
    [only] = items(tmp_path, path="a.parquet", format="parquet")
    assert isinstance(only, Rejected)
    assert (only.reason, only.evidence) == ("wrong_type", "row 1: 'text' is an array, not a string")


def test_a_parquet_file_without_an_asked_column_is_told_with_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(RECORDS))
    columns = {"text": "content", "title": "title"}
    with pytest.raises(InputError, match=r"no column 'content'; it has id, page, text, title"):
        items(tmp_path, path="a.parquet", format="parquet", columns=columns)


def test_documents_without_an_id_column_are_named_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(RECORDS))
    found = items(tmp_path, path="a.parquet", format="parquet", columns={"id": None})
    assert [item.id for item in found][:2] == ["a.parquet:1", "a.parquet:2"]


def test_a_file_whose_name_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad\udcff.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(InputError, match=r"'bad\\udcff\.jsonl' in .* is not printable text"):
        items(tmp_path, path="a")


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"holds no file that ends with \.jsonl or \.ndjson"):
        items(tmp_path, path="a")


PREDICATES = [
    ({"at_least": 3.0}, 3.0, None),
    ({"at_least": 3.0}, 2.999, "column_too_low"),
    ({"at_least": 3}, 3, None),
    ({"at_most": 3}, 3.5, "column_too_high"),
    ({"at_least": 1, "at_most": 3}, 2, None),
    ({"at_least": 3}, None, "column_missing"),
    ({"at_least": 3}, "4", "column_not_numeric"),
    ({"at_least": 0}, True, "column_not_numeric"),
    ({"at_least": 0}, float("nan"), "column_not_numeric"),
    ({"at_least": 0}, float("inf"), "column_not_numeric"),
    ({"at_least": 0}, 10**400, "column_not_numeric"),
    ({"at_most": 0}, -(10**400), "column_not_numeric"),
    ({"at_least": 3.0}, Decimal("3.00"), None),
    ({"at_least": 3.0}, Decimal("2.99"), "column_too_low"),
    ({"equals": 2.5}, Decimal("2.50"), None),
    ({"equals": "web"}, "web", None),
    ({"equals": "web"}, "book", "column_differs"),
    ({"equals": 1}, True, "column_differs"),
    ({"equals": True}, True, None),
    ({"one_of": ["a", 2]}, 2, None),
    ({"one_of": ["a", 2]}, "b", "column_differs"),
    ({"one_of": ["a"]}, ["a"], "column_differs"),
]


@pytest.mark.parametrize(("asked", "value", "reason"), PREDICATES)
def test_predicates_hold_or_name_their_reason(asked: dict[str, Any], value: Any, reason: str | None) -> None:
    filters = Filters.model_validate({"columns": [{"column": "score", **asked}]})
    found = predicates({} if value is None else {"score": value}, filters)
    assert (found[0] if found else None) == reason
    assert found is None or "'score'" in found[1]


def judged(folder: Path, given_records: list[dict[str, Any]], licence: dict[str, Any], **changes: Any) -> list[str]:
    """What becomes of each record under this licence."""
    (folder / "a.jsonl").write_bytes(lines(given_records))
    corpus = check(description([source("a", licence=licence, **changes)], filters={}), "corpus.yaml")
    door = gate(corpus.sources[0], corpus, folder)
    found = []
    for piece in pieces_of(corpus, folder):
        for item in read(Reading.of(door.source, door.filters, None), piece):
            passed = door.through(item) if isinstance(item, Document) else item
            found.append(f"admitted {passed.licence}" if isinstance(passed, Document) else passed.reason)
    return found


def test_a_title_enters_only_by_its_own_admitted_record(tmp_path: Path) -> None:
    good = {"licence": "CC-BY-4.0", "evidence": "imprint", "decision": "admitted by A. B."}
    title_records = [
        {"title": "Page 0", **good},
        {"id": "en/1", **good, "decision": "refused: quotes a book in copyright"},
        {"id": "en/2", **good, "evidence": None},
        {"title": "Page 3", **good, "licence": "GPL-2.0-only"},
        {"id": "en/4", "title": "Page 0", **good},
    ]
    (tmp_path / "titles.jsonl").write_bytes(lines(title_records))
    assert judged(tmp_path, records(6), {"records": "titles.jsonl"}) == [
        "admitted CC-BY-4.0",
        "not_admitted",
        "licence_record_incomplete",
        "licence_not_admitted",
        "admitted CC-BY-4.0",
        "licence_record_missing",
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"licence": "MIT"}\n', "line 1: the record has neither id nor title"),
        (b'{"id": "x", "license": "MIT"}\n', "unknown key 'license'"),
        (b'{"id": 1}\n', "id is not a string"),
        (b'{"id": "x", "licence": "MIT"}\n{"id": "x"}\n', "line 2: id 'x' has two different records"),
        (b"[]\n", "a licence record is a JSON object"),
        (b"{\n", "line 1 is not valid JSON"),
    ],
)
def test_licence_records_that_say_nothing_clear_are_told(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "titles.jsonl").write_bytes(data)
    with pytest.raises(InputError, match=told):
        judged(tmp_path, records(1), {"records": "titles.jsonl"})


def test_a_column_may_state_the_licence_of_each_document(tmp_path: Path) -> None:
    stated = [{**record, "licence": name} for record, name in zip(records(3), ("CC-BY-4.0", "MIT", "CC0"), strict=True)]
    licence = {"evidence": "the field of each record", "decision": "admitted"}
    found = judged(tmp_path, stated, licence, columns={"title": "title", "licence": "licence"})
    assert found == ["admitted CC-BY-4.0", "licence_not_admitted", "licence_not_admitted"]


def test_a_source_may_have_filters_of_its_own(tmp_path: Path) -> None:
    scored = [{**record, "score": score} for record, score in zip(records(3), (1.5, 3.0, 4), strict=True)]
    (tmp_path / "a.jsonl").write_bytes(lines(scored))
    (tmp_path / "b.jsonl").write_bytes(lines(records(1)))
    own = {"columns": [{"column": "score", "at_least": 3.0}]}
    corpus = check(description([source("a", filters=own), source("b")], filters={"max_chars": 1}), "")
    reasons = Counter[str]()
    for piece in pieces_of(corpus, tmp_path):
        door = gate(corpus.sources[piece.source], corpus, tmp_path)
        for item in read(Reading.of(door.source, door.filters, None), piece):
            assert isinstance(item, Document)
            reasons[getattr(door.through(item), "reason", "admitted")] += 1
    assert reasons == {"column_too_low": 1, "admitted": 2, "too_long": 1}
