"""Amendments: what was proposed, approved, installed, adopted or refused, derived from the ledger alone.

Also the effective recipe: the run's own with what its line of training adopted. Everything here is read from
receipts, signatures included; nothing is written (see `proposals`) and nothing is adopted (see `train`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from assay.errors import AssayError, InputError, VerificationError
from assay.files.digest import canonical_exact, digest, is_digest
from assay.ledger import signing
from assay.ledger.keys import keyid
from assay.ledger.ledger import Receipt
from assay.ledger.public import check_public
from assay.recipe import load as recipes
from assay.recipe import schedule as schedules
from assay.recipe.schedule import Decay
from assay.recipe.schema import Recipe, Schedule
from assay.run.history import ADOPTED, History, Segment

FORMAT = "assay-amendment/1"
PREDICATE_TYPE = "urn:assay:amendment-approval:1"
PROPOSED, APPROVED, INSTALLED, REFUSED = (
    "amendment.proposed",
    "amendment.approved",
    "amendment.installed",
    "amendment.refused",
)
KEYS = ("updates", "decay", "checkpoint_every", "code")
State = Literal["proposed", "approved", "installed", "adopted", "refused"]


@dataclass(frozen=True)
class Changes:
    """What one amendment changes; None: not touched. They are adopted together or not at all."""

    updates: int | None = None
    decay: Decay | None = None
    checkpoint_every: int | None = None
    code: str | None = None
    allow_earlier_decay: bool = False

    def record(self) -> dict[str, Any]:
        """The changes as a record: only what is changed."""
        values = {key: getattr(self, key) for key in KEYS}
        record = {key: value for key, value in values.items() if value is not None}
        return record | ({"allow_earlier_decay": True} if self.allow_earlier_decay else {})

    @property
    def schedule(self) -> bool:
        """True when the learning rate's curve is touched."""
        return self.updates is not None or self.decay is not None


@dataclass(frozen=True)
class Amendment:
    """One amendment and its receipts; `decided` is its adoption or refusal on the line of training, if any."""

    id: str
    sha256: str
    proposal: Mapping[str, Any]
    changes: Changes
    proposed: Receipt
    approvals: tuple[Receipt, ...] = ()
    installed: Receipt | None = None
    decided: Receipt | None = None

    @property
    def state(self) -> State:
        """The furthest of the facts that receipts state."""
        if self.decided is not None:
            return "adopted" if self.decided.kind == ADOPTED else "refused"
        if self.installed is not None:
            return "installed"
        return "approved" if self.approvals else "proposed"

    @property
    def pending(self) -> bool:
        """True when the next full checkpoint is to adopt it."""
        return self.installed is not None and self.decided is None


def read_changes(record: object) -> Changes:
    """The changes that a record states; VerificationError when it states anything else."""
    if not isinstance(record, dict) or not record.keys() <= {*KEYS, "allow_earlier_decay"}:
        raise VerificationError(f"an amendment's changes are {record!r:.80}; known are {', '.join(KEYS)}")
    good = (
        all(type(record[key]) is int and record[key] >= 1 for key in ("updates", "checkpoint_every") if key in record)
        and record.get("decay") in (None, *get_args(Decay))
        and ("code" not in record or is_digest(record["code"]))
        and record.get("allow_earlier_decay") in (None, True)
        and any(key in record for key in KEYS)
    )
    if not good:
        raise VerificationError(f"an amendment's changes are {record!r:.200}; Assay did not write that")
    return Changes(**record)


def amendments(told: History, checkpoint: str | None) -> list[Amendment]:
    """All amendments in order, judged where training goes on from the checkpoint of that manifest digest.

    VerificationError when a receipt names a proposal that no receipt states, or another one than it states.
    """
    line = told.up_to(checkpoint)
    found: dict[str, Amendment] = {}
    for receipt in told.amendments:
        body = receipt.body
        if receipt.kind == PROPOSED:
            found[body["amendment"]] = _proposed(receipt, told.run_id)
            continue
        if receipt.kind not in (APPROVED, INSTALLED, ADOPTED, REFUSED):
            continue  # of a later version: it verifies as chain
        name = body["amendment"]
        if name is None:
            continue  # refused before it became a proposal
        one = found.get(name)
        if one is None or one.sha256 != body["sha256"]:
            raise VerificationError(f"receipt {receipt.seq} ({receipt.kind}) is about {name}, which nothing proposed")
        if receipt.kind == APPROVED:
            found[name] = replace(one, approvals=(*one.approvals, receipt))
        elif receipt.kind == INSTALLED:
            found[name] = replace(one, installed=one.installed or receipt)
        elif body.get("checkpoint") is None or body["checkpoint"] in line:
            found[name] = replace(one, decided=receipt)
    return list(found.values())


def _proposed(receipt: Receipt, run_id: str) -> Amendment:
    body, proposal = receipt.body, receipt.body["proposal"]
    stated = (proposal.get("format"), proposal.get("run_id"), proposal.get("amendment"))
    if stated != (FORMAT, run_id, body["amendment"]) or not isinstance(proposal.get("old"), dict):
        raise VerificationError(f"receipt {receipt.seq} holds no proposal of this run: {stated!r:.120}")
    if proposal_digest(proposal) != body["sha256"]:
        raise VerificationError(f"receipt {receipt.seq}: the proposal has not the digest {body['sha256']}")
    return Amendment(body["amendment"], body["sha256"], proposal, read_changes(proposal.get("changes")), receipt)


def proposal_digest(proposal: Mapping[str, Any]) -> str:
    """What approvals name: the digest of the proposal's canonical bytes."""
    return digest(canonical_exact(dict(proposal)))


def amended_recipe(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with the changes, checked in full; InputError when it is none.

    A decay that is asked for ends the stop of `intent: no-decay`: who may ask is `demanded_role`'s matter.
    """
    whole = recipes.resolved(recipe)
    if changes.schedule:
        schedule = schedules.amended(recipe.schedule, changes.updates, changes.decay)
        whole["schedule"] = schedule.model_dump(mode="json")
        if allows_decay(recipe, changes):
            whole["schedule"]["intent"] = None
    if changes.checkpoint_every is not None:
        whole["checkpoint"]["every"] = changes.checkpoint_every
    return recipes.from_resolved(whole, "the amended recipe")


def allows_decay(recipe: Recipe, changes: Changes) -> bool:
    """True when a run that is meant to have no decay would get one."""
    return recipe.schedule.intent is not None and changes.decay not in (None, "none")


def values(recipe: Recipe, code: str | None) -> dict[str, Any]:
    """The present value of everything that an amendment can change."""
    return {
        "updates": recipe.schedule.updates,
        "decay": recipe.schedule.decay,
        "checkpoint_every": recipe.checkpoint.every,
        "code": code,
    }


def before_update(recipe: Recipe, changes: Changes, step: int) -> int | None:
    """The amendment may be adopted at a step below this number; None: at any. `step` is where the run is.

    A run that stands at the stop of `intent: no-decay` may still adopt it there.
    """
    if not changes.schedule:
        return None
    old, new = recipe.schedule, amended_recipe(recipe, changes).schedule
    return step + 1 if schedules.stopped_at_decay(old, new, step) else schedules.amendable_before(old, new)


def rule_fault(recipe: Recipe, changes: Changes, step: int) -> str | None:
    """Why the rule forbids the changes to `recipe`, the one in force, at `step`; None when it does not."""
    old = recipe.schedule
    try:
        new = amended_recipe(recipe, changes).schedule
    except InputError as fault:
        return str(fault)
    if not changes.schedule:
        return None
    same = Schedule.model_validate(new.model_dump() | {"intent": old.intent})
    first, consent = recipe.start.first_update, changes.allow_earlier_decay
    return schedules.amendment_fault(old, same, schedules.floor_ratio(recipe), step, first, consent)


def demanded_role(recipe: Recipe, changes: Changes) -> str | None:
    """Whose signature the changes need; None: nobody's. Cadence needs none, a decay against the intent a reviewer's.

    `recipe` is the run's own: who is trusted cannot be amended, nor changed by a recipe given later.
    """
    if not changes.schedule and changes.code is None:
        return None
    if recipe.trust.reviewer or allows_decay(recipe, changes):
        return "reviewer"
    return "operator" if recipe.trust.operator else None


def trusted(recipe: Recipe, role: str) -> tuple[str, ...]:
    """The public keys that the run's recipe names for a role; InputError when one is no key."""
    keys = getattr(recipe.trust, role)
    return tuple(check_public(key, f"trust.{role}[{number}]") for number, key in enumerate(keys))


def approvers(recipe: Recipe, amendment: Amendment) -> tuple[list[str], list[str]]:
    """(key ids whose signature counts, why the others do not) of the approvals in the ledger."""
    role = demanded_role(recipe, amendment.changes)
    keys = trusted(recipe, role) if role else (*trusted(recipe, "reviewer"), *trusted(recipe, "operator"))
    good: list[str] = []
    reasons: list[str] = []
    for receipt in amendment.approvals:
        try:
            good += [one for one in judge(receipt.body["envelope"], amendment, keys) if one not in good]
        except AssayError as fault:
            reasons.append(f"receipt {receipt.seq}: {fault}")
    return good, reasons


def judge(envelope: Mapping[str, Any], amendment: Amendment, keys: Sequence[str]) -> list[str]:
    """The ids of those `keys` that signed this very amendment in the envelope; VerificationError says why none did."""
    statement = signing.verify(envelope, keys)
    if statement["predicateType"] != PREDICATE_TYPE:
        raise VerificationError(f"it states {statement['predicateType']!r:.80}, not {PREDICATE_TYPE!r}")
    name, subject = signing.subject(statement)
    if subject != amendment.sha256:
        raise VerificationError(f"it approves {name} ({subject}), not {amendment.id} ({amendment.sha256})")
    return [keyid(key) for key in signing.signers(envelope, keys)]


def approval_fault(recipe: Recipe, amendment: Amendment) -> str | None:
    """Why the amendment lacks the approval that the run's recipe demands; None when it lacks none."""
    role = demanded_role(recipe, amendment.changes)
    if role is None:
        return None
    if not getattr(recipe.trust, role):
        return f"schedule.intent is no-decay and the recipe names no {role} (trust.{role}) who could allow a decay"
    good, reasons = approvers(recipe, amendment)
    if good:
        return None
    more = "".join(f"; {reason}" for reason in reasons)
    return f"it needs the approval of a {role} whom the run's recipe names (assay amend approve){more}"


def adoption_fault(base: Recipe, recipe: Recipe, code: str | None, amendment: Amendment, step: int) -> str | None:
    """Why the amendment may not be adopted at `step`, `recipe` being in force; None when it may. Asked by `verify` too.

    It was approved as a change from what it names as old: when that is no longer in force it is refused.
    """
    now = values(recipe, code)
    for key in amendment.changes.record():
        if key in ("updates", "decay") and amendment.proposal["old"].get(key) != now[key]:
            old = amendment.proposal["old"].get(key)
            return f"it was proposed where {key} was {old}, but {now[key]} is in force; propose it anew"
    return approval_fault(base, amendment) or rule_fault(recipe, amendment.changes, step)


def apply(recipe: Recipe, told: History, adoptions: Sequence[Receipt]) -> Recipe:
    """The recipe with these adoptions; VerificationError when one of them adopts what was not proposed."""
    proposals = {one.body["sha256"]: one for one in told.amendments if one.kind == PROPOSED}
    for receipt in adoptions:
        proposed = proposals.get(receipt.body["sha256"])
        if proposed is None:
            raise VerificationError(f"receipt {receipt.seq} adopts {receipt.body['sha256']}, which nothing proposed")
        try:
            recipe = amended_recipe(recipe, _proposed(proposed, told.run_id).changes)
        except InputError as fault:
            raise VerificationError(f"receipt {receipt.seq} adopts what cannot be: {fault}") from None
    return recipe


def effective(recipe: Recipe, told: History) -> Recipe:
    """The run's recipe with the amendments of the line of training that goes on."""
    return apply(recipe, told, told.adopted_by(told.tip))


def permitted_digests(recipe: Recipe, told: History) -> set[str]:
    """Digests of the recipes that may resume the run: its own, and that with what was adopted or is installed."""
    current = recipe
    found = {recipes.digest(recipe)}
    for receipt in told.adopted_by(told.tip):
        current = apply(current, told, [receipt])
        found.add(recipes.digest(current))
    for one in amendments(told, told.tip):
        if one.pending:
            try:
                current = amended_recipe(current, one.changes)
            except InputError:
                continue  # it will be refused where it is tried
            found.add(recipes.digest(current))
    return found


@dataclass(frozen=True)
class Term:
    """From `step`, and for receipts behind `seq`, this recipe is in force."""

    step: int
    seq: int
    recipe: Recipe


def course(recipe: Recipe, told: History) -> dict[int, list[Term]]:
    """For each segment the recipes in force, in order; what `verify` derives rates and checkpoints from."""
    return {segment.number: _terms(recipe, told, segment) for segment in told.segments}


def _terms(recipe: Recipe, told: History, segment: Segment) -> list[Term]:
    inherited = [one for one in segment.adopted if one.seq < segment.seq]
    terms = [Term(segment.first, segment.seq, apply(recipe, told, inherited))]
    for receipt in segment.adopted[len(inherited) :]:
        terms.append(Term(receipt.body["step"], receipt.seq, apply(terms[-1].recipe, told, [receipt])))
    return terms


def code_expected(recipe: Recipe, told: History, checkpoint: str | None) -> str | None:
    """The code digest that a resume from a checkpoint must have; None: the run holds to none.

    Held to are runs that pin their code or name a reviewer or operator: the last adopted code, else the pin,
    else the code of the segment that began the run.
    """
    if recipe.pins.code is None and not recipe.trust.reviewer and not recipe.trust.operator:
        return None
    expected = recipe.pins.code
    if expected is None and told.segments:
        expected = told.segments[0].body.get("code", {}).get("sha256")
    for receipt in told.adopted_by(checkpoint):
        expected = receipt.body.get("code_new") or expected
    return expected


def code_fault(recipe: Recipe, told: History, code: Callable[[], str]) -> str | None:
    """Why the run may not go on with the present code; None when it may. `code` gives its digest, if it matters."""
    expected = code_expected(recipe, told, told.tip)
    if expected is None or not told.segments or (found := code()) == expected:
        return None
    if any(one.pending and one.changes.code == found for one in amendments(told, told.tip)):
        return None  # adopted, or refused, at this very start
    return (
        f"the code has digest {found}, but this run goes on with {expected}; go back to that code, or make it an "
        "amendment: assay amend RUN --code --reason TEXT, then approve and install it"
    )
