"""Who may enter: licence records of sources and titles, reserved documents, language, lengths, predicates over columns.

Each judgement looks at one document alone and says reason and evidence when it refuses. It reads the
licence records that a description names, and nothing else.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from assay.corpus.description import ADMITTED, Corpus, Filters, Predicate, Source
from assay.corpus.documents import Document, Rejected, reject
from assay.corpus.reserved import Reserved
from assay.errors import InputError
from assay.files.reading import inside, parse_json, read_text

RECORDS_LIMIT = 1 << 30
Refusal = tuple[str, str]  # reason, evidence


@dataclass(frozen=True)
class Title:
    """A title's licence record; what is missing is None."""

    licence: str | None
    evidence: str | None
    decision: str | None


@dataclass(frozen=True)
class Gate:
    """What a source's documents must pass, with its title records read."""

    source: Source
    corpus: Corpus
    refused: Refusal | None
    titles: dict[tuple[str, str], Title] = field(default_factory=dict)  # ("id" or "title", its value) → record
    reserved: Reserved = field(default_factory=Reserved)

    @property
    def filters(self) -> Filters:
        """The source's own filters, or the corpus's."""
        return self.source.filters or self.corpus.filters

    def through(self, document: Document) -> Document | Rejected:
        """Normalised and admitted, or refused: normalise → admission → language → filters."""
        form = self.corpus.normalise
        text = document.text if form == "none" else unicodedata.normalize(form, document.text)
        if not text.strip():
            return reject(document, "normalise", "empty", "the text holds nothing but white space")
        licence = self._licence(document)
        if isinstance(licence, tuple):
            return reject(document, "admission", *licence)
        reserved = self.reserved.found(document)
        if reserved is not None:
            return reject(document, "admission", *reserved)
        language = self._language(text)
        if language is not None:
            return reject(document, "language", *language)
        outside = lengths(text, self.filters) or predicates(document.values, self.filters)
        if outside is not None:
            return reject(document, "filters", *outside)
        return replace(document, text=text, licence=licence, values={})

    def _licence(self, document: Document) -> str | Refusal:
        """The licence under which the document enters, or why it does not."""
        if self.refused is not None:
            return self.refused
        record = self.source.licence
        assert record is not None  # a source without one is refused
        if record.records is not None:
            return self._title(document)
        stated = document.licence
        if record.spdx is None:
            assert stated is not None  # the column is demanded where the source has no licence of its own
            return stated if stated in self.corpus.admission.licences else _not_admitted(stated, self.corpus)
        if stated is not None and stated != record.spdx:
            return "licence_differs", f"states {stated}, but its source {record.spdx}"
        return record.spdx

    def _title(self, document: Document) -> str | Refusal:
        known = self.titles.get(("id", document.id))
        if known is None and document.title is not None:
            known = self.titles.get(("title", document.title))
        if known is None:
            return "licence_record_missing", f"no record for the id, nor for the title {document.title!r}"
        return _judged(known, self.corpus)

    def _language(self, text: str) -> Refusal | None:
        asked = self.corpus.language
        if not asked.identify:
            return None
        from assay.corpus.language import identify

        code, probability = identify(text)
        expected = self.source.language.split("-")[0]
        if code != expected:
            return "language_differs", f"identified as {code} ({probability:.3f}), but its source is {expected}"
        if probability < asked.at_least:
            return "language_unsure", f"{code} with {probability:.3f}, at least {asked.at_least} is asked for"
        return None


def gate(source: Source, corpus: Corpus, folder: Path, reserved: Reserved | None = None) -> Gate:
    """The gate of a source, with the reserved lists read before; InputError when its licence records cannot be read."""
    refused = refusal(source, corpus, folder)
    records = source.licence.records if source.licence is not None else None
    known = titles(source, folder) if records is not None and refused is None else {}
    return Gate(source, corpus, refused, known, reserved or Reserved())


def refusal(source: Source, corpus: Corpus, folder: Path) -> Refusal | None:
    """Why a whole source may not enter, as (reason, evidence); None when its documents are looked at."""
    licence = source.licence
    if licence is None:
        return "licence_record_missing", "the source has no licence record"
    if licence.records is None:
        by_document = licence.spdx is None and source.columns.licence is not None
        judged = _judged(Title(licence.spdx, licence.evidence, licence.decision), corpus, by_document)
        if isinstance(judged, tuple):
            return judged
    for name in licence.files:
        if not inside(folder, name, f"source {source.name!r}: licence.files").is_file():
            return "licence_record_incomplete", f"the licence file {name} is not there"
    return None


def _judged(record: Title, corpus: Corpus, by_document: bool = False) -> str | Refusal:
    """The licence of a complete, admitted record; `by_document`: each document states its own."""
    parts = {} if by_document else {"spdx": record.licence}
    for part, value in {**parts, "evidence": record.evidence, "decision": record.decision}.items():
        if not (value or "").strip():
            return "licence_record_incomplete", f"the licence record has no {part}"
    assert record.decision is not None
    if not record.decision.strip().lower().startswith(ADMITTED):
        return "not_admitted", f"the decision is {record.decision!r}, which does not begin with {ADMITTED!r}"
    if by_document:
        return ""
    assert record.licence is not None
    return record.licence if record.licence in corpus.admission.licences else _not_admitted(record.licence, corpus)


def _not_admitted(licence: str, corpus: Corpus) -> Refusal:
    allowed = ", ".join(corpus.admission.licences)
    return "licence_not_admitted", f"{licence} is not among the admitted licences: {allowed}"


def titles(source: Source, folder: Path) -> dict[tuple[str, str], Title]:
    """The licence records of a source's titles, JSON Lines of `{title or id, licence, evidence, decision}`.

    Raises InputError for a record that cannot be read, names nothing, or names what another one names.
    """
    assert source.licence is not None
    path = inside(folder, source.licence.records, f"source {source.name!r}: licence.records")
    found: dict[tuple[str, str], Title] = {}
    for number, line in enumerate(read_text(path, "licence records", RECORDS_LIMIT).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise InputError(f"{where}: a licence record is a JSON object of id or title, licence, evidence, decision")
        unknown = sorted(set(record) - {"id", "title", "licence", "evidence", "decision"})
        if unknown:
            raise InputError(f"{where}: unknown key {unknown[0]!r}; known: id, title, licence, evidence, decision")
        for key, value in record.items():
            if value is not None and not isinstance(value, str):
                raise InputError(f"{where}: {key} is not a string")
        title = Title(record.get("licence"), record.get("evidence"), record.get("decision"))
        names = [(kind, record[kind]) for kind in ("id", "title") if record.get(kind)]
        if not names:
            raise InputError(f"{where}: the record has neither id nor title")
        # By its id where it has one: the title stands beside it for people, and several ids may share it.
        if found.setdefault(names[0], title) != title:
            raise InputError(f"{where}: {names[0][0]} {names[0][1]!r} has two different records; keep the valid one")
    return found


def lengths(text: str, filters: Filters) -> Refusal | None:
    """The length that a normalised text does not have, as (reason, evidence); in Unicode characters."""
    if len(text) < filters.min_chars:
        return "too_short", f"{len(text)} characters, at least {filters.min_chars} are asked for"
    if filters.max_chars is not None and len(text) > filters.max_chars:
        return "too_long", f"{len(text)} characters, at most {filters.max_chars} are asked for"
    return None


def predicates(values: dict[str, Any], filters: Filters) -> Refusal | None:
    """The first predicate that does not hold, as (reason, evidence)."""
    for predicate in filters.columns:
        refused = _predicate(values.get(predicate.column), predicate)
        if refused is not None:
            return refused
    return None


def _predicate(value: Any, asked: Predicate) -> Refusal | None:
    column = asked.column
    if value is None:
        return "column_missing", f"no {column!r}"
    if asked.at_least is not None or asked.at_most is not None:
        if not _numeric(value):
            return "column_not_numeric", f"{column!r} is {_short(value)}, not a number"
        if asked.at_least is not None and value < asked.at_least:
            return "column_too_low", f"{column!r} is {value}, at least {asked.at_least} is asked for"
        if asked.at_most is not None and value > asked.at_most:
            return "column_too_high", f"{column!r} is {value}, at most {asked.at_most} is asked for"
    allowed = [] if asked.equals is None else [asked.equals]
    for each in (allowed, list(asked.one_of) if asked.one_of is not None else []):
        if each and not any(_equal(value, one) for one in each):
            return "column_differs", f"{column!r} is {_short(value)}, asked for: {', '.join(map(repr, each))}"
    return None


def _numeric(value: Any) -> bool:
    """Whether a value is a finite number of a size that can be compared: a float reaches to 1.8e308."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer of hundreds of digits, as JSON allows
        return False


def _equal(value: Any, asked: object) -> bool:
    """Equality that keeps truth values and numbers apart."""
    return isinstance(value, bool) == isinstance(asked, bool) and bool(value == asked)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
