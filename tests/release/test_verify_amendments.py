"""An adoption that does not follow from its proposal, its signature and the rule is a failed claim."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forging import Record, rechain, records, set_receipt
from small import Project, drive

from assay.ledger.keys import load_key, new_key
from assay.recipe.load import digest
from assay.release.bundle import bundle
from assay.release.claims import FAILED, UNVERIFIABLE
from assay.release.verify import verify
from assay.run.amendments import Changes, amended_recipe, effective
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.proposals import approve, install, propose


@pytest.fixture(scope="module")
def amended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reviewer approved two amendments, adopted at steps 6 and 12; only to be read."""
    place = tmp_path_factory.mktemp("amended")
    project, run = Project(place / "project", slots=((30, 6), (30, 6))), place / "project" / "run"
    recipe = project.recipe(trust={"reviewer": [new_key(place / "anna")]})
    for number, (until, changes) in enumerate(
        ((6, Changes(updates=40)), (12, Changes(decay="cosine", checkpoint_every=3)), (32, None)), 1
    ):
        assert drive(recipe, run, resume=number > 1, until=str(until)) == 0
        if changes is not None:
            propose(RunFolder(run), changes, "a test")
            approve(RunFolder(run), f"a{number:02d}", load_key(place / "anna"))
            install(RunFolder(run), f"a{number:02d}")
    return run


@pytest.fixture
def run(amended: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may forge."""
    shutil.copytree(amended.parent, tmp_path / "project")
    return tmp_path / "project" / "run"


def failed(place: Path) -> dict[str, str]:
    return {claim.claim: claim.evidence for claim in verify(place).claims if claim.result == FAILED}


def test_it_verifies_and_so_does_its_bundle_with_the_signatures_in_the_ledger(amended: Path, tmp_path: Path) -> None:
    assert not failed(amended)
    evidence = {claim.claim: claim.evidence for claim in verify(amended).claims}
    assert evidence["amendments"].startswith("a01 adopted, a02 adopted; 2 signatures hold, 2 of 2")
    assert "every change adopted as an amendment" in evidence["code"]
    assert not [claim.evidence for claim in verify(amended).claims if claim.result == UNVERIFIABLE]
    told = history(amended / "ledger.jsonl")
    recipe = RunFolder(amended).recipe()
    for changes in (Changes(updates=40), Changes(decay="cosine", checkpoint_every=3)):
        recipe = amended_recipe(recipe, changes)
        assert digest(recipe) in evidence["one recipe in all segments"]
    assert effective(RunFolder(amended).recipe(), told) == recipe
    bundle(RunFolder(amended), tmp_path / "bundle")
    assert not failed(tmp_path / "bundle")
    bundled = {claim.claim: claim.evidence for claim in verify(tmp_path / "bundle").claims}
    assert bundled["amendments"] == evidence["amendments"]


def test_a_signature_moved_to_another_amendment_does_not_hold(run: Path) -> None:
    envelopes = [
        one["body"]["envelope"] for one in records(run / "ledger.jsonl") if one["kind"] == "amendment.approved"
    ]
    set_receipt(run, "amendment.approved", 0, envelope=envelopes[1])
    assert "it approves amendment a02" in failed(run)["amendments"]


def test_an_edited_proposal_loses_its_digest_or_its_approval(run: Path) -> None:
    def longer(found: list[Record]) -> None:
        body = next(one["body"] for one in found if one["kind"] == "amendment.proposed")
        body["proposal"]["changes"]["updates"] = 50

    rechain(run, longer)
    assert "has not the digest" in failed(run)["amendments"]


@pytest.mark.parametrize("kind", ["proposed", "approved", "installed"])
def test_a_missing_receipt_is_missed(run: Path, kind: str) -> None:
    rechain(run, lambda found: found.remove(next(one for one in found if one["kind"] == f"amendment.{kind}")))
    assert "amendments" in failed(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("updates_old", 30),
        ("step", 7),
        ("rates_before", {"lr": "0.1"}),
        ("segment", 1),
        ("decay_old", "cosine"),
        ("decay_new", "none"),
        ("decay_allowed", True),
        ("checkpoint_every_old", 3),
        ("checkpoint_every_new", 3),
        ("code_new", "sha256:" + "1" * 64),
    ],
)
def test_other_values_than_the_rule_gives_are_found(run: Path, key: str, value: object) -> None:
    set_receipt(run, "amendment.adopted", 0, **{key: value})
    assert "adoption" in failed(run)["amendments"]


@pytest.mark.parametrize(("key", "value"), [("checkpoint_every", 7), ("code", "sha256:" + "1" * 64), ("updates", 41)])
@pytest.mark.parametrize("number", [0, 1])
def test_another_running_process_than_the_adoption_makes_is_found(
    run: Path, number: int, key: str, value: object
) -> None:
    adopted = [one["body"] for one in records(run / "ledger.jsonl") if one["kind"] == "amendment.adopted"][number]
    set_receipt(run, "amendment.adopted", number, running={**adopted["running"], key: value})
    assert f"the running process: {key} is {value}" in failed(run)["amendments"]


def test_a_segment_of_another_recipe_is_found_beside_adoptions(run: Path) -> None:
    set_receipt(run, "recovery", 1, recipe="sha256:" + "1" * 64)
    assert "segment 3" in failed(run)["one recipe in all segments"]


def test_rates_that_follow_no_adopted_schedule_are_found(run: Path) -> None:
    def away(found: list[Record]) -> None:
        found[:] = [one for one in found if one["kind"] != "amendment.adopted"]

    rechain(run, away)
    assert "lr is" in failed(run)["learning rates"]
