"""What was due at a step when the machine went away is done after the return, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import Runs, receipts
from small import drive

from assay.errors import InputError
from assay.launch.arrival import catch_up
from assay.run.duties import Duty, duties, order
from assay.run.folder import RunFolder


def states(run: RunFolder) -> list[tuple[str, int, str]]:
    return [(one.act, one.step, one.state) for one in duties(run)]


def test_what_was_due_is_done_after_the_return_and_once(runs: Runs, fresh: Callable[[str], Path]) -> None:
    run = RunFolder(fresh("half"))  # it stands at step 6 of 12, with weights of step 4
    assert duties(run) == []
    order(run, "evaluation", [], weights=True)
    order(run, "evaluation", [4, 12], weights=False)
    order(run, "export", [6], weights=False)
    assert states(run) == [("evaluation", 4, "due"), ("export", 6, "due"), ("evaluation", 12, "coming")]
    torn = run.path / "exports/step-000006"
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("of a process that was killed before its receipt")
    catch_up(run)
    assert states(run) == [("evaluation", 4, "done"), ("export", 6, "done"), ("evaluation", 12, "coming")]
    [found] = receipts(run.path, "evaluation")
    assert found.body["step"] == 4
    assert len(receipts(run.path, "export")) == 1
    assert (torn / "model.safetensors").is_file()
    before = run.ledger.read_bytes()
    catch_up(run)
    assert run.ledger.read_bytes() == before, "once"
    assert drive(runs.plain, run.path, resume=True) == 0
    assert [one for one in states(run) if one[2] == "due"] == [("evaluation", 8, "due"), ("evaluation", 12, "due")]


def test_a_duty_whose_checkpoint_is_no_more_is_gone_and_not_done_on_another(
    runs: Runs, fresh: Callable[[str], Path]
) -> None:
    run = RunFolder(fresh("half"))
    order(run, "export", [3], weights=False)
    [saved] = [one for one in receipts(run.path, "checkpoint.saved") if one.body["step"] == 3]
    assert duties(run) == [Duty("export", 3, "due", "checkpoints/step-000003")]
    run.open_ledger().append("checkpoint.removed", {"folder": "checkpoints/step-000003", "step": 3,
                                                    "manifest_sha256": saved.body["manifest_sha256"]})  # fmt: skip
    assert states(run) == [("export", 3, "gone")]


def test_an_order_of_nothing_is_refused(fresh: Callable[[str], Path]) -> None:
    run = RunFolder(fresh("half"))
    for act, steps, weights, message in (
        ("card", [3], False, "evaluation or export is expected"),
        ("export", [], False, "needs either --at STEP"),
        ("export", [3], True, "needs either --at STEP"),
        ("export", [0], False, "--at is 0; a number of completed updates"),
    ):
        with pytest.raises(InputError, match=message):
            order(run, act, steps, weights)
    assert receipts(run.path, "duty") == []
