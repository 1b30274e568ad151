"""An `assay` command in a process of its own that ends with the process that started it.

It is asked by SIGTERM when its parent is gone, so that it saves what it has and leaves. Nothing here waits.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # prctl(2)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    """The command `assay` with `words`, in a session of its own, so that Ctrl-C reaches it through us alone.

    Its standard output goes to standard error: the other is for the answer of who started it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", *words],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # one call of the kernel, no lock
    )


def _die_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
