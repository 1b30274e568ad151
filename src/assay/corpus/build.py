"""From a corpus description to shards, with every document accounted for.

`build` publishes its folder whole or not at all: tokenizer, training shards, validation shard, licences,
the names of all admitted and all rejected documents, and `corpus.json`, the receipt. The same sources
and description give the same bytes. It does not touch a queue.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus import tokenizer as tokenizers
from assay.corpus.description import Corpus, Description, Source
from assay.corpus.documents import STAGES, Document, Rejected, documents, refusal, source_digest, source_path
from assay.corpus.tokenizer import Tokenizer
from assay.data.shard import Shard, write_shard
from assay.data.shard import Source as Range
from assay.errors import DataError, Refused
from assay.files.digest import digest_file
from assay.files.publish import publish_folder, refuse_existing
from assay.files.reading import inside, read_bytes

FORMAT = "assay-corpus/1"
RECEIPT = "corpus.json"
DESCRIPTION = "corpus.yaml"
REJECTED = "rejected.jsonl"
ADMITTED = "admitted.jsonl"
TOKENIZER = "tokenizer"
LICENCES = "licences"
VALIDATION = "validation"
_SPOOL = "spool"

Tell = Callable[[str, int, int | None], None]  # stage, documents done, documents in all when known


def _silent(stage: str, done: int, total: int | None) -> None:
    """No progress is shown."""


@dataclass
class _Sorting:
    """What became of the documents so far: counts by source and, for the admitted, by part."""

    read: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    admitted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # source, stage, reason


@dataclass
class _Tokenizing:
    """Filled while the shards are written."""

    training: NDArray[np.int64]  # how often each id occurs in the training shards
    lossy: Counter[str] = field(default_factory=Counter)  # by source
    tokens: Counter[str] = field(default_factory=Counter)  # by source, all shards
    text_bytes: Counter[str] = field(default_factory=Counter)


def part_names(corpus: Corpus) -> list[str]:
    """The shards of a corpus: `train-00`, `train-01`, … and `validation`."""
    return [*(f"train-{number:02}" for number in range(corpus.shards)), VALIDATION]


def part_of(key: str, corpus: Corpus) -> str:
    """The shard of all documents with this key: a function of the key and the description, of nothing else."""
    if _share(VALIDATION, key) < int(corpus.validation.fraction * 2**64):
        return VALIDATION
    return f"train-{_share('shard', key) % corpus.shards:02}"


def _share(purpose: str, key: str) -> int:
    """A number below 2^64 that looks random and depends on purpose and key alone."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{key}".encode()).digest()[:8], "big")


def build(description: Description, out: Path, tell: Tell = _silent) -> dict[str, Any]:
    """Build the corpus into the new folder `out` and return its receipt.

    Raises InputError (description, tokenizer, `out` taken), DataError (a source missing, not the pinned
    bytes, or changing; a shard without documents), Refused (admission let nothing in).
    """
    corpus = description.corpus
    refuse_existing(out)
    sources = {source.name: source_digest(source, description.folder) for source in corpus.sources}
    with publish_folder(out) as folder:
        (folder / DESCRIPTION).write_bytes(description.data)
        sorting = _sort(description, folder, tell)
        _expect_documents(description, sorting)
        data = _tokenizer_bytes(description, folder, tell)
        (folder / TOKENIZER).mkdir()
        (folder / TOKENIZER / tokenizers.FILE).write_bytes(data)
        tokenizer = tokenizers.from_bytes(data, corpus.end_of_text, _tokenizer_name(description))
        done = _Tokenizing(np.zeros(tokenizer.vocabulary, dtype=np.int64))
        with (folder / ADMITTED).open("w", encoding="utf-8", newline="\n") as listing:
            shards = [_write(part, corpus, folder, tokenizer, done, listing, tell) for part in part_names(corpus)]
        shutil.rmtree(folder / _SPOOL)
        licences = _carry_licences(description, folder)
        receipt = _receipt(description, sources, sorting, tokenizer, done, shards, licences, folder)
        text = json.dumps(receipt, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / RECEIPT).write_bytes(text.encode("utf-8"))
    return receipt


def build_tokenizer(description: Description, out: Path, tell: Tell = _silent) -> dict[str, Any]:
    """Train (or take) the corpus's tokenizer alone into the new folder `out`; the same bytes as `build`'s.

    Returns the counts of documents; raises what `build` raises.
    """
    corpus = description.corpus
    refuse_existing(out)
    for source in corpus.sources:
        source_digest(source, description.folder)
    with publish_folder(out) as folder:
        sorting = _sort(description, folder, tell)
        _expect_documents(description, sorting)
        data = _tokenizer_bytes(description, folder, tell)
        (folder / tokenizers.FILE).write_bytes(data)
        tokenizer = tokenizers.from_bytes(data, corpus.end_of_text, _tokenizer_name(description))
        shutil.rmtree(folder / _SPOOL)
    return {
        **_counts(sorting),
        "tokens": None,
        "by_source": {name: _source_counts(name, sorting) for name in sorted(s.name for s in corpus.sources)},
        "shards": [],
        "tokenizer": _tokenizer_facts(corpus, tokenizer),
    }


def _sort(description: Description, folder: Path, tell: Tell) -> _Sorting:
    """Every document to its part's spool or, by name, to `rejected.jsonl`."""
    corpus = description.corpus
    sorting = _Sorting()
    (folder / _SPOOL).mkdir()
    with ExitStack() as stack:

        def opened(path: Path) -> IO[str]:
            return stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))

        spools = {part: opened(folder / _SPOOL / f"{part}.jsonl") for part in part_names(corpus)}
        rejected = opened(folder / REJECTED)
        for number, item in enumerate(documents(corpus, description.folder), start=1):
            sorting.read[item.source] += 1
            if isinstance(item, Rejected):
                sorting.rejected[item.source, item.stage, item.reason] += 1
                _line(rejected, asdict(item))
            else:
                part = part_of(item.key, corpus)
                sorting.admitted[item.source] += 1
                sorting.parts[part] += 1
                _line(spools[part], asdict(item))
            if number % 1000 == 0:
                tell("read and admit", number, None)
    return sorting


def _line(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _spooled(part: str, folder: Path) -> Iterator[Document]:
    """The admitted documents of a part, normalised, sources by name."""
    with (folder / _SPOOL / f"{part}.jsonl").open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield Document(**json.loads(line))


def _expect_documents(description: Description, sorting: _Sorting) -> None:
    """Refuse to go on when admission let nothing in, or a part stays empty."""
    corpus = description.corpus
    if not sorting.admitted:
        reasons = Counter[str]()
        for (source, _, reason), count in sorting.rejected.items():
            reasons[f"{source}: {reason}"] += count
        told = "; ".join(f"{count} of {reason}" for reason, count in sorted(reasons.items())) or "the sources are empty"
        raise Refused(f"corpus {corpus.name!r} admits no document ({told}); correct the licence records or filters")
    for part in part_names(corpus):
        if not sorting.parts[part]:
            raise DataError(
                f"corpus {corpus.name!r}: of {sorting.admitted.total()} admitted documents none falls into {part}; "
                "add text, lower `shards`, or change `validation.fraction`"
            )


def _tokenizer_name(description: Description) -> str:
    choice = description.corpus.tokenizer
    return "the trained tokenizer" if choice.path is None else str(description.folder / choice.path)


def _tokenizer_bytes(description: Description, folder: Path, tell: Tell) -> bytes:
    """The given `tokenizer.json`, or one trained on the training documents (never on validation)."""
    corpus = description.corpus
    if corpus.tokenizer.path is not None:
        path = inside(description.folder, corpus.tokenizer.path, "tokenizer.path")
        return read_bytes(path, "a tokenizer.json")
    assert corpus.tokenizer.train is not None  # one of the two is given
    tell("train the tokenizer", 0, None)
    training = (part for part in part_names(corpus) if part != VALIDATION)
    texts = (document.text for part in training for document in _spooled(part, folder))
    return tokenizers.train(texts, corpus.tokenizer.train.vocabulary, corpus.end_of_text)


def _write(
    part: str,
    corpus: Corpus,
    folder: Path,
    tokenizer: Tokenizer,
    done: _Tokenizing,
    listing: IO[str],
    tell: Tell,
) -> Shard:
    """Tokenize one part into its shard and name its documents in `admitted.jsonl`."""
    by_name = {source.name: source for source in corpus.sources}
    ranges: list[Range] = []
    text_bytes: list[int] = []

    def encoded() -> Iterator[NDArray[np.uint32]]:
        reached = 0
        for batch in batches(_spooled(part, folder)):
            coded = tokenizers.encode(tokenizer, [document.text for document in batch])
            for document, (ids, exact) in zip(batch, coded, strict=True):
                size = len(document.text.encode("utf-8"))
                stop = reached + len(ids)
                _extend(ranges, by_name[document.source], reached, stop)
                _line(
                    listing,
                    {
                        "id": document.id,
                        "source": document.source,
                        "line": document.line,
                        "title": document.title,
                        "shard": part,
                        "start": reached,
                        "stop": stop,
                        "text_bytes": size,
                        "lossy": not exact,
                    },
                )
                reached = stop
                text_bytes.append(size)
                done.tokens[document.source] += len(ids)
                done.text_bytes[document.source] += size
                done.lossy[document.source] += not exact
                if part != VALIDATION:
                    np.add.at(done.training, ids, 1)
                yield ids
            tell(f"tokenize {part}", len(text_bytes), None)

    return write_shard(
        folder / part,
        encoded(),
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.digest,
        end_of_text=tokenizer.end_of_text,
        pool=corpus.pool,
        sources=ranges,
        text_bytes=text_bytes,
    )


def batches(items: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about `tokenizer.BATCH_CHARACTERS`, in their order."""
    batch: list[Document] = []
    size = 0
    for document in items:
        batch.append(document)
        size += len(document.text)
        if size >= tokenizers.BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _extend(ranges: list[Range], source: Source, start: int, stop: int) -> None:
    """Add the tokens [start, stop) to the last range, or begin a new one where the source changes."""
    if ranges and ranges[-1].name == source.name:
        ranges[-1] = replace(ranges[-1], stop=stop)
        return
    assert source.licence is not None  # admission let it in
    ranges.append(Range(source.name, start, stop, source.language, source.licence.spdx, source.revision))


def _carry_licences(description: Description, folder: Path) -> dict[str, str]:
    """Copy the licence files of all admitted sources beside the shards; their digests by path."""
    carried: dict[str, str] = {}
    for source in description.corpus.sources:
        if source.licence is None or refusal(source, description.corpus, description.folder) is not None:
            continue
        for name in source.licence.files:
            target = folder / LICENCES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(inside(description.folder, name, f"source {source.name!r}: licence.files"), target)
            carried[f"{LICENCES}/{name}"] = digest_file(target)
    return dict(sorted(carried.items()))


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the relative frequencies in nats: log n − Σ c log c ÷ n. What a model knows that knows only them."""
    total = int(counts.sum())
    return math.log(total) - math.fsum(int(c) * math.log(int(c)) for c in counts[counts > 0]) / total


def _counts(sorting: _Sorting) -> dict[str, Any]:
    """Documents, admitted and rejected by reason; their sum is checked, always."""
    rejected = Counter[str]()
    for (_, _, reason), count in sorting.rejected.items():
        rejected[reason] += count
    read, admitted = sorting.read.total(), sorting.admitted.total()
    assert read == admitted + rejected.total(), "a document was lost or doubled"
    return {"documents": read, "admitted": admitted, "rejected": dict(sorted(rejected.items()))}


def _source_counts(name: str, sorting: _Sorting) -> dict[str, int]:
    rejected = sum(count for (source, _, _), count in sorting.rejected.items() if source == name)
    return {"documents": sorting.read[name], "admitted": sorting.admitted[name], "rejected": rejected}


def _stages(sorting: _Sorting) -> list[dict[str, Any]]:
    """What went into each stage, what came out, and why the rest did not."""
    remaining = sorting.read.total()
    stages = []
    for stage in STAGES:
        reasons = Counter[str]()
        for (_, where, reason), count in sorting.rejected.items():
            if where == stage:
                reasons[reason] += count
        left = remaining - reasons.total()
        stages.append({"stage": stage, "in": remaining, "out": left, "rejected": dict(sorted(reasons.items()))})
        remaining = left
    return stages


def _tokenizer_facts(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "sha256": tokenizer.digest,
        "trained": corpus.tokenizer.train is not None,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": corpus.end_of_text,
        "end_of_text_id": tokenizer.end_of_text,
    }


def _receipt(
    description: Description,
    sources: dict[str, str],
    sorting: _Sorting,
    tokenizer: Tokenizer,
    done: _Tokenizing,
    shards: list[Shard],
    licences: dict[str, str],
    folder: Path,
) -> dict[str, Any]:
    """`corpus.json`: counts, digests and licences; integers and decimal strings only."""
    corpus = description.corpus
    by_source: dict[str, Any] = {}
    for source in sorted(corpus.sources, key=lambda source: source.name):
        refused = refusal(source, corpus, description.folder)
        by_source[source.name] = {
            **_source_counts(source.name, sorting),
            "tokens": done.tokens[source.name],
            "text_bytes": done.text_bytes[source.name],
            "lossy": done.lossy[source.name],
            "language": source.language,
            "licence": None if source.licence is None else source.licence.model_dump(mode="json"),
            "refused": None if refused is None else f"{refused[0]}: {refused[1]}",
            "revision": source.revision,
            "retrieved": source.retrieved,
            "sha256": sources[source.name],
            "bytes": source_path(source, description.folder).stat().st_size,
        }
    return {
        "format": FORMAT,
        "name": corpus.name,
        "pool": corpus.pool,
        "description": description.digest,
        **_counts(sorting),
        "stages": _stages(sorting),
        "tokens": sum(shard.tokens for shard in shards),
        "lossy": done.lossy.total(),
        "by_source": by_source,
        "tokenizer": _tokenizer_facts(corpus, tokenizer),
        "shards": [_shard_facts(shard) for shard in shards],
        "unigram_entropy_nats": f"{entropy(done.training):.6f}",
        "normalise": corpus.normalise,
        "unicode": unicodedata.unidata_version,
        "software": {"tokenizers": version("tokenizers")},
        "licences": licences,
        "files": {name: digest_file(folder / name) for name in (ADMITTED, DESCRIPTION, REJECTED)},
    }


def _shard_facts(shard: Shard) -> dict[str, Any]:
    ends = shard.text_bytes_end
    assert ends is not None  # `_write` gives them
    return {
        "path": shard.path.name,
        "tokens": shard.tokens,
        "documents": shard.documents,
        "dtype": shard.dtype,
        "sha256": shard.sha256,
        "text_bytes": int(ends[-1]),
        "by_source": {source.name: source.stop - source.start for source in shard.sources},
    }
