"""Workers give results in the order of the tasks, say when one died, and leave with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from assay.corpus.workers import Workers
from assay.errors import MachineError

ORPHANED = """
import os, signal, time
from assay.corpus.workers import Workers
if __name__ == "__main__":
    results = Workers(2).each(time.sleep, [0, 3600, 3600, 3600, 3600])
    next(results)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_the_order_of_the_tasks_and_faults_are_raised(count: int) -> None:
    with Workers(count) as workers:
        assert list(workers.each(abs, range(-30, 0))) == list(range(30, 0, -1))
        with pytest.raises(ValueError, match="invalid literal"):
            list(workers.each(int, ["1", "2", "x", "4"]))
        assert list(workers.each(int, ["5", "6"])) == [5, 6]


def test_a_process_that_dies_is_told_with_the_way_out() -> None:
    with Workers(2) as workers, pytest.raises(MachineError, match="it goes on where it was"):
        list(workers.each(os._exit, [1, 1, 1]))


def test_workers_leave_when_their_parent_was_killed() -> None:
    # The workers hold the other end of the pipes: this returns only when they are gone.
    done = subprocess.run([sys.executable, "-c", ORPHANED], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
