"""The four starts: each proved by its receipt, and refused with the right code when the evidence does not hold."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_runs import HALF, Runs, flip, receipts, states, told, tree
from safetensors.torch import load_file
from small import VOCABULARY, drive
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from assay.checkpoint.manifest import read_manifest
from assay.checkpoint.save import Facts, document, save, tensor_digests
from assay.checkpoint.tensors import state_digest
from assay.data import queue as queues
from assay.data.shard import open_shard
from assay.model import initial
from assay.recipe import load as recipes
from assay.run import metrics
from assay.run.owner import own

Fresh = Callable[[str], Path]
WEIGHTS = "whole/weights/step-000004"


def test_scratch_is_proved_by_the_tensors_that_the_seed_gives(runs: Runs) -> None:
    recipe = recipes.load(runs.plain)
    (start,) = receipts(runs.path / "whole", "start")
    model = initial.build(recipe.model, recipe.seed, torch.device("cpu"))
    assert start.body["mode"] == "scratch"
    assert start.body["evidence"]["weights_sha256"] == state_digest(tensor_digests(dict(model.named_parameters())))
    assert (start.body["step"], start.body["evidence"]["optimizer"]) == (0, "fresh")


def test_a_start_says_with_what_it_ran_and_nothing_about_the_machine(
    runs: Runs, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_SECRET_TOKEN", "hush")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/opt/hush/topo.xml")
    run = fresh("")
    assert drive(runs.plain, run, until="1") == 0
    body = receipts(run, "start")[0].body
    assert {"command", "code", "packages", "python", "image", "host", "environment", "numerics", "resolved"} <= set(
        body
    )
    assert {"commit", "dirty", "sha256"} <= set(body["code"])
    assert any(name.startswith("torch==") for name in body["packages"]["list"])
    assert {"deterministic", "devices", "promise"} <= set(body["numerics"])
    text = (run / "ledger.jsonl").read_text()
    for hidden in ("hush", str(runs.path), str(Path.home()), platform.node()):
        assert hidden not in text
    assert body["environment"]["NCCL_TOPO_FILE"] == "…/topo.xml"


def test_init_from_takes_weights_alone_and_begins_at_zero(runs: Runs, fresh: Fresh) -> None:
    manifest = read_manifest(runs.path / WEIGHTS)
    source = {"path": WEIGHTS, "sha256": manifest.files["model.safetensors"]["sha256"]}
    recipe = runs.small("init", start={"init_from": source})
    run = fresh("")
    assert drive(recipe, run, until="1") == 0
    (start,) = receipts(run, "start")
    evidence = start.body["evidence"]
    assert (start.body["mode"], start.body["step"]) == ("init-from", 0)
    assert evidence["weights_sha256"] == manifest.weights_sha256
    assert (evidence["source_step"], evidence["source_run"]) == (4, manifest.run_id)
    assert evidence["optimizer"] == "fresh"
    scratch = receipts(runs.path / "whole", "start")[0].body
    assert start.body["order_digest"] == scratch["order_digest"], "the order begins anew too"
    assert drive(recipe, run, resume=True, until="3") == 0
    assert receipts(run, "recovery")[0].body["mode"] == "resume", "later it is the run's own state that goes on"


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"start": {"init_from": {"path": WEIGHTS, "sha256": "sha256:" + "1" * 64}}}, 3, "init_from.sha256 is"),
    ({"start": {"init_from": {"path": WEIGHTS}}, "model__width": 20, "model__ffn": 24}, 3, "model.width is 20"),
    ({"start": {"init_from": {"path": WEIGHTS}}, "model__tie_embeddings": False}, 3, "tie_embeddings"),
    ({"start": {"init_from": {"path": "whole/weights/none"}}}, 4, "does not exist"),
    ({"start": {"init_from": {"path": "data/queue.jsonl"}}}, 4, "manifest.json does not exist"),
    ({"start": {"continue_from": {"path": "whole", "step": 5}}}, 4, "no full checkpoint of step 5"),
    ({"start": {"continue_from": {"path": WEIGHTS, "step": 4}}}, 3, "weights checkpoint"),
    ({"start": {"continue_from": {"path": "whole/checkpoints/step-000006", "step": 9}}}, 3, "holds step 6"),
    ({"start": {"continue_from": {"path": "whole", "step": 6, "sha256": "sha256:" + "1" * 64}}}, 3, "sha256 is"),
    ({"start": {"continue_from": {"path": "whole", "step": 6}}, "data__seed": 8}, 3, "data.seed is 8"),
    ({"start": {"continue_from": {"path": "whole", "step": 6}}, "batch__micro": 2}, 3, "batch (global) is 4"),
    ({"start": {"continue_from": {"path": "whole", "step": 6}}, "model__rope_theta": 500}, 3, "model.rope_theta"),
    ({"start": {"continue_from": {"path": "whole", "step": 6}}, "data__queue": "data/other.jsonl"}, 4, "other bytes"),
])  # fmt: skip
def test_evidence_that_does_not_hold_is_refused(
    runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, words: str
) -> None:
    if not (runs.path / "data" / "other.jsonl").exists():
        other_queue(runs)
    run = fresh("")
    assert drive(runs.small("wrong", **changes), run) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not told(run).segments
    assert not told(run).saved


def other_queue(runs: Runs) -> Path:
    """The same shards in slots of other lengths."""
    path = runs.path / "data" / "other.jsonl"
    shards = [open_shard(runs.path / "data" / f"train-{number}") for number in range(2)]
    queues.create(path, block=16, dtype=shards[0].dtype, vocabulary=VOCABULARY, tokenizer=shards[0].tokenizer,
                  pool="base")  # fmt: skip
    for shard, updates in zip(shards, (8, 7), strict=True):
        queue = queues.load(path)
        line = queues.propose(queue, global_batch=8, updates=updates, epochs=2, parts=queues.parts_of(queue, shard))
        queues.append(path, line, global_batch=8)
    return path


def test_damaged_weights_start_nothing(runs: Runs, fresh: Fresh) -> None:
    copy = fresh("whole")
    flip(copy / "weights" / "step-000004" / "model.safetensors")
    run = fresh("")
    assert drive(runs.small("hurt", start={"init_from": {"path": f"{copy.name}/weights/step-000004"}}), run) == 4
    assert not told(run).segments


def test_continue_from_is_the_parents_own_continuation(runs: Runs, fresh: Fresh) -> None:
    recipe = runs.small("child", start={"continue_from": {"path": "half", "step": HALF}})
    run = fresh("")
    assert drive(recipe, run) == 0
    whole = states(runs.path / "whole")
    mine = states(run)
    assert mine == {step: whole[step] for step in (7, 9, 12)}, "weights and optimizer, bit for bit"
    ends = [receipts(path, "end")[-1].body["order_digest"] for path in (run, runs.path / "whole")]
    assert ends[0] == ends[1]
    (start,) = receipts(run, "start")
    parent = start.body["evidence"]["parent"]
    assert (start.body["mode"], start.body["step"]) == ("continue-from", HALF)
    assert parent == {"run_id": told(runs.path / "half").run_id, "step": HALF, "state_sha256": whole[HALF]}
    assert told(run).run_id != parent["run_id"]


def test_resume_refuses_another_recipe(runs: Runs, fresh: Fresh) -> None:
    run = fresh("half")
    before = tree(run)
    assert drive(runs.small("faster", optimizer__lr=0.004), run, resume=True) == 3
    after = tree(run)
    assert {name for name in after if after[name] != before.get(name)} <= {"outcome.json", "owner.lock"}
    assert drive(runs.small("often", log={"every": 5}), run, resume=True, until="7") == 0, (
        "what is operational may change"
    )


def test_resume_refuses_other_data(runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    queue, shard = runs.path / "data" / "queue.jsonl", runs.path / "data" / "train-0" / "tokens.bin"
    sound = {path: path.read_bytes() for path in (queue, shard)}
    try:
        flip(shard, 100)
        assert drive(runs.plain, fresh("half"), resume=True) == 4
        shard.write_bytes(sound[shard][:-2])
        assert drive(runs.plain, fresh("half"), resume=True) == 4
        shard.write_bytes(sound[shard])
        queue.write_bytes(other_queue_bytes(runs))
        assert drive(runs.plain, fresh("half"), resume=True) == 4
        assert "other bytes" in capsys.readouterr().err
    finally:
        for path, content in sound.items():
            path.write_bytes(content)


def other_queue_bytes(runs: Runs) -> bytes:
    path = runs.path / "data" / "other.jsonl"
    return (path if path.exists() else other_queue(runs)).read_bytes()


def test_from_step_goes_back_and_what_it_left_is_not_taken_up_again(runs: Runs, fresh: Fresh) -> None:
    run = fresh("half")
    assert drive(runs.plain, run, resume=True, from_step=5) == 4, "no such checkpoint: nothing is guessed"
    assert drive(runs.plain, run, resume=True, from_step=3, until="4") == 0
    assert [one.body["step"] for one in receipts(run, "recovery")] == [3]
    assert drive(runs.plain, run, resume=True) == 0
    assert [one.body["step"] for one in receipts(run, "recovery")] == [3, 4], "not step 6 of the line that was left"
    assert states(run)[12] == states(runs.path / "whole")[12]
    assert (run / "checkpoints" / "step-000006").is_dir()
    assert (run / "checkpoints" / "step-000006-segment-03").is_dir()
    assert not told(run).alarms


def test_a_goal_that_lies_behind_opens_no_segment(runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    run = fresh("half")
    assert drive(runs.plain, run, resume=True, until="1") == 2
    assert f"--until 1 lies behind step {HALF}" in capsys.readouterr().err
    assert len(told(run).segments) == 1
    assert not receipts(run, "recovery")
    assert drive(runs.plain, run, resume=True) == 0


def test_from_step_with_few_kept_does_not_remove_what_it_saves(runs: Runs, fresh: Fresh) -> None:
    run = fresh("whole")
    few = runs.small("few", checkpoint={"every": 3, "keep": 2, "slot_ends": False})
    assert drive(few, run, resume=True, from_step=3, until="9") == 0
    line = [(item.segment, item.step) for item in told(run).line if item.kind == "full"]
    assert line == [(2, 6), (2, 9)]
    assert all((run / item.folder / "manifest.json").is_file() for item in told(run).line)


def test_only_one_process_trains_a_run(runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    run = fresh("half")
    told_before, outcome = (run / "ledger.jsonl").read_bytes(), (run / "outcome.json").read_bytes()
    from assay.run.folder import RunFolder

    with own(RunFolder(run)):
        assert drive(runs.plain, run, resume=True) == 3
    assert "being trained by another process" in capsys.readouterr().err
    assert (run / "ledger.jsonl").read_bytes() == told_before
    assert (run / "outcome.json").read_bytes() == outcome, "the outcome is the owner's"


def test_lost_lines_are_refused(runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    run = fresh("half")
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    for lost in (1, 4):
        (run / "ledger.jsonl").write_bytes(b"".join(lines[:-lost]))
        assert drive(runs.plain, run, resume=True) == 3
        assert "restore the ledger" in capsys.readouterr().err
        assert (run / "ledger.jsonl").read_bytes() == b"".join(lines[:-lost])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stop_before_the_optimizer(
    runs: Runs, fresh: Fresh, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    source = runs.path / f"planted-{value}"
    source.mkdir(exist_ok=True)
    weights = load_file(runs.path / WEIGHTS / "model.safetensors")
    weights["norm.weight"][3] = value
    facts = Facts("planted", 1, 1, "stable", "2026-11-30T10:00:00Z", "r", "sha256:" + "0" * 64, {})
    config = document(recipes.load(runs.plain).model.model_dump(mode="json"))
    folder = save(source, facts, weights, None, {"config.json": config}, {}).folder
    steps: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *rest: steps.append(type(optimizer).__name__))
    run = fresh("")
    try:
        assert drive(runs.small("sick", start={"init_from": {"path": f"{source.name}/{folder.name}"}}), run) == 5
    finally:
        hook.remove()
    assert steps == [], "no optimizer took a step"
    assert "stopped before the optimizer changed" in capsys.readouterr().err
    (line,) = metrics.read(run / "metrics.jsonl")
    assert line["loss"] is None
    assert "loss" in line["nonfinite"]
    assert not told(run).saved
    assert [one.body["code"] for one in receipts(run, "failed")] == [5]
    assert json.loads((run / "outcome.json").read_text())["code"] == 5


def test_a_run_that_blows_up_keeps_its_last_sound_checkpoint(runs: Runs, fresh: Fresh) -> None:
    steps: list[str] = []
    wild = runs.small("wild", optimizer={"kind": "adamw", "lr": 1e37, "grad_clip": 1.0}, checkpoint={"every": 1})
    run = fresh("")
    hook = register_optimizer_step_pre_hook(lambda optimizer, *rest: steps.append(type(optimizer).__name__))
    try:
        assert drive(wild, run) == 5
        done = len(list(metrics.updates(run / "metrics.jsonl")))
        assert len(steps) == done >= 1, "one step for every finite update and none for the last"
        saved = [(item.step, item.state_sha256) for item in told(run).saved]
        assert max(saved)[0] == done
        assert drive(wild, run, resume=True) == 5
        assert len(steps) == done
    finally:
        hook.remove()
    assert [(item.step, item.state_sha256) for item in told(run).saved] == saved
    assert receipts(run, "recovery")[0].body["evidence"]["state_sha256"] == max(saved)[1]


class Waits(TorchFunctionMode):
    """Counts the calls that make the host look at a value of a device."""

    LOOKS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero",
             "is_nonzero", "equal", "allclose", "synchronize")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.LOOKS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_host_waits_exactly_once_an_update(runs: Runs, fresh: Fresh, kind: str) -> None:
    """Two runs differ in their number of updates alone: start, dry update and the one save cancel out."""
    recipe = runs.small(
        "waits", optimizer={"kind": kind, "lr": 0.003}, checkpoint={"every": 100, "keep": "all", "slot_ends": False}
    )
    counted = []
    for updates in (2, 6):
        with Waits() as waits:
            assert drive(recipe, fresh(""), until=str(updates)) == 0
        counted.append(waits.seen)
    assert len(counted[1]) - len(counted[0]) == 4
    assert counted[1].count("tolist") - counted[0].count("tolist") == 4


def test_a_run_that_was_stopped_before_its_first_update_resumes(runs: Runs, fresh: Fresh) -> None:
    run, before = fresh(""), signal.getsignal(signal.SIGTERM)
    hook = register_module_forward_pre_hook(lambda module, given: os.kill(os.getpid(), signal.SIGTERM))
    try:
        assert drive(runs.plain, run) == 75
    finally:
        hook.remove()
        signal.signal(signal.SIGTERM, before)
    assert [one.step for one in told(run).saved] == [0], "it was stopped in the dry update"
    assert drive(runs.plain, run, resume=True) == 0
    assert states(run)[12] == states(runs.path / "whole")[12]
