"""Validation loss: the mean cross-entropy over windows 0, 1, 2, … of the validation shard, at offset 0.

Never training data; pre-flight compares the digests. The windows are the same at every step. It does
not compute suites (see `evaluate`).
"""

from __future__ import annotations

import torch

from assay.data.batches import validation_windows
from assay.data.order import windows_available
from assay.data.shard import Shard
from assay.errors import DataError
from assay.model.decoder import Decoder
from assay.recipe.schema import Recipe
from assay.train.batch import numbered, to_device
from assay.train.loss import window_loss


@torch.no_grad()
def validation_loss(
    model: Decoder, shard: Shard, recipe: Recipe, device: torch.device, limit: int | None
) -> tuple[float, int]:
    """Mean loss in nats per position and the number of windows; `limit` windows at most (None: all).

    DataError when the shard has not one whole window.
    """
    block, micro = recipe.model.block, recipe.batch.micro
    available = windows_available(shard.tokens, block, 0)
    count = available if limit is None else min(limit, available)
    if count == 0:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens; one window of block {block} needs {block + 1:,}")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, count, micro):
        last = min(first + micro, count)
        tokens = to_device(validation_windows(shard, block, first, last), device)
        documents = None
        if recipe.model.document_mask:
            rows = [numbered(shard, window * block, block) for window in range(first, last)]
            documents = torch.stack(rows).to(device)
        nll, _ = window_loss(model, recipe, tokens, documents)
        total += nll.double()
    return float(total.item()) / (count * block), count
