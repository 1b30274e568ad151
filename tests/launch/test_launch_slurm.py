"""A run as a Slurm job: the script that is submitted, and a real Slurm that queues it again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launch_runs import receipts, states, told
from slurm_cluster import cluster, slurm, waited
from small import Project, drive

from assay.run.folder import RunFolder, salted

UPDATES = 90


def rank_of(run: Path) -> int:
    """The process id of the rank that trains `run`."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"assay.train.worker" in words and str(run).encode() in words:
            found.append(int(place.parent.name))
    (rank,) = found
    return rank


@pytest.mark.root
def test_a_job_saves_before_its_limit_and_goes_on_on_another_node_after_a_fault(
    tmp_path: Path, assay: Callable[..., CompletedProcess[str]]
) -> None:
    project = Project(tmp_path / "project", slots=((UPDATES, 40),))
    recipe = project.recipe(schedule__updates=UPDATES, checkpoint={"every": 15, "keep": "all"},
                            evaluate={"every": None}, log={"every": 5})  # fmt: skip
    assert drive(recipe, tmp_path / "whole") == 0
    run, file = project.path / "runs" / "one", project.path / "launch.yaml"
    file.write_text(json.dumps({
        "recipe": "recipe.yaml", "run": "runs/one", "on": "slurm", "restarts": {"first_seconds": 0.1},
        "slurm": {"minutes": 30, "signal_seconds": 60, "partition": "main"},
    }))  # fmt: skip
    with cluster(tmp_path / "slurm") as config:
        submitted = assay("launch", file, "--json", env={"SLURM_CONF": str(config)})
        assert submitted.returncode == 0, submitted.stderr
        job = json.loads(submitted.stdout)["job"]

        def reached(update: int, segment: int) -> bool:
            log = run / "logs" / f"segment-{segment:02d}" / "rank-0.log"
            lines = log.read_text().splitlines() if log.exists() else []
            return any(line.startswith("update ") and int(line.split()[1]) >= update for line in lines)

        waited(lambda: reached(20, 1))
        slurm(config, "scancel", "--batch", "--signal=USR1", job)  # as Slurm does ahead of the time limit
        waited(lambda: reached(50, 2))
        os.kill(rank_of(run), signal.SIGKILL)
        waited(lambda: "JobState=COMPLETED" in slurm(config, "scontrol", "show", "job", str(int(job) + 1)))
        shown = [slurm(config, "scontrol", "show", "job", each) for each in (job, str(int(job) + 1))]
    assert "Restarts=1" in shown[0]
    assert "ExitCode=71:0" in shown[0]
    assert "ExitCode=0:0" in shown[1]
    assert states(run)[UPDATES] == states(tmp_path / "whole")[UPDATES]
    assert [(one.outcome, one.cause) for one in told(run).segments] == [
        ("interrupted", "signal"), ("failed", None), ("end", "done"),
    ]  # fmt: skip
    bodies = [receipt.body for receipt in receipts(run, "allocation")]
    assert [body["event"] for body in bodies] == ["began", "ended"] * 3
    assert [body["why"] for body in bodies[1::2]] == [None, "machine", None]
    nodes = [next(n for n in ("one", "two") if salted(RunFolder(run), n) == body["host"]) for body in bodies[::2]]
    assert nodes[2] != nodes[1], "the node that failed was not taken at once again"
    assert {(body["provider"], body["zone"]) for body in bodies} == {("slurm", "main")}
