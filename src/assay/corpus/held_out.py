"""Reading held-out sets: the items that training text must not hold.

A set is a JSON Lines file, whose records hold the item's text in named fields, or a plain text file, whose
paragraphs are the items. Sets stay where they are: what is kept of an item elsewhere is its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import InputError
from assay.files.digest import digest_file
from assay.files.reading import parse_json, read_text

_LIMIT = 1 << 30


@dataclass(frozen=True)
class Item:
    """One held-out item: its set, its name there, and its texts (a question, each of its answers, …)."""

    set: str
    id: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Set:
    """A file of held-out items: its name without folder, its digest and how many items it holds."""

    name: str
    sha256: str
    items: int


def read_sets(paths: Sequence[Path], fields: Sequence[str]) -> tuple[list[Set], list[Item]]:
    """The sets in the order of their names, with their items in the order of their lines.

    `.jsonl` files hold an object a line; the texts of an item are those of `fields` that it has, strings or
    lists of strings (nested ones too); its name is `id`, when it has one, or the line number. `.txt` files hold an
    item a paragraph (blank lines part them), named by its number. Raises InputError for another kind of
    file, two files of one name, two items of one name, a line that is no such object, and a field that no item has.
    """
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.name in by_name:
            raise InputError(f"{path} and {by_name[path.name]} have one name; rename one held-out set")
        by_name[path.name] = path
    sets: list[Set] = []
    items: list[Item] = []
    seen: set[str] = set()
    for name, path in sorted(by_name.items()):
        if path.suffix not in (".jsonl", ".txt"):
            raise InputError(f"{path} is neither .jsonl nor .txt; save the held-out set as one of them")
        text = read_text(path, "a held-out set", _LIMIT)
        found = list(_records(name, path, text, fields, seen) if path.suffix == ".jsonl" else _paragraphs(name, text))
        names: set[str] = set()
        for item in found:
            if item.id in names:
                raise InputError(f"{path}: two items are called {item.id!r}; give each its own `id`")
            names.add(item.id)
        sets.append(Set(name, digest_file(path), len(found)))
        items.extend(found)
    unknown = [field for field in fields if field not in seen]
    if unknown and any(path.suffix == ".jsonl" for path in paths):
        raise InputError(f"no held-out item has the field {unknown[0]!r}; name the fields that hold text")
    return sets, items


def _paragraphs(name: str, text: str) -> Iterator[Item]:
    number = 0
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            number += 1
            yield Item(name, str(number), ("\n".join(lines),))
            lines = []


def _records(name: str, path: Path, text: str, fields: Sequence[str], seen: set[str]) -> Iterator[Item]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise InputError(f"{where}: an object is expected on each line of a held-out set")
        present = [field for field in fields if field in record]
        if not present:
            has = ", ".join(sorted(record)) or "no field at all"
            raise InputError(f"{where}: no field {' or '.join(fields)} is there, only {has}; name those with text")
        seen.update(present)
        own = record.get("id")
        label = str(own) if isinstance(own, (str, int)) and not isinstance(own, bool) else str(number)
        texts = tuple(text for field in present for text in _texts(record[field], f"{where}: {field!r}"))
        yield Item(name, label, texts)


def _texts(value: Any, where: str) -> Iterator[str]:
    """The strings of a field; null is none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, where)
    elif value is not None:
        raise InputError(f"{where} is neither a string nor a list of strings; name only fields that hold text")
