"""Validation loss: the mean cross-entropy over windows 0, 1, 2, … of the validation shard, at offset 0, and by source.

Never training data; pre-flight compares the digests. The windows are the same at every step. It does
not compute suites (see `evaluate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from assay.data.batches import validation_windows
from assay.data.order import windows_available
from assay.data.shard import Shard, open_shard
from assay.errors import DataError
from assay.model.decoder import Decoder
from assay.recipe.schema import Recipe
from assay.train.batch import numbered, to_device
from assay.train.loss import part_losses
from assay.train.ranks import Ranks


@dataclass(frozen=True)
class Validation:
    """Mean losses in nats per position over so many windows: of all, and by source those that have a target in them."""

    loss: float
    windows: int
    by_source: dict[str, float]


@torch.no_grad()
def validation_loss(
    model: Decoder, shard: Shard, recipe: Recipe, device: torch.device, limit: int | None, ranks: Ranks | None = None
) -> Validation:
    """The losses over `limit` windows at most (None: all).

    The ranks share the micro-batches out; their sums are added in float64 in ascending order, whoever computed them.
    A target is of the source in whose range of the shard it lies. DataError when the shard has not one whole window.
    """
    block, micro = recipe.model.block, recipe.batch.micro
    available = windows_available(shard.tokens, block, 0)
    count = available if limit is None else min(limit, available)
    if count == 0:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens; one window of block {block:,} needs {block + 1:,}")
    ranks = ranks or Ranks()
    pieces = -(-count // micro)
    each = -(-pieces // ranks.size)
    names = sorted({source.name for source in shard.sources})
    sums = torch.zeros(each, 1 + len(names), dtype=torch.float64, device=device)
    for place in range(each):
        # Every rank runs as many forward passes as the others, which a sharded model needs; the surplus is not counted.
        first = min(ranks.rank * each + place, pieces - 1) * micro
        last = min(first + micro, count)
        tokens = to_device(validation_windows(shard, block, first, last), device)
        documents = None
        if recipe.model.document_mask:
            rows = [numbered(shard, window * block, block) for window in range(first, last)]
            documents = torch.stack(rows).to(device)
        parts = shard.sources_in(first * block + 1, last * block + 1)
        nll, by_part = part_losses(model, recipe, tokens, documents, [(low, high) for _, low, high in parts])
        sums[place, 0] = nll.double()
        for (name, _, _), value in zip(parts, by_part, strict=True):
            sums[place, 1 + names.index(name)] += value.double()
    totals = [0.0] * (1 + len(names))
    for row in ranks.together(sums.flatten()).reshape(-1, 1 + len(names))[:pieces].tolist():
        totals = [total + one for total, one in zip(totals, row, strict=True)]
    positions = dict.fromkeys(names, 0)
    for name, low, high in shard.sources_in(1, count * block + 1):
        positions[name] += high - low
    by_source = {
        name: total / positions[name] for name, total in zip(names, totals[1:], strict=True) if positions[name]
    }
    return Validation(totals[0] / (count * block), count, by_source)


def open_validation(recipe: Recipe, folder: Path) -> Shard | None:
    """The validation shard that the recipe names, or None."""
    return None if recipe.data.validation is None else open_shard(folder / recipe.data.validation)
