"""Coming back or not, which places are left alone, and what a launch file may say: all without a machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from assay.launch.description import Launch, Restarts, Task, load, task
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


def test_a_fault_that_only_the_last_written_line_tells_is_the_same_the_third_time() -> None:
    killed = End(71, None, 10, 4, exact=False)  # lines come every ten updates: at 10, or at any up to 19
    assert after([killed, killed], LIMITS, PAUSES).act == "again"
    chosen = after([killed, killed, killed], LIMITS, PAUSES)
    assert (chosen.act, chosen.reason[:50]) == ("end", "exit code 71 soon after update 10 for the third ti")
    assert after([killed, End(71, None, 13, 4), killed], LIMITS, PAUSES).act == "again"
    assert after([End(71, None, 13, 4), End(71, None, 17, 4)], LIMITS, PAUSES).act == "again"


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


def sky_file(path: Path, restarts: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A launch file for SkyPilot."""
    limits = {"first_seconds": 0.01, "most": 4} | (restarts or {})
    path.write_text(json.dumps({"recipe": "recipe.yaml", "run": "runs/one", "on": "skypilot", "skypilot": SKY | changes,
                                "restarts": limits}))  # fmt: skip
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


# What `sky` of 0.14 is told and answers, as far as it is used. `answers` holds for each command what it says in turn,
# the last one for ever: lines of the job, a state of the cluster (None: it is gone), an exit code of `logs --status`.
FAKE_SKY = (
    f"#!{sys.executable} -IS"
    + """
import json, sys
from pathlib import Path
home, words = Path(__file__).parent, sys.argv[1:]
what = "logs --status" if words[:2] == ["logs", "--status"] else words[0]
calls = home / "calls"
past = calls.read_text().splitlines() if calls.exists() else []
calls.write_text("".join(line + "\\n" for line in [*past, what]))
said = json.loads((home / "answers").read_text()).get(what, [None])
answer = said[min(past.count(what), len(said) - 1)]
if what == "launch":
    (home / f"task-{past.count(what)}").write_text(Path(words[-1]).read_text())
if what in ("launch", "logs"):
    print("".join(f"(task, pid=7) {line}\\n" for line in answer or []), flush=True)
    sys.exit(100)
elif what == "logs --status":
    sys.exit(1 if answer is None else answer)
elif what == "status":
    print("Failed to refresh" if answer == "FAILED" else "I 11-30 a line of its log")
    print("" if answer == "FAILED" else json.dumps([{"name": "small", "status": answer}] if answer else [], indent=2))
"""
)
IN_CENTRAL = "launch: allocation 1 of runs/one in gcp/us-central1/us-central1-a"
IN_EAST = "launch: allocation 2 of runs/one in gcp/us-east5/us-east5-a"
DONE = "launch: ended with exit code 0"


@pytest.fixture
def sky(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answered]:
    """Launches with these answers, and how it went."""

    def launch(answers: dict[str, list[Any]], restarts: dict[str, Any] | None = None, **changes: Any) -> Answered:
        home = project.path / "sky-home"
        home.mkdir(exist_ok=True)
        (home / "sky").write_text(FAKE_SKY)
        (home / "sky").chmod(0o755)
        (home / "answers").write_text(json.dumps(answers))
        (home / "calls").unlink(missing_ok=True)
        monkeypatch.setenv(skypilot.COMMAND, str(home / "sky"))
        project.recipe(checkpoint__mirror={"url": "s3://copies/one"})
        found = task(sky_file(project.path / "launch.yaml", restarts, **changes), None, None, None)
        said: list[str] = []
        code = skypilot.act(found, "launch", said.append)["exit"]
        places = [json.loads(each.read_text())["resources"] for each in sorted(home.glob("task-*"))]
        firsts = [each.get("infra") or each["ordered"][0]["infra"] for each in places]
        return Answered(code, (home / "calls").read_text().splitlines()[1:], "\n".join(said), firsts, found)

    return launch


@dataclass
class Answered:
    """The exit code, SkyPilot's commands after the first question, what people were told, and places by launch."""

    code: int
    calls: list[str]
    said: str
    places: list[str]
    task: Task


def test_a_machine_that_is_gone_is_taken_elsewhere_and_the_code_is_the_runs(sky: Callable[..., Answered]) -> None:
    ended = [IN_EAST, "launch: ended with exit code 3"]
    done = sky({"launch": [[IN_CENTRAL, "update 100"], ended], "status": [None]})
    assert (done.code, done.calls) == (3, ["launch", "status", "launch"])
    assert done.places == SKY["infra"]
    assert skypilot.left_alone(done.task) == {SKY["infra"][0]}
    for what in ("stop", "start", "down"):
        assert skypilot.act(done.task, what, print)["exit"] == 0


def test_a_stream_that_breaks_is_followed_again_and_no_cluster_is_removed(sky: Callable[..., Answered]) -> None:
    broken = {"launch": [[IN_CENTRAL, "update 100"]], "status": ["FAILED", "UP"], "logs --status": [None, 101, 100],
              "logs": [[IN_CENTRAL, "update 150"], [IN_CENTRAL], [IN_CENTRAL, "update 200", DONE]]}  # fmt: skip
    done = sky(broken)
    assert done.code == 0
    assert (done.calls.count("launch"), done.calls.count("logs"), done.calls.count("down")) == (1, 3, 0)
    assert skypilot.left_alone(done.task) == set(), "the place did nothing"
    gave_up = sky({"launch": [[IN_CENTRAL]], "status": ["FAILED"]})
    assert (gave_up.code, gave_up.calls.count("launch"), gave_up.calls.count("down")) == (75, 1, 0)
    assert "the cluster may go on and cost" in gave_up.said


@pytest.mark.parametrize(("answers", "words"), [
    ({"launch": [[IN_CENTRAL]], "status": ["STOPPED"]}, "the cluster small is stopped; its disk is kept"),
    ({"launch": [["no capacity to start it again"]], "status": ["STOPPED"]}, "its disk is kept"),
    ({"launch": [[IN_CENTRAL]], "status": ["UP"], "logs --status": [None, 103]}, "the cluster small is cancelled"),
])  # fmt: skip
def test_what_somebody_stopped_stays_stopped_with_its_disk(
    sky: Callable[..., Answered], answers: dict[str, list[Any]], words: str
) -> None:
    done = sky(answers)
    assert (done.code, done.calls.count("launch"), done.calls.count("down")) == (75, 1, 0)
    assert words in done.said


def test_a_job_that_ended_without_a_word_is_tried_once_more(sky: Callable[..., Answered]) -> None:
    done = sky({"launch": [["the setup fails"]], "status": ["UP"], "logs --status": [100], "logs": [["it failed"]]})
    assert (done.code, done.calls.count("launch"), done.calls.count("down")) == (71, 2, 0)
    free = sky({"launch": [["no capacity"], [IN_EAST, DONE]], "status": ["INIT"], "logs --status": [102]})
    assert (free.code, free.calls.count("launch")) == (0, 2)


def test_the_providers_notice_is_a_preemption_when_the_machine_is_gone(sky: Callable[..., Answered]) -> None:
    notice = [IN_CENTRAL, "update 100", "launch: ended with exit code 75 (signal)"]
    done = sky({"launch": [notice, [IN_EAST, DONE]], "status": ["UP", "UP", None]})
    assert (done.code, done.places) == (0, SKY["infra"])
    assert skypilot.left_alone(done.task) == {SKY["infra"][0]}
    outlived = sky({"launch": [notice], "status": ["UP"]})
    assert (outlived.code, outlived.calls.count("launch")) == (75, 1), "somebody's own signal"
    held = sky({"launch": [[IN_EAST, "launch: ended with exit code 75 (hold)"]], "status": [None]})
    assert (held.code, held.calls) == (75, ["launch"])


def test_a_launcher_that_still_runs_there_is_followed_and_none_is_added(sky: Callable[..., Answered]) -> None:
    done = sky({"logs --status": [101], "logs": [[IN_CENTRAL, DONE]]})
    assert (done.code, done.calls) == (0, ["logs"])


def test_a_region_cools_down_with_its_zone_and_waiting_is_no_refusal(sky: Callable[..., Answered]) -> None:
    gone, infra = [[IN_CENTRAL], [IN_EAST, DONE]], ["gcp/us-central1", "gcp/us-east5"]
    done = sky({"launch": gone, "status": [None]}, infra=infra)
    assert (done.code, done.places) == (0, infra)
    assert skypilot.left_alone(done.task) == {"gcp/us-central1"}
    skypilot._memory_file(done.task).unlink()
    one = sky(
        {"launch": [[IN_CENTRAL], [IN_CENTRAL, DONE]], "status": [None]}, {"cool_down_seconds": 1}, infra=infra[:1]
    )
    assert (one.code, one.places) == (0, infra[:1] * 2)
    assert "the first may be taken again at" in one.said


def test_a_run_whose_only_copy_is_on_the_cluster_is_refused(project: Project) -> None:
    project.recipe()
    found = task(sky_file(project.path / "launch.yaml"), None, None, None)
    with pytest.raises(Refused, match=r"recipe\.yaml has no checkpoint\.mirror"):
        skypilot.act(found, "launch", print)


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
    allocation.end(run, place, "3", killed := End(71, None, 5, 4, exact=False), 2, "machine")
    assert allocation.past_ends(run.ledger)[-1] == killed


def test_what_skypilot_says_of_the_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"cluster_name": "c", "cloud": "GCP", "region": "us-central1", "zone": "us-central1-a"}
    monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", json.dumps(told))
    place = allocation.here(Launch(recipe="r", run="r"))
    assert (place.provider, place.zone, place.where) == ("gcp", "us-central1-a", "gcp/us-central1/us-central1-a")
    monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", "{")
    assert allocation.here(Launch(recipe="r", run="r")).provider == "local"
