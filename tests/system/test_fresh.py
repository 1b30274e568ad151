"""Fresh data, from the proposal to the running trainer: what ancestors took and validation text never enter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import BLOCK, GLOBAL_BATCH, VOCABULARY, Project, documents, drive

from assay.data import queue as queues
from assay.data.shard import Shard, Source, open_shard, write_shard
from assay.ledger.ledger import Receipt, read
from assay.run.folder import RunFolder
from assay.run.slots import KIND
from assay.run.status import status
from assay.train import ahead

Assay = Callable[..., subprocess.CompletedProcess[str]]
BEGUN = 7  # updates of the ancestor before its weights were taken
WEIGHTS = {"init_from": {"path": "ancestor/weights/step-000007"}}


def texts(shard: Shard) -> list[np.ndarray]:
    return np.split(np.asarray(shard.ids), shard.documents_end[:-1].astype(int))


def write(path: Path, parts: Sequence[np.ndarray], pool: str = "base") -> Shard:
    source = Source("late", 0, sum(map(len, parts)), "en", "CC0-1.0", "1")
    return write_shard(path, parts, vocabulary=VOCABULARY, tokenizer="sha256:" + "7" * 64, end_of_text=0, pool=pool,
                       sources=[source])  # fmt: skip


def receipts(run: Path, kind: str) -> list[Receipt]:
    return [one for one in read(run / "ledger.jsonl") if one.kind == kind]


class Line(Project):
    """An ancestor that was trained for some updates, and strict queues for its child."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        saves = {"every": 100, "weights_every": BEGUN, "slot_ends": False}
        assert drive(self.recipe("ancestor", checkpoint=saves), path / "ancestor", until=str(BEGUN)) == 0
        new, data = list(documents(60, 500)), path / "data"
        consumed = texts(open_shard(data / "train-0"))
        held_out = texts(open_shard(data / "validation"))
        self.fresh = write(data / "fresh", new)
        self.copied = write(data / "copied", [*new[:20], consumed[3], *new[20:50]])
        self.leaked = write(data / "leaked", [*new[:50], held_out[5]])
        self.gold = write(data / "gold", new[:40], pool="gold")

    def queue(self, name: str, shard: Shard, strict: bool = True, pool: str | None = "base") -> Path:
        """A queue with one slot, as somebody may have made it before the ancestor was known."""
        path = self.path / "data" / f"{name}.jsonl"
        made = queues.create(path, block=BLOCK, dtype="uint16", vocabulary=VOCABULARY, tokenizer=shard.tokenizer,
                             pool=pool, freshness="strict" if strict else None)  # fmt: skip
        line = queues.propose(made, updates=9, parts=queues.parts_of(made, shard), global_batch=GLOBAL_BATCH, epochs=3)
        queues.append(path, line, global_batch=GLOBAL_BATCH)
        return path

    def child(self, name: str, start: object = WEIGHTS, **changes: Any) -> Path:
        """A recipe that reads the queue of that name, from the ancestor's weights unless `start` says otherwise."""
        short = {"kind": "wsd", "updates": 9, "warmup": 2, "decay_fraction": 0.25, "min_lr": 0.0003}
        own = {"start": start, "schedule": short, "data__queue": f"data/{name}.jsonl"}
        return self.recipe(name, **own, **changes)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("fresh") / "project")


def test_what_an_ancestor_took_is_refused_by_propose_append_preflight_and_training(
    line: Line, assay: Assay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ancestor, empty = line.path / "ancestor", line.path / "data" / "proposals.jsonl"
    shape = ("--global-batch", GLOBAL_BATCH, "--updates", 5, "--epochs", 3)
    assert assay("data", "create", empty, "--shard", line.fresh.path, "--block", BLOCK, "--strict").returncode == 0
    whole = assay("data", "propose", empty, line.path / "data" / "train-0", *shape, "--run", ancestor)
    assert whole.returncode == 3
    assert "repeats tokens [" in whole.stderr
    assert "which run small (" in whole.stderr
    hidden = assay("data", "propose", empty, line.copied.path, *shape, "--run", ancestor)
    assert hidden.returncode == 3
    assert f"document 20 of {line.copied.sha256} equals document 3 of " in hidden.stderr
    unasked = assay("data", "propose", empty, line.copied.path, *shape)
    assert unasked.returncode == 0, "the queue alone knows of no ancestor"
    (tmp_path / "line").write_text(unasked.stdout)
    appended = assay("data", "append", empty, tmp_path / "line", "--run", ancestor)
    assert appended.returncode == 3
    assert "repeats a document" in appended.stderr
    assert not queues.load(empty).slots
    leaked = assay("data", "append", empty, line.leaked.path, *shape, "--run", ancestor)
    assert leaked.returncode == 3
    assert "document 50 equals validation document 5" in leaked.stderr

    line.queue("hiding", line.copied)
    recipe = line.child("hiding")
    checked = assay("preflight", recipe, "--json")
    assert checked.returncode == 3
    refused = [one for one in json.loads(checked.stdout)["checks"] if one["result"] == "refused"]
    assert [one["name"] for one in refused] == ["slots"]
    assert f"document 20 of {line.copied.sha256} equals document 3 of " in refused[0]["detail"]
    run = tmp_path / "run"
    assert drive(recipe, run) == 3, "the trainer does not take the pre-flight's word for it"
    assert "repeats a document" in capfd.readouterr().err
    assert not receipts(run, "slot.entered")
    assert status(RunFolder(run))["reported"] is None


def test_fresh_data_is_trained_on_and_the_receipt_says_what_it_was_held_against(
    line: Line, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line.queue("clean", line.fresh)
    run, again = tmp_path / "run", tmp_path / "again"
    assert drive(line.child("clean"), run, until="3") == 0
    (checked,) = receipts(run, KIND)
    ancestor = RunFolder(line.path / "ancestor").run_id()
    assert checked.body["against"] == [{"run_id": ancestor, "first": 0, "last": BEGUN}]
    assert (checked.body["freshness"], checked.body["documents"]) == ("strict", 60)
    assert checked.body["not_compared"] == []
    assert drive(line.child("clean"), run, resume=True) == 0
    assert len(receipts(run, KIND)) == 1, "a resume does not look through the slot again"
    assert [one.body["verified"] for one in receipts(run, "slot.entered")] == ["at entry", "at entry"]

    # Weights in a folder that is not their run's: what they were trained on is not known, and every place says so.
    found = "somebody/weights/step-000007"
    assert drive(line.child("clean", "scratch"), line.path / "somebody", until="1") == 0
    shutil.copytree(line.path / "ancestor" / "weights" / "step-000007", line.path / found)
    capfd.readouterr()
    assert drive(line.child("clean", {"init_from": {"path": found}}), again, until="1") == 0
    (unknown,) = receipts(again, KIND)
    assert unknown.body["not_compared"] == [f"{found}: its run or its queue is not here"]
    assert f"{found}: its run or its queue is not here" in capfd.readouterr().err


def test_a_run_that_is_continued_goes_on_in_its_strict_queue(line: Line, tmp_path: Path) -> None:
    line.queue("own", line.fresh)
    parent = line.path / "parent"
    assert drive(line.child("own", "scratch"), parent, until="4") == 0
    onward = line.child("own", {"continue_from": {"path": "parent", "step": 4}})
    assert drive(onward, tmp_path / "on") == 0
    anew = line.child("own", {"init_from": {"path": "parent/checkpoints/step-000004"}})
    assert drive(anew, tmp_path / "anew") == 3, "with its weights alone the data would be trained on twice"


def test_validation_text_in_a_slot_that_is_appended_while_it_trains_ends_the_run_saved(
    line: Line, tmp_path: Path
) -> None:
    queue = line.queue("growing", line.fresh, strict=False)
    recipe = line.child("growing", "scratch", data__when_missing="wait", schedule__updates=20)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run)]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as train:
        assert train.stderr is not None
        for said in train.stderr:
            if "waiting for the data of slot 1" in said:
                break
        loaded = queues.load(queue)
        parts = queues.parts_of(loaded, line.leaked)
        queues.append(queue, queues.propose(loaded, updates=9, parts=parts, global_batch=GLOBAL_BATCH, epochs=3))
        said = train.stderr.read()
    assert train.returncode == 3, said
    assert f"slot 1 of {line.path}" in said
    assert f"document 50 equals validation document 5 in shard {line.leaked.sha256}" in said
    assert status(RunFolder(run))["saved"] == 9
    assert [one.body["slot"] for one in receipts(run, "slot.entered")] == [0]


def test_damage_of_the_next_slot_is_an_alarm_before_its_turn(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = project.path / "data" / "train-1" / "tokens.bin"
    sound = tokens.read_bytes()
    tokens.write_bytes(bytes(len(sound)))
    run, worth = tmp_path / "run", ahead.WORTH_A_PROCESS
    try:
        ahead.WORTH_A_PROCESS = 1
        assert drive(project.recipe(), run) == 4
        said = capfd.readouterr().err
        assert said.index("ALARM: slot 1 comes next") < said.index("assay: slot 1 is not entered")
        assert [one.body["slot"] for one in receipts(run, "alarm")] == [1]
        assert status(RunFolder(run))["saved"] == 10
        tokens.write_bytes(sound)
        assert drive(project.recipe(), run, resume=True) == 0
    finally:
        ahead.WORTH_A_PROCESS = worth


def test_a_queue_takes_one_pool(line: Line, assay: Assay) -> None:
    shape = ("--global-batch", GLOBAL_BATCH, "--updates", 2, "--epochs", 3)
    named = line.queue("named", line.fresh)
    refused = assay("data", "propose", named, line.gold.path, *shape)
    assert refused.returncode == 4
    assert "has pool 'gold'" in refused.stderr
    unnamed = line.queue("unnamed", line.fresh, strict=False, pool=None)
    refused = assay("data", "append", unnamed, line.gold.path, *shape)
    assert refused.returncode == 4
    assert "takes one pool" in refused.stderr
    assert len(queues.load(unnamed).slots) == 1
    # Somebody who writes the file by hand gets no further than the start.
    loaded = queues.load(unnamed)
    parts = queues.parts_of(loaded, line.gold)
    queues.append(unnamed, queues.propose(loaded, updates=2, parts=parts, global_batch=GLOBAL_BATCH, epochs=3))
    started = assay("preflight", line.child("unnamed"))
    assert started.returncode == 4
    assert "takes one pool" in started.stdout
