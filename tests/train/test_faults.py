"""A fault of the device or of memory says so and has code 71, however the library words it; a bug stays a bug."""

from __future__ import annotations

import pytest
import torch

from assay.errors import MachineError
from assay.train.ranks import LostRanks, lost_peers
from assay.train.worker import answer

MEMORY = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "CUDA driver error: out of memory",
    "backend='inductor' raised:\nRuntimeError: Triton Error [CUDA]: out of memory\n\nSet TORCHDYNAMO_VERBOSE=1",
)
DEVICE = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans",
    "CUDA driver error: unknown error",
    "Triton Error [CUDA]: an illegal memory access was encountered",
)
BUGS = (
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
)


def the_host_without_memory() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


@pytest.mark.parametrize(
    "fault",
    [*map(RuntimeError, MEMORY), the_host_without_memory(), MemoryError(), torch.OutOfMemoryError(MEMORY[0]),
     torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")],
)  # fmt: skip
def test_memory_that_cannot_be_had_is_code_71_with_the_way_out(fault: Exception) -> None:
    told = answer(fault)
    assert type(told) is MachineError
    assert str(told).startswith("out of memory: ")
    assert str(told).endswith("; use a smaller batch.micro, or runtime.recompute")
    assert "\n" not in str(told)
    assert "inductor" not in str(told), "the line that names the fault, not the one above it"


@pytest.mark.parametrize(
    "fault", [*map(RuntimeError, DEVICE), torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")]
)
def test_a_device_that_fails_is_code_71_and_named(fault: Exception) -> None:
    told = answer(fault)
    assert type(told) is MachineError
    assert str(told) == f"the device failed: {str(fault).splitlines()[0]}; run elsewhere"


def test_communication_that_fails_is_code_71_also_from_the_library() -> None:
    for words in ("NCCL error: remote process exited", "[gloo/transport/tcp/pair.cc] Connection closed by peer"):
        assert isinstance(answer(RuntimeError(words)), LostRanks)


@pytest.mark.parametrize("words", BUGS)
def test_what_was_asked_of_the_library_in_vain_stays_a_bug(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = answer(RuntimeError(words))
    assert told.code == 70
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MachineError, "out of memory: CUDA"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), MachineError, "the device failed: CUDA error"),
        (the_host_without_memory(), MachineError, "out of memory: "),
        (RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"), MachineError, "out of mem"),
        (RuntimeError("Connection closed by peer. See above"), LostRanks, "communication between the ranks failed (C"),
        (RuntimeError("NCCL error: remote process exited"), LostRanks, "communication between the ranks failed (N"),
    ],
)
def test_a_rank_whose_own_device_fails_in_a_collective_says_so_and_blames_no_peer(
    fault: Exception, kind: type[MachineError], words: str
) -> None:
    with pytest.raises(MachineError) as raised, lost_peers():
        raise fault
    assert type(raised.value) is kind
    assert str(raised.value).startswith(words)
