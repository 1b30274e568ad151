"""A run on an unmanaged SkyPilot cluster: its task file, and launch, stop, start and down through the `sky` command.

The cluster runs `assay launch … --on local`, which keeps the run alive there; this process takes another place when the
machine went away. SkyPilot may live in an environment of its own. Never a managed job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from assay.errors import InputError, Interrupted, MachineError, Refused
from assay.files.publish import publish_file
from assay.files.reading import parse_json, read_text
from assay.files.retry import Policy
from assay.launch.coming_back import PREEMPTED, End, Failure, after, avoided
from assay.launch.description import Task
from assay.launch.keeping import Asked, Tell, signals
from assay.ledger.ledger import now

COMMAND = "ASSAY_SKY"  # the `sky` command, where it lies in an environment of its own
_ENDED = re.compile(r"launch: ended with exit code (\d+)\s*$")
_PLACE = re.compile(r"launch: allocation \d+ of .* in (\S+)\s*$")


def task_file(task: Task, leave: Iterable[str] = ()) -> str:
    """The task as SkyPilot reads it (JSON is YAML), with the places of `infra` that are not to be left alone now.

    Raises Refused when all of them are; the way out is to wait or to name others.
    """
    asked, leave = task.launch.skypilot, set(leave)
    assert asked is not None
    assert task.file is not None
    places = [place for place in asked.infra if place not in leave]
    if not places:
        raise Refused(f"all of skypilot.infra in {task.file} failed a short while ago; name other places, or wait for "
                      "restarts.cool_down_seconds")  # fmt: skip
    common: dict[str, Any] = {
        "accelerators": asked.accelerators,
        "use_spot": asked.use_spot,
        "disk_size": asked.disk_gb,
        "autostop": {"idle_minutes": asked.idle_minutes, "down": False},
        **({"image_id": asked.image} if asked.image else {}),
    }
    where = {"infra": places[0]} if len(places) == 1 else {"ordered": [{"infra": place} for place in places]}
    launch = ["assay", "launch", task.file.name, "--on", "local", "--ranks", str(task.launch.ranks)]
    value = {
        "name": asked.cluster,
        "workdir": str(task.file.absolute().parent),
        "resources": {**common, **where},
        "envs": {"PYTHONUNBUFFERED": "1"},
        "setup": "\n".join(["set -e", *asked.setup]),
        "run": shlex.join(launch),
    }
    return json.dumps(value, indent=1) + "\n"


def act(task: Task, what: str, tell: Tell) -> dict[str, Any]:
    """`launch`, or `stop` (keeps the disk), `start`, `down` of the cluster; the contract's keys and an exit code."""
    asked = task.launch.skypilot
    assert asked is not None
    if what == "launch":
        with signals() as told:
            return {"job": asked.cluster, "exit": _launch(task, asked.cluster, tell, told)}
    if (code := _sky([what, "--yes", asked.cluster]).wait()) != 0:
        raise MachineError(f"sky {what} {asked.cluster} ended with exit code {code}; its own words are above")
    return {"job": asked.cluster, "exit": 0}


def _launch(task: Task, cluster: str, tell: Tell, told: Asked) -> int:
    """Launch and follow, again elsewhere when the machine went away; the exit code of the launcher on the cluster."""
    limits = task.launch.restarts
    pauses = Policy(first=limits.first_seconds, most=limits.longest_seconds)
    path = task.run.absolute().with_name(f"{task.run.name}.sky.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    ends: list[End] = []
    while True:
        publish_file(path, task_file(task, left_alone(task)).encode())
        code, place = _follow(["launch", "--yes", "--cluster", cluster, str(path)], told)
        if told.wake.is_set():
            tell(f"no longer followed; the cluster goes on and costs: assay launch {task.file} --act stop")
            return Interrupted.code
        if code is not None:
            return code
        if place is not None:
            tell(f"the machine in {place} went away")
            _remember(task, Failure(place, PREEMPTED, datetime.fromisoformat(now())))
        ends.append(End(Interrupted.code, PREEMPTED if place else "no machine"))
        chosen = after(ends, limits, pauses)
        if chosen.act == "end":
            tell(chosen.reason)
            return Interrupted.code
        _sky(["down", "--yes", cluster]).wait()  # what is left of it would be taken again where it was
        tell(f"again in {chosen.seconds:.1f} s: {chosen.reason}")
        told.wake.wait(chosen.seconds)
        if told.wake.is_set():
            return Interrupted.code


def _follow(words: list[str], told: Asked) -> tuple[int | None, str | None]:
    """The exit code that the launcher on the cluster told, None when it did not come to that; and where it ran."""
    code, place = None, None
    child = _sky(words, read=True)
    told.child = child
    assert child.stdout is not None
    with child.stdout:
        for raw in child.stdout:
            line = raw.decode("utf-8", "replace")
            os.write(2, raw)
            if found := _PLACE.search(line):
                place = found[1]
            if found := _ENDED.search(line):
                code = int(found[1])
    child.wait()
    told.child = None
    return code, place


def _sky(words: list[str], read: bool = False) -> subprocess.Popen[bytes]:
    """One of SkyPilot's commands; its output goes to standard error, or is read."""
    command = os.environ.get(COMMAND, "sky")
    try:
        return subprocess.Popen(
            [command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if read else 2,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **os.environ},  # reports nothing unless the user says so
        )
    except OSError as fault:
        raise InputError(
            f"{command} cannot be started ({fault.strerror}); pip install 'assay[skypilot]' brings sky, or {COMMAND} "
            "names it in an environment of its own"
        ) from None


def left_alone(task: Task) -> set[str]:
    """Places that the memory beside the run folder says to leave alone now."""
    cool_down = timedelta(seconds=task.launch.restarts.cool_down_seconds)
    return set(avoided(_memory(task), datetime.now(UTC), cool_down))


def _memory_file(task: Task) -> Path:
    return task.run.absolute().with_name(f"{task.run.name}.places.jsonl")


def _memory(task: Task) -> list[Failure]:
    path = _memory_file(task)
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(read_text(path, "the memory of failed places").splitlines(), 1):
        value = parse_json(line, f"{path}, line {number}")
        try:
            found.append(Failure(value["place"], value["why"], datetime.fromisoformat(value["time"])))
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{path}, line {number} is no failed place; remove the line, or the file") from None
    return found


def _remember(task: Task, failure: Failure) -> None:
    path = _memory_file(task)
    line = json.dumps({"place": failure.place, "why": failure.why, "time": failure.time.isoformat()})
    publish_file(path, (path.read_bytes() if path.exists() else b"") + f"{line}\n".encode())
