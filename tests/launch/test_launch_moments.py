"""Moments between two starts: the scheduler's limit, a fresh node, a mirror that is away, a signal before the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_runs import HALF, UPDATES, Runs, receipts

from assay.errors import Refused
from assay.files.retry import Policy
from assay.launch import slurm
from assay.launch.arrival import catch_up
from assay.launch.coming_back import End
from assay.launch.description import Task, task
from assay.launch.keeping import Asked, Kept, _Keeping
from assay.mirror import copying
from assay.recipe import load as recipes
from assay.run.duties import duties, order
from assay.run.folder import RunFolder
from assay.run.outcome import write_outcome

Fresh = Callable[[str], Path]


@pytest.fixture
def mirrored(runs: Runs, tmp_path: Path) -> Iterator[Path]:
    """A recipe beside the others whose mirror is the folder `tmp_path/mirror`, which does not exist yet."""
    saves = {"every": 3, "keep": "all", "weights_every": 4, "mirror": {"url": str(tmp_path / "mirror")}}
    recipe = runs.small(f"mirrored-{tmp_path.name}", checkpoint=saves)
    yield recipe
    recipe.unlink()


def keeping(recipe: Path, run: Path, hear: Callable[[str, Asked], None], **limits: Any) -> _Keeping:
    """A launcher as inside a Slurm job; `hear` may send it signals when it says something."""
    file = run.with_name(f"{run.name}.launch.yaml")
    value = {"recipe": os.path.relpath(recipe, file.parent), "run": run.name, "on": "slurm",
             "slurm": {"minutes": 60}, "restarts": {"first_seconds": 0.01} | limits}  # fmt: skip
    file.write_text(json.dumps(value))
    found: Task = task(file, None, None, None)
    file.unlink()
    asked = Asked()

    def tell(text: str) -> None:
        hear(text, asked)

    return _Keeping(found, recipes.load(recipe), tell, asked, True)


def quiet(text: str, asked: Asked) -> None:
    pass


def requeued(place: Path, task: Task, done: Kept, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `again` asks of Slurm's commands."""
    place.mkdir(exist_ok=True)
    for name in ("scontrol", "sbatch"):
        (place / name).write_text(f"#!/bin/sh\necho {name} $1 >> {place}/asked\necho 8\n")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm.again(task, done, print)
    return (place / "asked").read_text().splitlines() if (place / "asked").exists() else []


@pytest.mark.parametrize(("signals", "asks"), [
    ([signal.SIGUSR1], ["scontrol requeue"]),
    ([signal.SIGUSR1, signal.SIGTERM], []),
])  # fmt: skip
def test_the_limit_queues_again_before_anything_is_copied_and_scancel_does_not(
    mirrored: Path, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[int], asks: list[str]
) -> None:
    (tmp_path / "mirror").mkdir()
    kept = keeping(mirrored, fresh("half"), quiet)
    for number in signals:
        kept.asked.hear(number, None)
    done = kept.work()
    assert requeued(tmp_path / "bin", kept.task, done, monkeypatch) == asks
    copied = (tmp_path / "mirror" / "mirror.json").exists()
    assert copied == (not asks), "the last copy is the next allocation's, where there is one"


def test_the_limit_that_comes_while_data_are_waited_for_queues_again(
    runs: Runs, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, away = fresh("half"), fresh("")
    away.mkdir()  # the same queue where no shard is
    shutil.copy(runs.path / "data" / "queue.jsonl", away)
    recipe = runs.small("elsewhere", data__queue=f"{away.name}/queue.jsonl", data__roots=[away.name])

    def limit(text: str, asked: Asked) -> None:
        if "waiting for a new queue head" in text:
            asked.hear(signal.SIGUSR1, None)

    kept = keeping(recipe, run, limit)
    done = kept.work()
    assert (done.last.code, done.requeue) == (4, True)
    assert requeued(tmp_path / "bin", kept.task, done, monkeypatch) == ["scontrol requeue"]
    ended = Kept(End(71, None, HALF, HALF), "1", 0, True, True, "machine")
    assert requeued(tmp_path / "bin", kept.task, ended, monkeypatch)[1:] == ["sbatch --parsable"]


def test_a_fresh_node_takes_the_lease_with_the_run(mirrored: Path, runs: Runs, fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    first = RunFolder(fresh("half"))
    copying.own(first, str(tmp_path / "mirror"), Policy(5))
    copying.mirror(first, str(tmp_path / "mirror"), once=True, policy=Policy(5))
    node = tmp_path / "node"
    node.mkdir()
    shutil.copy(mirrored, node / "recipe.yaml")
    shutil.copytree(runs.path / "data" / "validation", node / "data" / "validation")
    shutil.copy(runs.path / "data" / "queue.jsonl", node / "data")  # the shards are not here: it ends before the ranks
    kept = keeping(node / "recipe.yaml", node / "run", quiet, data_seconds=0)
    done = kept.work()
    assert (done.last.code, done.last.saved) == (4, HALF)
    assert [receipt.body["lease"] for receipt in receipts(node / "run", "lease")] == [1, 2]
    with pytest.raises(Refused, match="was taken by another machine"):
        copying.mirror(first, str(tmp_path / "mirror"), once=True, policy=Policy(5))


def test_a_mirror_that_is_not_mounted_is_waited_for(mirrored: Path, fresh: Fresh) -> None:
    run = fresh("")
    kept = keeping(mirrored, run, quiet, most=1)
    done = kept.work()
    assert (done.last.code, done.last.cause, done.restarts) == (75, "network", 1)
    assert not run.exists()


def test_an_end_stands_where_its_outcome_says_or_else_soon_after_the_last_line(runs: Runs, fresh: Fresh) -> None:
    kept = keeping(runs.plain, fresh("half"), quiet)
    before = kept._outcome()
    assert kept._end(71, before, True) == End(71, None, HALF, HALF, exact=False)
    assert kept._end(-signal.SIGKILL, before, True).code == 71
    assert kept._end(-signal.SIGTERM, before, True) == End(75, "signal", HALF, HALF, exact=False)
    write_outcome(kept.run, "1", 71, "a device was lost", 8, None)
    assert kept._end(71, before, True) == End(71, None, 8, HALF)


def test_a_signal_before_the_ranks_is_75_and_ends_what_was_being_done(runs: Runs, fresh: Fresh) -> None:
    run = RunFolder(fresh("half"))
    order(run, "export", [HALF], weights=False)
    before = run.ledger.read_bytes()
    words = [sys.executable, "-m", "assay.cli.main", "train", runs.plain, "--run", run.path, "--start", "resume"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "due at step" in line:  # the duties' own process
                break
        while process.poll() is None:  # a second signal, whenever it comes, changes nothing
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        rest = process.stderr.read()
    assert process.returncode == 75, rest
    assert "stopped before training began" in rest
    assert "Traceback" not in rest
    assert [one.state for one in duties(run)] == ["due"], "it ended with its parent"
    kinds = [line.split(b'"kind":"')[1].split(b'"')[0] for line in run.ledger.read_bytes()[len(before) :].splitlines()]
    assert kinds[-1] == b"interrupted"
    assert set(kinds[:-1]) <= {b"preflight", b"slot.checked"}
    outcome = json.loads(run.outcome.read_text())
    assert (outcome["code"], outcome["cause"]) == (75, "signal")
    assert UPDATES > HALF


def test_what_is_due_keeps_no_machine_from_training_for_ever(fresh: Fresh, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(fresh("half"))
    order(run, "export", [HALF], weights=False)
    catch_up(run, seconds=0.01)
    assert "what was due is not done after 0 s; training goes on" in capfd.readouterr().err
    assert [one.state for one in duties(run)] == ["due"]
