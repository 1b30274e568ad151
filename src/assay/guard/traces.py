"""Price and availability traces: a CSV file of what changed, zone by zone, read and checked whole.

Columns `time` (UTC), `zone`, `available` (1: a launch would succeed), `usd_per_hour` (whole machine; blank: no
reading). A row stands until the zone's next one; a last row without a zone gives the end. It judges nothing.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from assay.errors import InputError
from assay.files.reading import read_text

COLUMNS = ("time", "zone", "available", "usd_per_hour")
_PRICE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,12})?")


@dataclass(frozen=True)
class Change:
    """What one zone offers from a time on; the price in US dollars per hour of the machine, None for no reading."""

    time: datetime
    zone: str
    available: bool
    usd_per_hour: Decimal | None


@dataclass(frozen=True)
class Trace:
    """Changes in the order of their times, the first time and the end (UTC)."""

    changes: tuple[Change, ...]
    start: datetime
    end: datetime


def load(path: Path) -> Trace:
    """The trace in a CSV file; InputError names the file and the line of the first fault."""
    rows = csv.reader(io.StringIO(read_text(path, "a price trace"), newline=""), strict=True)
    changes, last = list[Change](), None
    try:
        header = next(rows)
        if tuple(header) != COLUMNS:
            raise InputError(f"{path}: line 1 is {','.join(header)[:80]!r}; {','.join(COLUMNS)} is expected")
        for row in rows:
            where = f"{path}: line {rows.line_num}"
            if len(row) != len(COLUMNS):
                raise InputError(f"{where} has {len(row)} fields; {len(COLUMNS)} are expected")
            time = moment(row[0], where)
            if last is not None and time < last:
                raise InputError(f"{where} is of {row[0]}, earlier than the line before; rows rise in time")
            last = time
            if row[1]:
                changes.append(_change(time, row, where))
    except csv.Error as fault:
        raise InputError(f"{path}: line {rows.line_num} is not CSV: {fault}") from None
    if last is None or not changes or last <= changes[0].time:
        raise InputError(f"{path} covers no time; at least two rows of different times are expected")
    return Trace(tuple(changes), changes[0].time, last)


def moment(text: str, where: str) -> datetime:
    """A time such as 2025-10-04T00:10:00Z; InputError names `where` for any other."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: in UTC it lies outside the years 1 to 9999
        pass
    raise InputError(f"{where}: {text[:40]!r} is not a time such as 2025-10-04T00:10:00Z")


def _change(time: datetime, row: list[str], where: str) -> Change:
    _, zone, available, price = row
    if available not in ("0", "1"):
        raise InputError(f"{where}: available is {available[:40]!r}; 0 and 1 are allowed")
    if not price:
        return Change(time, zone, available == "1", None)
    number = Decimal(price) if _PRICE.fullmatch(price) else Decimal(0)
    if not number:
        raise InputError(f"{where}: usd_per_hour is {price[:40]!r}; a decimal number above 0 or nothing is expected")
    return Change(time, zone, available == "1", number)
