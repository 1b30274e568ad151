"""Shards: a folder with token ids, document ends and a manifest that names both by digest.

`write_shard` and `adopt` publish a shard whole or not at all; `open_shard` maps it after
checking sizes; `verify_shard` re-hashes and checks every promise. Text is never seen here.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from assay.data import fields
from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, digest_file
from assay.files.publish import MARK, publish_folder, refuse_existing
from assay.files.reading import read_object

FORMAT = "assay-shard/1"
MANIFEST = "shard.json"
TOKENS = "tokens.bin"
DOCUMENTS = "documents.idx"
TEXT_BYTES = "text_bytes.idx"
DTYPES = ("uint16", "uint32")
_PIECE = 1 << 20  # ids or ends that are held in memory at a time
_KEYS = (
    "format",
    "tokens",
    "documents",
    "dtype",
    "vocabulary",
    "tokenizer",
    "end_of_text",
    "pool",
    "sources",
    "sha256",
)
# Packs of llm.c and its descendants begin with 256 int32, of which this is the first: not ids.
_HEADER_MAGIC = 20240520


@dataclass(frozen=True)
class Source:
    """Where the tokens [start, stop) of a shard come from; what is not known is None."""

    name: str
    start: int
    stop: int
    language: str | None = None
    licence: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Shard:
    """A shard whose manifest is valid and whose files have the sizes that it states.

    `ids` and `documents_end` are read-only memory maps; nothing is hashed before `verify_shard`.
    """

    path: Path
    tokens: int
    documents: int | None  # None: not known (an adopted pack without document ends)
    dtype: str
    vocabulary: int  # largest id that can occur, added tokens included, plus one
    tokenizer: str
    end_of_text: int
    pool: str
    sources: tuple[Source, ...]
    digests: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """The shard's name in other files: the digest of `tokens.bin`."""
        return self.digests[TOKENS]

    @cached_property
    def ids(self) -> NDArray[np.unsignedinteger[Any]]:
        """All token ids, [tokens], mapped read-only."""
        return self._map(TOKENS, little(self.dtype), self.tokens)

    @cached_property
    def documents_end(self) -> NDArray[np.uint64]:
        """End of each document in tokens, [documents]; DataError when not known."""
        if self.documents is None:
            raise DataError(f"{self.path} does not know where its documents end; adopt it again with its docs.idx")
        return self._map(DOCUMENTS, np.dtype("<u8"), self.documents)

    @cached_property
    def text_bytes_end(self) -> NDArray[np.uint64] | None:
        """Running sum of the documents' UTF-8 bytes, [documents]; None when it was not recorded."""
        if TEXT_BYTES not in self.digests or self.documents is None:
            return None
        return self._map(TEXT_BYTES, np.dtype("<u8"), self.documents)

    def source_at(self, index: int) -> Source:
        """The source of the token at `index`."""
        for source in self.sources:
            if source.start <= index < source.stop:
                return source
        raise DataError(f"{self.path} has {self.tokens:,} tokens; token {index:,} is not among them")

    def sources_in(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """(source, low, high) of the tokens [start, stop), counted from `start`, in the order of the shard."""
        found = [
            (source.name, max(source.start, start) - start, min(source.stop, stop) - start)
            for source in sorted(self.sources, key=lambda source: source.start)
        ]
        return [(name, low, high) for name, low, high in found if low < high]

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        path = self.path / name
        # Again right before mapping: touching a map behind the file's end kills the process.
        _check_size(path, count * dtype.itemsize)
        # As a plain array: slices of the memmap class cost more than the copy of a window.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def little(dtype: str) -> np.dtype[Any]:
    """The little-endian numpy type of a stored dtype."""
    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocabulary: int) -> str:
    """`uint16` when every id that can occur is below 65,536, else `uint32`.

    `vocabulary` is the largest possible id plus one, added tokens included.
    """
    if not 1 <= vocabulary <= 1 << 32:
        raise InputError(f"a vocabulary of {vocabulary:,} ids does not fit; 1 to 4,294,967,296 are possible")
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def write_shard(
    path: Path,
    documents: Iterable[NDArray[Any]],
    *,
    vocabulary: int,
    tokenizer: str,
    end_of_text: int,
    pool: str,
    sources: Sequence[Source],
    text_bytes: Sequence[int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Shard:
    """Write the documents (1-D arrays of ids, each ending with `end_of_text`) as a shard at `path`.

    Streams: one document is held at a time, hashed while it is written. `sources` and
    `text_bytes` (UTF-8 bytes of each document) are looked at after the last document, so they
    may be lists that the caller fills while generating. Sources tile the shard in order.
    `extra` adds keys of the caller's own to the manifest. Raises InputError for an id outside
    the vocabulary, a document that does not end with `end_of_text`, an empty shard, or `path` taken.
    """
    dtype = little(dtype_for(vocabulary))
    if not 0 <= end_of_text < vocabulary:
        raise InputError(f"{path}: end-of-text id {end_of_text} is outside the vocabulary of {vocabulary:,}")
    hashes = {TOKENS: hashlib.sha256()}
    ends = array("Q")  # not a list: 8 bytes a document
    total = 0
    with publish_folder(path) as folder:
        with (folder / TOKENS).open("wb", buffering=_PIECE) as file:
            for number, document in enumerate(documents):
                data = _document(document, number, vocabulary, end_of_text, path).astype(dtype).tobytes()
                hashes[TOKENS].update(data)
                file.write(data)
                total += len(data) // dtype.itemsize
                ends.append(total)
        if not ends:
            raise InputError(f"{path}: there is no document to write; a shard holds at least one")
        digests = {TOKENS: PREFIX + hashes[TOKENS].hexdigest()}
        digests[DOCUMENTS] = _write_index(folder / DOCUMENTS, np.array(ends, dtype="<u8"))
        if text_bytes is not None:
            digests[TEXT_BYTES] = _write_index(folder / TEXT_BYTES, _running_bytes(text_bytes, len(ends), path))
        manifest = {
            "format": FORMAT,
            "tokens": total,
            "documents": len(ends),
            "dtype": dtype_for(vocabulary),
            "vocabulary": vocabulary,
            "tokenizer": tokenizer,
            "end_of_text": end_of_text,
            "pool": pool,
            "sources": [asdict(source) for source in sources],
            "sha256": digests,
        }
        _write_manifest(folder, path, manifest, extra)
    return open_shard(path)


def adopt(
    tokens_file: Path,
    documents_file: Path | None,
    out: Path,
    *,
    dtype: str,
    vocabulary: int,
    tokenizer: str,
    end_of_text: int,
    pool: str,
    sources: Sequence[Source] | None = None,
    source: str = "adopted",
    extra: Mapping[str, Any] | None = None,
) -> Shard:
    """Take over a public pack (`train.bin` and `docs.idx`) or a headerless `.bin` without copying it.

    The shard's files are hard links to the pack's (the same bytes on the disk, safe against the
    pack being deleted), or symbolic links where the file system or its rules allow no hard link;
    then the shard lives as long as the pack stays where it is. Everything is read once: hashed,
    ids checked against the vocabulary, document ends and their end-of-text checked. Without
    `documents_file` the manifest says `documents: null`. Without `sources` the whole shard is one
    source named `source`. Raises InputError for files of the wrong shape, DataError for ids or
    document ends that do not hold.
    """
    refuse_existing(out)
    if dtype not in DTYPES:
        raise InputError(f"{tokens_file}: dtype {dtype!r} is not possible; allowed: {', '.join(DTYPES)}")
    size = _regular(tokens_file, "a file of token ids")
    item = little(dtype).itemsize
    if size == 0 or size % item:
        raise InputError(f"{tokens_file} has {size:,} bytes, which is no positive multiple of {item} ({dtype})")
    with tokens_file.open("rb") as file:
        if int.from_bytes(file.read(4), "little") == _HEADER_MAGIC:
            raise InputError(f"{tokens_file} begins with a header of 256 int32 (llm.c); remove the first 1,024 bytes")
    count: int | None = None
    if documents_file is not None:
        size_documents = _regular(documents_file, "a file of document ends")
        if size_documents == 0 or size_documents % 8:
            raise InputError(f"{documents_file} has {size_documents:,} bytes, no positive multiple of 8 (uint64)")
        count = size_documents // 8
    tokens = size // item
    with publish_folder(out) as folder:
        _link(tokens_file, folder / TOKENS)
        digests = {TOKENS: digest_file(folder / TOKENS)}
        if documents_file is not None:
            _link(documents_file, folder / DOCUMENTS)
            digests[DOCUMENTS] = digest_file(folder / DOCUMENTS)
        manifest = {
            "format": FORMAT,
            "tokens": tokens,
            "documents": count,
            "dtype": dtype,
            "vocabulary": vocabulary,
            "tokenizer": tokenizer,
            "end_of_text": end_of_text,
            "pool": pool,
            "sources": [asdict(s) for s in (sources or [Source(source, 0, tokens)])],
            "sha256": digests,
        }
        _write_manifest(folder, out, manifest, extra)
        problems = _check_contents(open_shard(folder))
        if problems:
            raise DataError(f"{tokens_file} cannot be adopted: {'; '.join(problems)}")
    return open_shard(out)


def open_shard(path: Path) -> Shard:
    """Open the shard folder at `path`: manifest checked, files present with the sizes it states.

    Cheap: nothing is hashed. Raises InputError for a manifest that is not valid, DataError for
    files that are missing or of another size.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; a shard folder is expected there")
    if not path.is_dir():
        raise InputError(f"{path} is a file, but a shard is a folder with {MANIFEST}, {TOKENS} and {DOCUMENTS}")
    shard = _parse(path, read_object(path / MANIFEST, "the manifest of a shard"))
    _check_size(path / TOKENS, shard.tokens * little(shard.dtype).itemsize)
    for name in (DOCUMENTS, TEXT_BYTES):
        if shard.documents is not None and name in shard.digests:
            _check_size(path / name, shard.documents * 8)
    return shard


def verify_shard(shard: Shard) -> list[str]:
    """Re-hash every file and check every promise of the format; the list of what does not hold.

    Reads through files, not maps, so that a file cut meanwhile is a problem and not a crash.
    """
    problems = []
    for name, stated in shard.digests.items():
        try:
            found = digest_file(shard.path / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != stated:
            problems.append(f"{name} has the digest {found}, but the manifest states {stated}")
    return problems or _check_contents(shard)


def stated_digest(folder: Path) -> str | None:
    """The digest that the shard manifest in `folder` states; None when there is none that can be read."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        record = read_object(folder / MANIFEST, "the manifest of a shard")
        fields.choice(record, "format", str(folder), (FORMAT,))
        return fields.sha256(fields.mapping(record, "sha256", str(folder)), TOKENS, str(folder))
    except InputError:
        return None


def scan(root: Path) -> Iterator[tuple[str, Path]]:
    """Digest and folder of every shard below `root`, in order of names.

    Half-written folders and manifests that cannot be read are passed over; no token is read.
    """
    for folder, folders, _ in os.walk(root):
        folders[:] = sorted(name for name in folders if MARK not in name)
        name = stated_digest(Path(folder))
        if name is not None:
            yield name, Path(folder)


def _document(document: NDArray[Any], number: int, vocabulary: int, end_of_text: int, path: Path) -> NDArray[Any]:
    array = np.asarray(document)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InputError(f"{path}: document {number} is not a row of integer ids (shape {array.shape}, {array.dtype})")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(f"{path}: document {number} holds the id {wrong:,}, outside the vocabulary of {vocabulary:,}")
    if int(array[-1]) != end_of_text:
        raise InputError(f"{path}: document {number} ends with the id {int(array[-1])}, not with {end_of_text}")
    return array


def _running_bytes(text_bytes: Sequence[int], documents: int, path: Path) -> NDArray[np.uint64]:
    if len(text_bytes) != documents:
        raise InputError(f"{path}: {len(text_bytes):,} byte counts were given for {documents:,} documents")
    if min(text_bytes) < 0:
        raise InputError(f"{path}: a document has {min(text_bytes)} bytes of text; 0 is the least")
    return np.cumsum(np.asarray(text_bytes, dtype="<u8"), dtype="<u8")


def _write_index(path: Path, values: NDArray[np.uint64]) -> str:
    data = values.tobytes()
    path.write_bytes(data)
    return PREFIX + hashlib.sha256(data).hexdigest()


def _write_manifest(folder: Path, path: Path, manifest: dict[str, Any], extra: Mapping[str, Any] | None) -> None:
    for key in extra or {}:
        if key in manifest:
            raise InputError(f"{path}: the key {key!r} belongs to the shard format; use another name")
    whole = {**manifest, **(extra or {})}
    _parse(path, whole)  # the same rules as on reading, before anything becomes visible
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def _parse(path: Path, record: dict[str, Any]) -> Shard:
    where = str(path / MANIFEST)
    fields.choice(record, "format", where, (FORMAT,))
    tokens = fields.integer(record, "tokens", where, 1)
    documents = None
    if fields.present(record, "documents", where) is not None:
        documents = fields.integer(record, "documents", where, 1, tokens)
    dtype = fields.choice(record, "dtype", where, DTYPES)
    vocabulary = fields.integer(record, "vocabulary", where, 1, 1 << 32)
    if dtype == "uint16" and vocabulary > 1 << 16:
        raise InputError(f"{where}: a vocabulary of {vocabulary:,} ids does not fit dtype uint16; uint32 is needed")
    end_of_text = fields.integer(record, "end_of_text", where, 0, vocabulary - 1)
    digests = fields.mapping(record, "sha256", where)
    for name in digests:
        fields.choice({"sha256": name}, "sha256", where, (TOKENS, DOCUMENTS, TEXT_BYTES))
        fields.sha256(digests, name, f"{where}, sha256")
    fields.sha256(digests, TOKENS, f"{where}, sha256")
    if documents is not None:
        fields.sha256(digests, DOCUMENTS, f"{where}, sha256")
    elif len(digests) > 1:
        raise InputError(f"{where}: documents is null, but sha256 names {DOCUMENTS} or {TEXT_BYTES}")
    return Shard(
        path=path,
        tokens=tokens,
        documents=documents,
        dtype=dtype,
        vocabulary=vocabulary,
        tokenizer=fields.text(record, "tokenizer", where),
        end_of_text=end_of_text,
        pool=fields.text(record, "pool", where),
        sources=_sources(fields.objects(record, "sources", where), tokens, where),
        digests=digests,
        extra={key: value for key, value in record.items() if key not in _KEYS},
    )


def _sources(records: list[dict[str, Any]], tokens: int, where: str) -> tuple[Source, ...]:
    sources = []
    reached = 0
    for number, record in enumerate(records):
        place = f"{where}, sources[{number}]"
        start, stop = fields.integer(record, "start", place), fields.integer(record, "stop", place)
        if start != reached or stop <= start:
            raise InputError(
                f"{place}: [{start:,}, {stop:,}) does not continue at {reached:,}; sources tile the shard in order"
            )
        reached = stop
        sources.append(
            Source(
                name=fields.text(record, "name", place),
                start=start,
                stop=stop,
                language=fields.optional_text(record, "language", place),
                licence=fields.optional_text(record, "licence", place),
                revision=fields.optional_text(record, "revision", place),
            )
        )
    if reached != tokens:
        raise InputError(f"{where}: the sources end at {reached:,}, but the shard has {tokens:,} tokens")
    return tuple(sources)


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be had: {error.strerror}; restore the shard's files") from None
    if not path.is_file():
        raise DataError(f"{path} is not a file; restore the shard's files")
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes, but the manifest states {expected:,}; it was cut, replaced or is foreign"
        )


def _check_contents(shard: Shard) -> list[str]:
    """Ids within the vocabulary; ends ascending, the last at the shard's end, each behind an end-of-text."""
    problems = []
    ids = little(shard.dtype)
    with (shard.path / TOKENS).open("rb") as file:
        at = 0
        for piece in _pieces(file, ids):
            highest = int(piece.max())
            if highest >= shard.vocabulary:
                where = at + int(np.argmax(piece))
                problems.append(f"token {where:,} is {highest:,}, outside the vocabulary of {shard.vocabulary:,}")
                break
            at += len(piece)
    if shard.documents is None:
        return problems
    previous = 0
    mapped = shard.ids
    with (shard.path / DOCUMENTS).open("rb") as file:
        for ends in _pieces(file, np.dtype("<u8")):
            rising = np.concatenate([np.array([previous], dtype="<u8"), ends])
            if not bool(np.all(rising[1:] > rising[:-1])):
                return [*problems, f"{DOCUMENTS} does not rise after {previous:,} tokens"]
            if int(ends[-1]) > shard.tokens:
                return [*problems, f"{DOCUMENTS} names {int(ends[-1]):,}, beyond the shard's {shard.tokens:,} tokens"]
            wrong = np.flatnonzero(mapped[ends - np.uint64(1)] != shard.end_of_text)
            if len(wrong):
                end = int(ends[wrong[0]])
                found = int(mapped[end - 1])
                return [*problems, f"the document ending at {end:,} ends with id {found}, not {shard.end_of_text}"]
            previous = int(ends[-1])
    if previous != shard.tokens:
        problems.append(f"the last document ends at {previous:,}, but the shard has {shard.tokens:,} tokens")
    text_ends = shard.text_bytes_end
    if text_ends is not None and not bool(np.all(text_ends[1:] >= text_ends[:-1])):
        problems.append(f"{TEXT_BYTES} falls, but it is a running sum")
    return problems


def _pieces(file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    size = _PIECE * dtype.itemsize
    while data := file.read(size):
        yield np.frombuffer(data[: len(data) - len(data) % dtype.itemsize], dtype=dtype)


def _regular(path: Path, what: str) -> int:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise InputError(f"{path} is not a regular file; {what} is expected there")
        with path.open("rb"):
            return size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {what} is expected there") from None


def _link(original: Path, name: Path) -> None:
    """Give the pack's file the shard's name: a hard link, or a symbolic one where that is not allowed."""
    real = original.resolve()
    try:
        os.link(real, name)
    except OSError:  # another file system, one without hard links, or a file of another owner
        os.symlink(real, name)
