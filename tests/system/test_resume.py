"""Interrupted and resumed runs are the uninterrupted one, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small import Project, drive

from assay.checkpoint.manifest import read_manifest
from assay.data import queue as queues
from assay.ledger.ledger import read
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status


def states(run: Path) -> dict[int, str]:
    """state_sha256 of every full checkpoint, by step."""
    return {
        item.step: str(read_manifest(run / item.folder).state_sha256)
        for item in history(RunFolder(run).ledger).standing
        if item.kind == "full"
    }


def lines(run: Path) -> dict[int, dict[str, object]]:
    """The standing metrics lines without what may differ."""
    return {update: metrics.comparable(line) for update, line in metrics.by_update(run / "metrics.jsonl").items()}


def assert_same(run: Path, whole: Path) -> None:
    """Weights, optimizer, metrics and order digest are equal wherever both have them, and at the end."""
    mine, theirs = states(run), states(whole)
    last = max(theirs)
    assert mine[last] == theirs[last]
    assert all(mine[step] == theirs[step] for step in mine.keys() & theirs.keys())
    assert lines(run) == lines(whole)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_one_and_two_resumes_equal_the_whole_run_also_at_slot_and_epoch_ends(
    project: Project, tmp_path: Path, accumulation: int
) -> None:
    recipe = project.recipe(batch={"micro": 8 // accumulation, "accumulation": accumulation, "lanes": 1})
    assert drive(recipe, tmp_path / "whole") == 0
    slot = queues.load(project.path / "data" / "queue.jsonl").slots[0]
    windows = slot.stream(7, 16).size(0)[1]
    epoch_end = -(-windows // 8)  # the update after the one that crosses slot 0's first epoch end
    assert 1 < epoch_end < slot.updates, "the slot holds an epoch's end"
    for stops in ([1], [epoch_end], [slot.updates], [23], [3, 17], [slot.updates - 1, slot.updates + 1]):
        run = tmp_path / "-".join(map(str, stops))
        for number, stop in enumerate(stops):
            assert drive(recipe, run, resume=number > 0, until=str(stop)) == 0
        assert drive(recipe, run, resume=True) == 0
        assert_same(run, tmp_path / "whole")


def test_accumulation_does_not_change_the_batches(project: Project, tmp_path: Path) -> None:
    digests = set()
    for accumulation in (1, 2, 4):
        recipe = project.recipe(batch={"micro": 8 // accumulation, "accumulation": accumulation, "lanes": 1})
        assert drive(recipe, tmp_path / str(accumulation), until="3") == 0
        digests.add(str(lines(tmp_path / str(accumulation))[2]["order_digest"]))
    assert len(digests) == 1


def test_lanes_are_joined_by_the_tree_and_resume_exactly(project: Project, tmp_path: Path) -> None:
    recipe = project.recipe(batch={"micro": 1, "accumulation": 2, "lanes": 4})
    assert drive(recipe, tmp_path / "whole") == 0
    assert drive(recipe, tmp_path / "parts", until="7") == 0
    assert drive(recipe, tmp_path / "parts", resume=True) == 0
    assert_same(tmp_path / "parts", tmp_path / "whole")


def start(recipe: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    """`assay train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run), *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_updates(process: subprocess.Popen[str], count: int) -> None:
    """Read the command's own output until it reports `count` updates."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("update ") and int(line.split()[1].replace(",", "")) >= count:
            return
    raise AssertionError("the run ended before it was interrupted")


def test_killed_then_stopped_by_a_signal_then_resumed_equals_the_whole_run(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((400, 60), (400, 60)))
    recipe = project.recipe(schedule__updates=800, checkpoint={"every": 100, "keep": "all"}, log={"every": 10})
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert drive(recipe, whole) == 0

    killed = start(recipe, run)
    wait_for_updates(killed, 130)
    (worker,) = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert killed.wait(60) == 71
    assert killed.stderr is not None
    killed.stderr.close()

    stopped = start(recipe, run, "--start", "resume")
    wait_for_updates(stopped, 450)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.stderr is not None
    output = stopped.stderr.read()
    assert stopped.wait(60) == 75, output
    stopped.stderr.close()
    assert "RESUME @ 100" in output or "RESUME @ 200" in output or "saved" in output

    last = start(recipe, run, "--start", "auto")
    assert last.stderr is not None
    assert last.wait(120) == 0, last.stderr.read()
    last.stderr.close()
    assert_same(run, whole)
    told = history(RunFolder(run).ledger)
    assert [segment.outcome for segment in told.segments] == ["failed", "interrupted", "end"]
    assert told.segments[1].cause == "signal"
    assert not told.alarms
    done_again = [line for line in metrics.read(run / "metrics.jsonl") if line["update"] in range(100, 131)]
    assert len(done_again) > 31, "updates after the checkpoint were done again, and their first lines stay"
    facts = status(RunFolder(run))
    assert (facts["state"], facts["saved"], facts["reported"]) == ("ended", 800, 800)
    assert facts["recomputed"]["updates"] == len(list(metrics.updates(run / "metrics.jsonl"))) - 800 > 0
    assert facts["recomputed"]["seconds"] > 0
    kinds = [receipt.kind for receipt in read(run / "ledger.jsonl")]
    launches = [kind for kind in kinds if kind in ("preflight", "start", "recovery")]
    assert launches == ["preflight", "start", "preflight", "recovery", "preflight", "recovery"]
    log = (run / "logs" / "segment-01" / "rank-0.log").read_text()
    assert "SCRATCH" in log


def test_a_hold_stops_a_running_run_and_stands_until_released(
    tmp_path: Path, assay: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    project = Project(tmp_path / "project", slots=((900, 120),))
    recipe = project.recipe(schedule__updates=900, checkpoint={"every": 300}, log={"every": 10})
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for_updates(process, 20)
    assert assay("stop", run, "--reason", "tests").returncode == 0
    assert process.stderr is not None
    rest = process.stderr.read()
    assert process.wait(60) == 75, rest
    process.stderr.close()
    facts = json.loads(assay("status", run, "--json").stdout)
    assert facts["state"] == "held"
    assert facts["saved"] == facts["reported"]
    refused = assay("train", recipe, "--run", run, "--start", "resume")
    assert refused.returncode == 3
    assert "assay release" in refused.stderr
    assert assay("release", run).returncode == 0
    assert json.loads(assay("status", run, "--json").stdout)["state"] == "interrupted"
    assert assay("abandon", run, "--reason", "tests").returncode == 0
    assert assay("train", recipe, "--run", run, "--start", "resume").returncode == 3
