"""From windows on the host to tensors on the device.

The buffer that is hashed is the buffer that is sent. Document numbers are made only for recipes that
limit attention to documents. It chooses no windows (see `data.order`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batches import Batches
from assay.data.shard import Shard


def to_device(windows: NDArray[Any], device: torch.device) -> Tensor:
    """Windows [B, block + 1] as int64 on the device; the very bytes of `windows` are what is copied."""
    return torch.from_numpy(windows).to(device).to(torch.int64)


def numbered(shard: Shard, start: int, count: int) -> Tensor:
    """Document numbers, int64 [count], of the shard's tokens from `start` on."""
    places = np.arange(start, start + count, dtype=np.uint64)
    return torch.from_numpy(np.searchsorted(shard.documents_end, places, side="right").astype(np.int64))


def documents_of(batches: Batches, update: int, items: slice = slice(None)) -> Tensor:
    """Document numbers, int64 [B, block], of an update's input tokens, or of some of its items; in host memory.

    Numbers of different parts never meet.
    """
    slot, starts = batches.windows(update)
    starts = starts[items]
    block = batches.queue.block
    rows = []
    for start in starts.tolist():
        pieces, begin = [], 0
        for place, part in enumerate(slot.parts):
            low, high = max(start, begin), min(start + block, begin + part.tokens)
            if low < high:
                shard = batches.shards[part.shard]
                # Each part gets a range of numbers of its own; a shard has fewer than 2^40 documents.
                pieces.append(numbered(shard, part.start + low - begin, high - low) + (place << 40))
            begin += part.tokens
        rows.append(torch.cat(pieces))
    return torch.stack(rows)
