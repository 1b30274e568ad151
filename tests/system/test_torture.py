"""Every file operation may be the last: kills, lost memory, full and read-only disks, a vanished mount, a cut ledger.

The trials are forks of one script (see `torture`); each ends in the very bits, metrics and receipts of the run
that nobody disturbed. The thin selection is for every change, the dense one for CI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("torture.py")
APPENDING = {"what": "appending", "every": 1, "kinds": ["kill", "torn", "power"]}


def trials(folder: Path, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The script's answers."""
    path = folder / "plans.json"
    path.write_text(json.dumps(plans))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_whatever_ends_a_process_it_comes_back_to_the_same_bits(tmp_path: Path) -> None:
    answers = trials(tmp_path, [
        {"what": "training", "first": 3, "every": 23, "kinds": ["kill"]},
        {"what": "training", "first": 5, "every": 71, "kinds": ["power", "full", "gone"]},
        {"what": "training", "first": 2, "every": 12, "kinds": ["torn"]},
        APPENDING,
        {"what": "cut", "every": 149},
    ])  # fmt: skip
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    assert answers[0]["ended"]["kill"] >= 12
    assert answers[1]["ended"]["power"] >= 4
    assert answers[1]["ended"]["full"] >= 3, "a full disk is exit 71"
    assert answers[2]["ended"]["torn"] >= 5
    assert answers[3]["ended"]["kill"] == answers[3]["operations"] >= 2
    assert {0, 3} == set(answers[4]["codes"])


@pytest.mark.kills
@pytest.mark.parametrize(
    ("plans", "least"),
    [
        ([{"what": "training", "every": 2, "kinds": ["kill"]}, APPENDING], 170),
        ([
            {"what": "training", "first": 1, "every": 4, "kinds": ["power"]},
            {"what": "training", "first": 1, "every": 1, "kinds": ["torn"]},
            {"what": "training", "first": 4, "every": 23, "kinds": ["full", "read-only", "gone"]},
            {"what": "cut", "every": 71},
        ], 130),
    ],
    ids=["kills", "lost bytes"],
)  # fmt: skip
def test_three_hundred_kills_lose_nothing(tmp_path: Path, plans: list[dict[str, Any]], least: int) -> None:
    answers = trials(tmp_path, plans)
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    ended = [answer.get("ended", {}) for answer in answers]
    assert sum(one.get(kind, 0) for one in ended for kind in ("kill", "power", "torn")) >= least
