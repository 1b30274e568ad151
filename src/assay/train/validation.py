"""Validation loss: the mean cross-entropy over windows 0, 1, 2, … of the validation shard, at offset 0.

Never training data; pre-flight compares the digests. The windows are the same at every step. It does
not compute suites (see `evaluate`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from assay.data.batches import validation_windows
from assay.data.order import windows_available
from assay.data.shard import Shard, open_shard
from assay.errors import DataError
from assay.model.decoder import Decoder
from assay.recipe.schema import Recipe
from assay.train.batch import numbered, to_device
from assay.train.loss import window_loss
from assay.train.ranks import Ranks


@torch.no_grad()
def validation_loss(
    model: Decoder, shard: Shard, recipe: Recipe, device: torch.device, limit: int | None, ranks: Ranks | None = None
) -> tuple[float, int]:
    """Mean loss in nats per position and the number of windows; `limit` windows at most (None: all).

    The ranks share the micro-batches out; their sums are added in float64 in ascending order, whoever computed them.
    DataError when the shard has not one whole window.
    """
    block, micro = recipe.model.block, recipe.batch.micro
    available = windows_available(shard.tokens, block, 0)
    count = available if limit is None else min(limit, available)
    if count == 0:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens; one window of block {block} needs {block + 1:,}")
    ranks = ranks or Ranks()
    pieces = -(-count // micro)
    each = -(-pieces // ranks.size)
    sums = torch.zeros(each, dtype=torch.float64, device=device)
    for place in range(each):
        # Every rank runs as many forward passes as the others, which a sharded model needs; the surplus is not counted.
        first = min(ranks.rank * each + place, pieces - 1) * micro
        last = min(first + micro, count)
        tokens = to_device(validation_windows(shard, block, first, last), device)
        documents = None
        if recipe.model.document_mask:
            rows = [numbered(shard, window * block, block) for window in range(first, last)]
            documents = torch.stack(rows).to(device)
        nll, _ = window_loss(model, recipe, tokens, documents)
        sums[place] = nll.double()
    total = 0.0
    for one in ranks.together(sums).reshape(-1)[:pieces].tolist():
        total += one
    return total / (count * block), count


def open_validation(recipe: Recipe, folder: Path) -> Shard | None:
    """The validation shard that the recipe names, or None."""
    return None if recipe.data.validation is None else open_shard(folder / recipe.data.validation)
