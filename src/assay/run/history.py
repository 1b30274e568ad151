"""What a run's ledger says happened, gathered in one verified pass.

`history` turns receipts into segments, checkpoints and holds. It reads; it never writes, and it
takes no other file's word for anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.errors import VerificationError
from assay.ledger.ledger import Receipt, read
from assay.run import accounts

OPENING = ("start", "recovery")
CLOSING = ("interrupted", "end", "failed")
ADOPTED = "amendment.adopted"
SAFE, AWAITED = "safe", "awaited"  # of a checkpoint's copy off the machine

# What the receipts must say for a history to be told from them.
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "run.created": {"run_id": str, "recipe": str},
    "start": {"segment": int, "mode": str, "step": int},
    "recovery": {"segment": int, "mode": str, "step": int, "evidence": dict},
    "checkpoint.saved": {
        "segment": int, "step": int, "checkpoint": str, "folder": str, "manifest_sha256": str,
        "state_sha256": (str, type(None)), "weights_sha256": str, "order_digest": str,
    },
    "checkpoint.removed": {"manifest_sha256": str},
    "checkpoint.fetched": {"manifest_sha256": str},
    "checkpoint.mirrored": {"manifest_sha256": str, "mirror": str, "verify": str},
    "checkpoint.unmirrored": {"manifest_sha256": str, "mirror": str},
    "lease": {"lease": int, "mirror": str, "holder": str, "record": str},
    "orphaned": {"lease": int, "record": str, "receipts": int, "updates": list},
    "metrics.sealed": {"start": int, "stop": int, "sha256": str},
    "hold": {"cause": str},
    "duty": {"act": str, "steps": list, "weights": bool},
    "cadence": {"segment": int, "step": int, "every": int},
    "update.skipped": {"update": int, "segment": int},
    "amendment.proposed": {"amendment": str, "sha256": str, "proposal": dict},
    "amendment.approved": {"amendment": str, "sha256": str, "envelope": dict},
    "amendment.installed": {"amendment": str, "sha256": str},
    "amendment.adopted": {
        "amendment": str, "sha256": str, "step": int, "segment": int, "checkpoint": str, "changes": dict,
    },
    "amendment.refused": {"amendment": (str, type(None)), "reason": str},
}  # fmt: skip


@dataclass
class Segment:
    """The stretch between a start or recovery and the next interruption; steps are [first, last).

    `adopted` are the adoptions in force in it, those of its own line of training before it and its own, in order.
    """

    seq: int
    number: int
    mode: str
    first: int
    opened: str
    body: dict[str, Any]
    closing: dict[str, Any] = field(default_factory=dict)
    last: int | None = None
    closed: str | None = None
    outcome: str | None = None
    cause: str | None = None
    adopted: list[Receipt] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """One checkpoint as its receipt `checkpoint.saved` states it.

    `copy`: safe where a receipt says that it was read back from a mirror (or stored, where the recipe asks for no
    more), awaited where the recipe has a mirror and no receipt says so, else None.
    """

    seq: int
    segment: int
    step: int
    kind: str
    folder: str
    manifest_sha256: str
    state_sha256: str | None
    weights_sha256: str
    order_digest: str
    time: str = ""
    copy: str | None = field(default=None, compare=False)


@dataclass
class History:
    """Everything that the ledger states, in order."""

    created: Receipt
    segments: list[Segment] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    saves: list[Receipt] = field(default_factory=list)  # the receipts of `saved`, for what else they state
    mirrored: list[Receipt] = field(default_factory=list)  # copies that stand: what was removed there is not in it
    unmirrored: list[Receipt] = field(default_factory=list)
    leases: list[Receipt] = field(default_factory=list)
    orphaned: list[Receipt] = field(default_factory=list)  # of what a lost machine wrote after its last copy
    removed: set[str] = field(default_factory=set)  # manifest digests: a folder's name may be used again
    sealed: list[Receipt] = field(default_factory=list)
    evaluations: list[Receipt] = field(default_factory=list)
    alarms: list[Receipt] = field(default_factory=list)
    amendments: list[Receipt] = field(default_factory=list)
    controls: list[Receipt] = field(default_factory=list)
    slots: list[Receipt] = field(default_factory=list)
    money: list[Receipt] = field(default_factory=list)  # what `accounts` counts: funds, bills, metered spend
    skipped: list[Receipt] = field(default_factory=list)
    stragglers: list[Receipt] = field(default_factory=list)
    tip: str | None = None  # manifest digest of the checkpoint that training last saved or came back from
    before: dict[str, str | None] = field(default_factory=dict)  # manifest digest → that of the one before it
    hold: Receipt | None = None
    abandoned: Receipt | None = None
    cadence: Receipt | None = None  # the newest, whose choice is in force for checkpoint.every: auto
    price: Receipt | None = None  # the newest
    ending: Receipt | None = None  # of the newest process, also where it ended before it began a segment
    last: Receipt | None = None
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.created.body["run_id"])

    @property
    def copies(self) -> list[Receipt]:
        """Copies that count: of the recipe's mirror as it is now, where receipts say which one that is, else all.

        A mirror at another address, given up or made by hand, keeps no checkpoint of this machine from being needed.
        """
        stated = (self.mirror or {}).get("url")
        here = [one.body["mirror"] for one in self.leases if stated and one.body.get("address") == stated]
        return [one for one in self.mirrored if not here or one.body["mirror"] == here[-1]]

    @property
    def standing(self) -> list[Saved]:
        """Checkpoints that were saved and not removed, each with what became of its copy."""
        mirror = self.mirror
        enough = ("readback", "stored") if mirror and mirror.get("verify") == "stored" else ("readback",)
        safe = {one.body["manifest_sha256"] for one in self.copies if one.body["verify"] in enough}
        passed_over = self.passed_over

        def copy(item: Saved) -> str | None:
            if item.manifest_sha256 in safe:
                return SAFE
            return AWAITED if mirror and item.manifest_sha256 not in passed_over else None

        return [replace(item, copy=copy(item)) for item in self.saved if item.manifest_sha256 not in self.removed]

    @property
    def passed_over(self) -> set[str]:
        """Manifest digests of full checkpoints that get no copy: all but each N-th of a line by `mirror.every`.

        The first of a line is copied, and so is the newest once training stands: nobody knows whether it goes on.
        """
        every = (self.mirror or {}).get("every", 1)
        if type(every) is not int or every <= 1:
            return set()
        count: dict[str | None, int] = {}
        passed, newest = set(), None
        line = self.up_to(self.tip)
        for item in self.saved:
            count[item.manifest_sha256] = count.get(self.before.get(item.manifest_sha256), 0) + (item.kind == "full")
            if item.kind == "full":
                newest = item.manifest_sha256 if item.manifest_sha256 in line else newest
                if (count[item.manifest_sha256] - 1) % every:
                    passed.add(item.manifest_sha256)
        if self.segments and self.segments[-1].outcome is not None and newest is not None:
            passed.discard(newest)
        return passed

    @property
    def mirror(self) -> dict[str, Any] | None:
        """`checkpoint.mirror` of the recipe that the newest segment was trained with."""
        resolved = self.segments[-1].body.get("resolved") if self.segments else None
        checkpoint = resolved.get("checkpoint") if isinstance(resolved, dict) else None
        mirror = checkpoint.get("mirror") if isinstance(checkpoint, dict) else None
        return mirror if isinstance(mirror, dict) else None

    @property
    def line(self) -> list[Saved]:
        """Standing checkpoints of the line of training that goes on, oldest first.

        A recovery leaves behind what was saved after the checkpoint that it took: damaged, or given up with
        `--from-step`. Those folders stay, but nothing resumes from them unasked and retention does not count them.
        """
        line = self.up_to(self.tip)
        return [item for item in self.standing if item.manifest_sha256 in line]

    def up_to(self, manifest_sha256: str | None) -> set[str]:
        """Manifest digests of that checkpoint and of all before it on its line of training, removed ones included."""
        line: set[str] = set()
        at = manifest_sha256
        while at is not None and at not in line:
            line.add(at)
            at = self.before.get(at)
        return line

    def adopted_by(self, manifest_sha256: str | None) -> list[Receipt]:
        """Adoptions that are in force where training goes on from that checkpoint, in order.

        An adoption belongs to the checkpoint at which it was made: what an abandoned branch adopted does not count.
        """
        line = self.up_to(manifest_sha256)
        return [one for one in self.amendments if one.kind == ADOPTED and one.body["checkpoint"] in line]

    def unchanged(self, step: int, other: int) -> bool:
        """Whether receipts say that every update between two steps was skipped, which leaves one state under both."""
        skipped = {receipt.body["update"] for receipt in self.skipped}
        return skipped.issuperset(range(min(step, other), max(step, other)))

    @property
    def ended(self) -> bool:
        """True when the newest segment ended with the schedule done."""
        return bool(self.segments) and self.segments[-1].outcome == "end" and self.segments[-1].cause == "done"


def history(ledger: Path) -> History:
    """One pass over the ledger; VerificationError where it does not hold."""
    return gather(read(ledger))


def gather(receipts: Iterable[Receipt]) -> History:
    """The same from receipts that were read already; VerificationError when one lacks what its kind must say."""
    result: History | None = None
    for receipt in receipts:
        for key, kinds in _NEEDED.get(receipt.kind, {}).items():
            if key not in receipt.body or not isinstance(receipt.body[key], kinds):
                raise VerificationError(
                    f"receipt {receipt.seq} ({receipt.kind}) says {receipt.body.get(key)!r} as its {key}; "
                    "it was not written by Assay"
                )
        if result is None:
            if receipt.kind != "run.created":
                raise VerificationError(f"the first receipt is {receipt.kind}; a run's ledger begins with run.created")
            result = History(receipt)
        _take(result, receipt)
    if result is None:
        raise VerificationError("there is no receipt; a run's ledger begins with run.created")
    return result


def _end_of_step(result: History, body: dict[str, Any]) -> str | None:
    """The checkpoint that training goes on from, or the weights that were saved of the very same step after it."""
    tip: str | None = body["evidence"].get("manifest_sha256")
    for item in result.saved:
        same = item.kind == "weights" and item.step == body["step"]
        if same and result.before.get(item.manifest_sha256) == tip is not None:
            tip = item.manifest_sha256
    return tip


def _take(result: History, receipt: Receipt) -> None:
    body = receipt.body
    result.last = receipt
    result.kinds[receipt.kind] = result.kinds.get(receipt.kind, 0) + 1
    current = result.segments[-1] if result.segments else None
    if receipt.kind in OPENING + CLOSING:
        result.ending = receipt if receipt.kind in CLOSING else None
    if receipt.kind in OPENING:
        result.tip = _end_of_step(result, body) if receipt.kind == "recovery" else None
        opened = Segment(receipt.seq, body["segment"], body["mode"], body["step"], receipt.time, body)
        opened.adopted = result.adopted_by(result.tip)
        result.segments.append(opened)
    elif receipt.kind in CLOSING and current is not None and not body.get("before_start"):
        current.last, current.closed, current.outcome = body.get("step"), receipt.time, receipt.kind
        current.cause, current.closing = body.get("cause"), body
    elif receipt.kind == "checkpoint.saved":
        result.saves.append(receipt)
        result.saved.append(
            Saved(
                receipt.seq,
                int(body["segment"]),
                int(body["step"]),
                str(body["checkpoint"]),
                str(body["folder"]),
                str(body["manifest_sha256"]),
                body.get("state_sha256"),
                str(body["weights_sha256"]),
                str(body["order_digest"]),
                receipt.time,
            )
        )
        result.before[body["manifest_sha256"]], result.tip = result.tip, body["manifest_sha256"]
    elif receipt.kind == "checkpoint.removed":
        result.removed.add(str(body["manifest_sha256"]))
    elif receipt.kind == "checkpoint.fetched":
        result.removed.discard(str(body["manifest_sha256"]))
    elif receipt.kind == "checkpoint.mirrored":
        result.mirrored.append(receipt)
    elif receipt.kind == "checkpoint.unmirrored":
        gone = (body["mirror"], body["manifest_sha256"])
        result.mirrored = [one for one in result.mirrored if _copy(one) != gone]
        result.unmirrored.append(receipt)
    elif receipt.kind == "lease":
        result.leases.append(receipt)
    elif receipt.kind == "orphaned":
        result.orphaned.append(receipt)
    elif receipt.kind == "metrics.sealed":
        result.sealed.append(receipt)
    elif receipt.kind == "evaluation":
        result.evaluations.append(receipt)
    elif receipt.kind == "alarm":
        result.alarms.append(receipt)
    elif receipt.kind == "control":
        result.controls.append(receipt)
    elif receipt.kind.startswith("amendment."):
        result.amendments.append(receipt)
        if receipt.kind == ADOPTED and current is not None:
            current.adopted.append(receipt)
    elif receipt.kind == "cadence":
        result.cadence = receipt
    elif receipt.kind == "price":
        result.price = receipt
    elif receipt.kind == "update.skipped":
        result.skipped.append(receipt)
    elif receipt.kind == "straggler":
        result.stragglers.append(receipt)
    elif receipt.kind == "slot.entered":
        result.slots.append(receipt)
    elif receipt.kind in accounts.KINDS:
        result.money.append(receipt)
    elif receipt.kind == "hold":
        result.hold = receipt
    elif receipt.kind == "released":
        result.hold = None
    elif receipt.kind == "abandoned":
        result.abandoned = receipt


def _copy(receipt: Receipt) -> tuple[str, str]:
    """Which copy a receipt is about: the mirror's digest and the manifest's."""
    return receipt.body["mirror"], receipt.body["manifest_sha256"]
