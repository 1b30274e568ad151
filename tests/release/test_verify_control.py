"""A control that did not pass, or did not run where training ran, is a failed claim."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from forging import rechain, set_receipt
from small import Project, drive

from assay.data import queue as queues
from assay.data.batches import Batches
from assay.evaluate.subject import open_subject
from assay.recipe import load as recipes
from assay.release.claims import FAILED
from assay.release.verify import verify
from assay.train.control import record, reduced


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two segments whose recipe demands a control; only to be read."""
    project = Project(tmp_path_factory.mktemp("guarded") / "project")
    plain = project.recipe()
    assert drive(plain, project.path / "parent", until="1") == 0
    queue = queues.load(project.path / "data" / "queue.jsonl")
    batches = Batches(queue, [project.path / "data"], 7, 8)
    windows = np.stack([batches.batch(update, slice(0, 4)).astype(np.uint32) for update in range(2)])
    weights = open_subject(project.path / "parent").tensors
    record(project.path / "control", reduced(recipes.load(plain)), weights, windows, {})
    recipe = project.recipe(control={"path": "control", "required": True})
    assert drive(recipe, project.path / "run", until="2") == 0
    assert drive(recipe, project.path / "run", resume=True, until="4") == 0
    return project.path / "run"


@pytest.fixture
def run(guarded: Path, tmp_path: Path) -> Path:
    shutil.copytree(guarded.parent, tmp_path / "project")
    return tmp_path / "project" / "run"


def failed(run: Path) -> dict[str, str]:
    return {claim.claim: claim.evidence for claim in verify(run).claims if claim.result == FAILED}


def test_it_verifies(guarded: Path) -> None:
    assert not failed(guarded)
    (told,) = [claim.evidence for claim in verify(guarded).claims if claim.claim == "controls"]
    assert told == "1 of 1 control passed, 1 bit for bit; 2 segments demanded one"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"passed": False}, "passed is False"),
        ({"found": [{"loss": "4.0", "grad_norm": "1.0"}] * 2}, "says identical"),
        ({"max_difference": "0.5"}, "max_difference is 0.5"),
        ({"expected": []}, "beside what was expected"),
        ({"tolerance": "much"}, "no number"),
        ({"allocation": {"hosts": [], "devices": []}}, "another host"),
        ({"allocation": {"promise": {}, "engine": "replicated"}}, "another promise"),
        ({"allocation": {"engine": "fsdp"}}, "another engine"),
    ],
)
def test_what_was_changed_in_its_receipt_is_found(run: Path, values: dict[str, object], words: str) -> None:
    set_receipt(run, "control", 0, **values)
    assert words in failed(run)["controls"]


def test_a_control_that_never_ran_is_missed(run: Path) -> None:
    rechain(run, lambda found: found.remove(next(one for one in found if one["kind"] == "control")))
    assert "none ran before it" in failed(run)["controls"]
