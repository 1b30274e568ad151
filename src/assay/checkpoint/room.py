"""Room for a checkpoint: free space on its disk, free memory for copies of the state in it.

Asked before anything is written or allocated. What this machine cannot tell is None and holds nothing up.
Nothing here needs torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from assay.errors import MachineError

SLACK = 1 << 20  # bytes for headers, manifest and small files
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def demand_space(parent: Path, name: str, needed: int, promised: int = 0) -> None:
    """MachineError (71) before anything is written when the disk below `parent` has no room for so many bytes.

    `promised` bytes are free as yet, and will not be: they belong to saves that are being written.
    """
    place = parent
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as fault:
        raise MachineError(
            f"{parent} cannot be written: {fault.strerror or fault}; what was saved before stands"
        ) from None
    if free - promised < needed + SLACK:
        others = f", {promised / 1e6:,.1f} MB of them for what is being written" if promised else ""
        raise MachineError(
            f"{parent / name} was not begun: it needs {(needed + SLACK) / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are "
            f"free{others}; what was saved before stands: free space or lower checkpoint.keep, then resume"
        )


def free_memory() -> int | None:
    """Bytes of host memory that this process may still take: the machine's, and its control groups', the least.

    Linux's `MemAvailable`; of each memory group from this process's own upwards, limit − used + cache that goes first.
    """
    found = [_field(PROC / "meminfo", "MemAvailable:", 1024), *_groups(PROC / "self" / "cgroup")]
    return min((value for value in found if value is not None), default=None)


def _groups(membership: Path) -> list[int | None]:
    """What every control group of the process has left; version 2 (one hierarchy) and version 1 (`memory`)."""
    found: list[int | None] = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = CGROUPS / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used, cache = names if controllers else ("memory.max", "memory.current", "inactive_file")
        place = root / path.lstrip("/")
        for group in (place, *place.parents) if place.exists() else (root,):  # a container may see itself as the root
            most, now = _number(group / limit), _number(group / used)
            if most is not None and now is not None and most < _UNLIMITED:
                found.append(max(most - now + (_field(group / "memory.stat", cache, 1) or 0), 0))
            if group == root:
                break
    return found


def _field(path: Path, name: str, unit: int) -> int | None:
    """The number behind a name in a list of them."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1]) * unit
    return None


def _number(path: Path) -> int | None:
    """The one number of a file; None where there is none, or `max`."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
