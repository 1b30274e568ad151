"""A real file system that is full, read-only or gone: a small tmpfs, mounted for the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small import Project, drive

from assay.checkpoint.load import load
from assay.ledger.ledger import read
from assay.run.folder import RunFolder
from assay.run.history import history


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Eight megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "assay-test", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def state(run: Path) -> str | None:
    """Of the newest full checkpoint."""
    newest = [item for item in history(RunFolder(run).ledger).line if item.kind == "full"][-1]
    return load(run / newest.folder).manifest.state_sha256


@pytest.mark.root
def test_a_full_a_read_only_and_a_vanished_disk_end_with_one_sentence_and_lose_nothing(
    tmp_path: Path, disk: Path, assay: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    project = Project(tmp_path / "project", slots=((200, 40), (200, 40)))
    recipe = project.recipe(schedule__updates=400, log={"every": 1}, checkpoint={"every": 6, "keep": 2})
    whole, run = tmp_path / "whole", disk / "run"
    assert drive(recipe, whole) == 0
    assert assay("train", recipe, "--run", run, "--until", "6").returncode == 0

    filler = disk / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(disk)
        file.write(bytes(free.f_bavail * free.f_frsize - 60_000))
    full = assay("train", recipe, "--run", run, "--start", "resume")
    assert full.returncode == 71, full.stderr
    assert "Traceback" not in full.stderr
    filler.unlink()
    assert list(read(run / "ledger.jsonl")), "the chain holds"

    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ledger = (run / "ledger.jsonl").read_bytes()
    locked = assay("train", recipe, "--run", run, "--start", "resume")
    assert locked.returncode in (3, 71), locked.stderr
    assert "Traceback" not in locked.stderr
    assert (run / "ledger.jsonl").read_bytes() == ledger
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    assert assay("train", recipe, "--run", run, "--start", "resume", "--until", "12").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run), "--start", "resume"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines, deadline = (run / "metrics.jsonl").read_bytes().count(b"\n"), time.monotonic() + 120
    while (run / "metrics.jsonl").read_bytes().count(b"\n") < lines + 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    subprocess.run(["cp", "--recursive", "--no-target-directory", str(run), str(tmp_path / "copy")], check=True)
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 71, words
    assert "Traceback" not in words

    kept = tmp_path / "copy"  # what a machine that comes back would find
    assert assay("train", recipe, "--run", kept, "--start", "resume").returncode == 0
    assert state(kept) == state(whole)
