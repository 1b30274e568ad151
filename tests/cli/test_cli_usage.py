"""A command line that is wrong is answered as every other fault is: one sentence with the value, exit 2."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from assay.cli.main import STOPS, main
from assay.data.shard import Source, write_shard


def said(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str, str]:
    monkeypatch.setattr("sys.argv", ["assay", *words.split()])
    code: object = 0
    handlers = {number: signal.getsignal(number) for number in STOPS}  # `train` keeps them to its end
    try:
        main()
    except SystemExit as left:
        code = left.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train r.yaml --run x --ranks two", "--ranks is 'two'; an integer is expected"),
        ("train r.yaml --run x --profile 0", "--profile is '0'; a number of at least 1 is expected"),
        ("train r.yaml --run x --grace soon", "--grace is 'soon'; a number is expected"),
        ("amend run --updates ten --reason x", "--updates is 'ten'; an integer is expected"),
        ("control record a b --updates 101", "--updates is '101'; a number of at most 100 is expected"),
        ("status run --copy-hours -1", "--copy-hours is '-1'; a number of at least 0 is expected"),
        ("plan", "RECIPE is missing; see assay plan --help"),
        ("plan a b", "got unexpected extra argument(s) (b); see assay plan --help"),
        ("trian r.yaml", "no such command 'trian' (did you mean 'train'?); see assay --help"),
        ("train r.yaml --rn x", "no such option: --rn (possible options: --ranks, --run); see assay train --help"),
    ],
)
def test_a_wrong_word_is_one_sentence_that_shows_it(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(words, capsys, monkeypatch) == (2, "", f"assay: {sentence}\n")


def test_scripts_get_the_sentence_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = said("plan r.yaml --ranks 2.5 --json", capsys, monkeypatch)
    told = {"ok": False, "error": "--ranks is '2.5'; an integer is expected", "exit": 2}
    assert (code, json.loads(out)) == (2, told)


def test_a_group_alone_and_the_version_are_answered_as_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = said("data", capsys, monkeypatch)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: assay data")
    assert said("--version", capsys, monkeypatch)[:1] == (0,)


def test_a_code_that_a_command_gives_is_the_process_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(
        tmp_path / "shard", [np.array([1, 2, 0], dtype=np.uint16)], vocabulary=8, tokenizer="test", end_of_text=0,
        pool="base", sources=[Source("a", 0, 3, "en", "CC0-1.0", "1")],
    )  # fmt: skip
    assert said(f"data verify {shard.path}", capsys, monkeypatch)[0] in (None, 0)
    (shard.path / "tokens.bin").write_bytes(b"\1\0\3\0\0\0")
    assert said(f"data verify {shard.path}", capsys, monkeypatch)[0] == 4
