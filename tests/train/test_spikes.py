"""Numbers that go wrong: spikes are skipped by a stated policy, on a resume alike; what is not finite is not saved."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import Project, drive

from assay.errors import InputError
from assay.ledger.ledger import read
from assay.recipe import load as recipes
from assay.recipe.operational import Spikes
from assay.release.claims import Case
from assay.release.claims_ledger import chain_claim, receipts_claim
from assay.release.claims_metrics import lines_claim
from assay.release.claims_spikes import skipped_claim
from assay.release.verify import verify
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.spikes import FLOOR, judge
from assay.run.status import status

SKIP = Spikes(policy="skip", deviations=4.0, window=10, most=2)
USUAL = [1.0 + 0.1 * (index % 3) for index in range(10)]


def test_nothing_is_a_spike_without_the_policy_or_before_the_window_is_full() -> None:
    assert judge(Spikes(), USUAL, 1e9) is None
    assert judge(SKIP, USUAL[:-1], 1e9) is None
    assert judge(SKIP, USUAL, 1e9) is not None


@given(st.lists(st.floats(1e-3, 1e3), min_size=10, max_size=30), st.floats(1e-4, 1e6), st.floats(1e-3, 1e3))
def test_the_bound_is_relative_and_holds_exactly_where_it_says(norms: list[float], norm: float, scale: float) -> None:
    spike = judge(SKIP, norms, norm)
    logs = [math.log(one) for one in norms[-10:]]
    limit = math.exp(
        math.fsum(logs) / 10
        + 4 * max(FLOOR, math.sqrt(math.fsum((one - math.fsum(logs) / 10) ** 2 for one in logs) / 10))
    )
    if math.isclose(norm, limit, rel_tol=1e-6):
        return
    assert (spike is not None) == (norm > limit)
    if spike is not None:
        assert spike.limit == pytest.approx(limit)
        scaled = judge(SKIP, [scale * one for one in norms], scale * norm)
        assert scaled is not None
        assert scaled.deviations == pytest.approx(spike.deviations, rel=1e-6)


def test_a_policy_without_figures_has_the_stated_ones() -> None:
    assert Spikes(policy="skip").rule == (6.0, 100, 3)
    assert Spikes().rule is None


def test_norms_that_hardly_change_do_not_make_the_smallest_change_a_spike() -> None:
    assert judge(SKIP, [1.0] * 10, 1.05) is None
    assert judge(SKIP, [1.0] * 10, 1.10) is not None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("spikes") / "project")


def eager(project: Project, name: str, most: int, **changes: Any) -> Path:
    """A policy so strict that ordinary updates of the small model are spikes; a full checkpoint after each two."""
    spikes = {"policy": "skip", "window": 4, "deviations": 1.0, "most": most}
    usual = {"spikes": spikes, "evaluate": {"every": None}, "checkpoint": {"every": 2, "keep": "all"}}
    return project.recipe(name, **usual | {"model__layers": 1} | changes)


def test_skipped_updates_leave_the_state_and_are_the_same_after_every_resume(project: Project) -> None:
    recipe = eager(project, "eager", 30)
    whole, parted = RunFolder(project.path / "whole"), RunFolder(project.path / "parted")
    assert drive(recipe, whole.path) == 0
    skipped = [receipt.body["update"] for receipt in history(whole.ledger).skipped]
    assert min(skipped) >= 4, "the window of four was to be filled first"
    pairs = [update for update in skipped if update % 2 == 0 and update + 1 in skipped]
    assert pairs, "two updates in a row were skipped between two checkpoints"

    cut = pairs[0] + 1  # in the middle of a row
    for until in (3, cut, 24):
        assert drive(recipe, parted.path, until=str(until), resume=until > 3) == 0
    assert [receipt.body["update"] for receipt in history(parted.ledger).skipped] == skipped
    one, other = (
        {update: metrics.comparable(line) for update, line in metrics.by_update(run.metrics).items()}
        for run in (whole, parted)
    )
    assert one == other
    assert [update for update, line in one.items() if line.get("skipped")] == skipped
    assert status(whole)["skipped"] == len(skipped)

    states = {item.step: item.state_sha256 for item in history(whole.ledger).saved}
    assert states[pairs[0]] == states[pairs[0] + 2], "nothing changed, so both steps have one digest"
    done = [step for step in range(2, 24, 2) if not {step, step + 1} <= set(skipped)]
    assert all(states[step] != states[step + 2] for step in done)
    for run in (whole, parted):
        claims = verify(run.path).claims
        assert not [claim for claim in claims if claim.result == "failed"]
        (claim,) = [claim for claim in claims if claim.claim == "skipped updates"]
        assert (
            f"{len(skipped)} updates skipped, each with its receipt; the policy was applied again to 24"
            in claim.evidence
        )


def test_verify_finds_an_update_that_was_skipped_silently_or_against_the_policy(project: Project) -> None:
    run = RunFolder(project.path / "told")
    assert drive(eager(project, "told", 30), run.path, until="12") == 0
    case = Case(run.path, False, (), lambda _: None)
    assert chain_claim(case).result == receipts_claim(case).result == lines_claim(case).result == "verified"
    told = skipped_claim(case)
    assert told is not None
    assert told.result == "verified"
    honest = list(case.lines)
    first = next(index for index, line in enumerate(honest) if line.skipped)

    def forged(index: int, **changes: object) -> str:
        case.lines[:] = [*honest[:index], replace(honest[index], **changes), *honest[index + 1 :]]  # type: ignore[arg-type]
        found = skipped_claim(case)
        assert found is not None
        assert found.result == "failed"
        return found.evidence

    assert "was skipped, but no receipt says so" in forged(first - 1, skipped=True)
    assert "was not skipped, but receipt" in forged(first, skipped=False)
    assert "by the policy it was not to be skipped" in forged(first, grad_norm=honest[first - 1].grad_norm)


def test_a_resume_from_a_step_that_also_has_weights_is_judged_by_the_window_of_that_step(project: Project) -> None:
    checkpoint = {"every": 2, "keep": "all", "weights_every": 2}
    recipe = eager(project, "weighed", 30, checkpoint=checkpoint)
    run = RunFolder(project.path / "weighed")
    assert drive(recipe, run.path, until="12") == 0
    assert drive(recipe, run.path, resume=True, until="18") == 0
    told = history(run.ledger)
    assert [one.kind for one in told.saved if one.step == 12] == ["full", "weights"]
    assert any(one.body["segment"] == 2 for one in told.skipped), "by the window that the first segment filled"
    assert "applied again to 18 recorded updates" in judged(run)


def test_a_resume_of_a_continued_run_is_judged_once_its_own_window_is_full(project: Project) -> None:
    """The parent's norms, which the first spikes of the child were judged by, are in none of its files."""
    wide = {"policy": "skip", "window": 6, "deviations": 2.0, "most": 30}
    assert drive(eager(project, "elder", 30, spikes=wide), project.path / "elder", until="12") == 0
    recipe = eager(
        project, "heir", 30, spikes=wide, start={"continue_from": {"path": "elder", "step": 12}},
        schedule__updates=24, schedule__rewarm=2,
    )  # fmt: skip
    run = RunFolder(project.path / "heir")
    assert drive(recipe, run.path, until="14") == 0
    assert drive(recipe, run.path, resume=True) == 0
    skipped = {one.body["update"]: one.body["segment"] for one in history(run.ledger).skipped}
    usual = [update for update in range(12, 24) if update not in skipped]
    assert any(segment == 2 and update < usual[5] for update, segment in skipped.items())
    assert f"applied again to {23 - usual[5]} recorded updates" in judged(run)


def judged(run: RunFolder) -> str:
    """What the claim about skipped updates says, which must hold."""
    case = Case(run.path, False, (), lambda _: None)
    assert chain_claim(case).result == receipts_claim(case).result == lines_claim(case).result == "verified"
    told = skipped_claim(case)
    assert told is not None
    assert told.result == "verified", told.evidence
    return told.evidence


def test_more_spikes_in_a_row_than_allowed_stop_the_run(project: Project) -> None:
    recipe = eager(project, "impatient", 1)
    run = RunFolder(project.path / "impatient")
    assert drive(recipe, run.path) == 5
    told = history(run.ledger)
    (failed,) = [receipt.body for receipt in read(run.ledger) if receipt.kind == "failed"]
    assert (failed["code"], failed["step"]) == (5, told.skipped[-1].body["update"] + 1)
    assert "spikes.most (1) in a row" in json.loads(run.outcome.read_text())["message"]
    assert max(metrics.by_update(run.metrics)) == failed["step"] - 1, "the update that stopped it was not done"


def test_weights_that_an_update_made_infinite_are_not_saved(project: Project) -> None:
    recipe = project.recipe(
        "steep", optimizer={"kind": "adamw", "lr": 1e300, "weight_decay": 0.0}, evaluate={"every": None},
        schedule={"kind": "constant", "updates": 1}, model__layers=1,
    )  # fmt: skip
    run = RunFolder(project.path / "steep")
    assert drive(recipe, run.path) == 5
    assert not history(run.ledger).saved
    assert "holds a value that is not finite and is not saved" in json.loads(run.outcome.read_text())["message"]


@pytest.mark.parametrize(
    ("spikes", "words"),
    [
        ({"policy": "ignore"}, "spikes.policy is 'ignore'; allowed are none or skip"),
        ({"policy": "skip", "deviations": 0}, "spikes.deviations is 0; a number above 0"),
        ({"policy": "skip", "window": 1}, "spikes.window is 1"),
        ({"policy": "skip", "most": 0}, "spikes.most is 0"),
        ({"policy": "none", "window": 50}, "spikes.window is 50; it belongs to policy skip"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(project: Project, spikes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words.replace(".", "[.]")):
        recipes.load(project.recipe("odd", spikes=spikes))
