"""A run on an unmanaged SkyPilot cluster: its task file, and launch, stop, start and down through the `sky` command.

The cluster runs `assay launch … --on local`, which keeps the run alive there; this process takes another place when the
machine is gone, and removes none. SkyPilot may live in an environment of its own. Never a managed job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
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
from assay.recipe import load as recipes

COMMAND = "ASSAY_SKY"  # the `sky` command, where it lies in an environment of its own
_ENDED = re.compile(r"launch: ended with exit code (\d+)(?: \((\w+)\))?\s*$")
_UPDATE = re.compile(r"\bupdate ([\d,]*\d)\b")
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
        _refuse_without_copies(task)
        with signals() as told:
            return {"job": asked.cluster, "exit": _launch(task, asked.cluster, tell, told)}
    if (code := _sky([what, "--yes", asked.cluster]).wait()) != 0:
        raise MachineError(f"sky {what} {asked.cluster} ended with exit code {code}; its own words are above")
    return {"job": asked.cluster, "exit": 0}


def _refuse_without_copies(task: Task) -> None:
    """A machine that goes away takes its disk along: without a mirror the run would begin again at its start."""
    if recipes.load(task.recipe).checkpoint.mirror is None:
        raise Refused(
            f"{task.recipe} has no checkpoint.mirror: a cluster that goes away would take the only copy of the run "
            "along; name a place for copies there, such as {url: s3://copies/demo}"
        )


def _launch(task: Task, cluster: str, tell: Tell, told: Asked) -> int:
    """Launch and follow, again elsewhere when the machine is gone; the exit code of the launcher on the cluster.

    A stream that breaks says nothing about the machine: SkyPilot is asked, and what still stands is followed again.
    Nothing here removes a cluster or its disk.
    """
    limits = task.launch.restarts
    pauses = Policy(first=limits.first_seconds, most=limits.longest_seconds)
    path = task.run.absolute().with_name(f"{task.run.name}.sky.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    launching = ["launch", "--yes", "--cluster", cluster, str(path)]
    ends: list[End] = []
    place: str | None = None
    stands = ""
    # Of an earlier call that followed no longer: a second launcher there would be refused.
    standing = _answer(["logs", "--status", cluster], told)[0] == RUNNING_JOB
    words = ["logs", cluster] if standing else launching
    while True:
        if words == launching:
            _wait_for_a_place(task, tell, told)
            if told.wake.is_set():
                return Interrupted.code
            publish_file(path, task_file(task, left_alone(task)).encode())
        heard = _follow(words, told)
        place = heard.place or place
        if told.wake.is_set():
            return _no_longer_followed(task, tell)
        stands, words = _stands(cluster, heard, stands == OVER, pauses, told), ["logs", cluster]
        if told.wake.is_set():
            return _no_longer_followed(task, tell)
        if stands == ENDED:
            assert heard.code is not None
            return heard.code
        if stands in (STOPPED, CANCELLED):
            tell(f"the cluster {cluster} is {stands}; its disk is kept: assay launch {task.file} goes on there, "
                 f"--act down gives it up for another place")  # fmt: skip
            return Interrupted.code
        if stands == OVER:
            continue
        if stands == RUNNING:
            end = End(Interrupted.code, "network", heard.step, heard.step)
        elif stands == SILENT:
            end, words = End(MachineError.code, None, heard.step, heard.step), launching
        else:
            end, words = End(Interrupted.code, PREEMPTED if place else "no machine", heard.step, heard.step), launching
        if stands == GONE and place is not None:
            tell(f"the machine in {place} went away")
            _remember(task, Failure(place, PREEMPTED, datetime.fromisoformat(now())))
            place = None
        ends.append(end)
        chosen = after(ends, limits, pauses)
        if chosen.act == "end":
            tell(chosen.reason if words == launching else f"{chosen.reason}; the cluster may go on and cost: "
                 f"assay launch {task.file} --act stop")  # fmt: skip
            return end.code
        tell(f"{'launched' if words == launching else 'followed'} again in {chosen.seconds:.1f} s: {chosen.reason}")
        told.wake.wait(chosen.seconds)
        if told.wake.is_set():
            return _no_longer_followed(task, tell)


def _no_longer_followed(task: Task, tell: Tell) -> int:
    tell(f"no longer followed; the cluster goes on and costs: assay launch {task.file} --act stop")
    return Interrupted.code


def _wait_for_a_place(task: Task, tell: Tell, told: Asked) -> None:
    """Until one of `infra` may be taken: waiting here costs nothing."""
    asked = task.launch.skypilot
    assert asked is not None
    while not told.wake.is_set():
        until = [free for place in asked.infra if (free := _free_from(task, place)) is not None]
        if len(until) < len(asked.infra):
            return
        first = min(until)
        tell(f"all of skypilot.infra failed a short while ago; the first may be taken again at {first:%H:%M:%S} UTC")
        told.wake.wait(max(0.0, (first - datetime.now(UTC)).total_seconds()))


# What becomes of a cluster whose launcher is no longer heard.
ENDED = "ended"  # the launcher said its exit code, and that counts
GONE = "gone"  # SkyPilot, which asked the cloud, knows no such cluster any more
STOPPED = "stopped"  # by a person, the guard or SkyPilot's own idle stop
CANCELLED = "cancelled"  # somebody ended the job
RUNNING = "running"  # or not known
OVER = "over"  # the job is; its log tells the exit code that a broken stream did not bring
SILENT = "silent"  # the job is over, and its launcher said no exit code
FREE = "free"  # the cluster stands, or half of it, and has no job


def _stands(cluster: str, heard: Heard, over: bool, pauses: Policy, told: Asked) -> str:
    """How it stands after `heard`; `over`: the job was over before its log was read."""
    notice = heard.code == Interrupted.code and heard.cause in ("signal", PREEMPTED)
    if heard.code is not None and not notice and heard.code != MachineError.code:
        return ENDED
    state = _state(cluster, told)
    if heard.code is not None:  # the machine may be about to go: its provider's notice, or a device that is gone first
        for look in range(1, LOOKS):
            if state in (GONE, STOPPED) or told.wake.is_set():
                break
            told.wake.wait(min(pauses.most, pauses.first * 2.0 ** (look - 1)))
            state = _state(cluster, told)
        return GONE if state == GONE else ENDED
    if state in (GONE, STOPPED, RUNNING):
        return state
    code = _answer(["logs", "--status", cluster], told)[0]
    if code == NO_JOB:
        return FREE
    if code == CANCELLED_JOB:
        return CANCELLED
    if code not in (0, FAILED_JOB):
        return RUNNING
    return SILENT if over else OVER


FAILED_JOB, RUNNING_JOB, NO_JOB, CANCELLED_JOB = range(
    100, 104
)  # exit codes of `sky logs --status`, as its help has them
LOOKS = 6  # at a machine that got a signal, with pauses of first_seconds, doubled: 155 s with five
STATUS_SECONDS = 300.0  # that SkyPilot may take to ask the cloud


def _state(cluster: str, told: Asked) -> str:
    """`gone`, `stopped` or `up`, after SkyPilot asked the cloud; `running` when it cannot say."""
    code, text = _answer(["status", "--refresh", "--output", "json", cluster], told)
    found = re.search(r"^\[.*", text, re.MULTILINE | re.DOTALL)  # what SkyPilot logs may stand before it
    try:
        said = json.loads(found[0]) if found else None
    except ValueError:
        return RUNNING
    if code != 0 or not isinstance(said, list):
        return RUNNING
    mine = [one for one in said if isinstance(one, dict) and one.get("name") == cluster]
    if not mine:
        return GONE
    return STOPPED if mine[0].get("status") in ("STOPPED", "AUTOSTOPPING") else "up"


def _answer(words: list[str], told: Asked) -> tuple[int, str]:
    """Exit code and standard output of a command that asks; our signals end it."""
    child = _sky(words, read=True, errors=2)
    told.child = child
    try:
        raw, _ = child.communicate(timeout=STATUS_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        raw, _ = child.communicate()
    told.child = None
    return child.returncode, raw.decode("utf-8", "replace")


@dataclass(frozen=True)
class Heard:
    """What the launcher on the cluster was heard to say: exit code and cause, its place, and the newest update."""

    code: int | None
    cause: str | None
    place: str | None
    step: int | None


def _follow(words: list[str], told: Asked) -> Heard:
    """Read one of SkyPilot's commands to its end; everything goes on to standard error."""
    code, cause, place, step = None, None, None, None
    child = _sky(words, read=True)
    told.child = child
    assert child.stdout is not None
    with child.stdout:
        for raw in child.stdout:
            line = raw.decode("utf-8", "replace")
            os.write(2, raw)
            if found := _PLACE.search(line):
                place, code, cause = found[1], None, None
            if found := _UPDATE.search(line):
                step = int(found[1].replace(",", ""))
            if found := _ENDED.search(line):
                code, cause = int(found[1]), found[2]
    child.wait()
    told.child = None
    return Heard(code, cause, place, step)


def _sky(words: list[str], read: bool = False, errors: int = subprocess.STDOUT) -> subprocess.Popen[bytes]:
    """One of SkyPilot's commands; its output goes to standard error, or is read."""
    command = os.environ.get(COMMAND, "sky")
    try:
        return subprocess.Popen(
            [command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if read else 2,
            stderr=errors,
            start_new_session=True,
            env={"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **os.environ},  # reports nothing unless the user says so
        )
    except OSError as fault:
        raise InputError(
            f"{command} cannot be started ({fault.strerror}); pip install 'assay[skypilot]' brings sky, or {COMMAND} "
            "names it in an environment of its own"
        ) from None


def left_alone(task: Task) -> set[str]:
    """Those of `infra` that the memory beside the run folder says to leave alone now."""
    asked = task.launch.skypilot
    assert asked is not None
    return {place for place in asked.infra if _free_from(task, place) is not None}


def _free_from(task: Task, place: str) -> datetime | None:
    """When `place` may be taken again; a region cools down with its zones, a zone with its region. None: now."""
    cool_down = timedelta(seconds=task.launch.restarts.cool_down_seconds)
    found = avoided(_memory(task), datetime.now(UTC), cool_down)
    return max((until for failed, until in found.items() if _within(failed, place) or _within(place, failed)),
               default=None)  # fmt: skip


def _within(place: str, wider: str) -> bool:
    """Whether a place is another one or lies in it: places are cloud/region/zone as far as they are known."""
    return f"{place}/".startswith(f"{wider}/")


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
