"""Claims about the data: the queue, the order digest, the exposure.

The queue and the order alone prove the exposure; the order digest needs the shards' bytes, which
are read once, streaming. Missing data makes a claim unverifiable, other bytes make it fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from assay.checkpoint import manifest as manifests
from assay.data import queue as queues
from assay.data.batches import Batches, order_next
from assay.data.exposure import Consumed, Exposure
from assay.data.queue import Queue, order_start
from assay.errors import AssayError
from assay.files.digest import PREFIX
from assay.files.reading import read_bytes, read_object
from assay.recipe.schema import Recipe
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.run import inputs
from assay.run.folder import RunFolder
from assay.run.history import Saved

DATA = "data"


def data_roots(case: Case, recipe: Recipe) -> list[Path]:
    """Where shards are looked for: the folders that the caller names, then those of the recipe on this machine."""
    if case.bundle:
        return list(case.roots)
    return [*case.roots, *inputs.data_roots(RunFolder(case.root), recipe)]


def queue_claim(case: Case, recipe: Recipe) -> Claim:
    """The queue chains, the checkpoints' prefixes are its beginning, and slots were entered where it says.

    Sets `case.queue`: the recipe's queue, or a bundle's; when it is not here the longest prefix that a
    checkpoint holds.
    """
    faults: list[str] = []
    copies = [] if case.bundle else _copies(case)
    try:
        path = case.root / "queue.jsonl" if case.bundle else inputs.queue_path(RunFolder(case.root), recipe)
    except (AssayError, ValueError) as fault:  # ValueError: a NUL byte in the folder that origin.json names
        return judge(DATA, "queue", [str(fault)], "")
    source = "the bundle's queue" if case.bundle else "the recipe's queue"
    if not path.is_file() and not case.bundle:
        if not copies:
            return judge(DATA, "queue", [], "", f"{path} is not here and no checkpoint holds a copy")
        path, source = max((folder / manifests.QUEUE for folder, _ in copies), key=lambda one: one.stat().st_size), ""
        source = f"the copy in {path.parent.name} (the recipe's queue is not here)"
    try:
        queue = queues.load(path)
        content = read_bytes(path, "a queue")
    except AssayError as fault:
        return judge(DATA, "queue", [str(fault)], "")
    if queue.block != recipe.model.block:
        faults.append(differ(str(path), "block", recipe.model.block, queue.block))
    for folder, saved in copies:
        faults += _prefix_faults(folder, saved, queue, content)
    faults += _slot_faults(case, queue)
    if not faults:
        case.queue = queue
    evidence = (
        f"{source}: {counted(len(queue.slots), 'slot')}, {queue.updates_total:,} updates, head {queue.head}; "
        f"{counted(len(copies), 'prefix', 'prefixes')} in checkpoints, "
        f"{counted(len(case.history.slots), 'entry', 'entries')} into slots agree"
    )
    return judge(DATA, "queue", faults, evidence)


def _copies(case: Case) -> list[tuple[Path, Saved]]:
    """Folders of standing full checkpoints whose queue prefix is here; a missing one is the checkpoint's own claim."""
    full = [item for item in case.history.standing if item.kind == "full"]
    return [(case.root / item.folder, item) for item in full if (case.root / item.folder / manifests.QUEUE).is_file()]


def _prefix_faults(folder: Path, saved: Saved, queue: Queue, content: bytes) -> Iterator[str]:
    where = f"{saved.folder}/{manifests.QUEUE}"
    try:
        copy = read_bytes(folder / manifests.QUEUE, "the queue prefix of a checkpoint")
        stated = read_object(folder / manifests.STATE, "the state of a checkpoint").get("queue_prefix")
    except AssayError as fault:
        yield str(fault)
        return
    if not content.startswith(copy) or not copy.endswith(b"\n"):
        yield f"{where} ({len(copy):,} bytes) is not the beginning of {queue.path}: other bytes were approved than run"
        return
    slots = copy.count(b"\n") - 1
    if stated != queue.prefix(slots):
        yield differ(f"{saved.folder}/{manifests.STATE}", "queue_prefix", queue.prefix(slots), stated)
    consumed = queue.slot_of(saved.step - 1)[0].number + 1 if 0 < saved.step <= queue.updates_total else 0
    if slots < consumed:
        yield f"{where} holds {slots} slots, but {consumed} had been consumed at step {saved.step}"


def _slot_faults(case: Case, queue: Queue) -> Iterator[str]:
    for receipt in case.history.slots:
        body, where = receipt.body, f"receipt {receipt.seq} (slot.entered)"
        try:
            slot, within = queue.slot_of(body["update"])
        except AssayError as fault:
            yield f"{where}: {fault}"
            continue
        for key, expected in (("slot", slot.number), ("within", within), ("line", slot.digest)):
            if body[key] != expected:
                yield differ(where, key, expected, body[key])
        if body.get("shards") != list(dict.fromkeys(part.shard for part in slot.parts)):
            yield f"{where}: the shards are not those of slot {slot.number}"


def agreement_claim(case: Case, recipe: Recipe) -> Claim:
    """One step, one order digest: metrics, checkpoints, starts and ends agree; step 0 follows from queue and seed."""
    seen: dict[int, tuple[str, str]] = {}
    faults = []
    places = list(_stated(case))
    if case.queue is not None:
        places.insert(0, (0, PREFIX + order_start(case.queue, recipe.data.seed).hex(), "the queue's header and seed"))
    for step, found, where in places:
        expected, first = seen.setdefault(step, (found, where))
        if expected != found:
            faults.append(differ(where, f"the order digest of step {step}", f"{expected} as in {first}", found))
    evidence = f"{counted(len(places), 'statement')} about {counted(len(seen), 'step')} agree"
    return judge(DATA, "order digests agree", faults, evidence)


def _stated(case: Case) -> Iterator[tuple[int, str, str]]:
    for line in case.lines:
        yield line.update + 1, line.order_digest, line.where
    for receipt in case.receipts:
        step, order = receipt.body.get("step"), receipt.body.get("order_digest")
        if type(step) is int and isinstance(order, str):
            yield step, order, f"receipt {receipt.seq} ({receipt.kind})"


def order_claim(case: Case, recipe: Recipe) -> Claim:
    """The order digest of every update, recomputed from the windows' bytes."""
    name = "order digest recomputed"
    if case.queue is None:
        return judge(DATA, name, [], "", "the queue is not here or does not hold")
    stated: dict[int, list[tuple[str, str]]] = {}
    for step, order_digest, where in _stated(case):
        stated.setdefault(step, []).append((order_digest, where))
    last = max(stated, default=0)
    if not last:
        return judge(DATA, name, [], "", "no update is recorded yet")
    used = [slot for slot in case.queue.slots if slot.first_update < last]
    queue = replace(case.queue, slots=tuple(used))
    try:
        roots = data_roots(case, recipe)
        absent = queues.missing(queue, queues.locate(queue, roots))
        if absent:
            looked = ", ".join(str(root) for root in roots) or "nowhere"
            return judge(
                DATA,
                name,
                [],
                "",
                f"{counted(len(absent), 'shard')} not at hand, the first is {absent[0]}; looked under {looked}: "
                "name its folder with --data",
            )
        batches = Batches(queue, roots, recipe.data.seed, recipe.global_batch)
        order = batches.order_start()
        for update in range(last):
            order = order_next(order, batches.digest(update))
            found = PREFIX + order.hex()
            wrong = [
                differ(where, f"the order digest of step {update + 1}", f"{found} by the data", one)
                for one, where in stated.get(update + 1, [])
                if one != found
            ]
            if wrong:
                return judge(DATA, name, [*wrong, f"nothing behind update {update} was compared"], "")
            case.progress(f"order digest: update {update + 1:,} of {last:,}")
    except AssayError as fault:
        return judge(DATA, name, [str(fault)], "")
    windows = last * recipe.global_batch
    return judge(DATA, name, [], f"{last:,} updates, {windows:,} windows read again; step {last}: {found}")


def exposure_claim(case: Case, recipe: Recipe) -> Claim:
    """Positions by source follow from queue, seed and updates, and add up to the positions trained."""
    if case.queue is None:
        return judge(DATA, "exposure", [], "", "the queue is not here or does not hold")
    first, last = recipe.start.first_update, case.reached()
    if first >= last:
        return judge(DATA, "exposure", [], "", "no update is recorded yet")
    try:
        exposure = Exposure([Consumed(case.queue, recipe.data.seed, recipe.global_batch, first, last)])
    except AssayError as fault:
        return judge(DATA, "exposure", [str(fault)], "")
    wanted = (last - first) * recipe.positions_per_update
    total, by_source = exposure.total, exposure.by_source()
    faults = []
    if total.positions != wanted:
        faults.append(differ("the exposure", "the sum", f"{wanted:,} positions", f"{total.positions:,}"))
    if sum(counts.positions for counts in by_source.values()) != total.positions:
        faults.append("the exposure by source does not add up to all positions")
    again = (len(case.lines) - len(case.standing_updates())) * recipe.positions_per_update
    sources = "; ".join(
        f"{name} {counts.positions:,} ({counts.distinct:,} distinct)" for name, counts in by_source.items()
    )
    evidence = (
        f"{total.positions:,} positions = {total.distinct:,} distinct + {total.positions - total.distinct:,} repeated, "
        f"{again:,} recomputed besides; {sources}"
    )
    return judge(DATA, "exposure", faults, evidence)
