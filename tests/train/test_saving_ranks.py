"""What many ranks have in the air is a checkpoint whenever it can be one: after a fault of all, and without a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small import Project

from assay.checkpoint.load import load
from assay.files.publish import leftovers
from assay.run.history import history

LANES = {"micro": 2, "accumulation": 1, "lanes": 4}
CHECKPOINT = {"every": 4, "keep": "all", "weights_every": 8, "slot_ends": False}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, list[int]]]:
    """Folder, recipe, exit codes of each rank: without room for the third save, losing a rank, without a receipt."""
    project = Project(tmp_path_factory.mktemp("saving-ranks") / "project")
    recipe = project.recipe(batch=LANES, checkpoint=CHECKPOINT, model__layers=1, evaluate={"every": None})
    common = {"recipe": str(recipe), "ranks": [2]}
    jobs = [
        {"run": str(project.path / "crowded"), "spaces": 2} | common,
        {"run": str(project.path / "lost"), "lost_at": 8} | common,
        {"run": str(project.path / "unrecorded"), "unrecorded": 4} | common,
    ]
    (project.path / "jobs.json").write_text(json.dumps(jobs))
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("many_ranks.py")), str(project.path / "jobs.json")],
        check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    project.path.joinpath("told").write_text(ended.stderr)
    return project.path, recipe, json.loads(ended.stdout.splitlines()[-1])


def test_a_fault_of_all_ranks_still_lands_the_save_that_is_in_the_air(
    done: tuple[Path, Path, dict[str, list[int]]],
) -> None:
    folder, _, codes = done
    run = folder / "crowded-2"
    assert codes["crowded-2"] == [71, 71]
    assert "step-000008 was not begun: it needs" in json.loads((run / "outcome.json").read_text())["message"]
    assert [(item.kind, item.step) for item in history(run / "ledger.jsonl").saved] == [("full", 4), ("full", 8)]
    assert not leftovers(run / "checkpoints")
    assert load(run / "checkpoints/step-000008").manifest.step == 8


def test_a_save_that_all_ranks_have_written_survives_the_loss_of_one(
    done: tuple[Path, Path, dict[str, list[int]]],
) -> None:
    folder, _, codes = done
    run = folder / "lost-2"
    assert codes["lost-2"] == [71, -9]
    assert [(item.kind, item.step) for item in history(run / "ledger.jsonl").saved] == [("full", 4), ("full", 8)]
    assert load(run / "checkpoints/step-000008").manifest.step == 8


def test_a_receipt_that_the_disk_does_not_take_ends_all_ranks_with_the_same_words(
    done: tuple[Path, Path, dict[str, list[int]]],
) -> None:
    folder, _, codes = done
    run = folder / "unrecorded-2"
    assert codes["unrecorded-2"] == [71, 71]
    message = json.loads((run / "outcome.json").read_text())["message"]
    assert message.startswith(f"the receipt of {run}/checkpoints/step-000004 could not be written: No space left on")
    assert (folder / "told").read_text().count(f"assay: {message}\n") == 2
    assert not history(run / "ledger.jsonl").saved
