"""The queue: an append-only chain of slots, each a stretch of updates that reads one fixed set of shard ranges.

A header line and a line a slot, each naming the digest of the line before. Appending never
changes what was there. The queue knows no seed and reads no token; parts are found by digest.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.data import approval, fields
from assay.data.order import Stream
from assay.data.shard import DTYPES, Shard, open_shard, scan, stated_digest
from assay.errors import DataError, InputError, Refused
from assay.files.digest import canonical_exact, digest
from assay.files.reading import inside, parse_json
from assay.ledger import chain

FORMAT = "assay-queue/1"
_HEADER_KEYS = ("format", "block", "dtype", "vocabulary", "tokenizer", "pool", "freshness", "trust")
_SLOT_KEYS = ("slot", "updates", "epochs", "parts", "tokens", "previous", "mix")
_PART_KEYS = ("shard", "path", "start", "stop", "source")


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of the shard with that digest; `path` is a hint relative to the queue, or None."""

    shard: str
    path: str | None
    start: int
    stop: int
    source: str

    @property
    def tokens(self) -> int:
        """How many tokens the part adds to the slot's stream."""
        return self.stop - self.start


@dataclass(frozen=True)
class Slot:
    """One line of the queue: `updates` updates from `first_update` on read the parts as one stream of `tokens`."""

    number: int
    updates: int
    epochs: int
    parts: tuple[Part, ...]
    tokens: int
    mix: Mapping[str, Any] | None
    digest: str
    first_update: int

    @property
    def end_update(self) -> int:
        """The update after the slot's last one."""
        return self.first_update + self.updates

    def stream(self, seed: int, block: int) -> Stream:
        """The slot's order for a data seed."""
        return Stream(seed, self.number, self.tokens, block, self.epochs)


@dataclass(frozen=True)
class Queue:
    """A verified queue: its header and its slots in order."""

    path: Path
    block: int
    dtype: str
    vocabulary: int
    tokenizer: str
    pool: str | None
    freshness: str | None
    trust: Mapping[str, Any] | None
    header_line: bytes  # without its newline; the order digest begins with it
    header_digest: str
    slots: tuple[Slot, ...]
    content: bytes  # the file as it was verified, torn tail left out

    @property
    def head(self) -> str:
        """Digest of the last line, which the next line names as `previous`."""
        return self.slots[-1].digest if self.slots else self.header_digest

    @property
    def updates_total(self) -> int:
        """Updates in all slots."""
        return self.slots[-1].end_update if self.slots else 0

    def prefix_bytes(self, slots: int) -> bytes:
        """The header's and the first `slots` slots' lines, as they were verified when the queue was read."""
        return b"".join(self.content.splitlines(keepends=True)[: slots + 1])

    def prefix(self, slots: int) -> str:
        """Digest that names the header and the first `slots` slots; DataError when there are fewer."""
        if not 0 <= slots <= len(self.slots):
            raise DataError(f"{self.path} has {len(self.slots)} slots; a prefix of {slots} does not exist")
        return self.slots[slots - 1].digest if slots else self.header_digest

    def slot_of(self, update: int) -> tuple[Slot, int]:
        """(slot, k): `update` is the slot's k-th; DataError with the shortfall when the queue ends before."""
        if update < 0:
            raise InputError(f"update {update} does not exist; updates are counted from zero")
        for slot in self.slots:
            if update < slot.end_update:
                return slot, update - slot.first_update
        missing = update + 1 - self.updates_total
        raise DataError(
            f"{self.path} is exhausted: update {update:,} needs slot {len(self.slots)}, but {len(self.slots)} slot(s) "
            f"hold {self.updates_total:,} updates; {missing:,} more updates of data are needed: append a slot"
        )


def load(path: Path) -> Queue:
    """Read and verify a queue file.

    Raises InputError (exit 2) when it is missing or not a queue, or when a line breaks a rule of
    the format; DataError (exit 4) when its lines do not chain. A torn last line is ignored.
    """
    header_line = _first_line(path)
    end = 0
    links = chain.read(path, None, fault=DataError)
    first = next(links)
    header = _header(first.record, f"{path}, line 1")
    slots: list[Slot] = []
    updates = 0
    for link in links:
        slot = _slot(link.record, f"{path}, line {link.number + 1}", header["block"], len(slots), updates, link.digest)
        slots.append(slot)
        updates = slot.end_update
        end = link.end
    with path.open("rb") as file:
        content = file.read(end or first.end)
    if digest(content.splitlines()[-1]) != (slots[-1].digest if slots else first.digest):
        raise DataError(f"{path} was changed while it was read; look who writes it, then start again")
    known: dict[str, Any] = {name: header.get(name) for name in _HEADER_KEYS if name != "format"}
    return Queue(
        path, **known, header_line=header_line, header_digest=first.digest, slots=tuple(slots), content=content
    )


def create(
    path: Path,
    *,
    block: int,
    dtype: str,
    vocabulary: int,
    tokenizer: str,
    pool: str | None = None,
    freshness: str | None = None,
    trust: Mapping[str, Any] | None = None,
) -> Queue:
    """A new queue without slots; InputError when something is at `path` (an empty file left by a kill is taken).

    With `trust` each slot needs approvals; for its form see `approval.trust_of`.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "block": block,
        "dtype": dtype,
        "vocabulary": vocabulary,
        "tokenizer": tokenizer,
    }
    if pool is not None:
        record["pool"] = pool
    if freshness is not None:
        record["freshness"] = freshness
    if trust is not None:
        record["trust"] = dict(trust)
    _header(record, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Another process may be quicker; whoever takes the lock first writes the header.
        with contextlib.suppress(FileExistsError):
            chain.create(path)
    elif not path.is_file():
        raise InputError(f"{path} is not a file; name the queue file to be made")
    with chain.lock(path) as file:
        if file.read(1):
            raise InputError(f"{path} exists already and is never replaced; choose another name")
        chain.append(file, chain.Head(0, "", 0), lambda _: record)
    return load(path)


def parts_of(queue: Queue, shard: Shard, start: int = 0, stop: int | None = None) -> list[Part]:
    """The tokens [start, stop) of a shard as parts, cut where the source changes, with a path hint where one is lawful.

    A part has one source, so that exposure by source needs no bytes. The hint is relative to the
    queue's folder; a shard outside that folder gets none and is found by digest under the roots.
    Raises DataError for a shard that does not fit the queue, InputError for a range that it has not.
    """
    check_fit(queue, shard)
    stop = shard.tokens if stop is None else stop
    if not 0 <= start < stop <= shard.tokens:
        raise InputError(f"{shard.path}: [{start:,}, {stop:,}) is not a range of its {shard.tokens:,} tokens")
    folder, target = queue.path.parent.resolve(), shard.path.resolve()
    hint = target.relative_to(folder).as_posix() if target.is_relative_to(folder) and target != folder else None
    cuts = [(s.name, max(s.start, start), min(s.stop, stop)) for s in shard.sources]
    return [Part(shard.sha256, hint, low, high, name) for name, low, high in cuts if low < high]


def propose(
    queue: Queue,
    *,
    updates: int,
    parts: Sequence[Part],
    global_batch: int,
    epochs: int = 1,
    seed: int | None = None,
    mix: Mapping[str, Any] | None = None,
) -> bytes:
    """The exact next line of the queue, without its newline.

    Raises DataError with the exact shortfall when the slot holds too few windows (for the worst
    offset of any seed, or exactly for `seed`), Refused when a strict queue would repeat data.
    """
    record: dict[str, Any] = {
        "slot": len(queue.slots),
        "updates": updates,
        "epochs": epochs,
        "parts": [asdict(part) for part in parts],
        "tokens": sum(part.tokens for part in parts),
        "previous": queue.head,
    }
    if mix is not None:
        record["mix"] = dict(mix)
    try:
        line = canonical_exact(record)
    except ValueError as error:
        raise InputError(f"{queue.path}: the slot {error}") from None
    slot = next_slot(queue, line, f"{queue.path}: the proposed slot")
    check_capacity(queue, slot, global_batch, seed)
    return line


def next_slot(queue: Queue, line: bytes, where: str) -> Slot:
    """The slot that `line` would add at the queue's head; nothing is written.

    Raises InputError for a line that is not valid or not canonical, DataError for one that was
    made for another head, Refused when a strict queue would repeat data.
    """
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise InputError(f"{where} holds {type(record).__name__}, not the JSON object of a slot")
    fields.known(record, _SLOT_KEYS, where)
    previous = fields.sha256(record, "previous", where)
    if previous != queue.head:
        raise DataError(
            f"{where} was made for the head {previous}, but {queue.path} stands at {queue.head}; propose it again"
        )
    slot = _slot(record, where, queue.block, len(queue.slots), queue.updates_total, digest(line))
    try:
        exact = canonical_exact(record)
    except ValueError as error:
        raise InputError(f"{where} {error}") from None
    if exact != line:
        raise InputError(f"{where} is not in canonical form (RFC 8785); append the bytes that propose printed")
    if queue.freshness == "strict":
        _refuse_repeats(queue, slot, where)
    return slot


def append(path: Path, line: bytes, *, global_batch: int | None = None, seed: int | None = None) -> Slot:
    """Append exactly the bytes of `line` (without newline) to the queue, flushed to the disk before it returns.

    One writer at a time, under the file's lock; a torn tail is moved aside. Everything that
    `next_slot` refuses is refused here, and the capacity is checked when `global_batch` is given.
    Refused when the line lacks the approvals that the queue's header demands (`trust`).
    """
    _first_line(path)
    with chain.lock(path) as file:
        queue = load(path)
        slot = next_slot(queue, line, "the line to append")
        if global_batch is not None:
            check_capacity(queue, slot, global_batch, seed)
        elif slot.updates > slot.stream(0, queue.block).most():  # too short for any global batch
            check_capacity(queue, slot, 1)
        approval.demand(queue, slot)
        end = chain.head(path, None, fault=DataError)
        chain.move_torn_tail(path, file, end.size)
        chain.append(file, end, lambda _: parse_json(line, "the line to append"))
    return slot


def available_windows(queue: Queue, slot: Slot, seed: int | None = None) -> int:
    """Windows in all epochs of a slot: exact for a seed, else the least that any seed can give."""
    stream = slot.stream(seed or 0, queue.block)
    return stream.least() if seed is None else stream.capacity()


def check_capacity(queue: Queue, slot: Slot, global_batch: int, seed: int | None = None) -> None:
    """DataError with the exact shortfall when a slot has fewer windows than its updates need.

    Without a seed the least that any seed can give counts; with one, the exact number.
    """
    if global_batch < 1:
        raise InputError(f"the global batch is {global_batch}; 1 or more sequences are expected")
    needed = slot.updates * global_batch
    stream = slot.stream(seed or 0, queue.block)
    if needed <= stream.least():
        return
    if needed > stream.most():  # known without counting epoch by epoch
        available, which = stream.most(), "with the best offsets"
    elif seed is None:
        available, which = stream.least(), f"with the worst offsets ({stream.most():,} with the best)"
    else:
        available, which = stream.capacity(), f"with seed {seed}"
    if needed > available:
        raise DataError(
            f"{queue.path}: slot {slot.number} is too short: {slot.updates:,} updates of {global_batch:,} need "
            f"{needed:,} windows, but {slot.tokens:,} tokens × {slot.epochs:,} epoch(s) hold {available:,} {which}: "
            f"{needed - available:,} windows short; at most {available // global_batch:,} updates fit, "
            "or add data, or allow more epochs"
        )


def locate(queue: Queue, roots: Iterable[Path]) -> dict[str, Shard]:
    """The queue's shards that are on this machine, by digest: the path hint first, then the roots are searched.

    Only manifests and sizes are read. Raises InputError for a hint that leaves the queue's folder,
    DataError for a shard that is damaged or does not fit the queue. Shards that are not found are
    not in the result; see `missing`.
    """
    wanted = {part.shard: part for slot in queue.slots for part in slot.parts}
    found: dict[str, Shard] = {}
    for slot in queue.slots:
        for number, part in enumerate(slot.parts):
            if part.path is None or part.shard in found:
                continue
            hint = inside(queue.path.parent, part.path, f"{queue.path}, slot {slot.number}, part {number}")
            if stated_digest(hint) == part.shard:
                found[part.shard] = open_shard(hint)
    for root in roots:
        if wanted.keys() == found.keys():
            break
        for name, folder in scan(root):
            if name in wanted and name not in found:
                found[name] = open_shard(folder)
    for slot in queue.slots:
        for part in slot.parts:
            if part.shard in found:
                check_fit(queue, found[part.shard], part)
    one_pool(queue, found.values())
    return found


def one_pool(queue: Queue, shards: Iterable[Shard]) -> None:
    """DataError when shards of different pools would meet in one queue, whether or not its header names the pool."""
    pools: dict[str, Shard] = {}
    for shard in shards:
        pools.setdefault(shard.pool, shard)
    if len(pools) > 1:
        first, second = list(pools.values())[:2]
        raise DataError(
            f"{queue.path} takes one pool, but {first.path} is of pool {first.pool!r} and {second.path} of "
            f"{second.pool!r}; give each pool a queue of its own"
        )


def missing(queue: Queue, found: Mapping[str, Shard]) -> list[str]:
    """Digests of the queue's shards that were not found, each once, in order of use."""
    return list(dict.fromkeys(p.shard for s in queue.slots for p in s.parts if p.shard not in found))


def check_fit(queue: Queue, shard: Shard, part: Part | None = None) -> None:
    """DataError when a shard is not of the queue's kind, or lacks `part`, or states another source for it."""
    pairs = [
        ("dtype", shard.dtype, queue.dtype),
        ("vocabulary", shard.vocabulary, queue.vocabulary),
        ("tokenizer", shard.tokenizer, queue.tokenizer),
        ("pool", shard.pool, queue.pool if queue.pool is not None else shard.pool),
    ]
    for name, has, takes in pairs:
        if has != takes:
            raise DataError(f"{shard.path} has {name} {has!r}, but {queue.path} takes {takes!r}; use a shard that fits")
    if part is None:
        return
    if part.stop > shard.tokens:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens, but {queue.path} reads up to {part.stop:,}")
    first = bisect_right(shard.sources, part.start, key=lambda source: source.start) - 1
    last = bisect_left(shard.sources, part.stop, key=lambda source: source.start)
    named = {source.name for source in shard.sources[first:last] if source.start < source.stop}
    if named != {part.source}:
        raise DataError(
            f"{queue.path} calls tokens [{part.start:,}, {part.stop:,}) of {shard.path} {part.source!r}, its manifest "
            f"{', '.join(map(repr, sorted(named)))}; propose the slot with that manifest"
        )


def order_start(queue: Queue, seed: int) -> bytes:
    """The order digest before update 0, 32 bytes: SHA-256 of the queue's first line, a newline and the seed."""
    return hashlib.sha256(queue.header_line + b"\n" + str(seed).encode()).digest()


def _first_line(path: Path) -> bytes:
    """The header line without its newline; InputError when the file cannot be a queue."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder, but a queue is a file; name the file itself")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file, but a queue is one; name the file itself")
        with path.open("rb") as file:
            line = file.readline(chain.LINE_LIMIT + 1)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a queue is expected there (assay data create makes one)") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"{path} cannot be read: {error}; a queue is expected there") from None
    if not line.strip():
        raise InputError(f"{path} is empty; a queue is expected there")
    if line.endswith(b"\r\n"):
        raise InputError(f"{path} has CRLF line ends, so its digests do not hold; restore the file with LF line ends")
    where = f"{path}, line 1"
    record = parse_json(line, where)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        shown = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{where}: format is {shown!r}; {FORMAT!r} is expected: is it a queue?")
    if not line.endswith(b"\n"):
        raise InputError(f"{path} breaks off in its first line; restore it, or remove it and create the queue again")
    return line[:-1]


def _header(record: dict[str, Any], where: str) -> dict[str, Any]:
    fields.known(record, _HEADER_KEYS, where)
    fields.choice(record, "format", where, (FORMAT,))
    fields.integer(record, "block", where, 1, 1 << 31)
    fields.choice(record, "dtype", where, DTYPES)
    vocabulary = fields.integer(record, "vocabulary", where, 1, 1 << 32)
    if record["dtype"] == "uint16" and vocabulary > 1 << 16:
        raise InputError(f"{where}: a vocabulary of {vocabulary:,} ids does not fit dtype uint16; uint32 is needed")
    fields.text(record, "tokenizer", where)
    if "pool" in record:
        fields.text(record, "pool", where)
    if "freshness" in record:
        fields.choice(record, "freshness", where, ("strict",))
    if "trust" in record:
        approval.trust_of(fields.mapping(record, "trust", where), where)
    return record


def _slot(record: dict[str, Any], where: str, block: int, number: int, first_update: int, line: str) -> Slot:
    fields.known(record, _SLOT_KEYS, where)
    fields.sha256(record, "previous", where)
    if fields.integer(record, "slot", where) != number:
        raise InputError(
            f"{where}: slot is {record['slot']}, but slot {number} comes next; slots are counted from zero"
        )
    updates = fields.integer(record, "updates", where, 1)
    if first_update + updates > fields.LARGEST:
        raise InputError(f"{where}: updates is {updates:,}, which counts beyond {fields.LARGEST:,} with earlier slots")
    parts = tuple(
        _part(part, f"{where}, parts[{index}]") for index, part in enumerate(fields.objects(record, "parts", where))
    )
    tokens = fields.integer(record, "tokens", where, 1)
    total = sum(part.tokens for part in parts)
    if tokens != total:
        raise InputError(f"{where}: tokens is {tokens:,}, but the parts hold {total:,}")
    if tokens < block + 1:
        raise InputError(f"{where}: tokens is {tokens:,}; one window of block {block:,} needs {block + 1:,}")
    return Slot(
        number=number,
        updates=updates,
        epochs=fields.integer(record, "epochs", where, 1),
        parts=parts,
        tokens=tokens,
        mix=fields.mapping(record, "mix", where) if "mix" in record else None,
        digest=line,
        first_update=first_update,
    )


def _part(record: dict[str, Any], where: str) -> Part:
    fields.known(record, _PART_KEYS, where)
    path = None
    if fields.present(record, "path", where) is not None:
        path = fields.text(record, "path", where)
        inside(Path("/"), path, where)  # the text alone; links are followed where the shard is looked for
    start, stop = fields.integer(record, "start", where), fields.integer(record, "stop", where, 1)
    if stop <= start:
        raise InputError(f"{where}: [{start:,}, {stop:,}) is empty; stop must lie behind start")
    return Part(fields.sha256(record, "shard", where), path, start, stop, fields.text(record, "source", where))


def _refuse_repeats(queue: Queue, slot: Slot, where: str) -> None:
    taken = [(part, earlier.number) for earlier in queue.slots for part in earlier.parts]
    for part in slot.parts:
        for other, number in taken:
            low, high = max(part.start, other.start), min(part.stop, other.stop)
            if part.shard == other.shard and low < high:
                raise Refused(
                    f"{where} repeats tokens [{low:,}, {high:,}) of {part.shard}, which slot {number} holds; "
                    f"{queue.path} is strict and takes fresh data only"
                )
        taken.append((part, slot.number))
