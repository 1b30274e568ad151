"""The amendment rule: refused exactly from the boundary on, continuous to the last bit, signed by who is trusted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import RECIPE, Project, drive

from assay.errors import InputError, Refused, VerificationError
from assay.ledger.keys import load_key, new_key
from assay.recipe.load import from_resolved, load, resolved
from assay.recipe.schedule import amendable_before, amendment_fault, factor
from assay.recipe.schema import Recipe, Schedule
from assay.run import curves
from assay.run.amendments import (
    Changes,
    allows_decay,
    amended_recipe,
    before_update,
    demanded_role,
    read_changes,
    rule_fault,
)
from assay.run.folder import RunFolder
from assay.run.proposals import approve, install, listing, propose, scheduled

RECIPES = Path(__file__).parents[2] / "recipes"


def small(**changes: Any) -> Recipe:
    value = {**RECIPE, **{key: new for key, new in changes.items() if "__" not in key}}
    for key, new in changes.items():
        section, _, inner = key.partition("__")
        if inner:
            value[section] = {**value[section], inner: new}
    return from_resolved(value, "small")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Schedule, Schedule]:
    """Two schedules that differ by an amendment."""
    kind = draw(st.sampled_from(["wsd", "constant", "cosine"]))
    warmup = draw(st.integers(0, 20))
    common: dict[str, Any] = {"kind": kind, "warmup": warmup, "min_lr": draw(st.sampled_from([0.0, 0.1, 0.3]))}
    if kind == "wsd":
        common["decay_fraction"] = draw(st.sampled_from([0.1, 0.2, 0.29, 0.5]))
    both = []
    for _ in range(2):
        keys = common | {"updates": draw(st.integers(warmup * 2 + 11, 150))}
        if kind == "wsd":
            keys["decay"] = draw(st.sampled_from(["none", "linear", "cosine", "1-sqrt"]))
        both.append(Schedule.model_validate(keys))
    return both[0], both[1]


@settings(max_examples=60, deadline=None)
@given(pairs(), st.floats(0, 1))
def test_the_rule_refuses_exactly_from_the_boundary_on_and_keeps_the_rate(
    pair: tuple[Schedule, Schedule], ratio: float
) -> None:
    old, new = pair
    limit = amendable_before(old, new)
    for step in range(old.updates):
        fault = amendment_fault(old, new, ratio, step, allow_earlier_decay=True)
        below = limit is None or step < limit
        assert (fault is None) == (below and step < new.updates), (step, fault)
        for update in (step - 1, step) if fault is None else ():
            if update >= 0:
                assert factor(old, ratio, update) == factor(new, ratio, update), "the same bits"


def test_the_change_of_slayer_109_may_be_adopted_before_64000_and_not_there() -> None:
    final = load(RECIPES / "slayer1b-1.09.yaml")
    whole = resolved(final)
    whole["schedule"] |= {"updates": 80_000, "intent": None}
    recipe, changes = from_resolved(whole, "1.09 before its amendment"), Changes(updates=120_000, checkpoint_every=200)
    assert before_update(recipe, changes, 29_800) == 64_000
    assert rule_fault(recipe, changes, 29_800) is None, "where it was adopted"
    assert rule_fault(recipe, changes, 63_999) is None
    assert "before 64000" in str(rule_fault(recipe, changes, 64_000))
    adopted = amended_recipe(recipe, changes)
    assert adopted.schedule.decay_at == 96_000
    assert adopted.schedule.model_copy(update={"intent": "no-decay"}) == final.schedule
    assert curves.rate(recipe, 29_800) == curves.rate(adopted, 29_800) == 6e-4


def test_a_run_without_decay_may_still_move_it_where_it_stopped_and_nowhere_behind() -> None:
    recipe = small(schedule__intent="no-decay")
    assert recipe.schedule.decay_at == 18
    for changes in (Changes(updates=40), Changes(decay="none"), Changes(decay="linear")):
        assert before_update(recipe, changes, 18) == 19, "what people are told is what the rule does"
        assert before_update(recipe, changes, 17) == 18
        assert rule_fault(recipe, changes, 18) is None
        assert rule_fault(recipe, changes, 19) is not None
    assert rule_fault(recipe, Changes(updates=20, allow_earlier_decay=True), 18) is not None
    assert before_update(recipe, Changes(updates=20), 18) == 15
    assert rule_fault(small(), Changes(updates=40), 18) is not None
    assert before_update(small(), Changes(updates=40), 18) == 18


def test_whose_signature_is_demanded() -> None:
    keys = {"reviewer": ["ed25519:" + "5a" * 32], "operator": ["ed25519:" + "6b" * 32]}
    both, operator = small(trust=keys), small(trust={"operator": keys["operator"]})
    assert demanded_role(both, Changes(updates=40)) == "reviewer"
    assert demanded_role(operator, Changes(updates=40)) == "operator"
    assert demanded_role(small(), Changes(updates=40)) is None
    for recipe in (both, operator, small()):
        assert demanded_role(recipe, Changes(checkpoint_every=3)) is None, "cadence needs nobody"
    assert demanded_role(operator, Changes(checkpoint_every=3, code="sha256:" + "1" * 64)) == "operator"
    meant = small(schedule__intent="no-decay", trust={"operator": keys["operator"]})
    assert allows_decay(meant, Changes(decay="linear"))
    assert demanded_role(meant, Changes(decay="linear")) == "reviewer"


@pytest.mark.parametrize(
    "record",
    [{}, {"updates": 0}, {"updates": "9"}, {"decay": "fast"}, {"code": "sha256:1"}, {"lr": 1}, 7, {"updates": True},
     {"allow_earlier_decay": True}],
)  # fmt: skip
def test_changes_that_assay_did_not_write_are_refused(record: object) -> None:
    with pytest.raises(VerificationError, match="changes are"):
        read_changes(record)
    assert read_changes(Changes(updates=4).record()) == Changes(updates=4)


def test_the_curves_show_both_schedules_and_the_step() -> None:
    old, new = small(), amended_recipe(small(), Changes(updates=40))
    points = {update: (before, after) for update, before, after in curves.curves(old, new)}
    assert points[17] == (0.003, 0.003)
    assert points[23][0] == pytest.approx(0.003 * (1 - 0.9 * 5 / 6))
    assert points[24][0] is None, "the old schedule has ended"
    assert {18, 23, 30, 39} <= points.keys()
    lines = curves.text(old, new, 6)
    assert len({line.index("|") for line in lines if "|" in line}) == 1
    assert {"o", "x", "#"} <= set("".join(lines[:12]))
    assert lines[-2].strip() == "^ step 6"
    image = ElementTree.fromstring(curves.svg(old, new, 6, "a < b & c"))  # noqa: S314 - our own
    found = [one.attrib["points"].split() for one in image if one.tag.endswith("polyline")]
    assert [len(one) for one in found] == [24, 40]


def test_an_approval_signed_on_a_copy_counts_and_cadence_needs_none(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((30, 6),))
    recipe = project.recipe(trust={"reviewer": [new_key(tmp_path / "anna")]})
    run, copy = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copy")
    assert drive(recipe, run.path, until="2") == 0
    facts = propose(run, Changes(updates=30), "longer").facts
    assert (facts["prepared"], facts["missing"]) == (30, 0)
    shutil.copytree(run.path, copy.path)
    signed = Path(approve(copy, "a01", load_key(tmp_path / "anna"))["envelope"])
    with pytest.raises(Refused, match="approval of a reviewer"):
        install(run, "a01")
    shutil.copy(signed, run.amendments / signed.name)
    assert scheduled(run, run.recipe()) == 24
    assert install(run, "a01")["state"] == "installed"
    assert scheduled(run, run.recipe()) == 30, "what waits may be adopted before --until"
    with pytest.raises(Refused, match="installed already"):
        install(run, "a01")
    propose(run, Changes(checkpoint_every=1), "short allocations")
    assert install(run, "a02")["approved_by"] == []
    with pytest.raises(InputError, match="decay is linear already"):
        propose(run, Changes(decay="linear"), "again")
    with pytest.raises(InputError, match="--reason is empty"):
        propose(run, Changes(updates=31), " ")
    assert drive(recipe, run.path, resume=True, until="4") == 0
    assert [one["state"] for one in listing(run)] == ["adopted", "adopted"]
    assert scheduled(run, run.recipe()) == 30
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == [
        "step-000002", "step-000003", "step-000004",
    ]  # fmt: skip


def test_a_proposal_whose_file_was_edited_is_neither_signed_nor_installed(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((30, 6),))
    recipe, run = project.recipe(trust={"operator": [new_key(tmp_path / "ola")]}), RunFolder(tmp_path / "run")
    assert drive(recipe, run.path, until="2") == 0
    facts = propose(run, Changes(updates=40), "longer").facts
    assert (facts["prepared"], facts["missing"]) == (30, 10)
    file = run.amendments / "a01.json"
    whole = file.read_text()
    file.write_text(whole.replace('"updates":40', '"updates":26'))
    with pytest.raises(Refused, match="not the proposal that the ledger holds"):
        approve(run, "a01", load_key(tmp_path / "ola"))
    file.write_text(whole)
    approve(run, "a01", load_key(tmp_path / "ola"))
    file.write_text(whole.replace("longer", "shorter"))
    with pytest.raises(Refused, match="not the proposal that the ledger holds"):
        install(run, "a01")
    file.unlink()
    assert install(run, "a01")["state"] == "installed", "the ledger has it all"


def test_an_amendment_proposed_for_another_schedule_is_refused(tmp_path: Path) -> None:
    project, run = Project(tmp_path / "project", slots=((30, 6),)), RunFolder(tmp_path / "run")
    assert drive(project.recipe(), run.path, until="2") == 0
    for updates in (26, 28):
        propose(run, Changes(updates=updates), "longer")
    for name in ("a01", "a02"):
        install(run, name)
    assert drive(project.recipe(), run.path, resume=True, until="3") == 0
    first, second = listing(run)
    assert (first["state"], second["state"]) == ("adopted", "refused")
    assert "proposed where updates was 24, but 26 is in force" in str(second["refused"])
