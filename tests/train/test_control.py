"""A machine that computes other numbers than were recorded is caught before a run is touched."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import Project, drive
from torch import Tensor

from assay.data import queue as queues
from assay.data.batches import Batches
from assay.errors import DataError, InputError
from assay.evaluate.subject import open_subject
from assay.files.digest import digest_file
from assay.launch.preflight import preflight
from assay.ledger.ledger import read
from assay.recipe import load as recipes
from assay.recipe.operational import Runtime
from assay.run.control import FILE, MODEL, SUMS, Control, read_control, sums
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status
from assay.train import numerics
from assay.train.control import Outcome, check, record, reduced
from assay.train.ranks import Ranks


def change(folder: Path, **values: Any) -> None:
    """Change `control.json` as somebody would who records it so: its digest is made to agree."""
    stated = json.loads((folder / FILE).read_text()) | values
    (folder / FILE).write_text(json.dumps(stated))
    (folder / SUMS).write_bytes(sums(digest_file(folder / FILE), stated["files"]))


RUNTIME = Runtime(device="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a run of two updates, and a control of three updates from its weights; only to be read."""
    project = Project(tmp_path_factory.mktemp("control") / "project", slots=((12, 3),))
    recipe = project.recipe(batch={"micro": 2, "accumulation": 2, "lanes": 2}, schedule__updates=12)
    assert drive(recipe, project.path / "run", until="2") == 0
    subject = open_subject(project.path / "run")
    short = reduced(recipes.load(recipe))
    queue = queues.load(project.path / "data" / "queue.jsonl")
    batches = Batches(queue, [project.path / "data"], 7, 8)
    windows = np.stack([batches.batch(update, slice(0, 4)).astype(np.uint32) for update in range(3)])
    record(project.path / "control", short, subject.tensors, windows, {"step": 2})
    return project


@pytest.fixture
def control(made: Project) -> Control:
    numerics.switch_on(recipes.load(made.path / "recipe.yaml"))
    return read_control(made.path / "control")


def again(control: Control, tensors: dict[str, Tensor] | None = None, runtime: Runtime = RUNTIME) -> Outcome:
    return check(control, runtime, "0.001", Ranks(), torch.device("cpu"), tensors)


def test_the_same_machine_gives_the_same_bits(control: Control) -> None:
    outcome = again(control)
    assert (outcome.same, outcome.identical, outcome.passed, outcome.max_difference) == (True, True, True, 0.0)
    assert len({one.loss for one in outcome.updates}) == 3
    assert control.recipe.global_batch == 4, "one micro-batch a lane"


def test_one_flipped_bit_of_one_weight_is_caught(control: Control) -> None:
    tensors = load_file(control.folder / MODEL)
    weight = tensors["blocks.1.attention.q.weight"].view(-1).view(torch.int32)
    weight[5] ^= 1  # the last bit of the mantissa
    outcome = again(control, tensors)
    assert outcome.same
    assert not outcome.identical
    assert not outcome.passed
    weight[5] ^= 1 | 1 << 30  # a bit of the exponent: caught with a tolerance too
    assert again(control, tensors).max_difference > 0.001


@pytest.mark.parametrize(("factor", "elsewhere"), [(1 + 1e-6, True), (1.3, False)])
def test_a_perturbed_matmul_is_caught_by_the_bits_and_a_coarse_one_by_the_tolerance(
    control: Control, monkeypatch: pytest.MonkeyPatch, factor: float, elsewhere: bool
) -> None:
    linear = torch.nn.functional.linear

    def wrong(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(inputs, weight, bias) * factor

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    assert not again(control).passed
    other = Control(**{**vars(control), "promise": {**control.promise, "device_kind": "another"}})
    outcome = again(other)
    assert not outcome.same
    assert outcome.passed == elsewhere, outcome.max_difference


def test_elsewhere_a_tolerance_decides_and_a_value_that_is_not_finite_never_passes(control: Control) -> None:
    other = Control(**{**vars(control), "promise": {**control.promise, "torch": "0.1"}, "state_sha256": "sha256:other"})
    outcome = again(other)
    assert (outcome.same, outcome.identical, outcome.passed) == (False, False, True)
    tensors = load_file(control.folder / MODEL)
    tensors["norm.weight"][0] = float("nan")
    outcome = again(other, tensors)
    assert (outcome.passed, outcome.facts()["max_difference"]) == (False, None)


def test_recomputed_activations_are_other_settings_and_pass_by_tolerance(control: Control) -> None:
    outcome = again(control, runtime=Runtime(device="cpu", recompute=True))
    assert not outcome.same
    assert outcome.passed


@pytest.mark.parametrize("name", [MODEL, "windows.bin"])
def test_a_control_with_other_bytes_is_not_computed(made: Project, tmp_path: Path, name: str) -> None:
    for path in (made.path / "control").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="not what was recorded"):
        read_control(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="is missing"):
        read_control(tmp_path)


def test_an_edited_control_is_not_computed(made: Project, tmp_path: Path) -> None:
    for path in (made.path / "control").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert read_control(tmp_path).sha256 == digest_file(tmp_path / FILE)
    whole = (tmp_path / FILE).read_text()
    stated = json.loads(whole)
    stated["promise"]["threads"] = 77  # as if other bits were expected here
    (tmp_path / FILE).write_text(json.dumps(stated, indent=1, sort_keys=True) + "\n")
    with pytest.raises(DataError, match=f"{FILE} is not what was recorded"):
        read_control(tmp_path)
    (tmp_path / FILE).write_text(whole)
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / SUMS).unlink()
    with pytest.raises(DataError, match=f"{SUMS} is missing"):
        read_control(tmp_path)


@pytest.mark.parametrize("changed", [{"expected": []}, {"format": "x"}, {"files": {}}, {"promise": None},
                                    {"expected": [{"loss": "nan", "grad_norm": "1"}]}])  # fmt: skip
def test_a_file_that_is_no_control_is_named(made: Project, tmp_path: Path, changed: dict[str, Any]) -> None:
    for path in (made.path / "control").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change(tmp_path, **changed)
    with pytest.raises(InputError, match=FILE):
        read_control(tmp_path)


def controls(run: Path) -> list[dict[str, Any]]:
    return [one.body for one in read(run / "ledger.jsonl") if one.kind == "control"]


def before_a_start(recipe: Path, run: Path) -> str:
    """What pre-flight says of the control."""
    (found,) = [one for one in preflight(recipes.load(recipe), recipe.parent, RunFolder(run)) if one.name == "control"]
    return found.detail


def test_training_demands_it_once_on_each_allocation(made: Project, tmp_path: Path) -> None:
    recipe = made.recipe("guarded", batch={"micro": 2, "accumulation": 2, "lanes": 2}, schedule__updates=12,
                         control={"path": "control/control.json", "required": True})  # fmt: skip
    plain = made.recipe("plain", batch={"micro": 2, "accumulation": 2, "lanes": 2}, schedule__updates=12)
    run, other = tmp_path / "run", tmp_path / "other"
    assert "; not passed yet; " in before_a_start(recipe, run)
    assert drive(recipe, run, until="2") == 0
    assert "; passed at 2" in before_a_start(recipe, run)
    assert [(one["passed"], one["identical"], one["bits_expected"]) for one in controls(run)] == [(True, True, True)]
    assert drive(recipe, run, resume=True, until="3") == 0
    assert len(controls(run)) == 1, "the same allocation"
    (run / "salt").write_text("another host, as far as the run can tell")
    assert drive(recipe, run, resume=True, until="4") == 0
    first, second = controls(run)
    assert first["allocation"]["hosts"] != second["allocation"]["hosts"]
    assert first["found"] == second["found"] == first["expected"]
    for number, changed in enumerate(({"recompute": True}, {"recompute": True, "engine": "fsdp"}), 3):
        choice = made.recipe(f"choice{number}", batch={"micro": 2, "accumulation": 2, "lanes": 2},
                             schedule__updates=12, control={"path": "control", "required": True},
                             runtime={"device": "cpu", **changed})  # fmt: skip
        assert drive(choice, tmp_path / "run", resume=True, until=str(number + 2)) == 0
        assert len(controls(run)) == number, f"{changed} is other arithmetic"
    assert drive(plain, other, until="4") == 0
    states = [
        next(item.state_sha256 for item in history(one / "ledger.jsonl").saved if item.step == 4)
        for one in (run, other)
    ]
    assert states[0] == states[1], "the control leaves no trace in the run"


def test_a_control_that_fails_is_exit_3_with_its_receipt_and_nothing_trained(made: Project, tmp_path: Path) -> None:
    (made.path / "false").mkdir()
    for path in (made.path / "control").iterdir():
        (made.path / "false" / path.name).write_bytes(path.read_bytes())
    expected = json.loads((made.path / "false" / FILE).read_text())["expected"]
    expected[1]["loss"] = repr(float(expected[1]["loss"]) + 0.1)
    change(made.path / "false", expected=expected)
    recipe = made.recipe("failing", batch={"micro": 2, "accumulation": 2, "lanes": 2}, schedule__updates=12,
                         control={"path": "false", "required": True})  # fmt: skip
    assert drive(recipe, tmp_path / "run", until="2") == 3
    (body,) = controls(tmp_path / "run")
    assert not body["passed"]
    assert "; FAILED at 2" in before_a_start(recipe, tmp_path / "run")
    assert float(body["max_difference"]) == pytest.approx(0.1)
    told = history(tmp_path / "run" / "ledger.jsonl")
    assert not told.segments
    assert "the control" in json.loads((tmp_path / "run" / "outcome.json").read_text())["message"]
    facts = status(RunFolder(tmp_path / "run"))
    assert (facts["state"], facts["ending"]["code"]) == ("failed", 3)
    assert "the control" in facts["ending"]["message"]


def test_the_commands_record_and_check(made: Project, tmp_path: Path, assay: Callable[..., Any]) -> None:
    done = assay("control", "record", made.path / "run", tmp_path / "c", "--updates", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["updates"] == 2
    checked = json.loads(assay("control", "check", tmp_path / "c" / FILE, "--json").stdout)
    assert (checked["ok"], checked["identical"], checked["passed"]) == (True, True, True)
    assert (checked["updates"], checked["max_difference"], checked["tolerance"]) == (2, 0.0, "0.001")
    recorded = json.loads((tmp_path / "c" / FILE).read_text())["expected"]
    assert [one["update"] for one in checked["by_update"]] == [0, 1]
    for one, kept in zip(checked["by_update"], recorded, strict=True):
        assert one["loss"] == one["loss_recorded"] == float(kept["loss"])
        assert one["grad_norm"] == one["grad_norm_recorded"] == float(kept["grad_norm"])
    for tolerance in ("inf", "nan", "-1", "much"):
        assert assay("control", "check", tmp_path / "c", "--tolerance", tolerance).returncode == 2
    change(tmp_path / "c", state_sha256="sha256:" + "0" * 64)
    assert assay("control", "check", tmp_path / "c").returncode == 6
