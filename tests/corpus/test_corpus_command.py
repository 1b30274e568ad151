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
            assert told == (
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
