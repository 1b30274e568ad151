"""What a source consists of: its files in the order of their names, their digests, and the pieces to read.

The pieces depend on the bytes alone: neither the order of a listing, nor the number of processes, nor
the machine changes them. Remote files are there already (`corpus.remote`). No document is looked at here.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from assay.corpus.description import Corpus, Source
from assay.corpus.workers import Helpers
from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, canonical, digest
from assay.files.reading import inside

PIECE_BYTES = 16 << 20  # of plain lines or texts; of uncompressed columns in parquet
PIECE_FILES = 1000  # texts in one piece at most
COMPRESSED = (".gz", ".zst")
SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",), "text": (".txt",)}
_READ = 1 << 20
Kind = Literal["lines", "stream", "groups", "texts", "broken"]


@dataclass(frozen=True)
class File:
    """A file of a source, known by its name below the source's path; `mtime` and `bytes` tell a change."""

    name: str
    path: Path
    bytes: int
    mtime: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """A stretch of a source that one process reads in one go; `number` is its place in the corpus.

    `lines`: bytes [start, stop) of a plain file, the first line being `first`; `stream`: a whole compressed
    file; `groups`: row groups [start, stop) of a parquet file, the first row being `first`; `texts`: whole
    files; `broken`: a file whose kind of fault is `fault`.
    """

    number: int
    source: int
    kind: Kind
    files: tuple[File, ...]
    start: int = 0
    stop: int = 0
    first: int = 1
    fault: str = ""


@dataclass(frozen=True)
class Surveyed:
    """A source as found: its files, the names in its folder that are of another format, the digest of all bytes."""

    files: tuple[File, ...]
    passed_over: int
    sha256: str
    checked: dict[str, int] | None = None  # of a remote source: how many files by which statement of the far side

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class _Stretch:
    """[start, stop) of a file, in bytes or row groups; `first` is the position of its first line or row."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Brought:
    """The files of a remote source as they lie in the work folder: names, places, their digests in that order.

    `one`: the source is a file, not a folder; `checked`: how many files by which statement of the far side.
    """

    files: tuple[tuple[str, Path], ...]
    sha256: tuple[str, ...]
    passed_over: int
    one: bool
    checked: dict[str, int]

    @property
    def digest(self) -> str:
        """What a description pins."""
        return _whole(self.one, [(name, sha256) for (name, _), sha256 in zip(self.files, self.sha256, strict=True)])


NOTHING: Mapping[str, Brought] = {}


def source_path(source: Source, folder: Path) -> Path:
    """The place of a source; InputError when it leaves the description's folder, DataError when it is not there."""
    path = inside(folder, source.path, f"source {source.name!r}: path")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"source {source.name!r}: {path} is not there; get it, or correct `path` in the description")
    return path


def endings(format: Literal["jsonl", "parquet", "text"]) -> tuple[str, ...]:
    """How the names of a source's files end."""
    wanted = SUFFIXES[format]
    return wanted if format == "parquet" else (*wanted, *(w + c for w in wanted for c in COMPRESSED))


def listed(source: Source, folder: Path, brought: Brought | None = None) -> tuple[list[tuple[str, Path]], int]:
    """The files of a source with their names, in the order of the names' UTF-8 bytes; how many others lie there.

    Raises InputError for a name or a link that is not taken, DataError for a folder that cannot be listed or a pipe:
    what is not read is told, never passed over.
    """
    if brought is not None:
        return list(brought.files), brought.passed_over
    path = source_path(source, folder)
    if path.is_file():
        return [(path.name, path)], 0
    wanted = endings(source.format)
    found, others = [], 0
    for each in _below(source, path):
        name = each.relative_to(path).as_posix()
        if not name.isprintable():  # names go into lists and messages; halves of characters are not printable either
            raise InputError(f"source {source.name!r}: the name {name!a} in {path} is not printable text; rename it")
        place = inside(folder, f"{source.path}/{name}", f"source {source.name!r}")
        if each.is_symlink() and each.is_dir():
            raise InputError(
                f"source {source.name!r}: {each} is a link to a folder, which is not followed; put the folder itself "
                "there, or make it a source of its own"
            )
        if not each.name.endswith(wanted):
            others += 1
        elif each.is_file():
            found.append((name, place))
        else:
            raise DataError(
                f"source {source.name!r}: {each} is no file but a pipe, a device or a link to nothing; put the file "
                "there, or move it away"
            )
    if not found:
        raise DataError(
            f"source {source.name!r}: {path} holds no file that ends with {' or '.join(wanted)}; "
            "correct `path` or `format` in the description"
        )
    return sorted(found, key=lambda item: item[0].encode("utf-8")), others


def _below(source: Source, path: Path) -> Iterator[Path]:
    """Everything below a folder that is no folder; links to folders are named and not followed."""

    def fail(error: OSError) -> NoReturn:
        raise DataError(
            f"source {source.name!r}: {error.filename} cannot be listed: {error.strerror}; mend that, or move it away"
        )

    for here, folders, names in os.walk(path, onerror=fail):
        yield from (Path(here, name) for name in names)
        yield from (Path(here, name) for name in folders if os.path.islink(os.path.join(here, name)))


def _silent(stage: str, done: int, total: int | None, unit: str) -> None:
    """No progress is shown."""


def survey(
    corpus: Corpus,
    folder: Path,
    workers: Helpers,
    tell: Callable[[str, int, int | None, str], None] = _silent,
    brought: Mapping[str, Brought] = NOTHING,
) -> tuple[list[Surveyed], list[Piece]]:
    """Hash every file of every source and cut them into pieces; `brought`: the files of remote sources by their names.

    Raises InputError (a path that leaves the folder), DataError (not there, not the pinned bytes).
    """
    tasks, passed_over = [], []
    for index, source in enumerate(corpus.sources):
        here, others = listed(source, folder, brought.get(source.name))
        passed_over.append(others)
        tasks += [(index, source, name, path) for name, path in here]
    looked, done, total = list[_Look](), 0, sum(path.stat().st_size for _, _, _, path in tasks)
    for found in workers.each(_look, tasks):
        looked.append(found)
        done += found[0].bytes
        tell("hash the sources", done, total, "bytes")
    surveyed, pieces = [], list[Piece]()
    for index, source in enumerate(corpus.sources):
        mine = [found for task, found in zip(tasks, looked, strict=True) if task[0] == index]
        files_found = tuple(file for file, _, _ in mine)
        far = brought.get(source.name)
        sha256 = _digest(source, folder, files_found, far)
        surveyed.append(Surveyed(files_found, passed_over[index], sha256, None if far is None else far.checked))
        for kind, files, stretch, fault in _cut(source, mine):
            pieces.append(Piece(len(pieces), index, kind, files, stretch.start, stretch.stop, stretch.first, fault))
    return surveyed, pieces


def sizes(pieces: list[Piece]) -> list[int]:
    """About how many bytes each piece has to read, for progress; row groups share their file's bytes evenly."""
    shares = Counter(piece.files[0].path for piece in pieces if piece.kind == "groups")
    return [
        piece.stop - piece.start
        if piece.kind == "lines"
        else sum(file.bytes for file in piece.files) // max(1, shares[piece.files[0].path])
        for piece in pieces
    ]


def _digest(source: Source, folder: Path, files: tuple[File, ...], brought: Brought | None) -> str:
    """The digest of a source, compared with the pin; a remote one's also with what was brought."""
    one = brought.one if brought is not None else source_path(source, folder).is_file()
    found = _whole(one, [(file.name, file.sha256) for file in files])
    if brought is not None and found != brought.digest:
        raise DataError(
            f"source {source.name!r}: files in {files[0].path.parent} are not what was fetched; delete that folder and "
            "build again"
        )
    if source.sha256 not in (None, found):
        raise pin_broken(source, found)
    return found


def _whole(one: bool, files: list[tuple[str, str]]) -> str:
    """Of one file its digest; of a folder that of the names and digests of its files."""
    return files[0][1] if one else digest(canonical(dict(files)))


def pin_broken(source: Source, found: str) -> DataError:
    """The sentence about a source that has another digest than the pinned one."""
    return DataError(
        f"source {source.name!r}: {source.path} has the digest {found}, but {source.sha256} is pinned; "
        "restore the file, or pin what was reviewed anew"
    )


_Look = tuple[File, tuple[_Stretch, ...], str]


def _look(task: tuple[int, Source, str, Path]) -> _Look:
    """One file's digest, the stretches to read it in, and what is wrong with it as a whole."""
    _, source, name, path = task
    try:
        state = path.stat()
        sha256, stretches = _hash(path, source.format == "jsonl" and path.suffix not in COMPRESSED)
    except OSError as error:
        raise DataError(f"source {source.name!r}: {path} cannot be read: {error.strerror}") from None
    file = File(name, path, state.st_size, state.st_mtime_ns, sha256)
    if source.format != "parquet":
        return file, stretches, ""
    groups, fault = _row_groups(source, path)
    return file, groups, fault


def _hash(path: Path, by_lines: bool) -> tuple[str, tuple[_Stretch, ...]]:
    """SHA-256 of a file and, when asked, stretches of whole lines of about `PIECE_BYTES`."""
    state = hashlib.sha256()
    at, lines, mark = 0, 0, PIECE_BYTES
    bounds = [(0, 1)]
    with path.open("rb") as file:
        while block := file.read(_READ):
            state.update(block)
            if by_lines:
                end = block.find(b"\n", max(0, mark - 1 - at)) if at + len(block) >= mark else -1
                if end >= 0:
                    bounds.append((at + end + 1, lines + block.count(b"\n", 0, end + 1) + 1))
                    mark = at + end + 1 + PIECE_BYTES
                lines += block.count(b"\n")
            at += len(block)
    starts = [bound for bound in bounds if bound[0] < at or bound[0] == 0]
    stops = [*(start for start, _ in starts[1:]), at]
    stretches = tuple(_Stretch(start, stop, first) for (start, first), stop in zip(starts, stops, strict=True))
    return PREFIX + state.hexdigest(), stretches


def _row_groups(source: Source, path: Path) -> tuple[tuple[_Stretch, ...], str]:
    """Row groups joined to about `PIECE_BYTES`; or why the file as a whole cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata, named = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return (), fault_of(error)
    names = set(named)
    twice = next((name for name in named if named.count(name) > 1), None) if len(names) < len(named) else None
    if twice is not None:
        raise InputError(f"source {source.name!r}: {path} has two columns {twice!r}; rename or drop one of them")
    for column in asked_columns(source):
        if column not in names:
            raise InputError(
                f"source {source.name!r}: {path} has no column {column!r}; it has {', '.join(sorted(names))}"
            )
    stretches = list[_Stretch]()
    start, first, row, size = 0, 1, 1, 0
    for group in range(metadata.num_row_groups):
        facts = metadata.row_group(group)
        row, size = row + facts.num_rows, size + facts.total_byte_size
        if size >= PIECE_BYTES or group + 1 == metadata.num_row_groups:
            stretches.append(_Stretch(start, group + 1, first))
            start, first, size = group + 1, row, 0
    return tuple(stretches), ""


def asked_columns(source: Source, key: str | None = None) -> list[str]:
    """The columns of a source's records that are needed, without the predicates of the corpus."""
    columns = source.columns
    named = [columns.id, columns.text, columns.title, columns.licence, key]
    return sorted({column for column in named if column is not None})


def fault_of(error: BaseException) -> str:
    """What a library says of a damaged file, as one short line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = "".join(c if c.isprintable() else " " for c in lines[0])
    return text if len(text) <= 160 else text[:159] + "…"


def _cut(source: Source, looked: list[_Look]) -> Iterator[tuple[Kind, tuple[File, ...], _Stretch, str]]:
    """The pieces of one source in order."""
    whole = _Stretch(0, 0, 1)
    if source.format == "text":
        batch, size = list[File](), 0
        for file, _, _ in looked:
            batch.append(file)
            size += file.bytes
            if size >= PIECE_BYTES or len(batch) >= PIECE_FILES:
                yield "texts", tuple(batch), whole, ""
                batch, size = [], 0
        if batch:
            yield "texts", tuple(batch), whole, ""
        return
    for file, stretches, fault in looked:
        if fault:
            yield "broken", (file,), whole, fault
        elif source.format == "jsonl" and file.path.suffix in COMPRESSED:
            yield "stream", (file,), whole, ""
        else:
            for stretch in stretches:
                yield ("groups" if source.format == "parquet" else "lines"), (file,), stretch, ""
