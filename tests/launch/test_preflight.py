"""Pre-flight: whatever can be known to be wrong is refused under its own name, and everything else is told."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from launch_runs import flip
from small import Project

from assay.cli import train as commands
from assay.errors import DataError, InputError, MachineError, Refused, VerificationError
from assay.files.digest import digest_file
from assay.launch import machine
from assay.launch.checks import NOT_APPLICABLE, NOT_PINNED, PASSED, Check
from assay.launch.machine import Gpu
from assay.launch.preflight import as_facts, preflight, refusals
from assay.ledger import chain
from assay.ledger.ledger import Receipt
from assay.plan.cadence import checkpoint_steps, disk
from assay.plan.memory import memory
from assay.recipe import load as recipes
from assay.run import owner
from assay.run.folder import RunFolder, create
from assay.run.history import History, gather, history

WRONG = "sha256:" + "0" * 64
PROMISE = {"device_kind": "cpu AVX2"}
START = {"segment": 1, "mode": "scratch", "step": 0, "evidence": {}, "numerics": {"promise": PROMISE}, "code": {}}


@dataclass
class Site:
    """A project with a run that was begun, and whatever a case changes of it."""

    project: Project
    run: RunFolder
    recipe: dict[str, Any] = field(default_factory=dict)  # changed keys
    options: dict[str, Any] = field(default_factory=dict)  # of pre-flight
    inside: ExitStack = field(default_factory=ExitStack)

    def tell(self, kind: str, body: dict[str, Any], ahead: timedelta = timedelta()) -> None:
        """Append a receipt, written so long from now."""
        stamp = (datetime.now(UTC) + ahead).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        told = self.run.open_ledger()
        with chain.lock(self.run.ledger) as file:
            head = chain.Head(told.head["seq"] + 1, told.head["digest"], self.run.ledger.stat().st_size)
            chain.append(
                file,
                head,
                lambda at: {"seq": at.lines, "previous": at.digest, "time": stamp, "kind": kind, "body": body},
            )

    def checks(self) -> dict[str, Check]:
        """The outcome, by name."""
        path = self.project.recipe("recipe", **self.recipe)
        return {one.name: one for one in preflight(recipes.load(path), path.parent, self.run, **self.options)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project and a run in it, both only to be copied."""
    project = Project(tmp_path_factory.mktemp("site") / "project", slots=((10, 2), (14, 3)))
    path = project.recipe("recipe")
    site = Site(project, create(project.path / "run", path, recipes.load(path)))
    site.tell("start", START)
    return project.path


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Iterator[Site]:
    shutil.copytree(made, tmp_path / "project")
    project = Project.__new__(Project)
    project.path = tmp_path / "project"
    found = Site(project, RunFolder(project.path / "run"))
    with found.inside:
        yield found


def new(site: Site) -> None:
    site.run = RunFolder(site.project.path / "fresh")


def changed(**keys: Any) -> Callable[[Site], None]:
    """A new run with a recipe that has these keys."""

    def act(site: Site) -> None:
        new(site)
        site.recipe = keys

    return act


def pinned(name: str, digest: str = WRONG) -> Callable[[Site], None]:
    """A pin that does not hold; weights and config are those of a start from weights."""

    def act(site: Site) -> None:
        new(site)
        site.recipe = {"pins": {name: digest}}
        if name in ("weights", "config"):
            site.recipe["start"] = {"init_from": {"path": model(site)}}

    return act


def model(site: Site, **manifest: Any) -> str:
    """A folder that looks like a checkpoint, for checks that read its manifest and hash its files."""
    folder = site.project.path / "model"
    folder.mkdir(exist_ok=True)
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(name.encode())
    files = {name: {"bytes": 1, "sha256": WRONG} for name in ("model.safetensors", "config.json")}
    value = {
        "format": "assay-checkpoint/1", "run_id": "r", "kind": "weights", "step": 4, "segment": 1, "phase": "decay",
        "time": "t", "recipe": "d", "order_digest": WRONG, "weights_sha256": WRONG, "state_sha256": None, "ledger": {},
        "files": files, "tensors": {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(value | manifest))
    return "model"


def told(kind: str, ahead: timedelta = timedelta(), **body: Any) -> Callable[[Site], None]:
    return lambda site: site.tell(kind, body, ahead)


def with_smi(*lines: str) -> Callable[[Site], None]:
    """A machine whose driver lists these GPUs."""

    def act(site: Site) -> None:
        place = site.project.path / "bin"
        place.mkdir()
        (place / "answer").write_text("".join(f"{line}\n" for line in lines))
        (place / "nvidia-smi").write_text(f"#!/bin/sh\ncat '{place / 'answer'}'\n")
        (place / "nvidia-smi").chmod(0o755)
        patch = site.inside.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        new(site)

    return act


def together(*acts: Callable[[Site], None]) -> Callable[[Site], None]:
    def act(site: Site) -> None:
        for one in acts:
            one(site)

    return act


def owned(site: Site) -> None:
    site.inside.enter_context(owner.own(site.run))


def option(**options: Any) -> Callable[[Site], None]:
    return lambda site: site.options.update(options)


def under_a_file(site: Site) -> None:
    (site.project.path / "file").touch()
    site.run = RunFolder(site.project.path / "file" / "run")


def one_byte_less_of(name: str) -> Callable[[Site], None]:
    def act(site: Site) -> None:
        path = site.project.path / name
        path.write_bytes(path.read_bytes()[:-1])

    return act


def saved_and_damaged(site: Site) -> None:
    names = dict.fromkeys(("weights_sha256", "order_digest"), "x")
    site.tell("checkpoint.saved", {"checkpoint": "full", "step": 6, "segment": 1, "folder": "checkpoints/step-000006",
                                   "manifest_sha256": WRONG, "state_sha256": None, **names})  # fmt: skip


SMALL_GPU = "0, H200, GPU-1, 143771, 1"
PART = {"kind": "weights", "state_sha256": None}
# what is done → the checks that refuse, the exit code, words of the refusal
CASES: dict[str, tuple[Callable[[Site], None], set[str], int, str]] = {
    "what this version cannot do": (
        changed(runtime={"device": "cpu", "engine": "fsdp"}, reduction="fast"), {"this version"}, 3, "reduction asks"),
    "a number of ranks that the lanes do not divide into": (option(ranks=3), {"ranks"}, 3, "3 ranks cannot run"),
    "a receipt that was changed": (
        lambda site: flip(site.run.ledger, -20), {"ledger"}, VerificationError.code, "ledger.jsonl"),
    "a ledger that lost its last lines": (
        lambda site: (site.run.path / "outcome.json").write_text(json.dumps({"ledger": {"seq": 9, "digest": WRONG}})),
        {"ledger"}, 3, "outcome.json was written after receipt 9"),
    "metrics that lost their end": (
        told("metrics.sealed", start=0, stop=99, sha256=WRONG), {"ledger"}, VerificationError.code, "its end was lost"),
    "a hold": (told("hold", cause="guard"), {"holds"}, 3, "is held .guard, since"),
    "a run that was given up": (told("abandoned", reason="wrong"), {"holds"}, 3, "was abandoned"),
    "a run that somebody trains": (owned, {"run folder"}, 3, "is being trained by another process"),
    "another learning choice": (lambda site: site.recipe.update(seed=4), {"run folder"}, 3, "learning choice changed"),
    "no queue": (changed(data__queue="data/none.jsonl"), {"queue"}, InputError.code, "none.jsonl does not exist"),
    "another block": (changed(model__block=8), {"queue"}, 3, "has block 16, but model.block is 8"),
    "a shard that is not here": (
        lambda site: shutil.rmtree(site.project.path / "data" / "train-1"), {"data"}, DataError.code,
        r"1 shard\(s\) are not on this machine"),
    "validation that is not here": (
        changed(data__validation="data/none"), {"validation"}, InputError.code, "data/none"),
    "validation with other bytes": (
        lambda site: flip(site.project.path / "data" / "validation" / "tokens.bin"), {"validation"}, DataError.code,
        "damaged|digest"),
    "validation that is training data": (
        changed(data__validation="data/train-1"), {"validation is not training data"}, 3, "slot 1"),
    "training data with other bytes": (
        lambda site: flip(site.project.path / "data" / "train-0" / "tokens.bin"), {"slots"}, DataError.code, "train-0"),
    "weights that are not here": (
        changed(start={"init_from": {"path": "none"}}), {"start"}, DataError.code, "none"),
    "other weights than the start names": (
        lambda site: changed(start={"init_from": {"path": model(site), "sha256": "sha256:" + "1" * 64}})(site),
        {"start"}, 3, "start.init_from.sha256 is sha256:1"),
    "a run to continue that is not here": (
        changed(start={"continue_from": {"path": "none", "step": 4}}), {"start", "pin weights", "pin config"},
        DataError.code, "none"),
    "weights where a full checkpoint is continued": (
        lambda site: changed(start={"continue_from": {"path": model(site, **PART), "step": 4}})(site), {"start"}, 3,
        "is a weights checkpoint"),
    "another step than is continued": (
        lambda site: changed(
            start={"continue_from": {"path": model(site, kind="full", state_sha256=WRONG), "step": 5}})(site),
        {"start"}, 3, "holds step 4, but"),
    "another state than is continued": (
        lambda site: changed(start={"continue_from": {
            "path": model(site, kind="full", state_sha256=WRONG), "step": 4, "sha256": "sha256:" + "1" * 64}})(site),
        {"start"}, 3, "start.continue_from.sha256 is sha256:1"),
    "a resume when every checkpoint is damaged": (
        saved_and_damaged, {"start"}, DataError.code, "whole .damaged: checkpoints/step-000006"),
    "a resume from a step that was never saved": (
        together(saved_and_damaged, option(from_step=4)), {"start"}, DataError.code, "no full checkpoint of step 4"),
    "a resume from a step before any was saved": (option(from_step=4), {"start"}, DataError.code, "none was saved"),
    "a control that is not here": (
        changed(control={"path": "none", "required": True}), {"control"}, InputError.code, "json does not exist"),
    **{f"the pin {name}": (pinned(name), {f"pin {name}"}, 3, f"pins.{name} is {WRONG}, but what is here has sha256:")
       for name in ("weights", "config", "tokenizer", "validation", "code", "queue_prefix")},
    "a GPU where there is none": (
        together(with_smi(), lambda site: site.recipe.update(runtime={"device": "cuda"})), {"device"}, 3, "has no GPU"),
    "a GPU beyond those that are here": (
        together(with_smi("0, H200, GPU-1, 9, 8"), lambda site: site.recipe.update(runtime={"device": "cuda:1"})),
        {"device"}, 3, "has 1 GPU"),
    "a GPU whose memory somebody else uses": (
        together(with_smi(SMALL_GPU), lambda site: site.recipe.update(runtime={"device": None}, model__ffn=9999)),
        {"memory"}, 71, r"GPU 0 .H200. has 1\.0 MB of .* free, the plan estimates"),
    "more than this machine's memory and disk hold": (
        changed(model__width=1 << 17, model__layers=64), {"memory", "disk"}, 3, "the plan estimates|are kept need"),
    "a place that cannot be written": (under_a_file, {"write access"}, 3, "cannot be written .Not a directory"),
    "a clock before the newest receipt": (
        told("recovered", timedelta(hours=1), file="x", torn_bytes=1), {"clock"}, 71, "the newest receipt was written"),
    "a trace that is not here": (
        changed(checkpoint={"every": "auto", "auto": {"trace": "none.csv"}}), {"cadence"}, InputError.code,
        "none.csv does not exist"),
    "a mirror that is not mounted": (
        changed(checkpoint={"every": 6, "mirror": {"url": "/none/of/these"}}), {"mirror"}, InputError.code,
        "/none/of/these is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_refused_under_its_own_name(site: Site, case: str) -> None:
    act, names, code, words = CASES[case]
    act(site)
    refused = refusals(list(site.checks().values()))
    assert {one.name for one in refused} == names
    for one in refused:
        assert one.code == code
        assert re.search(words, one.detail), one.detail
    assert not list(site.project.path.rglob(".assay-preflight-*")), "nothing is left behind"


def test_a_new_run_is_told_in_full_and_what_is_not_pinned_is_named(site: Site) -> None:
    new(site)
    seen = site.checks()
    assert not refusals(list(seen.values()))
    assert seen["start"].detail == "scratch, optimizer empty, step 0"
    assert {name for name, one in seen.items() if one.result == NOT_PINNED} == {
        "pin tokenizer", "pin validation", "pin code", "pin queue_prefix",
    }  # fmt: skip
    assert {name for name, one in seen.items() if one.result == NOT_APPLICABLE} == {
        "ledger", "control", "pin weights", "pin config", "mirror",
    }  # fmt: skip
    assert as_facts([seen["holds"]]) == [{"name": "holds", "result": PASSED, "detail": "none"}]
    pins = {name.removeprefix("pin "): one.detail for name, one in seen.items() if one.result == NOT_PINNED}
    site.recipe = {"pins": pins}
    again = site.checks()
    assert {again[f"pin {name}"].result for name in pins} == {PASSED}, "what it shows is what a pin says"


def test_sources_that_validation_never_reaches_are_named(site: Site) -> None:
    new(site)
    details = []
    for batches in (1, 99):
        site.recipe = {"evaluate": {"every": 8, "batches": batches}}
        details.append(site.checks()["validation"].detail)
    assert re.search(r"training reads windows 0:4 of \d+, and nothing of second: raise evaluate.batches", details[0])
    assert re.search(r"training reads windows 0:(\d+) of \1$", details[1])


def test_weights_that_a_run_begins_from_can_be_pinned_and_a_resume_asks_its_receipt(site: Site) -> None:
    seen: dict[str, Check] = {}
    for number, start in enumerate(
        ({"init_from": {"path": model(site)}}, {"continue_from": {"path": "model", "step": 4}})
    ):
        changed(start=start)(site)
        model(site, **({"kind": "full", "state_sha256": WRONG} if number else {}))
        seen = site.checks()
        assert seen["pin weights"].result == seen["pin config"].result == NOT_PINNED
        assert ("optimizer restored" in seen["start"].detail) == bool(number)
        site.recipe |= {"pins": {"weights": seen["pin weights"].detail, "config": seen["pin config"].detail}}
        assert site.checks()["pin weights"].result == PASSED
    path = site.project.recipe("recipe", **site.recipe)
    site.run = create(site.project.path / "begun", path, recipes.load(path))
    site.tell("start", START | {"evidence": {"weights_file": seen["pin weights"].detail}})
    shutil.rmtree(site.project.path / "model")
    after = site.checks()
    assert after["pin weights"].result == PASSED
    assert after["pin config"].result == NOT_APPLICABLE
    assert (
        "no full checkpoint was saved: begins again" in after["start"].detail or after["start"].code == DataError.code
    )


def test_what_a_run_is_resumed_from_is_the_newest_checkpoint_that_is_whole(site: Site) -> None:
    folder = site.run.checkpoints / "step-000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    body = {"checkpoint": "full", "segment": 1, "state_sha256": None, "weights_sha256": "w", "order_digest": "o"}
    whole = {"step": 4, "folder": "checkpoints/step-000004", "manifest_sha256": digest_file(folder / "manifest.json")}
    site.tell("checkpoint.saved", body | whole)
    assert site.checks()["start"].detail == "resume at step 4, optimizer restored"
    saved_and_damaged(site)
    assert site.checks()["start"].detail.endswith("; passed over as damaged: checkpoints/step-000006")
    site.options = {"from_step": 4}
    assert site.checks()["start"].detail == "resume at step 4, optimizer restored"
    with site.run.ledger.open("ab") as file:
        file.write(b'{"half')
    assert "6 bytes of an unfinished line will be moved aside" in site.checks()["ledger"].detail


GPUS = [
    Gpu(0, "H200", "GPU-aa", 10**12, 10**12),
    Gpu(1, "H200", "GPU-ab", 10**12, 10**11),
    Gpu(2, "L20", "GPU-b", 5, 5),
]


@pytest.mark.parametrize(
    ("chosen", "left"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-b", [2]), ("1,GPU-aa", [1, 0]), ("0,7,1", [0]), ("GPU-a", [])],
)
def test_the_gpus_are_those_that_the_process_may_see(chosen: str | None, left: list[int]) -> None:
    found = machine.visible(GPUS, chosen)
    assert found is not None
    assert [one.index for one in found] == left


@pytest.mark.parametrize("chosen", ["MIG-5c7a0c5e-32a1-5b6f-b3e9-2c1d3a4b5c6d", "0, MIG-GPU-aa/7/0"])
def test_a_slice_of_a_gpu_is_not_measured_and_no_missing_gpu(chosen: str, project: Project) -> None:
    found = machine.visible(GPUS, chosen)
    assert found is None
    recipe = recipes.load(project.recipe(runtime__device="cuda"))
    assert machine.device(recipe, 1, found, None).startswith("not measured")
    with pytest.raises(Refused, match="has no GPU"):
        machine.device(recipe, 1, [], None)


def run_on(kind: str) -> History:
    head = {"run_id": "r", "recipe": "d"}
    body = START | {"numerics": {"promise": {"device_kind": kind}}}
    receipts = [("run.created", head), ("start", body)]
    return gather(Receipt(seq, "2026-11-30T10:00:00Z", name, told, "") for seq, (name, told) in enumerate(receipts))


def test_kind_and_memory_of_the_devices_are_held_against_plan_and_last_segment(project: Project) -> None:
    recipe = recipes.load(project.recipe(runtime={"device": None}, batch={"micro": 1, "accumulation": 2, "lanes": 4}))
    each = memory(recipe, 4)["total"]
    assert machine.device(recipe, 4, GPUS[:2], None) == "2 × H200; 4 ranks share 2 GPU(s)"
    assert "bits are not claimed" in machine.device(recipe, 2, GPUS[:2], run_on("L20"))
    assert "bits are not claimed" in machine.device(recipe, 1, [], run_on("L20"))
    assert "claimed" not in machine.device(recipe, 1, [], run_on("cpu AVX2"))
    assert "H200 and L20" in machine.device(recipe, 4, GPUS, None)
    tight = [Gpu(0, "H200", "a", 10**12, 2 * each), Gpu(1, "H200", "b", 10**12, 2 * each)]
    assert "estimated" in machine.memory_against_plan(recipe, 4, tight), "two ranks each"
    for total, fault in ((2 * each, MachineError), (2 * each - 1, Refused)):  # held by others now; or never there
        with pytest.raises(fault, match="for its 2 rank"):
            machine.memory_against_plan(recipe, 4, [tight[0], Gpu(1, "H200", "b", total, 2 * each - 1)])
    for nothing in (machine.device(recipe, 1, None, None), machine.memory_against_plan(recipe, 1, None)):
        assert nothing.startswith("not measured")
    second = recipes.load(project.recipe(runtime={"device": "cuda:1"}))
    assert machine.used(second, 1, GPUS) == [GPUS[1]]


def test_a_full_disk_is_the_machine_s_fault_and_what_was_given_up_makes_no_room(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against a disk of a given size: what stands in the line counts as saved, an abandoned branch does not."""
    new(site)
    run = create(site.run.path, site.project.recipe(), recipes.load(site.project.recipe()))
    recipe = run.recipe()
    total = int(disk(recipe, checkpoint_steps(recipe, None))["total"])

    def asked(whole: int, free: int) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: (whole, whole - free, free))
        return machine.free_space(recipe, None, run, history(run.ledger))

    def saved(step: int, segment: int) -> None:
        folder = f"checkpoints/step-{step:06d}"
        (run.path / folder).mkdir()
        (run.path / folder / "model.safetensors").write_bytes(bytes(1000))
        run.open_ledger().append("checkpoint.saved", {
            "segment": segment, "step": step, "checkpoint": "full", "folder": folder, "manifest_sha256": f"m{step}",
            "state_sha256": None, "weights_sha256": f"w{step}", "order_digest": "o",
        })  # fmt: skip

    assert asked(2 * total, total)
    with pytest.raises(MachineError, match=r"lower .* or free space"):
        asked(total, total - 1)
    with pytest.raises(Refused, match="free, but the checkpoints that are kept need"):
        asked(total - 1, total - 1)
    run.open_ledger().append("start", START)
    saved(3, 1)
    assert asked(total, total - 1000)
    saved(6, 1)
    assert asked(total, total - 2000)
    run.open_ledger().append("recovery", START | {
        "segment": 2, "mode": "resume", "step": 3, "evidence": {"manifest_sha256": "m3"}})  # fmt: skip
    assert asked(total, total - 1000)
    with pytest.raises(MachineError):
        asked(total, total - 1001)


@pytest.mark.parametrize(
    ("seconds", "last", "file_time", "words"),
    [
        (1.8e9, None, None, None),
        (1.8e9, "2026-11-30T10:00:00Z", 1.8e9 + 50, None),
        (1.8e9, None, 1.8e9 + 70, "stamps a new file 2027-01-15T08:01:10"),
        (1.8e9, "2027-01-15T08:00:04Z", None, None),  # another machine's clock may be some seconds ahead
        (1.8e9, "2027-01-15T08:00:06Z", None, "the newest receipt was written at 2027-01-15T08:00:06Z"),
        (0.0, None, None, "1970-01-01T00:00:00.00:00, which is past"),
    ],
)
def test_a_clock_is_judged_by_receipts_and_files(
    seconds: float, last: str | None, file_time: float | None, words: str | None
) -> None:
    fault = machine.clock_fault(seconds, last, file_time)
    assert fault is None if words is None else re.search(words, fault or ""), fault
    assert machine.time_server() in ("followed", "none is followed", "not measured")


def test_the_command_ends_with_ok_or_with_the_refusals(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = site.project.recipe("recipe")
    before = site.run.ledger.read_bytes()
    commands.preflight_command(recipe, site.run.path)
    assert capsys.readouterr().out.splitlines()[-1] == "PRE-FLIGHT OK"
    assert site.run.ledger.read_bytes() == before, "nothing is written"
    site.tell("hold", {"cause": "stop"})
    with pytest.raises(SystemExit) as ended:
        commands.preflight_command(recipe, site.run.path, ranks=3)
    assert ended.value.code == 3
    shown = capsys.readouterr()
    assert "PRE-FLIGHT OK" not in shown.out
    assert [line.split(":")[2] for line in shown.err.splitlines()] == [" ranks", " holds"]
    with pytest.raises(SystemExit):
        commands.preflight_command(recipe, site.run.path, ranks=3, json=True)
    value = json.loads(capsys.readouterr().out)
    assert (value["ok"], {one["result"] for one in value["checks"]} >= {"refused", "passed"}) == (False, True)
