"""The numbers of a run, each under its own name, computed from ledger and metrics.

Scheduled, projected, affordable, reported, saved, mirrored and prepared are seven different
numbers; none stands in for another, and what was not stated by anybody is null.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from assay.data import queue as queues
from assay.errors import AssayError, InputError, Interrupted, VerificationError
from assay.files.reading import read_object
from assay.ledger.ledger import Receipt
from assay.plan.figures import flops_per_position, mfu
from assay.recipe.schedule import decay_start
from assay.recipe.schema import Recipe
from assay.run import metrics
from assay.run.accounts import Account, account
from assay.run.amendments import amendments, effective
from assay.run.cadence import in_force
from assay.run.folder import RunFolder, require_run
from assay.run.history import AWAITED, SAFE, History, Saved, history
from assay.run.inputs import queue_path
from assay.run.lost import Again
from assay.run.owner import is_owned
from assay.run.speed import Speed

# A run is called unknown when no update was seen for ten times the median update, and never
# before this many seconds, so that a start or a compilation is not mistaken for silence.
QUIET_FLOOR_SECONDS = 60.0
NOISES = 20  # newest estimates that the noise scale is averaged over
# A full checkpoint of a run with a mirror may wait so long for its copy before status warns: 13 GB at 100 Mbit/s
# take 18 minutes, and as long again to be read back.
COPY_SECONDS = 3600.0


@dataclass(frozen=True)
class Reported:
    """What the metrics say: newest step, its loss and order digest, when, seconds of updates, what was done again."""

    step: int | None
    loss: float | None
    order_digest: str | None
    time: str | None
    median_seconds: float | None
    lines: int
    again: Again
    skipped: int = 0  # updates that the policy for spikes left out, as the newest line of each says
    speed: Speed = field(default_factory=Speed)
    newest: Speed = field(default_factory=Speed)  # of the segment of the newest line
    segment: int | None = None
    noise_scale: float | None = None  # positions, see `_noise_scale`


def status(run: RunFolder, copy_seconds: float | None = None) -> dict[str, Any]:
    """The contract's `status` keys for one run; it warns of a verified copy older than `copy_seconds`, where given."""
    require_run(run)
    told = history(run.ledger)
    recipe = effective(run.recipe(), told)
    seen = reported(run.metrics)
    full = [item for item in told.line if item.kind == "full"]
    newest = max(full, key=lambda item: (item.step, item.segment), default=None)
    copied = {one.body["manifest_sha256"] for one in told.copies if one.body["verify"] == "readback"}
    copied &= told.up_to(told.tip)  # of the line that goes on
    copies = [item for item in told.saved if item.kind == "full" and item.manifest_sha256 in copied]
    copy = max(copies, key=lambda item: (item.step, item.segment), default=None)
    contacts = [stamp for stamp in (seen.time, told.last.time if told.last else None) if stamp]
    money = account(told.money)
    affordable = money.affordable(seen.step)
    starts = [{"mode": one.mode, "step": one.first} for one in told.segments]
    return {
        "run_id": told.run_id,
        "name": recipe.name,
        "state": state(told, seen, is_owned(run)),
        "start": starts[0] if starts else None,
        "last_start": starts[-1] if starts else None,
        "scheduled": recipe.schedule.updates,
        "projected": None,
        "affordable": affordable,
        "affordable_unknown": money.unknown(seen.step),
        "reported": seen.step,
        "saved": newest.step if newest else None,
        "mirrored": copy.step if copy else None,
        "mirrored_age_seconds": round(_seconds_since(copy.time)) if copy else None,
        "orphaned": [_orphan(one) for one in told.orphaned],
        "prepared": prepared(queue_path(run, recipe)),
        "order_digest": seen.order_digest,
        "loss": seen.loss,
        "recomputed": seen.again.facts(told, recipe.positions_per_update),
        "checkpoint_every": in_force(recipe, told),
        "segments": len(told.segments),
        "ending": ending(run, told),
        "bits": told.segments[-1].body.get("numerics", {}).get("bits") if told.segments else None,
        "ranks": told.segments[-1].body.get("numerics", {}).get("world") if told.segments else None,
        "hold": told.hold.body["cause"] if told.hold else None,
        "alarms": len(told.alarms),
        "skipped": seen.skipped,
        "stragglers": len(told.stragglers),
        "tokens_per_second": seen.speed.facts(recipe.positions_per_update),
        "mfu": _mfu(recipe, told, seen),
        "peak": told.segments[-1].body.get("numerics", {}).get("peak") if told.segments else None,
        "noise_scale": seen.noise_scale,
        "last_contact": max(contacts, default=None),
        "decay_start": decay_start(recipe.schedule),
        "amendments": [{"amendment": one.id, "state": one.state} for one in amendments(told, told.tip)],
        "warnings": [
            *warnings(recipe, affordable),
            *late_copies(full),
            *old_copy(told, copy, copy_seconds),
            *overspent(money),
            *lost_bytes(run, told),
        ],
    }


def _mfu(recipe: Recipe, told: History, seen: Reported) -> float | None:
    """MFU by 6N + attention of the segment of the newest line, without pauses, after warm-up where it got so far.

    None: not measured, no peak is known of that segment's GPUs, or above 1, which is no MFU.
    """
    segment = next((one for one in told.segments if one.number == seen.segment), None)
    known = (segment.body.get("numerics", {}).get("peak") or {}).get("flops_per_second") if segment else None
    facts = seen.newest.facts(recipe.positions_per_update)
    speed = facts["after_warm_up"]["without_pauses"] or facts["all"]["without_pauses"]
    if type(known) is not int or known <= 0 or speed is None:
        return None
    try:
        return mfu(speed, sum(flops_per_position(recipe).values()), known)
    except InputError:
        return None


def _orphan(receipt: Receipt) -> dict[str, Any]:
    """What a machine did that had lost the run: receipts and updates that are no part of this history."""
    body = receipt.body
    updates = sum(stop - start for start, stop in body["updates"])
    return {
        "lease": body["lease"],
        "receipts": body["receipts"],
        "updates": updates,
        "recorded": receipt.time,
        "folder": body.get("folder"),
    }


def late_copies(full: list[Saved]) -> list[str]:
    """A warning when full checkpoints wait for their copy longer than a copy takes; `full` stand in the line."""
    done = max((item.seq for item in full if item.copy == SAFE), default=-1)
    waiting = [item for item in full if item.copy == AWAITED and item.seq > done]
    if not waiting or _seconds_since(waiting[0].time) <= COPY_SECONDS:
        return []
    return [
        f"checkpoint.mirror is set, but the full checkpoint of step {waiting[0].step:,}, saved at {waiting[0].time}, "
        "has no verified copy, and no later one has: assay mirror must run beside training; look whether it does"
    ]


def old_copy(told: History, copy: Saved | None, limit: float | None) -> list[str]:
    """A warning when the newest verified full copy is older than `limit` seconds, and training is not over.

    The age is that of the state that was copied. Without any copy it counts from the run's first segment on.
    """
    over = told.ended or told.abandoned is not None
    since = copy.time if copy else told.segments[0].opened if told.segments else None
    if limit is None or since is None or over or _seconds_since(since) <= limit:
        return []
    words = f"no full checkpoint has a verified copy, and training began at {since}"
    if copy is not None:
        words = f"the newest verified copy is of step {copy.step:,}, saved at {copy.time}"
    return [f"{words}, more than {limit / 3600:g} h ago: whatever was trained since is on this machine alone"]


def warnings(recipe: Recipe, affordable: int | None) -> list[str]:
    """What will stop the run although nothing is wrong yet: a decay that is not meant to be reached, and is.

    `affordable` are the updates that the money pays for; None, not stated, does not keep a run from its decay.
    """
    start = decay_start(recipe.schedule)
    if recipe.schedule.intent != "no-decay" or start is None or (affordable is not None and affordable < start):
        return []
    unknown = "how many updates the money pays for is not known"
    reach = unknown if affordable is None else f"{affordable:,} updates are affordable"
    return [
        f"schedule.intent is no-decay, and the decay would begin at update {start:,} ({reach}): the run stops there, "
        "saved; extend it in time with assay amend --updates, or remove the decay with --decay none"
    ]


def overspent(money: Account) -> list[str]:
    """A warning when what was spent and the reserve together exceed the funds."""
    remaining = money.remaining
    if remaining is None or remaining >= 0:
        return []
    return [
        f"the budget is used up: what was spent and the reserve exceed the funds by {-remaining:,.2f} US dollars; see "
        "assay budget report"
    ]


def ending(run: RunFolder, told: History) -> dict[str, Any] | None:
    """How the newest process ended; None while one trains. `message` is what it said, where this machine has it."""
    receipt = told.ending
    if receipt is None:
        return None
    codes = {"end": 0, "interrupted": Interrupted.code}
    message = None
    if run.outcome.is_file():
        try:
            outcome = read_object(run.outcome, "the outcome of the training process")
        except InputError:
            outcome = {}
        head = outcome.get("ledger")
        if isinstance(head, dict) and head.get("seq") == receipt.seq and isinstance(outcome.get("message"), str):
            message = outcome["message"]
    return {
        "outcome": receipt.kind,
        "code": codes.get(receipt.kind, receipt.body.get("code")),
        "cause": receipt.body.get("cause"),
        "message": message,
    }


def lost_bytes(run: RunFolder, told: History) -> list[str]:
    """Warnings of files whose end is not what a writer of ours leaves; what was trained is for `verify` to judge."""
    found = []
    with run.ledger.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if size and file.read(1) != b"\n":
            found.append(f"{run.ledger} ends in the middle of a receipt, which counts as not written: see assay verify")
    sealed = max((int(receipt.body["stop"]) for receipt in told.sealed), default=0)
    size = run.metrics.stat().st_size if run.metrics.is_file() else 0
    if size < sealed:
        found.append(
            f"{run.metrics} has {size:,} bytes, but receipts seal {sealed:,}: its end was lost; see assay verify"
        )
    return found


def reported(path: Path) -> Reported:
    """The newest line of the metrics and the median seconds of the last hundred updates."""
    newest: dict[str, Any] | None = None
    seconds: list[float] = []
    lines, again = 0, Again()
    skipped: set[int] = set()
    speed, newest_speed = Speed(), Speed()
    noises: deque[dict[str, Any]] = deque(maxlen=NOISES)
    for line in metrics.updates(path):
        lines += 1
        again.take(line)
        if newest is not None and newest["segment"] != line["segment"]:
            newest_speed = Speed()
        newest = line
        (skipped.add if line.get("skipped") is True else skipped.discard)(line["update"])
        if isinstance(line.get("parts"), dict):
            parts = {name: value for name, value in line["parts"].items() if type(value) is float}
            speed.add(parts, line["segment"])
            newest_speed.add(parts)
        if isinstance(line.get("gradient_noise"), dict):
            noises.append(line["gradient_noise"])
        if isinstance(line.get("seconds"), float):
            seconds.append(line["seconds"])
    if newest is None:
        return Reported(None, None, None, None, None, 0, again)
    return Reported(
        newest["update"] + 1,
        newest["loss"],
        newest["order_digest"],
        newest["time"],
        median(seconds[-100:]) if seconds else None,
        lines,
        again,
        len(skipped),
        speed,
        newest_speed,
        newest["segment"],
        _noise_scale(noises),
    )


def _noise_scale(noises: Iterable[dict[str, Any]]) -> float | None:
    """The simple noise scale over several updates: mean noise ÷ mean signal; None where the signal is not positive."""
    known = [(one.get("noise"), one.get("signal")) for one in noises]
    pairs = [(trace, signal) for trace, signal in known if type(trace) is float and type(signal) is float]
    signal = sum(one for _, one in pairs)
    return sum(one for one, _ in pairs) / signal if signal > 0 else None


def state(told: History, seen: Reported, owned: bool) -> str:
    """One of created, running, stopping, interrupted, held, failed, ended, abandoned, unknown."""
    if told.abandoned is not None:
        return "abandoned"
    if not told.segments:
        failed = told.ending is not None and told.ending.kind == "failed"  # before training began, as by a control
        return "held" if told.hold else "failed" if failed else "created"
    segment = told.segments[-1]
    if segment.outcome is None:
        if told.hold is not None:
            return "stopping" if owned else "held"
        last = max(stamp for stamp in (seen.time, segment.opened, told.last.time if told.last else None) if stamp)
        quiet = _seconds_since(last)
        return "unknown" if quiet > max(QUIET_FLOOR_SECONDS, 10 * (seen.median_seconds or 0.0)) else "running"
    if told.hold is not None:
        return "held"
    if segment.outcome == "failed":
        return "failed"
    return "ended" if told.ended else "interrupted"


def _seconds_since(stamp: str) -> float:
    return (datetime.now(UTC) - _moment(stamp)).total_seconds()


def _moment(stamp: str) -> datetime:
    try:
        return datetime.fromisoformat(stamp).astimezone(UTC)
    except ValueError:
        raise VerificationError(f"the time {stamp!r} in the metrics is not RFC 3339; Assay did not write it") from None


def prepared(path: Path) -> int | None:
    """Updates that the queue holds, or null when it cannot be read here."""
    try:
        return queues.load(path).updates_total
    except AssayError:
        return None
