"""The one digest function of Assay, and the one canonical form of JSON.

A digest is `sha256:` and lower-case hex. Canonical JSON is RFC 8785 (JCS).
It does not sign anything and it does not read configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rfc8785

PREFIX = "sha256:"
_PIECE = 1 << 20
_SMALL = 64 << 20
_LARGEST_INTEGER = 2**53 - 1


def digest(data: bytes | bytearray | memoryview | Iterable[bytes | memoryview]) -> str:
    """SHA-256 of the bytes, or of the pieces one after another, as `sha256:` + hex."""
    state = hashlib.sha256()
    if isinstance(data, (bytes, bytearray, memoryview)):
        state.update(data)
    else:
        for piece in data:
            state.update(piece)
    return PREFIX + state.hexdigest()


def digest_file(path: Path) -> str:
    """Digest of a file's bytes, read in pieces of 1 MiB."""
    with path.open("rb") as file:
        return digest(iter(lambda: file.read(_PIECE), b""))


def digest_small(path: Path) -> str | None:
    """Digest of a file that is small by its nature; None, equal to no digest, when it is above 64 MiB.

    A giant in the place of a manifest would be hashed for hours before it was found to be another file.
    """
    return digest_file(path) if path.stat().st_size <= _SMALL else None


def is_digest(value: object) -> bool:
    """True for `sha256:` followed by 64 lower-case hex digits."""
    return (
        isinstance(value, str)
        and value.startswith(PREFIX)
        and len(value) == len(PREFIX) + 64
        and all(c in "0123456789abcdef" for c in value[len(PREFIX) :])
    )


def raw(value: str) -> bytes:
    """The 32 bytes that a digest stands for."""
    return bytes.fromhex(value.removeprefix(PREFIX))


def canonical(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value.

    Raises ValueError for what the form cannot hold (NaN, infinities, integers beyond 2^53 - 1).
    """
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise ValueError(f"cannot be written as canonical JSON: {error}") from None


def canonical_exact(value: Any) -> bytes:
    """As `canonical`, for chained records: binary floats are refused as well.

    Numbers that people rely on are integers or decimal strings; a float in a receipt is a bug.
    """
    _refuse_floats(value, "")
    return canonical(value)


def integer(value: int) -> int | str:
    """An integer as chained records hold it: a decimal string above 2^53 - 1."""
    return value if abs(value) <= _LARGEST_INTEGER else str(value)


def _refuse_floats(value: Any, place: str) -> None:
    if isinstance(value, float):
        raise ValueError(f"a record holds the binary float {value!r} at {place or 'its top'}")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_floats(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_floats(inner, f"{place}[{index}]")
