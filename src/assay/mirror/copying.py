"""Copying a run off its machine, beside training: small files first, then checkpoints, each proved before it counts.

For every checkpoint: a state of the ledger (which names it) and of all small files, then its pieces, each compared,
then the commit record, create-only, then the receipt. Killed anywhere, the same call goes on. It watches for a
higher lease than the run's own, and removes what `checkpoint.mirror.keep` leaves no room for.
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.checkpoint.manifest import MANIFEST, read_manifest
from assay.checkpoint.retention import surplus
from assay.data import queue as queues
from assay.errors import AssayError, DataError, Interrupted, Refused
from assay.files.digest import digest_small
from assay.files.lock import take
from assay.files.retry import KEPT, Policy
from assay.ledger import chain
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Ledger, first_previous, now, read
from assay.mirror import leases, orphans, records
from assay.mirror.leases import Standing, known_states
from assay.mirror.luggage import LOCK_FILE, travelling
from assay.mirror.place import READBACK, Place, place
from assay.mirror.records import COMMIT, PIECE_BYTES, STATE, FileCopy, Record
from assay.mirror.transfer import Pace, Sender, Tell, whole_lines
from assay.plan.cadence import checkpoint_steps
from assay.run.amendments import effective
from assay.run.folder import RunFolder, require_run
from assay.run.history import SAFE, History, Saved, history
from assay.run.inputs import queue_path
from assay.run.owner import is_owned

LOOK_SECONDS = 2.0  # how often the ledger's size is looked at
LEASE_SECONDS = 30.0  # how often another machine's lease is looked for while there is nothing to copy
LEAVE_SECONDS = 60.0  # that a trainer has to save and leave once the run was lost


@dataclass(frozen=True)
class Report:
    """What one call did: checkpoints copied, those of them read back, bytes sent, the newest full step copied."""

    copied: int
    verified: int
    bytes: int
    step: int | None
    skipped: int
    read_back: int
    removed: int = 0
    notes: tuple[str, ...] = ()


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

    `bandwidth` in bytes a second; `piece` in bytes. Raises Refused (3) when the place is not fit, holds another
    history or saw the run taken by another machine (what only this one has is then left there as orphaned, and a hold
    stops the trainer), DataError (4) naming damaged checkpoints after all others were copied, Interrupted (75; cause
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


def verified_by(run: RunFolder) -> str:
    """How the recipe of the newest segment, which retention goes by, has copies proved; before any, the run's own."""
    told = history(run.ledger)
    if told.segments:
        return str((told.mirror or {}).get("verify", READBACK))
    stated = run.recipe().checkpoint.mirror
    return stated.verify if stated else READBACK


def own(run: RunFolder, url: str, policy: Policy, verify: str = READBACK) -> int:
    """Take the next lease for a start, and return its number; a mirror without any state gets a first one.

    From then on another machine finds the run there, and whoever trained it until now stops. Raises what `mirror` does.
    """
    where = place(url, policy)
    where.prove(verify)
    identity = claim(where, run.run_id(), run)
    stands, known = stand(run, where, identity)
    number = leases.take_lease(where, run, identity, known.last, stands.lease)
    if known.state is None:
        with (run.path / LOCK_FILE).open("ab") as lock:
            if take(lock, 0.0):  # a process that mirrors it already does the same
                _Mirror(run, where, verify, None, PIECE_BYTES, lambda stage, done, total, unit: None).push_state()
    return number


def stand(run: RunFolder, where: Place, identity: str, piece: int = PIECE_BYTES) -> tuple[Standing, leases.Known]:
    """Where the run stands on its mirror; Refused when it was lost, after what only this folder has was left there.

    Before that, a trainer of it gets the time to save and leave.
    """
    stands = leases.standing(where, run, identity)
    known = known_states(where, stands.lease)
    try:
        leases.refuse_lost(where, run, identity, stands)
        leases.agree(where, run, known, stands.own)
    except Refused:
        waited = 0.0
        while is_owned(run) and waited < LEAVE_SECONDS:
            where.policy.sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
        orphans.leave(where, run, stands.own, piece)
        raise
    return stands, known


class _Mirror:
    """One call's work: the place, the ledger, the number of the newest state, and what was found damaged."""

    def __init__(
        self, run: RunFolder, where: Place, verify: str, bandwidth: float | None, piece: int, tell: Tell
    ) -> None:
        self.run, self.place, self.verify, self.tell = run, where, verify, tell
        where.prove(verify)
        self.ledger: Ledger = run.open_ledger()
        self.identity = claim(where, self.ledger.run_id, run)
        self.sender = Sender(where, verify, piece, Pace(bandwidth, where.policy))
        stands, known = stand(run, where, self.identity, piece)
        self.lease = self.leased(stands, known)
        self.size = -1  # the ledger's bytes in the newest state that this call wrote; `number` is that of the newest
        self.head: dict[str, Any] = {}  # the ledger's, in that state
        self.number = known.last
        self.orphans = 0  # those below were looked at
        self.looked = where.policy.clock()
        self.damaged: dict[str, str] = {}
        self.done: list[Saved] = []
        self.removed: list[Saved] = []
        self.notes: list[str] = []
        self.kept: dict[str, tuple[tuple[int, int, int], FileCopy]] = {}  # large small files, by what they looked like
        self.listed: dict[str, frozenset[str]] = {}  # a commit's name → the large pieces that it needs
        self.may_remove = True

    def run_on(self, once: bool) -> Report:
        """Copy whatever is due, newest first; then end, or wait for more."""
        told = history(self.run.ledger)
        self.take_up_orphans()
        first = True
        while True:
            if self._grew():
                self.look_for_others()
                told = history(self.run.ledger)  # read before the state, which so holds every receipt that is acted on
                self.push_state()
                if first:
                    self.finish_removal(told)
                    first = False
                continue
            due = self.due(told)
            if due:
                self.checkpoint(due[0])
            elif self.remove_surplus(told):
                continue
            elif once or _over(told):
                break
            else:
                self.place.policy.sleep(LOOK_SECONDS)
                if self.place.policy.clock() - self.looked >= LEASE_SECONDS:
                    self.look_for_others()
                    self.take_up_orphans()
        if self.damaged:
            raise DataError("; ".join(self.damaged.values()))
        verified = len(self.done) if self.verify == READBACK else 0
        full = [item.step for item in self.done if item.kind == "full"]
        return Report(
            len(self.done), verified, self.sender.sent, max(full, default=None), self.sender.there,
            self.sender.read_back, len(self.removed), tuple(self.notes),
        )  # fmt: skip

    def leased(self, stands: Standing, known: leases.Known) -> int:
        """The run's own lease; one is taken where no start did, since the recipe names no mirror."""
        if stands.owned:
            return stands.own
        if stands.lease is not None and not leases.trained_here(read(self.run.ledger)):
            raise Refused(
                f"lease {stands.lease.number} of {self.place.url} is another machine's, and {self.run.path} was not "
                "trained since it was fetched; start it first: a start takes the run over"
            )
        return leases.take_lease(self.place, self.run, self.identity, known.last, stands.lease)

    def look_for_others(self) -> None:
        """Refused, with a hold that stops the trainer, once another machine has a higher lease than this folder."""
        self.looked = self.place.policy.clock()
        if not self.place.exists(records.lease_name(self.lease)):  # the one after ours
            return
        self.lease = self.leased(*stand(self.run, self.place, self.identity, self.sender.piece))

    def take_up_orphans(self) -> None:
        """Keep and state what machines left that had lost this run; what is damaged is named at the end."""
        while self.place.exists(records.orphan_name(self.orphans)):
            try:
                orphans.take_up(self.place, self.run, self.ledger, self.identity, self.orphans)
            except DataError as fault:
                self.damaged[records.orphan_name(self.orphans)] = str(fault)
            self.orphans += 1

    def due(self, told: History) -> list[Saved]:
        """Checkpoints that stand and have no copy here: those of the line first, full ones first, newest first."""
        copied = {
            receipt.body["manifest_sha256"]
            for receipt in told.mirrored
            if receipt.body["mirror"] == self.identity and receipt.body["verify"] in (READBACK, self.verify)
        }
        copied |= {one.body["manifest_sha256"] for one in told.unmirrored if one.body["mirror"] == self.identity}
        passed_over, line = told.passed_over, {item.manifest_sha256 for item in told.line}
        found = [
            item
            for item in told.standing
            if item.manifest_sha256 not in copied
            and item.manifest_sha256 not in self.damaged
            and item.manifest_sha256 not in passed_over
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
        for name, path in travelling(self.run):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
                seen = os.fstat(source.fileno())
                if name in self.kept and self.kept[name][0] == (seen.st_ino, seen.st_size, seen.st_mtime_ns):
                    files[name] = self.kept[name][1]  # a control's weights may be large, and do not change
                    continue
                whole = whole_lines(source) if path.suffix == ".jsonl" else seen.st_size
                files[name] = self.sender.file(source, whole)
                if path.suffix == ".safetensors":
                    self.kept[name] = (seen.st_ino, seen.st_size, seen.st_mtime_ns), files[name]
            self.tell("small files", len(files), None, "files")
        if outcome is not None:
            files["outcome.json"] = self.sender.file(io.BytesIO(outcome), len(outcome))
        self.head = {"seq": head.lines - 1, "digest": head.digest}
        body = {
            "format": STATE, "run_id": self.ledger.run_id, "time": now(), "piece": self.sender.piece,
            "lease": self.lease, "ledger": self.head, "files": records.files_body(files),
        }  # fmt: skip
        data = records.encode(body)
        while (found := self.place.create(records.state_name(self.number + 1), data)) != data:
            records.parse(found, f"{self.place.url}/{records.state_name(self.number + 1)}", STATE)
            _, known = stand(self.run, self.place, self.identity, self.sender.piece)
            self.number = known.last  # one of this history, or of a machine that has lost it, is one more before ours
        self.number += 1
        self.size = size

    def _grew(self) -> bool:
        return self.run.ledger.stat().st_size != self.size

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
        data = records.encode({
            "format": COMMIT, "run_id": self.ledger.run_id, "time": now(), "piece": self.sender.piece,
            "ledger": self.head, "checkpoint": item.kind, "step": item.step, "segment": item.segment,
            "folder": item.folder, "manifest_sha256": item.manifest_sha256, "verify": self.verify,
            "files": records.files_body(files),
        })  # fmt: skip
        self.look_for_others()
        for name in records.commit_names(item.kind, item.step, item.segment, item.manifest_sha256, self.verify):
            where = f"{self.place.url}/{name}"
            found = records.parse(self.place.create(name, data), where, COMMIT)
            if found.body["manifest_sha256"] == item.manifest_sha256:
                break  # else a machine that has lost the run took the name for another checkpoint of that step
        if found.body["manifest_sha256"] != item.manifest_sha256 or found.files.keys() != files.keys():
            raise Refused(f"{where} is there already and names {found.body['manifest_sha256']} with other files than "
                          f"{item.folder} has; nothing was replaced")  # fmt: skip
        self.ledger.append("checkpoint.mirrored", {
            "checkpoint": item.kind, "step": item.step, "segment": item.segment, "folder": item.folder,
            "manifest_sha256": item.manifest_sha256, "mirror": self.identity, "commit": found.sha256,
            "verify": self.verify, "bytes": size,
        })  # fmt: skip
        self.done.append(item)

    def remove_surplus(self, told: History) -> bool:
        """Remove the oldest copy that `checkpoint.mirror.keep` leaves no room for; False when there is none.

        The newest verified one stays, extra and slot-end steps do, and weights. The receipt comes first.
        """
        keep = (told.mirror or {}).get("keep", "all")
        if keep == "all" or not self.may_remove:
            return False
        here = [one.body for one in told.mirrored if one.body["mirror"] == self.identity]
        copied = {body["manifest_sha256"] for body in here}
        proved = {body["manifest_sha256"] for body in here if body["verify"] == READBACK}
        line = told.up_to(told.tip)
        copies = [
            replace(item, copy=SAFE if item.manifest_sha256 in proved else None)
            for item in told.saved
            if item.kind == "full" and item.manifest_sha256 in copied & line
        ]
        recipe = effective(self.run.recipe(), told)
        gone = surplus(copies, keep, checkpoint_steps(recipe, _slots(queue_path(self.run, recipe)))["permanent"])
        if not gone:
            return False
        self.look_for_others()
        item = gone[0]
        hows = sorted({body["verify"] for body in here if body["manifest_sha256"] == item.manifest_sha256})
        receipt = self.ledger.append("checkpoint.unmirrored", {
            "checkpoint": item.kind, "step": item.step, "segment": item.segment, "folder": item.folder,
            "manifest_sha256": item.manifest_sha256, "mirror": self.identity, "verify": hows,
        })  # fmt: skip
        self._remove(receipt.body, history(self.run.ledger))
        self.removed.append(item)
        return True

    def finish_removal(self, told: History) -> None:
        """Go on with a removal that was interrupted after its receipt."""
        mine = [one.body for one in told.unmirrored if one.body["mirror"] == self.identity]
        if mine:
            self._remove(mine[-1], told)

    def _remove(self, gone: dict[str, Any], told: History) -> None:
        """Take away the large pieces that no other copy needs, then the commit; a fault is noted and stops nothing.

        Small files stay: states may name the same bytes.
        """
        try:
            for how in gone["verify"]:
                found = self._commit(gone, how)
                if found is None:
                    continue
                name, commit = found
                needed = {piece for _, copy in self.kept.values() for piece in copy.pieces}
                for one in told.mirrored:
                    key = str(one.body["commit"])
                    if one.body["mirror"] == self.identity and key not in self.listed:
                        other = self._commit(one.body, one.body["verify"])
                        self.listed[key] = _large(other[1]) if other else frozenset()
                    needed |= self.listed.get(key, frozenset())
                for piece in _large(commit) - needed:
                    self.place.remove(records.piece_name(piece))
                    self.sender.proved.discard(piece)
                self.place.remove(name)
        except (Refused, DataError) as fault:
            self.may_remove = False
            self.notes.append(f"the copy of {gone['folder']} could not be removed, and no other will be: {fault}")

    def _commit(self, item: dict[str, Any], how: str) -> tuple[str, Record] | None:
        """Name and record of a copy's commit, or None when there is none."""
        manifest = item["manifest_sha256"]
        for name in records.commit_names(item["checkpoint"], item["step"], item["segment"], manifest, how):
            data = self.place.read(name)
            if data is not None:
                found = records.parse(data, f"{self.place.url}/{name}", COMMIT)
                if found.body["manifest_sha256"] == manifest:
                    return name, found
        return None

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


def claim(where: Place, run_id: str | None, run: RunFolder | None = None) -> str:
    """The digest that names this mirror; the first to come with a run makes the place that run's for ever.

    Raises Refused when it holds another run, or none although `run` had copies there, DataError when it holds none and
    `run_id` is None.
    """
    name = f"{where.url}/{records.PLACE_FILE}"
    data = where.read(records.PLACE_FILE)
    if data is None:
        if run_id is None:
            raise DataError(f"{name} is not there; {where.url} holds no mirror of a run: correct the address")
        if run is not None and (why := leases.emptied(where, run)) is not None:
            raise Refused(why)
        body = {"format": records.PLACE, "run_id": run_id, "time": now(), "mirror": uuid.uuid4().hex}
        data = where.create(records.PLACE_FILE, records.encode(body))
    theirs, identity = records.parse_place(data, name)
    if run_id is not None and theirs != run_id:
        raise Refused(f"{where.url} holds run {theirs}, not {run_id}; take an address of its own for each run")
    return identity


def _large(commit: Record) -> frozenset[str]:
    """The pieces of a checkpoint's tensors."""
    return frozenset(
        piece for name, copy in commit.files.items() if name.endswith(".safetensors") for piece in copy.pieces
    )


def _slots(queue: Path) -> list[int] | None:
    try:
        return [slot.updates for slot in queues.load(queue).slots]
    except AssayError:
        return None


def _over(told: History) -> bool:
    return told.ended or told.abandoned is not None
