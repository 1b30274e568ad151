"""The state of a run follows from its receipts, and its seven numbers never stand for one another."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from small import Project

from assay.errors import AssayError, InputError, Refused, VerificationError
from assay.ledger import chain
from assay.ledger.ledger import Ledger, first_previous
from assay.plan.figures import flops_per_position
from assay.recipe import load as recipes
from assay.run import owner
from assay.run.folder import RunFolder, create
from assay.run.history import gather, history
from assay.run.status import status

START = ("start", {"segment": 1, "mode": "scratch", "step": 0})
RECOVERY = ("recovery", {"segment": 2, "mode": "resume", "step": 6, "evidence": {}})
HOLD = ("hold", {"cause": "stop", "reason": None})
INTERRUPTED = ("interrupted", {"segment": 1, "step": 7, "cause": "signal"})
FAILED = ("failed", {"segment": 1, "step": 7, "code": 5})
DONE = ("end", {"segment": 1, "step": 24, "cause": "done"})


@pytest.fixture
def run(project: Project) -> RunFolder:
    """A run that was created and never started."""
    recipe = project.recipe(schedule__updates=30)
    return create(project.path / "run", recipe, recipes.load(recipe))


def state(run: RunFolder) -> Any:
    return status(run)["state"]


def tell(run: RunFolder, *receipts: tuple[str, dict[str, Any]], ago: float = 0.0) -> None:
    """Append receipts as if written `ago` seconds before now."""
    told = Ledger(run.ledger, run.run_id())
    stamp = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    with chain.lock(run.ledger) as file:
        head = chain.Head(told.head["seq"] + 1, told.head["digest"], run.ledger.stat().st_size)
        for kind, body in receipts:
            record = {"time": stamp, "kind": kind, "body": body}
            head = chain.append(file, head, lambda at, r=record: {**r, "seq": at.lines, "previous": at.digest})


def report(run: RunFolder, updates: range, *, seconds: float = 0.5, ago: float = 0.0) -> None:
    """Metrics lines of these updates, written `ago` seconds before now."""
    stamp = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat().replace("+00:00", "Z")
    with run.metrics.open("a") as file:
        for update in updates:
            line = {"update": update, "segment": 1, "time": stamp, "loss": 4.0, "seconds": seconds, "order_digest": "d"}
            file.write(json.dumps(line) + "\n")


def saved(step: int, segment: int = 1, kind: str = "full") -> tuple[str, dict[str, Any]]:
    """A receipt of a checkpoint; its manifest's digest is told by segment and step."""
    return "checkpoint.saved", {
        "checkpoint": kind, "step": step, "segment": segment, "folder": f"checkpoints/step-{step:06d}",
        "manifest_sha256": f"{segment}:{step}", "state_sha256": None, "weights_sha256": "w", "order_digest": "o",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ((), "created"),
        ((HOLD,), "held"),
        ((HOLD, ("released", {"reason": None})), "created"),
        ((START,), "running"),
        ((START, HOLD), "held"),
        ((START, HOLD, INTERRUPTED), "held"),
        ((START, HOLD, INTERRUPTED, ("released", {})), "interrupted"),
        ((START, INTERRUPTED), "interrupted"),
        ((START, ("end", {"segment": 1, "step": 9, "cause": "until"})), "interrupted"),
        ((START, INTERRUPTED, ("failed", {"before_start": True, "code": 4})), "interrupted"),
        ((START, FAILED), "failed"),
        ((START, FAILED, RECOVERY), "running"),
        ((START, DONE), "ended"),
        ((START, INTERRUPTED, ("abandoned", {"reason": "tests"})), "abandoned"),
        ((("weather", {"rain": True}), START), "running"),
    ],
)
def test_the_state_follows_from_the_receipts(run: RunFolder, receipts: Any, expected: str) -> None:
    tell(run, *receipts)
    assert state(run) == expected


def test_a_hold_on_an_owned_run_is_stopping_until_the_owner_leaves(run: RunFolder) -> None:
    tell(run, START)
    with owner.own(run):
        assert state(run) == "running"
        owner.stop(run, "tests")
        assert state(run) == "stopping"
    assert state(run) == "held"


@pytest.mark.parametrize(("seconds", "ago", "expected"), [
    (1.0, 30.0, "running"),  # a start may take this long
    (1.0, 70.0, "unknown"),
    (20.0, 70.0, "running"),  # slow updates are not silence
    (20.0, 210.0, "unknown"),
])  # fmt: skip
def test_silence_of_ten_times_the_median_update_is_unknown(
    run: RunFolder, seconds: float, ago: float, expected: str
) -> None:
    old = json.loads(run.ledger.read_bytes())["body"]
    run.ledger.unlink()
    chain.create(run.ledger)
    with chain.lock(run.ledger) as file:
        head = chain.Head(0, first_previous(old["run_id"]), 0)
        created = {"seq": 0, "time": "2020-01-01T00:00:00.000Z", "kind": "run.created", "body": old}
        chain.append(file, head, lambda at: {**created, "previous": at.digest})
    tell(run, START, ago=1000.0)
    report(run, range(10), seconds=seconds, ago=ago)
    assert state(run) == expected
    tell(run, INTERRUPTED, ago=900.0)
    assert state(run) == "interrupted", "what is known is not unknown, however old"


def test_the_seven_numbers_come_from_seven_places(run: RunFolder, project: Project) -> None:
    names = ("scheduled", "projected", "affordable", "reported", "saved", "mirrored", "prepared")

    def numbers() -> tuple[Any, ...]:
        facts = status(run)
        return tuple(facts[name] for name in names)

    assert numbers() == (30, None, None, None, None, None, 24)
    tell(run, START)
    report(run, range(9))
    assert numbers() == (30, None, None, 9, None, None, 24), "what was not saved is not shown as saved"
    tell(run, saved(3), saved(7, kind="weights"))
    assert numbers() == (30, None, None, 9, 3, None, 24), "weights alone cannot be resumed"
    tell(run, saved(6), ("checkpoint.removed", {"manifest_sha256": "1:3"}))
    assert numbers() == (30, None, None, 9, 6, None, 24)
    (project.path / "data" / "queue.jsonl").unlink()
    assert numbers() == (30, None, None, 9, 6, None, None), "no other number stands in for the prepared ones"
    run.metrics.unlink()
    assert numbers() == (30, None, None, None, 6, None, None)


def test_how_the_newest_process_ended_is_shown_with_its_own_words_alone(run: RunFolder) -> None:
    assert status(run)["ending"] is None
    tell(run, ("failed", {"before_start": True, "code": 3}))
    seq = history(run.ledger).last.seq  # type: ignore[union-attr]
    run.outcome.write_text(json.dumps({"ledger": {"seq": seq}, "message": "the control failed"}))
    wanted = {"outcome": "failed", "code": 3, "cause": None, "message": "the control failed"}
    assert (state(run), status(run)["ending"]) == ("failed", wanted)
    tell(run, START)
    assert status(run)["ending"] is None, "another process trains"
    tell(run, INTERRUPTED)
    wanted = {"outcome": "interrupted", "code": 75, "cause": "signal", "message": None}
    assert status(run)["ending"] == wanted, "the words are of an older end"
    run.outcome.write_text("{")
    assert status(run)["ending"] == wanted


def test_an_end_that_was_lost_is_a_warning(run: RunFolder) -> None:
    report(run, range(2))
    tell(run, START, ("metrics.sealed", {"start": 0, "stop": run.metrics.stat().st_size, "sha256": "d", "at": "end"}))
    assert not status(run)["warnings"]
    run.metrics.write_bytes(run.metrics.read_bytes()[:-3])
    with run.ledger.open("ab") as file:
        file.write(b'{"seq": 9')
    torn, short = status(run)["warnings"]
    assert "ledger.jsonl ends in the middle of a receipt" in torn
    assert "metrics.jsonl has " in short


def test_the_mfu_is_that_of_the_newest_segment_without_pauses_and_warm_up(run: RunFolder) -> None:
    recipe = run.recipe()
    flops = recipe.positions_per_update * sum(flops_per_position(recipe).values())
    peaks = {1: 10**12, 2: 10**13}
    tell(run, *(
        (kind, body | {"numerics": {"peak": {"flops_per_second": peak}}})
        for (kind, body), peak in zip((START, RECOVERY), peaks.values(), strict=True)
    ))  # fmt: skip
    for segment, updates, warm in ((1, range(12), 0.5), (2, range(6, 17), 0.25)):
        with run.metrics.open("a") as file:
            for update in updates:
                usual = warm if update - updates[0] >= 10 else 9.0
                parts = {"compute": usual, "validation": 7.0 if update == updates[-1] else 0.0}
                line = {"update": update, "segment": segment, "time": "2026-01-01T00:00:00Z", "loss": 4.0,
                        "seconds": 1.0, "order_digest": "d", "parts": parts}  # fmt: skip
                file.write(json.dumps(line) + "\n")
        assert status(run)["mfu"] == pytest.approx(flops / warm / peaks[segment])


def test_a_recovery_leaves_what_came_after_its_checkpoint(run: RunFolder) -> None:
    def line() -> list[tuple[int, int]]:
        return [(item.segment, item.step) for item in history(run.ledger).line]

    def recovery(segment: int, manifest: str, step: int) -> tuple[str, dict[str, Any]]:
        return "recovery", {
            "segment": segment,
            "mode": "resume",
            "step": step,
            "evidence": {"manifest_sha256": manifest},
        }

    tell(run, START, saved(6), saved(8, kind="weights"), saved(12), saved(18), INTERRUPTED)
    assert line() == [(1, 6), (1, 8), (1, 12), (1, 18)]
    tell(run, recovery(2, "1:18", 18), saved(24, 2))
    assert line() == [(1, 6), (1, 8), (1, 12), (1, 18), (2, 24)], "an ordinary resume leaves nothing"
    tell(run, recovery(3, "1:6", 6))
    assert line() == [(1, 6)]
    assert status(run)["saved"] == 6
    tell(run, saved(12, 3))
    assert line() == [(1, 6), (3, 12)]
    assert len(history(run.ledger).standing) == 6, "all stand, none is forgotten"
    tell(run, recovery(4, "2:24", 24), saved(30, 4))
    assert line() == [(1, 6), (1, 8), (1, 12), (1, 18), (2, 24), (4, 30)], "an operator may go back to the other line"


@pytest.mark.parametrize("receipt", [
    ("start", {"segment": 1, "mode": "scratch"}),
    ("recovery", {"segment": 1, "mode": "resume", "step": 1, "evidence": None}),
    ("checkpoint.saved", {"step": 1}),
    ("checkpoint.removed", {}),
    ("metrics.sealed", {"start": 0, "stop": "9", "sha256": ""}),
    ("hold", {"reason": "none"}),
])  # fmt: skip
def test_a_forged_receipt_is_one_sentence(run: RunFolder, receipt: Any) -> None:
    tell(run, receipt)
    with pytest.raises(VerificationError, match=r"receipt 1 \(.*was not written by Assay"):
        status(run)


def test_a_history_begins_with_its_creation(run: RunFolder) -> None:
    with pytest.raises(VerificationError, match="no receipt"):
        gather([])
    Ledger.create(run.path / "other.jsonl", "x").append("price", {"run_id": "x"})
    with pytest.raises(VerificationError, match=r"begins with run\.created"):
        history(run.path / "other.jsonl")


def test_one_owner_at_a_time_and_a_look_is_no_owner(run: RunFolder) -> None:
    assert not owner.is_owned(run)
    with owner.own(run):
        assert owner.is_owned(run)
        with pytest.raises(Refused, match="being trained by another process"), owner.own(run):
            raise AssertionError
        with pytest.raises(Refused, match="stop it first"):
            owner.abandon(run, "tests")
    assert not owner.is_owned(run)


def test_what_operators_may_not_do(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no hold to lift"):
        owner.release(run, None)
    owner.abandon(run, "tests")
    before = run.ledger.read_bytes()
    for act in (lambda: owner.stop(run, None), lambda: owner.release(run, None), lambda: owner.abandon(run, "again")):
        with pytest.raises(Refused, match=r"was abandoned on .* \(tests\)"):
            act()
    assert run.ledger.read_bytes() == before
    with pytest.raises(InputError, match="is not a folder"):
        owner.stop(RunFolder(tmp_path / "none"), None)


def test_a_run_is_created_whole_once_and_never_over_something(project: Project) -> None:
    recipe = project.recipe()
    loaded = recipes.load(recipe)
    (project.path / "empty").mkdir()
    run = create(project.path / "empty", recipe, loaded)
    assert run.recipe_yaml.read_bytes() == recipe.read_bytes()
    assert run.recipe() == loaded
    assert run.salt.stat().st_mode & 0o777 == 0o600
    for path, fault in ((run.path, Refused), (project.path / "data", InputError), (recipe, InputError)):
        with pytest.raises(fault):
            create(path, recipe, loaded)
    assert isinstance(Refused("x"), AssayError)
    assert not [path for path in project.path.rglob("*") if ".partial-" in path.name]
