"""Lists of documents that other pools have reserved: who is on one may not enter.

A list is JSON Lines of `{id?, title?, text_sha256?, pool, reason?}`: names and digests, never a text. The digest
is of the text in `comparable` form, which line wraps and Unicode spelling do not change. Texts that are merely
alike, or hold a reserved one inside, are for near duplicates and decontamination to find.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.corpus.documents import Document
from assay.data import fields
from assay.errors import InputError
from assay.files.digest import digest, raw
from assay.files.reading import inside, parse_json, read_text

FORM = "NFKC, runs of white space as one space, none at the ends"
LIMIT = 1 << 32
_KEYS = ("id", "title", "text_sha256", "pool", "reason")


@dataclass(frozen=True, slots=True)
class Entry:
    """Why a document is reserved: for which pool, by which line of which list."""

    pool: str
    list: str
    line: int
    reason: str | None


@dataclass(frozen=True)
class Reserved:
    """All entries for pools other than the corpus's own; the first of equal ones counts.

    Memory for each entry: about 320 bytes, with its name or digest as key.
    """

    ids: dict[str, Entry] = field(default_factory=dict)
    titles: dict[str, Entry] = field(default_factory=dict)
    texts: dict[bytes, Entry] = field(default_factory=dict)
    lists: list[dict[str, Any]] = field(default_factory=list)  # path, digest, entries, those of them for other pools

    def found(self, document: Document) -> tuple[str, str] | None:
        """(reason, evidence) for a document whose id, title or text is on a list; None for others."""
        entry, what = self.ids.get(document.id), "id"
        if entry is None and self.titles and document.title is not None:
            entry, what = self.titles.get(comparable(document.title)), "title"
        if entry is None and self.texts:
            entry, what = self.texts.get(raw(text_digest(document.text))), "text"
        if entry is None:
            return None
        because = "" if entry.reason is None else f": {entry.reason}"
        return "reserved", f"its {what} is reserved for pool {entry.pool} by {entry.list}, line {entry.line}{because}"


def comparable(text: str) -> str:
    """The text in NFKC with every run of white space as one space and none at its ends.

    NFKC, because a text in any of the forms that a corpus may state (NFC, NFKC, none) comes to the same one.
    """
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split())


def text_digest(text: str) -> str:
    """The digest by which a list names a text: SHA-256 of its `comparable` form in UTF-8."""
    return digest(comparable(text).encode("utf-8", errors="surrogatepass"))


def read(paths: Sequence[str], pool: str, folder: Path) -> Reserved:
    """The lists at `paths`, relative to the description's `folder`, for a corpus of this pool.

    Raises InputError with the line for one that is no entry: another key, no pool, nothing to know a document by.
    """
    result = Reserved()
    for name in paths:
        path = inside(folder, name, "admission.reserved")
        text = read_text(path, "a list of reserved documents", LIMIT)
        entries = others = 0
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            record = _record(parse_json(line, f"{path}, line {number}"), f"{path}, line {number}")
            entries += 1
            if record["pool"] == pool:
                continue
            others += 1
            entry = Entry(record["pool"], name, number, record.get("reason"))
            if record.get("id") is not None:
                result.ids.setdefault(record["id"], entry)
            if record.get("title") is not None:
                result.titles.setdefault(comparable(record["title"]), entry)
            if record.get("text_sha256") is not None:
                result.texts.setdefault(raw(record["text_sha256"]), entry)
        facts = {"path": name, "sha256": digest(text.encode("utf-8")), "entries": entries, "of_other_pools": others}
        result.lists.append(facts)
    return result


def _record(record: Any, where: str) -> dict[str, Any]:
    """One checked entry."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: an entry is a JSON object with pool and at least one of id, title, text_sha256")
    fields.known(record, _KEYS, where)
    fields.text(record, "pool", where)
    for key in ("id", "title", "reason"):
        fields.optional_text(record, key, where)
    if record.get("text_sha256") is not None:
        fields.sha256(record, "text_sha256", where)
    if all(record.get(key) is None for key in ("id", "title", "text_sha256")):
        raise InputError(f"{where}: the entry has none of id, title, text_sha256; no document could be known by it")
    return record
