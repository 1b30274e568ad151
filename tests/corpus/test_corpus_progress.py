"""Whoever waits sees how far a build is: a bar on a terminal, plain lines elsewhere, the time of what took long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_samples import description, lines, records, source, write

from assay.cli.progress import amount, clock
from assay.corpus.build import build
from assay.corpus.description import load

HALFWAY = """
import sys
import assay.cli.progress as progress
progress.SHOW_AFTER = 0.05
with progress.progress() as tell:
    tell("sign", 1500, 3000, "documents")
    sys.stdin.readline()
    tell("train", 0, None, "documents")
"""


@pytest.mark.parametrize(
    ("done", "total", "unit", "words"),
    [
        (12_345, 20_000, "documents", "12,345 of 20,000 documents"),
        (1_500_000, 3_000_000, "bytes", "1.5 of 3.0 MB"),
        (1_500, 9_000, "bytes", "1.5 of 9.0 kB"),
        (7, None, "documents", "7 documents"),
        (0, None, "documents", ""),
    ],
)
def test_amounts_are_told_in_words(done: int, total: int | None, unit: str, words: str) -> None:
    assert amount(done, total, unit) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:00"), (67, "1:07"), (3723, "1:02:03"), (-1, "0:00")])
def test_times_are_told_as_on_a_clock(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_a_terminal_shows_a_bar_with_percent_and_keeps_a_line_of_what_is_done() -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", HALFWAY],
        stdin=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as child:
        os.close(theirs)
        seen = ""
        while "50 %" not in seen:
            seen += os.read(ours, 4096).decode("utf-8", "replace")
        child.communicate(b"\n")
        assert child.returncode == 0
        while part := _read(ours):
            seen += part
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"sign ━+[╸╺ ]?━* +50 % 1,500 of 3,000 documents \d+:\d\d", plain)
    assert re.search(r"sign  3,000 documents  \d+:\d\d\r?\n", plain)


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode("utf-8", "replace")
    except OSError:  # the other side has gone
        return ""


def test_elsewhere_plain_lines_say_the_same_also_while_nothing_is_told() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HALFWAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        seen = [child.stderr.readline() for _ in range(3)]  # nobody tells anything between them
        printed, rest = child.communicate("\n")
    assert all(
        re.fullmatch(r"sign: 50 % \(1,500 of 3,000 documents\), \d+:\d\d, about \d+:\d\d left\n", x) for x in seen
    )
    assert (child.returncode, printed) == (0, "")
    assert "\x1b" not in rest


def test_every_stage_tells_how_far_it_is_up_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen\n")
    asked = {"duplicates": {"near": {"threshold": 0.9}}, "decontamination": {"held_out": ["held-out.txt"]}}
    given = description([source("a"), source("b", language="pl")], **asked)
    told: dict[str, list[tuple[int, int | None, str]]] = {}

    def tell(stage: str, done: int, total: int | None, unit: str) -> None:
        told.setdefault(stage, []).append((done, total, unit))

    facts = build(
        load(write(tmp_path, given, {"a": lines(records(40)), "b": lines(records(40, "pl"))})), tmp_path / "out", tell
    )
    size = sum(path.stat().st_size for path in tmp_path.glob("?.jsonl"))
    assert told["hash the sources"][-1] == (size, size, "bytes")
    assert told["read and admit"][-1] == (size, size, "bytes")
    for stage in ("exact duplicates", "sign", "decontaminate"):
        assert told[stage][-1] == (80, 80, "documents")
    assert told["tokenize"][-1] == told["write shards"][-1] == (facts["admitted"], facts["admitted"], "documents")
    for stage, steps in told.items():
        counts = [done for done, _, _ in steps]
        assert counts == sorted(counts), stage
        assert all(total is None or done <= total for done, total, _ in steps), stage
