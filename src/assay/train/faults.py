"""Faults of the device and of its memory, told from bugs by their type or by the library's own words.

PyTorch raises a good part of them as plain RuntimeErrors (cuBLAS, cuDNN, the driver, Triton, its allocator of host
memory); each becomes a MachineError with one sentence. It catches nothing and knows nothing of collectives.
"""

from __future__ import annotations

import re

import torch

from assay.errors import MachineError

# torch 2.13: c10/core/impl/alloc_cpu.cpp, ATen/cuda/Exceptions.h, c10/cuda/driver_api.h, and Triton's launcher.
_MEMORY = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED", re.IGNORECASE)
_DEVICE = re.compile(
    r"CUDA (driver )?error|CU(BLAS|BLASLT|DNN|SOLVER|SPARSE|FFT)_STATUS_|cu(DNN|BLAS)(Lt| Frontend)? error"
    r"|Triton Error \[(CUDA|HIP)\]"
)
_ARGUMENTS = re.compile(r"_STATUS_(INVALID_VALUE|NOT_SUPPORTED|BAD_PARAM)")  # what was asked is wrong, not the device


def of_device(fault: Exception) -> MachineError | None:
    """The fault as one of memory or of the device; None when it is neither, by all that its words say."""
    known = isinstance(fault, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError)
    if not known and not isinstance(fault, RuntimeError):
        return None
    lines = str(fault).splitlines() or [type(fault).__name__]
    # Compilers put the words of the device below their own.
    telling = next((line for line in lines if _MEMORY.search(line) or _DEVICE.search(line)), None)
    if telling is None and not known:
        return None
    words = (telling or lines[0]).strip()
    if isinstance(fault, MemoryError | torch.OutOfMemoryError) or _MEMORY.search(words):
        return MachineError(f"out of memory: {words}; use a smaller batch.micro, or runtime.recompute")
    if not known and _ARGUMENTS.search(words):
        return None
    return MachineError(f"the device failed: {words}; run elsewhere")
