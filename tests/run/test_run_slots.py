"""Slots before they are entered: what is checked at a start, what is left for later, what cannot be compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small import BLOCK, GLOBAL_BATCH, VOCABULARY, Project, shard

from assay.data import queue as queues
from assay.data.queue import Queue
from assay.data.shard import open_shard
from assay.errors import DataError, Refused
from assay.launch import preflight as module
from assay.launch.preflight import Check, preflight
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.run.slots import KIND, admit, past_checks


def slots(project: Project, recipe: Path, run: Path) -> Check:
    (found,) = [c for c in preflight(recipes.load(recipe), project.path, RunFolder(run)) if c.name == "slots"]
    return found


def test_a_start_checks_the_first_slot_and_as_many_as_take_no_time(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = project.recipe(), tmp_path / "run"
    every = slots(project, recipe, run)
    assert [body["slot"] for body in every.receipts] == [0, 1]
    monkeypatch.setattr(module, "CHECKED_AT_START", 10)
    first = slots(project, recipe, run)
    assert first.receipts == every.receipts[:1]
    assert "1 later slot(s) are checked before they are entered" in first.detail

    # What the ledger has is not done again, and another validation shard is another question.
    ledger = create(run, recipe, recipes.load(recipe)).open_ledger()
    ledger.append(KIND, first.receipts[0])
    assert past_checks(RunFolder(run)) == [first.receipts[0]]
    assert slots(project, recipe, run).receipts == ()
    shard(project.path / "data" / "other", 12, 98)
    other = project.recipe("other", data__validation="data/other")
    assert [body["slot"] for body in slots(project, other, run).receipts] == [0]


def test_without_validation_and_freshness_there_is_nothing_to_look_for(project: Project, tmp_path: Path) -> None:
    recipe = project.recipe(data__validation=None, evaluate={"every": None})
    assert slots(project, recipe, tmp_path / "run").receipts == ()


def test_validation_under_another_tokenizer_is_refused(project: Project, tmp_path: Path) -> None:
    manifest = project.path / "data" / "validation" / "shard.json"
    manifest.write_text(manifest.read_text().replace("7" * 64, "8" * 64))
    checks = preflight(recipes.load(project.recipe()), project.path, RunFolder(tmp_path / "run"))
    refused = [check for check in checks if check.result == module.REFUSED]
    assert [check.name for check in refused] == ["validation is not training data"]
    assert "was made with tokenizer" in refused[0].detail


def strict(path: Path) -> Queue:
    first = open_shard(shard(path / "data" / "first", 40, 1))
    made = queues.create(path / "data" / "queue.jsonl", block=BLOCK, dtype="uint16", vocabulary=VOCABULARY,
                         tokenizer=first.tokenizer, freshness="strict")  # fmt: skip
    line = queues.propose(made, updates=2, parts=queues.parts_of(made, first), global_batch=GLOBAL_BATCH)
    queues.append(made.path, line)
    return queues.load(made.path)


def test_what_cannot_be_compared_is_named_and_what_must_be_compared_is_demanded(tmp_path: Path) -> None:
    queue = strict(tmp_path)
    new = open_shard(shard(tmp_path / "elsewhere" / "new", 40, 2))
    line = queues.propose(queue, updates=2, parts=queues.parts_of(queue, new), global_batch=GLOBAL_BATCH)
    slot = queues.next_slot(queue, line, "the line")
    assert admit(queue, slot, [], [tmp_path]) == []
    with pytest.raises(DataError, match=f"shard {new.sha256} of slot 1 is not on this machine"):
        admit(queue, slot, [], [tmp_path / "data"])
    gone = open_shard(tmp_path / "data" / "first").sha256
    shutil.rmtree(tmp_path / "data" / "first")
    assert admit(queue, slot, [], [tmp_path]) == [f"slot 0: shard {gone} is not on this machine"]


def test_the_same_documents_in_another_shard_are_refused_without_any_run(tmp_path: Path) -> None:
    queue = strict(tmp_path)
    again = open_shard(shard(tmp_path / "data" / "again", 41, 1))  # forty of its documents are those of `first`
    line = queues.propose(queue, updates=2, parts=queues.parts_of(queue, again), global_batch=GLOBAL_BATCH)
    with pytest.raises(Refused, match=r"document 0 of .* equals document 0 of .*, which slot 0 took before"):
        admit(queue, queues.next_slot(queue, line, "the line"), [], [tmp_path])
