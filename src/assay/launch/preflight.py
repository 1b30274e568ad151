"""Pre-flight: everything that can be known to be wrong before a device is touched.

Each check is passed, refused, not pinned or not applicable, with a detail for people. It changes
nothing here; the caller writes the receipt. It needs no torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import read_manifest
from assay.checkpoint.permission import permit
from assay.data import approval, checking
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.order import windows_available
from assay.data.queue import Queue
from assay.data.shard import Shard, open_shard, verify_shard
from assay.errors import AssayError, DataError, Refused
from assay.files.digest import digest_file
from assay.files.retry import Policy
from assay.mirror import records
from assay.mirror.copying import newest_number
from assay.mirror.place import place
from assay.plan.cadence import checkpoint_steps, disk
from assay.plan.figures import rank_refusal
from assay.recipe.schema import Recipe
from assay.run import control as controls
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.owner import is_owned
from assay.run.provenance import code_identity
from assay.run.slots import SlotChecks, checked, past_checks

# Tokens of slots behind the first that are checked before the start, under a minute's work; the rest is checked
# while training runs, each slot before it is entered.
CHECKED_AT_START = 1 << 30

MIRROR_SECONDS = 30.0  # that a mirror may take to answer before it is called unreachable

PASSED, REFUSED, NOT_PINNED, NOT_APPLICABLE = "passed", "refused", "not pinned", "not applicable"


@dataclass(frozen=True)
class Check:
    """One check's name, its result, what was seen, and the exit code that a refusal ends with.

    `receipts` are the bodies of receipts `slot.checked` that the caller writes, so that a start does not repeat them.
    """

    name: str
    result: str
    detail: str
    code: int = Refused.code
    receipts: tuple[dict[str, Any], ...] = ()


def preflight(recipe: Recipe, folder: Path, run: RunFolder, ranks: int = 1) -> list[Check]:
    """All checks of a launch of `recipe`, whose relative paths start from `folder`, into `run` on so many ranks."""
    checks: list[Check] = []

    def check(name: str, act: Callable[[], str | Check]) -> bool:
        try:
            found = act()
        except AssayError as fault:
            checks.append(Check(name, REFUSED, str(fault), fault.code))
            return False
        checks.append(found if isinstance(found, Check) else Check(name, PASSED, found))
        return checks[-1].result != REFUSED

    queue: list[Queue] = []
    batches: list[Batches] = []
    validation: list[Shard] = []
    check("this version", lambda: _supported(recipe))
    check("ranks", lambda: _ranks(recipe, ranks))
    check("run folder", lambda: _run_folder(recipe, run))
    if check("queue", lambda: _queue(recipe, folder, queue)):
        check("data", lambda: _data(recipe, folder, queue[0], batches))
    apart = check("validation", lambda: _validation(recipe, folder, validation)) and check(
        "validation is not training data", lambda: _apart(queue, validation)
    )
    if apart and batches:
        check("slots", lambda: _slots(recipe, folder, run, batches[0]))
    check("start", lambda: _start(recipe, folder))
    check("control", lambda: _control(recipe, folder))
    for name, act in _pins(recipe, folder, queue, validation).items():
        check(f"pin {name}", act)
    check("disk", lambda: _disk(recipe, queue, run))
    check("mirror", lambda: _mirror(recipe, run))
    return checks


def refusals(checks: list[Check]) -> list[Check]:
    """The checks that forbid the launch."""
    return [check for check in checks if check.result == REFUSED]


def as_facts(checks: list[Check]) -> list[dict[str, str]]:
    """The contract's `checks`."""
    return [{"name": one.name, "result": one.result, "detail": one.detail} for one in checks]


def receipt(checks: list[Check]) -> dict[str, Any]:
    """The body of the receipt: names and results; details stay out, since they hold paths of this machine."""
    return {"checks": [{"name": one.name, "result": one.result} for one in checks]}


def _supported(recipe: Recipe) -> str:
    """Keys that this version reads but cannot act on are refused: a safeguard that is ignored is none."""
    mirror = recipe.checkpoint.mirror
    unmet = {
        "reduction": recipe.runtime.engine == "fsdp"
        and recipe.reduction == "fast"
        and "fast with runtime.engine fsdp: set one of them otherwise",
        "checkpoint.mirror.every": mirror is not None and mirror.every != 1 and "another cadence: set it to 1",
        "checkpoint.mirror.keep": mirror is not None and mirror.keep != "all" and "removal there: set it to all",
        "evaluate.suite": recipe.evaluate.suite is not None and "a suite: set it to null",
    }
    for key, wish in unmet.items():
        if wish:
            raise Refused(f"{key} asks for what this version of Assay does not do yet ({wish} to train without it)")
    return "everything that the recipe asks for is done"


def _ranks(recipe: Recipe, ranks: int) -> str:
    if ranks not in recipe.rank_counts:
        raise Refused(rank_refusal(recipe, ranks))
    bits = "the same bits on each number of them" if recipe.reduction == "canonical" else "bits are not promised"
    return f"{ranks} of those that may run it ({', '.join(map(str, recipe.rank_counts))}); {bits}"


def _run_folder(recipe: Recipe, run: RunFolder) -> str:
    if not run.exists():
        return "a new run"
    told = history(run.ledger)
    if is_owned(run):
        raise Refused(f"{run.path} is being trained by another process; stop that one first")
    permit(run, recipe, told)
    return f"{len(told.segments)} segment(s), no hold, {sum(told.kinds.values())} receipts that chain"


def _queue(recipe: Recipe, folder: Path, found: list[Queue]) -> str:
    queue = queues.load(folder / recipe.data.queue)
    if queue.block != recipe.model.block:
        raise Refused(f"{queue.path} has block {queue.block}, but model.block is {recipe.model.block}; they must agree")
    if queue.vocabulary > recipe.model.vocabulary:
        raise Refused(
            f"{queue.path} has ids below {queue.vocabulary:,}, but model.vocabulary is {recipe.model.vocabulary:,}; "
            "enlarge model.vocabulary"
        )
    if not queue.slots:
        raise DataError(f"{queue.path} has no slot; append one with assay data append")
    first = recipe.start.first_update
    if first >= queue.updates_total:
        raise DataError(
            f"{queue.path} holds {queue.updates_total:,} updates, but this run begins at update {first:,}; "
            "append a slot"
        )
    approval.check_slots(queue)
    found.append(queue)
    short = recipe.schedule.updates - queue.updates_total
    more = f"; {short:,} of the scheduled updates are not prepared yet" if short > 0 else ""
    approved = ", each approved by its reviewers" if queue.trust else ""
    return f"{len(queue.slots)} slot(s), {queue.updates_total:,} updates{approved}{more}"


def _data(recipe: Recipe, folder: Path, queue: Queue, found: list[Batches]) -> str:
    roots = [folder / root for root in recipe.data.roots]
    found.append(Batches(queue, roots, recipe.data.seed, recipe.global_batch))
    return f"{len(found[0].shards)} shard(s) are here with the sizes of their manifests"


def _validation(recipe: Recipe, folder: Path, found: list[Shard]) -> str | Check:
    if recipe.data.validation is None:
        return Check("validation", NOT_APPLICABLE, "the recipe names no validation shard")
    shard = open_shard(folder / recipe.data.validation)
    wrong = verify_shard(shard)
    if wrong:
        raise DataError(wrong[0])
    if shard.vocabulary > recipe.model.vocabulary:
        raise Refused(
            f"{shard.path} has ids below {shard.vocabulary:,}, but model.vocabulary is {recipe.model.vocabulary:,}"
        )
    if windows_available(shard.tokens, recipe.model.block, 0) < 1:
        raise DataError(f"{shard.path} has {shard.tokens:,} tokens, less than one window of {recipe.model.block + 1:,}")
    found.append(shard)
    return f"{shard.tokens:,} tokens, bytes as in the manifest"


def _apart(queue: list[Queue], validation: list[Shard]) -> str | Check:
    if not queue or not validation:
        return Check("validation is not training data", NOT_APPLICABLE, "no queue or no validation shard to compare")
    for slot in queue[0].slots:
        checking.refuse_validation_shard(queue[0], slot, validation[0], f"slot {slot.number} of {queue[0].path}")
    return "no slot reads the validation shard"


def _slots(recipe: Recipe, folder: Path, run: RunFolder, batches: Batches) -> Check:
    """The slots that are entered first, read whole: bytes, fresh data, no validation document, exact or near."""
    queue, shards = batches.queue, batches.shards
    told = history(run.ledger) if run.exists() else None
    saved = [item.step for item in told.line if item.kind == "full"] if told else []
    step = saved[-1] if saved else recipe.start.first_update
    checks = SlotChecks(recipe, folder)
    past = past_checks(run)
    receipts, numbers, unknown, later, read = [], [], set(), 0, 0
    for slot in queue.slots:
        if slot.end_update <= step:
            continue
        against = checks.against(queue, slot, shards)
        basis = against.basis(queue, slot)
        unknown |= set(basis["not_compared"])
        if checked(past, basis):
            numbers.append(slot.number)
            continue
        read += checking.reads(queue, slot, shards, against)
        if numbers and read > CHECKED_AT_START:
            later += 1
            continue
        checking.verify_bytes(slot, shards)
        receipts.append(checks.check(queue, slot, shards, against))
        numbers.append(slot.number)
    words = [
        "no validation document, exact or near" if checks.validation else "no validation shard to compare with",
        *(["fresh"] if queue.freshness == "strict" else []),
        *(f"not compared: {one}" for one in sorted(unknown)),
        *([f"{later} later slot(s) are checked before they are entered"] if later else []),
    ]
    return Check(
        "slots", PASSED, f"{len(numbers)} checked ({len(receipts)} now): {'; '.join(words)}", 0, tuple(receipts)
    )


def _start(recipe: Recipe, folder: Path) -> str:
    start = recipe.start
    if start.init_from is not None:
        place = folder / start.init_from.path
        manifest = read_manifest(place)
        for name in (manifests.MODEL, manifests.CONFIG):
            if name not in manifest.files:
                raise DataError(f"{place}: the manifest lists no {name}; a checkpoint or an imported model is expected")
        stated = manifest.files[manifests.MODEL]["sha256"]
        if start.init_from.sha256 not in (None, stated):
            raise Refused(f"start.init_from.sha256 is {start.init_from.sha256}, but {place} states {stated}")
        return f"init-from {place.name}, step {manifest.step} of its run, optimizer will be fresh"
    if start.continue_from is not None:
        place = folder / start.continue_from.path
        if not place.is_dir():
            raise DataError(f"{place} does not exist; start.continue_from.path names a run or checkpoint folder")
        return f"continue-from step {start.continue_from.step} of {place.name}"
    return "scratch"


def _control(recipe: Recipe, folder: Path) -> str | Check:
    """The demanded control is whole; the ranks compute it, where they have not passed it, before the run is loaded."""
    place = controls.place(recipe, folder)
    if place is None:
        return Check("control", NOT_APPLICABLE, "the recipe demands none (control.required)")
    control = controls.read_control(place)
    return f"{len(control.expected)} update(s) of {control.weights_sha256}, computed on every new allocation"


def _pins(
    recipe: Recipe, folder: Path, queue: list[Queue], validation: list[Shard]
) -> dict[str, Callable[[], str | Check]]:
    """Each pin against the digest of what is here."""
    pins = recipe.pins

    def source(name: str) -> str | None:
        if recipe.start.init_from is None:
            return None
        path = folder / recipe.start.init_from.path / name
        return digest_file(path) if path.is_file() else None

    def prefix() -> str | None:
        if not queue:
            return None
        names = {queue[0].header_digest, *(slot.digest for slot in queue[0].slots)}
        return pins.queue_prefix if pins.queue_prefix in names else queue[0].head

    here: dict[str, tuple[str | None, Callable[[], str | None]]] = {
        "weights": (pins.weights, lambda: source(manifests.MODEL)),
        "config": (pins.config, lambda: source(manifests.CONFIG)),
        "tokenizer": (pins.tokenizer, lambda: queue[0].tokenizer if queue else None),
        "validation": (pins.validation, lambda: validation[0].sha256 if validation else None),
        "code": (pins.code, lambda: str(code_identity()["sha256"])),
        "queue_prefix": (pins.queue_prefix, prefix),
    }

    def compare(name: str, wanted: str | None, seen: Callable[[], str | None]) -> str | Check:
        if wanted is None and name in ("weights", "config") and recipe.start.init_from is None:
            return Check(f"pin {name}", NOT_APPLICABLE, f"start is {recipe.start.kind}, which takes no such file")
        found = seen()
        if wanted is None:
            return Check(f"pin {name}", NOT_PINNED, found or "nothing of the kind here")
        if found != wanted:
            raise Refused(f"pins.{name} is {wanted}, but what is here has {found or 'nothing of the kind'}")
        return wanted

    return {name: lambda name=name, pin=pin: compare(name, *pin) for name, pin in here.items()}  # type: ignore[misc]


def _mirror(recipe: Recipe, run: RunFolder) -> str | Check:
    """The mirror can be reached, honours create-only puts and holds no other run; it leaves a small object there."""
    wanted = recipe.checkpoint.mirror
    if wanted is None:
        return Check("mirror", NOT_APPLICABLE, "the recipe has no checkpoint.mirror: copies are nobody's task")
    where = place(wanted.url, Policy(MIRROR_SECONDS))
    where.prove(wanted.verify)
    held = where.read(records.PLACE_FILE)
    if held is not None:
        theirs, _ = records.parse_place(held, f"{where.url}/{records.PLACE_FILE}")
        if not run.exists():
            raise Refused(f"{where.url} holds run {theirs} already: go on with it (assay fetch), or take another "
                          "address for a new run")  # fmt: skip
        if run.run_id() != theirs:
            raise Refused(f"{where.url} holds run {theirs}, but {run.path} is {run.run_id()}; take another address")
        newest_number(where, run.ledger)
    return f"{where.url} honours create-only puts; run beside training: assay mirror {run.path} {where.url}"


def _disk(recipe: Recipe, queue: list[Queue], run: RunFolder) -> str:
    place = run.path
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise Refused(f"{place} cannot be written by this user; choose another --run folder")
    slots = [slot.updates for slot in queue[0].slots] if queue else None
    total = int(disk(recipe, checkpoint_steps(recipe, slots))["total"])
    standing = sum(
        path.stat().st_size for folder in (run.checkpoints, run.weights) for path in folder.glob("step-*/*.safetensors")
    )
    needed = max(total - standing, 0)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise Refused(
            f"{place} has {_size(free)} free, but the checkpoints that are kept need {_size(needed)}; "
            "lower checkpoint.keep or free space"
        )
    return f"{_size(free)} free, {_size(needed)} needed for the checkpoints that are kept"


def _size(count: int) -> str:
    """Bytes for people, in GB or, below one, in MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
