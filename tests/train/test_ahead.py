"""The next slot verified beside the training: by the real process, on real files; damage is told and may be mended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small import GLOBAL_BATCH, Project

from assay.data import queue as queues
from assay.data.queue import Queue
from assay.data.shard import Shard
from assay.errors import DataError, Interrupted, Refused
from assay.ledger.ledger import read
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.run.slots import KIND
from assay.train import ahead as module
from assay.train.ahead import Ahead


class Bench:
    """A project, a run without training, and what its trainer would be told."""

    def __init__(self, path: Path) -> None:
        self.project = Project(path / "project")
        self.recipe = self.project.recipe()
        self.run: RunFolder = create(path / "run", self.recipe, recipes.load(self.recipe))
        self.said: list[str] = []
        self.ahead = Ahead(self.run, self.recipe, self.run.open_ledger(), self.said.append)

    @property
    def queue(self) -> Queue:
        return queues.load(self.project.path / "data" / "queue.jsonl")

    @property
    def shards(self) -> dict[str, Shard]:
        return queues.locate(self.queue, [])

    def verify(self, number: int) -> str:
        return self.ahead.verify(self.queue, self.queue.slots[number], self.shards, lambda: None)

    def begin(self, number: int) -> None:
        self.ahead.begin(self.queue, self.queue.slots[number], self.shards)

    def until_it_ends(self) -> None:
        """Let the process come to its end, without taking up what it found."""
        assert self.ahead._child is not None
        self.ahead._child.wait()

    def kinds(self) -> list[str]:
        return [receipt.kind for receipt in read(self.run.ledger)][1:]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    worth, module.WORTH_A_PROCESS = module.WORTH_A_PROCESS, 1
    yield made
    made.ahead.close()
    module.WORTH_A_PROCESS = worth


def test_a_slot_that_was_verified_ahead_is_entered_with_what_was_found(bench: Bench) -> None:
    bench.begin(0)
    bench.until_it_ends()
    assert bench.verify(1) == "ahead"
    (receipt,) = [one for one in read(bench.run.ledger) if one.kind == KIND]
    assert receipt.body["line"] == bench.queue.slots[1].digest
    assert receipt.body["documents"] == 44
    assert bench.verify(1) == "at entry", "a result counts once"
    assert bench.kinds() == [KIND], "a second entry repeats no check that the ledger has"


def test_training_waits_for_a_process_that_is_not_done_and_a_hold_ends_the_wait(bench: Bench) -> None:
    bench.begin(0)
    asked: list[int] = []
    assert bench.ahead.verify(bench.queue, bench.queue.slots[1], bench.shards, lambda: asked.append(1)) == "waited"
    assert asked

    def stop() -> None:
        raise Interrupted("stopped", "signal")

    with pytest.raises(Interrupted):
        bench.ahead.verify(bench.queue, bench.queue.slots[0], bench.shards, stop)


def test_damage_is_told_at_once_and_bytes_that_were_mended_are_verified_again(bench: Bench) -> None:
    tokens = bench.project.path / "data" / "train-1" / "tokens.bin"
    sound = tokens.read_bytes()
    tokens.write_bytes(bytes(len(sound)))
    bench.begin(0)
    bench.until_it_ends()
    bench.ahead.look()  # after some update of slot 0
    (receipt,) = [one for one in read(bench.run.ledger) if one.kind == "alarm"]
    assert receipt.body["slot"] == 1
    assert receipt.body["code"] == 4
    assert "ALARM: slot 1 comes next and cannot be entered" in bench.said[0]
    assert "tokens.bin has the digest" in bench.said[0]
    with pytest.raises(DataError, match=r"tokens.bin has the digest"):
        bench.verify(1)
    tokens.write_bytes(sound)
    assert bench.verify(1) == "at entry"
    assert bench.kinds() == ["alarm", KIND]


def test_bytes_that_change_after_they_were_verified_are_verified_again(bench: Bench) -> None:
    bench.begin(0)
    bench.until_it_ends()
    tokens = bench.project.path / "data" / "train-1" / "tokens.bin"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    with pytest.raises(DataError, match=r"tokens.bin has the digest"):
        bench.verify(1)


def test_a_slot_that_is_appended_meanwhile_is_looked_at_too(bench: Bench) -> None:
    bench.begin(1)  # the last one: there is nothing to look at yet
    assert bench.ahead._child is None
    bench.ahead.look()
    assert bench.ahead._child is None
    queue = bench.queue
    held_out = queues.parts_of(queue, module.SlotChecks(recipes.load(bench.recipe), bench.project.path).validation)  # type: ignore[arg-type]
    line = queues.propose(queue, updates=1, parts=held_out, global_batch=GLOBAL_BATCH, epochs=9)
    with queue.path.open("ab") as file:
        file.write(line[:40])  # a writer that is not done
    bench.ahead.look()
    bench.until_it_ends()
    bench.ahead.look()
    assert bench.kinds() == [], "half a line is no slot"
    with queue.path.open("ab") as file:
        file.write(line[40:] + b"\n")
    bench.ahead.look()
    bench.until_it_ends()
    bench.ahead.look()
    assert bench.kinds() == ["alarm"]
    assert "reads the validation shard" in bench.said[0]
    with pytest.raises(Refused, match="reads the validation shard"):
        bench.verify(2)


def test_a_process_that_is_killed_has_found_nothing(bench: Bench) -> None:
    bench.begin(0)
    assert bench.ahead._child is not None
    bench.ahead._child.kill()
    bench.until_it_ends()
    assert bench.verify(1) == "at entry"
    assert bench.kinds() == [KIND]
    assert bench.said == []


def test_a_process_that_cannot_be_started_stops_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    bench.begin(0)
    bench.ahead.look()
    assert bench.said == ["slot 1 is not verified ahead: No such file or directory"]
    assert bench.verify(1) == "at entry"
    assert bench.kinds() == [KIND]


def test_small_slots_are_not_worth_a_process(bench: Bench) -> None:
    module.WORTH_A_PROCESS = 10_000
    bench.begin(0)
    assert bench.ahead._child is None
    assert bench.verify(1) == "at entry"
