"""Verification re-derives every claim of an honest run, and finds every kind of damage and forgery."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from forging import edit, flip, lines_of, rechain, records, remanifest, reseal, set_receipt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trained_run import NAMES, assay, public

from assay.data import queue as queues
from assay.data.batches import windows_of
from assay.errors import InputError
from assay.files.digest import digest_file
from assay.ledger.ledger import Ledger
from assay.release.claims import FAILED, UNVERIFIABLE, Claim
from assay.release.verify import Report
from assay.release.verify import verify as derive
from assay.run.folder import RunFolder

FULL, WEIGHTS = "checkpoints/step-000012", "weights/step-000009"


def verify(run: Path, roots: Sequence[Path] = ()) -> Report:
    """All claims for a reader who accepts the reviewers' keys, where the run's project has some."""
    return derive(run, roots, trust=public(run.parent, *NAMES) if (run.parent / "keys").is_dir() else ())


def by_name(report: Report) -> dict[str, Claim]:
    return {claim.claim: claim for claim in report.claims}


def failed(report: Report) -> dict[str, str]:
    return {claim.claim: claim.evidence for claim in report.claims if claim.result == FAILED}


def test_every_claim_of_an_honest_run_is_verified(trained: Path) -> None:
    report = verify(trained / "run")
    assert not [claim for claim in report.claims if claim.result != "verified"]
    told = by_name(report)
    assert "2 updates done again agree, 2 of them bit for bit" in told["recomputed updates agree"].evidence
    assert "updates 0:12 without a gap in 2 segments" in told["updates"].evidence
    assert "removed by receipt (steps 4" in told["list"].evidence
    assert f"{12 * 4 * 32:,} positions" in told["exposure"].evidence
    assert "en-docs" in told["exposure"].evidence
    assert "step 12" in told["order digest recomputed"].evidence
    assert {"chain", "recoveries", "learning rates", "one digest, one step", "full step 12 (segment 2)"} <= told.keys()


def test_the_command_answers_people_and_scripts(trained: Path) -> None:
    trust = ("--trust", "keys/alice.pub", "--trust", "keys/bob.pub")
    shown = assay(trained, "verify", "run", *trust)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].endswith("verified, 0 unverifiable, 0 failed")
    facts = json.loads(assay(trained, "verify", "run", *trust, "--json").stdout)
    assert facts["ok"] is True
    assert {claim["result"] for claim in facts["claims"]} == {"verified"}
    assert all(claim.keys() == {"group", "claim", "result", "evidence"} for claim in facts["claims"])


# What is done to the run, the claim that must fail, and words of its evidence.
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a byte of the ledger": (lambda run: flip(run / "ledger.jsonl"), "chain", "line"),
    "a removed receipt": (
        lambda run: lines_of(run / "ledger.jsonl", lambda lines: lines[:9] + lines[10:]),
        "chain",
        "line 10 does not chain (receipt seq 10)",
    ),
    "two receipts swapped": (
        lambda run: lines_of(run / "ledger.jsonl", lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]]),
        "chain",
        "line 5 does not chain (receipt seq 5)",
    ),
    "a receipt twice": (
        lambda run: lines_of(run / "ledger.jsonl", lambda lines: [*lines[:6], lines[5], *lines[6:]]),
        "chain",
        "line 7 does not chain (receipt seq 5)",
    ),
    "receipts cut from the end": (
        lambda run: lines_of(run / "ledger.jsonl", lambda lines: lines[:-2]),
        "no lost lines",
        "outcome.json names receipt",
    ),
    "receipts cut from the end, outcome removed": (
        lambda run: ((run / "outcome.json").unlink(), lines_of(run / "ledger.jsonl", lambda lines: lines[:18])),
        "no lost lines",
        "after receipt",
    ),
    "an empty ledger": (lambda run: (run / "ledger.jsonl").write_bytes(b""), "chain", "run_id"),
    "no ledger": (lambda run: (run / "ledger.jsonl").unlink(), "chain", "does not exist"),
    "a ledger that is a folder": (
        lambda run: ((run / "ledger.jsonl").unlink(), (run / "ledger.jsonl").mkdir()),
        "chain",
        "ledger",
    ),
    "garbage as ledger": (lambda run: (run / "ledger.jsonl").write_bytes(bytes(range(256)) * 9), "chain", "line 1"),
    "a receipt without its keys": (
        lambda run: set_receipt(run, "checkpoint.saved", 0, step="three"),
        "receipts",
        'step is "three"',
    ),
    "another run id": (
        lambda run: set_receipt(run, "run.created", 0, run_id="f" * 32),
        "full step 12 (segment 2)",
        "run_id",
    ),
    "a byte of recipe.yaml": (lambda run: edit(run / "recipe.yaml", "stays", "stayz"), "recipe files", "recipe.yaml"),
    "no recipe.yaml": (lambda run: (run / "recipe.yaml").unlink(), "recipe files", "is missing"),
    "a value of recipe.json": (
        lambda run: edit(run / "recipe.json", "0.0006", "0.0007"),
        "recipe digest",
        "expected sha256:",
    ),
    "garbage as recipe.json": (lambda run: (run / "recipe.json").write_bytes(b"[1"), "recipe digest", "not valid JSON"),
    "recipe.yaml and its digest": (
        lambda run: (
            edit(run / "recipe.yaml", "muon_lr: 0.02", "muon_lr: 0.03"),
            set_receipt(run, "run.created", 0, files=_digests(run)),
        ),
        "recipe resolved",
        "optimizer is",
    ),
    "another recipe in a recovery": (
        lambda run: set_receipt(run, "recovery", 0, recipe="sha256:" + "0" * 64),
        "one recipe in all segments",
        "segment 2",
    ),
    "another seed in a start": (lambda run: rechain(run, _other_seed), "one recipe in all segments", "resolved.seed"),
    "a byte of the metrics": (
        lambda run: edit(run / "metrics.jsonl", '"seconds":0', '"seconds":9'),
        "seals",
        "metrics.jsonl bytes 0:",
    ),
    "the metrics' end cut": (
        lambda run: lines_of(run / "metrics.jsonl", lambda lines: lines[:-1]),
        "seals",
        "end was lost",
    ),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "lines", "is missing"),
    "metrics after the end": (
        lambda run: lines_of(run / "metrics.jsonl", lambda lines: [*lines, lines[-1]]),
        "seals",
        "after the last seal",
    ),
    "a rate, sealed again": (
        lambda run: reseal(run, lambda lines: lines[9].update(lr=lines[9]["lr"] * (1 + 1e-11))),
        "learning rates",
        "(update 7, segment 2): lr is",
    ),
    "Muon's rate, sealed again": (
        lambda run: reseal(run, lambda lines: lines[13].update(muon_lr=0.02)),
        "learning rates",
        "muon_lr is 0.02",
    ),
    "an order digest, sealed again": (
        lambda run: reseal(run, lambda lines: lines[10].update(order_digest="sha256:" + "1" * 64)),
        "order digest recomputed",
        "step 9",
    ),
    "an update missing, sealed again": (
        lambda run: reseal(run, lambda lines: lines[9].update(update=8)),
        "updates",
        "update 7 is expected there",
    ),
    "an update of a segment that never was": (
        lambda run: reseal(run, lambda lines: lines[13].update(segment=3)),
        "updates",
        "no receipt opens segment 3",
    ),
    "a loss done again, sealed again": (
        lambda run: reseal(run, lambda lines: lines[6].update(loss=lines[6]["loss"] + 1e-9)),
        "recomputed updates agree",
        "(update 4, segment 2): loss is",
    ),
    "speed, sealed again": (
        lambda run: reseal(run, lambda lines: lines[3].update(tokens_per_second=1e6)),
        "positions per update",
        "expected 128 positions",
    ),
    "garbage in a line, sealed again": (
        lambda run: reseal(run, lambda lines: lines[3].update(loss="low")),
        "lines",
        "loss is 'low'",
    ),
    "a closing step": (lambda run: set_receipt(run, "end", 1, step=11), "updates", "closing receipt of segment 2"),
    "a segment's number": (lambda run: set_receipt(run, "recovery", 0, segment=3), "updates", "segment is 3"),
    "an alarm": (
        lambda run: Ledger(run / "ledger.jsonl", RunFolder(run).run_id()).append(
            "alarm", {"alarm": "recomputed update differs", "update": 7, "keys": ["loss"]}
        ),
        "recomputed updates agree",
        "is an alarm: recomputed update differs (update 7",
    ),
    "a bit of the weights": (
        lambda run: flip(run / FULL / "model.safetensors"),
        "full step 12 (segment 2)",
        "model.safetensors is damaged",
    ),
    "the optimizer cut": (
        lambda run: os.truncate(run / FULL / "optimizer.safetensors", 1000),
        "full step 12 (segment 2)",
        "has 1,000 bytes",
    ),
    "no config": (lambda run: (run / WEIGHTS / "config.json").unlink(), "weights step 9 (segment 2)", "is missing"),
    "no manifest": (
        lambda run: (run / WEIGHTS / "manifest.json").unlink(),
        "weights step 9 (segment 2)",
        "does not exist",
    ),
    "no folder": (
        lambda run: shutil.rmtree(run / WEIGHTS),
        "weights step 9 (segment 2)",
        "no receipt says that it was removed",
    ),
    "garbage as manifest": (
        lambda run: (run / WEIGHTS / "manifest.json").write_bytes(b"\xff\x00"),
        "weights step 9 (segment 2)",
        "not UTF-8",
    ),
    "a manifest relabelled": (
        lambda run: edit(run / WEIGHTS / "manifest.json", '"step": 9', '"step": 10'),
        "weights step 9 (segment 2)",
        "step is 10, expected 9",
    ),
    "a checkpoint relabelled, receipt and all": (
        lambda run: remanifest(run, FULL, lambda manifest: manifest.update(step=11)),
        "full step 11 (segment 2)",
        "state.json: step is 12, expected 11",
    ),
    "weights relabelled, receipt and all": (
        lambda run: remanifest(run, WEIGHTS, lambda manifest: manifest.update(step=10)),
        "order digests agree",
        "the order digest of step 10",
    ),
    "weights changed, all digests but one": (
        lambda run: (flip(run / WEIGHTS / "model.safetensors", 5000), remanifest(run, WEIGHTS, lambda manifest: None)),
        "weights step 9 (segment 2)",
        "weights_sha256 does not follow",
    ),
    "the state changed, receipt and all": (
        lambda run: (_other_batch(run), remanifest(run, FULL, lambda manifest: None)),
        "full step 12 (segment 2)",
        "do not chain at update",
    ),
    "a manifest with a head to come": (
        lambda run: remanifest(run, FULL, lambda manifest: manifest["ledger"].update(seq=999)),
        "full step 12 (segment 2)",
        "names receipt 999",
    ),
    "one weights digest under two steps": (
        lambda run: set_receipt(run, "checkpoint.saved", -3, weights_sha256=_weights(run, 0)),
        "one digest, one step",
        "stands under step 3 and step 9",
    ),
    "a sum": (lambda run: lines_of(run / "weights/SHA256SUMS", lambda lines: lines[1:]), "SHA256SUMS", "no line"),
    "sums of another form": (lambda run: (run / "weights/SHA256SUMS").write_text("no sums\n"), "SHA256SUMS", "line 1"),
    "a removal of what never was": (
        lambda run: set_receipt(run, "checkpoint.removed", 0, folder="checkpoints/step-000005"),
        "list",
        "which no receipt before saved",
    ),
    "a recovery from another state": (
        lambda run: rechain(run, _other_evidence),
        "recoveries",
        "state_sha256 is sha256:2222",
    ),
    "a recovery from nowhere": (
        lambda run: set_receipt(run, "recovery", 0, evidence={}),
        "recoveries",
        "which no receipt before saved",
    ),
    "another start": (lambda run: set_receipt(run, "start", 0, mode="init-from"), "start", "mode is init-from"),
    "a slot entered elsewhere": (
        lambda run: set_receipt(run, "slot.entered", 2, update=8),
        "queue",
        "within is 0, expected 1",
    ),
    "a queue's prefix": (
        lambda run: lines_of(run / FULL / "queue.jsonl", lambda lines: lines[:2] + lines[:1]),
        "queue",
        "is not the beginning of",
    ),
    "a byte of the queue": (
        lambda run: edit(run.parent / "data/queue.jsonl", '"updates":7', '"updates":6'),
        "queue",
        "line",
    ),
    "garbage as origin": (lambda run: (run / "origin.json").write_text("{"), "queue", "origin.json"),
    "a token": (
        lambda run: flip(run.parent / "data/first/tokens.bin", _consumed(run)),
        "order digest recomputed",
        "nothing behind update 0 was compared",
    ),
    "the tokens cut": (
        lambda run: os.truncate(run.parent / "data/first/tokens.bin", 100),
        "order digest recomputed",
        "has 100 bytes",
    ),
    "an evaluation's figure": (
        lambda run: edit(run / "evaluations/step-000012-validation.json", '"loss": 4', '"loss": 3'),
        "validation of step 12",
        "the digest is",
    ),
    "an evaluation of other weights": (
        lambda run: set_receipt(run, "evaluation", 0, weights_sha256="sha256:" + "3" * 64),
        "validation of step 12",
        "no checkpoint of this run has the weights",
    ),
    "an evaluation under another step": (
        lambda run: set_receipt(run, "evaluation", 0, step=9),
        "validation of step 9",
        "step is 9, expected 12",
    ),
}  # fmt: skip


def _digests(run: Path) -> dict[str, str]:
    return {name: digest_file(run / name) for name in ("recipe.yaml", "recipe.json")}


def _other_seed(receipts: list[dict[str, Any]]) -> None:
    next(one for one in receipts if one["kind"] == "start")["body"]["resolved"]["seed"] = 2


def _other_evidence(receipts: list[dict[str, dict[str, dict[str, str]]]]) -> None:
    next(one for one in receipts if one["kind"] == "recovery")["body"]["evidence"]["state_sha256"] = (
        "sha256:" + "2" * 64
    )  # type: ignore[comparison-overlap]


def _other_batch(run: Path) -> None:
    path = run / FULL / "state.json"
    state = json.loads(path.read_bytes())
    state["recent"][3]["batch"] = "sha256:" + "4" * 64
    path.write_text(json.dumps(state))


def _weights(run: Path, number: int) -> str:
    saved = [one for one in records(run / "ledger.jsonl") if one["kind"] == "checkpoint.saved"]
    return str(saved[number]["body"]["weights_sha256"])


def _consumed(run: Path) -> int:
    """A byte of the first shard that some window of the run holds: the first token of update 0."""
    queue = queues.load(run.parent / "data/queue.jsonl")
    return 2 * int(windows_of(queue, 7, 4, 0)[1][0])


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_and_forgery_fail_the_claim_and_name_it(what: str, project: Path) -> None:
    damage, claim, words = DAMAGE[what]
    damage(project / "run")
    found = failed(verify(project / "run"))
    assert claim in found, found
    assert words in found[claim], found[claim]


def test_a_failed_claim_ends_the_command_with_6_and_no_traceback(project: Path) -> None:
    lines_of(project / "run" / "ledger.jsonl", lambda lines: lines[:3] + lines[4:])
    done = assay(project, "verify", "run", "--json")
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"] is False
    results = {claim["claim"]: claim["result"] for claim in facts["claims"]}
    assert results.pop("chain") == FAILED
    assert set(results.values()) == {UNVERIFIABLE}  # nothing that rests on the ledger is judged


def test_missing_data_is_unverifiable_and_found_elsewhere(project: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.move(project / "data" / name, tmp_path / "elsewhere" / name)
    report = verify(project / "run")
    assert [claim.claim for claim in report.claims if claim.result != "verified"] == ["order digest recomputed"]
    assert "--data" in by_name(report)["order digest recomputed"].evidence
    assert (report.holds(strict=False), report.holds(strict=True)) == (True, False)
    assert verify(project / "run", [tmp_path / "elsewhere"]).holds(strict=True)
    assert assay(project, "verify", "run", "--strict").returncode == 6


def test_without_the_queue_the_copy_in_a_checkpoint_serves(project: Path) -> None:
    (project / "data" / "queue.jsonl").unlink()
    report = verify(project / "run", [project / "data"])
    assert report.holds(strict=True), failed(report)
    assert "the copy in step-0000" in by_name(report)["queue"].evidence


def test_a_run_killed_between_saves_holds_and_its_open_stretch_is_said(project: Path) -> None:
    run = project / "run"
    kinds = [one["kind"] for one in records(run / "ledger.jsonl")]
    last_seal = len(kinds) - 1 - kinds[::-1].index("metrics.sealed")
    lines_of(run / "ledger.jsonl", lambda lines: lines[:last_seal])
    (run / "outcome.json").unlink()
    for folder in ("checkpoints/step-000012", "weights/step-000012"):
        shutil.rmtree(run / folder)
    report = verify(run)
    assert report.holds(strict=True), failed(report)
    assert "not sealed yet" in by_name(report)["seals"].evidence
    assert "of them not sealed yet" in by_name(report)["learning rates"].evidence


def test_what_an_interruption_leaves_is_said_and_not_failed(project: Path) -> None:
    run = project / "run"
    shutil.copytree(run / "weights/step-000009", run / "weights/step-000010")
    (run / "checkpoints/step-000016.partial-0123456789ab").mkdir()
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"body":')
    report = verify(run)
    assert report.holds(strict=True), failed(report)
    told = by_name(report)
    assert "without a receipt that stands: step-000010" in told["list"].evidence
    assert "half-written in checkpoints: step-000016.partial" in told["list"].evidence
    assert "8 bytes of an unfinished line" in told["chain"].evidence


def test_an_unknown_kind_chains_and_is_shown(project: Path) -> None:
    RunFolder(project / "run").open_ledger().append("weather", {"step": "rain"})
    report = verify(project / "run")
    assert report.holds(strict=True)
    assert "unknown here: weather" in by_name(report)["receipts"].evidence


def test_what_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, roots in (("empty", []), ("nowhere", []), ("empty", [tmp_path / "nowhere"])):
        with pytest.raises(InputError):
            verify(tmp_path / path, roots)


PROTECTED = ("ledger.jsonl", "metrics.jsonl", "recipe.yaml", "recipe.json", "checkpoints", "weights", "evaluations")


@pytest.fixture(scope="module")
def victim(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that is damaged and mended again and again."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("victim") / "project")) / "run"


def _protected(run: Path) -> list[Path]:
    files = (path for name in PROTECTED for path in [run / name, *(run / name).rglob("*")] if path.is_file())
    return sorted(path for path in files if path.name != "SHA256SUMS")  # it also lists what was removed


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_or_cut_of_any_protected_file_fails(victim: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(_protected(victim)), label="file")
    whole = path.read_bytes()
    # A cut of the very last line of the ledger is what a torn write leaves; every other change is damage.
    end = len(whole) if path.name != "ledger.jsonl" else whole[:-1].rfind(b"\n")
    place = data.draw(st.integers(0, end - 1), label="place")
    cut = data.draw(st.booleans(), label="cut")
    path.write_bytes(whole[:place] if cut else whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
    try:
        report = verify(victim)
    finally:
        path.write_bytes(whole)
    assert report.count(FAILED), f"{path.name} changed at {place} (cut: {cut}), and nothing failed"
