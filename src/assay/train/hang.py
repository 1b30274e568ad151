"""A hang is a machine fault: no update within the bound leaves tracebacks and ends the process with code 71.

A thread of each rank looks at the clock; the loop says what may take how long. It also ends a rank whose
parent is gone and that could not leave by itself. It measures nothing else.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from assay.errors import MachineError

TIMES_MEDIAN = 10
LOOK_SECONDS = 0.5
LAST_WORDS_SECONDS = 5.0  # below the time that the parent gives the other ranks after one is gone


@dataclass(frozen=True)
class Bounds:
    """Seconds without an update: the least bound, the one while things are compiled or saved, and after the parent."""

    update: float = 600.0
    compile: float = 3600.0
    orphan: float = 30.0


class HangWatch:
    """Ends this process when nothing happens; `done` after each update, `pause` around what has no bound."""

    def __init__(
        self, bounds: Bounds, folder: Path, rank: int, orphaned: Callable[[], bool], tell: Callable[[str], None]
    ) -> None:
        """`folder` takes the tracebacks, `tell` the sentence; the clock starts with the first `begin`."""
        self._bounds, self._folder, self._rank = bounds, folder, rank
        self._orphaned, self._tell = orphaned, tell
        self._seconds: deque[float] = deque(maxlen=100)
        # Since when (None: no clock runs) and for how long at most. One value, so that the watch never reads one half
        # of it before and the other behind what the loop says.
        self._clock: tuple[float | None, float] = (None, bounds.compile)
        self._alone: float | None = None
        threading.Thread(target=self._look, name="hang watch", daemon=True).start()

    def begin(self, compiling: bool) -> None:
        """An update begins."""
        floor = self._bounds.compile if compiling else self._bounds.update
        bound = max(TIMES_MEDIAN * median(self._seconds), floor) if self._seconds else floor
        self._clock = time.monotonic(), bound

    def done(self, seconds: float) -> None:
        """An update is done; what follows it, such as a save, has the longer bound."""
        self._seconds.append(seconds)
        self._clock = time.monotonic(), max(self._clock[1], self._bounds.compile)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What may take any time: hashing a slot, waiting for data."""
        before = self._clock[0]
        self._clock = None, self._clock[1]
        try:
            yield
        finally:
            self._clock = None if before is None else time.monotonic(), self._clock[1]

    def overdue(self, now: float) -> str | None:
        """What hangs at `now`, a reading of `time.monotonic`; None while all is in time. Any thread may ask."""
        since, bound = self._clock
        if since is None or now - since <= bound:
            return None
        return f"no update for {now - since:,.0f} s (at most {bound:,.0f} s are expected)"

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if words := self.overdue(now):
                self._leave(words)
            if self._orphaned():
                self._alone = self._alone or now
                if now - self._alone > self._bounds.orphan:
                    os._exit(MachineError.code)

    def _leave(self, words: str) -> None:
        """Tracebacks of all threads and, where there is one, NCCL's record; then the end, whatever fails before it."""
        # A file system may hang as well as a device: the last words have a bound of their own.
        last = threading.Timer(LAST_WORDS_SECONDS, os._exit, (MachineError.code,))
        last.daemon = True
        try:
            last.start()
            place = self._tracebacks(words)
            with suppress(OSError):
                self._tell(f"{words}: tracebacks of all threads are in {place} of the segment's logs")
            with suppress(OSError, RuntimeError):  # the latter: of the library, about the device that hangs
                self._nccl()
        finally:
            os._exit(MachineError.code)

    def _tracebacks(self, words: str) -> str:
        """Write them into a file of the logs, or to standard error where that cannot be; the name of the file."""
        place = self._folder / f"rank-{self._rank}.hang"
        try:
            with place.open("w") as file:
                print(words, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(2, all_threads=True)
            return f"rank-{self._rank}.log"
        return place.name

    def _nccl(self) -> None:
        record = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
        if torch.cuda.is_available() and record is not None:
            self._folder.joinpath(f"rank-{self._rank}.nccl.json").write_bytes(record())
