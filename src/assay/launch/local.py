"""Training on this machine: starts the rank's process, keeps its output, returns its exit code.

The parent is light (no torch), forwards signals, bounds every wait, and answers with the code that
the rank recorded. It never restarts by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from assay.errors import AssayError, Interrupted, MachineError, Refused
from assay.files.reading import read_object
from assay.run.folder import RunFolder
from assay.run.history import history

LOG_LIMIT = 64 << 20  # bytes of one log file before the next is begun


@dataclass(frozen=True)
class Job:
    """What `assay train` was asked for, after the start mode was decided."""

    run: RunFolder
    recipe: Path
    resume: bool
    from_step: int | None
    until: str | None
    grace: float
    command: list[str]


def train(job: Job) -> int:
    """Run the job in a process of its own and return the exit code of the contract."""
    segment = len(history(job.run.ledger).segments) + 1
    token = uuid.uuid4().hex
    words = [
        sys.executable,
        "-m",
        "assay.train.worker",
        *("--run", str(job.run.path), "--recipe", str(job.recipe)),
        *("--token", token, "--command", json.dumps(job.command)),
        *(["--resume"] if job.resume else []),
        *(["--from-step", str(job.from_step)] if job.from_step is not None else []),
        *(["--until", job.until] if job.until is not None else []),
        *(["--terminal"] if sys.stderr.isatty() else []),
    ]
    logs = job.run.logs(segment)
    logs.mkdir(parents=True, exist_ok=True)
    # A session of its own: Ctrl-C reaches the parent alone, which forwards it once.
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    stopping = threading.Event()

    def forward(number: int, frame: FrameType | None) -> None:
        stopping.set()
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    assert child.stdout is not None
    reader = threading.Thread(target=_keep, args=(child.stdout, logs / "rank-0.log"), daemon=True)
    reader.start()
    try:
        code = _wait(child, stopping, job.grace)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join(timeout=5)
    return _answer(job.run, segment, token, code, stopping.is_set())


def _wait(child: subprocess.Popen[bytes], stopping: threading.Event, grace: float) -> int:
    """Wait for the rank; once it was asked to stop, `grace` seconds at most."""
    while True:
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if not stopping.is_set():
                continue
        try:
            return child.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _answer(run: RunFolder, segment: int, token: str, code: int, stopping: bool) -> int:
    """The code that the rank recorded; for one that could record nothing, the machine's fault or a bug."""
    recorded = _recorded(run, token)
    if recorded is not None:
        return recorded
    if code in (MachineError.code, Refused.code):
        return code  # a full disk, or the run's owner is another process: nothing could or may be recorded
    if code == -signal.SIGTERM and stopping:
        raise Interrupted("stopped before training began; nothing was changed", "signal")
    if code < 0:
        name = signal.Signals(-code).name
        opened = len(history(run.ledger).segments) == segment
        body = {"segment": segment} if opened else {"before_start": True}
        run.open_ledger().append("failed", {"code": MachineError.code, "signal": name, **body})
        raise MachineError(
            f"the training process was killed by {name} (often: out of memory); the last checkpoint stands: "
            "resume with --start resume"
        )
    raise AssayError(f"the training process ended with code {code} and recorded nothing; see {run.path}/logs")


def _recorded(run: RunFolder, token: str) -> int | None:
    if not run.outcome.is_file():
        return None
    outcome = read_object(run.outcome, "the outcome of the training process")
    return int(outcome["code"]) if outcome.get("token") == token else None


def _keep(source: BinaryIO, path: Path) -> None:
    """Copy the rank's output to standard error and into the log, as it is; a full log begins the next file.

    Whatever cannot be written (a closed terminal, a full disk) is dropped and the pipe is read on: a rank
    whose output nobody takes would stand still.
    """
    written = 0
    while data := os.read(source.fileno(), 1 << 16):
        with contextlib.suppress(OSError, ValueError):  # ValueError: standard error was closed
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            file.write(data)
            written = file.tell()
        if written > LOG_LIMIT:
            number = 1
            while (older := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            with contextlib.suppress(OSError):
                path.rename(older)
            written = 0
