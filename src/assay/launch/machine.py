"""What pre-flight looks at on this machine: devices and memory against the plan, disk, writing, clocks.

Without torch: GPUs are what `nvidia-smi` lists. What a machine does not tell is "not measured" and refuses nothing.
Nothing is changed, but for a small file that is written, to see that it can be, and removed.
"""

from __future__ import annotations

import csv
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from assay.errors import AssayError, MachineError, Refused
from assay.launch.checks import PASSED, Check, size
from assay.ledger.ledger import now as stamp
from assay.plan.cadence import checkpoint_steps, disk
from assay.plan.memory import memory
from assay.recipe.schema import Recipe
from assay.run.cadence import in_force
from assay.run.folder import RunFolder
from assay.run.history import History

QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
ANSWER_SECONDS = 20.0  # that nvidia-smi may take: it wakes sleeping GPUs
# Clocks of two machines that keep time at all agree to this; a receipt further ahead was written by a wrong clock.
SKEW_SECONDS = 5.0
# A file system of another machine stamps files by its own clock; beyond this, times of files mean nothing.
FILE_SKEW_SECONDS = 60.0
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # there was no Assay before
UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it; bytes of memory in all and free."""

    index: int
    name: str
    uuid: str
    total: int
    free: int


def gpus() -> list[Gpu] | None:
    """The GPUs that a process started now would see, or None when the machine does not tell."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        # AMD's driver, and a container without NVIDIA's tools: devices there may be, known they are not.
        return None if Path("/dev/kfd").exists() or Path("/proc/driver/nvidia").exists() else []
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    found = []
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        try:
            found.append(Gpu(int(row[0]), row[1], row[2], int(row[3]) << 20, int(row[4]) << 20))
        except (ValueError, IndexError):
            return None  # "[N/A]": such a device states no memory
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(found: Sequence[Gpu], chosen: str | None) -> list[Gpu] | None:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: indices or beginnings of UUIDs, up to the first unknown.

    None where it names a slice of a GPU (MIG): the driver's list holds whole ones alone.
    """
    if chosen is None:
        return list(found)
    if any(word.strip().upper().startswith("MIG-") for word in chosen.split(",")):
        return None
    result: list[Gpu] = []
    for word in filter(None, (part.strip() for part in chosen.split(","))):
        named = [one for one in found if word == str(one.index) or (not word.isdigit() and one.uuid.startswith(word))]
        if len(named) != 1:
            break
        result += named
    return result


def device(recipe: Recipe, ranks: int, found: Sequence[Gpu] | None, told: History | None) -> str:
    """The kind of device that the ranks would use; Refused where the recipe names one that is not here."""
    wanted = recipe.runtime.device
    if wanted == "cpu":
        return f"the CPU ({os.cpu_count()} cores), as runtime.device says{_other_kind('cpu', told)}"
    if found is None:
        return "not measured: nvidia-smi does not answer here; the ranks take the device that torch finds"
    if not found:
        if wanted is not None:
            raise Refused(f"runtime.device is {wanted!r}, but this machine has no GPU; set it to cpu or null")
        return f"the CPU ({os.cpu_count()} cores): there is no GPU{_other_kind('cpu', told)}"
    mine = used(recipe, ranks, found)
    if not mine:
        raise Refused(f"runtime.device is {wanted!r}, but this machine has {len(found)} GPU(s), counted from 0")
    kinds = sorted({one.name for one in mine})
    shared = f"; {ranks} ranks share {len(mine)} GPU(s)" if ranks > len(mine) else ""
    return f"{len(mine)} × {' and '.join(kinds)}{shared}{_other_kind(kinds[0], told)}"


def used(recipe: Recipe, ranks: int, found: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that the ranks take: the one that the recipe names by index, or one each, in turn."""
    _, _, index = (recipe.runtime.device or "").partition(":")
    return [one for place, one in enumerate(found) if place == int(index)] if index else list(found[:ranks])


def _other_kind(kind: str, told: History | None) -> str:
    """What is to be known when the run's last segment ran on another kind of device."""
    numerics = told.segments[-1].body.get("numerics") if told and told.segments else None
    promise = numerics.get("promise") if isinstance(numerics, dict) else None
    before = promise.get("device_kind") if isinstance(promise, dict) else None
    if not isinstance(before, str) or before == kind or (kind == "cpu" and before.startswith("cpu ")):
        return ""
    return f"; the last segment ran on {before}: the same bits are not claimed from here on"


def memory_against_plan(recipe: Recipe, ranks: int, found: Sequence[Gpu] | None) -> str:
    """What the plan estimates for the ranks, against what is free where they would run.

    Refused when no device has so much, MachineError (71) when it is not free now.
    """
    each = memory(recipe, ranks)["total"]
    way_out = "lower batch.micro, set runtime.recompute, or take larger devices"
    if recipe.runtime.device != "cpu" and found is None:
        return f"not measured; the plan estimates {size(each)} a rank"
    mine = [] if recipe.runtime.device == "cpu" else used(recipe, ranks, found or [])
    if not mine:
        free = host_memory()
        if free is None:
            return f"not measured; the plan estimates {size(each * ranks)} for {ranks} rank(s)"
        if each * ranks > free:
            raise _short(each * ranks > (host_memory("MemTotal") or 0))(
                f"{size(free)} of memory are free, the plan estimates {size(each * ranks)}; {way_out}"
            )
        return f"{size(free)} free, {size(each * ranks)} estimated"
    most = -(-ranks // len(mine))
    least = min(mine, key=lambda one: one.free)
    if each * most > least.free:
        raise _short(each * most > least.total)(
            f"GPU {least.index} ({least.name}) has {size(least.free)} of {size(least.total)} free, the plan estimates "
            f"{size(each * most)} for its {most} rank(s); {way_out}"
        )
    return f"{size(least.free)} of {size(least.total)} free on the fullest GPU, {size(each * most)} estimated"


def _short(ever: bool) -> type[AssayError]:
    """What a shortage is: refused where it would `ever` be one here, else the machine's fault, which passes.

    Memory is held by processes that are ending, and a disk by what can be removed.
    """
    return Refused if ever else MachineError


def host_memory(word: str = "MemAvailable") -> int | None:
    """Bytes of host memory that a process could have, by the kernel and this container's limit; None: not told.

    With `MemTotal`: that it could ever have.
    """
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{word}:"):
                found.append(int(line.split()[1]) << 10)
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
            found.append(int(text))
    except (OSError, ValueError, IndexError):
        return None
    return min(found, default=None)


def nearest(run: RunFolder) -> Path:
    """The run folder, or what of its path exists already."""
    place = run.path
    while not place.exists():
        place = place.parent
    return place


def free_space(recipe: Recipe, slot_updates: Sequence[int] | None, run: RunFolder, told: History | None) -> str:
    """What the plan says the retention needs, less what stands, against what is free.

    Refused when it is more than the disk holds, MachineError (71) when it is more than is free now.
    """
    place = nearest(run)
    cadence = in_force(recipe, told) if told else None
    total = int(disk(recipe, checkpoint_steps(recipe, slot_updates, cadence))["total"])
    standing = sum(
        path.stat().st_size
        for item in (told.line if told else [])  # what a branch left behind that was given up takes room of its own
        for path in (run.path / item.folder).glob("*.safetensors")
    )
    needed = max(total - standing, 0)
    whole, _, free = shutil.disk_usage(place)
    if free < needed:
        raise _short(needed > whole)(
            f"{place} has {size(free)} of {size(whole)} free, but the checkpoints that are kept need {size(needed)}; "
            "lower checkpoint.keep or free space"
        )
    return f"{size(free)} free, {size(needed)} needed for the checkpoints that are kept"


def writing(run: RunFolder) -> tuple[str, float]:
    """A small file is written, flushed and removed in each folder that a run writes; returns words and its time.

    The time is the file system's, in seconds since 1970. Refused when the folder cannot be written.
    """
    places = [run.path, run.checkpoints, run.weights] if run.exists() else [nearest(run)]
    written = 0.0
    for place in places:
        if not place.exists():
            continue
        try:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".assay-preflight-") as file:
                file.write(b"assay\n")
                file.flush()
                os.fsync(file.fileno())
                written = os.fstat(file.fileno()).st_mtime
        except OSError as fault:
            raise Refused(
                f"{place} cannot be written ({fault.strerror or fault}); allow it, or choose another --run folder"
            ) from None
    return f"{len(places)} folder(s) can be written", written


def clock(told: History | None, file_time: float | None) -> Check:
    """The system's clock against the newest receipt and the file system's clock; MachineError when it is wrong."""
    seconds = time.time()
    last = told.last.time if told and told.last else None
    fault = clock_fault(seconds, last, file_time)
    if fault is not None:
        raise MachineError(fault)  # a time server may not have been asked yet
    apart = "not measured" if file_time is None else f"{abs(seconds - file_time):.1f} s apart"
    behind = "" if last is None else ", not before the newest receipt"
    return Check("clock", PASSED, f"{stamp()}{behind}; file system {apart}; time server: {time_server()}")


def clock_fault(seconds: float, last: str | None, file_time: float | None) -> str | None:
    """Why a clock that shows `seconds` since 1970 is wrong, or None. `last` is the newest receipt's time."""
    shown = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    way_out = "set the clock (timedatectl, chronyc), then start again"
    if seconds < EARLIEST.timestamp():
        return f"the system clock says {shown}, which is past; {way_out}"
    if last is not None and seconds < datetime.fromisoformat(last).timestamp() - SKEW_SECONDS:
        return f"the system clock says {shown}, but the newest receipt was written at {last}; {way_out}"
    if file_time is not None and abs(seconds - file_time) > FILE_SKEW_SECONDS:
        theirs = datetime.fromtimestamp(file_time, UTC).isoformat(timespec="seconds")
        return f"the system clock says {shown}, but the file system stamps a new file {theirs}; {way_out}"
    return None


def time_server() -> str:
    """Whether the kernel's clock follows a time server, by adjtimex(2), which only reads here."""
    try:
        answer = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))  # its struct timex has about 208
    except (OSError, AttributeError):
        return "not measured"
    if answer < 0:
        return "not measured"
    return "none is followed" if answer == UNSYNCHRONISED else "followed"
