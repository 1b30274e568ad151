"""What was due at a step when the machine went away is done after the return, once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import Runs, receipts, tree
from small import drive

from assay.cli.duties import duties_command
from assay.errors import InputError
from assay.files.retry import Policy
from assay.launch.arrival import catch_up
from assay.mirror.copying import mirror, own
from assay.mirror.fetching import fetch
from assay.recipe import load as recipes
from assay.release.verify import verify
from assay.run.duties import Duty, duties, order
from assay.run.folder import RunFolder, create


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


def test_a_step_that_was_passed_without_a_checkpoint_is_gone_and_the_order_warns(
    fresh: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(fresh("half"))  # saved at each third step, weights at each fourth; it stands at 6 of 12
    duties_command(run.path, ask="export", at=[5, 6, 8, 9, 10])
    assert states(run) == [
        ("export", 5, "gone"),
        ("export", 6, "due"),
        *(("export", at, "coming") for at in (8, 9, 10)),
    ]
    warned = capsys.readouterr().err
    assert re.findall(r"warning: step (\d+) has no checkpoint and gets none", warned) == ["5", "10"]


def test_what_was_due_at_weights_that_were_not_fetched_is_done_from_the_mirror_s_copy(
    runs: Runs, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    saves = {"every": 3, "keep": "all", "weights_every": 2, "slot_ends": False, "mirror": {"url": str(copies)}}
    recipe, run = runs.small("copied", checkpoint=saves), RunFolder(tmp_path / "run")
    create(run.path, recipe, recipes.load(recipe))
    own(run, str(copies), Policy())
    assert drive(recipe, run.path, until="3") == 0
    order(run, "evaluation", [2], weights=False)
    mirror(run, str(copies), once=True, policy=Policy())
    back = RunFolder(tmp_path / "back")
    fetch(str(copies), back.path, policy=Policy(), project=runs.path)
    assert not (back.path / "weights/step-000002").exists()
    assert states(back) == [("evaluation", 2, "due"), ("mirror", 3, "done")]
    duties_command(back.path, do=True)
    assert states(back) == [("evaluation", 2, "done"), ("mirror", 3, "done")]
    assert tree(back.path / "weights/step-000002") == tree(run.path / "weights/step-000002")
    assert [one.body["step"] for one in receipts(back.path, "checkpoint.fetched")] == [3, 2]
    assert not [path for path in back.path.iterdir() if "fetch" in path.name], "nothing half-brought is left"
    assert [one for one in verify(back.path, [runs.path / "data"]).claims if one.result == "failed"] == []


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
