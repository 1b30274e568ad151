"""The next slot, verified and checked while this one is trained on, by a process of its own at a low priority.

The trainer starts it, never waits for it before the slot's end, and takes its result when the slot is entered;
whatever it could not do is done then. It needs no torch and writes nothing: receipts are the trainer's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from assay.data import approval, checking
from assay.data import queue as queues
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard
from assay.errors import AssayError, DataError, InputError, Refused
from assay.ledger.ledger import Ledger
from assay.recipe import load as recipes
from assay.run.folder import RunFolder
from assay.run.slots import KIND, SlotChecks, checked, past_checks

# A check that reads fewer tokens is done when the slot is entered: it takes no longer than the process to start.
WORTH_A_PROCESS = 1 << 22
_PR_SET_PDEATHSIG = 1
_FAULTS: dict[int, type[AssayError]] = {one.code: one for one in (InputError, Refused, DataError)}
_LOOK_SECONDS = 0.05


class Ahead:
    """What is known of the slots to come. Of the ranks the first alone has one."""

    def __init__(self, run: RunFolder, recipe: Path, ledger: Ledger, tell: Callable[[str], None]) -> None:
        """`recipe` is the file that this training was started with; `tell` says a line to people."""
        self._run, self._recipe, self._ledger, self._tell = run, recipe, ledger, tell
        self._checks = SlotChecks(recipes.load(recipe), recipe.resolve().parent)
        self._past = past_checks(run)
        self._child: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # what the child prints: a file, for nobody reads along
        self._of = -1  # the slot that the child looks at, or that `_found` is about
        self._found: dict[str, Any] | None = None
        self._next: int | None = None  # a slot that the queue did not hold yet
        self._queue: Path | None = None
        self._size: int | None = None  # of the queue's file, when it was looked into last

    def verify(self, queue: Queue, slot: Slot, shards: Mapping[str, Shard], meanwhile: Callable[[], None]) -> str:
        """Prove a slot's bytes, freshness and distance from validation; returns when that was done.

        "ahead" was before it was needed, "waited" partly while training stood still, "at entry" wholly so. Writes
        the receipt `slot.checked` unless the ledger has it. `meanwhile` is called while waiting and may raise. Raises
        DataError or Refused with the evidence.
        """
        done = "ahead"
        if self._child is not None and self._of == slot.number:
            done = "ahead" if self._child.poll() is not None else "waited"
            self._wait(meanwhile)
            self.look()
        if not self._holds(slot, shards):
            done = "at entry"
            if self._worth(queue, slot, shards):
                self._start(slot.number)
                self._wait(meanwhile)
                self._take()  # a fault that is found now is no alarm but the end
                if self._found is not None and "fault" in self._found:
                    raise _FAULTS.get(self._found["code"], DataError)(self._found["fault"])
        if self._holds(slot, shards):
            assert self._found is not None
            self._write(self._found["checked"])
            self._found = None  # it stands for this entry alone
            return done
        self.close()
        checking.verify_bytes(slot, shards)
        against = self._checks.against(queue, slot, shards)
        if not checked(self._past, against.basis(queue, slot)):
            self._write(self._checks.check(queue, slot, shards, against))
        return done

    def begin(self, queue: Queue, slot: Slot, shards: Mapping[str, Shard]) -> None:
        """`slot` was entered: from now on the one behind it is looked at, or waited for if there is none yet."""
        number = slot.number + 1
        self._queue, self._size, self._next = queue.path, len(queue.content), number
        if number < len(queue.slots):
            self._next = None
            if self._worth(queue, queue.slots[number], shards):
                self._start(number)

    def look(self) -> None:
        """After each update: take up what was found; damage is told at once. Costs a `stat` or the like."""
        if self._child is not None:
            if self._child.poll() is None:
                return
            self._take()
            if self._found is not None and "fault" in self._found:
                body = {"alarm": "the next slot cannot be entered as it is", "slot": self._of}
                self._ledger.append("alarm", {**body, "line": self._found["line"], "code": self._found["code"]})
                self._tell(f"ALARM: slot {self._of} comes next and cannot be entered as it is: {self._found['fault']}")
        elif self._next is not None and self._queue is not None:
            size = _size(self._queue)
            if size != self._size:
                self._size = size
                self._start(self._next)

    def close(self) -> None:
        """End the process, if one runs."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        if self._said is not None:
            self._said.close()
            self._said = None

    def _worth(self, queue: Queue, slot: Slot, shards: Mapping[str, Shard]) -> bool:
        names = {part.shard for part in slot.parts}
        if queue.freshness == "strict":
            names |= {part.shard for one in queue.slots[: slot.number] for part in one.parts}
        return sum(shards[name].tokens for name in names if name in shards) >= WORTH_A_PROCESS

    def _start(self, number: int) -> None:
        self.close()
        self._of, self._found, self._next = number, None, None
        words = [sys.executable, "-m", "assay.train.ahead", "--run", str(self._run.path), "--recipe", str(self._recipe)]
        words += ["--slot", str(number), "--parent", str(os.getpid())]
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.DEVNULL
            )
        except OSError as fault:  # no process to be had is no reason to stop: the slot is verified when it is entered
            self.close()
            self._tell(f"slot {number} is not verified ahead: {fault.strerror or fault}")

    def _wait(self, meanwhile: Callable[[], None]) -> None:
        while self._child is not None and self._child.poll() is None:
            meanwhile()
            time.sleep(_LOOK_SECONDS)

    def _take(self) -> None:
        """Read what the ended process said. One that said nothing (killed, out of memory) has found nothing."""
        if self._said is None:
            return
        self._said.seek(0)
        said = self._said.read()
        self.close()
        try:
            self._found = json.loads(said)
        except ValueError:
            self._found = None
        if self._found is not None and self._found["line"] is None:
            self._next, self._found = self._of, None  # the queue grew by less than a slot: wait for the rest

    def _holds(self, slot: Slot, shards: Mapping[str, Shard]) -> bool:
        """Whether the result stands for this very line and these very files."""
        found = self._found
        if self._of != slot.number or found is None or found["line"] != slot.digest or "fault" in found:
            return False
        return bool(found["stamps"] == _stamps(slot, shards))

    def _write(self, body: dict[str, Any] | None) -> None:
        if body is not None:
            self._ledger.append(KIND, body)
            self._past.append(body)
            for thing in body["not_compared"]:
                self._tell(f"slot {body['slot']}: its documents could not be compared with all: {thing}")


def examine(run: RunFolder, recipe_file: Path, number: int) -> dict[str, Any]:
    """Everything that entering slot `number` demands, for the trainer to take up; `line` is None without that slot."""
    recipe, folder = recipes.load(recipe_file), recipe_file.resolve().parent
    queue = queues.load(folder / recipe.data.queue)
    if number >= len(queue.slots):
        return {"line": None}
    slot = queue.slots[number]
    try:
        approval.demand(queue, slot)
        shards = queues.locate(queue, [folder / root for root in recipe.data.roots] or [queue.path.parent])
        absent = [part.shard for part in slot.parts if part.shard not in shards]
        if absent:
            raise DataError(f"shard {absent[0]} is not on this machine")
        stamps = _stamps(slot, shards)  # taken first: bytes that change from here on are read again
        checking.verify_bytes(slot, shards)
        checks = SlotChecks(recipe, folder)
        against = checks.against(queue, slot, shards)
        body = None
        if not checked(past_checks(run), against.basis(queue, slot)):
            body = checks.check(queue, slot, shards, against)
    except AssayError as fault:
        return {"line": slot.digest, "fault": str(fault), "code": fault.code}
    return {"line": slot.digest, "stamps": stamps, "checked": body}


def _stamps(slot: Slot, shards: Mapping[str, Shard]) -> dict[str, list[int] | None]:
    """Size, time and place of every file that the slot reads: what changes when somebody writes one."""
    result: dict[str, list[int] | None] = {}
    for name in dict.fromkeys(part.shard for part in slot.parts):
        for file in sorted(shards[name].digests):
            try:
                found = (shards[name].path / file).stat()
            except OSError:
                result[f"{name} {file}"] = None
                continue
            result[f"{name} {file}"] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return result


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def main() -> None:
    """Examine one slot and print what was found as one JSON object."""
    parser = argparse.ArgumentParser(prog="assay.train.ahead")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    job = parser.parse_args()
    os.nice(10)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:
        return  # the trainer was gone before the kernel was asked to say so
    print(json.dumps(examine(RunFolder(job.run), job.recipe, job.slot)))


if __name__ == "__main__":
    main()
