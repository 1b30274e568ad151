"""The metrics file: one JSON line an update, sealed piecewise by receipts.

Floats are written so that they read back to the same bits; a value that is not finite is null
and named. Lines of superseded segments stay. Nothing here waits for a device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import InputError, VerificationError
from assay.files.digest import digest
from assay.files.reading import parse_json
from assay.ledger.chain import move_torn_tail
from assay.ledger.ledger import Ledger

LINE_LIMIT = 1 << 20
_COMPLETED: dict[str, type | tuple[type, ...]] = {
    "update": int, "segment": int, "time": str, "loss": (float, int), "order_digest": str,
}  # fmt: skip

# What differs between two honest runs of the same updates.
VOLATILE = (
    "seconds", "time", "segment", "tokens_per_second", "memory_peak", "memory_used", "recomputed",
    "parts", "mfu", "mfu_six_n", "power_watts", "energy_joules",
)  # fmt: skip


def encode(line: dict[str, Any]) -> bytes:
    """One line as bytes; a float that is not finite becomes null, and `nonfinite` names it (`grad_norms.ffn`)."""
    bad: list[str] = []
    line = {key: _finite(key, value, bad) for key, value in line.items()}
    if bad:
        line |= {"nonfinite": bad}
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _finite(name: str, value: Any, bad: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _finite(f"{name}.{key}", inner, bad) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(name)
        return None
    return value


def read(path: Path, first_byte: int = 0) -> Iterator[dict[str, Any]]:
    """Lines in file order, from a byte offset; bytes behind the last newline are ignored.

    A file that is not there yet has no lines. VerificationError names the line that is none of ours.
    """
    if not path.is_file():
        if path.exists() or path.is_symlink():
            raise VerificationError(f"{path} is not a regular file; the metrics of a run are expected there")
        return
    with path.open("rb") as file:
        file.seek(first_byte)
        number = 0
        while raw := file.readline(LINE_LIMIT + 1):
            number += 1
            where = f"{path}, line {number}" + (f" behind byte {first_byte}" if first_byte else "")
            if len(raw) > LINE_LIMIT:
                raise VerificationError(f"{where} has more than {LINE_LIMIT:,} bytes; no line of metrics has")
            if not raw.endswith(b"\n"):
                return
            try:
                line = parse_json(raw, where)
            except InputError as fault:
                raise VerificationError(str(fault)) from None
            if not isinstance(line, dict):
                raise VerificationError(f"{where} is not a JSON object")
            if not isinstance(line.get("nonfinite", []), list):
                raise VerificationError(f"{where}: nonfinite is {line['nonfinite']!r}; a list of names is expected")
            if completed(line):
                _check(line, where)
            yield line


def completed(line: Mapping[str, Any]) -> bool:
    """True for a completed update; a loss or gradient that is not finite stops one before the optimizer."""
    return type(line.get("update")) is int and not {"loss", "grad_norm"} & set(line.get("nonfinite", ()))


def updates(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of completed updates."""
    return filter(completed, read(path))


def by_update(path: Path) -> dict[int, dict[str, Any]]:
    """The line that stands for each update: the last one written (a later segment supersedes)."""
    return {line["update"]: line for line in updates(path)}


def comparable(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what may differ between equal runs."""
    return {key: value for key, value in line.items() if key not in VOLATILE}


def _check(line: Mapping[str, Any], where: str) -> None:
    """VerificationError when a completed update lacks what readers of it rely on."""
    for key, kinds in _COMPLETED.items():
        if not isinstance(line.get(key), kinds):
            raise VerificationError(f"{where}: {key} is {line.get(key)!r}; this line was not written by Assay")
    if line["update"] < 0:
        raise VerificationError(f"{where}: update is {line['update']}; updates are counted from zero")


class MetricsWriter:
    """Appends lines, written out every `every` lines, and seals stretches with receipts."""

    def __init__(self, path: Path, ledger: Ledger, sealed_to: int, every: int) -> None:
        """Continue at the end of `path`; a torn line is moved aside, an unsealed stretch is sealed."""
        self.path, self.ledger, self.every = path, ledger, every
        self._pending: list[bytes] = []
        self._sealed_to = sealed_to
        if not path.exists():
            path.touch()
        if not path.is_file():
            raise VerificationError(f"{path} is not a regular file; the metrics of a run are expected there")
        if path.stat().st_size < sealed_to:
            raise VerificationError(
                f"{path} has {path.stat().st_size:,} bytes, but receipts seal {sealed_to:,}: its end was lost"
            )
        self._move_torn_line_aside()
        self._file = path.open("ab")
        self.seal("interruption")

    def add(self, line: dict[str, Any]) -> None:
        """One line; on disk after `every` lines at the latest, or with the next seal."""
        self._pending.append(encode(line))
        if len(self._pending) >= self.every:
            self.write_out()

    def write_out(self) -> None:
        """Hand the waiting lines to the operating system (a killed process loses none of them)."""
        self._file.write(b"".join(self._pending))
        self._file.flush()
        self._pending.clear()

    def seal(self, at: str) -> None:
        """Flush to disk and state the digest of the stretch since the last seal; nothing new: no receipt."""
        self.write_out()
        os.fsync(self._file.fileno())
        size = self.path.stat().st_size
        if size == self._sealed_to:
            return
        body = {"start": self._sealed_to, "stop": size, "sha256": stretch(self.path, self._sealed_to, size), "at": at}
        self.ledger.append("metrics.sealed", body)
        self._sealed_to = size

    def close(self) -> None:
        """Write out what waits and close."""
        self.write_out()
        self._file.close()

    def _move_torn_line_aside(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self._sealed_to)
            whole = self._sealed_to + file.read().rfind(b"\n") + 1
            torn = move_torn_tail(self.path, file, whole)
        if torn:
            self.ledger.append("recovered", {"file": self.path.name, "torn_bytes": torn})


def stretch(path: Path, start: int, stop: int) -> str:
    """Digest of the bytes [start, stop) of a file; VerificationError when it is shorter."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise VerificationError(f"{path} has no bytes {start}:{stop}; its end was lost")
    return digest(data)
