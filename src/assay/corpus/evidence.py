"""What a data card may say: a built corpus's receipt, and the two files that it names by digest.

`corpus.yaml` gives what was asked for, `admitted.jsonl` the licence of each document. What only a publisher
knows (address, creator, date, version) is given by them or not stated. No text is read and nothing is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.corpus import looking
from assay.corpus.description import DATE, Corpus, load
from assay.corpus.receipt import ADMITTED, DESCRIPTION, RECEIPT
from assay.errors import DataError, InputError
from assay.files.digest import digest_file

_URL = re.compile(r"https?://[^\s<>|`\"]+")
_VERSION = re.compile(r"(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_MEASURES = {
    "language": "language of each document",
    "near duplicates": "near duplicates",
    "decontamination": "overlap with evaluation sets",
}


@dataclass(frozen=True)
class Publication:
    """What no receipt of a build can know; None is shown as not stated. `published` is a date, 2026-11-30."""

    url: str | None = None
    creator: str | None = None
    published: str | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        """InputError for what Croissant would not take."""
        for option, value, pattern, expected in (
            ("--url", self.url, _URL, "an address such as https://example.org/corpus"),
            ("--published", self.published, DATE, "a date such as 2026-11-30"),
            ("--version", self.version, _VERSION, "a version such as 1.0.0 (MAJOR.MINOR.PATCH)"),
        ):
            if value is not None and not pattern.fullmatch(value):
                raise InputError(f"{option} is {value!r}; {expected} is expected")
        if self.creator is not None and not self.creator.strip():
            raise InputError("--creator is empty; name the person or organisation, or leave it out")


@dataclass(frozen=True)
class Facts:
    """The receipt with its digest, the description, and how many admitted documents of a source have which licence."""

    receipt: dict[str, Any]
    sha256: str
    corpus: Corpus
    documents: dict[str, dict[str, int]]  # source → licence → admitted documents
    publication: Publication

    @property
    def licences(self) -> dict[str, int]:
        """Admitted documents by licence, the most frequent first."""
        counts = Counter[str]()
        for found in self.documents.values():
            counts.update(found)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def languages(self) -> dict[str, int]:
        """Admitted documents by the language of their source."""
        counts = Counter[str]()
        for source in self.receipt["by_source"].values():
            counts[source["language"]] += source["admitted"]
        return dict(sorted(counts.items()))

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the admitted documents after normalisation."""
        return sum(int(source["text_bytes"]) for source in self.receipt["by_source"].values())

    @property
    def sources(self) -> int:
        """Sources from which something was admitted."""
        return sum(source["admitted"] > 0 for source in self.receipt["by_source"].values())

    @property
    def not_measured(self) -> list[str]:
        """What the stages that were not asked for would have measured."""
        return [_MEASURES[stage] for stage in self.not_asked if stage in _MEASURES]

    @property
    def not_asked(self) -> list[str]:
        """Stages that the description did not ask for: what they would find was not measured."""
        return list(self.receipt["not_asked"])

    def split(self, shard: dict[str, Any]) -> str:
        """`train` or `validation`, for a shard of the receipt."""
        return "validation" if shard["path"] == "validation" else "train"


def facts(out: Path, publication: Publication) -> Facts:
    """Read a built corpus's evidence. Raises what `looking.receipt` raises, DataError for another description."""
    receipt = looking.receipt(out)
    path = out / DESCRIPTION
    if not path.is_file():
        raise DataError(f"{path} is missing; build the corpus again")
    if digest_file(path) != receipt["files"].get(DESCRIPTION):
        raise DataError(f"{path} is not the file that {RECEIPT} names by digest; build the corpus again")
    documents: dict[str, Counter[str]] = {name: Counter() for name in receipt["by_source"]}
    for record in looking.records(out / ADMITTED):
        documents[record["source"]][record["licence"] or "not stated"] += 1
    counted = {name: dict(sorted(found.items())) for name, found in documents.items()}
    return Facts(receipt, digest_file(out / RECEIPT), load(path).corpus, counted, publication)
