"""From a corpus description to shards, with every document accounted for.

`build` publishes its folder whole or not at all: tokenizer, training shards, validation shard, licences, the
names of all admitted and rejected documents, and `corpus.json`, the receipt. Until then its work lies in `OUT.work`,
where a build that was killed goes on. The same sources and description give the same bytes, whatever the
number of workers. It does not touch a queue.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from assay.corpus import duplicates, language, remote, reserved
from assay.corpus import tokenizer as tokenizers
from assay.corpus.admission import refusal
from assay.corpus.description import Corpus, Description
from assay.corpus.given import expect_given, given_tokenizer
from assay.corpus.near import Sign, near_duplicates, near_index, parameters, sign
from assay.corpus.on_ray import Cluster
from assay.corpus.pieces import Stage, as_line, code_digest, stage_key, work_folder
from assay.corpus.receipt import (
    ADMITTED,
    CONTAMINATION,
    DESCRIPTION,
    LICENCES,
    NEAR,
    RECEIPT,
    TOKENIZER,
    Built,
    as_file,
    plain,
    receipt,
    rejected_by_reason,
    source_counts,
    tokenizer_facts,
)
from assay.corpus.remote import DEADLINE, Remote
from assay.corpus.shards import (
    REJECTED,
    Accounts,
    Part,
    Written,
    documents_of,
    entered,
    list_rejected,
    listing,
    select,
    write_part,
)
from assay.corpus.sources import PIECE_BYTES, Piece, Surveyed, listed, sizes, survey
from assay.corpus.stages import (
    Clean,
    Decontaminate,
    Standing,
    Tokenize,
    clean,
    decontaminate,
    exact_duplicates,
    found_items,
    held_out,
    part_counts,
    part_names,
    tokenize,
    training_texts,
)
from assay.corpus.tokenizer import Tokenizer
from assay.corpus.workers import Helpers, Workers
from assay.errors import DataError, Interrupted, MachineError, Refused
from assay.files.digest import canonical, digest, digest_file
from assay.files.publish import publish_file, publish_folder, refuse_existing
from assay.files.reading import inside
from assay.files.retry import KEPT, Policy

Tell = Callable[[str, int, int | None, str], None]  # stage, done, in all when known, of what: "documents", "bytes"
Engine = Literal["local", "ray"]
Task = TypeVar("Task")
_LEAVING = ("duplicates", "decontamination", "near duplicates", "tokenize", "target")


def _silent(stage: str, done: int, total: int | None, unit: str) -> None:
    """No progress is shown."""


@dataclass
class _Work:
    """A build under way: its pieces, its stages so far, who helps."""

    description: Description
    folder: Path
    workers: Helpers
    tell: Tell
    brought: Remote
    surveyed: list[Surveyed]
    pieces: list[Piece]
    stages: dict[str, Stage] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    key: str = ""

    @property
    def corpus(self) -> Corpus:
        """What is built."""
        return self.description.corpus

    def stage(self, name: str, facts: Any) -> Stage:
        """The stage's folder, which depends on these facts and on all stages before."""
        self.key = stage_key(name, {"before": self.key, "facts": plain(facts)})
        self.stages[name] = Stage(self.folder / self.key)
        return self.stages[name]

    def every(self, what: str, work: Callable[[Task], dict[str, Any]], tasks: Iterable[Task], sizes: list[int],
              unit: str = "documents") -> None:  # fmt: skip
        """`work` of every piece, told with the sizes of the pieces."""
        done, total = 0, sum(sizes)
        self.tell(what, done, total, unit)
        for size, _ in zip(sizes, self.workers.each(work, tasks), strict=True):
            done += size
            self.tell(what, done, total, unit)

    def documents(self, standing: Standing) -> list[int]:
        """How many documents of each piece are still in, as the receipts count them."""
        counts = []
        for piece in self.pieces:
            records = [stage.receipt(piece.number) for stage in (standing.cleaned, *standing.since)]
            counts.append(
                sum(record["kept"] if "kept" in record else -record["rejected"] for record in records if record)
            )
        return counts

    @property
    def leaving(self) -> tuple[Stage, ...]:
        """The stages after cleaning in which documents leave, in their order."""
        return tuple(self.stages[name] for name in _LEAVING if name in self.stages)


def build(
    description: Description,
    out: Path,
    tell: Tell = _silent,
    workers: int | None = 1,
    on: Engine = "local",
    deadline: float = DEADLINE,
) -> dict[str, Any]:
    """Build the corpus into the new folder `out` and return its receipt. `workers` None: as many as are of use.

    `on` ray: the same work on a Ray cluster, whose machines share the file system of sources and `out`.

    Remote sources are brought into the work folder first; `deadline`: seconds without success for any call there.

    Raises InputError (description, tokenizer, held-out sets, `out` taken, a revision that is no commit), DataError (a
    source missing, not the pinned bytes, or changing; a shard without documents), Refused (nothing admitted; no access
    to a source; another build has the work folder), MachineError (a worker process died, a full disk), Interrupted
    (cause network: the deadline passed, or signal: Ctrl-C; the same call goes on where it was).
    """
    description, out = _placed(description, out, on)
    corpus = description.corpus
    with _working(description, out, tell, workers, on, deadline) as work:
        standing = _clean(work)
        tokenizer = _tokenizer(work, standing)
        encoded = _tokenize(work, standing, tokenizer)
        target = work.stage("target", {"tokens": corpus.target_tokens, "mix": corpus.mix})
        quota = select(corpus, work.pieces, encoded, target)
        if quota is None:
            del work.stages["target"]
        with publish_folder(out) as folder:
            (folder / DESCRIPTION).write_bytes(description.data)
            (folder / TOKENIZER).mkdir()
            (folder / TOKENIZER / tokenizers.FILE).write_bytes(tokenizer.data)
            written = _write(work, encoded, tokenizer, folder)
            cleaned = work.stages["clean"]
            work.tell("account for every document", 0, None, "documents")
            accounts = list_rejected(corpus, work.pieces, cleaned, work.leaving, encoded, folder / REJECTED)
            if corpus.duplicates.near is not None:
                numbers = partial(entered, encoded, work.stages.get("target"))
                index = near_index(corpus, description.folder, work.pieces, work.stages["signatures"], numbers)
                index.save(folder / NEAR)
            found = _contamination(work, folder)
            licences = _carry_licences(description, folder)
            made = _made(work)
            facts = receipt(
                Built(
                    description, work.surveyed, accounts, tokenizer, written, quota, found, work.methods, made, licences
                ),
                folder,
            )
            (folder / RECEIPT).write_bytes(as_file(facts))
    return facts


def build_tokenizer(
    description: Description,
    out: Path,
    tell: Tell = _silent,
    workers: int | None = 1,
    on: Engine = "local",
    deadline: float = DEADLINE,
) -> dict[str, Any]:
    """Train (or take) the corpus's tokenizer alone into the new folder `out`; the same bytes as `build`'s.

    Returns the counts of documents; raises what `build` raises.
    """
    description, out = _placed(description, out, on)
    corpus = description.corpus
    with _working(description, out, tell, workers, on, deadline) as work:
        tokenizer = _tokenizer(work, _clean(work))
        accounts = _so_far(work)
        with publish_folder(out) as folder:
            (folder / tokenizers.FILE).write_bytes(tokenizer.data)
    rejected = rejected_by_reason(accounts)
    return {
        "documents": accounts.documents,
        "admitted": accounts.documents - sum(rejected.values()),
        "rejected": rejected,
        "tokens": None,
        "by_source": {name: source_counts(name, accounts) for name in sorted(s.name for s in corpus.sources)},
        "shards": [],
        "tokenizer": tokenizer_facts(corpus, tokenizer),
    }


@contextmanager
def _working(
    description: Description, out: Path, tell: Tell, workers: int | None, on: Engine, deadline: float
) -> Iterator[_Work]:
    """Hashed sources, workers and the work folder, which goes when the block ends without error."""
    corpus = description.corpus
    refuse_existing(out)
    remote.expect_pinned(corpus)
    expect_given(description)
    with work_folder(out) as folder:
        try:
            brought = remote.bring(corpus, folder, Policy(deadline), tell)
            count = _count(description, brought) if workers is None and on == "local" else workers
            with Cluster(description.folder, folder, count) if on == "ray" else Workers(count or 1) as helpers:
                surveyed, pieces = survey(corpus, description.folder, helpers, tell, brought.sources)
                if brought.tokenizer is not None:
                    given_tokenizer(description, brought.tokenizer)
                yield _Work(description, folder, helpers, tell, brought, surveyed, pieces)
        except KeyboardInterrupt:
            raise Interrupted(f"the build of {out} was stopped; {KEPT}", "signal") from None
        except OSError as fault:  # a full disk, most often
            raise MachineError(
                f"{out} could not be built: {fault}; mend that and build again: it goes on where it was"
            ) from None


def _placed(description: Description, out: Path, on: Engine) -> tuple[Description, Path]:
    """Absolute places for machines that have another working folder; nothing that is written depends on them."""
    if on == "local":
        return description, out
    return replace(description, folder=description.folder.absolute()), out.absolute()


def _count(description: Description, brought: Remote) -> int:
    """How many processes are of use: a piece each, no more than processors. A small corpus needs no second one."""
    sources = description.corpus.sources
    files = [path for s in sources for _, path in listed(s, description.folder, brought.sources.get(s.name))[0]]
    pieces = sum(path.stat().st_size for path in files) // PIECE_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), pieces))


def _clean(work: _Work) -> Standing:
    """All stages before the tokenizer; what is still in."""
    corpus, pieces, folder = work.corpus, work.pieces, work.description.folder
    cleaned = work.stage("clean", _clean_facts(work))
    tasks = [Clean(corpus, folder, cleaned, piece) for piece in pieces]
    work.every("read and admit", clean, tasks, sizes(pieces), "bytes")
    standing = Standing(cleaned)
    doubled = work.stage("duplicates", {"exact": corpus.duplicates.exact})
    documents = sum(work.documents(standing))
    exact_duplicates(
        corpus, pieces, standing, doubled, lambda done: work.tell("exact duplicates", done, documents, "documents")
    )
    standing = standing.then(doubled)
    if corpus.decontamination is not None:
        work.methods["decontamination"] = held_out(corpus, folder).method()
        fields = {"fields": list(corpus.decontamination.fields)}
        found = work.stage("decontamination", {**work.methods["decontamination"], **fields})
        looking = [Decontaminate(corpus, folder, standing, found, piece) for piece in pieces]
        work.every("decontaminate", decontaminate, looking, work.documents(standing))
        standing = standing.then(found)
    near = corpus.duplicates.near
    if near is not None:
        asked = parameters(corpus)
        work.methods["near duplicates"] = duplicates.method(asked)
        signed = work.stage("signatures", work.methods["near duplicates"])
        counts = work.documents(standing)
        work.every("sign", sign, [Sign(asked, standing, signed, piece) for piece in pieces], counts)
        against = None if near.against is None else digest_file(folder / near.against / duplicates.HEADER)
        alike = work.stage("near duplicates", {"against": against, "name": corpus.name})
        documents = sum(counts)
        near_duplicates(
            corpus,
            folder,
            pieces,
            signed,
            alike,
            lambda done: work.tell("near duplicates", done, documents, "documents"),
        )
        standing = standing.then(alike)
    _expect_documents(work, part_counts(corpus, pieces, standing))
    return standing


def _clean_facts(work: _Work) -> dict[str, Any]:
    """All that the cleaned pieces depend on."""
    corpus, folder = work.corpus, work.description.folder
    records = [
        digest_file(inside(folder, source.licence.records, f"source {source.name!r}: licence.records"))
        for source in corpus.sources
        if source.licence is not None and source.licence.records is not None and refusal(source, corpus, folder) is None
    ]
    chosen = corpus.model_dump(mode="json", include={"normalise", "admission", "language", "filters"})
    if corpus.admission.reserved:
        lists = reserved.read(corpus.admission.reserved, corpus.pool, folder).lists
        work.methods["admission"] = {"reserved": lists, "form": reserved.FORM}
    if corpus.language.identify:
        work.methods["language"] = language.method()
    return {
        **chosen,
        "sources": [source.model_dump(mode="json") for source in corpus.sources],
        "files": [[[file.name, file.sha256] for file in found.files] for found in work.surveyed],
        "refused": [refusal(source, corpus, folder) for source in corpus.sources],
        "records": records,
        "reserved": work.methods.get("admission"),
        "key": corpus.validation.key,
        "language_method": work.methods.get("language"),
        "unicode": unicodedata.unidata_version,
        "software": [version(name) for name in ("pyarrow", "zstandard", "tokenizers")],
        "code": code_digest(),
    }


def _so_far(work: _Work) -> Accounts:
    """What became of the documents up to the tokenizer."""
    return list_rejected(
        work.corpus, work.pieces, work.stages["clean"], work.leaving, None, work.folder / "rejected-so-far.parquet"
    )


def _expect_documents(work: _Work, counts: Counter[str]) -> None:
    """Refuse to go on when nothing is left, or a part stays empty."""
    corpus = work.corpus
    if not counts:
        accounts = _so_far(work)
        reasons = Counter[str]()
        for (source, _, reason), count in accounts.rejected.items():
            reasons[f"{source}: {reason}"] += count
        told = "; ".join(f"{count} of {reason}" for reason, count in sorted(reasons.items())) or "the sources are empty"
        raise Refused(f"corpus {corpus.name!r} admits no document ({told}); correct the licence records or filters")
    for part in part_names(corpus):
        if not counts[part]:
            raise DataError(
                f"corpus {corpus.name!r}: of {counts.total()} admitted documents none falls into {part}; "
                "add text, lower `shards`, or change `validation.fraction`"
            )


def _tokenizer(work: _Work, standing: Standing) -> Tokenizer:
    """The given tokenizer, or one trained on the training documents (never on validation)."""
    corpus = work.corpus
    if corpus.tokenizer.path is not None:
        return given_tokenizer(work.description, work.brought.tokenizer)
    train = corpus.tokenizer.train
    assert train is not None  # one of the two is given
    facts = {"vocabulary": train.vocabulary, "end_of_text": corpus.end_of_text, "shards": corpus.shards,
             "validation": corpus.validation.model_dump(mode="json")}  # fmt: skip
    stage = work.stage("tokenizer", facts)

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        texts = _told(work, "read for the tokenizer", training_texts(corpus, work.pieces, standing), standing)
        place(tokenizers.FILE).write_bytes(tokenizers.train(texts, train.vocabulary, corpus.end_of_text))
        return {}

    stage.make(0, write)
    data = stage.opened(0, tokenizers.FILE).read_bytes()
    return tokenizers.from_bytes(data, corpus.end_of_text, "the trained tokenizer")


def _told(work: _Work, stage: str, texts: Iterator[str], standing: Standing) -> Iterator[str]:
    """The training texts, told as they are taken; behind the last one the tokenizer is computed."""
    total = sum(work.documents(standing))
    for done, text in enumerate(texts):
        if done % 256 == 0:
            work.tell(stage, done, total, "documents")
        yield text
    work.tell("train the tokenizer", 0, None, "documents")


def _tokenize(work: _Work, standing: Standing, tokenizer: Tokenizer) -> Stage:
    """Encode every piece."""
    corpus = work.corpus
    facts = {"tokenizer": tokenizer.digest, "end_of_text": corpus.end_of_text, "lossy": corpus.lossy,
             "shards": corpus.shards, "validation": corpus.validation.model_dump(mode="json")}  # fmt: skip
    encoded = work.stage("tokenize", facts)
    # From a file of the work folder, so that every process reads the same bytes.
    path = work.folder / f"{tokenizer.digest[7:31]}.tokenizer.json"
    publish_file(path, tokenizer.data)
    tasks = [Tokenize(corpus, path, str(path), standing, encoded, piece) for piece in work.pieces]
    work.every("tokenize", tokenize, tasks, work.documents(standing))
    names, counts = part_names(corpus), documents_of(corpus, work.pieces, encoded)
    by_part = Counter({names[part]: count for part, count in counts.items() if count})
    if not by_part:
        raise Refused(f"corpus {corpus.name!r} admits no document: the tokenizer gives none back as it was; use "
                      "another one, or `lossy: admit`")  # fmt: skip
    _expect_documents(work, by_part)
    return encoded


def _write(work: _Work, encoded: Stage, tokenizer: Tokenizer, folder: Path) -> list[Written]:
    """Write all shards into `folder` and join the lists of their documents."""
    corpus, target = work.corpus, work.stages.get("target")
    parts = [
        Part(
            number,
            corpus,
            tuple(work.pieces),
            encoded,
            target,
            tokenizer.digest,
            tokenizer.vocabulary,
            tokenizer.end_of_text,
            folder,
        )
        for number in range(corpus.shards + 1)
    ]
    written, done, total = [], 0, sum(documents_of(corpus, work.pieces, encoded).values())
    for each in work.workers.each(write_part, parts):
        written.append(each)
        done += each.counts.admitted.total()
        work.tell("write shards", done, total, "documents")
    with (folder / ADMITTED).open("wb") as whole:
        for name in part_names(corpus):
            with listing(folder, name).open("rb") as file:
                shutil.copyfileobj(file, whole)
            listing(folder, name).unlink()
    return written


def _contamination(work: _Work, folder: Path) -> dict[str, int] | None:
    """Write the report of every held-out item; how many were found, cannot be looked for, cost how many documents."""
    if work.corpus.decontamination is None:
        return None
    sets, documents = found_items(
        work.corpus, work.description.folder, work.pieces, work.stages["decontamination"]
    )  # fmt: skip
    report = sets.report()
    (folder / CONTAMINATION).write_bytes("".join(map(as_line, report)).encode("utf-8"))
    return {
        "items": len(report),
        "found": sum(row["found"] > 0 for row in report),
        "not_checkable": sum(not row["checkable"] for row in report),
        "documents": documents,
    }


def _made(work: _Work) -> dict[str, Any]:
    """Each stage with the number of its pieces and one digest over their receipts."""
    made = {}
    for name, stage in work.stages.items():
        records = [record for piece in work.pieces if (record := stage.receipt(piece.number)) is not None]
        made[name] = {"pieces": len(records), "sha256": digest(canonical(records))}
    return made


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
