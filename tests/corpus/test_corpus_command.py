"""`assay corpus` answers with one JSON object or tables, keeps progress off standard output, and exits by contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import description, lines, records, source, write

from assay.cli.main import main

REQUIRED = {"ok", "documents", "admitted", "rejected", "tokens", "by_source", "shards"}


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `assay corpus …`."""
    monkeypatch.setattr("sys.argv", ["assay", "corpus", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A description with one good source, one refused source, and one faulty line."""
    licence = {"spdx": "CC-BY-4.0", "evidence": "title page"}
    sources = [source("a"), source("b", licence=licence)]
    return write(tmp_path, description(sources), {"a": lines(records(40)) + b"{\n", "b": lines(records(3, "pl"))})


def test_build_show_and_tokenizer_answer_with_the_keys_of_the_contract(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    answers: list[dict[str, Any]] = []
    for arguments in (
        ["build", str(corpus), out],
        ["show", out],
        ["show", out, "--rejected"],
        ["tokenizer", str(corpus), str(tmp_path / "tokenizer")],
    ):
        code, printed, told = run([*arguments, "--json"], monkeypatch, capsys)
        assert code == 0
        assert printed.count("\n") == 1
        answers.append(json.loads(printed))
        if arguments[0] == "build":
            assert told.endswith(  # behind lines of progress on a slow machine
                "source b was refused with its 3 documents; "
                "licence_record_incomplete: the licence record has no decision\n"
            )
    for answer in answers:
        assert set(answer) >= REQUIRED
        assert answer["documents"] == 44
        assert answer["rejected"] == {"licence_record_incomplete": 3, "malformed_json": 1}
    assert len(answers[1]["shown"]) == 5
    assert {record["reason"] for record in answers[2]["shown"]} == {"licence_record_incomplete", "malformed_json"}


def test_the_tables_say_what_the_receipt_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    code, printed, _ = run(["build", str(corpus), out], monkeypatch, capsys)
    assert code == 0
    for word in ("duplicates", "1 malformed_json", "validation", "train-01", "nats", f"assay corpus show {out}"):
        assert word in printed.replace("\n", " ")
    code, printed, _ = run(["show", out, "--source", "a", "--count", "1"], monkeypatch, capsys)
    assert code == 0
    assert "Page " in printed
    code, printed, _ = run(["show", out, "--rejected"], monkeypatch, capsys)
    assert code == 0
    assert "line 41" in printed
    code, printed, _ = run(["tokenizer", str(corpus), str(tmp_path / "tokenizer")], monkeypatch, capsys)
    assert code == 0
    assert "300" in printed


def test_rejected_documents_are_sampled_from_all_over_and_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [{"id": f"short/{n}", "page": "s", "title": "t", "text": str(n)} for n in range(100)]
    path = write(tmp_path, description([source("a")]), {"a": lines(records(40) + short) + b"{\n"})
    out = str(tmp_path / "out")
    assert run(["build", str(path), out], monkeypatch, capsys)[0] == 0
    code, printed, _ = run(["show", out, "--rejected", "--count", "4", "--json"], monkeypatch, capsys)
    shown = json.loads(printed)["shown"]
    assert [each["reason"] for each in shown] == ["malformed_json", *["too_short"] * 4]
    assert max(each["position"] for each in shown[1:]) > 60, "not the first ones"
    assert run(["show", out, "--rejected", "--count", "4", "--json"], monkeypatch, capsys)[1] == printed
    code, printed, _ = run(["show", out, "--reason", "too_short", "--count", "2"], monkeypatch, capsys)
    assert code == 0
    assert "filters: too_short  (100 documents, 2 of them:)" in printed
    assert printed.count("characters, at least 10 are asked for") == 2
    assert "malformed_json" not in printed
    code, _, error = run(["show", out, "--reason", "too_long"], monkeypatch, capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert "there is: malformed_json, too_short" in error


def test_a_corpus_that_rejected_nothing_or_is_not_finished_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, description([source("a")]), {"a": lines(records(40))})
    (tmp_path / "out.work").mkdir()
    code, _, error = run(["show", str(tmp_path / "out")], monkeypatch, capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert "is not finished; run `assay corpus build` again" in error
    assert run(["build", str(path), str(tmp_path / "out")], monkeypatch, capsys)[0] == 0
    assert run(["show", str(tmp_path / "out"), "--rejected"], monkeypatch, capsys)[1] == "No document was rejected.\n"


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"shardz": 1}, 2, "did you mean shards?"),
        ({"admission": {"licences": ["MIT"]}}, 3, "admits no document"),
        ({"sources": [source("gone")]}, 4, "gone.jsonl is not there"),
    ],
)
def test_faults_end_with_the_codes_of_the_contract_and_one_sentence(
    change: dict[str, Any],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, {**description([source("a")]), **change}, {"a": lines(records(40))})
    found, printed, error = run(["build", str(path), str(tmp_path / "out"), "--json"], monkeypatch, capsys)
    assert found == code
    assert told in error
    assert error.count("\n") == 1
    answer = json.loads(printed)
    assert (answer["ok"], answer["exit"]) == (False, code)
    assert told in answer["error"]
    assert not (tmp_path / "out").exists()
