"""The corpus description: every key of a file under `corpora/`, its type, its default and what is allowed.

A `Corpus` that exists is consistent. A source whose licence record is incomplete can be described:
admission refuses it by name, with all its documents. Reads the description, not the sources.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from assay.errors import InputError
from assay.files.digest import canonical, digest
from assay.files.reading import read_text
from assay.recipe.fields import NAME, Conflict, Count, Digest, Natural, Part, RelativePath, Text
from assay.recipe.load import parse_yaml

SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
REMOTE = re.compile(r"([a-z][a-z0-9+.-]*)://(\S+)")
REMOTE_KINDS = ("hf", "s3")
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of text
ADMITTED = "admitted"  # how the decision of a licence record begins that lets a text in


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
    return value if value is None or isinstance(value, str) else str(value)


def _remote(value: str) -> str:
    found, rest = REMOTE.fullmatch(value), value.partition("://")[2]
    if "?" in rest or "@" in rest.partition("/")[0]:  # the sentence of a Conflict does not repeat the value
        raise Conflict("the path of a remote source or tokenizer holds '?' or '@' where its place is expected; give "
                       "credentials by the environment, such as AWS_ACCESS_KEY_ID, not in the path")  # fmt: skip
    if found is None or found[1] not in REMOTE_KINDS:
        raise ValueError("a path inside the description's folder, hf://… or s3://… is expected")
    return value


Name = Annotated[str, _matching(NAME, "a name of letters, digits, '.', '_' and '-'")]
Spdx = Annotated[str, _matching(SPDX, "an SPDX licence id such as CC-BY-SA-3.0")]
Language = Annotated[str, _matching(LANGUAGE, "a language code such as en or pl")]
Date = Annotated[str, _matching(DATE, "a date such as 2026-11-30")]
Share = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[int | float, Field(ge=-1e300, le=1e300)]
Plain = int | float | bool | str


def _place(value: object) -> object:
    """A source's path: local and relative, or remote."""
    return value if not isinstance(value, str) else (_remote(value) if "://" in value else value)


Place = Annotated[RelativePath, BeforeValidator(_place)]


def is_remote(path: str) -> bool:
    """Whether a source's path names a place on the network, such as hf:// or s3://."""
    return REMOTE.fullmatch(path) is not None


class Columns(Part):
    """Which key of a record is what. `id` null: named by file and position. `licence`: stated by each document."""

    id: Text | None = "id"
    text: Text = "text"
    title: Text | None = None
    licence: Text | None = None


class Licence(Part):
    """The licence record: what the licence is, how that is known, and who decided that it may enter.

    `spdx` is one licence for the whole source; without it each document states its own in `columns.licence`.
    `records`: a file with a record for each title instead; a document without an admitted record is rejected.
    `files` are carried along with the shards, for licences that ask for it. A decision that does not begin
    with `admitted`, or is missing like the evidence, refuses the source.
    """

    spdx: Spdx | None = None
    evidence: str | None = None
    decision: str | None = None
    records: RelativePath | None = None
    attribution: str | None = None
    files: Annotated[tuple[RelativePath, ...], BeforeValidator(_listed)] = ()

    @model_validator(mode="after")
    def _one(self) -> Licence:
        if self.records is not None and (self.spdx, self.evidence, self.decision) != (None, None, None):
            raise Conflict(
                "licence.records is given beside spdx, evidence or decision; records carry these for each title, "
                "so give one of the two"
            )
        return self


class Predicate(Part):
    """What a document's column must be; the conditions that are given all hold."""

    column: Text
    at_least: Number | None = None
    at_most: Number | None = None
    equals: Plain | None = None
    one_of: Annotated[tuple[Plain, ...], BeforeValidator(_listed), Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _some(self) -> Predicate:
        if (self.at_least, self.at_most, self.equals, self.one_of) == (None, None, None, None):
            raise Conflict(f"the predicate of column {self.column} asks for nothing; give at_least, at_most, equals "
                           "or one_of")  # fmt: skip
        return self


class Filters(Part):
    """Lengths in Unicode characters after normalisation (null: no upper bound), and predicates over columns."""

    min_chars: Natural = 0
    max_chars: Count | None = None
    columns: Annotated[tuple[Predicate, ...], BeforeValidator(_listed)] = ()

    @model_validator(mode="after")
    def _fit(self) -> Filters:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise Conflict(f"filters.max_chars is {self.max_chars}; it must be at least min_chars ({self.min_chars})")
        return self


class Source(Part):
    """A named origin of documents: a file, or a folder of files of one format.

    `sha256` pins the bytes (of a folder: the names and digests of its files); null: not pinned. `config` and
    `split` belong to hf:// data sets. `filters` replaces the corpus's filters for this source.
    """

    name: Name
    path: Place
    format: Literal["jsonl", "parquet", "text"] = "jsonl"
    config: Text | None = None
    split: Text | None = None
    columns: Columns = Columns()
    language: Language
    licence: Licence | None = None
    filters: Filters | None = None
    revision: Text | None
    retrieved: Annotated[Date | None, BeforeValidator(_dated)]
    sha256: Digest | None = None

    @model_validator(mode="after")
    def _fit(self) -> Source:
        if (self.config, self.split) != (None, None) and not self.path.startswith("hf://"):
            raise Conflict(f"source {self.name}: config and split are for hf:// data sets; {self.path} is none")
        return self


class Admission(Part):
    """The licences that may enter, by SPDX id, and the lists of documents that other pools have reserved."""

    licences: Annotated[tuple[Spdx, ...], BeforeValidator(_listed), Field(min_length=1)]
    reserved: Annotated[tuple[RelativePath, ...], BeforeValidator(_listed)] = ()


class LanguageCheck(Part):
    """Whether each document's language is identified and compared with its source's."""

    identify: bool = False
    at_least: Share = 0.5


class Near(Part):
    """Near duplicates by MinHash over runs of `shingle` words, found by `bands` of `rows` numbers.

    Documents whose estimated similarity reaches `threshold` leave. `against`: the index of near duplicates that an
    earlier corpus kept (its folder `near-duplicates`), so that what it admitted counts as earlier.
    """

    threshold: Share = 0.75
    shingle: Annotated[int, Field(ge=1, le=100)] = 5
    bands: Annotated[int, Field(ge=1, le=256)] = 16
    rows: Annotated[int, Field(ge=1, le=64)] = 8
    seed: Natural = 1
    against: RelativePath | None = None


class Duplicates(Part):
    """The first document in corpus order stays. `near` null: only exact duplicates leave."""

    exact: bool = True
    near: Near | None = None


class Decontamination(Part):
    """Held-out texts that must not be trained on; they are kept outside the corpus and never carried along.

    `held_out`: files of items (.jsonl, whose texts are in `fields`, or .txt, an item a paragraph). A document leaves
    that holds `n` words in a row of an item, or the share `near` of its five-word grams.
    """

    held_out: Annotated[tuple[RelativePath, ...], BeforeValidator(_listed), Field(min_length=1)]
    fields: Annotated[tuple[Text, ...], BeforeValidator(_listed), Field(min_length=1)] = ("text",)
    n: Annotated[int, Field(ge=5, le=1000)] = 13
    near: Share = 0.5


class Train(Part):
    """A byte-level BPE tokenizer trained on the training documents."""

    vocabulary: Annotated[int, Field(ge=SMALLEST_VOCABULARY, le=1 << 24)]


class TokenizerChoice(Part):
    """Trained on the corpus, or a given `tokenizer.json`."""

    train: Train | None = None
    path: Place | None = None
    revision: Text | None = None

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
    """What a corpus is made of and how. Sources are read in the order in which they stand here."""

    name: Name
    pool: Name = "base"
    sources: Annotated[tuple[Source, ...], BeforeValidator(_listed), Field(min_length=1)]
    normalise: Literal["NFC", "NFKC", "none"] = "NFC"
    admission: Admission
    language: LanguageCheck = LanguageCheck()
    filters: Filters = Filters()
    duplicates: Duplicates = Duplicates()
    decontamination: Decontamination | None = None
    tokenizer: TokenizerChoice
    lossy: Literal["admit", "reject"] = "admit"
    end_of_text: Text = "<|endoftext|>"
    validation: Validation
    target_tokens: Count | None = None
    mix: dict[Language, Share] | None = None
    shards: Annotated[int, Field(ge=1, le=100)] = 1

    @model_validator(mode="after")
    def _fit(self) -> Corpus:
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise Conflict(f"sources: the name {name} is given twice; documents are known by their source's name")
        if self.mix is not None:
            _expect_mix(self.mix, {source.language for source in self.sources})
        return self


def _expect_mix(mix: dict[str, float], languages: set[str]) -> None:
    """Shares that add up to 1, one for each language of the sources."""
    total = sum(Decimal(str(share)) for share in mix.values())
    if total != 1:
        raise Conflict(f"mix: the shares add up to {total}; they must add up to 1")
    if set(mix) != languages:
        raise Conflict(
            f"mix names {', '.join(sorted(mix)) or 'no language'}; the sources have {', '.join(sorted(languages))}, "
            "and each needs its share"
        )


@dataclass(frozen=True)
class Description:
    """A description as read: the corpus, the folder that its paths are relative to, the bytes, the digest.

    The digest is of the RFC 8785 JSON of the resolved description: comments do not change it, the order of
    sources does, because it is the order of the corpus.
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
    return digest(canonical(corpus.model_dump(mode="json")))


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
