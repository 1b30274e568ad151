"""Where a run must stop, saved: its data end, or the decay begins that it was meant not to have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small import GLOBAL_BATCH, Project, drive, shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from assay.data import queue as queues
from assay.data.shard import open_shard
from assay.release.verify import verify
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status


def append(project: Project, updates: int, epochs: int, lacking: Path | None = None) -> None:
    """A third slot on a shard of its own, whose tokens lie at `lacking` by then."""
    place = project.path / "data" / "train-2"
    if not place.exists():
        shard(place, 44, 2)
    path = project.path / "data" / "queue.jsonl"
    queue = queues.load(path)
    parts = queues.parts_of(queue, open_shard(place))
    line = queues.propose(queue, global_batch=GLOBAL_BATCH, updates=updates, epochs=epochs, parts=parts)
    if lacking is not None:
        (place / "tokens.bin").rename(lacking)
    queues.append(path, line, global_batch=GLOBAL_BATCH)


def test_exhaustion_is_exit_4_and_an_appended_slot_continues_as_if_it_had_been_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short, whole = Project(tmp_path / "short"), Project(tmp_path / "whole")
    run = tmp_path / "run"
    assert drive(short.recipe(schedule__updates=34), run) == 4
    assert "10 more updates" not in capfd.readouterr().err, "only what the next update needs is missing for sure"
    facts = status(RunFolder(run))
    assert (facts["state"], facts["saved"], facts["reported"], facts["prepared"]) == ("failed", 24, 24, 24)
    assert drive(short.recipe(schedule__updates=34), run, resume=True) == 4, "nothing was appended meanwhile"

    append(short, 10, 2)
    assert drive(short.recipe(schedule__updates=34), run, resume=True) == 0
    append(whole, 10, 2)
    assert drive(whole.recipe(schedule__updates=34), tmp_path / "straight") == 0
    mine, theirs = (metrics.by_update(path / "metrics.jsonl") for path in (run, tmp_path / "straight"))
    assert {u: metrics.comparable(line) for u, line in mine.items()} == {
        u: metrics.comparable(line) for u, line in theirs.items()
    }
    told = history(RunFolder(run).ledger)
    assert [receipt.body["slot"] for receipt in told.slots] == [0, 1, 2]


def test_a_waiting_run_takes_up_the_slot_that_is_appended(tmp_path: Path) -> None:
    away, told = tmp_path / "away", list[str]()
    project, run = Project(tmp_path / "project"), tmp_path / "run"
    recipe = project.recipe(
        schedule__updates=30,
        data={"queue": "data/queue.jsonl", "validation": "data/validation", "seed": 7, "when_missing": "wait"},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.startswith("waiting for the data of slot 2"):
                told.append(line)
                if len(told) == 1:
                    append(project, 6, 1, away)
                else:
                    away.rename(project.path / "data" / "train-2" / "tokens.bin")
        assert process.wait(120) == 0
    assert len(told) == 2
    assert "train-2/tokens.bin" in told[1], "what keeps it from going on is told, once"
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["code"], outcome["step"]) == (0, 30)


def test_a_consumed_slot_with_other_bytes_is_refused(project: Project, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", project.recipe(schedule__updates=34)
    assert drive(recipe, run) == 4
    path = project.path / "data" / "queue.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    append(project, 30, 9)
    assert drive(recipe, run, resume=True) == 4
    assert history(RunFolder(run).ledger).segments[-1].outcome == "failed"


def test_an_intent_of_no_decay_stops_saved_where_the_decay_begins(project: Project, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", project.recipe(schedule__intent="no-decay")
    assert drive(recipe, run) == 3
    facts = status(RunFolder(run))
    assert (facts["reported"], facts["saved"]) == (18, 18), "24 updates less a quarter"
    assert all(line["lr"] == 0.003 for line in metrics.read(run / "metrics.jsonl") if line["update"] >= 3)
    assert drive(recipe, run, resume=True) == 3, "a resume does not slip past the boundary"


def test_a_run_killed_before_its_first_checkpoint_says_that_it_begins_again(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, run = project.recipe(), tmp_path / "run"
    child = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import os, threading
from pathlib import Path
from small import drive
from assay.run.metrics import MetricsWriter
write_out = MetricsWriter.write_out
def killed(self):
    write_out(self)
    if self.path.stat().st_size > 1500: os._exit(9)
MetricsWriter.write_out = killed
drive(Path({str(recipe)!r}), Path({str(run)!r}))
"""
    assert subprocess.run([sys.executable, "-c", child], check=False, capture_output=True).returncode == 9
    before = metrics.by_update(run / "metrics.jsonl")
    assert 0 < len(before) < 6, "some updates were done, and no checkpoint was saved"
    assert drive(recipe, run, resume=True) == 0
    assert "no full checkpoint was saved before the interruption" in capfd.readouterr().err
    after = metrics.by_update(run / "metrics.jsonl")
    assert all(metrics.comparable(after[update]) == metrics.comparable(line) for update, line in before.items())
    assert not history(RunFolder(run).ledger).alarms


@pytest.mark.parametrize("steps", [4, 7])  # a checkpoint is saved at step 6
def test_a_rank_that_is_lost_before_the_first_checkpoint_is_no_lost_run(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int
) -> None:
    recipe, run = project.recipe(), tmp_path / "run"

    def lose(optimizer: torch.optim.Optimizer, *rest: object) -> None:
        if len(metrics.by_update(run / "metrics.jsonl")) == steps:
            raise RuntimeError("gloo/transport/tcp/pair.cc:554 Connection closed by peer")

    hook = register_optimizer_step_pre_hook(lose)
    try:
        assert drive(recipe, run) == 71
    finally:
        hook.remove()
    error = capfd.readouterr().err
    assert ("the last checkpoint stands" in error) == (steps > 6)
    assert ("no full checkpoint was saved yet" in error) == (steps < 6)
    assert history(RunFolder(run).ledger).segments[0].last == steps
    assert drive(recipe, run, resume=True) == 0
    assert ("the run begins again at its start" in capfd.readouterr().err) == (steps < 6)
    assert [one.first for one in history(RunFolder(run).ledger).segments] == [0, 6 if steps > 6 else 0]
    assert not history(RunFolder(run).ledger).alarms
    failed = [claim for claim in verify(run).claims if claim.result == "failed"]
    assert not failed


def test_a_step_without_a_checkpoint_is_no_fresh_start(project: Project, tmp_path: Path) -> None:
    recipe, run = project.recipe(), tmp_path / "run"
    assert drive(recipe, run, resume=True, from_step=6) == 4
    assert not history(RunFolder(run).ledger).segments


def test_a_new_slot_that_reads_the_validation_shard_is_refused_after_a_save(tmp_path: Path) -> None:
    project, run = Project(tmp_path / "project"), tmp_path / "run"
    recipe = project.recipe(schedule__updates=34, checkpoint={"every": 100, "slot_ends": False})
    queue = project.path / "data" / "queue.jsonl"
    assert drive(recipe, run, until="9") == 0
    held_out = open_shard(project.path / "data" / "validation")
    loaded = queues.load(queue)
    parts = queues.parts_of(loaded, held_out)
    line = queues.propose(loaded, global_batch=GLOBAL_BATCH, updates=1, epochs=9, parts=parts)
    child = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from small import drive
from assay.data import queue as queues
from assay.train import loop
entered, enter = [], loop.enter_slot
def then_append(trainer, update):
    number = enter(trainer, update)
    if number == 1 and not entered:
        entered.append(queues.append(Path({str(queue)!r}), {line!r}))
    return number
loop.enter_slot = then_append
raise SystemExit(drive(Path({str(recipe)!r}), Path({str(run)!r}), resume=True))
"""
    done = subprocess.run([sys.executable, "-c", child], check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "reads the validation shard" in done.stderr
    assert status(RunFolder(run))["saved"] == 24, "saved before the new slot was looked at"


def test_an_ended_run_is_not_called_done_under_another_recipe(
    project: Project, tmp_path: Path, assay: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = tmp_path / "run"
    assert drive(project.recipe(), run) == 0
    assert assay("train", project.recipe(), "--run", run, "--start", "resume").returncode == 0
    longer = project.recipe("longer", schedule__updates=30)
    refused = assay("train", longer, "--run", run, "--start", "resume")
    assert refused.returncode == 3
    assert "a learning choice changed" in refused.stderr


def test_a_run_that_continues_another_may_fail_before_its_first_save_and_still_resume(
    project: Project, tmp_path: Path
) -> None:
    parent = project.path / "parent"
    assert drive(project.recipe(), parent) == 0
    recipe = project.recipe("child", start={"continue_from": {"path": "parent", "step": 12}})
    child, slot = tmp_path / "child", project.path / "data" / "train-1" / "tokens.bin"
    whole = slot.read_bytes()
    slot.write_bytes(bytes(len(whole)))
    assert drive(recipe, child) == 4
    slot.write_bytes(whole)
    assert drive(recipe, child, resume=True) == 0
    ends = [history(RunFolder(run).ledger).standing[-1].state_sha256 for run in (parent, child)]
    assert ends[0] == ends[1], "the child is the parent's own continuation"
