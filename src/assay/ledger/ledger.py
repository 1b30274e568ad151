"""The ledger of a run: hash-chained receipts, each one statement of one fact.

Every process of the machine may append, one at a time under the file's lock, after verifying
what others appended since. Reading is a generator that verifies as it goes. Receipts are never
changed and never removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from assay.errors import InputError, VerificationError
from assay.files.digest import digest
from assay.ledger import chain

FILE = "ledger.jsonl"


@dataclass(frozen=True)
class Receipt:
    """One receipt: sequence number from zero, UTC time, kind, body, and the digest of its own line."""

    seq: int
    time: str
    kind: str
    body: dict[str, Any]
    digest: str


def now() -> str:
    """UTC time, RFC 3339, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def first_previous(run_id: str) -> str:
    """What receipt 0 names as the line before: the digest of the run id."""
    return digest(run_id.encode())


def read(path: Path, run_id: str | None = None) -> Iterator[Receipt]:
    """Receipts in order, each verified; without `run_id` the first receipt's own statement of it is used.

    Raises InputError when there is no ledger, VerificationError naming the line that does not hold.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist; the ledger of a run is expected there")
    if run_id is None:
        run_id = _stated_run_id(path)
    for link in chain.read(path, first_previous(run_id)):
        yield _receipt(link, path)


class Ledger:
    """The writing side: appends receipts to one run's ledger and keeps the verified head."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Verify the whole chain at `path`, which must exist."""
        self.path = path
        self.run_id = run_id
        self._head = chain.Head(0, first_previous(run_id), 0)
        self._others: list[Receipt] = []
        self._catch_up()
        self._others.clear()

    @classmethod
    def create(cls, path: Path, run_id: str) -> Ledger:
        """A new, empty ledger; InputError when there is one."""
        try:
            chain.create(path)
        except FileExistsError:
            raise InputError(f"{path} exists already and is never replaced; choose another run folder") from None
        return cls(path, run_id)

    @property
    def head(self) -> dict[str, Any]:
        """The head as manifests carry it: sequence number and digest of the last receipt."""
        return {"seq": self._head.lines - 1, "digest": self._head.digest}

    def append(self, kind: str, body: dict[str, Any]) -> Receipt:
        """Append one receipt, flushed to the disk; what others appended meanwhile is verified first.

        A torn tail that an interrupted writer left is moved aside and a receipt `recovered` says so.
        Raises VerificationError when the chain on disk is not the one that was verified before.
        """
        with chain.lock(self.path) as file:
            self._catch_up()
            torn = chain.move_torn_tail(self.path, file, self._head.size)
            if torn:
                self._head = chain.append(
                    file, self._head, lambda head: _record(head, "recovered", {"torn_bytes": torn, "file": FILE})
                )
            written: dict[str, Any] = {}

            def make(head: chain.Head) -> dict[str, Any]:
                written.update(_record(head, kind, body))
                return written

            self._head = chain.append(file, self._head, make)
        return Receipt(self._head.lines - 1, written["time"], kind, body, self._head.digest)

    def others(self) -> list[Receipt]:
        """Receipts that other processes appended since this was asked last; one `stat` when there are none."""
        if self.path.stat().st_size != self._head.size:
            self._catch_up()
        new, self._others = self._others, []
        return new

    def _catch_up(self) -> None:
        """Verify and take up what stands behind the head."""
        for link in chain.read(self.path, first_previous(self.run_id), after=self._head):
            self._others.append(_receipt(link, self.path))
            self._head = chain.Head(link.number + 1, link.digest, link.end)


def _record(head: chain.Head, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"seq": head.lines, "time": now(), "kind": kind, "body": body, "previous": head.digest}


def _receipt(link: chain.Link, path: Path) -> Receipt:
    record = link.record
    seq, time, kind, body = (record.get(key) for key in ("seq", "time", "kind", "body"))
    if type(seq) is not int or seq != link.number or not isinstance(kind, str) or not isinstance(body, dict):
        raise VerificationError(
            f"{path}, line {link.number + 1} is not receipt {link.number}: "
            "seq, time, kind, body and previous are expected, in order"
        )
    if not _is_time(time):
        raise VerificationError(f"{path}, line {link.number + 1}: time is {time!r}; UTC as in RFC 3339 is expected")
    return Receipt(link.number, time, kind, body, link.digest)


def _is_time(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or not value.endswith("Z"):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _stated_run_id(path: Path) -> str:
    for link in chain.read(path, None):
        run_id = _receipt(link, path).body.get("run_id")
        if isinstance(run_id, str):
            return run_id
        break
    raise VerificationError(f"{path} does not begin with a receipt that names its run_id")
