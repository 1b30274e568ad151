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
import torch.distributed as dist

from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.train.worker import Place, run_job


def main() -> None:
    """One launch per rank count, in which every rank does all jobs of that count, one after another."""
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    codes: dict[str, list[list[int]]] = {}
    for size in sorted({size for job in jobs for size in job["ranks"]}):
        mine = [job for job in jobs if size in job["ranks"]]
        for job in mine:
            folder = RunFolder(Path(f"{job['run']}-{size}"))
            if not folder.exists():
                create(folder.path, Path(job["recipe"]), recipes.load(Path(job["recipe"])))
        with tempfile.TemporaryDirectory() as place:
            ranks = [fork(rank, size, mine, Path(place)) for rank in range(size)]
            for process in ranks:
                os.waitpid(process, 0)
            codes[str(size)] = [json.loads((Path(place) / f"codes-{rank}").read_text()) for rank in range(size)]
    print(json.dumps(codes))


def fork(rank: int, size: int, jobs: list[dict[str, Any]], place: Path) -> int:
    """The process id of a new rank."""
    process = os.fork()
    if process:
        return process
    if sys.platform == "linux":  # a fork that outlives the script would go on alone
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    codes = []
    for number, job in enumerate(jobs):
        meeting = place / f"meeting-{number}"
        meeting.mkdir(exist_ok=True)
        run = Path(f"{job['run']}-{size}")
        named = argparse.Namespace(
            run=run, recipe=Path(job["recipe"]), resume=job.get("resume", False), from_step=None,
            until=job.get("until"), terminal=False, token="1", command='["assay", "train"]',
        )  # fmt: skip
        codes.append(run_job(named, Place(rank, size, rank, meeting)))
        if dist.is_initialized():
            dist.destroy_process_group()
    (place / f"codes-{rank}").write_text(json.dumps(codes))
    os._exit(0)


if __name__ == "__main__":
    main()
