"""What all parts of a recipe share, the kinds of value that keys have, and the sentences that refuse the others.

Strict: a number is no text, a truth value no number. Each refusal says what is allowed.
It knows no key of the recipe.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from assay.files.digest import is_digest

LARGEST_INTEGER = 2**53 - 1  # what canonical JSON holds exactly
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


class Part(BaseModel):
    """What all parts of a recipe share: frozen, strict types, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Conflict(ValueError):
    """A fault between keys; its text is a whole sentence that names them."""


def refuse(key: str, value: object, allowed: str) -> Conflict:
    """The fault that `key` has `value`, with what is allowed instead."""
    return Conflict(f"{key} is {value}; {allowed}")


def _digest(value: str) -> str:
    if not is_digest(value):
        raise ValueError("a digest is 'sha256:' followed by 64 lower-case hex digits")
    return value


def _path(value: str) -> str:
    parts = _text(value).split("/")
    if "\\" in value or value.startswith("/") or ".." in parts:
        raise ValueError("a path is relative to the recipe's folder, with '/', and does not leave it by '..'")
    return value


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("a name has 1 to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit")
    return value


def _text(value: str) -> str:
    if not value.strip() or not value.isprintable():  # control characters and lone surrogates are not
        raise ValueError("printable text that is not empty is expected")
    return value


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("allowed are null (the best there is), cpu, cuda and cuda:N")
    return value


def _tolerance(value: str) -> str:
    try:
        number = Decimal(value)
    except InvalidOperation:
        number = Decimal(-1)
    if not number.is_finite() or number < 0:
        raise ValueError('a decimal number of at least 0 in quotes is expected, such as "0.001"')
    return value


def count_or(word: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value == word or (type(value) is int and 1 <= value <= LARGEST_INTEGER):
            return value
        raise ValueError(f"allowed are {word} and integers of at least 1")

    return BeforeValidator(check)


def listed(value: object) -> object:
    """YAML's lists become tuples; the strict schema would refuse a list where a tuple is declared."""
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Updates = Annotated[int, Field(ge=1, le=10_000_000)]
Positive = Annotated[float, Field(gt=0, le=1e300)]
NotNegative = Annotated[float, Field(ge=0, le=1e300)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Digest = Annotated[str, AfterValidator(_digest)]
RelativePath = Annotated[str, AfterValidator(_path)]
Text = Annotated[str, AfterValidator(_text)]
Keys = Annotated[tuple[Text, ...], BeforeValidator(listed)]
Name = Annotated[str, AfterValidator(_name)]
Device = Annotated[str, AfterValidator(_device)]
Tolerance = Annotated[str, AfterValidator(_tolerance)]
Amount = Annotated[int | Literal["all"], count_or("all")]
Cadence = Annotated[int | Literal["auto"], count_or("auto")]


def short(value: object) -> str:
    """A value as a message shows it: as YAML has it, at most 60 characters; numbers too long to print are named so."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers above 4,300 digits
        return "a value too long to print"
    return text if len(text) <= 60 else text[:57] + "…"
