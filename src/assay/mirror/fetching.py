"""Bringing a run back from a mirror into a new folder, every byte compared, so that training goes on there.

The newest state gives ledger and small files, the ledger says which checkpoints exist, a commit record gives the
newest or the named one. The folder appears whole, at the end; an interrupted fetch goes on. Shards are not brought.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.checkpoint.manifest import MANIFEST, lost_lines, read_manifest
from assay.data import queue as queues
from assay.errors import DataError, InputError, Interrupted, Refused
from assay.files.digest import digest, digest_file
from assay.files.publish import MARK, flush_folder, flush_tree, publish_file, refuse_existing
from assay.files.reading import inside
from assay.files.retry import KEPT, Policy
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Receipt, read
from assay.mirror import leases, records
from assay.mirror.copying import claim
from assay.mirror.leases import known_states, newest_lease
from assay.mirror.luggage import PROJECT
from assay.mirror.place import Place, place
from assay.mirror.records import COMMIT, FileCopy, Record
from assay.mirror.transfer import Tell, receive
from assay.run.folder import RunFolder, address_digest
from assay.run.history import History, Saved, gather
from assay.run.inputs import data_roots, queue_path

_OWN = ("salt", "origin.json")  # made here, never taken from a mirror


@dataclass(frozen=True)
class Fetched:
    """What was brought: the checkpoint's folder, kind and step (None: none was saved), bytes fetched and found there.

    `missing` are the shards of the queue that are not on this machine.
    """

    run_id: str
    step: int | None
    kind: str | None
    folder: str | None
    bytes: int
    kept: int
    missing: list[str]


def fetch(
    url: str,
    path: Path,
    *,
    policy: Policy,
    step: int | None = None,
    project: Path | None = None,
    own: bool = False,
    tell: Tell = lambda stage, done, total, unit: None,
) -> Fetched:
    """The run at `url` in the new folder `path`, with its newest full checkpoint that has a copy, or that of `step`.

    `project`: the folder on this machine that the recipe's paths count from; without it, `path/project`, made of the
    recipe, the queue and its approvals. `own`: take the next lease before anything is read, so that a machine that
    still trains the run stops, and whatever it writes from then on does not count. Raises InputError (2) when something
    stands at `path`, DataError (4) naming what the mirror holds wrongly or not at all, Refused (3), Interrupted (75) at
    the deadline or a signal.
    """
    refuse_existing(path)
    where = place(url, policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = RunFolder(path.with_name(f"{path.name}{MARK}fetch"))
    try:
        return _Fetch(where, draft, path, project, tell).bring(step, own)
    except KeyboardInterrupt:
        raise Interrupted(f"the fetching of {url} was stopped; {KEPT}", "signal") from None


def bring_back(run: RunFolder, url: str, item: Saved, *, policy: Policy, tell: Tell) -> None:
    """One checkpoint that stands on the run's mirror alone, into its folder: whole, every byte compared, or not at all.

    The receipt `checkpoint.fetched` says that it stands again. Raises what `fetch` does.
    """
    where = place(url, policy)
    identity = claim(where, None)
    theirs, _ = records.parse_place(where.read(records.PLACE_FILE) or b"", f"{where.url}/{records.PLACE_FILE}")
    if theirs != run.run_id():
        raise Refused(f"{where.url} holds run {theirs}, not {run.run_id()}; name this run's own mirror")
    folder, beside = run.path / item.folder, run.path / f"{item.folder.replace('/', '-')}{MARK}fetch"
    if (folder / MANIFEST).exists():
        raise Refused(f"{folder} holds another checkpoint by now; the one that receipt {item.seq} names has no place")
    work = _Fetch(where, RunFolder(beside), run.path, None, tell)
    commit = work.commit(item)
    if commit is None:
        raise DataError(f"{where.url} has no copy of {item.folder} as receipt {item.seq} names it")
    work.checkpoint(item, commit, list(read(run.ledger)))
    flush_tree(beside)
    if folder.exists():
        shutil.rmtree(folder)  # of a removal that was cut off after its manifest went
    os.rename(beside / item.folder, folder)
    flush_folder(folder.parent)
    shutil.rmtree(beside)
    work.draft = run
    run.open_ledger().append("checkpoint.fetched", work.fetched(item, commit, identity))


class _Fetch:
    """One call's work in the folder beside `path` that becomes it at the end."""

    def __init__(self, where: Place, draft: RunFolder, path: Path, project: Path | None, tell: Tell) -> None:
        self.place, self.draft, self.path, self.project, self.tell = where, draft, path, project, tell
        self.bytes = self.kept = 0
        self.planned: set[Path] = set()

    def bring(self, step: int | None, own: bool) -> Fetched:
        identity = claim(self.place, None)
        lease = newest_lease(self.place)
        known = known_states(self.place, lease)
        if known.state is None:
            raise DataError(f"{self.place.url} holds no state of its run yet; let assay mirror end once")
        taken: dict[str, Any] | None = None
        if own:
            self.draft.path.mkdir(exist_ok=True)
            self._salt()
            holder, number = leases.holder_of(self.draft), (lease.number if lease else 0) + 1
            data = leases.lease_bytes(known.state.body["run_id"], number, holder, known.last)
            leases.put_lease(self.place, number, data)
            address = address_digest(self.draft, self.place.url)
            taken = leases.lease_body(number, identity, holder, data, address)
            known = known_states(self.place, lease)  # what was written between the two
        number, state = known.number, known.state
        assert state is not None
        where = f"{self.place.url}/{records.state_name(number)}"
        for needed in (LEDGER_FILE, "recipe.json", "recipe.yaml"):
            if needed not in state.files:
                raise DataError(f"{where} lists no {needed}; it is not the state of a run")
        small = {
            name: copy
            for name, copy in state.files.items()
            if name not in _OWN and not (self.project is not None and name.startswith(f"{PROJECT}/"))
        }
        self._files(small, state.piece, self.draft.path, "", "small files")
        receipts = list(read(self.draft.ledger))
        told = gather(receipts)
        if state.body["run_id"] != told.run_id or state.head != (receipts[-1].seq, receipts[-1].digest):
            raise DataError(
                f"{where} does not carry the head of the ledger that it lists; one of them is another run's"
            )
        chosen = self._chosen(told, step, identity)
        if chosen is not None:
            self.checkpoint(*chosen, receipts)
        self._own_files(state)
        for one in sorted(self.draft.path.rglob("*"), reverse=True):
            if one.is_file() and one not in self.planned:
                one.unlink()  # of an earlier, interrupted fetch that wanted something else
        self._receipts(told, chosen, identity)
        if taken is not None:
            self.draft.open_ledger().append("lease", taken)
        lost = lost_lines(self.draft.path, told.run_id)
        if lost is not None:
            raise DataError(f"{lost}; the mirror's newest state is not its newest")
        for folder in (self.draft.checkpoints, self.draft.weights, self.draft.evaluations):
            folder.mkdir(exist_ok=True)
        flush_tree(self.draft.path)
        refuse_existing(self.path)
        os.rename(self.draft.path, self.path)
        flush_folder(self.path.parent)
        item = chosen[0] if chosen else None
        return Fetched(
            told.run_id,
            item.step if item else None,
            item.kind if item else None,
            item.folder if item else None,
            self.bytes,
            self.kept,
            _missing(RunFolder(self.path)),
        )

    def _files(self, files: dict[str, FileCopy], piece: int, folder: Path, at: str, stage: str) -> None:
        total, done = sum(copy.bytes for copy in files.values()), 0

        def moved(count: int, fetched: bool) -> None:
            nonlocal done
            done += count
            self.bytes, self.kept = self.bytes + count * fetched, self.kept + count * (not fetched)
            self.tell(stage, done, total, "bytes")

        folder.mkdir(parents=True, exist_ok=True)
        for name, copy in sorted(files.items()):
            target = inside(folder, name, f"a record of {self.place.url}")
            self.planned.add(target)
            receive(self.place, copy, piece, target, at + name, moved)

    def _chosen(self, told: History, step: int | None, identity: str) -> tuple[Saved, Record] | None:
        """The checkpoint to bring and its commit; DataError when there is no copy of what was asked for."""
        line = {item.manifest_sha256 for item in told.line}
        removed = {one.body["manifest_sha256"] for one in told.unmirrored if one.body["mirror"] == identity}
        wanted = [
            item
            for item in told.saved
            if item.manifest_sha256 not in removed
            and (item.kind == "full" and item.manifest_sha256 in line if step is None else item.step == step)
        ]
        for item in sorted(
            wanted,
            key=lambda one: (one.kind == "full", one.manifest_sha256 in line, one.step, one.segment),
            reverse=True,
        ):
            commit = self.commit(item)
            if commit is not None:
                return item, commit
        copied = sorted({receipt.body["step"] for receipt in told.mirrored if "step" in receipt.body})
        there = ", ".join(map(str, copied)) or "none"
        if step is not None:
            raise DataError(f"{self.place.url} has no copy of a checkpoint of step {step}; copies of steps: {there}")
        if any(item.kind == "full" for item in told.saved):
            raise DataError(
                f"{self.place.url} has no copy of a full checkpoint that training could go on from, although some were "
                f"saved; copies of steps: {there}: name one with --step"
            )
        return None

    def commit(self, item: Saved) -> Record | None:
        """The commit of a checkpoint's copy, or None when there is none."""
        for how in ("readback", "stored"):
            for name in records.commit_names(item.kind, item.step, item.segment, item.manifest_sha256, how):
                data = self.place.read(name)
                found = None if data is None else records.parse(data, f"{self.place.url}/{name}", COMMIT)
                if found is not None and found.body["manifest_sha256"] == item.manifest_sha256:
                    return found
        return None

    def checkpoint(self, item: Saved, commit: Record, receipts: list[Receipt]) -> None:
        """The folder of one checkpoint, by its commit, its manifest and the receipt of its saving, which must agree."""
        seq, sha256 = commit.head
        if seq >= len(receipts) or receipts[seq].digest != sha256:
            raise DataError(
                f"the commit of {item.folder} carries receipt {seq} of another ledger than {self.place.url} has in its "
                "newest state; records of two histories are mixed there"
            )
        folder = inside(self.draft.path, item.folder, f"receipt {item.seq}")
        self._files(commit.files, commit.piece, folder, f"{item.folder}/", f"fetching {item.folder}")
        if not (folder / MANIFEST).is_file() or digest_file(folder / MANIFEST) != item.manifest_sha256:
            raise DataError(f"{item.folder}/{MANIFEST} on the mirror is not the one that receipt {item.seq} names")
        for name, stated in read_manifest(folder).files.items():
            copy = commit.files.get(name)
            if copy is None or (copy.bytes, copy.sha256) != (stated["bytes"], stated["sha256"]):
                raise DataError(f"{item.folder}/{name} on the mirror is not the file that its manifest names")

    def fetched(self, item: Saved, commit: Record, identity: str) -> dict[str, Any]:
        """The receipt of a checkpoint that was brought."""
        return {
            "checkpoint": item.kind, "step": item.step, "segment": item.segment, "folder": item.folder,
            "manifest_sha256": item.manifest_sha256, "mirror": identity, "commit": commit.sha256,
            "address": address_digest(self.draft, self.place.url),
        }  # fmt: skip

    def _own_files(self, state: Record) -> None:
        """Salt and origin of this machine."""
        if self.project is None:
            home = self.draft.path / PROJECT
            home.mkdir(exist_ok=True)
            origin = PROJECT
        else:
            home = self.project
            origin = os.path.relpath(home.resolve(), self.path.resolve())
            self._same_queue(state, home)
        self._salt()
        publish_file(self.draft.origin, (json.dumps({"recipe_folder": origin}, indent=1) + "\n").encode())
        self.planned |= {self.draft.salt, self.draft.origin}

    def _salt(self) -> None:
        """A salt of this machine's own; one that an interrupted fetch made stays."""
        if not self.draft.salt.is_file():
            publish_file(self.draft.salt, secrets.token_hex(16).encode("ascii"), mode=0o600)

    def _same_queue(self, state: Record, home: Path) -> None:
        """The project's queue goes on from the one that was mirrored; Refused otherwise."""
        recipe = self.draft.recipe()
        queue = home / recipe.data.queue
        if not queue.is_file():
            raise InputError(f"{queue} does not exist; --project names the folder that the recipe's paths count from")
        copy = next((one for name, one in state.files.items() if Path(name) == Path(PROJECT) / recipe.data.queue), None)
        if copy is None:
            return
        with queue.open("rb") as file:
            data = file.read(copy.bytes)
        if digest(data) != copy.sha256:
            raise Refused(
                f"{queue} does not begin with the queue of this run as it was mirrored; take that run's queue"
            )

    def _receipts(self, told: History, chosen: tuple[Saved, Record] | None, identity: str) -> None:
        """What is here and what is not: the run goes on from the one, and misses nothing of the others."""
        ledger = self.draft.open_ledger()
        brought = chosen[0].manifest_sha256 if chosen else None
        if chosen is not None:
            item, commit = chosen
            ledger.append("checkpoint.fetched", self.fetched(item, commit, identity))
        for item in told.standing:
            if item.manifest_sha256 != brought:
                ledger.append("checkpoint.removed", {
                    "folder": item.folder, "step": item.step, "manifest_sha256": item.manifest_sha256,
                    "reason": "not fetched",
                })  # fmt: skip


def _missing(run: RunFolder) -> list[str]:
    """Shards of the queue that are not on this machine, by digest; none when there is no queue either."""
    recipe = run.recipe()
    path = queue_path(run, recipe)
    if not path.is_file():
        return []
    queue = queues.load(path)
    return queues.missing(queue, queues.locate(queue, data_roots(run, recipe)))
