"""Training on this machine: starts the ranks' processes, keeps their output, returns one exit code.

The parent is light (no torch), forwards signals, bounds every wait, and answers with the code that rank 0
recorded, or records itself what rank 0 could not. It never restarts by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from assay.errors import AssayError, Interrupted, MachineError, Refused
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.outcome import Fault, fault_of, faults, leave_fault, recorded, way_on, write_outcome
from assay.run.owner import is_owned

LOG_LIMIT = 64 << 20  # bytes of one log file before the next is begun
# Seconds that the other ranks have once one is gone: of the ten that are promised, the rest is for the killing.
AFTER_A_DEATH = 8.0
AFTER_RANK_0 = 2.0  # nobody records or saves anything any more
LOOK_SECONDS = 0.1
KNOWN = (0, 2, 3, 4, 5, 6, 70, 71, 75)  # exit codes of the contract: such a rank said or recorded why
STOPS = (signal.SIGTERM, signal.SIGINT)
STOPPED = "stopped before training began; no update was made: start it again"


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
    ranks: int = 1
    since: int | None = None  # the ledger's head before pre-flight: a hold behind it came during this start
    profile: int | None = None  # updates to make a trace of
    hang: tuple[float, float] | None = None  # seconds without an update, and while compiling; None: the usual


def train(job: Job) -> int:
    """Run the job in a process for each rank and return the exit code of the contract.

    It takes over SIGTERM and SIGINT and gives them back to nobody: once the ranks have left they are ignored, since
    this process is to end with that code, whatever comes.
    """
    stopping = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopping.set()
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    for number in STOPS:
        signal.signal(number, forward)
    segment = len(history(job.run.ledger).segments) + 1
    token = uuid.uuid4().hex
    logs = job.run.logs(segment)
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="assay-ranks-") as place:
        meeting = Path(place)
        readers = []
        try:
            for rank in range(job.ranks):
                processes.append(_start(job, rank, token, meeting))
                source = processes[-1].stdout
                assert source is not None
                (logs / f"rank-{rank}.log").touch()
                keep = (source, logs / f"rank-{rank}.log", rank == 0)
                readers.append(threading.Thread(target=_keep, args=keep, daemon=True))
                readers[-1].start()
            if stopping.is_set():  # the signal came while the ranks were being started
                forward(signal.SIGTERM, None)
            overdue = _wait(job, processes, meeting, stopping)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            ignore_signals()
        for reader in readers:
            reader.join(timeout=5)
        codes = [process.returncode for process in processes]
        return _answer(job, segment, token, codes, faults(meeting), overdue, stopping.is_set())


def _start(job: Job, rank: int, token: str, meeting: Path) -> subprocess.Popen[bytes]:
    """One rank's process, in a session of its own: Ctrl-C reaches the parent alone, which forwards it once."""
    words = [
        sys.executable,
        "-m",
        "assay.train.worker",
        *("--run", str(job.run.path), "--recipe", str(job.recipe)),
        *("--token", token, "--command", json.dumps(job.command)),
        *("--rank", str(rank), "--ranks", str(job.ranks), "--meeting", str(meeting), "--parent", str(os.getpid())),
        *("--grace", str(job.grace)),
        *(["--since", str(job.since)] if job.since is not None else []),
        *(["--resume"] if job.resume else []),
        *(["--from-step", str(job.from_step)] if job.from_step is not None else []),
        *(["--until", job.until] if job.until is not None else []),
        *(["--profile", str(job.profile)] if job.profile is not None else []),
        *(["--terminal"] if sys.stderr.isatty() else []),
    ]
    if job.hang:
        words += ["--hang-seconds", str(job.hang[0]), "--hang-seconds-compiling", str(job.hang[1])]
    environment = dict(os.environ)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine talk to nobody else
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )


def _wait(job: Job, processes: list[subprocess.Popen[bytes]], meeting: Path, stopping: threading.Event) -> str | None:
    """Wait for all ranks: `grace` seconds at most once they were asked to stop, `AFTER_A_DEATH` once one is gone.

    Returns why those that are still there must be ended, or None when all have left.
    """
    asked: float | None = None
    death: float | None = None
    while None in [process.poll() for process in processes]:  # each is asked, not the first that lives
        now = time.monotonic()
        if stopping.is_set():
            asked = asked or now
            if now - asked > job.grace:
                return f"did not save and leave within --grace {job.grace:g} s of the signal"
        if death is None and any(process.returncode is not None for process in processes):
            death = now
            _speak_for_the_dead(job.run, processes, meeting, stopping.is_set())
        patience = AFTER_A_DEATH if processes[0].returncode is None else AFTER_RANK_0
        if death is not None and now - death > patience:
            return "did not leave after another rank was gone"
        time.sleep(LOOK_SECONDS)  # not a wait for one of them: whichever ends first decides
    return None


def _speak_for_the_dead(
    run: RunFolder, processes: list[subprocess.Popen[bytes]], meeting: Path, stopping: bool
) -> None:
    """Leave the word of ranks that ended in a way that no code of ours describes, for rank 0 to record."""
    for rank, process in enumerate(processes):
        code = process.returncode
        if rank == 0 or code is None or code in KNOWN or (stopping and code == -signal.SIGTERM):
            continue  # the last: it was asked to stop before it could listen
        if code < 0:
            leave_fault(meeting, Fault(rank, MachineError.code, _killed(run, f"rank {rank}", code)))
        else:
            words = f"rank {rank} ended with code {code} and said nothing: a bug; see its log"
            leave_fault(meeting, Fault(rank, AssayError.code, words))


def _killed(run: RunFolder, who: str, code: int) -> str:
    return f"{who} was killed by {signal.Signals(-code).name} (often: out of memory); {way_on(run)}"


def _answer(
    job: Job, segment: int, token: str, codes: list[int], words: list[Fault], overdue: str | None, stopping: bool
) -> int:
    """The code that rank 0 recorded; where it could record nothing, what a rank said, or how one ended."""
    run = job.run
    found = recorded(run, token)
    if found is not None:
        return found
    if stopping and len(history(run.ledger).segments) < segment:
        raise stopped(run, token)  # whatever a rank said of another that could not listen yet
    if words:
        _record(run, segment, token, words[0].code, words[0].message, {"rank": words[0].rank})
        raise fault_of(words[0].code, words[0].message)
    if overdue is not None:
        message = f"the training process {overdue}; {way_on(run)}"
        _record(run, segment, token, MachineError.code, message, {"signal": "SIGKILL"})
        raise MachineError(message)
    if codes[0] in (MachineError.code, Refused.code):
        return codes[0]  # a full disk, or the run's owner is another process: nothing could or may be recorded
    if codes[0] < 0:
        message = _killed(run, "the training process", codes[0])
        _record(run, segment, token, MachineError.code, message, {"signal": signal.Signals(-codes[0]).name})
        raise MachineError(message)
    raise AssayError(f"the training process ended with code {codes[0]} and recorded nothing; see {run.path}/logs")


def ignore_signals() -> None:
    """What this process ends with is decided: a second Ctrl-C changes it no more, up to its last instruction."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def stopped(run: RunFolder, token: str = "", message: str = STOPPED) -> Interrupted:
    """The fault of a stop before a segment was opened, with receipt and outcome where no other process has the run.

    That they cannot be written is told, and changes no exit code.
    """
    try:
        if run.ledger.is_file() and not is_owned(run):
            ledger = run.open_ledger()
            ledger.append("interrupted", {"before_start": True, "cause": "signal"})
            write_outcome(run, token, Interrupted.code, message, None, ledger.head, "signal")
    except (AssayError, OSError) as fault:
        print(f"assay: the stop could not be recorded in {run.path}: {fault}", file=sys.stderr)
    return Interrupted(message, "signal")


def _record(run: RunFolder, segment: int, token: str, code: int, message: str, more: dict[str, object]) -> None:
    """Receipt and outcome in the place of rank 0, which is gone."""
    opened = len(history(run.ledger).segments) == segment
    ledger = run.open_ledger()
    ledger.append("failed", {"code": code, **more, **({"segment": segment} if opened else {"before_start": True})})
    write_outcome(run, token, code, message, None, ledger.head)


def _keep(source: BinaryIO, path: Path, show: bool = True) -> None:
    """Copy the rank's output into the log, as it is, and with `show` to standard error; a full log begins the next.

    Whatever cannot be written (a closed terminal, a full disk) is dropped and the pipe is read on: a rank
    whose output nobody takes would stand still.
    """
    written = 0
    while data := os.read(source.fileno(), 1 << 16):
        if show:
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
