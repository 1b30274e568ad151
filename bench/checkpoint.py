"""What a save costs training: how long it stands still, how much slower it is meanwhile, how much memory that takes.

In one run, in turn, the same state: Assay's blocking save, Assay's asynchronous one, `torch.save`,
`torch.distributed.checkpoint.save` and its `async_save`, the latter two in a gloo group of one process. Assay hashes
every tensor and every file and flushes all of it to the disk; torch does neither. Between and during saves the main
thread multiplies matrices, which stand for updates. Prints every round, then medians.

    .venv/bin/python bench/checkpoint.py [--megabytes 300] [--rounds 5] [--folder DIR] [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from assay.checkpoint.copies import Copies, not_finite
from assay.checkpoint.save import Facts, begin, publish, save, write_part

State = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Round:
    """Seconds that training stood still, seconds until the save was whole, updates' slowdown meanwhile, extra bytes."""

    stall: float
    whole: float
    slowdown: float | None
    memory: int


def state_of(megabytes: int) -> State:
    """A third weights, two thirds moments, in matrices of 4 MB and a few small tensors."""
    count = max(megabytes // 12, 1)
    model = {f"blocks.{i}.weight": torch.randn(1024, 1024) for i in range(count)}
    model |= {f"norms.{i}.weight": torch.randn(1024) for i in range(count)}
    moments = {f"optimizer.{name}.{kind}": torch.randn_like(tensor) for name, tensor in model.items() for kind in "mv"}
    return model, moments


def facts(step: int) -> Facts:
    """What the manifest says; nothing of it matters here."""
    return Facts("bench", step, 1, "stable", "2026-11-30T10:00:00Z", "r", "sha256:" + "0" * 64, {})


def blocking(state: State, folder: Path, step: int) -> Future[object] | None:
    """Assay's save as it is where host memory does not suffice for copies."""
    assert not not_finite(state[0] | state[1])
    save(folder, facts(step), state[0], state[1], {"config.json": b"{}"}, {})
    return None


def asynchronous(copies: Copies, thread: ThreadPoolExecutor) -> Callable[[State, Path, int], Future[object]]:
    """As the trainer does it: the look for what is not finite, folder, copies, and the rest in the thread."""

    def act(state: State, folder: Path, step: int) -> Future[object]:
        assert not not_finite(state[0] | state[1])
        place = begin(folder, facts(step))
        held = copies.take(state[0] | state[1])

        def rest() -> object:
            copies.wait()
            model, optimizer = ({name: held[name] for name in part} for part in state)
            part = write_part(place, model, optimizer, {"config.json": b"{}"})
            return publish(place, "full", facts(step), [part], {})

        return thread.submit(rest)

    return act


def torch_save(state: State, folder: Path, step: int) -> Future[object] | None:
    """One pickle of everything."""
    torch.save(state, folder / f"{step}.pt")
    return None


def dcp_save(state: State, folder: Path, step: int) -> Future[object] | None:
    """PyTorch's distributed checkpoint, blocking."""
    dcp.save(state[0] | state[1], checkpoint_id=folder / str(step))
    return None


def dcp_async(state: State, folder: Path, step: int) -> Future[object]:
    """The same, asynchronous, in a thread."""
    found = dcp.async_save(state[0] | state[1], checkpoint_id=folder / str(step))
    assert isinstance(found, Future)
    return found


def updates(until: Callable[[], bool], least: int = 0) -> list[float]:
    """Seconds of each product of two matrices, until `until` says so."""
    matrix, found = torch.ones(384, 384), list[float]()
    while len(found) < least or not until():
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        found.append(time.perf_counter() - began)
    return found


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(act: Callable[[State, Path, int], Future[object] | None], state: State, folder: Path, step: int) -> Round:
    """One save; what it left on the disk is removed, and the disk is idle, before the next."""
    os.sync()
    alone = median(updates(lambda: True, least=200))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = resident("VmRSS")
    began = time.perf_counter()
    future = act(state, folder, step)
    stall = time.perf_counter() - began
    meanwhile = updates(future.done) if future is not None else []
    if future is not None:
        future.result()
    whole = time.perf_counter() - began
    memory = resident("VmHWM") - before
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    slowdown = median(meanwhile) / alone - 1 if meanwhile else None
    return Round(stall, whole, slowdown, max(memory, 0))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--threads", type=int, default=1, help="of the arithmetic")
    job = parser.parse_args()
    torch.set_num_threads(job.threads)
    warnings.filterwarnings("ignore", module="torch")
    state = state_of(job.megabytes)
    size = sum(tensor.nbytes for part in state for tensor in part.values())
    copies, thread = Copies(state[0] | state[1]), ThreadPoolExecutor(1, "saving")
    ways: dict[str, Callable[[State, Path, int], Future[object] | None]] = {
        "assay, blocking": blocking,
        "assay, asynchronous": asynchronous(copies, thread),
        "torch.save": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save": dcp_async,
    }
    found: dict[str, list[Round]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=job.folder) as place:
        dist.init_process_group("gloo", store=FileStore(f"{place}/store", 1), rank=0, world_size=1)
        folder = Path(place) / "saves"
        folder.mkdir()
        for number in range(job.rounds + 1):
            for name, act in ways.items():
                one = measure(act, state, folder, number + 1)
                if number:  # the first round pays for what is allocated once
                    found[name].append(one)
        dist.destroy_process_group()
    print(f"state {size / 1e6:,.0f} MB in {sum(map(len, state)):,} tensors; medians of {job.rounds} rounds in turn")
    print(f"{'way':22}{'stall s':>9}{'of own':>8}{'whole s':>9}{'MB/s':>8}{'slower':>8}{'extra MB':>10}   stalls")
    block = median(one.stall for one in found["assay, blocking"])
    for name, rounds in found.items():
        stall, whole = median(one.stall for one in rounds), median(one.whole for one in rounds)
        own = median(one.stall for one in found["dcp.save"]) if name.startswith("dcp") else block
        slower = [one.slowdown for one in rounds if one.slowdown is not None]
        memory = median(one.memory for one in rounds) + (copies.nbytes if name == "assay, asynchronous" else 0)
        print(
            f"{name:22}{stall:9.3f}{stall / own:8.1%}{whole:9.3f}{size / 1e6 / whole:8.0f}"
            f"{f'{median(slower):.1%}' if slower else '-':>8}{memory / 1e6:10.1f}   "
            + " · ".join(f"{one.stall:.3f}" for one in rounds)
        )
    print("of own: the stall as a part of the blocking save by the same writer (torch.save: of Assay's)")


if __name__ == "__main__":
    main()
