"""The live line: update, loss, tokens per second, time left to a named goal.

On a terminal one line is redrawn; elsewhere a plain line comes every `every` updates. Time left is
counted to the step where this command stops, and says so.
"""

from __future__ import annotations

import sys
import time

SMOOTHING = 0.1  # of the speed shown; the metrics keep every update's own


class Progress:
    """Shows updates as they are done."""

    def __init__(self, terminal: bool, every: int, goal: str) -> None:
        self._terminal, self._every, self._goal = terminal, every, goal
        self._last = 0
        self._speed: float | None = None
        self._drawn = 0.0

    def start(self, step: int, last: int) -> None:
        """The stretch [step, last) begins."""
        self._last = last

    def show(self, step: int, loss: float, seconds: float, positions: int, validation: float | None) -> None:
        """One update is done."""
        speed = positions / seconds
        self._speed = speed if self._speed is None else (1 - SMOOTHING) * self._speed + SMOOTHING * speed
        left = (self._last - step) * positions / self._speed
        text = (
            f"update {step - 1:,}  step {step:,} of {self._last:,} ({self._goal})  loss {loss:.4f}  "
            f"{self._speed:,.0f} tokens/s  {_clock(left)} left"
        )
        if validation is not None:
            self.note(f"step {step:,}  validation loss {validation:.4f}")
        now = time.monotonic()
        if self._terminal:
            if now - self._drawn > 0.1 or step == self._last:
                self._drawn = now
                sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if step == self._last else ""))
                sys.stderr.flush()
        elif step % self._every == 0 or step == self._last:
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of its own, above the live one."""
        print(f"\r\x1b[K{text}" if self._terminal else text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
