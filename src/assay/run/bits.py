"""Which segments of a run promise one another's bits, by the ledger alone.

A segment does so when it goes on from a state of the other, or from the same start, under the same promise all the
way. It compares no loss and no digest: the trainer and `verify` do, by what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.files.digest import canonical
from assay.run.history import History

PROMISED, NOT_PROMISED, NOT_CLAIMED = "promised", "not promised", "not claimed"


def keeps(promise: Mapping[str, Any]) -> bool:
    """True when equal bits are promised at all: by determinism, the canonical sum, and ranks that are all alike."""
    return "others" not in promise and promise.get("deterministic") is True and promise.get("reduction") == "canonical"


def family(told: History, manifest_sha256: str | None, promise: Mapping[str, Any]) -> set[int]:
    """The segments whose bits the next one has, when it goes on from that checkpoint (None: from the run's start)."""
    found = _families(told, [*_openings(told), (0, manifest_sha256, promise)])
    return {number for number, first in found.items() if first == found[0] and number != 0}


def families(told: History) -> dict[int, int]:
    """Segment → the first segment of its family; two of one family have equal bits where they did the same update."""
    return _families(told, _openings(told))


def mark(told: History, manifest_sha256: str | None, promise: Mapping[str, Any]) -> str:
    """What a segment that goes on from that checkpoint (None: that began) says of its bits.

    Promised after a recovery only under the promise of the segment that saved the checkpoint.
    """
    if not keeps(promise):
        return NOT_PROMISED
    before = _origin(told, manifest_sha256)
    promises = {number: stated for number, _, stated in _openings(told)}
    return NOT_CLAIMED if before is not None and promises.get(before) != promise else PROMISED


def taken_from(mode: str, evidence: Mapping[str, Any]) -> str | None:
    """The manifest digest of the run's own checkpoint that a start or recovery took up; None: it began the run."""
    found = evidence.get("manifest_sha256") if mode == "resume" else None
    return found if isinstance(found, str) else None


def _origin(told: History, manifest_sha256: str | None) -> int | None:
    """The segment that saved the checkpoint."""
    return next((item.segment for item in told.saved if item.manifest_sha256 == manifest_sha256), None)


def _openings(told: History) -> list[tuple[int, str | None, Mapping[str, Any]]]:
    return [
        (one.number, taken_from(one.mode, one.body["evidence"]), one.body["numerics"]["promise"])
        for one in told.segments
    ]


def _families(told: History, openings: list[tuple[int, str | None, Mapping[str, Any]]]) -> dict[int, int]:
    result: dict[int, int] = {}
    promises: dict[int, Mapping[str, Any]] = {}
    begun: dict[tuple[str | None, bytes], int] = {}  # from one state under one promise: one family
    for number, manifest_sha256, promise in openings:
        origin = _origin(told, manifest_sha256)
        if not keeps(promise):
            result[number] = number
        elif origin in result and promises[origin] == promise:
            result[number] = result[origin]
        else:
            result[number] = begun.setdefault((manifest_sha256, canonical(promise)), number)
        promises[number] = promise
    return result
