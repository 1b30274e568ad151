"""Checked access to the keys of a record that came from a file.

Each function returns the value in its type or raises InputError with one sentence that names
the place, the key, the value and what is allowed. It does not read files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from assay.errors import InputError
from assay.files.digest import is_digest

LARGEST = 2**53 - 1


def known(record: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    """Refuse keys that are not `allowed`; the nearest allowed one is named."""
    names = list(allowed)
    for key in record:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
            raise InputError(f"{where}: the key {key!r} is unknown; {hint}")


def present(record: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a key that must be there."""
    if key not in record:
        raise InputError(f"{where}: the key {key!r} is missing")
    return record[key]


def integer(record: Mapping[str, Any], key: str, where: str, minimum: int = 0, maximum: int = LARGEST) -> int:
    """An integer in [minimum, maximum]; true and false are not integers."""
    value = present(record, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InputError(
            f"{where}: {key} is {_short(value)}; an integer between {minimum:,} and {maximum:,} is expected"
        )
    return value


def text(record: Mapping[str, Any], key: str, where: str) -> str:
    """A string that is not empty."""
    value = present(record, key, where)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {key} is {_short(value)}; a text that is not empty is expected")
    return value


def optional_text(record: Mapping[str, Any], key: str, where: str) -> str | None:
    """As `text`; null and an absent key are None."""
    return None if record.get(key) is None else text(record, key, where)


def choice(record: Mapping[str, Any], key: str, where: str, allowed: tuple[str, ...]) -> str:
    """One of the allowed texts."""
    value = present(record, key, where)
    if value not in allowed or not isinstance(value, str):
        raise InputError(f"{where}: {key} is {_short(value)}; allowed: {', '.join(allowed)}")
    return value


def sha256(record: Mapping[str, Any], key: str, where: str) -> str:
    """A digest, `sha256:` and 64 hex digits."""
    value = present(record, key, where)
    if not is_digest(value):
        raise InputError(f"{where}: {key} is {_short(value)}; 'sha256:' and 64 hex digits are expected")
    assert isinstance(value, str)
    return value


def objects(record: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A list of JSON objects that is not empty."""
    value = present(record, key, where)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{where}: {key} is {_short(value)}; a list of at least one object is expected")
    return value


def mapping(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A JSON object."""
    value = present(record, key, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} is {_short(value)}; an object is expected")
    return value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
