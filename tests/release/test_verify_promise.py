"""Bits are promised along one promise alone: a change in mid-run is marked, and begins bits of its own."""

from __future__ import annotations

from pathlib import Path

from forging import records, set_receipt
from small import Project, drive

from assay.release.claims import FAILED
from assay.release.verify import verify
from assay.run.bits import families, family, mark
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status


def test_a_change_of_the_promise_in_mid_run_is_marked_and_starts_bits_of_its_own(tmp_path: Path) -> None:
    project, run = Project(tmp_path / "project"), tmp_path / "run"
    plain, other = project.recipe(), project.recipe("other", runtime={"device": "cpu", "recompute": True})
    assert drive(plain, run, until="8") == 0
    assert drive(other, run, resume=True, from_step=6, until="9") == 0
    assert status(RunFolder(run))["bits"] == "not claimed", "the newest segment's"
    assert drive(plain, run, resume=True, until="10") == 0  # as at first, but from what the other arithmetic saved
    assert drive(plain, run, resume=True, until="11") == 0
    assert drive(plain, run, resume=True, from_step=6, until="7") == 0
    told = history(run / "ledger.jsonl")
    marks = [segment.body["numerics"]["bits"] for segment in told.segments]
    assert marks == ["promised", "not claimed", "not claimed", "promised", "promised"]
    assert families(told) == {1: 1, 2: 2, 3: 3, 4: 3, 5: 1}
    saved = {item.segment: item.manifest_sha256 for item in told.saved}
    first, second = (told.segments[number].body["numerics"]["promise"] for number in (0, 1))
    assert family(told, saved[1], first) == {1, 5}
    taken = told.segments[1].body["evidence"]["manifest_sha256"]
    assert family(told, taken, second) == {2}, "from one state under one promise"
    assert family(told, saved[1], second) == set(), "nothing went on from there so"
    assert family(told, None, first) == {1, 5}
    assert mark(told, None, {**first, "deterministic": False}) == "not promised"
    assert not [claim for claim in verify(run).claims if claim.result == FAILED]

    recoveries = [one["body"] for one in records(run / "ledger.jsonl") if one["kind"] == "recovery"]
    set_receipt(run, "recovery", 0, numerics={**recoveries[0]["numerics"], "bits": "promised"})
    failed = {claim.claim: claim.evidence for claim in verify(run).claims if claim.result == FAILED}
    assert "segment 2: bits is promised, expected not claimed" in failed["recoveries"]
