"""Coming back or not, which places are left alone, and what a launch file may say: all without a machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_runs import receipts
from small import Project

from assay.errors import InputError, Refused
from assay.files.retry import Policy
from assay.launch import allocation, skypilot, slurm
from assay.launch.coming_back import End, Failure, after, avoided, in_a_row
from assay.launch.description import Launch, Restarts, load, task
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create

LIMITS = Restarts(first_seconds=4.0, longest_seconds=60.0, most=5)
PAUSES = Policy(first=4.0, most=60.0)
ALL_CODES = (0, 2, 3, 4, 5, 6, 70, 71, 75)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
ends = st.builds(
    End,
    code=st.sampled_from(ALL_CODES),
    cause=st.sampled_from([None, "preempted", "signal", "network", "stop", "guard"]),
    step=st.none() | st.integers(0, 5),
    saved=st.none() | st.integers(0, 5),
)


@pytest.mark.parametrize("code", ALL_CODES)
@pytest.mark.parametrize("cause", [None, "preempted", "signal", "network", "stop", "guard"])
def test_the_contracts_codes_decide(code: int, cause: str | None) -> None:
    chosen = after([End(code, cause, 7, 5)], LIMITS, PAUSES).act
    if code == 4:
        assert chosen == ("end" if cause in ("stop", "guard") else "data")
    else:
        assert chosen == ("again" if code in (71, 75) and cause not in ("stop", "guard") else "end")


@given(st.lists(ends, min_size=1, max_size=12), st.booleans(), st.booleans())
def test_it_always_ends_in_the_end_and_never_against_a_word(past: list[End], held: bool, asked: bool) -> None:
    chosen = after(past, LIMITS, PAUSES, held=held, asked=asked)
    last = past[-1]
    if held or asked or last.code in (0, 2, 3, 5, 6, 70):
        assert chosen.act == "end"
    if last.code == 71 and past[-2:-1] and (past[-2].code, past[-2].step) == (71, last.step):
        assert chosen.act == "end", "the same failure twice"
    if in_a_row(past) > LIMITS.most:
        assert chosen.act == "end"
    assert 0 <= chosen.seconds <= LIMITS.longest_seconds + LIMITS.first_seconds / 2
    stuck = [End(75, "preempted", step, 3) for step in range(len(past) + LIMITS.most + 1)]
    assert after(stuck, LIMITS, PAUSES).act == "end", "without a new checkpoint it gives up"


def test_the_same_failure_twice_a_hold_and_a_word_end_it() -> None:
    fault = End(71, None, 5, 4)
    assert after([fault, fault], LIMITS, PAUSES).reason.startswith("exit code 71 at update 5 for the second time")
    assert after([fault, End(71, None, 6, 4)], LIMITS, PAUSES).act == "again"
    assert after([End(4, None, 5, 5), End(4, None, 5, 5)], LIMITS, PAUSES).act == "end"
    away = End(75, "network", 5, 4)
    assert after([away, away], LIMITS, PAUSES).act == "again", "an interruption is no failure"
    assert after([away], LIMITS, PAUSES, held=True).act == "end"
    assert after([away], LIMITS, PAUSES, asked=True).act == "end"
    stuck = [End(75, "preempted", step, 3) for step in range(LIMITS.most + 1)]
    assert [after(stuck[:count], LIMITS, PAUSES).act for count in (LIMITS.most, LIMITS.most + 1)] == ["again", "end"]


def test_pauses_double_until_a_checkpoint_is_saved() -> None:
    longest = Policy(first=4.0, most=60.0, chance=lambda low, high: high)
    kills = [End(75, "preempted", step, 10) for step in range(6)]
    pauses = [after(kills[:count], LIMITS, longest).seconds for count in range(1, 5)]
    assert pauses == [6.0, 10.0, 18.0, 34.0]
    assert after([*kills[:4], End(75, "preempted", 30, 20)], LIMITS, longest).seconds == 6.0


def test_a_place_cools_down_longer_each_time() -> None:
    hour = timedelta(hours=1)
    once = [Failure("a", "control", NOW - timedelta(minutes=59)), Failure("b", "preempted", NOW - hour)]
    assert avoided(once, NOW, hour) == {"a": NOW + timedelta(minutes=1)}
    twice = [
        Failure("a", "preempted", NOW - timedelta(hours=5)),
        Failure("a", "preempted", NOW - timedelta(minutes=90)),
    ]
    assert avoided(twice, NOW, hour) == {"a": NOW + timedelta(minutes=30)}
    long_ago = [
        Failure("a", "preempted", NOW - timedelta(days=3)),
        Failure("a", "preempted", NOW - timedelta(minutes=90)),
    ]
    assert avoided(long_ago, NOW, hour) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-(10**6), 10**6)), max_size=9), st.integers(0, 10**5))
def test_what_just_failed_is_left_alone_and_never_for_ever(past: list[tuple[str, int]], seconds: int) -> None:
    cool_down = timedelta(seconds=seconds)
    failures = [Failure(place, "preempted", NOW - timedelta(seconds=ago)) for place, ago in past]
    found = avoided(failures, NOW, cool_down)
    assert {place for place, ago in past if max(ago, 0) < min(seconds, 86_400)} <= set(found)
    assert all(NOW < until <= NOW + timedelta(days=1) for until in found.values())


@pytest.mark.parametrize(("more", "words"), [
    ({"rank": 8}, "nearest known key is ranks"),
    ({"restarts": {"mots": 3}}, "restarts.most"),
    ({"on": "moon"}, "on is 'moon'; allowed are local, slurm or skypilot"),
    ({"on": "slurm"}, "the key slurm is missing"),
    ({"on": "slurm", "slurm": {"minutes": 3, "signal_seconds": 180}}, "less than slurm.minutes × 60"),
    ({"usd_per_machine_hour": 16.5}, "usd_per_machine_hour is 16.5; text is expected"),
    ({"usd_per_machine_hour": "0"}, "a decimal number above 0"),
    ({"run": "../elsewhere"}, "does not leave it by '..'"),
    ({"skypilot": {"cluster": "a", "infra": ["gcp/x/y/z"], "accelerators": "H100:8"}}, "cloud/region/zone is expected"),
])  # fmt: skip
def test_a_launch_file_names_what_is_wrong(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(json.dumps({"recipe": "recipe.yaml", "run": "run", **more}))
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_recipe_needs_a_run_folder_and_no_more(project: Project, tmp_path: Path) -> None:
    recipe = project.recipe()
    found = task(recipe, None, tmp_path / "run", 2)
    assert (found.recipe, found.run, found.launch.ranks, found.launch.on) == (recipe, tmp_path / "run", 2, "local")
    with pytest.raises(InputError, match="give one with --run"):
        task(recipe, "local", None, None)
    with pytest.raises(InputError, match="give a launch file"):
        task(recipe, "slurm", tmp_path / "run", None)


SKY = {"cluster": "small", "infra": ["gcp/us-central1/us-central1-a", "gcp/us-east5/us-east5-a"],
       "accelerators": "H100:8", "setup": ["pip install 'assay[train]'"]}  # fmt: skip


def sky_file(path: Path) -> Path:
    """A launch file for SkyPilot."""
    path.write_text(json.dumps({"recipe": "recipe.yaml", "run": "runs/one", "on": "skypilot", "skypilot": SKY,
                                "restarts": {"first_seconds": 0.01, "most": 4}}))  # fmt: skip
    return path


def test_the_task_leaves_places_alone_that_just_failed(tmp_path: Path) -> None:
    found = task(sky_file(tmp_path / "launch.yaml"), None, None, None)
    both = json.loads(skypilot.task_file(found))["resources"]
    assert [place["infra"] for place in both["ordered"]] == SKY["infra"]
    assert both["autostop"] == {"idle_minutes": 30, "down": False}, "an idle machine stops and keeps its disk"
    one = json.loads(skypilot.task_file(found, [SKY["infra"][0]]))
    assert one["resources"]["infra"] == SKY["infra"][1]
    assert one["run"] == "assay launch launch.yaml --on local --ranks 1"
    with pytest.raises(Refused, match=r"restarts\.cool_down_seconds"):
        skypilot.task_file(found, SKY["infra"])


# What `sky` of 0.14 is told and answers, as far as it is used: it streams the job's lines and has codes of its own.
FAKE_SKY = """#!/usr/bin/env python3
import json, sys
from pathlib import Path
home = Path(__file__).parent
with (home / "calls").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "launch":
    resources = json.loads(Path(sys.argv[-1]).read_text())["resources"]
    place = resources.get("infra") or resources["ordered"][0]["infra"]
    print(f"(task, pid=7) launch: allocation 1 of runs/one in {place}", flush=True)
    if "central" in place:
        sys.exit(100)  # the machine went away
    print("(task, pid=7) launch: ended with exit code 3")
    sys.exit(100)
"""


def test_a_machine_that_went_away_is_taken_elsewhere_and_the_code_is_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky = tmp_path / "sky"
    sky.write_text(FAKE_SKY)
    sky.chmod(0o755)
    monkeypatch.setenv(skypilot.COMMAND, str(sky))
    found = task(sky_file(tmp_path / "launch.yaml"), None, None, None)
    said: list[str] = []
    assert skypilot.act(found, "launch", said.append) == {"job": "small", "exit": 3}
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["launch", "down", "launch"], "an unmanaged cluster, and the same command again"
    assert skypilot.left_alone(found) == {SKY["infra"][0]}
    for what in ("stop", "start", "down"):
        assert skypilot.act(found, what, said.append)["exit"] == 0
    assert (tmp_path / "calls").read_text().endswith("stop --yes small\nstart --yes small\ndown --yes small\n")


def test_the_batch_script_gets_its_signal_ahead_of_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    asked = {"minutes": 600, "signal_seconds": 240, "gpus": "h100:8", "cpus": 64}
    path.write_text(json.dumps({"recipe": "recipe.yaml", "run": "runs/one", "on": "slurm", "slurm": asked, "ranks": 8}))
    lines = slurm.script(task(path, None, None, None), ["n7"]).splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--signal=B:USR1@240", "--requeue", "--time=600", "--gpus-per-node=h100:8", "--exclude=n7"} <= options
    assert lines[-1].startswith("exec "), "the launcher takes the place of the shell that gets the signal"
    assert lines[-1].endswith("--on local --ranks 8")


def test_receipts_tell_allocations_apart_and_what_failed(project: Project, tmp_path: Path) -> None:
    recipe = project.recipe()
    run: RunFolder = create(tmp_path / "run", recipe, recipes.load(recipe))
    place = allocation.here(Launch(recipe="r", run="r", zone="z", gpus=8, usd_per_machine_hour="17"))
    assert allocation.begin(run, place, "2026-11-30T10:00:00.000Z") == "1"
    allocation.end(run, place, "1", End(71, None, 5, 4), 2, "machine")
    assert allocation.past_ends(run.ledger) == [End(71, None, 5, 4)]
    assert allocation.begin(run, place, "2099-01-01T10:00:00.000Z") == "2"
    assert allocation.begin(run, place, "2099-01-01T11:00:00.000Z") == "3", "the second never said its end"
    bodies = [receipt.body for receipt in receipts(run.path, "allocation")]
    assert [(b["allocation"], b["event"], b.get("estimated", False)) for b in bodies] == [
        ("1", "began", False), ("1", "ended", False), ("2", "began", False), ("2", "ended", True),
        ("3", "began", False),
    ]  # fmt: skip
    assert {(b["gpus"], b["usd_per_machine_hour"], b["provider"], b["zone"]) for b in bodies} == {
        (8, "17", "local", "z")
    }
    assert [one.why for one in allocation.failures(run.ledger)] == ["machine", "preempted", "preempted"]
    assert "local/z" in {one.place for one in allocation.failures(run.ledger)}
    assert place.host not in run.ledger.read_text()


def test_what_skypilot_says_of_the_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"cluster_name": "c", "cloud": "GCP", "region": "us-central1", "zone": "us-central1-a"}
    monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", json.dumps(told))
    place = allocation.here(Launch(recipe="r", run="r"))
    assert (place.provider, place.zone, place.where) == ("gcp", "us-central1-a", "gcp/us-central1/us-central1-a")
    monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", "{")
    assert allocation.here(Launch(recipe="r", run="r")).provider == "local"
