"""Who owns a run: the one process that trains it, by a lock that dies with the process.

Also the three acts of an operator on a run: stop, release, abandon. Each is a receipt; the
trainer sees a `hold` at its next update because it watches the ledger grow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

from assay.errors import Refused
from assay.files.lock import take
from assay.ledger.ledger import Receipt
from assay.run.folder import RunFolder, require_run
from assay.run.history import history

LOCK_FILE = "owner.lock"
LOOK_SECONDS = 0.5  # somebody who only looks (`is_owned`) has the lock for an instant; that is no owner


@contextlib.contextmanager
def own(run: RunFolder) -> Iterator[None]:
    """Own the run while the block lasts; Refused (exit 3) when another process does."""
    with (run.path / LOCK_FILE).open("ab") as file:
        if not take(file, LOOK_SECONDS):
            raise Refused(f"{run.path} is being trained by another process; stop that one first")
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode("ascii"))
        file.flush()
        yield


def owner_process(run: RunFolder) -> int | None:
    """The process id that the owner of the run wrote down, or None when nobody owns it."""
    if not is_owned(run):
        return None
    words = (run.path / LOCK_FILE).read_text(encoding="ascii").split()
    return int(words[0]) if words else None


def is_owned(run: RunFolder) -> bool:
    """True while a process on this machine trains the run."""
    path = run.path / LOCK_FILE
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stop(run: RunFolder, reason: str | None) -> Receipt:
    """Ask the run to save and stop, and hold it there until `release`."""
    require_run(run)
    _refuse_closed(run)
    body: dict[str, Any] = {"cause": "stop", "reason": reason}
    return run.open_ledger().append("hold", body)


def release(run: RunFolder, reason: str | None) -> Receipt:
    """Lift a hold; Refused when there is none."""
    require_run(run)
    _refuse_closed(run)
    if history(run.ledger).hold is None:
        raise Refused(f"{run.path} has no hold to lift; start it with assay train … --start resume")
    return run.open_ledger().append("released", {"reason": reason})


def abandon(run: RunFolder, reason: str) -> Receipt:
    """Close the history for ever; Refused while a process trains it."""
    require_run(run)
    _refuse_closed(run)
    if is_owned(run):
        raise Refused(f"{run.path} is being trained; stop it first (assay stop), then abandon it")
    return run.open_ledger().append("abandoned", {"reason": reason})


def _refuse_closed(run: RunFolder) -> None:
    closed = history(run.ledger).abandoned
    if closed is not None:
        reason = closed.body.get("reason")
        raise Refused(f"{run.path} was abandoned on {closed.time} ({reason}); start a new run instead")
