"""The ranks of a run and everything that they say to each other.

Tensors go through the data group (NCCL between GPUs, gloo elsewhere), words through a gloo group on the
host, as JSON and never pickled. A lost peer is `LostRanks`, never a hang of its own making. It
does not start processes (see `launch.local`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from assay.errors import AssayError, Interrupted, MachineError
from assay.run.outcome import fault_of
from assay.train.faults import of_device

# No collective gives up by itself: a dead rank closes its connections, and the hang watch sees the rest.
PATIENCE = timedelta(days=30)


class LostRanks(MachineError):
    """Another rank is gone: its connection is closed. What it said of its end is found by `launch.local`."""


@dataclass
class Ranks:
    """This process among all ranks; `size` 1 needs no group and sends nothing. `sent` counts bytes for benchmarks."""

    rank: int = 0
    size: int = 1
    local: int = 0
    data: Any = None
    words: Any = None
    staged: bool = False  # tensors of a device go through the host, because gloo carries them
    backend: str | None = None
    sent: int = 0
    led: list[AssayError] = field(default_factory=list)  # faults that every rank raises alike

    @property
    def first(self) -> bool:
        """True for rank 0, which alone writes."""
        return self.rank == 0

    def lead(self, act: Callable[[], Any]) -> Any:
        """Rank 0 acts; every rank gets its result (JSON data), or raises the AssayError that it raised."""
        if self.size == 1:
            return act()
        if not self.first:
            told = self._from_first(None)
            if "fault" in told:
                self.led.append(fault_of(**told["fault"]))
                raise self.led[-1]
            return told["result"]
        try:
            result = act()
        except LostRanks:
            raise
        except AssayError as fault:
            cause = fault.cause if isinstance(fault, Interrupted) else None
            self._from_first({"fault": {"code": fault.code, "message": str(fault), "cause": cause}})
            self.led.append(fault)
            raise
        self._from_first({"result": result})
        return result

    def collect(self, value: Any) -> list[Any]:
        """JSON data of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        mine = _encoded(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        with lost_peers():
            dist.all_gather_into_tensor(lengths, torch.tensor([len(mine)]), group=self.words)
            room = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            room[: len(mine)] = mine
            everyone = torch.zeros(self.size * len(room), dtype=torch.uint8)
            dist.all_gather_into_tensor(everyone, room, group=self.words)
        rows = everyone.view(self.size, -1)
        return [_decoded(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _from_first(self, value: Any) -> Any:
        """Rank 0's JSON data, on every rank."""
        mine = _encoded(value)
        length = torch.tensor([len(mine)])
        with lost_peers():
            dist.broadcast(length, 0, group=self.words)
            words = mine if self.first else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(words, 0, group=self.words)
        return _decoded(words)

    def together(self, mine: Tensor) -> Tensor:
        """The equally long vectors of all ranks, [ranks, n], on the device of `mine`."""
        if self.size == 1:
            return mine[None]
        source = mine.cpu() if self.staged else mine
        result = torch.empty(self.size * len(source), dtype=source.dtype, device=source.device)
        with lost_peers():
            dist.all_gather_into_tensor(result, source, group=self.data)
        self.sent += (self.size - 1) * source.nbytes
        return result.view(self.size, -1).to(mine.device)

    def exchange(self, send: Tensor, splits: Sequence[int], takes: Sequence[int] | None = None) -> Tensor:
        """Piece k of `send` (lengths `splits`) goes to rank k; returns the pieces for this rank, one after another.

        `takes` are their lengths by rank; without it all are as long as this rank's own piece.
        """
        source = send.cpu() if self.staged else send
        taken = [splits[self.rank]] * self.size if takes is None else list(takes)
        result = torch.empty(sum(taken), dtype=source.dtype, device=source.device)
        with lost_peers():
            dist.all_to_all_single(result, source, taken, list(splits), group=self.data)
        self.sent += source.nbytes - splits[self.rank] * source.itemsize
        return result.to(send.device)

    def add_up(self, tensor: Tensor) -> None:
        """The plain sum over all ranks, in place, in whatever order the library takes."""
        source = tensor.cpu() if self.staged else tensor
        with lost_peers():
            dist.all_reduce(source, group=self.data)
        if self.staged:
            tensor.copy_(source)
        self.sent += 2 * (self.size - 1) * source.nbytes // self.size

    def spread(self, tensor: Tensor, owner: int) -> None:
        """Give every rank the owner's values, in place."""
        source = tensor.cpu() if self.staged else tensor
        with lost_peers():
            dist.broadcast(source, owner, group=self.data)
        if self.staged and owner != self.rank:
            tensor.copy_(source)
        self.sent += (self.size - 1) * source.nbytes if owner == self.rank else 0

    def hand_over(self, tensor: Tensor, source: int, target: int) -> None:
        """Carry one tensor in host memory from one rank to another, in place; the other ranks do nothing."""
        with lost_peers():
            if self.rank == source:
                dist.send(tensor, target, group=self.words)
            elif self.rank == target:
                dist.recv(tensor, source, group=self.words)

    def farewell(self) -> None:
        """Wait until rank 0 has recorded the end and is gone; whatever happens meanwhile changes nothing."""
        if self.size > 1 and not self.first:
            try:
                self._from_first(None)
            except LostRanks:
                return


@contextmanager
def lost_peers() -> Iterator[None]:
    """A collective that fails has lost a peer: LostRanks in place of the library's words.

    Unless this rank's own device or memory failed in it: then it is not another rank that has to say why.
    """
    try:
        yield
    except RuntimeError as fault:
        raise of_device(fault) or _lost(fault) from None


def of_peers(fault: RuntimeError) -> LostRanks | None:
    """The same for a fault that came from a collective of torch's own; None when it came from elsewhere."""
    words = str(fault)
    told = isinstance(fault, dist.DistBackendError | dist.DistNetworkError) or any(
        word in words for word in ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )
    return _lost(fault) if told else None


def _lost(fault: RuntimeError) -> LostRanks:
    # The library's sentence goes on with advice to its own users.
    first = (str(fault).splitlines() or ["no reason given"])[0].split(". ")[0]
    return LostRanks(f"communication between the ranks failed ({first})")


def join(rank: int, size: int, local: int, device: torch.device, meeting: Path | None) -> Ranks:
    """Meet the other ranks: through a file in the folder `meeting`, or as torch's own launcher's variables say.

    NCCL carries tensors when every rank has a GPU of its own; otherwise gloo does, through the host.
    """
    if size == 1:
        return Ranks()
    where: dict[str, Any] = {"init_method": "env://"}
    if meeting is not None:
        where = {"store": FileStore(str(meeting / "store"), size), "rank": rank, "world_size": size}
    with lost_peers():
        dist.init_process_group("gloo", timeout=PATIENCE, **where)
        words = dist.group.WORLD
    nccl = apart(Ranks(rank, size, local, words, words).collect(_gpu(device)))
    with lost_peers():
        data = dist.new_group(backend="nccl", timeout=PATIENCE, device_id=device) if nccl else words
    return Ranks(rank, size, local, data, words, device.type == "cuda" and not nccl, "nccl" if nccl else "gloo")


def apart(gpus: Sequence[list[str] | None]) -> bool:
    """True when every rank names a GPU that no other rank names: only then can NCCL join them.

    All ranks decide from the same list: two that share a GPU, or one without, would else wait for ever in groups that
    the others never make.
    """
    named = [tuple(gpu) for gpu in gpus if gpu is not None]
    return len(set(named)) == len(gpus)


def _gpu(device: torch.device) -> list[str] | None:
    """Host and UUID of the rank's GPU; None where NCCL cannot reach one."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(words: Tensor) -> Any:
    return json.loads(words.numpy().tobytes())
