"""Why a run should stop now: a signal, or a hold in the ledger.

Looked at between micro-batches and in every other phase, without I/O beyond one `stat`. A signal is
only noted by its handler; the loop saves and leaves. The dying of the parent arrives as SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

from assay.run.folder import RunFolder
from assay.run.history import history

_PR_SET_PDEATHSIG = 1


class Watch:
    """`cause()` is None, or why the run should save and stop: `signal`, `preempted`, `stop` or `guard`."""

    def __init__(self, run: RunFolder) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        self._run = run
        self._signal: int | None = None
        self._size = run.ledger.stat().st_size
        self._parent = os.getppid()
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        if sys.platform == "linux":
            # Children die with their parent: the kernel sends this signal when it is gone.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:
            # The parent kept the terminal and the log; writing to its pipe would end this process early.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
        self._signal = number

    def signalled(self) -> bool:
        """True after SIGTERM or SIGINT; costs nothing."""
        return self._signal is not None

    def cause(self) -> str | None:
        """Why to stop, or None. Reads the ledger only when it grew by another process's receipt."""
        if self._signal is not None:
            return "signal"
        size = self._run.ledger.stat().st_size
        if size != self._size:
            self._size = size
            hold = history(self._run.ledger).hold
            if hold is not None:
                return str(hold.body["cause"])
        return None
