"""A layer over the file operations of this process: counts those that change something below a folder, and breaks one.

Each creation, write, flush, rename, link, removal and truncation below `root` is an operation, numbered from zero.
At operation `at` the process is killed (`kill`), is killed after half of the bytes were written (`torn`), is
killed and loses whatever it had not flushed (`power`), or from there on every operation fails with an error number
(`full`, `read-only`, `gone`). Python's own calls are seen; what a library writes by itself is not.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "gone": errno.ESTALE}
# What an event of `sys.audit` names, and at which of its arguments the path and the folder's descriptor stand.
EVENTS = {
    "os.rename": ("rename", 0, 2), "os.link": ("link", 1, 3), "os.remove": ("remove", 0, 1),
    "os.rmdir": ("rmdir", 0, 1), "os.mkdir": ("mkdir", 0, 2), "os.truncate": ("truncate", 0, None),
    "os.symlink": ("symlink", 1, 2),
}  # fmt: skip
_OPEN, _FSYNC, _WRITE, _TRUNCATE = io.open, os.fsync, os.write, os.ftruncate


class Faults:
    """Installed once in a process that will end; `log` holds the operations that were seen."""

    def __init__(self, root: Path, at: int | None, kind: str = "kill") -> None:
        self.root, self.at, self.kind = os.path.realpath(root), at, kind
        self.log: list[str] = []
        self.count = itertools.count()
        self.lock = threading.Lock()  # saves are written by a thread of their own
        self.unflushed: dict[int, tuple[int, int]] = {}  # inode → (a descriptor of its own, size at the last flush)

    def install(self) -> None:
        """From now on; there is no way back."""
        sys.addaudithook(self._audit)
        builtins.open = io.open = self._open  # type: ignore[assignment]
        os.fsync, os.write = self._fsync, self._write

    def tick(self, name: str, path: str) -> bool:
        """One operation is about to be done; True when it is the one to be torn."""
        if not (path == self.root or path.startswith(self.root + os.sep)):
            return False
        number = next(self.count)
        self.log.append(f"{name} {os.path.relpath(path, self.root)}")
        if self.at is None or number < self.at:
            return False
        if self.kind in ERRORS:
            if name in ("remove", "rmdir") and self.kind == "full":
                return False  # a full disk lets one remove
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), path)
        if self.kind == "torn" and name == "write":
            return True
        self.die()
        return False

    def die(self) -> None:
        """End as a killed process does; with `power`, as a machine does whose memory is lost."""
        self.root = "/nowhere"  # what follows is not an operation of the process any more
        self.lock.acquire()
        if self.kind == "power":
            for descriptor, size in self.unflushed.values():
                _TRUNCATE(descriptor, size)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrote(self, descriptor: int, before: int) -> None:
        """Bytes were handed to the system that a lost machine would lose."""
        inode = os.fstat(descriptor).st_ino
        with self.lock:
            if inode not in self.unflushed:
                own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
                self.unflushed[inode] = (own, before)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            name, place, folder = EVENTS[event]
            self.tick(name, _path(arguments[place], arguments[folder] if folder is not None else None))
        elif event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_CREAT | os.O_TRUNC):
                path = _path(path)
                if flags & os.O_TRUNC or not os.path.lexists(path):
                    self.tick("create", path)

    def _fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        self.tick("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        _FSYNC(descriptor)
        with self.lock:
            kept = self.unflushed.pop(os.fstat(descriptor).st_ino, None)
            if kept:
                os.close(kept[0])

    def _write(self, descriptor: int, data: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.tick("write", path):
            _WRITE(descriptor, bytes(data)[: len(bytes(data)) // 2])
            self.die()
        return _WRITE(descriptor, data)

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+"):
            return _OPEN(file, mode, buffering, *rest, **named)
        closefd, opener = named.pop("closefd", True), named.pop("opener", None)
        raw = Watched(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)


class Watched(io.FileIO):
    """A file whose writes and truncations are operations of the layer."""

    def __init__(self, faults: Faults, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self.faults = faults

    def write(self, data: Any) -> int:
        path, content = os.readlink(f"/proc/self/fd/{self.fileno()}"), bytes(data)
        torn, before = self.faults.tick("write", path), os.fstat(self.fileno()).st_size
        self.faults.wrote(self.fileno(), before)
        if torn:
            super().write(content[: len(content) // 2])
            self.faults.die()
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self.faults.tick("truncate", os.readlink(f"/proc/self/fd/{self.fileno()}"))
        return super().truncate(size)


def _path(path: Any, folder: int | None = None) -> str:
    """Absolute, the last part not followed."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if folder is not None and folder >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    head, tail = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(head), tail)
