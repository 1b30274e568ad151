"""Claims about who approved what was trained on: the reviewers' signatures under every consumed slot's line.

Two facts, never one: enough of the queue's own reviewers signed exactly that line, and the reader accepts their
keys. The first is derived from the envelopes; the second nobody can say for the reader, who names keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from assay.data import approval
from assay.data.approval import Trust
from assay.data.queue import Queue, Slot
from assay.errors import AssayError
from assay.ledger.keys import keyid
from assay.recipe.schema import Recipe
from assay.release import bundle as bundles
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.release.claims_data import DATA
from assay.run import inputs
from assay.run.folder import RunFolder

APPROVALS, TRUSTED = "approvals", "approved by keys that the reader trusts"


def claims(case: Case, recipe: Recipe) -> Iterator[Claim]:
    """Both claims of a queue with reviewers; without them one more only where the reader asks, and none otherwise."""
    queue = case.queue
    if queue is None:
        yield judge(DATA, APPROVALS, [], "", "the queue that names its reviewers is not here or does not hold")
        return
    trust = approval.trust_of(queue.trust, str(queue.path))
    if trust is None:
        if case.bundle and (names := sorted(_names(case.root / bundles.APPROVALS))):
            yield judge(DATA, APPROVALS, [f"{names[0]}: the queue names no reviewers"], "")
        if case.trust:
            yield judge(DATA, TRUSTED, [], "", "the queue names no reviewers: nobody's approval is claimed")
        return
    slots = _consumed(case, queue, recipe)
    place = _place(case, recipe)
    yield _approvals(case, queue, trust, slots, place)
    yield _trusted(case, queue, trust, slots, place)


def _consumed(case: Case, queue: Queue, recipe: Recipe) -> list[Slot]:
    """Slots that the ledger entered, and those that an update of the metrics reads."""
    first, last = recipe.start.first_update, case.reached()
    entered = {receipt.body["slot"] for receipt in case.history.slots}
    return [s for s in queue.slots if s.number in entered or (s.first_update < last and s.end_update > first)]


def _place(case: Case, recipe: Recipe) -> Path:
    if case.bundle:
        return case.root / bundles.APPROVALS
    return approval.folder(inputs.queue_path(RunFolder(case.root), recipe))


def _approvals(case: Case, queue: Queue, trust: Trust, slots: list[Slot], place: Path) -> Claim:
    """Each consumed slot has the demanded signatures of reviewers, those that its receipt names among them."""
    if not case.bundle and not place.is_dir():
        return judge(DATA, APPROVALS, [], "", f"{place} is not here; the approvals lie beside the queue")
    faults, signed, expected = [], [], set[str]()
    for slot in slots:
        try:
            approved = approval.demand(queue, slot, place)
        except AssayError as fault:
            faults.append(str(fault))
            continue
        signed.append(f"slot {slot.number} by {', '.join(approved)}")
        for receipt in case.history.slots:
            stated = receipt.body.get("approved_by")
            if receipt.body["slot"] == slot.number and (not isinstance(stated, list) or set(stated) - set(approved)):
                where = f"receipt {receipt.seq} (slot.entered)"
                faults.append(differ(where, "approved_by", f"some of {', '.join(approved)}", stated))
    for slot in slots if case.bundle else ():
        for one in approval.approvals(queue, slot, place):
            expected.add(one.path.name)
            if one.why is not None:
                faults.append(f"{bundles.APPROVALS}/{one.path.name} (slot {slot.number}): {one.why}")
    faults += [
        f"{bundles.APPROVALS}/{name} is for no slot that this run consumed"
        for name in sorted(_names(place) - expected)
        if case.bundle
    ]
    demanded = f"{trust.threshold} of {counted(len(trust.reviewers), 'reviewer')} demanded"
    evidence = f"{counted(len(slots), 'consumed slot')}, {demanded}: {'; '.join(signed) or 'none'}"
    return judge(DATA, APPROVALS, list(dict.fromkeys(faults)), evidence)


def _trusted(case: Case, queue: Queue, trust: Trust, slots: list[Slot], place: Path) -> Claim:
    """As many signatures as the queue demands are by keys that the reader named."""
    if not case.trust:
        keys = ", ".join(trust.reviewers)
        return judge(DATA, TRUSTED, [], "", f"name the keys that you accept with --trust; the queue's are {keys}")
    faults, found = [], set[str]()
    for slot in slots:
        signed = {key for one in approval.approvals(queue, slot, place) for key in one.reviewers}
        accepted = signed & set(case.trust)
        found |= accepted
        if len(accepted) < trust.threshold:
            others = ", ".join(sorted(signed)) or "nobody"
            faults.append(
                f"slot {slot.number}: {len(accepted)} of {trust.threshold} needed signatures are by keys that the "
                f"reader trusts; signed by {others}"
            )
    names = ", ".join(sorted(keyid(key) for key in found))
    return judge(DATA, TRUSTED, faults, f"{counted(len(slots), 'consumed slot')}: {names}")


def _names(place: Path) -> set[str]:
    return set(os.listdir(place)) if place.is_dir() else set()
