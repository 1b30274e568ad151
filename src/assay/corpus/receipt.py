"""`corpus.json`: what a build read, admitted, rejected and wrote, by source and stage, with every digest.

Integers and decimal strings only. A stage that was not asked for is named as such and has no counts. Counts
come from what was written, never from what was expected.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus.admission import refusal
from assay.corpus.description import Corpus, Description
from assay.corpus.documents import STAGES
from assay.corpus.selection import Quota, shares
from assay.corpus.shards import REJECTED, Accounts, Counts, Written, token_counts
from assay.corpus.sources import Surveyed
from assay.corpus.tokenizer import Tokenizer
from assay.data.shard import Shard
from assay.files.digest import digest_file

FORMAT = "assay-corpus/1"
RECEIPT = "corpus.json"
DESCRIPTION = "corpus.yaml"
ADMITTED = "admitted.jsonl"
CONTAMINATION = "contamination.jsonl"
TOKENIZER = "tokenizer"
LICENCES = "licences"
NEAR = "near-duplicates"


@dataclass(frozen=True)
class Built:
    """All that the receipt tells."""

    description: Description
    surveyed: list[Surveyed]
    accounts: Accounts
    tokenizer: Tokenizer
    written: list[Written]
    quota: Quota | None
    held_out_found: dict[str, int] | None
    methods: dict[str, Any]
    pieces: dict[str, dict[str, Any]]
    licences: dict[str, str]


def receipt(built: Built, folder: Path) -> dict[str, Any]:
    """The receipt of what stands in `folder`."""
    corpus = built.description.corpus
    counts = Counts()
    for written in built.written:
        counts.add(written.counts)
    admitted = counts.admitted.total()
    assert built.accounts.documents == admitted + built.accounts.rejected.total(), "a document was lost or doubled"
    asked = asked_stages(corpus)
    names = (ADMITTED, DESCRIPTION, REJECTED, *((CONTAMINATION,) if corpus.decontamination is not None else ()))
    return {
        "format": FORMAT,
        "name": corpus.name,
        "pool": corpus.pool,
        "description": built.description.digest,
        "documents": built.accounts.documents,
        "admitted": admitted,
        "rejected": rejected_by_reason(built.accounts),
        "stages": _stages(built.accounts, asked),
        "not_asked": [stage for stage in STAGES if stage not in asked],
        "methods": plain(built.methods),
        "pieces": built.pieces,
        "tokens": sum(written.shard.tokens for written in built.written),
        "lossy": counts.lossy.total(),
        "lossy_by": _lossy(counts),
        "by_source": _by_source(built, counts),
        "by_language": _by_language(corpus, built.written),
        "mix": None if corpus.mix is None else {name: str(share) for name, share in sorted(corpus.mix.items())},
        "target": None
        if corpus.target_tokens is None
        else {"tokens": corpus.target_tokens, "short": built.quota.short if built.quota is not None else 0},
        "held_out": built.held_out_found,
        "tokenizer": tokenizer_facts(corpus, built.tokenizer),
        "shards": [shard_facts(written.shard) for written in built.written],
        "unigram_entropy_nats": f"{entropy(_training_counts(built.written)):.6f}",
        "normalise": corpus.normalise,
        "unicode": unicodedata.unidata_version,
        "software": {name: version(name) for name in ("pyarrow", "tokenizers", "zstandard")},
        "licences": built.licences,
        "files": {name: digest_file(folder / name) for name in names},
    }


def as_file(facts: dict[str, Any]) -> bytes:
    """The receipt as it is written."""
    return (json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def asked_stages(corpus: Corpus) -> list[str]:
    """The stages that a description asks for."""
    switches = {
        "language": corpus.language.identify,
        "near duplicates": corpus.duplicates.near is not None,
        "decontamination": corpus.decontamination is not None,
        "target": corpus.target_tokens is not None or corpus.mix is not None,
    }
    return [stage for stage in STAGES if switches.get(stage, True)]


def rejected_by_reason(accounts: Accounts) -> dict[str, int]:
    """How many documents left, by reason."""
    reasons = Counter[str]()
    for (_, _, reason), count in accounts.rejected.items():
        reasons[reason] += count
    return dict(sorted(reasons.items()))


def source_counts(name: str, accounts: Accounts) -> dict[str, int]:
    """Documents, admitted and rejected of one source."""
    rejected = sum(count for (source, _, _), count in accounts.rejected.items() if source == name)
    read = accounts.read[name]
    return {"documents": read, "admitted": read - rejected, "rejected": rejected}


def tokenizer_facts(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """What identifies the tokenizer."""
    return {
        "sha256": tokenizer.digest,
        "trained": corpus.tokenizer.train is not None,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": corpus.end_of_text,
        "end_of_text_id": tokenizer.end_of_text,
    }


def shard_facts(shard: Shard) -> dict[str, Any]:
    """What identifies a shard and what it adds up to."""
    ends = shard.text_bytes_end
    assert ends is not None  # `write_part` gives them
    by_source = Counter[str]()
    for source in shard.sources:
        by_source[source.name] += source.stop - source.start
    return {
        "path": shard.path.name,
        "tokens": shard.tokens,
        "documents": shard.documents,
        "dtype": shard.dtype,
        "sha256": shard.sha256,
        "text_bytes": int(ends[-1]),
        "by_source": dict(by_source),
    }


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the relative frequencies in nats: log n − Σ c log c ÷ n. What a model knows that knows only them."""
    total = int(counts.sum())
    return math.log(total) - math.fsum(int(c) * math.log(int(c)) for c in counts[counts > 0]) / total


def plain(value: Any) -> Any:
    """A value with its floats as decimal strings."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _training_counts(written: list[Written]) -> NDArray[np.int64]:
    """How often each id occurs in the training shards; the last part is validation."""
    counts = token_counts(written[0].shard)
    for each in written[1:-1]:
        counts += token_counts(each.shard)
    return counts


def _stages(accounts: Accounts, asked: list[str]) -> list[dict[str, Any]]:
    """What went into each stage, what came out, and why the rest did not."""
    remaining = accounts.documents
    stages = []
    for stage in asked:
        reasons = Counter[str]()
        for (_, where, reason), count in accounts.rejected.items():
            if where == stage:
                reasons[reason] += count
        left = remaining - reasons.total()
        stages.append({"stage": stage, "in": remaining, "out": left, "rejected": dict(sorted(reasons.items()))})
        remaining = left
    return stages


def _lossy(counts: Counts) -> list[dict[str, Any]]:
    """Admitted documents that decoding does not give back, by source, reason and first byte that differs."""
    order = sorted(
        counts.lossy.items(), key=lambda item: (item[0][0], item[0][1], -1 if item[0][2] is None else item[0][2])
    )
    return [
        {"source": source, "reason": reason, "byte": None if byte is None else f"0x{byte:02x}", "documents": count}
        for (source, reason, byte), count in order
    ]


def _by_source(built: Built, counts: Counts) -> dict[str, Any]:
    corpus, folder = built.description.corpus, built.description.folder
    result = {}
    for source, found in sorted(zip(corpus.sources, built.surveyed, strict=True), key=lambda pair: pair[0].name):
        refused = refusal(source, corpus, folder)
        expected = source_counts(source.name, built.accounts)
        assert expected["admitted"] == counts.admitted[source.name], "a document was lost or doubled"
        result[source.name] = {
            **expected,
            "tokens": counts.tokens[source.name],
            "text_bytes": counts.text_bytes[source.name],
            "lossy": sum(count for (name, _, _), count in counts.lossy.items() if name == source.name),
            "language": source.language,
            "licence": None if source.licence is None else source.licence.model_dump(mode="json"),
            "refused": None if refused is None else f"{refused[0]}: {refused[1]}",
            "revision": source.revision,
            "retrieved": source.retrieved,
            "sha256": found.sha256,
            "bytes": found.bytes,
            "files": len(found.files),
            "files_of_other_formats": found.passed_over,
            **({} if found.checked is None else {"fetched_and_checked_by": found.checked}),
        }
    return result


def _by_language(corpus: Corpus, written: list[Written]) -> dict[str, dict[str, Any]]:
    """Tokens and bytes of the training shards by language, with their shares."""
    language = {source.name: source.language for source in corpus.sources}
    counts: dict[str, dict[str, int]] = {name: {"tokens": 0, "text_bytes": 0} for name in language.values()}
    for each in written[:-1]:
        for source, tokens in each.counts.tokens.items():
            counts[language[source]]["tokens"] += tokens
            counts[language[source]]["text_bytes"] += each.counts.text_bytes[source]
    return shares(counts)
