"""`assay launch` on this machine, for real: kills, lost machines, missing data and holds."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_runs import receipts, states, told
from small import GLOBAL_BATCH, Project, drive, shard

from assay.data import queue as queues
from assay.data.shard import open_shard
from assay.files.lock import take
from assay.files.retry import Policy
from assay.mirror.place import place
from assay.release.verify import verify
from assay.run import metrics

Assay = Callable[..., subprocess.CompletedProcess[str]]
UPDATES = 120


def launch_file(project: Project, **changes: Any) -> Path:
    """A launch file beside the recipe, with short pauses."""
    path = project.path / "launch.yaml"
    value = {"recipe": "recipe.yaml", "run": "runs/one", "restarts": {"first_seconds": 0.1}, "gpus": 1,
             "usd_per_machine_hour": "1.50", "zone": "here"}  # fmt: skip
    path.write_text(json.dumps(value | changes))
    return path


class Launched:
    """`assay launch` in a process of its own, its standard error read line by line."""

    def __init__(self, *words: object) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "assay.cli.main", "launch", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def until(self, wanted: Callable[[str], bool]) -> None:
        """Read on to the first line that is `wanted`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if wanted(line):
                return
        raise AssertionError("the launcher ended before: " + "".join(self.lines[-20:]))

    def until_update(self, count: int) -> None:
        self.until(lambda line: line.startswith("update ") and int(line.split()[1].replace(",", "")) >= count)

    def trainer(self) -> int:
        """The process id of `assay train`; its only child is the rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(child) for child in children if b"train" in Path(f"/proc/{child}/cmdline").read_bytes())

    def rank(self) -> int:
        trainer = self.trainer()
        return int(Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()[0])

    def rest(self) -> str:
        """Everything to the end, which must come; pipes are closed."""
        out, err = self.process.communicate(timeout=120)
        self.lines.append(err)
        return out

    def text(self) -> str:
        return "".join(self.lines)


@pytest.mark.kills
def test_kills_and_a_lost_machine_change_no_bit(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((UPDATES, 40),))
    (tmp_path / "mirror").mkdir()
    place(str(tmp_path / "mirror"), Policy()).prove("readback")  # as pre-flight does: the empty folder is meant
    saves = {"every": 15, "keep": "all"}
    plain = {"schedule__updates": UPDATES, "evaluate": {"every": None}, "log": {"every": 5}}
    whole = tmp_path / "whole"
    assert drive(project.recipe("plain", **plain, checkpoint=saves), whole) == 0
    project.recipe(**plain, checkpoint=saves | {"mirror": {"url": str(tmp_path / "mirror")}})
    file, run = launch_file(project), project.path / "runs" / "one"

    chance = random.Random(6)
    first = Launched(file)
    first.until_update(chance.randint(20, 30))
    os.kill(first.rank(), signal.SIGKILL)
    first.until_update(chance.randint(45, 60))
    os.kill(first.trainer(), signal.SIGKILL)  # its rank saves and leaves, and only then a restart begins
    first.until_update(chance.randint(75, 90))
    first.process.kill()
    first.rest()
    assert "exit code 71 at update" in first.text()
    with run.with_name("one.launch").open("rb") as lock:
        assert take(lock, 30), "the launcher's hold on the run ends with it"
    with (run / "owner.lock").open("rb") as lock:
        assert take(lock, 60), "the trainer saves and leaves when its launcher was killed"
    shutil.rmtree(run)  # the machine is gone with its disk

    second = Launched(file, "--json")
    answer = json.loads(second.rest())
    assert second.process.returncode == 0, second.text()
    assert "--start auto took resume of what" in second.text()
    assert "RESUME @" in second.text()
    assert (answer["ok"], answer["exit"], answer["step"], answer["allocation"]) == (True, 0, UPDATES, "2")

    mine, theirs = states(run), states(whole)
    assert mine[UPDATES] == theirs[UPDATES]
    assert all(mine[step] == theirs[step] for step in mine.keys() & theirs.keys())
    lines = [metrics.by_update(path / "metrics.jsonl") for path in (run, whole)]
    assert [metrics.comparable(line) for line in lines[0].values()] == [
        metrics.comparable(line) for line in lines[1].values()
    ]
    assert not told(run).alarms
    bodies = [receipt.body for receipt in receipts(run, "allocation")]
    assert [(body["allocation"], body["event"]) for body in bodies] == [
        ("1", "began"), ("1", "ended"), ("2", "began"), ("2", "ended"),
    ]  # fmt: skip
    assert bodies[1]["estimated"], "the first one never said its end"
    assert bodies[0]["time"] < bodies[1]["time"] <= bodies[2]["time"] < bodies[3]["time"]
    assert {body["usd_per_machine_hour"] for body in bodies} == {"1.50"}
    assert not [claim for claim in verify(run).claims if claim.result == "failed"]


def append(project: Project, updates: int) -> None:
    """A further slot on a shard of its own."""
    place = shard(project.path / "data" / "later", 44, 5)
    path = project.path / "data" / "queue.jsonl"
    queue = queues.load(path)
    parts = queues.parts_of(queue, open_shard(place))
    queues.append(path, queues.propose(queue, global_batch=GLOBAL_BATCH, updates=updates, epochs=40, parts=parts),
                  global_batch=GLOBAL_BATCH)  # fmt: skip


def test_a_new_queue_head_is_waited_for_and_a_hold_stands(tmp_path: Path, assay: Assay) -> None:
    project = Project(tmp_path / "project", slots=((10, 2),))
    project.recipe(schedule__updates=300, evaluate={"every": None})
    file, run = launch_file(project), project.path / "runs" / "one"
    launched = Launched(file)
    launched.until(lambda line: "waiting for a new queue head" in line)
    append(project, 290)
    launched.until_update(20)
    assert assay("stop", run, "--reason", "tests").returncode == 0
    launched.rest()
    assert launched.process.returncode == 75
    assert "exit code 4 at update 10" in launched.text()
    assert "a hold stands" in launched.text()
    (began, ended) = (receipt.body for receipt in receipts(run, "allocation"))
    assert (began["event"], ended["event"], ended["code"], ended["cause"]) == ("began", "ended", 75, "stop")
    assert (ended["restarts"], ended["why"]) == (1, None)
    refused = assay("launch", file, "--json")
    assert (refused.returncode, json.loads(refused.stdout)["exit"]) == (3, 3)
    assert "assay release" in refused.stderr
    assert len(receipts(run, "allocation")) == 2, "a held run takes no machine"
