"""How a command answers: one JSON object for scripts, tables for people.

JSON goes to standard output and nothing else does with `--json`; progress and notes go to
standard error. Off a terminal nothing is wrapped; letters that steer a terminal are spelled out. Nothing is computed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

NOT_MEASURED = "not measured"
UNWRAPPED = 1_000_000  # columns off a terminal: one row is one line, whatever it holds
# C0 but tab and newline, DEL and C1 move the cursor or rewrite the screen; the others turn the direction of reading
# or end a line; surrogates cannot be written. Ids, titles and reports come from strangers.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def as_json(facts: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on standard output; `ok` is true unless the facts say otherwise."""
    text = json.dumps({"ok": True, **facts}, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")  # the same JSON
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people on standard error."""
    print(harmless(text), file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """The text with every letter that would steer a terminal spelled out, as in `\\x1b`; lines stay lines."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def console() -> Console:
    """The console for people: standard output, without colour and never wrapping when it is not a terminal.

    Text that is printed on it is shown as it is, harmless and without markup.
    """
    from rich.console import Console
    from rich.text import Text

    class Screen(Console):
        def print(self, *objects: Any, **more: Any) -> None:
            super().print(*(Text(harmless(each)) if isinstance(each, str) else each for each in objects), **more)

    terminal = sys.stdout.isatty()
    return Screen(highlight=False, emoji=False, soft_wrap=not terminal, width=None if terminal else UNWRAPPED)


@dataclass(frozen=True)
class Trimmed:
    """A title and a table whose lines end with their last letter: rich pads each to the table's width."""

    title: str
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment
        from rich.text import Text

        if self.title:
            yield Text(harmless(self.title), style="bold")
        for line in console.render_lines(self.table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                text, style, control = line.pop()
                line.append(Segment(text.rstrip(), style, control))
            yield from line
            yield Segment.line()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Trimmed:
    """A table for people; None is shown as "not measured", integers with separators. No header without names."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        result.add_column(harmless(words(column)), overflow="fold")
    for row in rows:
        result.add_row(*(cell(value) for value in row))
    return Trimmed(title, result)


def cell(value: object) -> str:
    """One value as text: None is "not measured", an integer has thousands separators, a list is joined."""
    from rich.markup import escape

    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value) or "none"
    return escape(harmless(" ".join(str(value).splitlines())))


def words(name: str) -> str:
    """A JSON key in words; a recipe's key, which has dots, stays as it is written there."""
    return name if "." in name else name.replace("_", " ")


def pairs(title: str, facts: Mapping[str, object]) -> Trimmed:
    """A two-column table of names, in words, and values."""
    return table(title, ("", ""), ((words(name), value) for name, value in facts.items()))
