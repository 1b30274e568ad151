"""Mean loss, perplexity and bits per byte of a model on a shard, over all whole windows at offset 0.

Bits per byte counts the text's real bytes: those that the shard recorded for each document, over the documents
whose every token was predicted. It writes nothing and computes in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.batches import validation_windows
from assay.data.order import windows_available
from assay.data.shard import Shard, verify_shard
from assay.errors import DataError, InputError, NumbersError
from assay.model.decoder import Decoder
from assay.train.batch import numbered, to_device

CHUNK = 1024  # positions whose logits exist at one time
_POSITIONS = 8192  # positions in one forward pass, or one window

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class WholeDocuments:
    """The documents [first, stop) of a shard whose every token, end of text included, was predicted.

    `positions` are their tokens, `nats` the sum of their losses, `text_bytes` their text in UTF-8; the end of
    text costs nats and has no bytes.
    """

    first: int
    stop: int
    positions: int
    nats: float
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """nats ÷ ln 2 ÷ bytes."""
        return self.nats / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Measured:
    """Sums over the shard's targets 1 … windows × block; `whole` is None with the reason in `unmeasured`."""

    windows: int
    positions: int
    nats: float
    whole: WholeDocuments | None
    unmeasured: str | None

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per position."""
        return self.nats / self.positions

    @property
    def perplexity(self) -> float | None:
        """e to the loss; None where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else None

    def facts(self) -> dict[str, Any]:
        """The results as a command prints them."""
        whole = self.whole
        counted = None
        if whole is not None:
            counted = {
                "documents": [whole.first, whole.stop],
                "positions": whole.positions,
                "nats": whole.nats,
                "text_bytes": whole.text_bytes,
            }
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": None if whole is None else whole.bits_per_byte,
            "bits_per_byte_counts": counted,
            "bits_per_byte_note": self.unmeasured
            or "UTF-8 bytes as the shard recorded them, over the documents whose every token was predicted: "
            "the first (its first token follows nothing) and the one cut by the last window are left out",
        }


def position_losses(model: Decoder, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
    """Cross-entropy in nats of each target, float32 [B, T], logits formed by chunks of positions."""
    hidden = model(inputs, documents)
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    losses = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    for start in range(0, len(flat), CHUNK):
        logits = model.logits(flat[start : start + CHUNK]).float()
        picked = logits.gather(1, wanted[start : start + CHUNK, None])[:, 0]
        losses[start : start + CHUNK] = torch.logsumexp(logits, dim=-1) - picked
    return losses.view(targets.shape)


@torch.no_grad()
def measure(model: Decoder, shard: Shard, tell: Tell | None = None) -> Measured:
    """Predict the targets of windows 0, 1, 2, … of `shard` at offset 0 and sum their losses.

    `tell(done, windows)` is called at most every second. Raises DataError when the shard's bytes are not those
    of its manifest or hold no whole window, InputError for ids outside the model's vocabulary, NumbersError
    (exit 5) for a loss that is not finite.
    """
    shape, device = model.config, model.embedding.weight.device
    block = shape.block
    if shard.vocabulary > shape.vocabulary:
        raise InputError(
            f"{shard.path} has ids below {shard.vocabulary:,}, but the model's vocabulary is {shape.vocabulary:,}; "
            "name a shard of the model's tokenizer"
        )
    wrong = verify_shard(shard)
    if wrong:
        raise DataError(f"{shard.path}: {wrong[0]}; bring the approved bytes back")
    windows = windows_available(shard.tokens, block, 0)
    if windows < 1:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens; one window of block {block:,} needs {block + 1:,}")
    first, stop, reason = _whole_documents(shard, windows * block)
    begin, end = (int(shard.documents_end[first - 1]), int(shard.documents_end[stop - 1])) if reason is None else (0, 0)
    total = whole = 0.0
    rows = max(1, _POSITIONS // block)
    told = time.monotonic()
    for low in range(0, windows, rows):
        high = min(low + rows, windows)
        tokens = to_device(validation_windows(shard, block, low, high), device)
        documents = None
        if shape.document_mask:
            documents = torch.stack([numbered(shard, one * block, block) for one in range(low, high)]).to(device)
        losses = position_losses(model, tokens[:, :-1], tokens[:, 1:], documents).double().flatten()
        total += float(losses.sum())
        target = low * block + 1  # the place of losses[0] in the shard
        inside = losses[max(begin - target, 0) : max(end - target, 0)]
        whole += float(inside.sum())
        if tell is not None and time.monotonic() - told > 1:
            told = time.monotonic()
            tell(high, windows)
    if not math.isfinite(total):
        raise NumbersError(
            f"the loss on {shard.path} is {total}; the weights hold or produce values that are not finite"
        )
    counted = None
    if reason is None:
        assert shard.text_bytes_end is not None
        text_bytes = int(shard.text_bytes_end[stop - 1] - shard.text_bytes_end[first - 1])
        counted = WholeDocuments(first, stop, end - begin, whole, text_bytes)
    return Measured(windows, windows * block, total, counted, reason)


def _whole_documents(shard: Shard, targets: int) -> tuple[int, int, str | None]:
    """The documents [first, stop) that lie inside the tokens [1, targets + 1), or the reason why none is counted."""
    if shard.text_bytes_end is None:
        return 0, 0, "not measured: the shard did not record its documents' text bytes"
    stop = int(np.searchsorted(shard.documents_end, np.uint64(targets + 1), side="right"))
    if stop < 2 or shard.text_bytes_end[stop - 1] == shard.text_bytes_end[0]:
        return 0, 0, "not measured: no document with text lies wholly inside the windows, the first one apart"
    return 1, stop, None
