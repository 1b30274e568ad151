"""A running recipe changes under the rule alone, and everything downstream follows what was adopted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import Project, drive

import assay
from assay.checkpoint.manifest import read_manifest
from assay.errors import InputError, Refused
from assay.ledger.keys import load_key, new_key
from assay.ledger.ledger import Receipt, read
from assay.release.claims import FAILED
from assay.release.verify import verify
from assay.run import metrics
from assay.run.amendments import Changes
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.proposals import approve, install, listing, propose
from assay.run.provenance import code_identity
from assay.run.status import status

LONG = ((30, 6), (30, 6))


def receipts(run: Path, kind: str) -> list[Receipt]:
    return [one for one in read(run / "ledger.jsonl") if one.kind == f"amendment.{kind}"]


def installed(run: Path, **changes: Any) -> str:
    """Propose and install; the amendment's name."""
    outlook = propose(RunFolder(run), Changes(**changes), "a test")
    assert outlook.facts["allowed"], outlook.facts["reason"]
    name = str(outlook.facts["amendment"])
    install(RunFolder(run), name)
    return name


def states(run: Path) -> dict[int, str]:
    told = history(run / "ledger.jsonl")
    return {item.step: str(read_manifest(run / item.folder).state_sha256) for item in told.line if item.kind == "full"}


def lines(run: Path) -> dict[int, dict[str, object]]:
    return {update: metrics.comparable(line) for update, line in metrics.by_update(run / "metrics.jsonl").items()}


def assert_verifies(run: Path) -> None:
    bad = [vars(claim) for claim in verify(run).claims if claim.result == FAILED]
    assert not bad, bad


@pytest.fixture
def long(tmp_path: Path) -> Project:
    """A project whose queue holds sixty updates."""
    return Project(tmp_path / "project", slots=LONG)


def start(recipe: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run), *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"the run ended without {pattern!r}")


def test_amended_while_training_then_killed_equals_the_run_that_was_amended_standing(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((100, 20), (100, 20)))
    wsd = {"kind": "wsd", "updates": 160, "warmup": 3, "decay_fraction": 0.1, "min_lr": 0.0003}
    saves = {"every": 40, "keep": "all", "slot_ends": False}
    recipe = project.recipe(schedule=wsd, checkpoint=saves, evaluate={"every": None}, log={"every": 5})
    run, still = tmp_path / "run", tmp_path / "still"
    with start(recipe, run) as process:
        read_until(process, r"^update \d")
        name = installed(run, updates=180, checkpoint_every=30)
        step = int(read_until(process, rf"amendment {name} is adopted at step (\d+)")[1])
        read_until(process, r"^update ")
        (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        assert process.wait(60) == 71
    assert drive(recipe, run, resume=True) == 0

    assert drive(recipe, still, until=str(step)) == 0
    installed(still, updates=180, checkpoint_every=30)
    assert drive(recipe, still, resume=True) == 0
    assert states(run)[180] == states(still)[180]
    assert lines(run) == lines(still)
    assert len(receipts(run, "adopted")) == 1, "what was adopted stays adopted over the recovery"

    (adopted,) = receipts(run, "adopted")
    assert (adopted.body["updates_old"], adopted.body["updates_new"]) == (160, 180)
    assert adopted.body["step"] == step
    assert adopted.body["rates_before"] == adopted.body["rates_after"]
    assert adopted.body["running"]["updates"] == 180
    assert adopted.body["running"]["checkpoint_every"] == 30
    assert adopted.body["running"]["rates"] == sorted(adopted.body["rates_after"].values())
    assert set(range(step - step % 30 + 30, 180, 30)) <= set(states(run)), "the new cadence"
    facts = status(RunFolder(run))
    assert (facts["scheduled"], facts["reported"], facts["state"]) == (180, 180, "ended")
    assert RunFolder(run).recipe().schedule.updates == 160, "the recipe stays as given"
    for one in (run, still):
        assert_verifies(one)


def test_ranks_that_own_no_matrix_of_muons_adopt_its_rate_as_well(long: Project) -> None:
    """With a large vocabulary rank 0 owns the embedding alone."""
    recipe = long.recipe(
        model__vocabulary=4099, batch={"micro": 2, "accumulation": 2, "lanes": 2}, checkpoint={"every": 6},
        evaluate={"every": None},
    )  # fmt: skip
    run = long.path / "run"
    assert drive(recipe, run, until="6") == 0
    installed(run, updates=40)
    with start(recipe, run, "--start", "resume", "--ranks", "2", "--until", "8") as process:
        read_until(process, r"amendment a01 is adopted at step 6")
        assert process.wait(60) == 0
    (adopted,) = receipts(run, "adopted")
    assert set(adopted.body["running"]["rates"]) == set(adopted.body["rates_after"].values()) == {"0.003", "0.02"}
    assert_verifies(run)


def test_too_late_for_the_rule_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", slots=((100, 20), (100, 20)))
    wsd = {"kind": "wsd", "updates": 200, "warmup": 3, "decay_fraction": 0.4, "min_lr": 0.0003}
    saves = {"every": 130, "slot_ends": False}
    recipe = project.recipe(schedule=wsd, checkpoint=saves, evaluate={"every": None}, log={"every": 5})
    run = tmp_path / "run"
    with start(recipe, run) as process:
        read_until(process, r"^update \d")
        installed(run, updates=220)
        assert "before 120" in read_until(process, r"amendment a01 is refused: (.*)")[1]
        assert process.stderr is not None
        process.stderr.read()
        assert process.wait(60) == 0
    (refused,) = receipts(run, "refused")
    assert refused.body["step"] == 130
    assert not receipts(run, "adopted")
    assert status(RunFolder(run))["scheduled"] == 200
    assert [one["state"] for one in listing(RunFolder(run))] == ["refused"]
    assert_verifies(run)


def test_past_the_boundary_nothing_is_proposed_and_the_reason_is_a_receipt(long: Project, tmp_path: Path) -> None:
    recipe, run = long.recipe(), tmp_path / "run"
    assert drive(recipe, run, until="18") == 0
    outlook = propose(RunFolder(run), Changes(updates=40), "more money")
    assert not outlook.facts["allowed"]
    assert outlook.facts["before_update"] == 18
    assert "before 18" in outlook.facts["reason"]
    assert not receipts(run, "proposed")
    assert "before 18" in receipts(run, "refused")[0].body["reason"]
    assert drive(recipe, run, resume=True) == 0


def test_a_run_without_decay_stops_is_extended_stops_again_and_decays_by_consent_of_its_reviewer(
    long: Project, tmp_path: Path, assay: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    public = new_key(tmp_path / "anna")
    stranger = new_key(tmp_path / "eve")
    assert stranger != public
    recipe = long.recipe(schedule__intent="no-decay", trust={"reviewer": [public]})
    run = tmp_path / "run"
    folder = RunFolder(run)
    assert drive(recipe, run) == 3
    assert status(folder)["saved"] == 18
    assert "no-decay" in status(folder)["warnings"][0]

    outlook = propose(folder, Changes(updates=40), "more funds")
    assert outlook.facts["allowed"]
    assert outlook.facts["approval"] == "reviewer"
    with pytest.raises(Refused, match="needs the approval of a reviewer"):
        install(folder, "a01")
    assert drive(recipe, run, resume=True) == 3, "a proposal changes nothing"
    with pytest.raises(Refused, match="no reviewer"):
        approve(folder, "a01", load_key(tmp_path / "eve"))
    assert approve(folder, "a01", load_key(tmp_path / "anna"))["state"] == "approved"
    with pytest.raises(InputError, match="has approved a01 before"):
        approve(folder, "a01", load_key(tmp_path / "anna"))
    assert install(folder, "a01")["approved_by"]
    assert drive(recipe, run, resume=True) == 3
    assert status(folder)["saved"] == 30, "the new decay start"
    assert all(line["lr"] == 0.003 for line in metrics.read(folder.metrics) if line["update"] >= 3)

    told = assay("amend", run, "--decay", "linear", "--reason", "the money ends")
    assert (told.returncode, "too late" in told.stderr) == (0, False), told.stderr
    approve(folder, "a02", load_key(tmp_path / "anna"))
    install(folder, "a02")
    assert drive(recipe, run, resume=True) == 0
    assert status(folder)["reported"] == 40
    last = metrics.by_update(folder.metrics)[39]
    assert last["lr"] == pytest.approx(0.003 * (1 - 0.9 * 0.9))
    assert not status(folder)["warnings"]
    assert [one["state"] for one in listing(folder)] == ["adopted", "adopted"]
    assert_verifies(run)


def test_a_run_that_names_no_reviewer_cannot_be_allowed_its_decay(long: Project, tmp_path: Path) -> None:
    recipe, run = long.recipe(schedule__intent="no-decay"), tmp_path / "run"
    assert drive(recipe, run) == 3
    outlook = propose(RunFolder(run), Changes(decay="linear"), "why not")
    assert not outlook.facts["allowed"]
    assert "names no reviewer" in outlook.facts["reason"]
    installed(run, decay="none")
    assert drive(recipe, run, resume=True) == 0
    assert all(line["lr"] == 0.003 for line in metrics.read(run / "metrics.jsonl") if line["update"] >= 3)
    assert_verifies(run)


def test_a_branch_that_was_left_behind_adopted_nothing(long: Project, tmp_path: Path) -> None:
    recipe, run, plain = long.recipe(), tmp_path / "run", tmp_path / "plain"
    assert drive(recipe, run, until="12") == 0
    name = installed(run, updates=20, allow_earlier_decay=True)
    assert drive(recipe, run, resume=True, until="14") == 0
    assert status(RunFolder(run))["scheduled"] == 20
    installed_there = history(run / "ledger.jsonl")
    assert [one.body["step"] for one in installed_there.segments[-1].adopted] == [12]
    assert drive(recipe, run, resume=True, from_step=6, until="8") == 0
    told = history(run / "ledger.jsonl")
    assert [one.body["step"] for one in told.segments[-1].adopted] == [6], "adopted anew where training goes on"
    assert [one.body["amendment"] for one in receipts(run, "adopted")] == [name, name]
    assert drive(recipe, run, resume=True) == 0
    assert drive(long.recipe("short", schedule__updates=20), plain) == 0
    assert states(run)[20] == states(plain)[20], "20 updates from the start are the same run"
    assert_verifies(run)


def test_updates_done_again_under_another_schedule_are_no_alarm(long: Project, tmp_path: Path) -> None:
    recipe, run = long.recipe(), tmp_path / "run"
    assert drive(recipe, run, until="12") == 0
    installed(run, updates=20, allow_earlier_decay=True)
    assert drive(recipe, run, resume=True, until="18") == 0
    assert drive(recipe, run, resume=True, from_step=6, until="7") == 0
    installed(run, updates=40)
    assert drive(recipe, run, resume=True, until="19") == 0
    assert status(RunFolder(run))["alarms"] == 0
    again = [line["lr"] for line in metrics.read(run / "metrics.jsonl") if line["update"] == 17]
    assert again[0] < again[1] == 0.003
    assert_verifies(run)


def test_the_amended_recipe_may_resume_and_another_may_not(long: Project, tmp_path: Path) -> None:
    recipe, run = long.recipe(), tmp_path / "run"
    amended = long.recipe("amended", schedule__updates=30)
    assert drive(recipe, run, until="6") == 0
    assert drive(amended, run, resume=True) == 3
    installed(run, updates=30)
    assert drive(long.recipe("other", schedule__updates=31), run, resume=True) == 3
    assert drive(amended, run, resume=True, until="8") == 0
    assert drive(amended, run, resume=True) == 0
    assert status(RunFolder(run))["reported"] == 30
    assert_verifies(run)


def test_a_run_that_ended_constant_is_extended(long: Project, tmp_path: Path) -> None:
    recipe = long.recipe(schedule={"kind": "constant", "updates": 9, "warmup": 3})
    run = tmp_path / "run"
    assert drive(recipe, run) == 0
    installed(run, updates=12)
    assert drive(recipe, run, resume=True) == 0
    assert status(RunFolder(run))["reported"] == 12
    assert_verifies(run)


def test_other_code_needs_an_amendment_where_a_reviewer_is_named(long: Project, tmp_path: Path) -> None:
    public = new_key(tmp_path / "anna")
    recipe, run = long.recipe(trust={"reviewer": [public]}), tmp_path / "run"
    shutil.copytree(Path(assay.__file__).parent, tmp_path / "older" / "assay")
    (tmp_path / "older" / "assay" / "plan" / "figures_before.py").write_text("# what this version has no more\n")
    words = ["train", str(recipe), "--run", str(run), "--until", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "older")}
    subprocess.run([sys.executable, "-m", "assay.cli.main", *words], env=environment, check=True, capture_output=True)
    assert drive(recipe, run, resume=True) == 3
    name = str(propose(RunFolder(run), Changes(code=str(code_identity()["sha256"])), "a fix").facts["amendment"])
    assert drive(recipe, run, resume=True) == 3
    approve(RunFolder(run), name, load_key(tmp_path / "anna"))
    install(RunFolder(run), name)
    assert drive(recipe, run, resume=True) == 0
    (adopted,) = receipts(run, "adopted")
    assert adopted.body["running"]["code"] == code_identity()["sha256"] == adopted.body["code_new"]
    assert_verifies(run)


def test_the_command_shows_both_curves_and_answers_in_json(
    long: Project, tmp_path: Path, assay: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = tmp_path / "run"
    assert drive(long.recipe(), run, until="6") == 0
    told = assay("amend", run, "--updates", 40, "--reason", "more money")
    assert told.returncode == 0, told.stderr
    assert "o before   x after" in told.stdout
    assert "assay amend install" in told.stdout
    image = (run / "amendments" / "a01.svg").read_text()
    assert image.startswith("<svg")
    assert image.count("<polyline") == 2
    done = json.loads(assay("amend", run, "--decay", "none", "--reason", "r", "--json").stdout)
    assert done["ok"]
    assert (done["allowed"], done["before_update"], done["state"]) == (True, 18, "proposed")
    assert done["lr_before"] == done["lr_after"] == 0.003
    refused = assay("amend", run, "--updates", 20, "--reason", "r", "--json")
    assert refused.returncode == 3
    assert "--allow-earlier-decay" in json.loads(refused.stdout)["reason"]
    assert [one["state"] for one in json.loads(assay("amend", "list", run, "--json").stdout)["amendments"]] == [
        "proposed",
        "proposed",
    ]
    wrong = assay("amend", run, "--updates", 24, "--reason", "r")
    assert (wrong.returncode, "already" in wrong.stderr) == (2, True)
    assert assay("amend", "install", run, "a09").returncode == 2
