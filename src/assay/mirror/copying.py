"""Copying a run off its machine, beside training: small files first, then checkpoints, each proved before it counts.

For every checkpoint: a state of the ledger (which names it) and of all small files, then its pieces, each compared,
then the commit record, create-only, then the receipt. Killed anywhere, the same call goes on. Nothing is removed.
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from assay.checkpoint.manifest import MANIFEST, read_manifest
from assay.data import approval
from assay.data import queue as queues
from assay.errors import AssayError, DataError, Interrupted, Refused
from assay.files.digest import digest_small
from assay.files.lock import take
from assay.files.publish import MARK
from assay.files.retry import KEPT, Policy
from assay.ledger import chain
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Ledger, first_previous, now, read
from assay.mirror import records
from assay.mirror.place import READBACK, Place, place
from assay.mirror.records import COMMIT, PIECE_BYTES, STATE, FileCopy
from assay.mirror.transfer import Pace, Sender, Tell
from assay.run.folder import RunFolder, require_run
from assay.run.history import History, Saved, history
from assay.run.inputs import queue_path, tokenizer_file

LOOK_SECONDS = 2.0  # how often the ledger's size is looked at
LOCK_FILE = "mirror.lock"
PROJECT = "project"  # where the recipe's own folder lies in a fetched run
# What does not travel: secrets and locks of this machine, output of ranks, and what is copied by its own record.
_NOT_COPIED = ("salt", "owner.lock", LOCK_FILE, "origin.json", "logs", PROJECT, LEDGER_FILE, "outcome.json")


@dataclass(frozen=True)
class Report:
    """What one call did: checkpoints copied, those of them read back, bytes sent, the newest full step copied."""

    copied: int
    verified: int
    bytes: int
    step: int | None
    skipped: int
    read_back: int


def mirror(
    run: RunFolder,
    url: str,
    *,
    once: bool,
    policy: Policy,
    verify: str = READBACK,
    bandwidth: float | None = None,
    piece: int = PIECE_BYTES,
    tell: Tell = lambda stage, done, total, unit: None,
) -> Report:
    """Copy the run to `url`; without `once`, watch it until its schedule is done and everything is copied.

    `bandwidth` in bytes a second; `piece` in bytes. Raises Refused (3) when the place is not fit or holds another
    history, DataError (4) naming damaged checkpoints after all others were copied, Interrupted (75; cause
    network or signal) with everything kept.
    """
    require_run(run)
    with (run.path / LOCK_FILE).open("ab") as lock:
        if not take(lock, 0.5):
            raise Refused(f"{run.path} is being mirrored by another process; end that one first")
        try:
            return _Mirror(run, place(url, policy), verify, bandwidth, piece, tell).run_on(once)
        except KeyboardInterrupt:
            raise Interrupted(f"the copying of {run.path} was stopped; {KEPT}", "signal") from None


class _Mirror:
    """One call's work: the place, the ledger, the number of the newest state, and what was found damaged."""

    def __init__(
        self, run: RunFolder, where: Place, verify: str, bandwidth: float | None, piece: int, tell: Tell
    ) -> None:
        self.run, self.place, self.verify, self.tell = run, where, verify, tell
        where.prove(verify)
        self.ledger: Ledger = run.open_ledger()
        self.identity = claim(where, self.ledger.run_id)
        self.sender = Sender(where, verify, piece, Pace(bandwidth, where.policy))
        self.size = -1  # the ledger's bytes in the newest state that this call wrote; `number` is that of the newest
        self.head: dict[str, Any] = {}  # the ledger's, in that state
        self.number = newest_number(where, run.ledger)
        self.damaged: dict[str, str] = {}
        self.done: list[Saved] = []

    def run_on(self, once: bool) -> Report:
        """Copy whatever is due, newest first; then end, or wait for more."""
        told = history(self.run.ledger)
        while True:
            if self._grew():
                told = history(self.run.ledger)  # read before the state, which so holds every receipt that is acted on
                self.push_state()
                continue
            due = self.due(told)
            if due:
                self.checkpoint(due[0])
            elif once or _over(told):
                break
            else:
                self.place.policy.sleep(LOOK_SECONDS)
        if self.damaged:
            raise DataError("; ".join(self.damaged.values()))
        verified = len(self.done) if self.verify == READBACK else 0
        full = [item.step for item in self.done if item.kind == "full"]
        return Report(
            len(self.done), verified, self.sender.sent, max(full, default=None), self.sender.there,
            self.sender.read_back,
        )  # fmt: skip

    def due(self, told: History) -> list[Saved]:
        """Checkpoints that stand and have no copy here: those of the line first, full ones first, newest first."""
        copied = {
            receipt.body["manifest_sha256"]
            for receipt in told.mirrored
            if receipt.body["mirror"] == self.identity and receipt.body["verify"] in (READBACK, self.verify)
        }
        line = {item.manifest_sha256 for item in told.line}
        found = [
            item
            for item in told.standing
            if item.manifest_sha256 not in copied and item.manifest_sha256 not in self.damaged
        ]
        return sorted(
            found,
            key=lambda item: (item.manifest_sha256 in line, item.kind == "full", item.step, item.segment),
            reverse=True,
        )

    def push_state(self) -> None:
        """The ledger up to its last whole line, then everything small, then the record that names them."""
        files: dict[str, FileCopy] = {}
        size = self.run.ledger.stat().st_size
        outcome = self.run.outcome.read_bytes() if self.run.outcome.is_file() else None
        head = chain.head(self.run.ledger, first_previous(self.ledger.run_id))
        self.tell("small files", 0, None, "files")
        # The ledger is read before what it speaks of: a file may then hold more than was said, never less.
        with self.run.ledger.open("rb") as source:
            files[LEDGER_FILE] = self.sender.file(source, head.size)
        for name, path in self._small():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
                whole = _whole_lines(source) if path.suffix == ".jsonl" else os.fstat(source.fileno()).st_size
                files[name] = self.sender.file(source, whole)
            self.tell("small files", len(files), None, "files")
        if outcome is not None:
            files["outcome.json"] = self.sender.file(io.BytesIO(outcome), len(outcome))
        self.head = {"seq": head.lines - 1, "digest": head.digest}
        body = {
            "format": STATE, "run_id": self.ledger.run_id, "time": now(), "piece": self.sender.piece,
            "ledger": self.head, "files": records.files_body(files),
        }  # fmt: skip
        data = records.encode(body)
        while (found := self.place.create(records.state_name(self.number + 1), data)) != data:
            records.parse(found, f"{self.place.url}/{records.state_name(self.number + 1)}", STATE)
            self.number = newest_number(self.place, self.run.ledger)  # one of this history is one more before ours
        self.number += 1
        self.size = size

    def _grew(self) -> bool:
        return self.run.ledger.stat().st_size != self.size

    def _small(self) -> Iterator[tuple[str, Path]]:
        """Every small file of the run, and of its project what a start and a reader need besides the shards."""
        for path in _below(self.run.path):
            parts = path.relative_to(self.run.path).parts
            if parts[0] in _NOT_COPIED or (len(parts) > 2 and parts[0] in ("checkpoints", "weights")):
                continue
            yield "/".join(parts), path
        recipe = self.run.recipe()
        queue = queue_path(self.run, recipe)
        yield f"{PROJECT}/recipe.yaml", self.run.recipe_yaml
        if not queue.is_file():
            return
        at = f"{PROJECT}/{PurePosixPath(recipe.data.queue).as_posix()}"
        yield at, queue
        beside = approval.folder(queue).parent
        for path in _below(beside):
            yield f"{at}.d/{path.relative_to(beside).as_posix()}", path
        wanted, home = _tokenizer(queue), self.run.recipe_folder().resolve()
        tokenizer = tokenizer_file(self.run, recipe, wanted) if wanted else None
        if tokenizer is not None and tokenizer.resolve().is_relative_to(home):
            yield f"{PROJECT}/{tokenizer.resolve().relative_to(home).as_posix()}", tokenizer

    def checkpoint(self, item: Saved) -> None:
        """Copy one checkpoint and say so; one that is damaged or was removed meanwhile is passed over."""
        try:
            files, size = self._pieces(item)
        except FileNotFoundError as fault:
            if item.manifest_sha256 not in history(self.run.ledger).removed:
                self.damaged[item.manifest_sha256] = f"{fault.filename} is missing; {item.folder} is not copied"
            return
        except DataError as fault:
            self.damaged[item.manifest_sha256] = f"{item.folder} is not copied: {fault}"
            return
        verified = self.verify == READBACK
        name = records.commit_name(item.kind, item.step, item.segment, verified)
        where = f"{self.place.url}/{name}"
        data = records.encode({
            "format": COMMIT, "run_id": self.ledger.run_id, "time": now(), "piece": self.sender.piece,
            "ledger": self.head, "checkpoint": item.kind, "step": item.step, "segment": item.segment,
            "folder": item.folder, "manifest_sha256": item.manifest_sha256, "verify": self.verify,
            "files": records.files_body(files),
        })  # fmt: skip
        found = records.parse(self.place.create(name, data), where, COMMIT)
        if found.body["manifest_sha256"] != item.manifest_sha256 or found.files.keys() != files.keys():
            raise Refused(
                f"{where} is there already and names {found.body['manifest_sha256']}, but {item.folder} has "
                f"{item.manifest_sha256}: another writer copied another checkpoint of that step; nothing was replaced"
            )
        self.ledger.append("checkpoint.mirrored", {
            "checkpoint": item.kind, "step": item.step, "segment": item.segment, "folder": item.folder,
            "manifest_sha256": item.manifest_sha256, "mirror": self.identity, "commit": found.sha256,
            "verify": self.verify, "bytes": size,
        })  # fmt: skip
        self.done.append(item)

    def _pieces(self, item: Saved) -> tuple[dict[str, FileCopy], int]:
        folder = self.run.path / item.folder
        (folder / MANIFEST).stat()  # a folder that retention took is no damage
        manifest = read_manifest(folder)
        if digest_small(folder / MANIFEST) != item.manifest_sha256:
            raise DataError(f"{folder / MANIFEST} is not the one that receipt {item.seq} names")
        sizes = {name: int(one["bytes"]) for name, one in manifest.files.items()}
        sizes[MANIFEST] = (folder / MANIFEST).stat().st_size
        wanted = {name: one["sha256"] for name, one in manifest.files.items()} | {MANIFEST: item.manifest_sha256}
        total, done = sum(sizes.values()), 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            self.tell(f"copying {item.folder}", done, total, "bytes")

        files = {}
        for name in sorted(sizes):
            with (folder / name).open("rb") as source:
                files[name] = self.sender.file(source, sizes[name], moved)
            if files[name].sha256 != wanted[name]:
                raise DataError(f"{folder / name} is damaged: its digest is not the manifest's")
        return files, total


def claim(where: Place, run_id: str | None) -> str:
    """The digest that names this mirror; the first to come with a run makes the place that run's for ever.

    Raises Refused when it holds another run, DataError when it holds none and `run_id` is None.
    """
    name = f"{where.url}/{records.PLACE_FILE}"
    data = where.read(records.PLACE_FILE)
    if data is None:
        if run_id is None:
            raise DataError(f"{name} is not there; {where.url} holds no mirror of a run: correct the address")
        body = {"format": records.PLACE, "run_id": run_id, "time": now(), "mirror": uuid.uuid4().hex}
        data = where.create(records.PLACE_FILE, records.encode(body))
    theirs, identity = records.parse_place(data, name)
    if run_id is not None and theirs != run_id:
        raise Refused(f"{where.url} holds run {theirs}, not {run_id}; take an address of its own for each run")
    return identity


def newest_number(where: Place, ledger: Path) -> int:
    """The number of the newest state, -1 without any; Refused when it is not of this ledger's history.

    So a disk that comes back after training went on elsewhere is found: the mirror has receipts that it lacks.
    """
    newest = newest_state(where)
    if newest is None:
        return -1
    number, state = newest
    seq, sha256 = state.head
    mine = next((receipt.digest for receipt in read(ledger) if receipt.seq == seq), None)
    if mine != sha256:
        raise Refused(
            f"{where.url} holds receipt {seq} ({sha256}) of this run, and {ledger} "
            f"{'ends before it' if mine is None else 'has another one'}: training went on elsewhere; go on with "
            "assay fetch in a new folder, or copy this history to another address"
        )
    return number


def newest_state(where: Place) -> tuple[int, records.Record] | None:
    """Number and record of the newest state, or None; found by asking for numbers, which have no gaps.

    A listing is not used: clients take any answer with status 200 for one, an error page for an empty one.
    """
    step = 1
    while where.exists(records.state_name(step - 1)):
        step *= 2
    low, high = step // 2 - 1, step - 1  # the one is there (or -1), the other is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if where.exists(records.state_name(middle)) else (low, middle)
    if low < 0:
        return None
    name = records.state_name(low)
    data = where.read(name)
    if data is None:
        raise DataError(f"{where.url}/{name} was there and is gone; somebody removes records of this mirror")
    return low, records.parse(data, f"{where.url}/{name}", STATE)


def _over(told: History) -> bool:
    return told.ended or told.abandoned is not None


def _tokenizer(queue: Path) -> str | None:
    try:
        return queues.load(queue).tokenizer
    except AssayError:
        return None


def _below(folder: Path) -> Iterator[Path]:
    """Regular files below a folder, links and half-written ones left out, in the order of their names."""
    for place_, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if MARK not in name)
        for name in sorted(names):
            path = Path(place_) / name
            if MARK not in name and path.is_file() and not path.is_symlink():
                yield path


def _whole_lines(source: BinaryIO) -> int:
    """Bytes up to the last newline of a file that may be growing."""
    at = source.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - (1 << 16))
        source.seek(start)
        found = source.read(at - start).rfind(b"\n")
        if found >= 0:
            at = start + found + 1
            break
        at = start
    source.seek(0)
    return at
