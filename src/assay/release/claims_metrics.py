"""Claims about the metrics: seals, rates, updates, positions, and updates that were done again.

Every line of a completed update is looked at, superseded ones included. What is not sealed yet is
counted and said. Nothing here needs the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from assay.errors import AssayError
from assay.files.digest import is_digest
from assay.files.reading import parse_json
from assay.recipe.schedule import rates
from assay.recipe.schema import Recipe
from assay.release.claims import Case, Claim, Line, counted, differ, judge
from assay.release.claims_amendments import recipe_at, terms
from assay.run.amendments import Term
from assay.run.bits import families
from assay.run.history import Segment
from assay.run.metrics import completed, stretch

METRICS = "metrics"
RATE_TOLERANCE = 1e-12  # relative, by the contract
LOSS_TOLERANCE = 0.00005  # nats, between segments that do not promise the same bits, by the contract
_LINE_LIMIT = 1 << 20


def seals_claim(case: Case) -> Claim:
    """Sealed stretches follow one another from byte 0 and have their digests."""
    path = case.root / "metrics.jsonl"
    size = path.stat().st_size if path.is_file() else 0
    faults = []
    reached = 0
    for receipt in case.history.sealed:
        start, stop = receipt.body["start"], receipt.body["stop"]
        where = f"metrics.jsonl bytes {start}:{stop} (receipt {receipt.seq})"
        if start != reached or stop <= start:
            faults.append(f"{where} does not continue at byte {reached}")
        elif stop > size:
            faults.append(f"{where}: the file has {size:,} bytes; its end was lost")
        elif (found := stretch(path, start, stop)) != receipt.body["sha256"]:
            faults.append(differ(where, "the digest", receipt.body["sha256"], found))
        reached = stop
    segments = case.history.segments
    # A segment that closed by itself had sealed everything before; a killed one could not.
    settled = bool(segments) and segments[-1].outcome is not None and segments[-1].last is not None
    if size > reached and settled and not faults:
        faults.append(f"metrics.jsonl has {size - reached:,} bytes after the last seal, though the last segment closed")
    rest = f"; {size - reached:,} bytes after them are not sealed yet" if size > reached else ""
    text = f"{counted(len(case.history.sealed), 'stretch', 'stretches')}, bytes 0:{reached}"
    if not case.history.sealed and not faults:
        return judge(METRICS, "seals", [], "", f"nothing is sealed yet{rest}")
    return judge(METRICS, "seals", faults, text + rest)


def lines_claim(case: Case) -> Claim:
    """Every line is whole and of the format; `case.lines` is filled with those of completed updates."""
    path = case.root / "metrics.jsonl"
    faults: list[str] = []
    unfinished = 0
    if not path.is_file():
        if case.history.sealed or case.history.segments:
            faults.append(f"{path} is missing")
        return judge(METRICS, "lines", faults, "", "the run has no metrics yet")
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(_LINE_LIMIT):
            number += 1
            if not raw.endswith(b"\n"):
                if len(raw) == _LINE_LIMIT:
                    faults.append(f"metrics.jsonl line {number} is longer than {_LINE_LIMIT:,} bytes")
                break  # otherwise the torn end of an interrupted writer
            try:
                line = _line(parse_json(raw, f"metrics.jsonl line {number}"), number, file.tell())
            except AssayError as fault:
                faults.append(str(fault))
                continue
            if isinstance(line, str):
                faults.append(line)
            elif line is None:
                unfinished += 1
            else:
                case.lines.append(line)
    stopped = f"; {counted(unfinished, 'update')} stopped by a value that is not finite" if unfinished else ""
    return judge(METRICS, "lines", faults, f"{counted(len(case.lines), 'completed update')} recorded{stopped}")


def _line(value: Any, number: int, end: int) -> Line | str | None:
    """The line of a completed update; None for an unfinished one; a fault as text."""
    where = f"metrics.jsonl line {number}"
    if not isinstance(value, dict):
        return f"{where} is not a JSON object"
    update, segment, named = value.get("update"), value.get("segment"), value.get("nonfinite", [])
    if type(update) is not int or update < 0 or type(segment) is not int or segment < 1:
        return f"{where}: update {update!r} of segment {segment!r} is not a place in a run"
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return f"{where}: nonfinite is {named!r}; names of values are expected"
    if not completed(value):
        return None
    for key in ("loss", "lr", "grad_norm"):
        if type(value.get(key)) is not float:
            return f"{where}: {key} is {value.get(key)!r}; a number is expected"
    muon, order = value.get("muon_lr"), value.get("order_digest")
    if muon is not None and type(muon) is not float:
        return f"{where}: muon_lr is {muon!r}; a number or null is expected"
    if not isinstance(order, str) or not is_digest(order):
        return f"{where}: order_digest is {order!r}; a digest is expected"
    speed, seconds = value.get("tokens_per_second"), value.get("seconds")
    positions = speed * seconds if type(speed) is float and type(seconds) is float else None
    norm, skipped = value["grad_norm"], value.get("skipped", False)
    if type(skipped) is not bool:
        return f"{where}: skipped is {skipped!r}; true or nothing is expected"
    return Line(number, end, update, segment, value["loss"], value["lr"], muon, order, positions, norm, skipped)


def rates_claim(case: Case, recipe: Recipe) -> Claim:
    """The learning rates of every recorded update follow from recipe and adopted amendments, to 1e-12 relative."""
    faults = []
    largest = 0.0
    course = terms(case, recipe)
    sealed_to = max((receipt.body["stop"] for receipt in case.history.sealed), default=0)
    for line in case.lines:
        try:
            wanted = rates(recipe_at(course, recipe, line.segment, line.update), line.update)
        except ValueError as fault:
            faults.append(f"{line.where}: {fault}")
            continue
        for key, found in (("lr", line.lr), ("muon_lr", line.muon_lr)):
            expected = wanted.get(key)
            if (expected is None) != (found is None):
                faults.append(differ(line.where, key, expected, found))
            elif expected is not None and found is not None:
                error = abs(found - expected) / expected if expected else abs(found)
                largest = max(largest, error)
                if not error <= RATE_TOLERANCE:
                    faults.append(differ(line.where, key, repr(expected), repr(found)))
    open_lines = sum(line.end > sealed_to for line in case.lines)
    rest = f"; {open_lines:,} of them not sealed yet" if open_lines else ""
    return judge(
        METRICS,
        "learning rates",
        faults,
        f"{counted(len(case.lines), 'recorded update')} recomputed, largest relative difference {largest:.1g}{rest}",
        None if case.lines else "no update is recorded yet",
    )


def updates_claim(case: Case, recipe: Recipe) -> Claim:
    """Updates are gapless and unique in each segment, and segments join where their receipts say."""
    faults = list(_segment_faults(case, recipe))
    standing = sorted(case.standing_updates())
    first = recipe.start.first_update
    for expected, update in enumerate(standing, first):
        if update != expected:
            faults.append(f"metrics.jsonl has no line for update {expected}; the next one is of update {update}")
            break
    done = len(standing)
    again = len(case.lines) - done
    evidence = (
        f"updates {first}:{first + done} without a gap in {counted(len(case.history.segments), 'segment')}; "
        f"{done * recipe.positions_per_update:,} positions, {again * recipe.positions_per_update:,} of them done again"
    )
    return judge(METRICS, "updates", faults, evidence, None if case.lines else "no update is recorded yet")


def _segment_faults(case: Case, recipe: Recipe) -> Iterator[str]:
    told = case.history
    by_segment: dict[int, list[Line]] = {}
    newest = 0
    for line in case.lines:
        by_segment.setdefault(line.segment, []).append(line)
        if line.segment < newest:
            yield f"{line.where} stands behind a line of segment {newest}"
        newest = max(newest, line.segment)
    for number in sorted(by_segment.keys() - {segment.number for segment in told.segments}):
        yield f"{by_segment[number][0].where}: no receipt opens segment {number}"
    furthest = recipe.start.first_update
    for expected, segment in enumerate(told.segments, 1):
        if segment.number != expected:
            yield differ(f"receipt of kind {segment.mode}", "segment", expected, segment.number)
        reached = segment.first
        for line in by_segment.get(segment.number, []):
            if line.update != reached:
                what = "twice" if line.update < reached else "too early"
                yield f"{line.where} comes {what}: update {reached} is expected there"
                break
            reached += 1
        if segment.first > furthest:
            yield f"segment {segment.number} begins at step {segment.first}, but only step {furthest} was reached"
        if segment.last is not None and segment.last != reached:
            yield differ(f"the closing receipt of segment {segment.number}", "step", reached, segment.last)
        yield from _saved_faults(case, segment, reached)
        furthest = max(furthest, reached, segment.last or 0)


def _saved_faults(case: Case, segment: Segment, reached: int) -> Iterator[str]:
    """Checkpoints of a segment lie within its steps; lines that a killed process had not written are no fault."""
    last = reached if segment.last is not None else math.inf
    for item in case.history.saved:
        if item.segment == segment.number and not segment.first <= item.step <= last:
            yield differ(f"receipt {item.seq}", "the saved step", f"within {segment.first}:{reached}", item.step)


def positions_claim(case: Case, recipe: Recipe) -> Claim:
    """Each line's speed and seconds multiply to the positions of one update by the recipe."""
    wanted = recipe.positions_per_update
    measured = [line for line in case.lines if line.positions is not None]
    faults = [
        differ(line.where, "tokens_per_second × seconds", f"{wanted:,} positions", f"{line.positions:,.6f}")
        for line in measured
        if line.positions is not None and not abs(line.positions - wanted) <= 1e-9 * wanted
    ]
    return judge(
        METRICS,
        "positions per update",
        faults,
        f"{wanted:,} = {recipe.global_batch:,} × {recipe.model.block:,} in {counted(len(measured), 'recorded update')}",
        None if measured else "no update is recorded with its speed",
    )


def recomputed_claim(case: Case) -> Claim:
    """Updates that were done again agree with the superseded ones: order digest, rates, and the loss."""
    told = case.history
    alike = families(told)
    faults = [
        f"receipt {alarm.seq} is an alarm: {alarm.body.get('alarm')} (update {alarm.body.get('update')}, "
        f"{alarm.body.get('keys')})"
        for alarm in told.alarms
        if "keys" in alarm.body  # other alarms say nothing of updates that were done again
    ]
    course = terms(case, case.recipe) if case.recipe is not None else {}
    before: dict[int, Line] = {}
    parted: set[tuple[int, int]] = set()  # segments whose schedules have parted by an amendment: not the same updates
    pairs = exact = 0
    for line in case.lines:
        older = before.get(line.update)
        before[line.update] = line
        if older is None or (older.segment, line.segment) in parted:
            continue
        if case.recipe is not None and _rates_part(course, case.recipe, older, line):
            parted.add((older.segment, line.segment))
            continue
        pairs += 1
        for key in ("order_digest", "lr", "muon_lr"):
            if getattr(older, key) != getattr(line, key):
                faults.append(differ(line.where, key, f"{getattr(older, key)} as before", getattr(line, key)))
        # What was not promised is not held to the bit.
        same = line.segment in alike and alike.get(older.segment) == alike[line.segment]
        exact += same
        if older.loss != line.loss if same else not abs(older.loss - line.loss) <= LOSS_TOLERANCE:
            faults.append(differ(line.where, "loss", f"{older.loss!r} as in segment {older.segment}", repr(line.loss)))
    evidence = f"{counted(pairs, 'update')} done again agree, {exact:,} of them bit for bit" if pairs else "none"
    return judge(METRICS, "recomputed updates agree", faults, evidence)


def _rates_part(course: dict[int, list[Term]], recipe: Recipe, older: Line, line: Line) -> bool:
    """Whether the adopted schedules of two segments give one update two rates."""
    one, other = (recipe_at(course, recipe, each.segment, each.update) for each in (older, line))
    if one == other:
        return False
    try:
        return rates(one, older.update) != rates(other, line.update)
    except ValueError:  # outside of a schedule: `rates_claim` says so
        return False
