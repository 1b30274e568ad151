"""How a training process ended: `outcome.json` for the parent and for people, and the word of a rank that failed.

The first is written by rank 0, or by its parent when rank 0 could not. A failing rank leaves its fault in
the folder where the ranks met, so that all end with one message and one code. It draws no conclusions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.errors import (
    AssayError,
    DataError,
    InputError,
    Interrupted,
    MachineError,
    NumbersError,
    Refused,
    VerificationError,
)
from assay.files.publish import publish_file
from assay.files.reading import read_object
from assay.ledger.ledger import now
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import reported

_FAULTS: dict[int, type[AssayError]] = {
    kind.code: kind
    for kind in (AssayError, DataError, InputError, MachineError, NumbersError, Refused, VerificationError)
}


@dataclass(frozen=True)
class Fault:
    """What ended one rank: the exit code and a sentence."""

    rank: int
    code: int
    message: str


def write_outcome(
    run: RunFolder,
    token: str,
    code: int,
    message: str,
    step: int | None,
    head: dict[str, Any] | None,
    cause: str | None = None,
    measured: dict[str, Any] | None = None,
) -> None:
    """`outcome.json`; `token` ties it to the process that was started, `head` is the ledger's.

    `measured` are further keys: what the segment measured of itself.
    """
    body = {
        "code": code,
        "cause": cause,
        "message": message,
        "step": step,
        "time": now(),
        "ledger": head,
        "token": token,
        "last_reported": _last_reported(run),
        **(measured or {}),
    }
    publish_file(run.outcome, (json.dumps(body, indent=1) + "\n").encode())


def recorded(run: RunFolder, token: str) -> int | None:
    """The code in `outcome.json` when it is that of the process with this token."""
    if not run.outcome.is_file():
        return None
    outcome = read_object(run.outcome, "the outcome of the training process")
    return int(outcome["code"]) if outcome.get("token") == token else None


def leave_fault(meeting: Path, fault: Fault) -> None:
    """Say why a rank ends; a word that was left before stands."""
    path = meeting / f"fault-{fault.rank}.json"
    if not path.exists():
        publish_file(path, json.dumps(asdict(fault)).encode())


def faults(meeting: Path) -> list[Fault]:
    """What failing ranks said, by rank."""
    found = []
    for path in sorted(meeting.glob("fault-*.json")):
        word = read_object(path, "the fault of a rank")
        found.append(Fault(int(word["rank"]), int(word["code"]), str(word["message"])))
    return sorted(found, key=lambda fault: fault.rank)


def fault_of(code: int, message: str, cause: str | None = None) -> AssayError:
    """The fault with this exit code, as another process described it."""
    if cause is not None:
        return Interrupted(message, cause)
    return _FAULTS.get(code, AssayError)(message)


def way_on(run: RunFolder) -> str:
    """What a fault of the machine left of the run and how it goes on, for the fault's message."""
    try:
        told = history(run.ledger)
    except (AssayError, OSError):  # that may be the very fault to record
        return f"look at what is left with: assay verify {run.path}"
    if any(item.kind == "full" for item in told.saved):
        return "the last checkpoint stands: resume with --start resume"
    return "no full checkpoint was saved yet: --start resume begins again at the run's start"


def _last_reported(run: RunFolder) -> int | None:
    """The newest step of the metrics, or None where they cannot be read: that may be the very fault to record."""
    try:
        return reported(run.metrics).step
    except (AssayError, OSError):
        return None
