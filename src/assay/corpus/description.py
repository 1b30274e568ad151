"""The corpus description: every key of a file under `corpora/`, its type, its default and what is allowed.

A `Corpus` that exists is consistent. A source whose licence record is incomplete can be described:
admission refuses it by name, with all its documents. Reads the description, not the sources.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from assay.errors import InputError
from assay.files.digest import canonical, digest
from assay.files.reading import read_text
from assay.recipe.fields import NAME, Conflict, Count, Digest, Natural, RelativePath, Text
from assay.recipe.load import parse_yaml
from assay.recipe.schema import Part

SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of text


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{expected} is expected")
        return value

    return AfterValidator(check)


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _dated(value: object) -> object:
    """YAML readers may make a date of 2026-11-30."""
    return value if isinstance(value, str) else str(value)


Name = Annotated[str, _matching(NAME, "a name of letters, digits, '.', '_' and '-'")]
Spdx = Annotated[str, _matching(SPDX, "an SPDX licence id such as CC-BY-SA-3.0")]
Language = Annotated[str, _matching(LANGUAGE, "a language code such as en or pl")]
Date = Annotated[str, BeforeValidator(_dated), _matching(DATE, "a date such as 2026-11-30")]


class Columns(Part):
    """Which key of a record is what. `licence`: stated by each document; it must be its source's."""

    id: Text = "id"
    text: Text = "text"
    title: Text | None = None
    licence: Text | None = None


class Licence(Part):
    """The licence record: what the licence is, how that is known, and who decided that it may enter.

    `files` are carried along with the shards, for licences that ask for it. Without evidence or decision
    the source is refused.
    """

    spdx: Spdx | None = None
    evidence: str | None = None
    decision: str | None = None
    attribution: str | None = None
    files: Annotated[tuple[RelativePath, ...], BeforeValidator(_listed)] = ()


class Source(Part):
    """A named origin of documents. `sha256` pins the bytes of the file; null: not pinned."""

    name: Name
    path: RelativePath
    format: Literal["jsonl"] = "jsonl"
    columns: Columns = Columns()
    language: Language
    licence: Licence | None = None
    revision: Text
    retrieved: Date
    sha256: Digest | None = None


class Admission(Part):
    """The licences that may enter, by SPDX id."""

    licences: Annotated[tuple[Spdx, ...], BeforeValidator(_listed), Field(min_length=1)]


class Filters(Part):
    """Lengths in Unicode characters after normalisation; null: no upper bound."""

    min_chars: Natural = 0
    max_chars: Count | None = None

    @model_validator(mode="after")
    def _fit(self) -> Filters:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise Conflict(f"filters.max_chars is {self.max_chars}; it must be at least min_chars ({self.min_chars})")
        return self


class Train(Part):
    """A byte-level BPE tokenizer trained on the training documents."""

    vocabulary: Annotated[int, Field(ge=SMALLEST_VOCABULARY, le=1 << 24)]


class TokenizerChoice(Part):
    """Trained on the corpus, or a given `tokenizer.json`."""

    train: Train | None = None
    path: RelativePath | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizerChoice:
        if (self.train is None) == (self.path is None):
            both = "both given" if self.train is not None else "missing"
            raise Conflict(f"tokenizer.train and tokenizer.path are {both}; exactly one of the two is expected")
        return self


class Validation(Part):
    """The share of keys whose documents are held out. `key`: the column that keeps documents together, such as
    a page in two languages; null: every document for itself, by its id."""

    fraction: Annotated[float, Field(gt=0, lt=1)]
    key: Text | None = None


class Corpus(Part):
    """What a corpus is made of and how."""

    name: Name
    pool: Name = "base"
    sources: Annotated[tuple[Source, ...], BeforeValidator(_listed), Field(min_length=1)]
    normalise: Literal["NFC"] = "NFC"
    admission: Admission
    filters: Filters = Filters()
    tokenizer: TokenizerChoice
    end_of_text: Text = "<|endoftext|>"
    validation: Validation
    shards: Annotated[int, Field(ge=1, le=100)] = 1

    @model_validator(mode="after")
    def _fit(self) -> Corpus:
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise Conflict(f"sources: the name {name} is given twice; documents are known by their source's name")
        return self


@dataclass(frozen=True)
class Description:
    """A description as read: the corpus, the folder that its paths are relative to, the bytes, the digest.

    The digest is of the RFC 8785 JSON of the resolved description with its sources by name, so that
    neither comments nor the order of sources change it.
    """

    corpus: Corpus
    folder: Path
    data: bytes
    digest: str


def load(path: Path) -> Description:
    """Read and check a description; InputError names the file, the key, the value and what is allowed."""
    text = read_text(path, "a corpus description", limit=1 << 20)
    corpus = check(parse_yaml(text, str(path)), str(path))
    return Description(corpus, path.parent, text.encode("utf-8"), description_digest(corpus))


def description_digest(corpus: Corpus) -> str:
    """See `Description`."""
    resolved = corpus.model_dump(mode="json")
    resolved["sources"].sort(key=lambda source: source["name"])
    return digest(canonical(resolved))


def check(value: object, where: str) -> Corpus:
    """A corpus from plain values; InputError says what is wrong with the first faulty key."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: a corpus description is a mapping of keys; see corpora/demo.yaml")
    try:
        return Corpus.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {_sentence(error, value)}") from None


def _sentence(error: ValidationError, value: object) -> str:
    """What is wrong, where, and the way out. An unknown key goes first: it often explains the missing one."""
    faults = error.errors(include_url=False, include_context=True)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    place = fault["loc"]
    key = _key(place)
    if fault["type"] == "extra_forbidden":
        known = _keys_at(place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {key}; {way_out}"
    if fault["type"] == "missing":
        return f"the key {key} is missing"
    if fault["type"] == "value_error":
        reason = fault["ctx"]["error"]
        if isinstance(reason, Conflict):
            return str(reason)
        return f"{key} is {_shown(value, place)}; {reason}"
    message = str(fault["msg"])
    return f"{key} is {_shown(value, place)}; {message[0].lower()}{message[1:]}"


def _key(place: tuple[str | int, ...]) -> str:
    """A place as dotted keys; keys that do not print are escaped, long ones cut."""
    text = ".".join(str(step) for step in place)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 120 else text[:119] + "…"


def _shown(value: Any, place: tuple[str | int, ...]) -> str:
    """The value at a place, as a message shows it."""
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return "missing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _keys_at(place: tuple[str | int, ...]) -> list[str]:
    """The keys that are allowed at a place of the description."""
    part: type[BaseModel] = Corpus
    for step in place:
        if isinstance(step, int):
            continue
        inner = _part_of(part.model_fields[step].annotation)
        assert inner is not None
        part = inner
    return list(part.model_fields)


def _part_of(annotation: Any) -> type[BaseModel] | None:
    """The sub-model in an annotation such as `Licence | None` or `tuple[Source, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for choice in get_args(annotation) if (part := _part_of(choice)) is not None), None)
