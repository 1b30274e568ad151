"""Approvals of slots: signed statements of reviewers about one exact line of one queue at one head.

They lie beside the queue in `QUEUE.d/approved/<line>.<key id>.json`, named by what they are about, never
replaced. Whether a slot has as many as the queue's header demands is re-derived whenever it is asked.
No key is searched for: who reviews is what the header (`trust`) says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.data import fields, reports
from assay.errors import InputError, Refused, VerificationError
from assay.files.digest import PREFIX
from assay.files.publish import publish_new
from assay.files.reading import read_object
from assay.ledger import signing
from assay.ledger.keys import keyid, public_key
from assay.ledger.ledger import now
from assay.ledger.public import check_public

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from assay.data.queue import Queue, Slot
    from assay.data.shard import Shard

PREDICATE_TYPE = "urn:assay:slot-approval:1"
ROLE = "reviewer"
_LIMIT = 4 << 20
_SHORT = 16  # hex digits of a key id in a file name; the envelope holds all of them
_SHOWN = 3  # approvals of other lines that a refusal names


@dataclass(frozen=True)
class Trust:
    """Who approves a queue's slots: public keys, how many different ones of them a slot needs, and on what grounds."""

    reviewers: tuple[str, ...]
    threshold: int
    overlap: bool = False  # an approval counts only with a report on overlap


@dataclass(frozen=True)
class Approval:
    """One envelope that lies there for a slot: the reviewers' keys that it counts for, or why for none."""

    path: Path
    reviewers: tuple[str, ...]
    why: str | None

    def facts(self) -> dict[str, Any]:
        """As a record: file name, key ids, whether it counts and, if not, why."""
        return {
            "file": self.path.name,
            "keyids": [keyid(key) for key in self.reviewers],
            "valid": self.why is None,
            "why": self.why,
        }


def trust_of(record: Mapping[str, Any] | None, where: str) -> Trust | None:
    """The `trust` of a queue's header, or None where there is none.

    Its form is `{"reviewer": ["ed25519:…", …], "threshold": N, "overlap": "required"}`; without `threshold` one
    approval is enough, without `overlap` no report on it is asked for.
    Raises InputError for another form, a key twice, or more approvals than there are reviewers.
    """
    if record is None:
        return None
    where = f"{where}, trust"
    fields.known(record, (ROLE, "threshold", "overlap"), where)
    keys = fields.present(record, ROLE, where)
    if not isinstance(keys, list) or not keys:
        raise InputError(f"{where}: {ROLE} is {keys!r:.60}; a list of at least one public key is expected")
    reviewers = tuple(check_public(key, f"{where}: {ROLE}[{number}]") for number, key in enumerate(keys))
    if len(set(reviewers)) != len(reviewers):
        raise InputError(f"{where}: {ROLE} names a key twice; name each reviewer's key once")
    threshold = fields.integer(record, "threshold", where, 1, len(reviewers)) if "threshold" in record else 1
    if "overlap" in record:
        fields.choice(record, "overlap", where, ("required",))
    return Trust(reviewers, threshold, "overlap" in record)


def folder(queue: Path) -> Path:
    """Where the approvals of the queue file at `queue` lie."""
    return queue.with_name(f"{queue.name}.d") / "approved"


def approve(
    queue: Queue,
    slot: Slot,
    key: Ed25519PrivateKey,
    shards: Mapping[str, Shard],
    *,
    licences: Path | None = None,
    overlap: Path | None = None,
    look: Callable[[dict[str, Any]], None] = lambda signed: None,
) -> tuple[Path, dict[str, Any]]:
    """Sign the line of `slot`, which `next_slot` made for the queue's head; (envelope's path, what was signed).

    `shards` are those of the slot that are here, by digest; their manifests give the licence summary.
    `licences` and `overlap` are reports that the reviewer read; their digests are signed with it, and the key
    figures of the second, which must be about this line. `look` is called with what will be signed, before it is.
    Raises Refused when the key is none of the queue's reviewers or a report does not fit, InputError when the key
    approved the line before.
    """
    signer = public_key(key)
    trust = trust_of(queue.trust, str(queue.path))
    if trust is not None and signer not in trust.reviewers:
        raise Refused(f"{queue.path}: {signer} is none of its reviewers; {', '.join(trust.reviewers)} may approve")
    signed = predicate(queue, slot, shards, licences=licences, overlap=overlap)
    look(signed)
    statement = signing.statement(f"slot {slot.number}", slot.digest, PREDICATE_TYPE, {**signed, "time": now()})
    path = folder(queue.path) / f"{slot.digest.removeprefix(PREFIX)}.{keyid(signer).removeprefix(PREFIX)[:_SHORT]}.json"
    envelope = signing.encode(signing.sign(statement, key))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_new(path, envelope)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; an approval lies beside its queue") from None
    return path, signed


def predicate(
    queue: Queue, slot: Slot, shards: Mapping[str, Shard], *, licences: Path | None = None, overlap: Path | None = None
) -> dict[str, Any]:
    """What `approve` would sign, but for the time: the line, its licences, its overlap. For reviewers to look at."""
    trust = trust_of(queue.trust, str(queue.path))
    if trust is not None and trust.overlap and overlap is None:
        raise Refused(f"{queue.path} demands a report on overlap with each approval; make one with assay data overlap "
                      f"--queue {queue.path} and give it with --overlap")  # fmt: skip
    report, figures = reports.overlap_report(overlap, queue, slot) if overlap is not None else (None, None)
    stated = reports.licences(slot.parts, shards)
    return {
        "role": ROLE,
        **_facts(queue, slot),
        "licences": stated,
        "by_licence": reports.by_licence(stated),
        "shards_not_here": sorted({part.shard for part in slot.parts if part.shard not in shards}),
        "licences_report": None if licences is None else reports.evidence(licences, "a report on licences"),
        "overlap_report": report,
        "overlap": figures,
    }


def approvals(queue: Queue, slot: Slot, place: Path | None = None) -> list[Approval]:
    """All envelopes that lie there for the slot's line, each judged, by file name. `place`: not beside the queue."""
    trust = trust_of(queue.trust, str(queue.path))
    reviewers = trust.reviewers if trust else ()
    place, line = place or folder(queue.path), slot.digest.removeprefix(PREFIX)
    return [_judge(queue, slot, place / name, reviewers) for name in _names(place) if name.startswith(f"{line}.")]


def demand(queue: Queue, slot: Slot, place: Path | None = None) -> tuple[str, ...]:
    """The key ids of the reviewers who approved the slot's line; empty when the queue demands no approval.

    `place`: where the envelopes lie, when not beside the queue. Raises Refused when there are fewer than the
    header demands, naming each envelope that does not count and what the approvals of other lines there are for.
    """
    trust = trust_of(queue.trust, str(queue.path))
    if trust is None:
        return ()
    found = approvals(queue, slot, place)
    approved = {key for one in found for key in one.reviewers}
    if len(approved) < trust.threshold:
        reasons = [f"{one.path.name} does not count: {one.why}" for one in found if one.why]
        reasons += _others(queue, slot, place or folder(queue.path))
        raise Refused(
            f"{queue.path} demands an approval of each slot by {trust.threshold} of its {len(trust.reviewers)} "
            f"reviewer(s); slot {slot.number} (line {slot.digest}) has {len(approved)}; "
            f"{''.join(f'{reason}; ' for reason in reasons)}approve that line with assay data approve"
        )
    return tuple(keyid(key) for key in trust.reviewers if key in approved)


def check_slots(queue: Queue) -> None:
    """Refused when a slot lacks the approvals that the queue's header demands."""
    for slot in queue.slots:
        demand(queue, slot)


def survey(queue: Queue) -> tuple[list[dict[str, Any]], list[str]]:
    """(slot and its envelopes for each slot, a sentence for each slot that lacks approvals) of a queue with `trust`."""
    entries: list[dict[str, Any]] = []
    problems: list[str] = []
    for slot in queue.slots if queue.trust is not None else ():
        entries.append({"slot": slot.number, "approvals": [one.facts() for one in approvals(queue, slot)]})
        try:
            demand(queue, slot)
        except Refused as fault:
            problems.append(str(fault))
    return entries, problems


def _facts(queue: Queue, slot: Slot) -> dict[str, Any]:
    """What the signed statement says of the line, so that it can be read without the line."""
    return {
        "queue": queue.header_digest,
        "head": queue.prefix(slot.number),
        "slot": slot.number,
        "updates": slot.updates,
        "epochs": slot.epochs,
        "tokens": slot.tokens,
        "parts": [
            {"shard": part.shard, "start": part.start, "stop": part.stop, "source": part.source} for part in slot.parts
        ],
    }


def _names(place: Path) -> list[str]:
    """Names of the envelopes in a folder, sorted; half-written ones are left out."""
    return sorted(name for name in os.listdir(place) if name.endswith(".json")) if place.is_dir() else []


def _judge(queue: Queue, slot: Slot, path: Path, reviewers: tuple[str, ...]) -> Approval:
    try:
        envelope = read_object(path, "an approval", _LIMIT)
        statement = signing.verify(envelope, reviewers)
        wrong = _mismatch(queue, slot, statement)
        trust = trust_of(queue.trust, str(queue.path))
        if wrong is None and trust is not None and trust.overlap and not statement["predicate"].get("overlap_report"):
            wrong = "it was signed without a report on overlap, which the queue demands"
        signed_by = tuple(signing.signers(envelope, reviewers))
    except (InputError, VerificationError) as fault:
        return Approval(path, (), str(fault))
    return Approval(path, () if wrong else signed_by, wrong)


def _mismatch(queue: Queue, slot: Slot, statement: Mapping[str, Any]) -> str | None:
    """Why a signed statement is no approval of this slot's line, or None."""
    if statement["predicateType"] != PREDICATE_TYPE:
        return f"it is signed, but states {statement['predicateType']!r:.80}, not {PREDICATE_TYPE!r}"
    predicate = statement["predicate"]
    _, line = signing.subject(statement)
    if line != slot.digest:
        return f"it approves {_about(statement)}"
    expected: dict[str, Any] = {"role": ROLE, **_facts(queue, slot)}
    for key, value in expected.items():
        if predicate.get(key) != value:
            return f"it is for {key} {predicate.get(key)!r:.100}, but this line has {value!r:.100}"
    return None


def _about(statement: Mapping[str, Any]) -> str:
    predicate = statement["predicate"]
    return (
        f"line {signing.subject(statement)[1]}, slot {predicate.get('slot')!r:.20} at head "
        f"{predicate.get('head')!s:.80} of queue {predicate.get('queue')!s:.80}"
    )


def _others(queue: Queue, slot: Slot, place: Path) -> list[str]:
    """What the approvals of lines that are neither this one nor in the queue say that they are for."""
    known = {slot.digest, *(one.digest for one in queue.slots)}
    waiting = [place / name for name in _names(place) if PREFIX + name.split(".")[0] not in known]
    return list(_claims(waiting[:_SHOWN]))


def _claims(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield f"{path.name} is for {_about(signing.unverified(read_object(path, 'an approval', _LIMIT)))}"
        except (InputError, VerificationError):
            yield f"{path.name} is no approval"
