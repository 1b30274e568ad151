"""What the tests of this room share: a clock that only sleep moves, and what the receipts of a run say of copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from assay.files.retry import Policy
from assay.ledger.ledger import read
from assay.run.folder import RunFolder

PIECE = 16384  # bytes of a piece


def mirrored(run: RunFolder) -> list[tuple[str, int, str]]:
    """Kind, step and way of verifying of the copies that receipts speak of, oldest first."""
    return [
        (one.body["checkpoint"], one.body["step"], one.body["verify"])
        for one in read(run.ledger)
        if one.kind == "checkpoint.mirrored"
    ]


@dataclass
class Clock:
    """Time that passes only while somebody sleeps; `meanwhile` is called at every sleep."""

    now: float = 0.0
    meanwhile: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now += seconds
        self.meanwhile()

    def policy(self, deadline: float = 20.0) -> Policy:
        """A policy by this clock, with whole pauses."""
        return Policy(deadline, first=0.5, clock=lambda: self.now, sleep=self.sleep, chance=lambda low, high: high)
