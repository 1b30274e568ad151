"""Copies of the state in host memory, made in one go so that training can go on while they are written.

The buffer is allocated once and used for every save; it is page-locked where a CUDA device copies into it, and
then the host does not wait for the copy. Nothing here writes files or decides when to save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

ALIGNED = 512  # bytes: as a fresh tensor would begin


class Copies:
    """One buffer with a place for each tensor of `like`; whoever reads the copies first calls `wait`."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Allocate, and touch every page, so that no save but the first pays for it; RuntimeError without memory."""
        self._buffer = torch.empty(bytes_of(like), dtype=torch.uint8)
        self._on_cuda = any(tensor.is_cuda for tensor in like.values())
        if self._on_cuda and len(self._buffer):
            self._lock_pages()
        self._buffer.zero_()
        self._copied: torch.cuda.Event | None = None
        self._places: dict[str, Tensor] = {}
        begin = 0
        for name, tensor in like.items():
            place = self._buffer[begin : begin + tensor.nbytes]
            self._places[name] = place.view(tensor.dtype).view(tensor.shape)
            begin += _room(tensor)

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return len(self._buffer)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy present values, of all tensors or some; they may change as soon as this returns, whatever a device does.

        On CUDA the copies are queued before any work that is queued later, such as the next update's.
        """
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if self._on_cuda:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()
        return {name: self._places[name] for name in tensors}

    def wait(self) -> None:
        """Wait until a device has copied everything; other threads go on meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()

    def _lock_pages(self) -> None:
        """Page-locked as `torch.distributed` does it; where that is refused the copies are right, and slower.

        Not by `pin_memory`, whose allocator rounds up to a power of two.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        told = runtime.cudaHostRegister(self._buffer.data_ptr(), len(self._buffer), 1)  # portable: for every context
        if int(told) != 0:
            # CUDA keeps the error until somebody asks; the next launch of a kernel asks, and reports it as its own.
            with suppress(torch.AcceleratorError):
                torch.zeros(1, device="cuda")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that hold an infinity or a NaN; the host waits once for each device."""
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    ends = [torch.stack(torch.aminmax(tensors[name].detach())).double() for name in names]
    found: list[list[float]] = torch.stack(ends).tolist() if ends else []
    return [name for name, pair in zip(names, found, strict=True) if not all(map(math.isfinite, pair))]


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Host memory that copies of these tensors take."""
    return sum(_room(tensor) for tensor in tensors.values())


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED
