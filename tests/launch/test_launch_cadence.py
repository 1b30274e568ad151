"""`checkpoint.every: auto` in the trainer: every save follows from the ledger. And work done again is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import UPDATES, Runs, receipts, told
from small import drive
from torch.optim.optimizer import register_optimizer_step_pre_hook

from assay.errors import InputError
from assay.ledger.ledger import read
from assay.plan.cadence import checkpoint_steps, follows
from assay.recipe import load as recipes
from assay.release.claims import Case
from assay.release.claims_ledger import chain_claim, receipts_claim
from assay.run import metrics
from assay.run.consumption import consumption
from assay.run.folder import RunFolder
from assay.run.status import status

Fresh = Callable[[str], Path]


def test_what_was_saved_follows_from_the_receipts_of_the_choices(runs: Runs, fresh: Fresh) -> None:
    wanted = {"every": "auto", "auto": {"interruption_hours": 1e-5}, "keep": "all", "slot_ends": False}
    path, run = runs.small("auto", checkpoint=wanted), fresh("")
    assert drive(path, run, until="5") == 0
    assert drive(path, run, resume=True) == 0
    recipe, every, due, opened = recipes.load(path), 0, set[int](), 0
    for receipt in read(run / "ledger.jsonl"):
        if receipt.kind == "cadence":
            every = receipt.body["every"]
            assert follows(receipt.body) == every
            at = receipt.body["step"]  # the save of that very step may still be in the air
            later = {step for step in checkpoint_steps(recipe, None, every)["full"] if step > at}
            due = {step for step in due if step <= at} | later
        elif receipt.kind == "checkpoint.saved":
            step = receipt.body["step"]
            assert step == min(due) or step == 5, "5 is where --until stopped"
            due -= {step}
        opened += receipt.kind in ("start", "recovery")
    assert not due
    choices = receipts(run, "cadence")
    assert [one.body["by"] for one in choices][:2] == ["schedule", "young"], "measured after the first save"
    assert {one.body["segment"] for one in choices} == {1, 2}, "each segment begins with one"
    assert status(RunFolder(run))["checkpoint_every"] == every


def test_a_trace_is_read_once_before_the_segment_is_opened(runs: Runs, fresh: Fresh) -> None:
    """What becomes of the file afterwards ends no training; a missing one opens no segment."""
    wanted = {"every": "auto", "auto": {"trace": "trace.csv", "most": 3}, "keep": "all", "slot_ends": False}
    path, run, trace = runs.small("trace", checkpoint=wanted), fresh(""), runs.path / "trace.csv"
    assert drive(path, run, until="4") == InputError.code
    assert receipts(run, "start") == []
    words = "time,zone,available,usd_per_hour\n2025-10-04T00:00:00Z,z,1,2\n2025-10-04T02:00:00Z,,,\n"

    trace.write_text(words)
    hook = register_optimizer_step_pre_hook(lambda *_: trace.unlink(missing_ok=True))
    try:
        assert drive(path, run, until="4") == 0
    finally:
        hook.remove()
    assert not trace.exists()
    [first, *_] = receipts(run, "cadence")
    assert (first.body["between_seconds"], first.body["between_from"][:5]) == ("7200", "trace")


def test_a_choice_that_its_figures_do_not_give_fails_verification(runs: Runs, fresh: Fresh) -> None:
    run = fresh("half")
    body = {"segment": 1, "step": 6, "every": 4, "scheduled": 400, "least": 1, "most": 9, "save_seconds": "2",
            "whole_save_seconds": None, "update_seconds": "1", "between_seconds": "4"}  # fmt: skip
    ledger = RunFolder(run).open_ledger()

    def judged() -> str:
        case = Case(run, False, (), print)
        chain_claim(case)
        claim = receipts_claim(case)
        return f"{claim.result}: {claim.evidence}"

    ledger.append("cadence", body)
    assert judged().startswith("verified")
    ledger.append("cadence", body | {"every": 5})
    assert "every" in judged()
    assert judged().startswith("failed")


def test_without_auto_nothing_is_chosen(runs: Runs) -> None:
    assert receipts(runs.path / "whole", "cadence") == []


def test_updates_done_again_are_marked_counted_and_no_new_data(
    runs: Runs, fresh: Fresh, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fresh("half")
    assert drive(runs.plain, run, resume=True, from_step=3) == 0
    lines = list(metrics.updates(run / "metrics.jsonl"))
    assert [line["update"] for line in lines if line.get("recomputed")] == [3, 4, 5]
    assert [line["segment"] for line in lines if line.get("recomputed")] == [2, 2, 2]
    whole = metrics.by_update(runs.path / "whole" / "metrics.jsonl")
    again = metrics.by_update(run / "metrics.jsonl")
    assert len(again) == UPDATES
    assert all(metrics.comparable(again[update]) == metrics.comparable(whole[update]) for update in whole)
    RunFolder(run).open_ledger().append("price", {"usd_per_hour": "36000000"})
    found = status(RunFolder(run))["recomputed"]
    seconds = sum(line["seconds"] for line in lines if line.get("recomputed"))
    assert (found["updates"], found["differing"], told(run).alarms) == (3, 0, [])
    assert found["seconds"] == pytest.approx(seconds, abs=0.001)
    assert float(found["usd"]) == pytest.approx(10_000 * seconds, abs=10)
    own = consumption(RunFolder(run))
    assert own.again == found
    assert own.recomputed == found["positions"] > 0

    from assay.cli.exposure import exposure_command

    exposure_command(run, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["recomputed_work"] == found
    exposure_command(run)
    assert "updates done again: 3 (" in capsys.readouterr().out
