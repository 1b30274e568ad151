"""Processes that share out the pieces of a corpus; the results come in the order of the tasks.

With one worker everything happens in this process. A process that dies ends the build with its pieces
kept; when the parent dies its workers leave. It knows nothing of corpora.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from types import TracebackType
from typing import Protocol, TypeVar

from assay.errors import MachineError

T = TypeVar("T")
R = TypeVar("R")


class Helpers(Protocol):
    """Whoever does the tasks of a build: processes of this machine here, a cluster in `on_ray`."""

    def each(self, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """See `Workers.each`."""
        ...


def _alone() -> None:
    """Begin a worker: one thread for each library, and leave when the parent is gone."""
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "false" if name == "TOKENIZERS_PARALLELISM" else "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when the user interrupts
    parent = parent_process()
    assert parent is not None  # this is a worker

    def watch() -> None:
        parent.join()
        os._exit(71)

    threading.Thread(target=watch, daemon=True).start()


class Workers:
    """`count` processes, started at the first call that has more than one task."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def each(self, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """`work` of every task, in the order of the tasks; at most two tasks a worker wait or have unseen results.

        `work` is a function of a module. Raises what `work` raises, and MachineError when a process died.
        """
        waiting = list(tasks)
        if self.count == 1 or len(waiting) < 2:
            yield from map(work, waiting)
            return
        if self._pool is None:
            # Not forked: the libraries' threads and locks do not survive that.
            self._pool = ProcessPoolExecutor(self.count, mp_context=get_context("spawn"), initializer=_alone)
        running = deque[Future[R]]()
        try:
            for task in waiting:
                running.append(self._pool.submit(work, task))
                if len(running) >= 2 * self.count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise MachineError(
                "a worker process died, perhaps for lack of memory; build again with fewer --workers: it goes on "
                "where it was"
            ) from None
        finally:
            for future in running:
                future.cancel()
