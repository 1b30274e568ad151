"""`--profile K`: a trace of K updates of this rank, as Chrome's trace viewer and Perfetto read it.

It begins after the updates in which kernels may still be compiled and changes nothing that is computed. The file
names no host and no path. It is for people who look for lost time; telemetry does not come from it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from assay.files.publish import publish_file

WARM_UP = 3  # updates of a segment before the first that is recorded; in the last of them the recorder warms up


class Trace:
    """Records updates `[first + WARM_UP, first + WARM_UP + updates)`, `first` being the first it is told of."""

    def __init__(
        self, updates: int, folder: Path, rank: int, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        """`folder` takes the file, `tell` the sentence that names it."""
        self._updates, self._folder, self._rank, self._tell = updates, folder, rank, tell
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        plan = schedule(skip_first=WARM_UP - 1, wait=0, warmup=1, active=updates, repeat=1)
        self._profile: Any = profile(activities=activities, schedule=plan, on_trace_ready=self._keep, acc_events=True)
        self._first: int | None = None
        self._update = -1
        self._written = False  # or given up

    def at(self, update: int) -> None:
        """An update begins; everything up to the next one belongs to it."""
        if self._written or update == self._update:
            return
        with self._harmless():
            if self._first is None:
                self._first = update
                self._profile.start()
            else:
                self._profile.step()
        self._update = update

    def close(self) -> None:
        """Where training ends before, what was recorded is written."""
        if self._first is None or self._written:
            return
        with self._harmless():
            self._profile.stop()
            if not self._written:
                self._tell(f"no trace was written: training ended within {WARM_UP} updates of its start")

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """No trace is worth a run, nor may it hide why one ended: what the recorder meets is said, and it is over."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - torch's recorder states no set of faults
            self._written = True
            self._tell(f"no trace was written: {getattr(fault, 'strerror', None) or fault}")

    def _keep(self, recorded: Any) -> None:
        self._written = True
        with self._harmless():
            self._write(recorded)

    def _write(self, recorded: Any) -> None:
        assert self._first is not None
        begin = self._first + WARM_UP
        end = min(begin + self._updates, self._update + 1)
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "trace.json"
            recorded.export_chrome_trace(str(file))
            trace = json.loads(file.read_bytes())
        for key in ("host_name", "traceName"):  # of the machine, which the run folder does not name
            trace.pop(key, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"profile-rank-{self._rank}-updates-{begin}-{end}.json"
        publish_file(path, json.dumps(trace).encode())
        self._tell(f"trace of updates {begin}:{end} written: {path}")
