"""Claims about amendments: proposed, approved, installed and adopted under the rule, by the ledger alone.

Every adoption is tested again as the trainer tested it: signatures, rule, values, rates to the last bit. What
it does not see is a run that was changed without a receipt: the learning rates and the starts show that.
"""

from __future__ import annotations

from collections.abc import Iterator

from assay.errors import AssayError
from assay.ledger.ledger import Receipt
from assay.recipe import load as recipes
from assay.recipe.schedule import decay_start, rates
from assay.recipe.schema import Recipe
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.run.amendments import (
    Amendment,
    Term,
    adoption_fault,
    amendments,
    approvers,
    code_expected,
    course,
    demanded_role,
)
from assay.run.history import ADOPTED, History, Segment, gather

AMENDMENTS = "amendments"


def terms(case: Case, recipe: Recipe) -> dict[int, list[Term]]:
    """The recipes in force by segment; without a sound story of the amendments, the run's own alone."""
    try:
        return course(recipe, case.history)
    except AssayError:  # `amendments_claim` names what does not hold
        return {one.number: [Term(one.first, one.seq, recipe)] for one in case.history.segments}


def recipe_at(found: dict[int, list[Term]], recipe: Recipe, segment: int, update: int) -> Recipe:
    """The recipe that an update of a segment was trained under."""
    fitting = [term.recipe for term in found.get(segment, []) if term.step <= update]
    return fitting[-1] if fitting else recipe


def rate_before(found: dict[int, list[Term]], recipe: Recipe, segment: int, step: int) -> float | None:
    """`lr` of the update that completed a step, under the recipe that its segment trained with."""
    in_force = recipe_at(found, recipe, segment, step - 1)
    first = recipe.start.first_update
    return rates(in_force, step - 1)["lr"] if first < step <= in_force.schedule.updates else None


def digest_when(case: Case, recipe: Recipe, segment: int, seq: int) -> str:
    """The digest of the recipe in force when a segment wrote the receipt `seq`."""
    fitting = [term.recipe for term in terms(case, recipe).get(segment, []) if term.seq < seq]
    return recipes.digest(fitting[-1] if fitting else recipe)


def expected_code(recipe: Recipe, told: History, segment: Segment) -> str | None:
    """The code digest that a segment must have; None where the run holds to none (see `code_expected`)."""
    expected = code_expected(recipe, told, None)
    if expected is None:
        return None
    for receipt in segment.adopted:
        if receipt.seq < segment.seq or receipt.body["step"] == segment.first:
            expected = receipt.body.get("code_new") or expected
    return expected


def amendments_claim(case: Case, recipe: Recipe) -> Claim | None:
    """Every adoption follows from its proposal, approvals and the rule; None when nothing was ever proposed."""
    told = case.history
    if not told.amendments:
        return None
    faults: list[str] = []
    try:
        last = amendments(told, told.tip)
        found = course(recipe, told)
    except AssayError as fault:
        return judge(AMENDMENTS, "amendments", [str(fault)], "")
    signed = 0
    for one in last:
        good, reasons = approvers(recipe, one)
        signed += len(good)
        faults += [f"amendment {one.id}: {reason}" for reason in reasons]
    for receipt in (one for one in told.amendments if one.kind == ADOPTED):
        faults += [f"receipt {receipt.seq} (adoption): {fault}" for fault in _faults(case, recipe, found, receipt)]
    faults += _no_decay_faults(case, recipe, found)
    states = ", ".join(f"{one.id} {one.state}" for one in last) or "none became a proposal"
    needed = sum(demanded_role(recipe, one.changes) is not None for one in last)
    evidence = f"{states}; {counted(signed, 'signature')} hold, {needed:,} of {len(last):,} demanded one"
    return judge(AMENDMENTS, "amendments", faults, evidence)


def _faults(case: Case, recipe: Recipe, found: dict[int, list[Term]], receipt: Receipt) -> Iterator[str]:
    """What an adoption lacks, judged with the ledger as it was just before it."""
    body = receipt.body
    before = gather(case.receipts[: receipt.seq])
    segment = before.segments[-1] if before.segments else None
    if segment is None or segment.number != body["segment"] or segment.closed is not None:
        yield f"segment {body['segment']} is not open there"
        return
    saved = [item for item in before.saved if item.manifest_sha256 == body["checkpoint"]]
    on_line = before.up_to(before.tip)
    if not any(item.kind == "full" and item.step == body["step"] and item.manifest_sha256 in on_line for item in saved):
        yield f"no full checkpoint of step {body['step']} had been saved or taken up"
    waiting = {one.sha256: one for one in amendments(before, before.tip) if one.pending}
    amendment = waiting.get(body["sha256"])
    if amendment is None:
        yield f"{body['amendment']} was not installed and waiting there"
        return
    at = next(place for place, term in enumerate(found[segment.number]) if term.seq == receipt.seq)
    old, new = found[segment.number][at - 1].recipe, found[segment.number][at].recipe
    code = segment.body["code"].get("sha256")
    fault = adoption_fault(recipe, old, code, amendment, body["step"])
    if fault is not None:
        yield fault
    yield from _value_faults(amendment, old, new, body["step"], receipt)
    yield from _cadence_and_code_faults(amendment, segment, receipt)
    if amendment.changes.code not in (None, code):
        yield differ("the segment", "code", amendment.changes.code, code)


def _value_faults(amendment: Amendment, old: Recipe, new: Recipe, step: int, receipt: Receipt) -> Iterator[str]:
    body = receipt.body
    running = body.get("running")
    running = running if isinstance(running, dict) else {}
    wanted: dict[str, object] = {
        "changes": amendment.changes.record(),
        "updates_old": old.schedule.updates,
        "updates_new": new.schedule.updates,
        "decay_old": old.schedule.decay,
        "decay_new": new.schedule.decay,
        "decay_allowed": old.schedule.intent is not None and new.schedule.intent is None,
        "decay_start_old": decay_start(old.schedule),
        "decay_start_new": decay_start(new.schedule),
        "rates_before": _text(old, step),
        "rates_after": _text(new, step),
    }
    for key, value in wanted.items():
        if body.get(key) != value:
            yield differ("the receipt", key, value, body.get(key))
    if running.get("updates") != new.schedule.updates:
        yield differ("the running process", "updates", new.schedule.updates, running.get("updates"))
    after = _text(new, step)
    if after is not None and running.get("rates") != sorted(set(after.values())):
        yield differ("the running process", "rates", sorted(set(after.values())), running.get("rates"))


def _cadence_and_code_faults(amendment: Amendment, segment: Segment, receipt: Receipt) -> Iterator[str]:
    """Cadence and code beside those of the segment: its recipe may give another cadence until one is adopted."""
    body, code = receipt.body, segment.body["code"].get("sha256")
    running = body.get("running")
    running = running if isinstance(running, dict) else {}
    checkpoint = segment.body["resolved"].get("checkpoint")
    every = checkpoint.get("every") if isinstance(checkpoint, dict) else None
    for earlier in segment.adopted:
        if earlier.seq < receipt.seq:
            every = earlier.body["changes"].get("checkpoint_every", every)
    new = every if amendment.changes.checkpoint_every is None else amendment.changes.checkpoint_every
    for place, found, key, wanted in (
        ("the receipt", body, "checkpoint_every_old", every),
        ("the receipt", body, "checkpoint_every_new", new),
        ("the receipt", body, "code_new", amendment.changes.code),
        ("the running process", running, "checkpoint_every", new),
        ("the running process", running, "code", code),
    ):
        if found.get(key) != wanted:
            yield differ(place, key, wanted, found.get(key))


def _text(recipe: Recipe, step: int) -> dict[str, str] | None:
    if step >= recipe.schedule.updates:
        return None
    return {key: repr(value) for key, value in rates(recipe, step).items()}


def _no_decay_faults(case: Case, recipe: Recipe, found: dict[int, list[Term]]) -> Iterator[str]:
    """Updates of a decay that the intent forbade and no reviewer allowed."""
    if recipe.schedule.intent != "no-decay":
        return
    for line in case.lines:
        schedule = recipe_at(found, recipe, line.segment, line.update).schedule
        start = decay_start(schedule)
        if schedule.intent == "no-decay" and start is not None and line.update >= start:
            yield f"{line.where} lies in the decay from update {start}, which schedule.intent no-decay forbids"
            return


def code_claim(case: Case, recipe: Recipe) -> Claim | None:
    """Runs that hold to their code changed it by amendments alone; None for runs that hold to none, or pin it."""
    told = case.history
    if recipe.pins.code is not None or code_expected(recipe, told, None) is None or not told.segments:
        return None
    faults = []
    for segment in told.segments:
        wanted, seen = expected_code(recipe, told, segment), segment.body["code"].get("sha256")
        if wanted != seen:
            faults.append(differ(f"segment {segment.number}", "code", wanted, seen))
    changed = len({segment.body["code"].get("sha256") for segment in told.segments})
    return judge(AMENDMENTS, "code", faults, f"{counted(changed, 'code digest')}, every change adopted as an amendment")
