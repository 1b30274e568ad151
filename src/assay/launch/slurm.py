"""A run as a Slurm job: one node, saved ahead of the time limit and queued again until it is done.

The job is a shell script for sbatch that becomes `assay launch … --on local` on the node. Slurm's own commands are
called with lists of words. It writes nothing into the run; the launcher on the node does.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from assay.errors import InputError, MachineError
from assay.launch.description import Slurm, Task
from assay.launch.keeping import Kept, Tell, remembered
from assay.run.folder import RunFolder, salted
from assay.run.history import history

MARK = "ASSAY_LAUNCHED"  # set by the job's script: an `--on local` inside somebody's own job requeues nothing
SECONDS = 60  # that one of Slurm's commands may take


def script(task: Task, exclude: list[str] | None = None) -> str:
    """The batch script; `exclude` are nodes that are not to be taken."""
    asked = task.launch.slurm
    assert asked is not None
    assert task.file is not None
    log = task.run.absolute().with_name(f"{task.run.name}.slurm-%j.log")
    words = [sys.executable, "-m", "assay.cli.main", "launch", str(task.file.absolute()), "--on", "local"]
    words += ["--ranks", str(task.launch.ranks)]
    options = [*_asked(asked), f"--output={log}", *([f"--exclude={','.join(exclude)}"] if exclude else [])]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=assay-{task.run.name}",
        # Only the shell gets the signal, and exec makes our launcher that shell.
        f"#SBATCH --signal=B:USR1@{asked.signal_seconds}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        *(f"#SBATCH {option}" for option in options),
        f"export {MARK}=slurm",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f"exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


def _asked(asked: Slurm) -> list[str]:
    given = {
        "time": asked.minutes,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "gpus-per-node": asked.gpus,
        "cpus-per-task": asked.cpus,
        "mem": f"{asked.memory_gb}G" if asked.memory_gb else None,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def submit(task: Task, tell: Tell) -> str:
    """Queue the job; returns its id. Nodes that just failed are left out while others are there."""
    task.run.absolute().parent.mkdir(parents=True, exist_ok=True)
    exclude = _exclude(task)
    if exclude:
        tell(f"not on {', '.join(exclude)}, which failed a short while ago")
    answer = _slurm(["sbatch", "--parsable"], script(task, exclude))
    return answer.strip().partition(";")[0]


def submitted() -> bool:
    """Whether this process is a job that `submit` queued."""
    return os.environ.get(MARK) == "slurm" and "SLURM_JOB_ID" in os.environ


def again(task: Task, done: Kept, tell: Tell) -> None:
    """On the node, when training ended: queue the job again before its limit; after a fault, another one elsewhere.

    Slurm changes the nodes of no job that runs: a fault of the machine takes a new job. Nothing after a hold, nor
    after SIGTERM: that is scancel, or a preemption after which Slurm itself queues the job again.
    """
    job = os.environ["SLURM_JOB_ID"]
    run = RunFolder(task.run)
    if run.exists() and history(run.ledger).hold is not None:
        return
    if done.elsewhere:
        tell(f"a fault of this machine: job {submit(task, tell)} goes on elsewhere")
    elif done.requeue:
        tell(f"job {job} is queued again: its time limit is near")
        _slurm(["scontrol", "requeue", job])


def _exclude(task: Task) -> list[str]:
    """Nodes of the partition that just failed, unless that would leave none."""
    run = RunFolder(task.run)
    assert task.launch.slurm is not None
    if not run.exists():
        return []
    avoided = remembered(run.ledger, task.launch.restarts.cool_down_seconds)
    if not avoided:
        return []
    where = ["--partition", task.launch.slurm.partition] if task.launch.slurm.partition else []
    nodes = sorted(set(_slurm(["sinfo", "--noheader", "--Node", "--format=%N", *where]).split()))
    bad = [node for node in nodes if salted(run, node) in avoided]
    return bad if len(bad) < len(nodes) else []


def _slurm(words: list[str], text: str = "") -> str:
    """What one of Slurm's commands prints; a refusal of it is InputError with its own words."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise InputError(f"{words[0]} is not installed here; --on slurm is for a machine from which Slurm jobs are "
                         "submitted") from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{words[0]} did not answer within {SECONDS} s; look whether Slurm's controller lives"
        ) from None
    if done.returncode != 0:
        raise InputError(f"{' '.join(words[:2])} refuses: {' '.join(done.stderr.split())}")
    return done.stdout
