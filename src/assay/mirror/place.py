"""A mirror's place in an object store or folder: what may be created once, what is read, and proof that both hold.

Every call is tried again to the policy's deadline. It knows names and bytes, not what they mean.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from assay.errors import InputError, Refused
from assay.files.retry import Policy, Transient, persist
from assay.files.stores import Object, Store, chunks, folder_of, get, look, opened, put, remove

T = TypeVar("T")
RECORD_LIMIT = 64 << 20  # bytes of a record: pieces of some terabytes
PROOF, OTHER = b"the first of two create-only puts\n", b"the second of two create-only puts\n"
READBACK, STORED = "readback", "stored"


@dataclass(frozen=True)
class Place:
    """Where one run's copies lie; `url` is how messages name it."""

    url: str
    store: Store
    prefix: str
    policy: Policy

    def key(self, name: str) -> str:
        """The store's key of a name in this place."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def read(self, name: str) -> bytes | None:
        """A record, or None when there is none."""
        return self.tried(f"{self.url}/{name}", lambda: get(self.store, self.key(name), RECORD_LIMIT))

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        return self.tried(f"{self.url}/{name}", lambda: look(self.store, self.key(name))) is not None

    def create(self, name: str, data: bytes) -> bytes:
        """Write `data` under a name that is free, and return what stands there: `data`, or somebody else's bytes.

        A put whose answer was lost is told from another writer's by the bytes.
        """
        self.tried(f"{self.url}/{name}", lambda: put(self.store, self.key(name), data, create=True))
        return self.tried(f"{self.url}/{name}", lambda: self._standing(name, data))

    def _standing(self, name: str, hoped: bytes) -> bytes:
        """What stands under a name: other bytes than hoped for are believed when they come twice."""
        found = get(self.store, self.key(name), RECORD_LIMIT)
        if found is None or (found != hoped and found != get(self.store, self.key(name), RECORD_LIMIT)):
            raise Transient("what was just written cannot be read back, or reads otherwise each time")
        return found

    def remove(self, name: str) -> None:
        """Take an object away, should it be there."""
        self.tried(f"{self.url}/{name}", lambda: remove(self.store, self.key(name)))

    def newest(self, name: Callable[[int], str], at_least: int = -1) -> int:
        """The highest number n whose `name(n)` is there, of numbers from 0 on without gaps; -1 when there is none.

        `at_least` is one that is known to be there. A listing is not used: clients take any answer with status 200 for
        one, an error page for an empty one.
        """
        low, step = at_least, 1
        while self.exists(name(low + step)):
            low, step = low + step, 2 * step
        high = low + step  # the one is there (or -1), the other is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.exists(name(middle)) else (low, middle)
        return low

    def tried(self, what: str, act: Callable[[], T]) -> T:
        """What `act` returns, tried again while it is worth it, in a thread of its own: a signal need not wait for
        a connection that hangs."""
        return persist(what, lambda left: _apart(act), self.policy)

    def prove(self, verify: str) -> None:
        """Refused unless the store honours create-only puts and, for `stored`, states an MD5 to compare.

        The two puts leave one small object, `create-only`, in the place.
        """
        name, refusal = "create-only", (
            f"{self.url} does not honour create-only puts (If-None-Match: *): two writers could replace each other's "
            "commit records; use a store that does"
        )  # fmt: skip
        self.tried(f"{self.url}/{name}", lambda: put(self.store, self.key(name), PROOF, create=True))
        if self.tried(f"{self.url}/{name}", lambda: put(self.store, self.key(name), OTHER, create=True)):
            raise Refused(refusal)
        found = self.read(name)
        if found != PROOF:
            raise Refused(refusal)
        if verify == STORED:
            seen = self.tried(f"{self.url}/{name}", lambda: look(self.store, self.key(name)))
            if seen is None or seen.etag != md5(PROOF):
                raise Refused(f"{self.url} states no MD5 of what it holds, so that a copy cannot be compared without "
                              "reading it back; use --verify readback")  # fmt: skip

    def piece(self, name: str, size: int, take: Callable[[bytes], None]) -> None:
        """Read an object of `size` bytes once, chunk by chunk; Transient for a short or broken answer."""
        seen = 0
        for chunk in chunks(self.store, Object(self.key(name), size, None)):
            seen += len(chunk)
            take(chunk)
        if seen != size:
            raise Transient(f"{seen:,} of {size:,} bytes were sent")


def place(url: str, policy: Policy) -> Place:
    """The place of `s3://bucket/prefix`, gs://, az://, or a folder that exists (a path or file://).

    A folder must be there: a disk that is not mounted would otherwise be filled under its mount point.
    """
    folder = folder_of(url)
    if folder is not None:
        if not folder.is_dir():
            raise InputError(f"{url} is not a folder; mount it or make it first, then mirror into it")
        address = f"file://{folder.resolve()}"
    else:
        address = url.rstrip("/")
    # An answer to a put comes after its whole body: a quarter of the deadline for one piece, not the usual half minute.
    store, prefix = opened(address, policy.deadline, max(1.0, policy.deadline / 4))
    return Place(url.rstrip("/") or url, store, prefix, policy)


def md5(data: bytes) -> str:
    """The MD5 that stores state as an ETag; no promise rests on it but the store's own check."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _apart(act: Callable[[], T]) -> T:
    results: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((act(), None))
        except Exception as fault:  # noqa: BLE001 - raised again where it was waited for
            results.put((None, fault))

    threading.Thread(target=run, daemon=True).start()
    value, fault = results.get()
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]
