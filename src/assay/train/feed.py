"""The next update's batch, made by a thread while this update is computed.

At most one update ahead and never into a slot that is not entered yet: its bytes are proved first. The buffer that
is hashed is the buffer that goes to the device: on a GPU it is pinned and sent by a stream of its own. What goes wrong
in the thread is raised when that very batch is asked for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.data.batches import Batches, row_digests
from assay.train.batch import documents_of

LEAVE_SECONDS = 5.0  # how long a read that does not come back may hold up the end


@dataclass(frozen=True)
class Batch:
    """This rank's items of an update: `tokens` int64 [items, block + 1], `documents` int64 [items, block] or None.

    `digests` are those of the windows, taken from the buffer that `tokens` were copied from.
    """

    tokens: Tensor
    documents: Tensor | None
    digests: bytes


@dataclass(frozen=True)
class _Made:
    """As `Batch`, with the ids as they lie in the shard, and on a GPU perhaps still on their way."""

    ids: Tensor
    documents: Tensor | None
    digests: bytes
    arrived: torch.cuda.Event | None


class Feed:
    """Hands out batches in the order of the updates. `close` it: no thread is left."""

    def __init__(self, device: torch.device, items: slice, documents: bool) -> None:
        """`items` are those of every update that this rank computes; `documents` says whether their numbers are needed.

        No thread runs and no device is touched before the first batch is taken.
        """
        self._device, self._items, self._documents = device, items, documents
        self._stream: Any = None
        self._coming: _Coming | None = None

    def take(self, batches: Batches, update: int) -> Batch:
        """The batch of an update, on the device; the thread then begins the next one, if the slot has one.

        DataError when its ids cannot be had.
        """
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.join()
        if coming is None or coming.update != update or coming.batches is not batches:
            made = self._make(batches, update)
        elif coming.fault is not None:
            raise coming.fault
        else:
            assert coming.made is not None, "a thread that ended without a fault has made its batch"
            made = coming.made
        if update + 1 < batches.queue.slot_of(update)[0].end_update:
            self._coming = _Coming(self, batches, update + 1)
            self._coming.start()
        return self._arrived(made)

    def close(self) -> None:
        """End the thread, if one runs; a read that hangs is left behind and ends with the process."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.join(LEAVE_SECONDS)

    def _make(self, batches: Batches, update: int) -> _Made:
        array = batches.batch(update, self._items)
        documents = documents_of(batches, update, self._items) if self._documents else None
        if self._device.type != "cuda":
            return _Made(torch.from_numpy(array), documents, row_digests(array), None)
        with torch.cuda.device(self._device):  # a thread begins on the first GPU
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            ids = torch.from_numpy(array).pin_memory()
            digests = row_digests(ids.numpy())
            with torch.cuda.stream(self._stream):
                sent = ids.to(self._device, non_blocking=True)
                if documents is not None:
                    documents = documents.pin_memory().to(self._device, non_blocking=True)
                return _Made(sent, documents, digests, self._stream.record_event())

    def _arrived(self, made: _Made) -> Batch:
        """The device waits for its copy where it must; the host does not."""
        if made.arrived is not None:
            present = torch.cuda.current_stream(self._device)
            present.wait_event(made.arrived)
            for tensor in (made.ids, made.documents):
                if tensor is not None:
                    tensor.record_stream(present)
        return Batch(made.ids.to(torch.int64), made.documents, made.digests)


class _Coming(threading.Thread):
    """Makes one batch. A daemon: a read that never comes back must not keep the process."""

    def __init__(self, feed: Feed, batches: Batches, update: int) -> None:
        super().__init__(name=f"batch of update {update}", daemon=True)
        self._feed = feed
        self.batches, self.update = batches, update
        self.made: _Made | None = None
        self.fault: Exception | None = None

    def run(self) -> None:
        """Whatever it meets is kept for the one who asks for the batch."""
        try:
            self.made = self._feed._make(self.batches, self.update)
        except Exception as fault:  # noqa: BLE001 - a bug too is raised where the batch is asked for
            self.fault = fault
