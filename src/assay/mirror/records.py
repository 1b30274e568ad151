"""The records on a mirror: whose place it is, leases, states of the small files, a commit a checkpoint, orphans.

All are create-only canonical JSON. A record that is not what this module writes is refused by name; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from assay.errors import AssayError, DataError
from assay.files.digest import canonical_exact, digest, is_digest
from assay.files.reading import parse_json

PLACE, STATE, COMMIT = "assay-mirror/1", "assay-mirror-state/1", "assay-mirror-commit/1"
LEASE, ORPHAN = "assay-mirror-lease/1", "assay-mirror-orphan/1"
PLACE_FILE = "mirror.json"
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class FileCopy:
    """One file: its size, digest, and the digests of its pieces in order, all but the last of the record's size."""

    bytes: int
    sha256: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """A state or a commit as it is read: the body, its files by relative path, the size of pieces, its own digest."""

    body: dict[str, Any]
    files: dict[str, FileCopy]
    piece: int
    sha256: str

    @property
    def head(self) -> tuple[int, str]:
        """The ledger's head that the record carries: seq and digest of the last receipt."""
        return self.body["ledger"]["seq"], self.body["ledger"]["digest"]

    @property
    def lease(self) -> int:
        """The lease under which it was written; 0: none."""
        return int(self.body.get("lease", 0))


@dataclass(frozen=True)
class Lease:
    """Who may write a run's history from then on: `number` from 1, the salted `holder`, the newest `state` before it
    (-1: none), when, and the record's own digest."""

    number: int
    holder: str
    state: int
    time: str
    sha256: str


def state_name(number: int) -> str:
    """`states/00000012.json`."""
    return f"states/{number:08d}.json"


def lease_name(index: int) -> str:
    """`leases/00000001.json` is the first, of index 0."""
    return f"leases/{index + 1:08d}.json"


def orphan_name(number: int) -> str:
    """`orphaned/00000000.json`: what a machine wrote that had lost the run by then."""
    return f"orphaned/{number:08d}.json"


def commit_name(kind: str, step: int, segment: int, verified: bool, manifest: str | None = None) -> str:
    """`commits/full-000400-02.json`; a copy that was not read back ends in `.stored.json`.

    Where a machine that has lost the run took that name, its owner's ends in 16 digits of the `manifest`'s digest.
    """
    own = "" if manifest is None else f"-{manifest.removeprefix('sha256:')[:16]}"
    return f"commits/{kind}-{step:06d}-{segment:02d}{own}{'' if verified else '.stored'}.json"


def commit_names(kind: str, step: int, segment: int, manifest: str, verify: str) -> list[str]:
    """The names under which a checkpoint's commit may lie, in the order in which they are tried."""
    verified = verify == "readback"
    return [commit_name(kind, step, segment, verified), commit_name(kind, step, segment, verified, manifest)]


def piece_name(sha256: str) -> str:
    """`pieces/ab/abcd…`: a piece is found by its digest."""
    value = sha256.removeprefix("sha256:")
    return f"pieces/{value[:2]}/{value}"


def encode(body: dict[str, Any]) -> bytes:
    """A record's bytes."""
    return canonical_exact(body) + b"\n"


def files_body(files: dict[str, FileCopy]) -> dict[str, Any]:
    """Files as a record holds them."""
    return {name: {"bytes": one.bytes, "sha256": one.sha256, "pieces": list(one.pieces)} for name, one in files.items()}


def parse_place(data: bytes, where: str) -> tuple[str, str]:
    """(run id, digest of the place) of `mirror.json`."""
    body = _object(data, where, PLACE)
    if not isinstance(body.get("run_id"), str):
        raise DataError(f"{where} names no run; it was not written by Assay")
    return body["run_id"], digest(data)


def parse_lease(data: bytes, where: str) -> Lease:
    """A lease; DataError naming what is wrong."""
    body = _object(data, where, LEASE)
    kinds = {"number": int, "holder": str, "state": int, "time": str}
    if not all(type(body.get(key)) is kind for key, kind in kinds.items()):
        raise DataError(f"{where} is damaged: a key is missing or of the wrong type")
    return Lease(body["number"], body["holder"], body["state"], body["time"], digest(data))


def parse(data: bytes, where: str, form: str) -> Record:
    """A state, commit or orphan; DataError naming what is wrong."""
    body = _object(data, where, form)
    ledger, piece, listed = body.get("ledger"), body.get("piece"), body.get("files")
    if not (
        isinstance(body.get("run_id"), str)
        and isinstance(ledger, dict)
        and type(ledger.get("seq")) is int
        and is_digest(ledger.get("digest"))
        and type(piece) is int
        and piece > 0
        and isinstance(listed, dict)
        and type(body.get("lease", 0)) is int
    ):
        raise DataError(f"{where} is damaged: a key is missing or of the wrong type")
    if form == COMMIT and not (is_digest(body.get("manifest_sha256")) and body.get("verify") in ("readback", "stored")):
        raise DataError(f"{where} is damaged: it names no manifest, or no way in which it was verified")
    files = {}
    for name, one in listed.items():
        good = isinstance(one, dict) and type(one.get("bytes")) is int and is_digest(one.get("sha256"))
        pieces = one.get("pieces") if good else None
        if not (isinstance(pieces, list) and all(map(is_digest, pieces)) and len(pieces) == -(-one["bytes"] // piece)):
            raise DataError(
                f"{where} is damaged: the entry of {name!r} has no size, digest and as many pieces as it needs"
            )
        if PurePosixPath(name).as_posix() != name:
            raise DataError(f"{where} is damaged: {name!r} is no plain path")
        files[name] = FileCopy(one["bytes"], one["sha256"], tuple(pieces))
    return Record(body, files, piece, digest(data))


def _object(data: bytes, where: str, form: str) -> dict[str, Any]:
    try:
        body = parse_json(data, where)
    except AssayError as fault:
        raise DataError(str(fault)) from None
    if not isinstance(body, dict) or body.get("format") != form:
        raise DataError(f"{where} is not a record {form!r} of a mirror")
    return body
