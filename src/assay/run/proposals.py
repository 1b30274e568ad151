"""The acts of people on amendments: propose, approve, install, list. Each is a receipt and, for people, a file.

A proposal that the rule forbids at the present step is refused with its reason; nothing is adopted here. Adoption
is the trainer's, at its next full checkpoint or restart, under the same rule.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError, InputError, Refused
from assay.files.digest import PREFIX, canonical_exact
from assay.files.publish import publish_file, publish_new
from assay.files.reading import read_bytes, read_object
from assay.ledger import signing
from assay.ledger.keys import keyid, public_key
from assay.ledger.ledger import now
from assay.plan.cadence import checkpoint_steps
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run import curves
from assay.run.amendments import (
    APPROVED,
    FORMAT,
    INSTALLED,
    KEYS,
    PREDICATE_TYPE,
    PROPOSED,
    REFUSED,
    Amendment,
    Changes,
    allows_decay,
    amended_recipe,
    amendments,
    approval_fault,
    approvers,
    before_update,
    demanded_role,
    effective,
    judge,
    proposal_digest,
    rule_fault,
    trusted,
    values,
)
from assay.run.cadence import in_force
from assay.run.folder import RunFolder, require_run
from assay.run.history import History, history
from assay.run.inputs import queue_path
from assay.run.owner import is_owned
from assay.run.status import prepared, reported

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SHORT = 16  # hex digits of a key id in a file name
_LIMIT = 4 << 20


@dataclass(frozen=True)
class Outlook:
    """A proposal as people see it: the facts for a script, both recipes and the step for the curves."""

    facts: dict[str, Any]
    old: Recipe
    new: Recipe
    step: int


def propose(run: RunFolder, changes: Changes, reason: str) -> Outlook:
    """Propose the changes, or refuse them by the rule at the present step; both are receipts.

    InputError when nothing would change or the result is no recipe; Refused for a closed run.
    """
    told, base = _told(run)
    old = _in_force(base, told)
    code = told.segments[-1].body["code"]["sha256"] if told.segments else None
    if not reason.strip():
        raise InputError("--reason is empty; say why, for the ledger")
    _refuse_no_change(old, code, changes)
    new = amended_recipe(old, changes)
    step, adopted_at = _steps(run, told, old)
    limit, role = before_update(old, changes, step), demanded_role(base, changes)
    ready = prepared(queue_path(run, old))
    fault = rule_fault(old, changes, step)
    if fault is None and role is not None and not getattr(base.trust, role):
        fault = f"schedule.intent is no-decay, and the recipe names no {role} (trust.{role}) who could allow a decay"
    facts: dict[str, Any] = {
        "allowed": fault is None,
        "before_update": limit,
        "state": "refused" if fault else "proposed",
        "lr_before": _rate(old, step),
        "lr_after": _rate(new, step),
        "step": step,
        "reason": fault or reason,
        "approval": role,
        "adoption_expected_at": adopted_at,
        "prepared": ready,
        "missing": None if ready is None else max(0, new.schedule.updates - ready),
        "in_time": limit is None if adopted_at is None else rule_fault(old, changes, adopted_at) is None,
        "curves": [
            {"update": update, "before": before, "after": after} for update, before, after in curves.curves(old, new)
        ],
    }
    if fault is not None:
        body = {"amendment": None, "changes": changes.record(), "step": step, "checkpoint": None, "reason": fault}
        run.open_ledger().append(REFUSED, body)
        return Outlook({**facts, "amendment": None, "sha256": None, "image": None}, old, new, step)
    present = values(old, code)
    proposal = {
        "format": FORMAT,
        "run_id": told.run_id,
        "changes": changes.record(),
        "old": {key: present[key] for key in KEYS if getattr(changes, key) is not None},
        "before_update": limit,
        "approval": role,
        "step": step,
        "reason": reason,
        "time": now(),
    }
    name, proposal = _publish(run, proposal)
    sha256 = proposal_digest(proposal)
    image = run.amendments / f"{name}.svg"
    publish_file(image, curves.svg(old, new, step, f"{old.name}, amendment {name}"))
    run.open_ledger().append(PROPOSED, {"amendment": name, "sha256": sha256, "proposal": proposal})
    return Outlook({**facts, "amendment": name, "sha256": sha256, "image": str(image)}, old, new, step)


def approve(run: RunFolder, name: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """Sign the proposal; the envelope lies in the run's folder and in the receipt `amendment.approved`.

    Refused when the run's recipe names the key in no role that counts, or the file that people read was edited;
    InputError when the key has signed before.
    """
    told, base = _told(run)
    amendment = _named(run, told, name)
    _refuse_edited(run, amendment)
    signer = public_key(key)
    demanded = demanded_role(base, amendment.changes)
    role = next(
        (one for one in ((demanded,) if demanded else ("reviewer", "operator")) if signer in trusted(base, one)), None
    )
    if role is None:
        raise Refused(
            f"{signer} may not approve {name}: it is no {demanded or 'reviewer or operator'} whom "
            f"{run.recipe_json} names under trust"
        )
    if keyid(signer) in approvers(base, amendment)[0]:
        raise InputError(f"{signer} has approved {name} before; one approval by a key counts")
    predicate = {"role": role, "time": now(), "run_id": told.run_id, "proposal": dict(amendment.proposal)}
    statement = signing.statement(f"amendment {name}", amendment.sha256, PREDICATE_TYPE, predicate)
    envelope = signing.sign(statement, key)
    path = run.amendments / f"{name}.{keyid(signer).removeprefix(PREFIX)[:_SHORT]}.json"
    run.amendments.mkdir(exist_ok=True)
    publish_file(path, signing.encode(envelope))
    _record_approval(run, amendment, role, keyid(signer), envelope)
    return _facts(base, told, _named(run, _told(run)[0], name)) | {"keyid": keyid(signer), "envelope": str(path)}


def install(run: RunFolder, name: str) -> dict[str, Any]:
    """Hand an approved proposal to the trainer, which adopts it right after its next full checkpoint.

    Approvals that were signed elsewhere and lie as files in the run's folder are taken up first. Refused (exit 3)
    without the demanded approval or when the proposal's file was edited, and with the receipt `amendment.refused`
    when the rule forbids it by now.
    """
    told, base = _told(run)
    amendment = _named(run, told, name)
    if amendment.state not in ("proposed", "approved"):
        raise Refused(f"{name} of {run.path} is {amendment.state} already; only what waits can be installed")
    _refuse_edited(run, amendment)
    _take_up_files(run, base, amendment)
    told, base = _told(run)
    amendment = _named(run, told, name)
    fault = approval_fault(base, amendment)
    if fault is not None:
        raise Refused(f"{name} of {run.path} is not installed: {fault}")
    current = _in_force(base, told)
    step, _ = _steps(run, told, current)
    fault = rule_fault(current, amendment.changes, step)
    subject = {"amendment": name, "sha256": amendment.sha256}
    if fault is not None:
        run.open_ledger().append(REFUSED, {**subject, "step": step, "checkpoint": told.tip, "reason": fault})
        raise Refused(f"{name} of {run.path} is refused: {fault}")
    run.open_ledger().append(INSTALLED, {**subject, "step": step, "approved_by": approvers(base, amendment)[0]})
    return _facts(base, told, _named(run, _told(run)[0], name))


def listing(run: RunFolder) -> list[dict[str, Any]]:
    """All amendments of a run with their states, in order."""
    require_run(run)
    told, base = history(run.ledger), run.recipe()
    return [_facts(base, told, one) for one in amendments(told, told.tip)]


def _told(run: RunFolder) -> tuple[History, Recipe]:
    """History and the run's own recipe; Refused when the history is closed."""
    require_run(run)
    told = history(run.ledger)
    if told.abandoned is not None:
        raise Refused(f"{run.path} was abandoned on {told.abandoned.time}; nothing of it changes any more")
    base = run.recipe()
    if recipes.digest(base) != told.created.body["recipe"]:
        raise Refused(f"{run.recipe_json} is not the recipe that receipt 0 names; restore it (assay verify {run.path})")
    return told, base


def _in_force(base: Recipe, told: History) -> Recipe:
    """The recipe in force, with the cadence of the recipe that the last segment was given, unless one was adopted."""
    recipe = effective(base, told)
    if told.segments and not any("checkpoint_every" in one.body["changes"] for one in told.adopted_by(told.tip)):
        every = told.segments[-1].body.get("resolved", {}).get("checkpoint", {}).get("every")
        if every is not None:
            whole = recipes.resolved(recipe)
            whole["checkpoint"]["every"] = every
            recipe = recipes.from_resolved(whole, "the resolved recipe of the last segment")
    return recipe


def _named(run: RunFolder, told: History, name: str) -> Amendment:
    found = {one.id: one for one in amendments(told, told.tip)}
    if name not in found:
        raise InputError(f"{run.path} has no amendment {name!r}; it has: {', '.join(found) or 'none'}")
    return found[name]


def _refuse_edited(run: RunFolder, amendment: Amendment) -> None:
    """Refused when the file of the proposal is not what the ledger holds: people read the one, the other is signed."""
    path = run.amendments / f"{amendment.id}.json"
    if not path.exists() and not path.is_symlink():
        return  # only a copy was lost
    if read_bytes(path, "a proposal", _LIMIT) != _document(amendment.proposal):
        raise Refused(
            f"{path} is not the proposal that the ledger holds as {amendment.sha256} (receipt {amendment.proposed.seq})"
            "; restore the file, or remove it and read the ledger's, or propose anew"
        )


def _document(proposal: Mapping[str, Any]) -> bytes:
    """The file of a proposal: the bytes that are signed, and a newline."""
    return canonical_exact(dict(proposal)) + b"\n"


def _refuse_no_change(old: Recipe, code: str | None, changes: Changes) -> None:
    present = values(old, code)
    asked = {key: getattr(changes, key) for key in KEYS if getattr(changes, key) is not None}
    if not asked:
        raise InputError("nothing is amended; give --updates, --decay, --checkpoint-every or --code")
    for key, value in asked.items():
        if value == present[key] and not (key == "decay" and allows_decay(old, changes)):
            raise InputError(f"{key} is {value} already; leave it out, or give another value")


def _steps(run: RunFolder, told: History, recipe: Recipe) -> tuple[int, int | None]:
    """(the step to judge at, the step at which it is expected to be adopted).

    A run that trains is at the step that its metrics report, and adopts at its next full checkpoint; one that
    stands goes on from its newest full checkpoint, and adopts there. None: no full checkpoint is due any more.
    """
    saved = max((item.step for item in told.line if item.kind == "full"), default=recipe.start.first_update)
    if not is_owned(run):
        return saved, saved
    opened = told.segments[-1].first if told.segments else saved
    step = max(saved, opened, reported(run.metrics).step or 0)
    coming = [one for one in checkpoint_steps(recipe, None, in_force(recipe, told))["full"] if one > step]
    return step, coming[0] if coming else None


def _rate(recipe: Recipe, step: int) -> float | None:
    """`lr` of the next update; at the schedule's end that of the last one."""
    found = curves.rate(recipe, step)
    return curves.rate(recipe, step - 1) if found is None else found


def _publish(run: RunFolder, proposal: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The proposal under the next free name, as a file that holds exactly the bytes that are signed."""
    run.amendments.mkdir(exist_ok=True)
    number = 0
    while True:
        number += 1
        name = f"a{number:02d}"
        named = {**proposal, "amendment": name}
        try:
            publish_new(run.amendments / f"{name}.json", _document(named))
        except InputError:
            continue  # the name is taken, perhaps at this moment
        return name, named


def _take_up_files(run: RunFolder, base: Recipe, amendment: Amendment) -> None:
    """Receipts for envelopes that were signed elsewhere and lie beside the proposal; those that do not count stay."""
    role = demanded_role(base, amendment.changes)
    known = set(approvers(base, amendment)[0])
    for name in sorted(os.listdir(run.amendments)) if role and run.amendments.is_dir() else ():
        if not name.startswith(f"{amendment.id}.") or not name.endswith(".json") or name == f"{amendment.id}.json":
            continue
        path = run.amendments / name
        try:
            envelope = read_object(path, "an approval", _LIMIT)
            signed_by = judge(envelope, amendment, trusted(base, str(role)))
        except AssayError:
            continue  # `install` names what is missing
        for one in signed_by:
            if one not in known:
                _record_approval(run, amendment, str(role), one, envelope)
                known.add(one)


def _record_approval(run: RunFolder, amendment: Amendment, role: str, name: str, envelope: Mapping[str, Any]) -> None:
    body = {
        "amendment": amendment.id,
        "sha256": amendment.sha256,
        "role": role,
        "keyid": name,
        "envelope": dict(envelope),
    }
    run.open_ledger().append(APPROVED, body)


def _facts(base: Recipe, told: History, one: Amendment) -> dict[str, Any]:
    decided = one.decided.body if one.decided else {}
    return {
        "amendment": one.id,
        "sha256": one.sha256,
        "state": one.state,
        "changes": one.changes.record(),
        "old": dict(one.proposal["old"]),
        "before_update": one.proposal.get("before_update"),
        "approval": demanded_role(base, one.changes),
        "approved_by": approvers(base, one)[0],
        "step": decided.get("step"),
        "reason": one.proposal.get("reason"),
        "refused": decided.get("reason"),
    }


def scheduled(run: RunFolder, recipe: Recipe) -> int:
    """The updates of the schedule, with what was adopted or waits to be; of `recipe` where no run exists yet."""
    if not run.exists():
        return recipe.schedule.updates
    told = history(run.ledger)
    waiting = [one.changes.updates for one in amendments(told, told.tip) if one.pending and one.changes.updates]
    return max([effective(run.recipe(), told).schedule.updates, *waiting])


def goes_on(run: RunFolder) -> bool:
    """True when an installed amendment waits for the next start, at which a run that has ended may go on."""
    told = history(run.ledger)
    return any(one.pending for one in amendments(told, told.tip))
