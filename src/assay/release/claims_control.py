"""Claims about controls: each did what its receipt says, and no segment began on a machine that had not passed.

Judged by the ledger alone: losses and norms found against those recorded. The control's own bytes are not in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from assay.ledger.ledger import Receipt
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.run.history import Segment

CONTROL = "control"


def control_claim(case: Case) -> Claim | None:
    """Controls passed where they say so, before every segment that demanded one; None when there is neither."""
    told = case.history
    demanding = [segment for segment in told.segments if _demands(segment)]
    if not told.controls and not demanding:
        return None
    faults = [fault for receipt in told.controls for fault in _receipt_faults(receipt)]
    for segment in demanding:
        before = [one for one in told.controls if one.seq < segment.seq]
        faults += _segment_faults(segment, before[-1] if before else None)
    good = sum(receipt.body.get("passed") is True for receipt in told.controls)
    bits = sum(receipt.body.get("identical") is True for receipt in told.controls)
    evidence = (
        f"{good:,} of {counted(len(told.controls), 'control')} passed, {bits:,} bit for bit; "
        f"{counted(len(demanding), 'segment')} demanded one"
    )
    return judge(CONTROL, "controls", faults, evidence)


def _demands(segment: Segment) -> bool:
    stated = segment.body.get("resolved", {}).get("control")
    return isinstance(stated, dict) and stated.get("required") is True


def _receipt_faults(receipt: Receipt) -> Iterator[str]:
    body, where = receipt.body, f"receipt {receipt.seq} (control)"
    found, expected = body.get("found"), body.get("expected")
    if not isinstance(found, list) or not isinstance(expected, list) or len(found) != len(expected) or not found:
        yield f"{where} does not hold what was found beside what was expected"
        return
    try:
        worst = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
        within = Decimal(repr(worst)) <= Decimal(str(body.get("tolerance")))
    except (KeyError, TypeError, ValueError, InvalidOperation, ZeroDivisionError):
        yield f"{where} holds a value that is no number"
        return
    if body.get("max_difference") != repr(worst):
        yield differ(where, "max_difference", repr(worst), body.get("max_difference"))
    equal = found == expected
    if body.get("identical") is True and not equal:
        yield f"{where} says identical, but found and expected differ by {worst:.6g}"
    may = body.get("identical") is True if body.get("bits_expected") is True else within
    if body.get("passed") is not may:
        yield differ(where, "passed", may, body.get("passed"))


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """As the trainer takes it: nats of the loss, or the gradient norm's relative difference, whichever is larger."""
    loss, norm = float(found["loss"]), float(found["grad_norm"])
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return math.inf
    wanted = float(expected["grad_norm"])
    return max(abs(loss - float(expected["loss"])), abs(norm - wanted) / max(wanted, 1e-12))


def _segment_faults(segment: Segment, control: Receipt | None) -> Iterator[str]:
    where = f"segment {segment.number} demanded a control"
    if control is None:
        yield f"{where}, but none ran before it"
        return
    if control.body.get("passed") is not True:
        yield f"{where}, but that of receipt {control.seq} did not pass"
    allocation = control.body.get("allocation")
    allocation = allocation if isinstance(allocation, dict) else {}
    if segment.body.get("host") not in (allocation.get("hosts") or []):
        yield f"{where}, but that of receipt {control.seq} ran on another host"
    numerics = segment.body["numerics"]
    for key in ("promise", "engine"):
        if numerics.get(key) != allocation.get(key):
            yield f"{where}, but that of receipt {control.seq} ran with another {key}"
    devices = numerics.get("devices")
    if isinstance(devices, list) and sorted(devices) != allocation.get("devices"):
        yield f"{where}, but that of receipt {control.seq} ran on other devices"
