"""The work folder of a build: what each stage made of each piece, published whole, named by digest.

A stage's folder is named by everything that its pieces depend on, so that a build that was killed goes on
where it was and one with other choices begins anew. A piece counts when its receipt is there and its files
have the digests that it states; nobody reads a file before that was compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from assay.errors import DataError, InputError, Refused
from assay.files.digest import canonical, digest, digest_file
from assay.files.publish import MARK, flush_file, flush_folder, publish_file
from assay.files.reading import read_object

FORMAT = "assay-corpus-work/1"
SUFFIX = ".work"
GROUP_CHARACTERS = 4 << 20  # text that a row group of a piece holds at most, about
GROUP_ROWS = 8192

DOCUMENTS = pa.schema(
    [
        ("number", pa.int64()),  # among all items of the piece, rejected ones too
        ("id", pa.large_string()),
        ("file", pa.large_string()),
        ("position", pa.int64()),
        ("title", pa.large_string()),
        ("key", pa.large_string()),
        ("licence", pa.large_string()),
        ("id_digest", pa.binary(16)),
        ("text_digest", pa.binary(16)),
        ("text", pa.large_string()),
    ]
)
REJECTED = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.large_string()),
        ("source", pa.large_string()),
        ("file", pa.large_string()),
        ("position", pa.int64()),
        ("stage", pa.large_string()),
        ("reason", pa.large_string()),
        ("evidence", pa.large_string()),
    ]
)
SIGNED = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.large_string()),
        ("file", pa.large_string()),
        ("position", pa.int64()),
        ("worded", pa.bool_()),
    ]
)
FINDINGS = pa.schema(
    [
        ("number", pa.int64()),
        ("document", pa.large_string()),
        ("set", pa.large_string()),
        ("item", pa.large_string()),
        ("kind", pa.large_string()),
        ("reading", pa.large_string()),
        ("share", pa.float64()),
        ("words", pa.int64()),
        ("start", pa.int64()),
    ]
)
TOKENS = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.large_string()),
        ("file", pa.large_string()),
        ("position", pa.int64()),
        ("title", pa.large_string()),
        ("licence", pa.large_string()),
        ("part", pa.int16()),
        ("start", pa.int64()),  # in the piece's ids
        ("tokens", pa.int64()),  # end of text included
        ("text_bytes", pa.int64()),
        ("lossy", pa.large_string()),  # reason; null: decoding gives the text back
        ("lossy_at", pa.int64()),  # byte of the text where the difference begins
        ("lossy_byte", pa.int16()),  # that byte; null: behind the text's end
    ]
)


@contextlib.contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """`OUT.work`, owned by this process while the block lasts; Refused when another build has it.

    It is removed when the block ends without error. What of it cannot be removed stays: by then all is done.
    """
    folder = out.with_name(out.name + SUFFIX)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder} is not a folder, but the work of the build is kept there; move it away")
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "lock"
    with mark.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{folder} is in use by another build; wait for it, or choose another OUT") from None
        yield folder
        with contextlib.suppress(OSError, KeyboardInterrupt):
            for each in folder.iterdir():
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)
                elif each != mark:
                    each.unlink()
    # Last and closed: until here no other build could come between, and a network file system lets a folder go only
    # when no file in it is open.
    with contextlib.suppress(OSError):
        mark.unlink()
        folder.rmdir()


def stage_key(stage: str, facts: Any) -> str:
    """The name of a stage's folder: the stage and the digest of all that its bytes depend on."""
    return f"{stage}-{digest(canonical({'format': FORMAT, 'stage': stage, 'facts': facts}))[7:31]}"


def code_digest() -> str:
    """Digest of this room's source files: pieces of another version are not gone on with."""
    room = Path(__file__).parent
    return digest(canonical({path.name: digest_file(path) for path in room.glob("*.py")}))


_HASHED: dict[Path, tuple[int, int, str]] = {}  # size, time and digest of the files that this process has hashed


def _sound(path: Path, sha256: str) -> bool:
    """Whether a file has this digest; hashed again only when its size or time is another one."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return False
    known = _HASHED.get(path)
    if known is None or known[:2] != (state.st_size, state.st_mtime_ns):
        known = _HASHED[path] = state.st_size, state.st_mtime_ns, digest_file(path)
    return known[2] == sha256


class Stage:
    """One stage's folder of pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[type[Stage], tuple[Path]]:
        return Stage, (self.folder,)

    def path(self, piece: int, suffix: str) -> Path:
        """Where a piece's file of this kind stands."""
        return self.folder / f"{piece:06}.{suffix}"

    def receipt(self, piece: int) -> dict[str, Any] | None:
        """A finished piece's receipt; None when it is to be made (again)."""
        path = self.path(piece, "json")
        if not path.is_file():
            return None
        record = read_object(path, "the receipt of a piece")
        return record if all(_sound(self.folder / name, sha256) for name, sha256 in record["files"].items()) else None

    def opened(self, piece: int, suffix: str) -> Path:
        """A finished piece's file, compared with its receipt; DataError when it is not what was made."""
        path = self.path(piece, suffix)
        record = self.receipt(piece)
        if record is None or path.name not in record["files"]:
            raise DataError(f"{path} is not what its stage made of it; delete {self.folder} and build again")
        return path

    def make(self, piece: int, write: Callable[[Callable[[str], Path]], dict[str, Any]]) -> dict[str, Any]:
        """The receipt of a piece: the one that stands, or a new one after `write` made the files.

        `write` gets a function from a file's suffix to the place to write it at, and returns the facts for the receipt.
        """
        found = self.receipt(piece)
        if found is not None:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = f"{MARK}{uuid.uuid4().hex[:12]}"
        made: dict[str, Path] = {}

        def place(suffix: str) -> Path:
            path = self.path(piece, suffix)
            made[path.name] = path.with_name(path.name + mark)
            return made[path.name]

        try:
            facts = write(place)
            files = {name: digest_file(temporary) for name, temporary in sorted(made.items())}
            for name, temporary in made.items():
                flush_file(temporary)
                os.replace(temporary, self.folder / name)
        except BaseException:
            for temporary in made.values():
                temporary.unlink(missing_ok=True)
            raise
        flush_folder(self.folder)
        record = {**facts, "files": files}
        publish_file(self.path(piece, "json"), canonical(record) + b"\n")
        return record


class Rows:
    """Writes rows of a schema as parquet, a row group whenever enough have come."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1)
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._size = 0
        self.count = 0

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._writer.close()

    def add(self, row: dict[str, Any], size: int = 0) -> None:
        """One row; `size`: the characters that it holds."""
        self._rows.append(row)
        self._size += size
        self.count += 1
        if self._size >= GROUP_CHARACTERS or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._size = [], 0


def rows(path: Path, columns: Sequence[str] | None = None, size: int = 512) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file of this room, in their order, a few in memory at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(size, columns=list(columns) if columns is not None else None):
            yield from batch.to_pylist()


def count(path: Path) -> int:
    """The rows of a parquet file."""
    rows: int = pq.read_metadata(path).num_rows
    return rows


def column(path: Path, names: Sequence[str]) -> Any:
    """Whole columns of a parquet file, as a table."""
    return pq.read_table(path, columns=list(names), use_threads=False)


def as_line(record: dict[str, Any]) -> str:
    """One JSON Lines line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
