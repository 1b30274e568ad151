"""Runs jobs on 1, 2, 4 and 8 gloo ranks of this machine; torch is imported once, and every rank is a fork of that.

A script, so that no process of the test suite is forked: `python many_ranks.py JOBS.json`, a list of
`{"recipe", "run", "ranks": [1, 2, …], …}`. Run folders are `RUN-RANKS`; exit codes go to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.train.worker import Place, run_job


def main() -> None:
    """Every job on each of its numbers of ranks; prints `{RUN-RANKS: [exit code of each rank]}`."""
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}
    for job in jobs:
        for size in job["ranks"]:
            folder = RunFolder(Path(f"{job['run']}-{size}"))
            if not folder.exists():
                create(folder.path, Path(job["recipe"]), recipes.load(Path(job["recipe"])))
            with tempfile.TemporaryDirectory() as meeting:
                ranks = [fork(job, folder, Place(rank, size, rank, Path(meeting))) for rank in range(size)]
                ended = [os.waitpid(process, 0)[1] for process in ranks]
            codes[folder.path.name] = [os.waitstatus_to_exitcode(status) for status in ended]
    print(json.dumps(codes))


def fork(job: dict[str, Any], folder: RunFolder, place: Place) -> int:
    """The process id of a new rank, which leaves as the worker does."""
    process = os.fork()
    if process:
        return process
    if sys.platform == "linux":  # a fork that outlives the script would go on alone
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    named = argparse.Namespace(
        run=folder.path, recipe=Path(job["recipe"]), resume=False, from_step=None, until=None,
        profile=None, terminal=False, token="1", command='["assay", "train"]',
    )  # fmt: skip
    code = run_job(named, place)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
