"""Tokens per second from the seconds of updates: with and without pauses, over all and after warm-up.

An update's seconds come by part (see `metrics.jsonl`); validation, checkpoints and the entry into a slot are
pauses. It measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WARM_UP = 10  # updates at the start of each segment that the figure after warm-up leaves out
PAUSES = ("slot", "validation", "checkpoint")


def busy(parts: Mapping[str, float]) -> float:
    """Seconds of an update without its pauses."""
    return math.fsum(seconds for name, seconds in parts.items() if name not in PAUSES)


@dataclass
class _Sum:
    updates: int = 0
    seconds: float = 0.0
    busy: float = 0.0

    def add(self, updates: int, parts: Mapping[str, float]) -> None:
        self.updates += updates
        self.seconds += sum(parts.values())
        self.busy += busy(parts)

    def facts(self, positions: int) -> dict[str, float | None]:
        done = self.updates * positions
        return {
            "with_pauses": done / self.seconds if done and self.seconds > 0 else None,
            "without_pauses": done / self.busy if done and self.busy > 0 else None,
        }


@dataclass
class Speed:
    """Adds up updates; `segment` begins anew with its warm-up."""

    _all: _Sum = field(default_factory=_Sum)
    _warm: _Sum = field(default_factory=_Sum)
    _segment: int | None = None
    _done: int = 0  # of this segment

    def add(self, parts: Mapping[str, float], segment: int | None = None) -> None:
        """One more update with the seconds of its parts."""
        if segment != self._segment:
            self._segment, self._done = segment, 0
        self._done += 1
        self._all.add(1, parts)
        if self._done > WARM_UP:
            self._warm.add(1, parts)

    def rest(self, parts: Mapping[str, float]) -> None:
        """Seconds after the last update, such as the last checkpoint's."""
        self._all.add(0, parts)
        if self._warm.updates:
            self._warm.add(0, parts)

    def facts(self, positions: int) -> dict[str, Any]:
        """Positions (of `positions` an update) per second; None where nothing was measured."""
        return {
            "all": self._all.facts(positions),
            "after_warm_up": self._warm.facts(positions),
            "warm_up_updates": WARM_UP,
        }


def exact(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a receipt: decimal strings in place of floats."""
    result: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            result[key] = exact(value)
        else:
            result[key] = f"{value:.1f}" if isinstance(value, float) else value
    return result
