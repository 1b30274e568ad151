"""Keeping a run alive on this machine: `assay train --start auto`, again after what may be tried again.

One allocation lasts from the call to its return; its receipts stand in the run's ledger. The steps are the real
commands in processes of their own, whose exit codes count. It takes no machine and lifts no hold.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

from assay.checkpoint.permission import permit
from assay.data import queue as queues
from assay.errors import AssayError, DataError, Interrupted, MachineError, Refused
from assay.files.digest import digest
from assay.files.lock import take
from assay.files.reading import read_object
from assay.files.retry import Policy
from assay.launch import allocation
from assay.launch.child import start
from assay.launch.coming_back import CONTROL, FETCH, MACHINE, PREEMPTED, End, Next, after, avoided
from assay.launch.description import Task
from assay.ledger.ledger import now
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder, salted
from assay.run.history import history
from assay.run.owner import is_owned
from assay.run.proposals import goes_on as may_go_on
from assay.run.status import reported

LOOK_SECONDS = 0.1
DATA_LOOK_SECONDS = 1.0
OWNER_SECONDS = 60.0  # ranks whose parent was killed save and leave
MIRROR_SECONDS = 30.0  # that the mirror may take to say whether it holds the run; the pause follows
LAST_COPY_SECONDS = 600  # for the last checkpoint's copy, when training is over
MIRROR_PAUSE = 10.0  # before a mirror that ended is started again
REQUEUE = signal.SIGUSR1  # Slurm's word that the time is nearly over

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Kept:
    """How it went: the last training process' end, the allocation's name (None: no run began), and restarts.

    `requeue`: the scheduler's limit came near, and the run would go on; `elsewhere`: a fault of this machine that
    another may not have; `why`: the place's own fault; `held`: a hold stands.
    """

    last: End
    allocation: str | None
    restarts: int
    requeue: bool
    elsewhere: bool
    why: str | None
    held: bool = False


@dataclass
class Asked:
    """What signals asked for; `wake` is set by each of them. `stop` is heard over `requeue`."""

    wake: threading.Event = field(default_factory=threading.Event)
    requeue: bool = False
    stop: bool = False
    child: subprocess.Popen[bytes] | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.requeue = self.requeue or number == REQUEUE
        self.stop = self.stop or number != REQUEUE
        self.wake.set()
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)


def keep(task: Task, tell: Tell, *, elsewhere: bool = False) -> Kept:
    """Train `task` here until it is done or must not go on.

    `elsewhere`: a fault of the machine ends it, since a scheduler will take another one. Raises Refused (exit 3) when
    another launcher or trainer has the run, or a control failed on this host a short while ago.
    """
    recipe = recipes.load(task.recipe)
    task.run.parent.mkdir(parents=True, exist_ok=True)
    with task.run.with_name(f"{task.run.name}.launch").open("ab") as file, signals() as asked:
        if not take(file, 1.0):
            raise Refused(f"{task.run} has a launcher on this machine already; stop that one first")
        return _Keeping(task, recipe, tell, asked, elsewhere).work()


class _Keeping:
    """One call's work."""

    def __init__(self, task: Task, recipe: Recipe, tell: Tell, asked: Asked, elsewhere: bool) -> None:
        self.task, self.recipe, self.tell, self.asked, self.elsewhere = task, recipe, tell, asked, elsewhere
        self.run = RunFolder(task.run)
        self.here = allocation.here(task.launch)
        self.began = now()
        self.name: str | None = None
        self.first_seq = -1  # of the newest receipt before this allocation
        self.mirror: subprocess.Popen[bytes] | None = None
        self.mirror_due = 0.0

    def work(self) -> Kept:
        limits = self.task.launch.restarts
        pauses = Policy(first=limits.first_seconds, most=limits.longest_seconds)
        self._wait_for_owner()
        ends = allocation.past_ends(self.run.ledger) if self.run.exists() else []
        if not self.elsewhere:  # a person who starts it again wants all tries again, but for a fault that comes back
            ends = [end for end in ends[-1:] if end.code == MachineError.code]
        restarts, away, goes_on = 0, False, False
        if self.run.exists():
            told = history(self.run.ledger)
            permit(self.run, self.recipe, told)  # a run that may not be trained takes no machine
            if told.ended and not may_go_on(self.run):
                self.tell(f"{self.run.path} has ended: its schedule is done; nothing is left to train")
                return Kept(End(0, None, told.segments[-1].last), None, 0, False, False, None)
            self._refuse_a_bad_host()
            self._begin()
        try:
            while True:
                data, ready = self._data()
                ends.append(self._once(ready))
                chosen = after(ends, limits, pauses, held=self._held(), asked=self.asked.stop)
                goes_on = chosen.act != "end"
                away = self.elsewhere and chosen.act == "again" and ends[-1].code == MachineError.code
                if away:
                    chosen = Next("end", "a fault of this machine: run elsewhere")
                elif self.asked.requeue and goes_on:
                    chosen = Next("end", "the scheduler's limit is near")
                self._say(ends[-1], chosen.act, chosen.reason, chosen.seconds)
                if chosen.act == "again":
                    self.asked.wake.wait(chosen.seconds)
                elif chosen.act == "data" and not self._new_data(data):
                    break
                if chosen.act == "end" or self.asked.wake.is_set():
                    break
                restarts += 1
        finally:
            self._stop_mirror()
        why = self._why(ends[-1])
        if self.name is not None:
            allocation.end(self.run, self.here, self.name, ends[-1], restarts, why)
        requeue = self.asked.requeue and not self.asked.stop and goes_on
        if not requeue:  # the next allocation copies what is left; a job that its limit ends would not be queued again
            self._last_copy()
        return Kept(ends[-1], self.name, restarts, requeue, away, why, self._held())

    def _once(self, ready: bool) -> End:
        """Train; how it ended. `ready`: the next update's data are here.

        `--start auto` asks the mirror and brings the run from it, under the next lease.
        """
        before = self._outcome()
        words = ["train", str(self.task.recipe), "--run", str(self.task.run), "--start", "auto"]
        code = self._command([*words, "--ranks", str(self.task.launch.ranks)])
        if code < 0:
            self._wait_for_owner()
        return self._end(code, before, ready)

    def _command(self, words: list[str]) -> int:
        """The exit code of an `assay` command, negative when a signal killed it; our signals reach it as SIGTERM."""
        if self.asked.wake.is_set():
            return Interrupted.code
        child = start(words)
        self.asked.child = child
        if self.asked.wake.is_set():  # it came while the process was being started
            child.send_signal(signal.SIGTERM)
        try:
            while True:
                if self.run.ledger.is_file():
                    self._begin()
                    self._keep_mirror()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(LOOK_SECONDS)
        finally:
            self.asked.child = None
            if child.poll() is None:
                child.terminate()
                child.wait()

    def _begin(self) -> None:
        """The receipt of the allocation, once the run has a ledger."""
        if self.name is None:
            ledger = self.run.open_ledger()
            self.first_seq = ledger.head["seq"]
            self.name = allocation.begin(self.run, self.here, self.began)
            self.tell(f"allocation {self.name} of {self.task.run} in {self.here.where}")

    def _keep_mirror(self) -> None:
        """`assay mirror` beside training, where the recipe has one; started again when it ended."""
        stated = self.recipe.checkpoint.mirror
        if stated is None or (self.mirror is not None and self.mirror.poll() is None):
            return
        if time.monotonic() >= self.mirror_due:
            self.mirror_due = time.monotonic() + MIRROR_PAUSE
            self.mirror = start(["mirror", str(self.task.run), stated.url])

    def _stop_mirror(self) -> None:
        if self.mirror is not None and self.mirror.poll() is None:
            self.mirror.terminate()
            try:
                self.mirror.wait(MIRROR_SECONDS)
            except subprocess.TimeoutExpired:
                self.mirror.kill()
                self.mirror.wait()

    def _last_copy(self) -> None:
        """What the end left to copy, the receipt of the allocation included; a copy that fails changes no exit code."""
        stated = self.recipe.checkpoint.mirror
        if stated is None or self.name is None:
            return
        words = ["mirror", str(self.task.run), stated.url, "--once", "--deadline", str(LAST_COPY_SECONDS)]
        if (code := start(words).wait()) != 0:
            self.tell(f"the last copy to {stated.url} failed with exit code {code}; the run is whole on this machine")

    def _wait_for_owner(self) -> None:
        """Ranks that lost their parent save and leave; Refused when somebody else trains the run."""
        deadline = time.monotonic() + OWNER_SECONDS
        while self.run.exists() and is_owned(self.run) and not self.asked.wake.is_set():
            if time.monotonic() > deadline:
                raise Refused(f"{self.run.path} is being trained by another process; stop that one first")
            self.asked.wake.wait(LOOK_SECONDS)

    def _refuse_a_bad_host(self) -> None:
        """A host on which a control just failed is not taken at once again; other failures are no news to it."""
        host = salted(self.run, self.here.host)
        failures = [one for one in allocation.failures(self.run.ledger) if (one.place, one.why) == (host, CONTROL)]
        cool_down = timedelta(seconds=self.task.launch.restarts.cool_down_seconds)
        until = avoided(failures, datetime.now(UTC), cool_down).get(host)
        if until is not None:
            raise Refused(
                f"a control of {self.run.path} failed on this host; it is not taken before {until:%H:%M} UTC: take "
                "another machine, or lower restarts.cool_down_seconds in the launch file"
            )

    def _outcome(self) -> bytes:
        return self.run.outcome.read_bytes() if self.run.outcome.is_file() else b""

    def _end(self, code: int, before: bytes, ready: bool) -> End:
        """The end with its cause, where the training process left one, and with the run's steps."""
        killed, code = code < 0, _known(code)
        cause = "signal" if killed and code == Interrupted.code else None
        step = None
        if self._outcome() != before:
            outcome = read_object(self.run.outcome, "the outcome of the training process")
            if outcome["code"] == code:
                cause, step = outcome["cause"], outcome["step"]
        if not self.run.exists():
            if self.recipe.checkpoint.mirror is not None and code == DataError.code and ready:
                cause = FETCH
            elif code == Interrupted.code and cause is None and not self.asked.wake.is_set():
                cause = "network"  # the mirror cannot be asked
            return End(code, cause)
        full = [item.step for item in history(self.run.ledger).line if item.kind == "full"]
        saved = max(full, default=None)
        if step is not None:
            return End(code, cause, step, saved)
        # Lines are written every log.every updates: the fault was at the newest one or later.
        return End(code, cause, reported(self.run.metrics).step, saved, exact=False)

    def _held(self) -> bool:
        return self.run.exists() and history(self.run.ledger).hold is not None

    def _why(self, last: End) -> str | None:
        """The fault of the place that ended the allocation, or None when it was not the place's."""
        if (
            last.code == Refused.code
            and self.run.exists()
            and allocation.control_failed(self.run.ledger, self.first_seq)
        ):
            return CONTROL
        if last.cause == "preempted":
            return PREEMPTED
        return MACHINE if last.code == MachineError.code else None

    def _data(self) -> tuple[str | None, bool]:
        """What the queue and the next slot's missing shards are now, and whether the next update has its data."""
        folder = self.task.project
        path = folder / self.recipe.data.queue
        try:
            queue = queues.load(path)
            roots = [folder / root for root in self.recipe.data.roots] or [path.parent]
            missing = set(queues.missing(queue, queues.locate(queue, roots)))
        except AssayError:
            return None, False
        step = (reported(self.run.metrics).step if self.run.exists() else None) or 0
        try:
            needed = {part.shard for part in queue.slot_of(step)[0].parts}
        except DataError:  # the queue ends before this update
            return queue.head, False
        return digest("\n".join([queue.head, *sorted(missing & needed)]).encode()), not missing & needed

    def _new_data(self, known: str | None) -> bool:
        """Wait for a new queue head, or for the next slot's missing shards; False when neither came in time."""
        seconds = self.task.launch.restarts.data_seconds
        deadline = time.monotonic() + seconds
        while not self.asked.wake.is_set():
            now_there, ready = self._data()
            if ready and now_there != known:
                self.tell("the queue has a new head, or a missing shard is here")
                return True
            if time.monotonic() >= deadline:
                self.tell(f"no data came in restarts.data_seconds, {seconds:,} s")
                return False
            self.asked.wake.wait(DATA_LOOK_SECONDS)
        return False

    def _say(self, last: End, act: str, reason: str, seconds: float) -> None:
        cause = f" ({last.cause})" if last.cause else ""
        at = "" if last.step is None else f" at update {last.step:,}"
        then = {"end": "no restart", "again": f"again in {seconds:.1f} s", "data": "waiting for a new queue head"}[act]
        self.tell(f"training ended with exit code {last.code}{cause}{at}; {then}: {reason}")


@contextlib.contextmanager
def signals() -> Iterator[Asked]:
    asked = Asked()
    before = {number: signal.signal(number, asked.hear) for number in (signal.SIGTERM, signal.SIGINT, REQUEUE)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _known(code: int) -> int:
    """A process that a signal killed is a fault of the machine, unless it was asked to end before it could listen."""
    if code in (-signal.SIGTERM, -signal.SIGINT):
        return Interrupted.code
    return MachineError.code if code < 0 else code


def remembered(ledger: Path, cool_down: float) -> dict[str, datetime]:
    """Places that the run's receipts say to leave alone now, each with the moment from which it may be taken."""
    return avoided(allocation.failures(ledger), datetime.now(UTC), timedelta(seconds=cool_down))
