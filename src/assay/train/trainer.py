"""What the training loop works on: one object, made by the worker, and where its seconds went.

No behaviour: the loop and the plain functions beside it (saving, entering, telemetry) read and change it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from assay.data.batches import Batches
from assay.data.shard import Shard
from assay.ledger.ledger import Ledger
from assay.recipe.schema import Recipe
from assay.run.cadence import Observed
from assay.run.folder import RunFolder
from assay.run.metrics import MetricsWriter
from assay.train.ahead import Ahead
from assay.train.feed import Feed
from assay.train.flight import Air
from assay.train.hang import HangWatch
from assay.train.meters import Meters
from assay.train.progress import Progress
from assay.train.ranks import Ranks
from assay.train.start import Started
from assay.train.tracing import Trace
from assay.train.watch import Watch


@dataclass
class Spent:
    """Seconds inside updates, by what they went to; `accounting` is all that a bare loop would not do."""

    total: float = 0.0
    accounting: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the block's seconds as accounting."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.accounting += seconds
        self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass
class Pace:
    """What a cadence is chosen from: earlier segments, when this one began, and its updates up to the last choice."""

    before: Observed
    began: float
    step: int
    seconds: float


@dataclass
class Trainer:
    """What the loop works on; made by the worker, used here alone. Of the ranks, the first alone has `metrics`."""

    ranks: Ranks
    run: RunFolder
    recipe: Recipe
    recipe_folder: Path
    ledger: Ledger
    segment: int
    started: Started
    batches: Batches
    feed: Feed
    validation: Shard | None
    device: torch.device
    watch: Watch
    hang: HangWatch | None
    metrics: MetricsWriter | None
    progress: Progress
    superseded: dict[int, dict[str, Any]]
    same_bits: Callable[[int], bool]
    tell: Callable[[str], None]
    meters: Meters
    spent: Spent = field(default_factory=Spent)
    trace: Trace | None = None  # where --profile asked for one
    air: Air = field(default_factory=Air)
    ahead: Ahead | None = None  # the first rank's: what is known of the slots to come
    cadence: int | None = None  # what was chosen for `checkpoint.every: auto`
    given: tuple[Decimal, str] | None = None  # the first rank's: seconds between interruptions that the recipe states
    pace: Pace | None = None  # the first rank's: what it is chosen from

    def patient(self) -> AbstractContextManager[None]:
        """Around what may take any time without being a hang."""
        return self.hang.pause() if self.hang else nullcontext()
