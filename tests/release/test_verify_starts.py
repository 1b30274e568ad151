"""Runs that begin from another run's weights or state verify, and false evidence of the start does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forging import rechain, records, set_receipt
from small import Project, drive

from assay.checkpoint.manifest import read_manifest
from assay.release.claims import FAILED
from assay.release.verify import Report, verify


def failed(report: Report) -> dict[str, str]:
    return {claim.claim: claim.evidence for claim in report.claims if claim.result == FAILED}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A parent of 12 updates, one child from its pinned weights and one from its pinned state at step 6."""
    project = Project(tmp_path_factory.mktemp("line") / "project")
    assert drive(project.recipe("parent"), project.path / "parent", until="12") == 0
    source = read_manifest(project.path / "parent/checkpoints/step-000006")
    weights = {"path": "parent/checkpoints/step-000006", "sha256": source.files["model.safetensors"]["sha256"]}
    init = project.recipe("init", start={"init_from": weights})
    assert drive(init, project.path / "init", until="4") == 0
    state = {"path": "parent", "step": 6, "sha256": source.state_sha256}
    goes_on = project.recipe("continue", start={"continue_from": state}, schedule__rewarm=3)
    assert drive(goes_on, project.path / "continue", until="8") == 0
    assert drive(goes_on, project.path / "continue", resume=True, until="10") == 0
    return project


@pytest.mark.parametrize("name", ["parent", "init", "continue"])
def test_every_kind_of_start_verifies(line: Project, name: str) -> None:
    report = verify(line.path / name)
    assert report.holds(strict=True), [vars(claim) for claim in report.claims if claim.result != "verified"]
    start = next(claim for claim in report.claims if claim.claim == "start")
    assert {"parent": "scratch @ 0", "init": "init-from @ 0", "continue": "continue-from @ 6"}[name] in start.evidence
    assert name == "parent" or "as pinned" in start.evidence


def test_a_continued_run_counts_its_own_updates_alone(line: Project) -> None:
    told = {claim.claim: claim.evidence for claim in verify(line.path / "continue").claims}
    assert "updates 6:10 without a gap in 2 segments" in told["updates"]
    assert told["exposure"].startswith(f"{4 * 8 * 16:,} positions")
    assert told["order digest recomputed"].startswith("10 updates")  # the order begins at update 0


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("init", "weights_file", "weights_file is"),
        ("continue", "state_sha256", "state_sha256 is"),
        ("init", "optimizer", "optimizer is"),
        ("parent", "seed", "seed is"),
    ],
)
def test_false_evidence_of_a_start_fails(line: Project, name: str, key: str, words: str) -> None:
    run = line.path / name
    before = (run / "ledger.jsonl").read_bytes()

    def lie(receipts: list[dict[str, Any]]) -> None:
        next(one for one in receipts if one["kind"] == "start")["body"]["evidence"][key] = "sha256:" + "5" * 64

    rechain(run, lie)
    found = failed(verify(run))
    (run / "ledger.jsonl").write_bytes(before)
    assert words in found["start"]


def test_a_start_at_another_step_fails(line: Project) -> None:
    run = line.path / "continue"
    before = (run / "ledger.jsonl").read_bytes()
    set_receipt(run, "start", 0, step=5)
    found = failed(verify(run))
    (run / "ledger.jsonl").write_bytes(before)
    assert "step is 5, expected 6" in found["start"]


def test_a_pin_that_was_not_kept_fails(tmp_path: Path) -> None:
    """Pre-flight refuses such a start; a run that came about without it does not verify."""
    project = Project(tmp_path / "project")
    kept, other = "sha256:" + "7" * 64, "sha256:" + "8" * 64
    assert (
        drive(project.recipe("pinned", pins={"tokenizer": kept, "code": other}), project.path / "run", until="1") == 0
    )
    found = failed(verify(project.path / "run"))
    assert list(found) == ["pins"]
    assert f"expected {other}" in found["pins"]


def test_a_stop_for_a_loss_that_is_not_finite_is_no_completed_update(tmp_path: Path) -> None:
    """The line of the update that stopped the run is counted as such, and the run still verifies."""
    project = Project(tmp_path / "project")
    recipe = project.recipe("wild", optimizer={"kind": "adamw", "lr": 1e30, "grad_clip": None}, schedule__warmup=0)
    assert drive(recipe, project.path / "run") == 5
    report = verify(project.path / "run")
    assert not failed(report)
    told = {claim.claim: claim.evidence for claim in report.claims}
    assert "1 update stopped by a value that is not finite" in told["lines"]
    assert any(one["kind"] == "failed" for one in records(project.path / "run" / "ledger.jsonl"))
