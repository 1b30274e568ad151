"""Which checkpoints stay, and a clean-up that fails stops nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.checkpoint.manifest import lost_lines
from assay.checkpoint.retention import clear_half_written, remove, surplus
from assay.ledger.ledger import Ledger, read
from assay.run.history import AWAITED, SAFE, Saved


def full(step: int, segment: int = 1, kind: str = "full") -> Saved:
    return Saved(step, segment, step, kind, f"checkpoints/step-{step:06d}", f"m{segment}:{step}", None, "w", "o")


def kept(line: list[Saved], keep: int | str, permanent: set[int] | None = None) -> list[int]:
    gone = surplus(line, keep, permanent or set())
    return [item.step for item in line if item not in gone]


def test_the_newest_so_many_stay_and_the_permanent_ones() -> None:
    line = [full(step) for step in (6, 10, 12, 18, 24)]
    assert kept(line, "all") == [6, 10, 12, 18, 24]
    assert kept(line, 2) == [18, 24]
    assert kept(line, 1, {10, 24}) == [10, 24]
    assert kept(line, 9) == [6, 10, 12, 18, 24]
    assert kept([], 1) == []


def test_weights_always_stay_and_do_not_count() -> None:
    line = [full(6), full(8, kind="weights"), full(12), full(14, kind="weights")]
    assert kept(line, 1) == [8, 12, 14]


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(1, 5), st.sets(st.integers(0, 50)))
def test_the_newest_never_goes_and_removal_is_settled(steps: set[int], keep: int, permanent: set[int]) -> None:
    line = [full(step) for step in sorted(steps)]
    stay = kept(line, keep, permanent)
    assert set(stay) >= (steps & permanent) | set(sorted(steps)[-keep:])
    assert len([step for step in stay if step not in permanent]) <= keep
    assert surplus([full(step) for step in stay], keep, permanent) == []


@given(st.lists(st.sampled_from([SAFE, AWAITED]), min_size=1, max_size=12), st.integers(1, 4))
def test_what_waits_for_a_copy_stays_and_so_does_the_newest_copy(copies: list[str], keep: int) -> None:
    line = [replace(full(step), copy=copy) for step, copy in enumerate(copies)]
    stay = kept(line, keep)
    safe = max((step for step, copy in enumerate(copies) if copy == SAFE), default=-1)
    assert set(stay) == {step for step in range(len(copies)) if step >= safe} - {-1} | set(range(len(copies))[-keep:])


def folders(run: Path, *steps: int) -> list[Saved]:
    for step in steps:
        place = run / f"checkpoints/step-{step:06d}"
        place.mkdir(parents=True)
        for name in ("manifest.json", "model.safetensors"):
            (place / name).write_text("{}")
    return [full(step) for step in steps]


def test_removal_is_a_receipt_and_then_a_deletion(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", "run")
    told: list[str] = []
    remove(tmp_path, ledger, folders(tmp_path, 6, 12)[:1], told.append)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000012"]
    assert [(one.kind, one.body["manifest_sha256"]) for one in read(ledger.path, "run")] == [
        ("checkpoint.removed", "m1:6")
    ]
    assert not told


def test_a_clean_up_that_fails_is_told_and_stops_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", "run")
    items = folders(tmp_path, 6, 12, 18, 24)
    checkpoints = tmp_path / "checkpoints"
    # What really refuses to go, also for root: a file in the folder's place, a link, nothing at all.
    (checkpoints / "step-000006").rename(checkpoints / "aside")
    (checkpoints / "step-000006").write_text("a file")
    (checkpoints / "step-000012").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", checkpoints / "step-000012")
    (checkpoints / "step-000018").rename(tmp_path / "gone")
    told: list[str] = []
    remove(tmp_path, ledger, items, told.append)
    assert len(told) == 3
    assert all("could not be removed" in text and "training goes on" in text for text in told)
    assert not (checkpoints / "step-000024").exists(), "the ones behind it go all the same"
    assert (tmp_path / "elsewhere" / "model.safetensors").exists(), "a link is not followed"


def test_what_interrupted_saves_left_goes_and_nothing_else(tmp_path: Path) -> None:
    folders(tmp_path, 6)
    place, told = tmp_path / "checkpoints", list[str]()
    (place / "step-000012.partial-0a").mkdir()
    (place / "step-000012.partial-0a" / "model.safetensors").write_text("half")
    (place / "SHA256SUMS.partial-0b").write_text("half")
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", place / "step-000018.partial-0c")
    clear_half_written(place, told.append)
    assert [path.name for path in place.iterdir()] == ["step-000006"]
    assert (tmp_path / "elsewhere").is_dir(), "a link is not followed"
    assert len(told) == 3
    clear_half_written(tmp_path / "nowhere", told.append)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_whole_lines_missing_at_the_end_are_found_by_any_head(tmp_path: Path, lost: int) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", "run")
    ledger.append("run.created", {"run_id": "run"})
    for number in range(4):
        ledger.append("price", {"reading": number})
    (tmp_path / "outcome.json").write_text(json.dumps({"ledger": ledger.head}))
    assert lost_lines(tmp_path, "run") is None
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:-lost]))
    assert [one.seq for one in read(ledger.path)] == list(range(5 - lost)), "what is left chains"
    assert "outcome.json was written after receipt 4" in str(lost_lines(tmp_path, "run"))
    ledger.path.write_bytes(b"".join(lines[:-1]))
    Ledger(ledger.path, "run").append("price", {"reading": "another"})
    assert "names another receipt 4" in str(lost_lines(tmp_path, "run"))
