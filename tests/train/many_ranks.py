"""Runs jobs on 1, 2, 4 and 8 gloo ranks of this machine; torch is imported once, and every rank is a fork of that.

A script, so that no process of the test suite is forked: `python many_ranks.py JOBS.json`, a list of
`{"recipe", "run", "ranks": [1, 2, …], …}`. Run folders are `RUN-RANKS`; exit codes go to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.train.meters import SlowBounds
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
                places = [
                    Place(rank, size, rank, Path(meeting), slow=SlowBounds(updates=job.get("slow_updates", 50)))
                    for rank in range(size)
                ]
                ranks = [fork(job, folder, place) for place in places]
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
    if "spaces" in job:
        crowd(job["spaces"])
    if "unrecorded" in job and place.rank == 0:
        refuse(folder, job["unrecorded"])
    if "lost_at" in job:
        lose(folder, place, job["lost_at"])
    if place.rank == job.get("slow_rank"):  # this rank computes more than the others for every module that it runs
        register_module_forward_pre_hook(work)
    named = argparse.Namespace(
        run=folder.path, recipe=Path(job["recipe"]), resume=False, from_step=None, until=None,
        profile=None, terminal=False, token="1", command='["assay", "train"]',
    )  # fmt: skip
    code = run_job(named, place)
    sys.stderr.flush()
    os._exit(code)


def crowd(spaces: int) -> None:
    """The disk has room for so many saves that ask for it, and for none after them."""
    usage, asked = shutil.disk_usage, list[Any]()

    def crowded(path: Any) -> Any:
        asked.append(path)
        return usage(path)._replace(free=usage(path).free if len(asked) <= spaces else 1 << 10)

    shutil.disk_usage = crowded


def refuse(folder: RunFolder, step: int) -> None:
    """The disk takes no receipt of the save of this step; once."""
    refused: list[int] = []

    def full(event: str, args: Any) -> None:
        appends = event == "open" and str(args[0]) == str(folder.ledger) and "+" in (args[1] or "")
        if appends and not refused and folder.checkpoints.joinpath(f"step-{step:06d}").exists():
            refused.append(step)
            raise OSError(28, "No space left on device")

    sys.addaudithook(full)


def lose(folder: RunFolder, place: Place, step: int) -> None:
    """Rank 1 is killed when the parts of this step are joined, and the folder appears once it is gone."""
    told = folder.path / "rank-1"
    if place.rank == 1:
        told.write_text(str(os.getpid()))
        return

    def kill(event: str, args: Any) -> None:
        if event == "os.rename" and re.search(f"step-{step:06d}$", str(args[1])):
            assert threading.current_thread() is not threading.main_thread()
            lost = int(told.read_text())
            gone = select.poll()
            gone.register(os.pidfd_open(lost), select.POLLIN)
            os.kill(lost, signal.SIGKILL)
            gone.poll(60_000)

    sys.addaudithook(kill)


def work(module: torch.nn.Module, inputs: Any) -> None:
    """Some milliseconds of a core."""
    load = torch.ones(200, 200)
    for _ in range(4):
        load = load @ load


if __name__ == "__main__":
    main()
