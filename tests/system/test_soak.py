"""Fifty kills of real processes at random moments, the mirror's among them: `make soak`, minutes long."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import Project, drive

from assay.checkpoint.load import load
from assay.files.retry import Policy
from assay.ledger.ledger import read
from assay.mirror.place import place
from assay.release.verify import verify
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history

KILLS, UPDATES = 50, 900
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def begin(folder: Path, name: str, *words: object) -> subprocess.Popen[bytes]:
    """A command whose words are appended to a file."""
    with (folder / f"{name}.txt").open("ab") as output:
        command = [sys.executable, "-m", "assay.cli.main", *map(str, words)]
        return subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT, cwd=folder)


def rank_of(trainer: subprocess.Popen[bytes]) -> int | None:
    """The process id of the only rank, None before it was started or after it has left."""
    try:
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
    except OSError:
        return None
    return next((int(one) for one in children if b"worker" in Path(f"/proc/{one}/cmdline").read_bytes()), None)


def reported(run: Path) -> int:
    """Lines of metrics so far, those of superseded updates included."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(*processes: int | None) -> None:
    for process in processes:
        if process is not None:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it left by itself meanwhile


@pytest.mark.soak
def test_fifty_kills_of_trainer_and_mirror_change_no_bit(tmp_path: Path) -> None:
    seed = int(os.environ.get("ASSAY_SOAK_SEED", "1"))
    print(f"ASSAY_SOAK_SEED={seed}")
    chance = random.Random(seed)
    project = Project(tmp_path / "project", slots=((400, 60), (500, 80)))
    common = {"schedule__updates": UPDATES, "evaluate": {"every": None}, "log": {"every": 1}}
    saves = {"every": 5, "keep": 3, "weights_every": 50}
    whole, run, copies = tmp_path / "whole", tmp_path / "run", tmp_path / "mirror"
    assert drive(project.recipe("plain", **common, checkpoint=saves | {"keep": "all"}), whole) == 0
    copies.mkdir()
    place(str(copies), Policy()).prove("readback")  # as pre-flight does: the empty folder is meant
    recipe = project.recipe(**common, checkpoint=saves | {"mirror": {"url": str(copies)}})

    kills, mirror = 0, None
    while kills < KILLS:
        before = reported(run)
        trainer = begin(tmp_path, "train", "train", recipe, "--run", run, "--start", "auto")
        if mirror is None and (run / "ledger.jsonl").exists():
            mirror = begin(tmp_path, "mirror", "mirror", run, copies)
        wanted, deadline = chance.randint(0, 8), time.monotonic() + 120
        while trainer.poll() is None and reported(run) < before + wanted:
            assert time.monotonic() < deadline, (tmp_path / "train.txt").read_text()[-3000:]
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 4.0 if wanted == 0 else 0.2))
        assert trainer.poll() is None, (tmp_path / "train.txt").read_text()[-3000:]
        who = chance.choice(["rank", "machine", "machine", "mirror"])
        rank = rank_of(trainer)
        if who == "rank" and rank is not None:
            kill(rank)
            assert trainer.wait(60) == 71
            kills += 1
            continue
        if mirror is not None and who in ("mirror", "machine"):
            kill(mirror.pid)
            mirror.wait()
            mirror, kills = None, kills + 1
        kill(trainer.pid, rank)
        trainer.wait()
        kills += 1

    last = begin(tmp_path, "train", "train", recipe, "--run", run, "--start", "auto")
    assert last.wait(300) == 0, (tmp_path / "train.txt").read_text()[-3000:]
    if mirror is not None:
        kill(mirror.pid)
        mirror.wait()
    once = begin(tmp_path, "mirror", "mirror", run, copies, "--once")
    assert once.wait(300) == 0, (tmp_path / "mirror.txt").read_text()[-3000:]

    told, undisturbed = history(RunFolder(run).ledger), history(RunFolder(whole).ledger)
    theirs = {item.step: item.state_sha256 for item in undisturbed.saved if item.kind == "full"}
    standing = [item for item in told.line if item.kind == "full"]
    assert standing[-1].step == UPDATES
    assert all(load(run / item.folder).manifest.state_sha256 == theirs[item.step] for item in standing)
    mine, lines = metrics.by_update(run / "metrics.jsonl"), metrics.by_update(whole / "metrics.jsonl")
    assert [metrics.comparable(mine[u]) for u in range(UPDATES)] == [
        metrics.comparable(lines[u]) for u in range(UPDATES)
    ]
    assert not told.alarms
    assert len(told.segments) > KILLS // 3, "kills came while updates were done, too"
    assert not [claim for claim in verify(RunFolder(run).path).claims if claim.result == "failed"]
    assert [receipt.kind for receipt in read(run / "ledger.jsonl")].count("checkpoint.mirrored") > 10

    back = begin(tmp_path, "fetch", "fetch", copies, tmp_path / "back")
    assert back.wait(300) == 0, (tmp_path / "fetch.txt").read_text()[-3000:]
    newest = [item for item in history(RunFolder(tmp_path / "back").ledger).line if item.kind == "full"][-1]
    assert load(tmp_path / "back" / newest.folder).manifest.state_sha256 == theirs[UPDATES]
