"""Reading input files so that every fault is one clear sentence.

Missing, a directory, unreadable, too large, not UTF-8, not JSON: each names the file and the
way out (exit 2). Paths inside files are relative to that file and never leave its folder.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from assay.errors import InputError

LIMIT = 64 << 20


def read_bytes(path: Path, what: str, limit: int = LIMIT) -> bytes:
    """The file's bytes; `what` names its role in messages; InputError when it cannot be had."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder, but {what} is a file; name the file itself")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file, but {what} is one; name the file itself")
        size = path.stat().st_size
        if size > limit:
            raise InputError(f"{path} has {size:,} bytes; {what} may have {limit:,} at most: is it the right file?")
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; {what} is expected there") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied; allow reading for this user") from None
    except NotADirectoryError:
        raise InputError(f"{path} does not exist: a part of the path is a file, not a folder") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"{path} cannot be read: {error}") from None


def read_text(path: Path, what: str, limit: int = LIMIT) -> str:
    """The file as UTF-8 text; line ends are kept as they are."""
    data = read_bytes(path, what, limit)
    if not data.strip():
        raise InputError(f"{path} is empty; {what} is expected there")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save {what} as UTF-8") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON value without duplicate keys, NaN and numbers beyond float64; InputError names `where`."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start})") from None
    try:
        value = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:  # an escape may name half a character, which no UTF-8 output can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise InputError(f"{where} is not valid JSON: it holds an unpaired surrogate") from None
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{where} is not valid JSON here: it is nested too deeply") from None


def read_json(path: Path, what: str, limit: int = LIMIT) -> Any:
    """A JSON file; see `read_text` and `parse_json` for the errors."""
    return parse_json(read_text(path, what, limit), str(path))


def read_object(path: Path, what: str, limit: int = LIMIT) -> dict[str, Any]:
    """A JSON file whose value is an object."""
    value = read_json(path, what, limit)
    if not isinstance(value, dict):
        raise InputError(f"{path}: {what} is a JSON object, not {type(value).__name__}")
    return value


def inside(folder: Path, relative: object, where: str) -> Path:
    """`folder / relative`, refused when the path is absolute or leaves the folder.

    Links are followed before the comparison, so that a link cannot lead outside either.
    """
    if not isinstance(relative, str) or not relative or "\0" in relative:
        raise InputError(f"{where}: {relative!r} is not a path; a relative path is expected")
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative:
        raise InputError(f"{where}: the path {relative!r} leaves its folder; use a path inside it")
    path = folder / pure
    try:
        stays = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: how Python before 3.13 reports a loop of links
        raise InputError(f"{where}: the path {relative!r} cannot be followed: {error}") from None
    if not stays:
        raise InputError(f"{where}: the path {relative!r} leaves its folder through a link; use a path inside it")
    return path


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the numbers of float64")
    return number


# Made once: building a decoder costs more than reading a short line with it.
_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
