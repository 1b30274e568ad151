"""Evaluation results of a run: a file pinned to step and weights digest, and the receipt that names it.

A result that stands is never replaced: a repeat that agrees adds nothing, one that differs gets a number of
its own. It measures nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from assay.data.shard import Shard
from assay.errors import VerificationError
from assay.evaluate.perplexity import Measured
from assay.evaluate.subject import Subject
from assay.files.digest import digest, digest_small
from assay.files.publish import publish_file
from assay.files.reading import read_object
from assay.run.folder import RunFolder
from assay.run.history import history

FORMAT = "assay-evaluation/1"
# Losses that differ by less agree (the contract's bound between device kinds).
AGREES = 0.00005


@dataclass(frozen=True)
class Recorded:
    """Where a result stands in the run, the receipt that names it, and whether this call added it."""

    file: str
    receipt: int
    added: bool


def result(subject: Subject, shard: Shard, measured: Measured, device: str) -> dict[str, Any]:
    """The result file: what was measured, of which weights, on which bytes."""
    return {
        "format": FORMAT,
        "suite": "validation",
        "step": subject.step,
        "weights_sha256": subject.weights_sha256,
        "shard": shard.sha256,
        "tokenizer": shard.tokenizer,
        "block": subject.shape.block,
        "windows": measured.windows,
        "positions": measured.positions,
        "compute": "float32",
        "device": device,
        "results": measured.facts(),
    }


def record(run: RunFolder, found: dict[str, Any]) -> Recorded:
    """Keep a result in `evaluations/` and state it in the ledger, unless an equal one stands.

    VerificationError (exit 6) when a result that stands is not the file that its receipt names.
    """
    ledger = run.open_ledger()
    stated = {str(one.body.get("file")): one for one in history(run.ledger).evaluations}
    run.evaluations.mkdir(exist_ok=True)
    number = 1
    while (path := _path(run, found, number)).exists() or f"evaluations/{path.name}" in stated:
        name = f"evaluations/{path.name}"
        receipt = stated.get(name)
        if receipt is not None and (not path.is_file() or digest_small(path) != receipt.body.get("sha256")):
            raise VerificationError(
                f"{path} is not the file that receipt {receipt.seq} of {run.ledger} names; bring the original back"
            )
        if _same(read_object(path, "an evaluation result"), found):
            if receipt is not None:
                return Recorded(name, receipt.seq, False)
            break  # written by a process that ended before its receipt
        number += 1
    else:
        publish_file(path, (json.dumps(found, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())
    kept = read_object(path, "an evaluation result")
    added = ledger.append("evaluation", _body(f"evaluations/{path.name}", digest(path.read_bytes()), kept))
    return Recorded(f"evaluations/{path.name}", added.seq, True)


def decimal(value: float | None) -> str | None:
    """A float as a plain decimal string that reads back to the same bits; None stays None."""
    return None if value is None else format(Decimal(repr(value)), "f")


def _path(run: RunFolder, found: dict[str, Any], number: int) -> Path:
    extra = "" if number == 1 else f"-{number}"
    return run.evaluations / f"step-{found['step']:06d}-{found['suite']}{extra}.json"


def _same(older: dict[str, Any], newer: dict[str, Any]) -> bool:
    keys = ("format", "suite", "step", "weights_sha256", "shard", "block", "windows", "positions")
    if any(older.get(key) != newer.get(key) for key in keys):
        return False
    before = older.get("results", {}).get("loss")
    return isinstance(before, float) and abs(before - newer["results"]["loss"]) <= AGREES


def _body(name: str, sha256: str, kept: dict[str, Any]) -> dict[str, Any]:
    results = kept["results"]
    counts = results["bits_per_byte_counts"]
    return {
        "file": name,
        "sha256": sha256,
        "suite": kept["suite"],
        "step": kept["step"],
        "weights_sha256": kept["weights_sha256"],
        "shard": kept["shard"],
        "block": kept["block"],
        "windows": kept["windows"],
        "positions": kept["positions"],
        "loss": decimal(results["loss"]),
        "perplexity": decimal(results["perplexity"]),
        "bits_per_byte": decimal(results["bits_per_byte"]),
        "text_bytes": None if counts is None else counts["text_bytes"],
    }
