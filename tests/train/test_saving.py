"""Training goes on while a checkpoint is written, and what is written is the state of its own step, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Project, drive
from torch.utils._python_dispatch import TorchDispatchMode

from assay.checkpoint.load import load
from assay.checkpoint.manifest import problems, read_manifest
from assay.files.digest import digest_file
from assay.files.publish import leftovers
from assay.ledger.ledger import Receipt, read
from assay.release.verify import verify
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history

CHECKPOINT = {"every": 4, "keep": "all", "weights_every": 6, "slot_ends": False}

# Runs in a process of its own, because an audit hook stays for the life of a process. The thread that saves is held at
# the model's file until two more updates are done or training is over; `full` fills the disk there, `crowded` before a
# save begins. With `fails` the first update behind a save meets weights that are no numbers, and of that save the
# receipt (`ledger`) or the copy from the device (`device`) fails as well.
CHILD = """
import os, re, shutil, signal, sys, threading
from pathlib import Path
tests, recipe, folder = sys.argv[1:4]
sys.path.insert(0, tests)
from small import drive
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
import assay.train.worker
from assay.checkpoint import room
from assay.plan.memory import state_bytes
from assay.recipe import load as recipes

done, saves, full, moved, asked_at = 0, 0, False, threading.Condition(), None
appeared, late = set(), []
fails, over = None, False

def spoil(module, inputs):
    global over
    if fails and done == 4 and not over and isinstance(getattr(module, "weight", None), torch.nn.Parameter):
        with moved, torch.no_grad():
            module.weight.fill_(torch.nan)
            over = True
            moved.notify_all()

def count(optimizer, *rest):
    global done
    if isinstance(optimizer, AdamW):
        with moved:
            done += 1
            moved.notify_all()
        if done == asked_at:
            os.kill(os.getpid(), signal.SIGTERM)

def hold(event, args):
    global saves, fails
    if event == "open" and str(args[0]).endswith("ledger.jsonl") and args[1] == "r+" and over and fails == "ledger":
        fails = "nothing more"
        raise OSError(28, "No space left on device")
    if event == "os.rename":
        with moved:
            appeared.add("/".join(str(args[1]).split("/")[-2:]))
            moved.notify_all()
    if event == "open" and "x" in (args[1] or "") and threading.current_thread().name.startswith("saving"):
        if "weights/step-000012." in str(args[0]):
            with moved:
                late.append(not moved.wait_for(lambda: "checkpoints/step-000012" in appeared, timeout=20))
    if event == "open" and "x" in (args[1] or "") and threading.current_thread().name.startswith("saving"):
        if str(args[0]).endswith("model.safetensors") and "checkpoints" in str(args[0]):
            saves += 1
            step = int(re.search(r"step-([0-9]+)", str(args[0]))[1])
            with moved:
                moved.wait_for(lambda: done >= step + 2 or over, timeout=60)
            if fails == "device":
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        if str(args[0]).endswith("optimizer.safetensors") and full and saves == 2:
            raise OSError(28, "No space left on device")

register_optimizer_step_post_hook(count)
register_module_forward_pre_hook(spoil)
sys.addaudithook(hold)

def run(name, grace=None):
    global done, over
    done, over = 0, False
    print(name, drive(Path(recipe), Path(folder) / name, grace=grace), flush=True)

run("held")
print("late", sum(late) + 10 * len(late))

asked_at = 10  # the save of step 8 is in the air
run("hasty", 0.0)
run("patient", 1e6)
asked_at = None

full, saves = True, 0
run("full")
full = False

usage, asked = shutil.disk_usage, []
left = state_bytes(recipes.load(Path(recipe)), "weights") + room.SLACK  # for this save alone
def crowded(path):
    global over
    asked.append(path)
    with moved:
        over = len(asked) >= 5
        moved.notify_all()
    return usage(path)._replace(free=usage(path).free if len(asked) < 5 else left)
shutil.disk_usage = crowded
run("crowded")
shutil.disk_usage = usage

for fails in ("ledger", "device"):
    run(fails)
fails = None

room.PROC = Path(folder) / "proc"
room.PROC.mkdir()
(room.PROC / "meminfo").write_text("MemAvailable: 3 kB")
run("small")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, int], str]:
    """The folder of all runs, the recipe, each run's exit code, and what was told."""
    folder = tmp_path_factory.mktemp("saving")
    recipe = Project(folder / "project").recipe(checkpoint=CHECKPOINT)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parents[1]), str(recipe), str(folder)],
        check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = {name: int(code) for name, code in (line.split() for line in done.stdout.splitlines())}
    for stop in (
        4,
        6,
        8,
        12,
        16,
        18,
        20,
        24,
    ):  # each save is the last of its segment, so that nothing goes on beside it
        assert drive(recipe, folder / "blocking", resume=stop > 4, until=str(stop)) == 0
    return folder, recipe, codes, done.stderr


def saved(run: Path) -> list[Receipt]:
    return [receipt for receipt in read(run / "ledger.jsonl") if receipt.kind == "checkpoint.saved"]


def digests(run: Path) -> dict[tuple[str, int], Any]:
    """State and weights digest of everything saved, by kind and step."""
    return {
        (one.body["checkpoint"], one.body["step"]): (one.body["state_sha256"], one.body["weights_sha256"])
        for one in saved(run)
    }


def test_what_is_written_behind_training_is_the_state_of_its_own_step(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    folder, _, codes, _ = runs
    assert codes["held"] == 0
    behind, blocking = saved(folder / "held"), saved(folder / "blocking")
    assert [one.body["asynchronous"] for one in behind] == [one.body["step"] < 24 for one in behind]
    assert not any(one.body["asynchronous"] for one in blocking)
    assert digests(folder / "held").items() <= digests(folder / "blocking").items()
    assert len(digests(folder / "held")) == 6 + 4
    times = {line["update"]: line["time"] for line in metrics.read(folder / "held" / "metrics.jsonl")}
    for one in behind:
        if one.body["asynchronous"] and one.body["checkpoint"] == "full":
            assert times[one.body["step"] + 1] <= one.time, "the receipt came after updates that followed the copy"
    assert [one.body["step"] for one in behind] == sorted(one.body["step"] for one in behind)
    for item in history(folder / "held" / "ledger.jsonl").standing:
        assert not problems(read_manifest(folder / "held" / item.folder))
    for one in behind:
        assert 0 < float(one.body["stall_seconds"]) <= float(one.body["seconds"])


def test_a_full_checkpoint_appears_while_the_weights_of_its_step_are_still_written(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    assert runs[2]["late"] == 10, "held once, and not in vain"


def test_the_state_of_a_step_is_looked_through_once_whatever_is_saved_of_it(project: Project, tmp_path: Path) -> None:
    class Looks(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found += func is torch.ops.aten.aminmax.default
            return func(*args, **(kwargs or {}))

    recipe = project.recipe(checkpoint={"every": 2, "keep": "all", "weights_every": 2}, evaluate={"every": None})
    with Looks() as looks:
        assert drive(recipe, tmp_path / "run", until="2") == 0
    kinds = [(one.body["checkpoint"], one.body["step"]) for one in saved(tmp_path / "run")]
    assert kinds == [("full", 2), ("weights", 2)]
    full = read_manifest(tmp_path / "run" / "checkpoints" / "step-000002")
    assert looks.found == len(full.tensors)


def test_a_manifest_names_the_head_and_the_time_of_its_copy(runs: tuple[Path, Path, dict[str, int], str]) -> None:
    """All that it says of itself belongs to one moment; the metrics up to its step are sealed by then."""
    run = runs[0] / "held"
    receipts = list(read(run / "ledger.jsonl"))
    for one in saved(run):
        manifest = read_manifest(run / one.body["folder"])
        head = receipts[manifest.ledger["seq"]]
        assert head.digest == manifest.ledger["digest"]
        assert head.time <= manifest.time < one.time
        assert not [
            between for between in receipts[head.seq + 1 : one.seq]
            if between.kind == "metrics.sealed" and between.body["at"] == f"step {one.body['step']}"
        ]  # fmt: skip
    assert not [claim for claim in verify(run).claims if claim.result == "failed"]


def test_a_disk_that_fills_under_the_thread_ends_the_run_and_leaves_what_was_saved(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    folder, recipe, codes, told = runs
    assert codes["full"] == 71
    run = folder / "full"
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["message"].endswith(
        "step-000008 could not be written: No space left on device; what was saved before stands"
    )
    assert outcome["message"] in told
    assert list(digests(run)) == [("full", 4), ("weights", 6)]
    assert outcome["step"] > 8, "it was raised while training went on"
    assert not leftovers(run / "checkpoints")
    assert load(run / "checkpoints/step-000004").manifest.step == 4
    assert drive(recipe, run, resume=True) == 0
    assert digests(run) == digests(folder / "held")
    assert not history(run / "ledger.jsonl").alarms


def test_a_stop_with_a_save_in_the_air_saves_once_more_only_where_the_grace_has_time(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    folder, recipe, codes, _ = runs
    for name, steps in (("hasty", [4, 8]), ("patient", [4, 8, 10])):
        run = folder / name
        assert codes[name] == 75
        assert [step for kind, step in digests(run) if kind == "full"] == steps
        outcome = json.loads((run / "outcome.json").read_text())
        assert (outcome["step"], outcome["cause"]) == (10, "signal")
        assert ("the state of step 8 is saved, and --grace has no time" in outcome["message"]) == (name == "hasty")
        assert drive(recipe, run, resume=True) == 0
        assert digests(run).items() >= digests(folder / "held").items()
    assert history(folder / "hasty" / "ledger.jsonl").segments[-1].body["step"] == 8


def test_too_little_space_for_the_next_save_is_told_before_anything_is_written(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    folder, recipe, codes, _ = runs
    run = folder / "crowded"
    assert codes["crowded"] == 71
    assert "for what is being written; what was saved" in json.loads((run / "outcome.json").read_text())["message"]
    assert not leftovers(run / "checkpoints")
    assert not leftovers(run / "weights")
    assert digests(run).items() < digests(folder / "blocking").items()
    assert drive(recipe, run, resume=True) == 0
    assert digests(run) == digests(folder / "held")


@pytest.mark.parametrize(
    ("name", "lost"),
    [("ledger", "the receipt of {}/checkpoints/step-000004 could not be written: No space left on device; what was"),
     ("device", "the device failed: CUDA error: unspecified launch failure; run elsewhere")],
)  # fmt: skip
def test_a_save_in_the_air_that_fails_as_well_hides_nothing_of_the_fault_that_ended_training(
    runs: tuple[Path, Path, dict[str, int], str], name: str, lost: str
) -> None:
    folder, _, codes, told = runs
    run = folder / name
    outcome = json.loads((run / "outcome.json").read_text())
    assert codes[name] == outcome["code"] == 5
    assert outcome["message"].startswith("update 4: loss nan, gradient norm nan; stopped before the optimizer changed")
    assert f"a save in the air was lost as well: {lost.format(run)}" in told
    assert not saved(run)
    assert not leftovers(run / "checkpoints")
    assert list(read(run / "ledger.jsonl"))[-1].body["code"] == 5


def test_without_memory_for_copies_saves_stand_still_and_say_so(
    runs: tuple[Path, Path, dict[str, int], str],
) -> None:
    folder, _, codes, told = runs
    assert codes["small"] == 0
    assert not any(one.body["asynchronous"] for one in saved(folder / "small"))
    assert digests(folder / "small") == digests(folder / "held")
    words = [line for line in told.splitlines() if line.startswith("training stands still while checkpoints")]
    assert len(words) == 1
    assert "0 MB of host memory are free" in words[0]


def test_a_run_that_is_stopped_with_a_save_in_the_air_has_that_save_first(project: Project, tmp_path: Path) -> None:
    """`--until` and the end of the schedule wait for what is in the air, at every cadence."""
    recipe = project.recipe(checkpoint={"every": 1, "keep": "all"})
    assert drive(recipe, tmp_path / "run", until="7") == 0
    told = history(RunFolder(tmp_path / "run").ledger)
    assert [item.step for item in told.saved] == list(range(1, 8))
    assert not leftovers(tmp_path / "run" / "checkpoints")


def test_a_checkpoint_whose_receipt_a_kill_prevented_makes_room_for_the_same_step(
    project: Project, tmp_path: Path
) -> None:
    recipe = project.recipe(checkpoint={"every": 3, "keep": "all"})
    run = tmp_path / "run"
    assert drive(recipe, run, until="6") == 0
    (run / "outcome.json").unlink()
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    receipt = max(saved(run), key=lambda one: one.seq)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[: receipt.seq - int(json.loads(lines[0])["seq"])]))
    foreign = run / "checkpoints" / "step-000009"  # of another ledger: not this run's to remove
    shutil.copytree(run / "checkpoints" / "step-000006", foreign)
    manifest = json.loads((foreign / "manifest.json").read_text())
    (foreign / "manifest.json").write_text(json.dumps(manifest | {"run_id": "another"}))

    assert drive(recipe, run, resume=True, until="6") == 0
    assert [one.body["folder"] for one in saved(run)] == ["checkpoints/step-000003", "checkpoints/step-000006"]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-000003", "step-000006", "step-000009",
    ]  # fmt: skip
    for line in (run / "checkpoints" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert digest_file(run / "checkpoints" / name) == f"sha256:{digest}"
    assert not [claim for claim in verify(run).claims if claim.result == "failed"]
