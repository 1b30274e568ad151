"""The one way to hold a file alone: an exclusive lock that dies with its process.

It waits a stated time and never longer. It does not create the file and does not say who holds it.
"""

from __future__ import annotations

import fcntl
import time
from typing import IO

_PAUSE = 0.01  # seconds between two tries


def take(file: IO[bytes], wait: float) -> bool:
    """Lock `file` within `wait` seconds; False when another process held it all the time. Closing it gives it back."""
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
