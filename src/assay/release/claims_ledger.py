"""Claims about the ledger, the recipe and the starts.

The chain comes first: when it does not hold, nothing that rests on it is judged. Damage is a failed
claim with the line and both digests, never an exception. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assay.checkpoint import manifest as manifests
from assay.errors import AssayError
from assay.files.digest import digest_small, is_digest
from assay.files.reading import inside, read_object
from assay.ledger import chain
from assay.ledger.ledger import Receipt, read
from assay.plan.cadence import follows
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.release.claims_amendments import expected_code
from assay.run.amendments import course
from assay.run.bits import mark, taken_from
from assay.run.history import OPENING, History, Saved, Segment, gather

LEDGER, RECIPE, START = "ledger", "recipe", "start"

# Every kind that this version writes or knows from the contract; others are chained and shown as unknown.
# fmt: off
KNOWN = frozenset({
    "run.created", "preflight", "control", "start", "recovery", "batches.checked", "slot.checked", "slot.entered",
    "metrics.sealed", "cadence", "duty",
    "checkpoint.saved", "checkpoint.mirrored", "checkpoint.unmirrored", "checkpoint.removed", "checkpoint.fetched",
    "evaluation",
    "amendment.proposed", "amendment.approved", "amendment.installed", "amendment.adopted", "amendment.refused",
    "recovered", "orphaned", "lease", "straggler", "update.skipped", "allocation", "funds", "price", "spend",
    "bill", "guard", "alarm", "hold", "inbox", "released", "interrupted", "failed", "abandoned", "end", "export",
    "published",
})
# fmt: on


def _natural(value: object) -> bool:
    return type(value) is int and value >= 0


def _natural_or_null(value: object) -> bool:
    return value is None or _natural(value)


def _digest_or_null(value: object) -> bool:
    return value is None or is_digest(value)


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _inner(value: object) -> bool:
    try:
        inside(Path("/"), value, "")
    except AssayError:
        return False
    return True


def _opening_numerics(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("promise"), dict)


_OPENING: dict[str, Callable[[object], bool]] = {
    "segment": _natural,
    "mode": _text,
    "step": _natural,
    "order_digest": is_digest,
    "recipe": is_digest,
    "resolved": _object,
    "evidence": _object,
    "numerics": _opening_numerics,
    "code": _object,
}
# What later claims and every reader of the history rely on; a null stands where a kind allows it to be absent.
SHAPES: dict[str, dict[str, Callable[[object], bool]]] = {
    "run.created": {"run_id": _text, "recipe": is_digest, "files": _object, "scheduled": _natural},
    "start": _OPENING,
    "recovery": _OPENING,
    "interrupted": {"step": _natural_or_null},
    "end": {"step": _natural_or_null},
    "failed": {"step": _natural_or_null},
    "checkpoint.saved": {
        "checkpoint": lambda value: value in ("full", "weights"),
        "step": _natural,
        "segment": _natural,
        "folder": _inner,
        "manifest_sha256": is_digest,
        "weights_sha256": is_digest,
        "state_sha256": _digest_or_null,
        "order_digest": is_digest,
    },
    "checkpoint.removed": {"folder": _inner, "manifest_sha256": is_digest},
    "metrics.sealed": {"start": _natural, "stop": _natural, "sha256": is_digest},
    "update.skipped": {"update": _natural, "segment": _natural},
    "slot.entered": {"slot": _natural, "update": _natural, "within": _natural, "line": is_digest},
}


def chain_claim(case: Case) -> Claim:
    """Every receipt names the digest of the line before, the first one that of the run id; seq counts from zero."""
    faults: list[str] = []
    try:
        for receipt in read(case.ledger):
            case.receipts.append(receipt)
    except AssayError as fault:
        faults.append(str(fault))
    except OSError as fault:
        faults.append(f"{case.ledger} cannot be read: {fault.strerror}")
    if not faults and case.receipts[0].kind != "run.created":
        faults.append(differ(f"{case.ledger}, line 1", "kind", "run.created", case.receipts[0].kind))
    evidence = ""
    if not faults:
        last = case.receipts[-1]
        evidence = f"{counted(len(case.receipts), 'receipt')}, head {last.seq} {last.digest}"
        torn = case.ledger.stat().st_size - _whole(case.ledger)
        if torn > 0:
            evidence += f"; {torn:,} bytes of an unfinished line at the end are ignored"
    return judge(LEDGER, "chain", faults, evidence)


def _whole(path: Path) -> int:
    """Bytes of the lines that chain."""
    end = 0
    for link in chain.read(path, None):
        end = link.end
    return end


def receipts_claim(case: Case) -> Claim:
    """Receipts of known kinds hold what their kind promises; `case.told` is made when they do."""
    faults = []
    unknown: dict[str, int] = {}
    for receipt in case.receipts:
        if receipt.kind not in KNOWN:
            unknown[receipt.kind] = unknown.get(receipt.kind, 0) + 1
        for key, good in SHAPES.get(receipt.kind, {}).items():
            if not good(receipt.body.get(key)):
                found = json.dumps(receipt.body.get(key))[:60]
                faults.append(
                    f"receipt {receipt.seq} ({receipt.kind}): {key} is {found}, which its kind does not allow"
                )
        if receipt.kind == "cadence":
            faults += _cadence_faults(receipt)
    if not faults:
        case.told = gather(case.receipts)
    kinds = f"{counted(len({one.kind for one in case.receipts}), 'kind')} of receipts"
    odd = "; unknown here: " + ", ".join(sorted(unknown)) if unknown else ""
    return judge(LEDGER, "receipts", faults, kinds + odd)


def _cadence_faults(receipt: Receipt) -> list[str]:
    """A chosen cadence is the one that its own figures give."""
    try:
        wanted = follows(receipt.body)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return [f"receipt {receipt.seq} (cadence) lacks the figures that its choice is made from"]
    every = receipt.body.get("every")
    return [] if every == wanted else [differ(f"receipt {receipt.seq} (cadence)", "every", wanted, every)]


def lost_claim(case: Case) -> Claim:
    """Every ledger head that another file carries is a receipt of this ledger: no whole lines are missing."""
    faults = []
    seen = 0
    if not case.bundle:
        lost = manifests.lost_lines(case.root, case.history.run_id)
        if lost is not None:
            faults.append(lost)
        seen += len(list(case.root.glob(f"*/step-*/{manifests.MANIFEST}")))
    for name, key in (("outcome.json", "ledger"), ("bundle.json", "head"), (manifests.MANIFEST, "ledger")):
        path = case.root / name
        if not path.is_file():
            continue
        try:
            head = read_object(path, "a file that names the ledger's head").get(key)
        except AssayError as fault:
            faults.append(str(fault))
            continue
        if head is None:  # an outcome of a process that never opened the ledger
            continue
        seen += 1
        fault_of_head = head_fault(case.receipts, head, name)
        if fault_of_head is not None:
            faults.append(fault_of_head)
    return judge(
        LEDGER,
        "no lost lines",
        faults,
        f"{counted(seen, 'head')} in manifests and outcomes are receipts of this ledger",
        None if seen else "no other file names a head of this ledger; lines cut from its end could not be seen",
    )


def head_fault(receipts: list[Receipt], head: object, where: str) -> str | None:
    """Why a stated ledger head is not one of the receipts; None when it is."""
    if not isinstance(head, dict) or not _natural(head.get("seq")) or not is_digest(head.get("digest")):
        return f"{where} names no ledger head: {json.dumps(head)[:80]}"
    if head["seq"] >= len(receipts):
        return (
            f"{where} names receipt {head['seq']}, but the ledger ends at receipt {len(receipts) - 1}: lines are lost"
        )
    found = receipts[head["seq"]].digest
    return None if found == head["digest"] else differ(where, f"receipt {head['seq']}", found, head["digest"])


def recipe_files_claim(case: Case) -> Claim:
    """recipe.yaml and recipe.json have the bytes that the first receipt states."""
    stated = case.history.created.body["files"]
    faults = []
    for name in ("recipe.yaml", "recipe.json"):
        path = case.root / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif (found := digest_small(path)) != stated.get(name) or found is None:
            faults.append(differ(str(path), "the digest", stated.get(name), found or "a file above 64 MiB"))
    return judge(RECIPE, "recipe files", faults, "recipe.yaml and recipe.json have the bytes of receipt 0")


def recipe_digest_claim(case: Case) -> Claim:
    """The recipe digest follows from recipe.json and is the one of the first receipt; sets `case.recipe` when it is."""
    stated = case.history.created.body["recipe"]
    path = case.root / "recipe.json"
    faults = []
    found = ""
    try:
        case.resolved = read_object(path, "the resolved recipe")
        recipe = recipes.from_resolved(case.resolved, str(path))
    except AssayError as fault:
        faults.append(str(fault))
    else:
        found = recipes.digest(recipe)
        if found != stated:
            faults.append(differ(str(path), "the recipe digest", stated, found))
        else:
            case.recipe = recipe
        if recipe.schedule.updates != case.history.created.body["scheduled"]:
            faults.append(
                differ("receipt 0", "scheduled", recipe.schedule.updates, case.history.created.body["scheduled"])
            )
    return judge(RECIPE, "recipe digest", faults, f"{found}, recomputed from recipe.json")


def recipe_yaml_claim(case: Case) -> Claim:
    """recipe.json is what recipe.yaml resolves to."""
    faults = []
    path = case.root / "recipe.yaml"
    try:
        resolved = recipes.resolved(recipes.load(path))
    except AssayError as fault:
        faults.append(str(fault))
    else:
        keys = [
            key for key in sorted(resolved.keys() | case.resolved.keys()) if not _same(resolved, case.resolved, key)
        ]
        faults += [
            differ("recipe.json", key, json.dumps(resolved.get(key)), json.dumps(case.resolved.get(key)))
            for key in keys
        ]
    return judge(RECIPE, "recipe resolved", faults, "recipe.json follows from recipe.yaml")


def _same(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return key in one and key in other and bool(one[key] == other[key])


def segments_recipe_claim(case: Case, recipe: Recipe) -> Claim:
    """Every segment began with the run's recipe, and trained it, or what receipts of adoption made of it.

    A start states the run's own recipe: its digest, and the resolved learning keys. The recipes in force follow from
    it and the adoptions of the segment's line; `amendments_claim` tests those, `checkpoint_claim` the checkpoints' own.
    """
    stated = case.history.created.body["recipe"]
    learning = _exact(recipes.learning(recipe))
    faults = []
    for segment in case.history.segments:
        where = f"the receipt of segment {segment.number}"
        if segment.body["recipe"] != stated:
            faults.append(differ(where, "recipe", stated, segment.body["recipe"]))
        for key, value in learning.items():
            found = segment.body["resolved"].get(key)
            if not _holds(found, value):
                faults.append(differ(where, f"resolved.{key}", json.dumps(value)[:120], json.dumps(found)[:120]))
    evidence = f"{counted(len(case.history.segments), 'segment')} with the digest and learning keys of recipe.json"
    try:
        found = course(recipe, case.history)
    except AssayError as fault:
        faults.append(f"the recipes in force do not follow from the adoptions: {fault}")
    else:
        others = {recipes.digest(term.recipe) for terms in found.values() for term in terms} - {stated}
        if others:
            evidence += f"; adoptions make of it {', '.join(sorted(others))}"
    return judge(RECIPE, "one recipe in all segments", faults, evidence)


def _holds(found: Any, wanted: Any) -> bool:
    """Whether `found` has everything of `wanted`: local paths are in a resolved recipe, but not in its identity."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and _holds(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def _exact(value: Any) -> Any:
    """Floats as receipts hold them: the shortest decimal strings that read back to the same bits."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    return [_exact(inner) for inner in value] if isinstance(value, list) else value


def start_claim(case: Case, recipe: Recipe) -> Claim:
    """The run began as the recipe's `start` says, with the evidence that its kind demands."""
    told = case.history
    begun = [segment for segment in told.segments if segment.mode != "resume"]
    if not told.segments:
        return judge(START, "start", [], "", "the run was created and has not started")
    faults = []
    if told.segments[0].mode == "resume":
        faults.append("the first segment is a recovery; a run begins with a start")
    as_created, as_resolved = told.created.body.get("start"), recipes.learning(recipe)["start"]
    if as_created != as_resolved:
        faults.append(differ("receipt 0", "start", json.dumps(as_resolved), json.dumps(as_created)))
    notes = []
    for segment in begun:
        where = f"the start of segment {segment.number}"
        if segment.mode != recipe.start.kind:
            faults.append(differ(where, "mode", recipe.start.kind, segment.mode))
            continue
        if segment.first != recipe.start.first_update:
            faults.append(differ(where, "step", recipe.start.first_update, segment.first))
        faults += [f"{where}: {fault}" for fault in _start_faults(segment, recipe)]
        notes.append(_start_note(segment, recipe))
    for earlier, segment in zip(told.segments, told.segments[1:], strict=False):
        if segment.mode != "resume" and any(
            item.kind == "full" and item.segment <= earlier.number for item in told.saved
        ):
            faults.append(f"segment {segment.number} starts anew although checkpoints had been saved")
    return judge(START, "start", faults, "; ".join(dict.fromkeys(notes)))


def _start_faults(segment: Segment, recipe: Recipe) -> Iterator[str]:
    evidence, start = segment.body["evidence"], recipe.start
    wanted: dict[str, object] = {}
    if start.init_from is not None:
        wanted = {"optimizer": "fresh"}
        if start.init_from.sha256 is not None:
            wanted["weights_file"] = start.init_from.sha256
        if recipe.pins.weights is not None:
            wanted["weights_file"] = recipe.pins.weights
        if recipe.pins.config is not None:
            wanted["config_file"] = recipe.pins.config
    elif start.continue_from is not None:
        parent = evidence.get("parent")
        parent = parent if isinstance(parent, dict) else {}
        wanted = {"optimizer": "restored", "state_sha256": parent.get("state_sha256")}
        if start.continue_from.sha256 is not None:
            wanted["state_sha256"] = start.continue_from.sha256
        if parent.get("step") != start.continue_from.step:
            yield differ("evidence", "parent.step", start.continue_from.step, parent.get("step"))
    else:
        wanted = {"optimizer": "fresh", "seed": recipe.seed}
    for key, value in wanted.items():
        if evidence.get(key) != value:
            yield differ("evidence", key, value, evidence.get(key))


def _start_note(segment: Segment, recipe: Recipe) -> str:
    start = recipe.start
    if start.init_from is not None:
        pinned = start.init_from.sha256 or recipe.pins.weights
        state = "as pinned" if pinned else "not pinned by the recipe"
        return f"init-from @ 0, weights {segment.body['evidence'].get('weights_file')} {state}"
    if start.continue_from is not None:
        state = "as pinned" if start.continue_from.sha256 else "not pinned by the recipe"
        return f"continue-from @ {segment.first}, state {segment.body['evidence'].get('state_sha256')} {state}"
    return f"scratch @ 0 with seed {recipe.seed}, fresh optimizer"


def resume_claim(case: Case) -> Claim | None:
    """Each recovery loaded the very state of a checkpoint that stood then; None when the run never recovered."""
    told = case.history
    faults = list(_bits_faults(told))
    taken = []
    openings = [receipt for receipt in case.receipts if receipt.kind in OPENING]
    for segment, opening in zip(told.segments, openings, strict=True):
        if (segment.mode == "resume") != (opening.kind == "recovery"):
            faults.append(f"receipt {opening.seq} is of kind {opening.kind} but has mode {segment.mode}")
        if segment.mode != "resume":
            continue
        where = f"recovery of segment {segment.number} (receipt {opening.seq})"
        source = _source(told.saved, opening)
        if source is None:
            faults.append(
                f"{where} names {segment.body['evidence'].get('checkpoint')!r}, which no receipt before saved"
            )
            continue
        for key, stated, found in (
            ("step", source.step, segment.first),
            ("order_digest", source.order_digest, segment.body["order_digest"]),
            ("state_sha256", source.state_sha256, segment.body["evidence"].get("state_sha256")),
            ("weights_sha256", source.weights_sha256, segment.body["evidence"].get("weights_sha256")),
        ):
            if stated != found:
                faults.append(differ(where, key, f"{stated} (receipt {source.seq})", found))
        taken.append(source.step)
    if not taken and not faults:
        return None
    steps = ", ".join(str(step) for step in taken)
    return judge(START, "recoveries", faults, f"loaded tensors had the state digest of step {steps}")


def _bits_faults(told: History) -> Iterator[str]:
    """Segments that promise bits where the promise is another than that of the segment they go on from."""
    for segment in told.segments:
        numerics = segment.body["numerics"]
        wanted = mark(told, taken_from(segment.mode, segment.body["evidence"]), numerics["promise"])
        if numerics.get("bits") != wanted:
            yield differ(f"the receipt of segment {segment.number}", "bits", wanted, numerics.get("bits"))


def _source(saved: list[Saved], opening: Receipt) -> Saved | None:
    evidence = opening.body["evidence"]
    for item in saved:
        if item.seq < opening.seq and (item.folder, item.manifest_sha256) == (
            evidence.get("checkpoint"),
            evidence.get("manifest_sha256"),
        ):
            return item
    return None


def pins_claim(case: Case, recipe: Recipe) -> Claim | None:
    """Pinned code, tokenizer and queue prefix are what was used; None when none of them is pinned."""
    pins = recipe.pins
    faults = []
    seen = []
    if pins.code is not None:
        seen.append("code")
        for segment in case.history.segments:
            found, wanted = segment.body["code"].get("sha256"), expected_code(recipe, case.history, segment)
            if found != wanted:
                faults.append(differ(f"segment {segment.number}", "code", wanted, found))
    if case.queue is not None and pins.tokenizer is not None:
        seen.append("tokenizer")
        if case.queue.tokenizer != pins.tokenizer:
            faults.append(differ("the queue", "tokenizer", pins.tokenizer, case.queue.tokenizer))
    if case.queue is not None and pins.queue_prefix is not None:
        seen.append("queue prefix")
        if pins.queue_prefix not in {case.queue.header_digest, *(slot.digest for slot in case.queue.slots)}:
            faults.append(f"no line of the queue has the pinned digest {pins.queue_prefix}")
    if not seen:
        return None
    return judge(START, "pins", faults, f"as pinned: {', '.join(seen)}")
