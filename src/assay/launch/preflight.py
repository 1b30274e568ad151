"""Pre-flight: everything that can be known to be wrong before a device is touched.

Each check is passed, refused, not pinned or not applicable, with a detail for people. It changes
nothing here; the caller writes the receipt. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.checkpoint import manifest as manifests
from assay.checkpoint.permission import refuse_held, refuse_lost_lines, refuse_other_recipe
from assay.data import approval, checking
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.order import windows_available
from assay.data.queue import Queue
from assay.data.shard import Shard, open_shard, verify_shard
from assay.errors import AssayError, DataError, MachineError, Refused, VerificationError
from assay.files.digest import digest_file
from assay.files.retry import Policy
from assay.launch import machine, starting
from assay.launch.checks import NOT_APPLICABLE, NOT_PINNED, PASSED, REFUSED, Check
from assay.mirror import leases, records
from assay.mirror.place import place
from assay.plan.figures import rank_refusal
from assay.plan.trace import stated
from assay.recipe.schema import Recipe
from assay.run import control as controls
from assay.run.folder import RunFolder, require_run
from assay.run.history import History, history
from assay.run.owner import is_owned
from assay.run.provenance import code_identity
from assay.run.slots import SlotChecks, checked, past_checks

# Tokens of slots behind the first that are checked before the start, under a minute's work; the rest is checked
# while training runs, each slot before it is entered.
CHECKED_AT_START = 1 << 30

MIRROR_SECONDS = 30.0  # that a mirror may take to answer before it is called unreachable


@dataclass
class _Seen:
    """What earlier checks found, for later ones; absent where they refused."""

    told: History | None = None  # of a run that exists
    queue: Queue | None = None
    batches: Batches | None = None
    validation: Shard | None = None
    gpus: list[machine.Gpu] | None = field(default_factory=list)
    file_time: float | None = None

    @property
    def begun(self) -> bool:
        """True when the start is a resume."""
        return self.told is not None and bool(self.told.segments)


def preflight(
    recipe: Recipe, folder: Path, run: RunFolder, ranks: int = 1, from_step: int | None = None
) -> list[Check]:
    """All checks of a launch of `recipe`, whose relative paths start from `folder`, into `run` on so many ranks.

    A run that was begun is resumed: from `from_step`, or from its newest full checkpoint.
    """
    checks: list[Check] = []

    def check(name: str, act: Callable[[], str | Check]) -> bool:
        try:
            found = act()
        except AssayError as fault:
            checks.append(Check(name, REFUSED, str(fault), fault.code))
            return False
        except OSError as fault:
            words = f"{fault.filename or 'this machine'} cannot be looked at: {fault.strerror or fault}"
            checks.append(Check(name, REFUSED, words, MachineError.code))
            return False
        checks.append(found if isinstance(found, Check) else Check(name, PASSED, found))
        return checks[-1].result != REFUSED

    seen = _Seen()
    check("this version", lambda: _supported(recipe))
    possible = check("ranks", lambda: _ranks(recipe, ranks))
    sound = check("ledger", lambda: _ledger(run, seen))
    if sound:
        check("holds", lambda: _holds(run, seen))
        check("run folder", lambda: _run_folder(recipe, run, seen))
    if check("queue", lambda: _queue(recipe, folder, seen)):
        check("data", lambda: _data(recipe, folder, seen))
    apart = check("validation", lambda: _validation(recipe, folder, seen)) and check(
        "validation is not training data", lambda: _apart(seen)
    )
    if apart and seen.batches and sound:
        check("slots", lambda: _slots(recipe, folder, run, seen))
    if sound:
        check("start", lambda: starting.start(recipe, folder, run, seen.told, from_step))
    check("cadence", lambda: _cadence(recipe, folder))
    check("control", lambda: _control(recipe, folder, seen))
    for name, act in _pins(recipe, folder, seen).items():
        check(f"pin {name}", act)
    if check("device", lambda: _device(recipe, ranks, seen)) and possible:
        check("memory", lambda: machine.memory_against_plan(recipe, ranks, seen.gpus))
    check("write access", lambda: _writing(run, seen))
    slots = [slot.updates for slot in seen.queue.slots] if seen.queue else None
    check("disk", lambda: machine.free_space(recipe, slots, run, seen.told))
    check("clock", lambda: machine.clock(seen.told, seen.file_time))
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
    unmet = {
        "reduction": recipe.runtime.engine == "fsdp"
        and recipe.reduction == "fast"
        and "fast with runtime.engine fsdp: set one of them otherwise",
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


def _ledger(run: RunFolder, seen: _Seen) -> str | Check:
    """The receipts chain, none is missing at the end, and the metrics hold what receipts seal."""
    if not run.exists():
        return Check("ledger", NOT_APPLICABLE, "a new run")
    require_run(run)
    told = history(run.ledger)
    refuse_lost_lines(run, told)
    assert told.last is not None
    sealed = max((int(one.body["stop"]) for one in told.sealed), default=0)
    present = run.metrics.stat().st_size if run.metrics.is_file() else 0
    if present < sealed:
        raise VerificationError(f"{run.metrics} has {present:,} bytes, but receipts seal {sealed:,}: its end was lost; "
                                "restore it from a copy")  # fmt: skip
    seen.told = told
    torn = len(run.ledger.read_bytes().rpartition(b"\n")[2])
    aside = f"; {torn} bytes of an unfinished line will be moved aside" if torn else ""
    return f"{told.last.seq + 1:,} receipts that chain, the newest of {told.last.time}, {told.last.digest}{aside}"


def _holds(run: RunFolder, seen: _Seen) -> str:
    if seen.told is not None:
        refuse_held(run, seen.told)
    return "none"


def _run_folder(recipe: Recipe, run: RunFolder, seen: _Seen) -> str:
    if seen.told is None:
        return "a new run"
    if is_owned(run):
        raise Refused(f"{run.path} is being trained by another process; stop that one first")
    refuse_other_recipe(run, recipe, seen.told)
    return f"{len(seen.told.segments)} segment(s); recipe and code are those that may go on"


def _queue(recipe: Recipe, folder: Path, seen: _Seen) -> str:
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
    seen.queue = queue
    short = recipe.schedule.updates - queue.updates_total
    more = f"; {short:,} of the scheduled updates are not prepared yet" if short > 0 else ""
    approved = ", each approved by its reviewers" if queue.trust else ""
    return f"{len(queue.slots)} slot(s), {queue.updates_total:,} updates{approved}{more}"


def _data(recipe: Recipe, folder: Path, seen: _Seen) -> str:
    assert seen.queue is not None
    roots = [folder / root for root in recipe.data.roots]
    seen.batches = Batches(seen.queue, roots, recipe.data.seed, recipe.global_batch)
    return f"{len(seen.batches.shards)} shard(s) are here with the sizes of their manifests"


def _validation(recipe: Recipe, folder: Path, seen: _Seen) -> str | Check:
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
    seen.validation = shard
    return f"{shard.tokens:,} tokens, bytes as in the manifest{_validated(recipe, shard)}"


def _validated(recipe: Recipe, shard: Shard) -> str:
    """How much of the shard validation during training reads: its beginning, and perhaps nothing of some sources."""
    if recipe.evaluate.every is None:
        return ""
    available = windows_available(shard.tokens, recipe.model.block, 0)
    count = min(recipe.evaluate.batches * recipe.batch.micro, available)
    read = {name for name, _, _ in shard.sources_in(1, count * recipe.model.block + 1)}
    left = sorted({source.name for source in shard.sources} - read)
    nothing = f", and nothing of {', '.join(left)}: raise evaluate.batches to read them" if left else ""
    return f"; training reads windows 0:{count:,} of {available:,}{nothing}"


def _apart(seen: _Seen) -> str | Check:
    queue, validation = seen.queue, seen.validation
    if not queue or not validation:
        return Check("validation is not training data", NOT_APPLICABLE, "no queue or no validation shard to compare")
    for slot in queue.slots:
        checking.refuse_validation_shard(queue, slot, validation, f"slot {slot.number} of {queue.path}")
    return "no slot reads the validation shard"


def _slots(recipe: Recipe, folder: Path, run: RunFolder, seen: _Seen) -> Check:
    """The slots that are entered first, read whole: bytes, fresh data, no validation document, exact or near."""
    assert seen.batches is not None
    queue, shards, told = seen.batches.queue, seen.batches.shards, seen.told
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


def _cadence(recipe: Recipe, folder: Path) -> str:
    """The trace that `checkpoint.every: auto` chooses from can be read."""
    given = stated(recipe, folder)
    if isinstance(recipe.checkpoint.every, int):
        return f"a full checkpoint every {recipe.checkpoint.every:,} updates, as stated"
    if given is None:
        return "chosen by the run's own interruptions"
    return f"chosen for {float(given[0]) / 3600:,.3g} h between interruptions ({given[1]})"


def _control(recipe: Recipe, folder: Path, seen: _Seen) -> str | Check:
    """The demanded control is whole; the ranks compute it, where they have not passed it, before the run is loaded."""
    place = controls.place(recipe, folder)
    if place is None:
        return Check("control", NOT_APPLICABLE, "the recipe demands none (control.required)")
    control = controls.read_control(place)
    words = "not passed yet"
    newest = seen.told.controls[-1] if seen.told and seen.told.controls else None
    if newest is not None and newest.body.get("control") == control.sha256:
        words = f"{'passed' if newest.body.get('passed') is True else 'FAILED'} at {newest.time} (receipt {newest.seq})"
    elif newest is not None:
        words = "the newest that was computed is another one"
    return (
        f"{len(control.expected)} update(s) of {control.weights_sha256}; {words}; computed before the run is loaded, "
        "unless it passed on this very allocation"
    )


def _pins(recipe: Recipe, folder: Path, seen: _Seen) -> dict[str, Callable[[], str | Check]]:
    """Each pin against the digest of what is here."""
    pins, queue, validation = recipe.pins, seen.queue, seen.validation

    def source(name: str, evidence: str) -> str | None:
        if seen.told is not None and seen.begun:  # compared at the run's own start, which its receipt states
            found = seen.told.segments[0].body["evidence"].get(evidence)
            return found if isinstance(found, str) else None
        place = starting.source_folder(recipe, folder)
        if place is not None and name == manifests.MODEL and (place / manifests.MANIFEST).is_file():
            manifest = manifests.read_manifest(place)
            if manifests.tensor_files(manifest, name) != [name]:
                return manifests.weights_pin(manifest)  # it lies in shards
        return digest_file(place / name) if place is not None and (place / name).is_file() else None

    def prefix() -> str | None:
        if not queue:
            return None
        names = {queue.header_digest, *(slot.digest for slot in queue.slots)}
        return pins.queue_prefix if pins.queue_prefix in names else queue.head

    here: dict[str, tuple[str | None, Callable[[], str | None]]] = {
        "weights": (pins.weights, lambda: source(manifests.MODEL, "weights_file")),
        "config": (pins.config, lambda: source(manifests.CONFIG, "config_file")),
        "tokenizer": (pins.tokenizer, lambda: queue.tokenizer if queue else None),
        "validation": (pins.validation, lambda: validation.sha256 if validation else None),
        "code": (pins.code, lambda: str(code_identity()["sha256"])),
        "queue_prefix": (pins.queue_prefix, prefix),
    }

    def compare(name: str, wanted: str | None, digest: Callable[[], str | None]) -> str | Check:
        if wanted is None and name in ("weights", "config") and recipe.start.kind == "scratch":
            return Check(f"pin {name}", NOT_APPLICABLE, "start is scratch, which takes no such file")
        found = digest()
        if found is None and name in ("weights", "config") and seen.begun:
            return Check(f"pin {name}", NOT_APPLICABLE, "a resume takes the run's own state")
        if wanted is None:
            return Check(f"pin {name}", NOT_PINNED, found or "nothing of the kind here")
        if found != wanted:
            raise Refused(f"pins.{name} is {wanted}, but what is here has {found or 'nothing of the kind'}")
        return wanted

    return {name: lambda name=name, pin=pin: compare(name, *pin) for name, pin in here.items()}  # type: ignore[misc]


def _device(recipe: Recipe, ranks: int, seen: _Seen) -> str:
    seen.gpus = [] if recipe.runtime.device == "cpu" else machine.gpus()
    return machine.device(recipe, ranks, seen.gpus, seen.told)


def _writing(run: RunFolder, seen: _Seen) -> str:
    words, seen.file_time = machine.writing(run)
    return words


def _mirror(recipe: Recipe, run: RunFolder) -> str | Check:
    """The mirror can be reached, honours create-only puts and holds no other run; it leaves a small object there."""
    wanted = recipe.checkpoint.mirror
    if wanted is None:
        return Check("mirror", NOT_APPLICABLE, "the recipe has no checkpoint.mirror: copies are nobody's task")
    where = place(wanted.url, Policy(MIRROR_SECONDS))
    where.prove(wanted.verify)
    held = where.read(records.PLACE_FILE)
    if held is not None:
        theirs, identity = records.parse_place(held, f"{where.url}/{records.PLACE_FILE}")
        if not run.exists():
            raise Refused(f"{where.url} holds run {theirs} already: go on with it (assay fetch), or take another "
                          "address for a new run")  # fmt: skip
        if run.run_id() != theirs:
            raise Refused(f"{where.url} holds run {theirs}, but {run.path} is {run.run_id()}; take another address")
        stands = leases.standing(where, run, identity)
        if stands.lost:
            raise Refused(leases.lost_words(where, run, stands))
        leases.agree(where, run, leases.known_states(where, stands.lease), stands.own)
    elif run.exists() and (why := leases.emptied(where, run)) is not None:
        raise Refused(why)
    return f"{where.url} honours create-only puts; run beside training: assay mirror {run.path} {where.url}"
