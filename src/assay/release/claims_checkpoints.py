"""Claims about checkpoints and evaluations: every byte against its manifest, every manifest against its receipt.

Tensors are digested again from the files, so that weights and state digests are re-derived, not read.
Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import Manifest, problems, read_manifest
from assay.checkpoint.tensors import describe_file, state_digest
from assay.data.batches import order_next
from assay.errors import AssayError, InputError
from assay.files.digest import PREFIX, digest_file, digest_small, is_digest, raw
from assay.files.publish import leftovers
from assay.files.reading import inside, read_object, read_text
from assay.ledger.ledger import Receipt
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.release.claims import Case, Claim, counted, differ, judge, steps_text
from assay.release.claims_amendments import digest_when, rate_before, terms
from assay.release.claims_ledger import head_fault
from assay.run.bits import families
from assay.run.history import Saved

CHECKPOINTS, EVALUATIONS = "checkpoints", "evaluations"
SUMS = "SHA256SUMS"
_LARGEST_LOSS = 700.0  # beyond it the exponential is no finite float


def list_claim(case: Case) -> Claim:
    """What was saved, what was removed by a receipt, and what lies there without one."""
    told = case.history
    named = {(item.folder, item.manifest_sha256) for item in told.saved}
    faults = [
        f"receipt {receipt.seq} removes {receipt.body['folder']}, which no receipt before saved"
        for receipt in case.receipts
        if receipt.kind == "checkpoint.removed"
        and (receipt.body["folder"], receipt.body["manifest_sha256"]) not in named
    ]
    gone = sorted(item.step for item in told.saved if item.manifest_sha256 in told.removed)
    text = f"{counted(len(told.saved), 'checkpoint')} saved, {len(told.standing)} stand"
    text += f", {len(gone)} removed by receipt (steps {steps_text(gone)})" if gone else ""
    if not case.bundle:
        folders = {item.folder for item in told.standing}
        for parent in (case.root / "checkpoints", case.root / "weights"):
            found = sorted(path.name for path in parent.glob("step-*") if path.is_dir())
            half = {path.name for path in leftovers(parent)}
            odd = [name for name in found if f"{parent.name}/{name}" not in folders and name not in half]
            text += f"; in {parent.name} without a receipt that stands: {', '.join(odd)}" if odd else ""
            text += f"; half-written in {parent.name}: {', '.join(sorted(half))}" if half else ""
    return judge(CHECKPOINTS, "list", faults, text)


def checkpoint_claim(case: Case, item: Saved) -> Claim:
    """One checkpoint that stands: receipt, manifest, files, tensors and ledger head agree."""
    case.progress(f"checkpoint {item.folder}")
    name = f"{item.kind} step {item.step}" + (f" (segment {item.segment})" if item.segment > 1 else "")
    folder = case.root / item.folder
    try:
        faults = list(_checkpoint_faults(case, item, folder))
    except AssayError as fault:
        faults = [str(fault)]
    except OSError as fault:
        faults = [f"{folder} cannot be read: {fault}"]
    state = f", state {item.state_sha256}" if item.state_sha256 else ""
    return judge(CHECKPOINTS, name, faults, f"weights {item.weights_sha256}{state}, re-derived from the tensors")


def _checkpoint_faults(case: Case, item: Saved, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{folder} is missing, and no receipt says that it was removed"
        return
    manifest = read_manifest(folder)
    yield from manifest_faults(case, item, manifest)
    more = (manifests.STATE, manifests.RECIPE, manifests.QUEUE)
    needed = (manifests.CONFIG, *more) if manifest.kind == "full" else (manifests.CONFIG,)
    absent = [name for name in needed if name not in manifest.files]
    if absent:
        yield f"{folder / manifests.MANIFEST} lists no {', '.join(absent)}"
        return
    found = problems(manifest)
    yield from found
    if found:
        return
    config = read_object(folder / manifests.CONFIG, "the config of a checkpoint")
    if case.recipe is not None and config != case.resolved["model"]:
        yield f"{folder / manifests.CONFIG} is not the recipe's model"
    if manifest.kind == "full":
        yield from _state_faults(item, folder)
        if recipes.digest(_recipe(folder)) != manifest.recipe:
            yield f"{folder / manifests.RECIPE} has not the recipe digest that the manifest states"


def _recipe(folder: Path) -> Recipe:
    path = folder / manifests.RECIPE
    return recipes.from_resolved(read_object(path, "the recipe of a checkpoint"), str(path))


def manifest_faults(case: Case, item: Saved, manifest: Manifest) -> Iterator[str]:
    """Where a manifest and the receipt of its saving do not agree, or its ledger head is no earlier receipt."""
    path = manifest.folder / manifests.MANIFEST
    found = digest_file(path)
    if found != item.manifest_sha256:
        yield differ(str(path), "the digest", f"{item.manifest_sha256} (receipt {item.seq})", found)
    for key in ("step", "segment", "kind", "order_digest", "weights_sha256", "state_sha256"):
        if getattr(manifest, key) != getattr(item, key):
            yield differ(str(path), key, f"{getattr(item, key)} (receipt {item.seq})", getattr(manifest, key))
    if manifest.run_id != case.history.run_id:
        yield differ(str(path), "run_id", case.history.run_id, manifest.run_id)
    wanted = digest_when(case, case.recipe, item.segment, item.seq) if case.recipe is not None else None
    if manifest.recipe != wanted and wanted is not None:
        yield differ(str(path), "recipe", wanted, manifest.recipe)
    fault = head_fault(case.receipts, manifest.ledger, str(path))
    if fault is not None:
        yield fault
    elif manifest.ledger["seq"] >= item.seq:
        yield f"{path} names receipt {manifest.ledger['seq']} as head, but was saved before receipt {item.seq}"


def _state_faults(item: Saved, folder: Path) -> Iterator[str]:
    """The state's step, segment and order digest are the receipt's, and its last batches chain to that digest."""
    path = folder / manifests.STATE
    state = read_object(path, "the state of a checkpoint")
    for key in ("step", "segment", "order_digest"):
        if state.get(key) != getattr(item, key):
            yield differ(str(path), key, getattr(item, key), state.get(key))
    recent = state.get("recent")
    if not isinstance(recent, list) or not all(_is_recent(one) for one in recent):
        yield f"{path}: recent is not a list of batches"
        return
    for index, one in enumerate(recent):
        update = item.step - len(recent) + index
        after = PREFIX + order_next(raw(one["before"]), one["batch"]).hex()
        stated = recent[index + 1]["before"] if index + 1 < len(recent) else item.order_digest
        if one["update"] != update or after != stated:
            yield f"{path}: the batches before step {item.step} do not chain at update {update}"
            return


def _is_recent(one: Any) -> bool:
    return isinstance(one, dict) and "update" in one and is_digest(one.get("before")) and is_digest(one.get("batch"))


def bundled_claim(case: Case, item: Saved) -> Claim:
    """The weights in a bundle are those of the checkpoint that it names; the rest of that checkpoint is not there."""
    path = case.root / manifests.MANIFEST
    try:
        manifest = read_manifest(case.root)
        faults = list(manifest_faults(case, item, manifest))
        model = manifests.tensor_files(manifest, manifests.MODEL)
        # A model in shards lies joined in a bundle: its tensors are those of the manifest, the file is not.
        wanted = (*([] if len(model) > 1 else model), manifests.CONFIG)
        present = {name: manifest.files[name] for name in wanted if name in manifest.files}
        if len(present) != len(wanted):
            faults.append(f"{path} does not list {' and '.join(wanted)}")
        faults += problems(replace(manifest, files=present), tensors=False)
        tensors = describe_file(case.root / manifests.MODEL)
        if state_digest(tensors) != item.weights_sha256:
            faults.append(
                differ(str(case.root / manifests.MODEL), "weights_sha256", item.weights_sha256, state_digest(tensors))
            )
        if any(manifest.tensors.get(name) != one for name, one in tensors.items()):
            faults.append(f"{path} lists other tensors than {manifests.MODEL} holds")
        if manifest.kind == "full" and _stated_state(manifest) != manifest.state_sha256:
            faults.append(f"{path}: state_sha256 does not follow from the tensors it lists")
    except AssayError as fault:
        faults = [str(fault)]
    except OSError as fault:
        faults = [f"{case.root} cannot be read: {fault}"]
    text = f"weights {item.weights_sha256}, re-derived from the tensors"
    return judge(CHECKPOINTS, f"bundled weights, step {item.step}", faults, text)


def _stated_state(manifest: Manifest) -> str | None:
    """The state digest by the tensors that the manifest lists; None when they are no list of tensors."""
    if not all(isinstance(one, dict) for one in manifest.tensors.values()):
        return None
    try:
        return state_digest(manifest.tensors)
    except ValueError:
        return None


def sums_claim(case: Case) -> Claim:
    """The lines of SHA256SUMS, written at the moment of saving, are those of the manifests that receipts name."""
    told = case.history
    faults = []
    lines = 0
    for parent in ("checkpoints", "weights"):
        mine = [item for item in told.saved if item.folder.startswith(f"{parent}/")]
        path = case.root / parent / SUMS
        if not mine and not path.exists():
            continue
        try:
            sums = read_sums(path)
        except AssayError as fault:
            faults.append(str(fault))
            continue
        lines += sum(len(found) for found in sums.values())
        for item in mine:
            name = f"{item.folder.removeprefix(parent + '/')}/{manifests.MANIFEST}"
            if item.manifest_sha256 not in sums.get(name, []):
                stated = ", ".join(sums.get(name, [])) or "no line"
                faults.append(differ(str(path), name, f"{item.manifest_sha256} (receipt {item.seq})", stated))
        for item in told.standing:
            if item in mine:
                faults += _files_in_sums(case.root / item.folder, path, sums)
    return judge(CHECKPOINTS, SUMS, faults, f"{counted(lines, 'line')} agree with receipts and manifests")


def _files_in_sums(folder: Path, path: Path, sums: dict[str, list[str]]) -> Iterator[str]:
    try:
        manifest = read_manifest(folder)
    except AssayError:
        return  # the checkpoint's own claim says so
    for name, file in manifest.files.items():
        stated = sums.get(f"{folder.name}/{name}", ["no line"])[-1]
        if stated != file["sha256"]:
            yield differ(str(path), f"{folder.name}/{name}", file["sha256"], stated)


def read_sums(path: Path) -> dict[str, list[str]]:
    """Name → digests, in the order of the lines of a SHA256SUMS file; InputError for a line of another form."""
    result: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path, "a list of SHA-256 sums").split("\n"), 1):
        if not line:
            continue
        value, separator, name = line.partition("  ")
        if not separator or not name or not is_digest(PREFIX + value):
            raise InputError(f"{path}, line {number} is not '<64 hex digits>  <name>': {line[:80]!r}")
        result.setdefault(name, []).append(PREFIX + value)
    return result


def one_step_claim(case: Case) -> Claim:
    """One weights digest stands for one step, one state digest too; one step of one promise has one digest.

    Steps between which every update was skipped, as receipts say, have one state.
    """
    told = case.history
    faults = []
    for key in ("weights_sha256", "state_sha256"):
        steps: dict[str, Saved] = {}
        for item in told.saved:
            value = getattr(item, key)
            if value is None:
                continue
            other = steps.setdefault(value, item)
            if other.step != item.step and not told.unchanged(other.step, item.step):
                faults.append(
                    f"receipts {other.seq} and {item.seq}: {key} {value} stands under step {other.step} "
                    f"and step {item.step}"
                )
    alike = families(told)
    # By the newest rate too: an amendment may have changed it. Only segments of one family promise each other's bits.
    by_step: dict[tuple[int, float | None, int], Saved] = {}
    course = terms(case, case.recipe) if case.recipe is not None else {}
    for item in told.saved:
        rate = rate_before(course, case.recipe, item.segment, item.step) if case.recipe is not None else None
        other = by_step.setdefault((item.step, rate, alike.get(item.segment, item.segment)), item)
        if other.weights_sha256 != item.weights_sha256:
            where = f"receipt {item.seq}"
            faults.append(
                differ(
                    where,
                    f"the weights of step {item.step}",
                    f"{other.weights_sha256} (receipt {other.seq})",
                    item.weights_sha256,
                )
            )
    digests = len({item.weights_sha256 for item in told.saved})
    evidence = f"{counted(digests, 'weights digest')} under {counted(len({item.step for item in told.saved}), 'step')}"
    return judge(CHECKPOINTS, "one digest, one step", faults, evidence, None if told.saved else "nothing is saved yet")


def evaluation_claim(case: Case, receipt: Receipt) -> Claim:
    """A result file has the digest of its receipt, and was made from weights that a receipt saved under that step."""
    body = receipt.body
    step, weights, name = body.get("step"), body.get("weights_sha256"), body.get("file")
    claim = f"{body.get('suite', 'evaluation')} of step {step}"
    faults = []
    matching = [item for item in case.history.saved if item.weights_sha256 == weights]
    if not matching:
        faults.append(f"receipt {receipt.seq}: no checkpoint of this run has the weights {weights}")
    elif all(item.step != step for item in matching):
        faults.append(differ(f"receipt {receipt.seq}", "step", f"{matching[0].step}, of weights {weights}", step))
    if not isinstance(name, str):
        return judge(EVALUATIONS, claim, faults, "", "the receipt names no result file")
    if case.bundle and not faults and not (case.root / name).is_file():
        return judge(EVALUATIONS, claim, faults, "", f"{name} is not in the bundle")
    try:
        path = inside(case.root, name, f"receipt {receipt.seq}")
        if not path.is_file():
            path = inside(case.root / "evaluations", name, f"receipt {receipt.seq}")
        if not path.is_file():
            faults.append(f"{case.root / name} is missing")
        elif (found := digest_small(path)) != body.get("sha256"):
            faults.append(differ(str(path), "the digest", body.get("sha256"), found))
        else:
            result = read_object(path, "an evaluation")
            faults += _result_faults(body, result, path)
    except (AssayError, OSError) as fault:
        faults.append(str(fault))
    return judge(EVALUATIONS, claim, faults, f"{name} (receipt {receipt.seq}), weights {weights}")


def export_claim(case: Case, receipt: Receipt) -> Claim:
    """An export was made from weights that a receipt saved under that step; its files lie outside of the run."""
    step, weights = receipt.body.get("step"), receipt.body.get("weights_sha256")
    known = any((item.step, item.weights_sha256) == (step, weights) for item in case.history.saved)
    faults = [] if known else [f"receipt {receipt.seq}: no checkpoint of step {step} has the weights {weights}"]
    text = f"receipt {receipt.seq}: from weights {weights}; its files lie elsewhere and have their own digests"
    return judge(EVALUATIONS, f"export of step {step}", faults, text)


def _result_faults(body: dict[str, Any], result: dict[str, Any], path: Path) -> Iterator[str]:
    """Where a result file does not say what its receipt says; the perplexity is recomputed from the loss."""
    for key in ("suite", "step", "weights_sha256", "shard", "block", "windows", "positions"):
        if key in body and key in result and result[key] != body[key]:
            yield differ(str(path), key, body[key], result[key])
    figures = result.get("results")
    figures = figures if isinstance(figures, dict) else {}
    for key in ("loss", "perplexity", "bits_per_byte"):
        stated, found = body.get(key), figures.get(key)
        if isinstance(stated, str) and _number(stated) != found:
            yield differ(str(path), f"results.{key}", f"{stated} (its receipt)", found)
    loss, perplexity = figures.get("loss"), figures.get("perplexity")
    if type(loss) is float and type(perplexity) is float and loss < _LARGEST_LOSS:
        expected = math.exp(loss)
        if not abs(perplexity - expected) <= 1e-9 * expected:
            yield differ(str(path), "results.perplexity", f"{expected!r} by the loss", perplexity)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
