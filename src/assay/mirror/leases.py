"""Who may write a run's history, by numbered create-only leases on its mirror, and which state counts by them.

Each start with a mirror takes the next lease; who sees a higher one than its own stops. A lease is this folder's when
its ledger says so and its salt agrees, so that no fetched or copied folder inherits one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from assay.errors import DataError, Refused
from assay.files.digest import digest
from assay.ledger.ledger import Receipt, now, read
from assay.mirror import records
from assay.mirror.place import Place
from assay.mirror.records import LEASE, STATE, Lease, Record
from assay.run.folder import RunFolder, address_digest, salted
from assay.run.history import OPENING

NAMING = ("lease", "checkpoint.fetched")  # receipts that name the address of a mirror
CAUSE = "lease"  # of the hold that stands where a run was lost to another machine


@dataclass(frozen=True)
class Standing:
    """Where a folder stands: the newest `lease` (None: there is none), the highest of its `own` (0: none).

    `given`: the highest lease of others that somebody looked past, by lifting the hold it had brought.
    """

    lease: Lease | None
    own: int
    given: int

    @property
    def lost(self) -> bool:
        """True when another machine took the run from this folder, which had it, and nobody took it back."""
        return self.own > 0 and self.lease is not None and self.lease.number > max(self.own, self.given)

    @property
    def owned(self) -> bool:
        """True when the newest lease is this folder's."""
        return self.lease is not None and self.lease.number == self.own


@dataclass(frozen=True)
class Known:
    """A mirror's states: the number of the `last` one (-1: none), and the `number` and `state` that count."""

    last: int
    number: int
    state: Record | None


def holder_of(run: RunFolder) -> str:
    """The salted name under which this folder holds leases; Refused without a salt."""
    if not run.salt.is_file():
        raise Refused(f"{run.salt} is missing, by which leases are told from another machine's; go on with assay fetch "
                      "in a new folder")  # fmt: skip
    return salted(run, "lease")


def trained_here(receipts: Iterable[Receipt]) -> bool:
    """True when a segment was opened, or a checkpoint saved, since the folder was fetched, if it was."""
    trained = False
    for one in receipts:
        trained = one.kind != "checkpoint.fetched" and (trained or one.kind in (*OPENING, "checkpoint.saved"))
    return trained


def emptied(where: Place, run: RunFolder) -> str | None:
    """Why a place that holds no mirror is none to begin one in: this run has one at that address. None: it has not.

    So a disk that is not mounted is found, whose mount point is an empty folder.
    """
    address = address_digest(run, where.url)
    if not any(one.body.get("address") == address for one in read(run.ledger) if one.kind in NAMING):
        return None
    return (
        f"{where.url} holds no mirror, but {run.path} has its copies there: is its disk mounted? Mount it, then start "
        "again; or, should the copies be gone for good, take another address"
    )


def newest_lease(where: Place, at_least: int = 0) -> Lease | None:
    """The lease with the highest number; `at_least` is a number that is known to be there."""
    index = where.newest(records.lease_name, at_least - 1)
    return None if index < 0 else read_lease(where, index + 1)


def read_lease(where: Place, number: int) -> Lease:
    """The lease of that number; DataError when it is gone or damaged."""
    name = records.lease_name(number - 1)
    data = where.read(name)
    if data is None:
        raise DataError(f"{where.url}/{name} was there and is gone; somebody removes records of this mirror")
    return records.parse_lease(data, f"{where.url}/{name}")


def standing(where: Place, run: RunFolder, identity: str, at_least: int = 0) -> Standing:
    """Where this folder stands on the mirror `identity`."""
    lease, holder = newest_lease(where, at_least), holder_of(run)
    asked: dict[int, str] = {}
    given = pending = 0
    for receipt in read(run.ledger):  # after the lease: what the newest one is about was written before it was taken
        body = receipt.body
        if body.get("mirror") == identity and receipt.kind == "lease" and body.get("holder") == holder:
            asked[int(body["lease"])] = str(body["record"])
        elif body.get("mirror") == identity and receipt.kind == "hold" and body.get("cause") == CAUSE:
            pending = int(body["lease"])
        elif receipt.kind == "released":
            given = max(given, pending)
    newest = lease.number if lease else 0
    if lease is not None and asked.get(newest) == lease.sha256:
        return Standing(lease, newest, given)
    # One of a higher number, or with other bytes than the record, was asked for and not had.
    mine = [number for number in sorted(asked, reverse=True) if number < newest]
    own = next((number for number in mine if read_lease(where, number).sha256 == asked[number]), 0)
    return Standing(lease, own, given)


def take_lease(where: Place, run: RunFolder, identity: str, last: int, newest: Lease | None) -> int:
    """Take the lease after `newest`, and return its number; its receipt is written before it is asked for.

    `last`: the number of the newest state. Refused when another machine takes it at the same moment.
    """
    ledger, number, holder = run.open_ledger(), (newest.number if newest else 0) + 1, holder_of(run)
    data = lease_bytes(ledger.run_id, number, holder, last)
    ledger.append("lease", lease_body(number, identity, holder, data, address_digest(run, where.url)))
    put_lease(where, number, data)
    return number


def lease_body(number: int, identity: str, holder: str, data: bytes, address: str) -> dict[str, Any]:
    """The receipt of a lease: it is had where the mirror holds the record with this digest.

    `address`: the digest of the mirror's address, by which a mirror that was emptied is told from a new one.
    """
    return {"lease": number, "mirror": identity, "holder": holder, "record": digest(data), "address": address}


def lease_bytes(run_id: str, number: int, holder: str, last: int) -> bytes:
    """A lease's record; `last` is the number of the newest state, -1 without any."""
    return records.encode(
        {"format": LEASE, "run_id": run_id, "number": number, "holder": holder, "state": last, "time": now()}
    )


def put_lease(where: Place, number: int, data: bytes) -> None:
    """Create the lease; Refused when somebody was there first."""
    name = records.lease_name(number - 1)
    if where.create(name, data) != data:
        raise Refused(
            f"{where.url}/{name} was taken by another machine at the same moment, which trains this run now; stop "
            "one of the two"
        )


def lost_words(where: Place, run: RunFolder, stands: Standing) -> str:
    """Why the run may not be trained here, and the two ways out."""
    assert stands.lease is not None
    return (
        f"lease {stands.lease.number} of {where.url} was taken by another machine on {stands.lease.time}, after lease "
        f"{stands.own} of {run.path}: training went on elsewhere. Go on with assay fetch in a new folder; or, should "
        f"that machine be gone for good, take the run back with assay release {run.path} and start it"
    )


def refuse_lost(where: Place, run: RunFolder, identity: str, stands: Standing) -> None:
    """Hold the run and raise Refused when it was lost to another machine; the trainer sees the hold and stops."""
    if not stands.lost or stands.lease is None:
        return
    held = [one for one in read(run.ledger) if one.kind in ("hold", "released")][-1:]
    if not (held and held[0].kind == "hold" and held[0].body.get("lease") == stands.lease.number):
        run.open_ledger().append("hold", {
            "cause": CAUSE, "lease": stands.lease.number, "mirror": identity,
            "reason": f"lease {stands.lease.number} was taken by another machine on {stands.lease.time}",
        })  # fmt: skip
    raise Refused(lost_words(where, run, stands))


def known_states(where: Place, lease: Lease | None) -> Known:
    """What counts: of the states under the highest lease that wrote any, the newest. `lease` is the newest one.

    A machine that has lost the run, and has not seen it, may still write a state or two.
    """
    last = where.newest(records.state_name)
    at, best, number = last, None, -1
    while at >= 0 and (best is None or lease is not None):
        floor = lease.state if lease else -1  # states above it were written while the lease stood
        while at > floor and (best is None or best.lease < (lease.number if lease else 0)):
            found = _state(where, at)
            if best is None or found.lease > best.lease:
                best, number = found, at
            at -= 1
        if lease is None or (best is not None and best.lease >= lease.number):
            break
        lease = read_lease(where, lease.number - 1) if lease.number > 1 else None
        if best is not None and best.lease >= (lease.number if lease else 0):
            break
    return Known(last, number, best)


def agree(where: Place, run: RunFolder, known: Known, own: int) -> None:
    """Refused when the state that counts is not of this ledger's history, unless a lease below `own` wrote it.

    So a disk that comes back after training went on elsewhere is found: the mirror has receipts that it lacks.
    """
    if known.state is None or known.state.lease < own:
        return
    seq, sha256 = known.state.head
    mine = next((receipt.digest for receipt in read(run.ledger) if receipt.seq == seq), None)
    if mine != sha256:
        raise Refused(
            f"{where.url} holds receipt {seq} ({sha256}) of this run, and {run.ledger} "
            f"{'ends before it' if mine is None else 'has another one'}: training went on elsewhere; go on with "
            "assay fetch in a new folder, or copy this history to another address"
        )


def _state(where: Place, number: int) -> Record:
    name = records.state_name(number)
    data = where.read(name)
    if data is None:
        raise DataError(f"{where.url}/{name} was there and is gone; somebody removes records of this mirror")
    return records.parse(data, f"{where.url}/{name}", STATE)
