"""Safetensors files, written and hashed in one pass, and read back without torch for verification.

Names and header are sorted, so that equal tensors give equal files. The format is that of the
safetensors project; its own writer hides the stream and orders metadata at random. Nothing here
moves tensors to or from a device.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, canonical, digest
from assay.files.reading import parse_json

_HEADER_LIMIT = 64 << 20
_PIECE = 8 << 20
# Bytes of one element by safetensors dtype name.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """One tensor as bytes on the host: safetensors dtype name, shape, little-endian data."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Waiting:
    """The same, its bytes fetched when their turn comes and let go after it: one tensor at a time on the host."""

    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], memoryview]

    @property
    def data(self) -> memoryview:
        """The bytes, fetched anew."""
        return self.fetch()


@dataclass(frozen=True)
class Written:
    """A file that was written: its bytes and digest, and for each tensor dtype, shape and digest."""

    bytes: int
    sha256: str
    tensors: dict[str, dict[str, Any]]


def write(path: Path, tensors: Mapping[str, Raw | Waiting]) -> Written:
    """Write a safetensors file; both digests (file and tensors) are taken from the bytes as they go out."""
    header: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        stop = offset + _elements(tensor.shape) * ITEM_BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    head = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    head += b" " * (-len(head) % 8)  # the data begins at a multiple of eight bytes
    state = hashlib.sha256()
    described: dict[str, dict[str, Any]] = {}
    with path.open("xb") as file:
        for piece in (len(head).to_bytes(8, "little"), head):
            file.write(piece)
            state.update(piece)
        for name in sorted(tensors):
            one, data = hashlib.sha256(), tensors[name].data
            start, stop = header[name]["data_offsets"]
            assert data.nbytes == stop - start, name
            for begin in range(0, data.nbytes, _PIECE):
                part = data[begin : begin + _PIECE]
                file.write(part)
                state.update(part)
                one.update(part)
                del part
            del data  # before the next is fetched
            described[name] = describe(tensors[name].dtype, tensors[name].shape, PREFIX + one.hexdigest())
        file.flush()
        os.fsync(file.fileno())
    return Written(8 + len(head) + offset, PREFIX + state.hexdigest(), described)


def describe(dtype: str, shape: Iterable[int], sha256: str) -> dict[str, Any]:
    """A tensor as `state_sha256` counts it."""
    return {"dtype": dtype, "shape": list(shape), "sha256": sha256}


def state_digest(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 of the RFC 8785 JSON of name → dtype, shape, digest: what "same bits" compares."""
    return digest(canonical({name: dict(item) for name, item in tensors.items()}))


def read(path: Path) -> Iterator[tuple[str, Raw]]:
    """Tensors of a safetensors file in file order; DataError naming what is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise DataError(f"{path} is not a safetensors file: its header does not fit its {size:,} bytes")
        try:
            header = parse_json(file.read(length), f"{path}, header")
        except InputError as fault:
            raise DataError(str(fault)) from None
        entries = _entries(header, path, size - 8 - length)
        for name, dtype, shape, start, stop in entries:
            file.seek(8 + length + start)
            yield name, Raw(dtype, shape, memoryview(file.read(stop - start)))


def describe_file(path: Path) -> dict[str, dict[str, Any]]:
    """Dtype, shape and digest of every tensor in a file, from its bytes."""
    return {name: describe(raw.dtype, raw.shape, digest(raw.data)) for name, raw in read(path)}


def _entries(header: object, path: Path, data: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    if not isinstance(header, dict):
        raise DataError(f"{path} is not a safetensors file: its header is not an object")
    result = []
    for name, item in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
            good = (
                all(type(number) is int and number >= 0 for number in (*shape, start, stop))
                and stop <= data
                and _elements(shape) * ITEM_BYTES[dtype] == stop - start
            )
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise DataError(f"{path} is damaged: the header's entry {name!r} does not describe bytes of this file")
        result.append((name, dtype, shape, start, stop))
    return sorted(result, key=lambda entry: entry[3])


def _elements(shape: Iterable[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
