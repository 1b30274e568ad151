"""Copies of the state in host memory, made in one go so that training can go on while they are written.

The buffer is allocated once and used for every save; it is page-locked where a CUDA device copies into it, and
then the host does not wait for the copy. Nothing here writes files or decides when to save.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import SupportsInt

import numpy as np
import torch
from torch import Tensor

ALIGNED = 512  # bytes: as a fresh tensor would begin


def whole_pages(size: int, locked: bool) -> Tensor:
    """Host memory, uint8 [size], in pages that nothing else lies in; `locked` for a CUDA device until it is freed.

    Page-locked as `torch.distributed` does it, and not by `pin_memory`, whose allocator rounds up to a power of two.
    Where that is refused copies are right, and slower. MemoryError without memory.
    """
    # NumPy's, because its end can be waited for: the tensors over it, whoever holds them, keep it, and what is to be
    # done at its end is done before it is freed. Whatever gets these addresses next must find them unregistered.
    memory = np.empty(size + 2 * mmap.PAGESIZE, dtype=np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE
    pages = torch.from_numpy(memory[begin : begin + size])
    if locked and size:
        runtime, begin = torch.cuda.cudart(), pages.data_ptr()  # type: ignore[no-untyped-call]
        if _accepted(runtime.cudaHostRegister(begin, size, 1)):  # portable: for every context
            end = weakref.finalize(memory, _unlock, begin, torch.cuda.current_device())
            end.atexit = False  # a process that ends gives everything back
    return pages


def _unlock(begin: int, device: int) -> None:
    """For the thread that lets the last tensor go, which need not be the one that has chosen a device."""
    with torch.cuda.device(device):
        _accepted(torch.cuda.cudart().cudaHostUnregister(begin))  # type: ignore[no-untyped-call]


def _accepted(told: SupportsInt) -> bool:
    """Whether CUDA did what it was asked for.

    It keeps an error until somebody asks; the next launch of a kernel asks, and reports it as its own: here.
    """
    if int(told) == 0:
        return True
    with suppress(torch.AcceleratorError):
        torch.zeros(1, device="cuda")
    return False


class Copies:
    """One buffer with a place for each tensor of `like`; whoever reads the copies first calls `wait`."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Allocate, and touch every page, so that no save but the first pays for it; MemoryError without memory."""
        self._on_cuda = any(tensor.is_cuda for tensor in like.values())
        self._buffer = whole_pages(bytes_of(like), locked=self._on_cuda)
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
