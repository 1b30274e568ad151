"""How a command answers: one JSON object for scripts, tables for people.

JSON goes to standard output and nothing else does with `--json`; progress and notes go to
standard error. Nothing is computed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOT_MEASURED = "not measured"


def as_json(facts: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on standard output; `ok` is true unless the facts say otherwise."""
    json.dump({"ok": True, **facts}, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people on standard error."""
    print(text, file=sys.stderr, flush=True)


def console() -> Console:
    """The console for people: standard output, without colour and wrapping when it is not a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=not terminal, width=None if terminal else 200)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for people; None is shown as "not measured", integers with separators."""
    from rich.table import Table

    result = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(cell(value) for value in row))
    return result


def cell(value: object) -> str:
    """One value as text: None is "not measured", an integer has thousands separators."""
    from rich.markup import escape

    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(str(value))


def pairs(title: str, facts: Mapping[str, object]) -> Table:
    """A two-column table of names and values."""
    return table(title, ("", ""), facts.items())
