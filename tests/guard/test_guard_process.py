"""`assay guard` beside a run that `assay launch` keeps: the price rises, and the run is saved, held and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from small import Project

from assay.files.publish import publish_file
from assay.ledger.ledger import read
from assay.release.verify import verify
from assay.run.folder import RunFolder
from assay.run.owner import release

Assay = Callable[..., subprocess.CompletedProcess[str]]


def started(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if wanted(line):
            return
    raise AssertionError("it ended before: " + "".join(seen[-20:]))


def trace(path: Path, usd: str) -> None:
    """One zone that costs `usd` an hour, from an hour ago until tomorrow."""
    now = datetime.now(UTC)
    rows = [(now - timedelta(hours=1), usd), (now + timedelta(days=1), usd)]
    lines = [f"{time.isoformat()},here,1,{price}\n" for time, price in rows]
    publish_file(path, ("time,zone,available,usd_per_hour\n" + "".join(lines)).encode())


def test_a_price_above_the_ceiling_saves_holds_and_stops_a_real_run(tmp_path: Path, assay: Assay) -> None:
    project = Project(tmp_path / "project", slots=((20_000, 4000),))
    project.recipe(schedule__updates=20_000, evaluate={"every": None}, checkpoint={"every": 5000, "keep": "all"})
    run = project.path / "runs" / "one"
    prices, policy, heard = tmp_path / "prices.csv", tmp_path / "policy.yaml", tmp_path / "heard.jsonl"
    trace(prices, "1")
    tee = [sys.executable, "-c", f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read() + chr(10))"]
    rules: dict[str, Any] = {
        "name": "tests", "machine": {"gpus": 1, "through": {"local": True}},
        "prices": [{"csv": {"path": "prices.csv", "zone": "here"}}], "interval_seconds": 1, "window_seconds": 300,
        "readings": 2, "ceiling": {"usd_per_billion_positions": "1000000"}, "jump_factor": "100000000000",
        "alarms": [{"command": {"argv": tee}, "on": ["stop"]}],
    }  # fmt: skip
    policy.write_text(json.dumps(rules))
    (project.path / "launch.yaml").write_text(json.dumps({"recipe": "recipe.yaml", "run": "runs/one", "gpus": 1}))

    launched = started("launch", project.path / "launch.yaml", "--json")
    until(launched, lambda line: line.startswith("update "))
    guard = started("guard", run, "--policy", policy, "--json")
    until(guard, lambda line: line.startswith("guard: guarding"))
    trace(prices, "1000000000")
    out, told = launched.communicate(timeout=120)
    until(guard, lambda line: line.startswith("guard: prove: done"))
    guard.send_signal(signal.SIGTERM)
    answer = json.loads(guard.communicate(timeout=60)[0])

    assert launched.returncode == 75, told
    assert json.loads(out)["cause"] == "guard"
    assert (answer["listing"], answer["billing_ended"], answer["hold"]) == ("stopped", True, "guard")
    assert answer["readings"] > 2
    assert answer["positions"] > 0
    assert answer["interruptions"] == 1
    receipts = list(read(run / "ledger.jsonl"))
    steps = [
        (one.body["action"], one.body["state"])
        for one in receipts
        if one.kind == "guard" and one.body["action"] in ("save", "copy", "stop", "prove")
    ]
    assert steps == [(step, state) for step in ("save", "copy", "stop", "prove") for state in ("asked", "done")]
    kinds = [one.kind for one in receipts]
    saves = [at for at, kind in enumerate(kinds) if kind == "checkpoint.saved"]
    assert saves[0] < kinds.index("hold") < saves[1] < kinds.index("interrupted"), (
        "saved, and trained on until the hold"
    )
    assert not [claim for claim in verify(run).claims if claim.result == "failed"]
    (heard_of,) = map(json.loads, heard.read_text().splitlines())
    assert heard_of["alarm"] == "stop"
    refused = assay("launch", project.path / "launch.yaml")
    assert refused.returncode == 3
    assert "assay release" in refused.stderr
    release(RunFolder(run), None)
