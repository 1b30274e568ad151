"""A Ray cluster that shares out the pieces of a corpus, on many machines, as `Workers` does on one.

The functions and tasks are the same, and so are the bytes. What is read and written lies on a file system that all
machines share: nothing is sent but names and counts. It starts a Ray on this machine only where none runs.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from assay import __version__
from assay.corpus.pieces import code_digest
from assay.errors import AssayError, InputError, MachineError, Refused

T = TypeVar("T")
R = TypeVar("R")
MARK = "seen"


@dataclass(frozen=True)
class Expected:
    """What a machine must have to take part: this version, and these folders; the mark tells the work folder."""

    version: str
    code: str
    source: Path
    work: Path
    mark: str


_MET: set[Expected] = set()  # of this process


def meet(asked: Expected) -> None:
    """Refused for another version, InputError for a folder that is not there; once a process."""
    if asked in _MET:
        return
    machine = os.uname().nodename
    if (__version__, code_digest()) != (asked.version, asked.code):
        raise Refused(
            f"{machine} has Assay {__version__} with other code than this machine's {asked.version}; install the same "
            "on every machine of the cluster"
        )
    if not asked.source.is_dir():
        raise InputError(f"{machine} does not see {asked.source}; {_SHARED}")
    try:
        found = (asked.work / MARK).read_text(encoding="ascii")
    except OSError:
        found = ""
    if found != asked.mark:
        raise InputError(f"{machine} does not see {asked.work} as this machine does; {_SHARED}")
    _MET.add(asked)


_SHARED = "--on ray needs the description, its sources and OUT on a file system that all machines of the cluster share"


def _run(asked: Expected, work: Callable[[Any], Any] | None, task: Any) -> Any:
    """One task in a process of the cluster, one thread for each library; without work only `meet`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    meet(asked)
    return work(task) if work is not None else None


class Cluster:
    """The processors of a Ray cluster: this process's own, that of RAY_ADDRESS, one that runs here, or a new one.

    `most`: tasks at a time at most; None: two for each processor wait or run. Paths in tasks must be absolute.
    """

    def __init__(self, source: Path, work: Path, most: int | None = None) -> None:
        self._expected = Expected(__version__, code_digest(), source, work, secrets.token_hex(16))
        self._most = most
        self._started = False

    def __enter__(self) -> Cluster:
        try:
            import ray
        except ImportError:
            raise InputError("--on ray needs Ray; pip install 'assay[ray]' brings it") from None
        self._ray = ray
        (self._expected.work / MARK).write_text(self._expected.mark, encoding="ascii")
        if not ray.is_initialized():
            self._start()
        try:
            self._meet_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self._ray.shutdown()

    def each(self, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """`work` of every task, in the order of the tasks; see `Workers.each`."""
        remote = self._remote(num_cpus=1)
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        window = self._most or 2 * max(1, cpus)
        running = deque[Any]()
        try:
            for task in tasks:
                if len(running) >= window:
                    yield self._get(running.popleft())
                running.append(remote.remote(self._expected, work, task))
            while running:
                yield self._get(running.popleft())
        finally:
            for reference in running:
                self._ray.cancel(reference)

    def _start(self) -> None:
        """Join or start a Ray. Its handler of SIGTERM would change our exit code, so ours is put back."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody unless the user asks for it
        os.environ.setdefault(
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
        )  # what later versions of Ray do, which warn now
        before = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError) as fault:
            address = os.environ.get("RAY_ADDRESS", "this machine")
            raise MachineError(f"Ray at {address} cannot be used: {_first_line(fault)}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        self._started = True

    def _meet_all(self) -> None:
        """Ask every machine with processors before anything is done; those that come later are asked by their tasks."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        asked = [
            self._remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                self._expected, None, None
            )
            for node in nodes
        ]
        for reference in asked:
            self._get(reference)

    def _remote(self, **options: Any) -> Any:
        """`_run` as Ray's; a task that died is not done again, because the next build goes on where this one was."""
        return self._ray.remote(max_retries=0, **options)(_run)

    def _get(self, reference: Any) -> Any:
        """A result; what the task raised as it is, and MachineError where the machine or Ray failed."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(reference)
        except RayTaskError as fault:
            cause = fault.cause
            if isinstance(cause, AssayError):
                raise cause from None
            if isinstance(cause, ImportError) or "failed to import" in str(cause):
                raise Refused(
                    f"a machine of the cluster cannot import what a build needs ({_first_line(cause)}); install "
                    f"assay[corpus] {__version__} on every machine"
                ) from None
            raise cause from fault
        except RayError as fault:
            raise MachineError(
                f"a worker process or machine of the cluster died ({_first_line(fault)}), perhaps for lack of memory; "
                "build again, with fewer --workers: it goes on where it was"
            ) from None


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0].strip().rstrip(".")
