"""Why a run should stop now, or save and go on: a signal, a hold in the ledger, or the guard's wish for a save.

Looked at between micro-batches and in every other phase, without I/O beyond one `stat` and one look into the inbox.
A signal is only noted by its handler; the loop saves and leaves. The dying of the parent arrives as SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

from assay.errors import Interrupted, Refused
from assay.ledger.ledger import Ledger, Receipt
from assay.run import inbox
from assay.run.folder import RunFolder

_PR_SET_PDEATHSIG = 1
SAVE = "save"  # the guard wants a full checkpoint now; training goes on


def stopped(cause: str, message: str) -> Interrupted | Refused:
    """The fault that a cause ends with: 75, or 3 where another machine took the run."""
    if cause == "lease":
        return Refused(f"{message}: another machine took this run, see the hold in the ledger; go on with assay fetch")
    return Interrupted(message, cause)


class Watch:
    """`cause()` is None, or why the run should save and stop: `signal`, `preempted`, `stop`, `guard` or `lease`.

    `SAVE` is the guard's wish: save at this step, and go on; it stands until the next full checkpoint clears `wish`.
    """

    def __init__(self, parent: int | None = None, grace: float | None = None) -> None:
        """Take over SIGTERM and SIGINT of this process; `parent` is who started it, if that one is still known.

        `grace` are the seconds that a stop may take after the signal; None: nobody counts them.
        """
        self._signal: int | None = None
        self._grace, self._since = grace, 0.0
        self._hold: str | None = None
        self.wish: str | None = None
        self._parent = os.getppid() if parent is None else parent
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        if sys.platform == "linux":
            # Children die with their parent: the kernel sends this signal when it is gone.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._parent:
            self._note(signal.SIGTERM, None)  # it was gone before the kernel was asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:
            # The parent kept the terminal and the log; writing to its pipe would end this process early.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
        if self._signal is None:
            self._since = time.monotonic()
        self._signal = number

    def signalled(self) -> bool:
        """True after SIGTERM or SIGINT; costs nothing."""
        return self._signal is not None

    def left(self) -> float | None:
        """Seconds of the grace that are left after a signal; None without one, or where nobody counts."""
        if self._signal is None or self._grace is None:
            return None
        return self._since + self._grace - time.monotonic()

    def orphaned(self) -> bool:
        """True when the process that started this one is gone."""
        return os.getppid() != self._parent

    def cause(self, ledger: Ledger | None) -> str | None:
        """Why to stop, or None. `ledger` is rank 0's own; others' receipts are read when it grew by them."""
        if self._signal is not None:
            return "signal"
        for receipt in _new(ledger) if ledger else ():
            if receipt.kind in ("hold", "released"):
                self._hold = str(receipt.body["cause"]) if receipt.kind == "hold" else None
            elif receipt.kind == "guard" and (receipt.body.get("action"), receipt.body.get("state")) == (SAVE, "asked"):
                self.wish = SAVE
        return self._hold or self.wish


def _new(ledger: Ledger) -> list[Receipt]:
    """Receipts of other processes, and what other machines left in the inbox, which is taken up here."""
    run = RunFolder(ledger.path.parent)
    said = inbox.take_up(run, ledger) if inbox.waiting(run) else []
    return ledger.others() + said
