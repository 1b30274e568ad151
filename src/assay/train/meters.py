"""What a rank measures of itself while it trains: where the time goes, memory, power; and who lags behind.

Nothing here makes the host wait for a device: marks on a GPU are events, read when the ranks' word has arrived
and everything before it is done. It writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from assay.run.speed import Speed
from assay.train import numerics, nvml

Mark = tuple[str, "float | torch.cuda.Event"]
UNKNOWN = -1  # in a word of integers


class Clock:
    """Seconds by what they went to, from marks at which one thing ends and the next begins.

    On a GPU a mark is an event in its queue: what counts is when the device came there, not when the host did.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []

    def at(self, part: str) -> None:
        """From here on the time belongs to `part`."""
        if self._device.type != "cuda":
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((part, event))

    def read(self) -> dict[str, float]:
        """Seconds by part up to the last mark, and forget them. The device must have passed it, or this waits."""
        result: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begin, float) and isinstance(end, float):
                seconds = end - begin
            else:
                assert isinstance(begin, torch.cuda.Event)
                assert isinstance(end, torch.cuda.Event)
                seconds = begin.elapsed_time(end) / 1000
            result[part] = result.get(part, 0.0) + seconds
        self._marks = self._marks[-1:]
        return result


@dataclass(frozen=True)
class SlowBounds:
    """When a rank is a straggler: above `ratio` × the median of all ranks' seconds, for `updates` in a row."""

    ratio: float = 1.15
    updates: int = 50


class Stragglers:
    """Counts, for each rank, the updates in a row in which it was slow."""

    def __init__(self, bounds: SlowBounds) -> None:
        self.bounds = bounds
        self._row: dict[int, int] = {}

    def take(self, seconds: Sequence[float | None]) -> list[int]:
        """One update's seconds by rank; the ranks whose row has just become long enough, each once a row."""
        known = [value for value in seconds if value is not None]
        if len(known) < len(seconds) or len(known) < 2:
            return []
        limit = self.bounds.ratio * median(known)
        self._row = {rank: self._row.get(rank, 0) + 1 for rank, value in enumerate(known) if value > limit}
        return [rank for rank, count in self._row.items() if count == self.bounds.updates]


@dataclass
class Meters:
    """One rank's: its clock and sensor, and what the ranks told each other. `devices` names every rank's device."""

    device: torch.device
    devices: list[str]
    sensor: nvml.Sensor
    stragglers: Stragglers
    peak: int | None = None  # FLOP/s of all GPUs together; None: unknown
    clock: Clock = field(init=False)
    speed: Speed = field(default_factory=Speed)
    parts: dict[str, float] = field(default_factory=dict)  # of the newest word: seconds since the one before
    seconds: list[float | None] = field(default_factory=list)  # of computing, by rank, in the update before
    memory: int | None = None  # highest peak of any rank, bytes
    watts: float | None = None  # of all devices together
    joules: float | None = None  # the same, since the segment began

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)

    def facts(self) -> list[int]:
        """This rank's part of the word: nanoseconds of computing, peak memory, power and energy; UNKNOWN is -1."""
        computing = self.parts.get("compute")
        nanoseconds = None if computing is None else round(computing * 1e9)
        found = (nanoseconds, numerics.memory(self.device)[0], self.sensor.power, self.sensor.energy)
        return [UNKNOWN if one is None else one for one in found]

    def take(self, facts: Sequence[Sequence[int]]) -> None:
        """The word has arrived with all ranks' facts, and the device is done with all before it."""
        self.parts = self.clock.read()
        self.speed.add(self.parts)
        computing, memory, power, energy = zip(*facts, strict=True)
        self.seconds = [None if one == UNKNOWN else one / 1e9 for one in computing]
        self.memory = max((one for one in memory if one != UNKNOWN), default=None)
        self.watts, self.joules = self._together(power), self._together(energy)

    def finish(self) -> None:
        """Training is over: count what came after the last word, of energy with one rank. Waits for the device."""
        self.clock.at("end")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.speed.rest(self.clock.read())
        if len(self.devices) == 1 and self.sensor.energy is not None:
            self.joules = self.sensor.energy / 1000

    def _together(self, told: Sequence[int]) -> float | None:
        """Thousandths added up over the devices (ranks may share one); None unless every device tells its own."""
        by_device = dict(zip(self.devices, told, strict=True))
        return None if UNKNOWN in by_device.values() else sum(by_device.values()) / 1000
