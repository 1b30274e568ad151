"""A checkpoint on its way to the disk, written by a thread of each rank while training goes on.

The tensors are copies that no later update can reach; files are written and hashed in the thread (writing and
hashing let other Python threads run). At most one step's state is in the air. It writes no receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from assay.checkpoint.copies import Copies
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.save import Facts, Part, Place, give_up, publish
from assay.errors import AssayError
from assay.run.outcome import fault_of
from assay.train.ranks import Ranks

_Made = TypeVar("_Made")


@dataclass
class Flight:
    """One checkpoint between its copy and its receipt; `manifest` is rank 0's, once all parts are there."""

    kind: str
    facts: Facts
    place: Place
    part: Future[Part]
    weights_steps: Mapping[str, int]
    asynchronous: bool
    began: float
    stall: float = 0.0
    joined: bool = False
    manifest: Future[Manifest] | None = None

    def ready(self) -> bool:
        """Whether this rank need not wait for its thread to take the next step."""
        return self.part.done() and (self.manifest is None or self.manifest.done())

    def unwritten(self, size: int) -> int:
        """Bytes, of so many, that this save will still take from the disk: what all ranks wrote is taken already."""
        try:
            return max(size - sum(path.stat().st_size for path in self.place.temporary.iterdir()), 0)
        except FileNotFoundError:  # the folder, or a file in it, gets its name this very moment
            return 0 if self.place.folder.exists() else size


@dataclass
class Air:
    """What is in the air on one rank, oldest first, with the thread and the memory for it."""

    flights: list[Flight] = field(default_factory=list)
    copies: dict[str, Copies] = field(default_factory=dict)
    held: tuple[int, dict[str, Tensor]] | None = None  # the step whose whole state the copies hold
    told: set[str] = field(default_factory=set)  # what was said once and need not be said again
    finite: int | None = None  # the step whose whole state was found finite
    wrote: float = 0.0  # seconds that this rank wrote at its part of the newest full checkpoint
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saving"))
    # A folder appears while the next one is written, such as the weights of the same step.
    publisher: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "publishing"))

    def ready(self) -> bool:
        """Whether this rank has something in the air that can go on without waiting."""
        return bool(self.flights) and self.flights[0].ready()

    def close(self) -> None:
        """No thread takes up more than it has."""
        self.thread.shutdown(wait=False)
        self.publisher.shutdown(wait=False)

    def do(self, work: Callable[[], _Made], asynchronous: bool, by: ThreadPoolExecutor | None = None) -> Future[_Made]:
        """In the thread that writes, or the one named, after what it has in hand; or at once, here."""
        if asynchronous:
            return (by or self.thread).submit(work)
        done: Future[_Made] = Future()
        try:
            done.set_result(work())
        except AssayError as fault:
            done.set_exception(fault)  # raised where all ranks learn of it
        return done


def join_parts(air: Air, flight: Flight, ranks: Ranks) -> None:
    """All ranks tell what they wrote, and rank 0 lets the folder appear; a fault of one is raised by all."""
    fault: AssayError | None = None
    mine: dict[str, object] = {}
    try:
        mine = {"part": vars(flight.part.result())}
    except AssayError as error:
        fault = error
        mine = {"fault": {"code": error.code, "message": str(error)}}
    everyone = ranks.collect(mine)
    for one in everyone:
        if "fault" in one:
            fault = fault or fault_of(**one["fault"])
            ranks.led.append(fault)  # known to all
            if ranks.first:
                give_up(flight.place)
            raise fault
    flight.joined = True
    if ranks.first:
        parts = [Part(**one["part"]) for one in everyone]

        def appear() -> Manifest:
            try:
                return publish(flight.place, flight.kind, flight.facts, parts, flight.weights_steps)
            except BaseException:
                give_up(flight.place)
                raise

        flight.manifest = air.do(appear, flight.asynchronous, air.publisher)
