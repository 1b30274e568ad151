"""Damage is found at load and told; a full disk ends with 71 and hurts nothing that was saved."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch_runs import HALF, Runs, flip, receipts, states, told, tree
from small import drive

from assay.launch import local

Fresh = Callable[[str], Path]
NEWEST = f"checkpoints/step-{HALF:06d}"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def foreign(path: Path) -> None:
    """The manifest of the checkpoint before, which holds for its own folder alone."""
    shutil.copy(path.parent.parent / "step-000003" / path.name, path)


def touched_up(path: Path) -> None:
    """A manifest that is sound in itself and not the one that the receipt names."""
    path.write_text(path.read_text().replace('"segment": 1', '"segment": 7'))


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


DAMAGE = [
    ("model.safetensors", flip), ("optimizer.safetensors", flip), ("state.json", flip), ("config.json", cut),
    ("queue.jsonl", flip), ("recipe.json", Path.unlink), ("model.safetensors", cut), ("model.safetensors", huge),
    ("manifest.json", flip), ("manifest.json", cut), ("manifest.json", Path.unlink), ("manifest.json", foreign),
    ("manifest.json", touched_up), ("manifest.json", huge),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hurt"), DAMAGE)
def test_a_damaged_newest_checkpoint_is_told_and_the_older_one_is_taken(
    runs: Runs, fresh: Fresh, name: str, hurt: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fresh("half")
    hurt(run / NEWEST / name)
    assert drive(runs.plain, run, resume=True, until="4") == 0
    body = receipts(run, "recovery")[0].body
    assert body["step"] == 3
    assert body["evidence"]["checkpoint"] == "checkpoints/step-000003"
    assert body["evidence"]["state_sha256"] == states(runs.path / "whole")[3]
    (skipped,) = body["evidence"]["skipped"]
    assert skipped.startswith(NEWEST)
    assert str(run) not in skipped
    assert "a newer checkpoint was not used" in capsys.readouterr().err
    assert (run / NEWEST).is_dir(), "damage is evidence and stays"


def test_the_step_of_a_damaged_checkpoint_is_saved_again(runs: Runs, fresh: Fresh) -> None:
    run = fresh("half")
    flip(run / NEWEST / "model.safetensors")
    assert drive(runs.plain, run, resume=True, until=str(HALF)) == 0
    again = run / f"{NEWEST}-segment-02"
    assert again.is_dir(), "a run that stops here has a sound checkpoint of this step"
    assert drive(runs.plain, run, resume=True) == 0
    assert receipts(run, "recovery")[-1].body["evidence"]["checkpoint"] == f"checkpoints/{again.name}"
    assert states(run)[12] == states(runs.path / "whole")[12]
    assert not told(run).alarms


def test_when_all_are_damaged_nothing_is_started(runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    run = fresh("half")
    for folder in (run / "checkpoints").glob("step-*"):
        flip(folder / "model.safetensors")
    before = tree(run / "checkpoints") | tree(run / "weights")
    for _ in range(2):
        assert drive(runs.plain, run, resume=True) == 4
        error = capsys.readouterr().err
        assert "no full checkpoint of" in error
        assert error.count("is damaged") == 2
        assert "Traceback" not in error
    assert tree(run / "checkpoints") | tree(run / "weights") == before
    assert not receipts(run, "recovery")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert drive(runs.plain, run, resume=True) == 4, "an empty folder is no reason to begin anew"
    assert len(told(run).segments) == 1


def test_half_written_folders_are_reported_and_removed(
    runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fresh("half")
    shutil.copytree(run / NEWEST, run / "checkpoints" / "step-000099.partial-abc")
    assert drive(runs.plain, run, resume=True, until="7") == 0
    assert "step-000099.partial-abc was left half-written" in capsys.readouterr().err
    assert not (run / "checkpoints" / "step-000099.partial-abc").exists()
    assert receipts(run, "recovery")[0].body["step"] == HALF


@contextmanager
def disk_of(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond `limit` bytes: how a full disk looks to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_during_a_save_ends_with_71_and_the_run_goes_on_later(
    runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fresh("half")
    # A larger ledger than any tensor file would be in the way of the save; the tensor file is made the larger one.
    ledger, model = (run / "ledger.jsonl").stat().st_size, (run / NEWEST / "model.safetensors").stat().st_size
    grown = runs.small("grown", model__vocabulary=3000)
    run = fresh("")
    assert drive(grown, run, until=str(HALF)) == 0
    room = (run / NEWEST / "model.safetensors").stat().st_size - 100
    assert (run / "ledger.jsonl").stat().st_size + ledger + model < room, "only tensors fill this disk"
    before = tree(run / "checkpoints")
    with disk_of(room):
        assert drive(grown, run, resume=True) == 71
    error = capsys.readouterr().err
    assert "could not be written: File too large; what was saved before stands" in error
    assert "Traceback" not in error
    assert tree(run / "checkpoints") == before
    assert [(one.body["code"]) for one in receipts(run, "failed")] == [71]
    assert json.loads((run / "outcome.json").read_text())["code"] == 71
    assert drive(grown, run, resume=True) == 0
    assert not told(run).alarms, "what was done again is what was done before"
    assert max(states(run)) == 12


@pytest.mark.parametrize("more", [0, 40, 5000])
def test_a_disk_that_takes_not_even_a_receipt_ends_with_71(
    runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str], more: int
) -> None:
    run = fresh("half")
    with disk_of((run / "ledger.jsonl").stat().st_size + more):
        assert drive(runs.plain, run, resume=True) == 71
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("assay: ") >= 1
    assert drive(runs.plain, run, resume=True) == 0
    assert states(run)[12] == states(runs.path / "whole")[12]


def test_a_log_that_cannot_be_written_does_not_stop_the_rank(tmp_path: Path) -> None:
    source, sink = os.pipe()
    size = 1 << 20  # more than a pipe holds, so that an unread one would block its writer

    def rank() -> None:
        with os.fdopen(sink, "wb", buffering=0) as file:
            for _ in range(16):
                file.write(b"x" * (size // 16 - 1) + b"\n")

    writer = threading.Thread(target=rank, daemon=True)
    writer.start()
    with os.fdopen(source, "rb", buffering=0) as file:
        local._keep(file, tmp_path / "nowhere" / "rank-0.log")
    writer.join(10)
    assert not writer.is_alive()


def test_logs_are_kept_whole_and_rotated(tmp_path: Path) -> None:
    source, sink = os.pipe()
    written = b"".join(b"line %d\n" % number for number in range(2000))
    limit, local.LOG_LIMIT = local.LOG_LIMIT, 4000
    try:
        with os.fdopen(sink, "wb", buffering=0) as file:
            file.write(written)
        with os.fdopen(source, "rb", buffering=0) as file:
            local._keep(file, tmp_path / "rank-0.log")
    finally:
        local.LOG_LIMIT = limit
    assert (tmp_path / "rank-0.log.1").read_bytes() == written
