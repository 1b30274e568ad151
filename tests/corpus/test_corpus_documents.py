"""Every line of a source becomes a document or a rejection that names it, whatever its bytes are."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import description, lines, records, source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.corpus import documents as room
from assay.corpus.admission import gate
from assay.corpus.description import Corpus, Source, check
from assay.corpus.documents import Document, Reading, Rejected, read
from assay.corpus.sources import survey
from assay.corpus.workers import Workers
from assay.errors import DataError, InputError

SOURCE = Source.model_validate(source("a"))
GOOD = b'{"id": "x", "title": "t", "text": "a text", "page": "1"}'
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)


def items(folder: Path, data: bytes, name: str = "a.jsonl", **changes: Any) -> list[Document | Rejected]:
    """The items of one source with these bytes."""
    (folder / name).write_bytes(data)
    one = Source.model_validate(source("a", path=name, **changes))
    with Workers(1) as workers:
        _, pieces = survey(check(description([one.model_dump()]), "corpus.yaml"), folder, workers)
    return [item for piece in pieces for item in read(Reading(one, "page" if one.format != "text" else None), piece)]


@pytest.mark.parametrize(
    ("line", "reason", "evidence"),
    [
        (b'{"id": "x", "text": ', "malformed_json", "line 2, byte 57"),
        (b'{"id": "x", "text": "' + b"\xc5", "not_utf8", "at byte 78"),
        (b"\xff\xfe", "not_utf8", "at byte 57"),
        (b"   ", "blank_line", "line 2"),
        (b"[1, 2]", "wrong_type", "the line is an array"),
        (b'"text"', "wrong_type", "the line is a string"),
        (b"12", "wrong_type", "the line is a number"),
        (b"null", "wrong_type", "the line is null"),
        (b'{"title": "t", "text": "a", "page": "1"}', "missing_id", "no 'id'"),
        (b'{"id": " ", "title": "t", "text": "a", "page": "1"}', "missing_id", "'id' is empty"),
        (b'{"id": 7, "title": "t", "text": "a", "page": "1"}', "wrong_type", "'id' is a number"),
        (b'{"id": "y", "title": "t", "page": "1"}', "missing_text", "no 'text'"),
        (b'{"id": "y", "title": "t", "text": null, "page": "1"}', "missing_text", "no 'text'"),
        (b'{"id": "y", "title": "t", "text": ["a"], "page": "1"}', "wrong_type", "'text' is an array"),
        (b'{"id": "y", "title": "t", "text": "a"}', "missing_key", "no 'page'"),
        (b'{"id": "y", "title": true, "text": "a", "page": "1"}', "wrong_type", "'title' is a boolean"),
        (b'{"id": "y", "title": "t", "text": "\\ud800", "page": "1"}', "malformed_json", "surrogate"),
        (b'{"id": "y", "id": "z", "title": "t", "text": "a", "page": "1"}', "malformed_json", "twice"),
        (b'{"id": "y", "title": "t", "text": "a", "page": NaN}', "malformed_json", "NaN"),
        (b'{"id": "y", "text": ' + b"[" * 100_000, "malformed_json", "nested"),
        (b'{"id": "y", "text": ' + b"9" * 5000 + b"}", "malformed_json", "JSON"),
    ],
)
def test_a_faulty_line_is_a_rejection_with_its_position(
    tmp_path: Path, line: bytes, reason: str, evidence: str
) -> None:
    first, second, third = items(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD.replace(b'"x"', b'"w"') + b"\n")
    assert isinstance(first, Document)
    assert isinstance(second, Rejected)
    assert isinstance(third, Document)
    assert (second.stage, second.reason, second.position) == ("read", reason, 2)
    assert evidence in second.evidence
    assert (first.position, third.position) == (1, 3)


def test_a_line_over_the_limit_is_rejected_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LINE_LIMIT", 100)
    long = GOOD.replace(b"a text", b"a" * 500)
    found = items(tmp_path, long + b"\n" + GOOD + b"\n" + long)
    assert [getattr(item, "reason", "admitted") for item in found] == ["line_too_long", "admitted", "line_too_long"]
    assert isinstance(found[2], Rejected)
    assert found[2].evidence.startswith(f"line 3, byte {len(long) + len(GOOD) + 2}")


def test_line_ends_of_windows_and_a_missing_last_newline_lose_nothing(tmp_path: Path) -> None:
    found = items(tmp_path, GOOD + b"\r\n" + GOOD.replace(b'"x"', b'"w"'))
    assert [item.id for item in found if isinstance(item, Document)] == ["x", "w"]


@FOLDER
@given(st.lists(st.binary(max_size=60).filter(lambda line: b"\n" not in line), max_size=12))
def test_any_bytes_give_one_item_a_line(tmp_path: Path, given_lines: list[bytes]) -> None:
    found = items(tmp_path, b"".join(line + b"\n" for line in given_lines))
    assert [item.position for item in found] == list(range(1, len(given_lines) + 1))


@FOLDER
@given(st.binary(min_size=1, max_size=4), st.integers(0, 400))
def test_damage_in_a_file_costs_at_most_the_lines_that_it_touches(tmp_path: Path, damage: bytes, at: int) -> None:
    whole = lines(records(8))
    damaged = whole[:at] + damage + whole[at + len(damage) :]
    before = {item.position: item for item in items(tmp_path, whole)}
    found = items(tmp_path, damaged)
    assert len(found) == len(damaged.rstrip(b"\n").split(b"\n"))
    untouched = [item for item in before.values() if b"\n" + lines([records(8)[item.position - 1]]) in b"\n" + damaged]
    assert {item.id for item in untouched} <= {item.id for item in found if isinstance(item, Document)}


def passed(folder: Path, texts: list[str], **changes: Any) -> list[Document | Rejected]:
    """Documents with these texts through all that looks at a document alone."""
    named = [{"id": str(n), "title": "t", "text": text, "page": str(n)} for n, text in enumerate(texts)]
    (folder / "a.jsonl").write_bytes(lines(named))
    return through(check(description([source("a")], **{"filters": {}, **changes}), "corpus.yaml"), folder)


def through(corpus: Corpus, folder: Path) -> list[Document | Rejected]:
    """All items of a corpus in order, judged one by one."""
    with Workers(1) as workers:
        _, pieces = survey(corpus, folder, workers)
    found = []
    for piece in pieces:
        door = gate(corpus.sources[piece.source], corpus, folder)
        for item in read(Reading.of(door.source, door.filters, corpus.validation.key), piece):
            found.append(door.through(item) if isinstance(item, Document) else item)
    return found


@FOLDER
@given(st.lists(st.text(max_size=12), max_size=10))
def test_texts_come_out_in_nfc_and_the_sum_is_the_input(tmp_path: Path, texts: list[str]) -> None:
    encodable = [text.encode("utf-8", "ignore").decode() for text in texts]
    found = passed(tmp_path, encodable)
    admitted = [item.text for item in found if isinstance(item, Document)]
    assert len(found) == len(texts)
    assert all(unicodedata.is_normalized("NFC", text) for text in admitted)
    expected = [unicodedata.normalize("NFC", text) for text in encodable if text.strip()]
    assert admitted == [text for text in expected if text.strip()]


def test_lengths_count_characters_after_normalisation(tmp_path: Path) -> None:
    texts = ["ó" * 9, "ó" * 10, "ó" * 20, "ó" * 21]
    decomposed = [unicodedata.normalize("NFD", text) for text in texts]
    found = passed(tmp_path, decomposed, filters={"min_chars": 10, "max_chars": 20})
    assert [getattr(item, "reason", "admitted") for item in found] == ["too_short", "admitted", "admitted", "too_long"]


@pytest.mark.parametrize(
    ("licence", "reason"),
    [
        (None, "licence_record_missing"),
        ({"spdx": "CC-BY-4.0", "decision": "admitted"}, "licence_record_incomplete"),
        ({"spdx": "CC-BY-4.0", "evidence": "  ", "decision": "admitted"}, "licence_record_incomplete"),
        ({"spdx": "CC-BY-4.0", "evidence": "title page"}, "licence_record_incomplete"),
        ({"evidence": "title page", "decision": "admitted"}, "licence_record_incomplete"),
        ({"spdx": "GPL-2.0-only", "evidence": "label", "decision": "admitted"}, "licence_not_admitted"),
        ({"spdx": "CC-BY-4.0", "evidence": "e", "decision": "refused: quotes books"}, "not_admitted"),
        (
            {"spdx": "CC-BY-4.0", "evidence": "e", "decision": "admitted", "files": ["gone.txt"]},
            "licence_record_incomplete",
        ),
    ],
)
def test_a_source_without_a_sound_licence_record_is_refused_whole_and_by_name(
    tmp_path: Path, licence: Any, reason: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(records(5)))
    (tmp_path / "b.jsonl").write_bytes(lines(records(5, "pl")))
    corpus = check(description([source("a", licence=licence), source("b")]), "corpus.yaml")
    found = through(corpus, tmp_path)
    refused = [item for item in found if isinstance(item, Rejected)]
    assert {(item.source, item.stage, item.reason) for item in refused} == {("a", "admission", reason)}
    assert [item.id for item in refused] == [f"en/{n}" for n in range(5)]
    assert {item.source for item in found if isinstance(item, Document)} == {"b"}


def test_a_document_under_another_licence_than_its_source_does_not_enter(tmp_path: Path) -> None:
    given_records = [{**record, "licence": "CC-BY-4.0"} for record in records(3)]
    given_records[1]["licence"] = "CC-BY-NC-4.0"
    (tmp_path / "a.jsonl").write_bytes(lines(given_records))
    one = source("a", columns={"title": "title", "licence": "licence"})
    found = through(check(description([one]), "corpus.yaml"), tmp_path)
    assert [getattr(item, "reason", "admitted") for item in found] == ["admitted", "licence_differs", "admitted"]


def test_a_source_that_is_not_there_or_leaves_the_folder_is_told(tmp_path: Path) -> None:
    corpus = check(description([source("a")]), "corpus.yaml")
    with pytest.raises(DataError, match="source 'a'"):
        through(corpus, tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.jsonl"
    outside.write_bytes(GOOD)
    (tmp_path / "a.jsonl").symlink_to(outside)
    with pytest.raises(InputError, match="through a link"):
        through(corpus, tmp_path)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(records(3)))
    with Workers(1) as workers:
        _, [piece] = survey(check(description([source("a")]), "corpus.yaml"), tmp_path, workers)
    reading = read(Reading(SOURCE, None), piece)
    next(reading)
    path.write_bytes(lines(records(4)))
    with pytest.raises(DataError, match="changed while it was read"):
        list(reading)


def test_evidence_can_be_written_as_json(tmp_path: Path) -> None:
    for item in items(tmp_path, b'{"id": "\\udfff", "title": "t", "text": "a", "page": "1"}\n\xff\n'):
        assert isinstance(item, Rejected)
        json.dumps([item.id, item.evidence], ensure_ascii=False).encode("utf-8")
