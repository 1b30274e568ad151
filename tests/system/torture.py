"""Kills a process at one file operation after another and looks at what comes back.

A script, so that torch is imported once: `python torture.py PLANS.json`, a list of `{"what", "every", "kinds"}`.
Every trial is a fork: the job runs with
the layer of `faults`, ends there, is begun again without it, and what stands then is held against the job that
nobody disturbed. Prints an answer for each plan; `wrong` names each trial that did not come back by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from faults import ERRORS, Faults
from small import BLOCK, GLOBAL_BATCH, Project, drive

from assay.checkpoint.load import load
from assay.data import queue as queues
from assay.data.shard import open_shard
from assay.errors import MachineError
from assay.ledger.ledger import read
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.history import history

KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Task:
    """What is disturbed: prepared in a folder, done (again and again until it is done), and what it leaves."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], int]
    result: Callable[[Path], dict[str, Any]]


def training(**changes: Any) -> Task:
    """A run of six updates in two slots, with retention, weights and validation, from nothing to its end."""

    def prepare(folder: Path) -> None:
        project = Project(folder / "project", ((3, 1), (3, 1)))
        project.recipe(
            model={"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "vocabulary": 61, "block": BLOCK, "ffn": 8},
            batch={"micro": 4, "accumulation": 1, "lanes": 2},
            schedule__updates=6,
            checkpoint={"every": 2, "keep": 1, "weights_every": 3},
            evaluate={"every": 3, "batches": 1},
            **changes,
        )

    def act(folder: Path) -> int:
        recipe, run = folder / "project" / "recipe.yaml", folder / "run"
        try:
            return drive(recipe, run, resume=RunFolder(run).exists())
        except OSError as fault:  # of the making of the folder, which the command answers in this way
            print(fault)
            return MachineError.code

    def result(folder: Path) -> dict[str, Any]:
        run = RunFolder(folder / "run")
        told = history(run.ledger)  # verifies the chain
        stands = {item.step: load(run.path / item.folder).manifest for item in told.line if item.kind == "full"}
        lines = metrics.by_update(run.metrics)
        alarms = [receipt.body for receipt in read(run.ledger) if receipt.kind == "alarm"]
        return {
            "state": stands[6].state_sha256,
            "order": stands[6].order_digest,
            "metrics": [metrics.comparable(lines[update]) for update in range(6)],
            "standing": sorted(stands),
            "weights": sorted({item.step: item.weights_sha256 for item in told.line if item.kind == "weights"}.items()),
            "alarms": alarms,
        }

    return Task(prepare, act, result)


def appending() -> Task:
    """A third slot, appended to a queue of two."""

    def prepare(folder: Path) -> None:
        Project(folder / "project", ((3, 1), (3, 1)))

    def act(folder: Path) -> int:
        data = folder / "project" / "data"
        queue = queues.load(data / "queue.jsonl")
        if len(queue.slots) == 2:
            parts = queues.parts_of(queue, open_shard(data / "train-0"))
            queues.append(queue.path, queues.propose(queue, global_batch=GLOBAL_BATCH, updates=2, parts=parts))
        return 0

    def result(folder: Path) -> dict[str, Any]:
        path = folder / "project" / "data" / "queue.jsonl"
        return {"slots": [slot.digest for slot in queues.load(path).slots], "bytes": path.read_bytes().decode()}

    return Task(prepare, act, result)


def cut() -> Task:
    """The same training, stopped after four updates and ended by the next."""
    task = training()

    def prepare(folder: Path) -> None:
        task.prepare(folder)
        assert drive(folder / "project" / "recipe.yaml", folder / "run", until="4") == 0

    return Task(prepare, task.act, task.result)


TASKS = {"training": training(), "appending": appending(), "cut": cut()}


def forked(act: Callable[[], int], output: Path) -> int:
    """The exit code of a fork that does it; its words go to `output`, an exception is code 99."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if sys.platform == "linux":  # a fork that outlives the script would go on alone
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    words = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(words, 1)
    os.dup2(words, 2)
    code = 99
    try:
        code = act()
    except Exception:  # noqa: BLE001 - whatever it is, it is shown, and the fork ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def fresh(place: Path, task: Task) -> Iterator[Path]:
    """A prepared folder of its own, removed afterwards."""
    folder = place / "trial"
    shutil.copytree(place / "prepared", folder)
    yield folder
    shutil.rmtree(folder)


def main() -> None:
    """All plans, one after another."""
    torch.set_num_threads(1)
    answers = []
    for number, plan in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        place = Path(sys.argv[1]).parent / f"plan-{number}"
        task = TASKS[plan["what"]]
        (place / "prepared").mkdir(parents=True)
        task.prepare(place / "prepared")
        answers.append(cuts(plan, place, task) if plan["what"] == "cut" else trials(plan, place, task))
    print(json.dumps(answers))


def trials(plan: dict[str, Any], place: Path, task: Task) -> dict[str, Any]:
    """Break the job at every `every`-th operation in each of the ways `kinds`."""
    words = place / "words.txt"
    with fresh(place, task) as folder:
        assert task.act(folder) == 0  # here, so that no fork has to import and look up what all of them need

    def count(folder: Path) -> int:
        faults = Faults(folder, None)
        faults.install()
        code = task.act(folder)
        (place / "log.json").write_text(json.dumps(faults.log))
        return code

    with fresh(place, task) as folder:
        assert forked(lambda: count(folder), words) == 0, words.read_text()
        undisturbed = json.loads(json.dumps(task.result(folder)))
    log = json.loads((place / "log.json").read_text())
    ended: dict[str, int] = {}
    wrong = []
    for kind in plan["kinds"]:
        possible = [at for at, name in enumerate(log) if kind != "torn" or name.startswith("write ")]
        for at in possible[plan.get("first", 0) :: plan["every"]]:
            with fresh(place, task) as folder:
                words.unlink(missing_ok=True)

                def disturbed(folder: Path = folder, at: int = at, kind: str = kind) -> int:
                    Faults(folder, at, kind).install()
                    return task.act(folder)

                code = forked(disturbed, words)
                ended[kind] = ended.get(kind, 0) + (code == (71 if kind in ERRORS else KILLED))
                fault = judge(kind, code, words.read_text())
                if fault is None:
                    code = forked(lambda folder=folder: task.act(folder), words)
                    fault = differences(undisturbed, task, folder) if code == 0 else f"did not come back: exit {code}"
                if fault is not None:
                    trial = {"kind": kind, "at": at, "operation": log[at], "fault": fault}
                    wrong.append(trial | {"words": words.read_text()[-2000:]})
    return {"operations": len(log), "ended": ended, "wrong": wrong}


def cuts(plan: dict[str, Any], place: Path, task: Task) -> dict[str, Any]:
    """Cut the ledger of a stopped run at every `every`-th byte of its last two lines, and go on.

    Where the outcome of the last process names the ledger's head, whole lines that are missing are refused (3);
    where a kill left no outcome, what the lines said is done again and the end is the undisturbed one.
    """
    words, wrong, codes = place / "words.txt", [], list[int]()
    with fresh(place, task) as folder:
        assert task.act(folder) == 0
        undisturbed = json.loads(json.dumps(task.result(folder)))
    whole = (place / "prepared" / "run" / "ledger.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(whole) - len(lines[-1]) - len(lines[-2])
    for named in (True, False):
        for offset in range(start, len(whole), plan["every"]):
            with fresh(place, task) as folder:
                words.unlink(missing_ok=True)
                os.truncate(folder / "run" / "ledger.jsonl", offset)
                if not named:
                    (folder / "run" / "outcome.json").unlink()
                code = forked(lambda folder=folder: task.act(folder), words)
                codes.append(code)
                expected = 3 if named else 0
                fault = None if code == expected else f"exit {code}, not {expected}"
                if code == 0 and fault is None:
                    fault = differences(undisturbed, task, folder)
                if "Traceback" in words.read_text():
                    fault = "a traceback"
                if fault is not None:
                    wrong.append({"named": named, "offset": offset, "fault": fault, "words": words.read_text()[-2000:]})
    return {"codes": codes, "wrong": wrong}


def judge(kind: str, code: int, said: str) -> str | None:
    """What is wrong with the way in which the disturbed process ended."""
    if kind not in ERRORS:
        return None if code in (KILLED, 0) else f"was not killed: exit {code}"
    if "Traceback" in said or code not in (0, 71):
        return f"exit {code} where 71 and one sentence are promised"
    return None


def differences(undisturbed: dict[str, Any], task: Task, folder: Path) -> str | None:
    """What the repeated job left that the undisturbed one did not."""
    try:
        found = json.loads(json.dumps(task.result(folder)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the trial failed
        return f"cannot be read: {error!r}"
    odd = {key: (found[key], value) for key, value in undisturbed.items() if found[key] != value}
    return f"differs (found, expected): {json.dumps(odd)[:900]}" if odd else None


if __name__ == "__main__":
    main()
