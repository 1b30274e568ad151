"""The order: which window comes when, a pure function of (data seed, slot, epoch, tokens, block).

For slot `s` and epoch `e`, g = numpy.random.default_rng([seed, s, e]) draws an offset and then a
permutation of the windows; epochs follow one another without dropping a window. No bytes are
read here, so the order of data that is not on this machine is known too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from assay.errors import DataError, InputError
from assay.files.digest import digest


@dataclass(frozen=True)
class Epoch:
    """One epoch of a slot: window w of `windows` starts at stream index offset + w × block."""

    offset: int
    windows: int
    permutation: NDArray[np.integer]


@dataclass(frozen=True)
class Piece:
    """Items [start, stop) of one epoch's permutation."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Stream:
    """What the order of one slot depends on: seed, slot number, tokens of the stream, block, epochs allowed."""

    seed: int
    slot: int
    tokens: int
    block: int
    epochs: int

    def __post_init__(self) -> None:
        """Refuse numbers for which there is no order."""
        if self.seed < 0:
            raise InputError(f"the data seed is {self.seed}; an integer of 0 or more is expected")
        if self.block < 1 or self.epochs < 1 or self.slot < 0:
            raise InputError(f"slot {self.slot}, block {self.block}, epochs {self.epochs}: no order exists for these")

    def size(self, epoch: int) -> tuple[int, int]:
        """(offset, windows) of an epoch, without drawing its permutation."""
        offset = _offset(self.seed, self.slot, epoch, self.block)
        return offset, windows_available(self.tokens, self.block, offset)

    def epoch(self, epoch: int) -> Epoch:
        """An epoch with its permutation; the last two that were asked for are kept."""
        return _epoch(self.seed, self.slot, epoch, self.tokens, self.block)

    def capacity(self) -> int:
        """Windows in all allowed epochs, exact for this seed."""
        if self.least() == self.most():
            return self.least()
        return sum(self.size(epoch)[1] for epoch in range(self.epochs))

    def holds(self, windows: int) -> bool:
        """Whether the slot has that many windows, exact for this seed."""
        return self.least() >= windows or (self.most() >= windows and self.capacity() >= windows)

    def least(self) -> int:
        """Windows in all allowed epochs with the worst offsets."""
        return self.epochs * windows_available(self.tokens, self.block, self.block - 1)

    def most(self) -> int:
        """Windows in all allowed epochs with the best offsets."""
        return self.epochs * windows_available(self.tokens, self.block, 0)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Items [start, stop) of the slot's sequence as pieces of epochs; DataError when it ends before."""
        if self.most() < stop:
            raise DataError(self._exhausted(stop, self.most()))
        reached = 0
        for epoch in range(self.epochs):
            windows = self.size(epoch)[1]
            if reached + windows > start and reached < stop:
                yield Piece(epoch, max(start - reached, 0), min(stop - reached, windows))
            reached += windows
            if reached >= stop:
                return
        raise DataError(self._exhausted(stop, reached))

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Stream indices at which the windows of items [start, stop) begin, [stop − start]."""
        parts = []
        for piece in self.pieces(start, stop):
            epoch = self.epoch(piece.epoch)
            chosen = epoch.permutation[piece.start : piece.stop].astype(np.int64)
            parts.append(epoch.offset + chosen * self.block)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _exhausted(self, needed: int, available: int) -> str:
        return (
            f"slot {self.slot} holds {available:,} windows of block {self.block:,} in {self.epochs:,} epoch(s) of "
            f"{self.tokens:,} tokens, but window {needed - 1:,} (from zero) is asked for: "
            f"{needed - available:,} windows short; append a slot or allow more epochs"
        )


def windows_available(tokens: int, block: int, offset: int) -> int:
    """n = (tokens − 1 − offset) // block, never below zero: a window needs block + 1 tokens."""
    return max(0, (tokens - 1 - offset) // block)


def epoch_order(seed: int, slot: int, epoch: int, tokens: int, block: int) -> tuple[int, int, NDArray[np.integer]]:
    """(offset, n, permutation) of one epoch, exactly as the mission states it."""
    order = Stream(seed, slot, tokens, block, epoch + 1).epoch(epoch)
    return order.offset, order.windows, order.permutation


def indices_digest(permutation: NDArray[np.integer]) -> str:
    """Digest of all window indices of an epoch as little-endian int64."""
    return digest(permutation.astype("<i8").tobytes())


def _generator(seed: int, slot: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, slot, epoch])


@lru_cache(maxsize=4096)
def _offset(seed: int, slot: int, epoch: int, block: int) -> int:
    return int(_generator(seed, slot, epoch).integers(0, block))


# Two: an update may cross from one epoch into the next.
@lru_cache(maxsize=2)
def _epoch(seed: int, slot: int, epoch: int, tokens: int, block: int) -> Epoch:
    generator = _generator(seed, slot, epoch)
    offset = int(generator.integers(0, block))
    windows = windows_available(tokens, block, offset)
    # Drawn as 64-bit integers (that is the definition), kept as 32-bit ones where they fit.
    drawn = generator.permutation(windows)
    kept: NDArray[np.integer] = drawn.astype(np.int32) if windows < 1 << 31 else drawn
    kept.flags.writeable = False
    return Epoch(offset, windows, kept)
