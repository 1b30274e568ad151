"""What all claims share: the verdict, and the case that they are judged from.

A claim is re-derived from bytes or it is not verified; no file's word is taken for anything. This
module gathers what the claims of the other modules read, and judges nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from assay.data.queue import Queue
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Receipt
from assay.recipe.schema import Recipe
from assay.run.history import History, Saved

VERIFIED: Literal["verified"] = "verified"
UNVERIFIABLE: Literal["unverifiable"] = "unverifiable"
FAILED: Literal["failed"] = "failed"
Result = Literal["verified", "unverifiable", "failed"]

_TELL_EVERY = 2.0  # seconds between lines of progress
_SHOWN = 4  # faults of one claim that are written out; the rest are counted


@dataclass(frozen=True)
class Claim:
    """One claim about a run, and what came out when it was re-derived."""

    group: str
    claim: str
    result: Result
    evidence: str


@dataclass(frozen=True)
class Line:
    """The metrics line of one completed update; `number` from one and `end` in bytes place it in the file."""

    number: int
    end: int
    update: int
    segment: int
    loss: float
    lr: float
    muon_lr: float | None
    order_digest: str
    positions: float | None  # tokens per second × seconds, as the line states them
    grad_norm: float
    skipped: bool  # by the policy for spikes

    @property
    def where(self) -> str:
        """How messages name the line."""
        return f"metrics.jsonl line {self.number} (update {self.update}, segment {self.segment})"


@dataclass
class Case:
    """What is verified: a run folder or a bundle, with what was read from it so far."""

    root: Path
    bundle: bool
    roots: tuple[Path, ...]
    tell: Callable[[str], None]
    trust: tuple[str, ...] = ()  # the public keys that the reader accepts
    receipts: list[Receipt] = field(default_factory=list)
    told: History | None = None
    recipe: Recipe | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    queue: Queue | None = None
    queue_absent: str = ""
    bundled: Saved | None = None  # the checkpoint whose weights a bundle holds
    _told_at: float = field(default_factory=time.monotonic)

    def progress(self, text: str) -> None:
        """A line for people, once in two seconds at most."""
        if time.monotonic() - self._told_at > _TELL_EVERY:
            self._told_at = time.monotonic()
            self.tell(text)

    @property
    def ledger(self) -> Path:
        """The ledger's file."""
        return self.root / LEDGER_FILE

    @property
    def history(self) -> History:
        """What the ledger tells; only after the chain was verified."""
        assert self.told is not None, "claims that need the history come after the chain"
        return self.told

    def standing_updates(self) -> dict[int, Line]:
        """The line that stands for each update: the last one written."""
        return {line.update: line for line in self.lines}

    def reached(self) -> int:
        """Completed steps, as the metrics have them; the first update of the run when there are none."""
        first = self.recipe.start.first_update if self.recipe else 0
        return max((line.update + 1 for line in self.lines), default=first)


def judge(group: str, claim: str, faults: Sequence[str], evidence: str, absent: str | None = None) -> Claim:
    """Failed with faults, unverifiable when something is `absent`, verified with `evidence` otherwise."""
    if faults:
        more = f"; and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
        return Claim(group, claim, FAILED, "; ".join(faults[:_SHOWN]) + more)
    if absent is not None:
        return Claim(group, claim, UNVERIFIABLE, absent)
    return Claim(group, claim, VERIFIED, evidence)


def differ(where: str, what: str, expected: object, found: object) -> str:
    """The one form of a fault: what, where, expected and found."""
    return f"{where}: {what} is {found}, expected {expected}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 receipt`, `2 receipts`; `plural` where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def steps_text(steps: Sequence[int]) -> str:
    """Steps in short: the first few, and how many more."""
    shown = ", ".join(str(step) for step in steps[:8])
    return shown + (f" and {len(steps) - 8:,} more" if len(steps) > 8 else "")
