"""Claims about updates that the policy for spikes left out: none silently, and none but by the policy.

Rests on metrics and receipts alone; the window of norms is followed from the run's beginning through its recoveries.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from assay.recipe.operational import Spikes
from assay.release.claims import Case, Claim, Line, counted, judge
from assay.run.bits import taken_from
from assay.run.history import Segment
from assay.run.spikes import judge as spike_of
from assay.run.spikes import taken_up

METRICS = "metrics"


def skipped_claim(case: Case) -> Claim | None:
    """Lines and receipts name the same skipped updates, and the policy says so of the recorded norms; None: no policy.

    Where training goes on from another run, whose norms are not here, its own window is filled first.
    """
    told = case.history
    policies = {segment.number: _policy(segment) for segment in told.segments}
    if not told.skipped and all(policy.policy == "none" for policy in policies.values()):
        return None
    faults = []
    by_segment: dict[int, list[Line]] = {}
    for line in case.lines:
        by_segment.setdefault(line.segment, []).append(line)
    said = {(receipt.body["segment"], receipt.body["update"]): receipt.seq for receipt in told.skipped}
    for line in case.lines:
        if line.skipped != ((line.segment, line.update) in said):
            word = "no receipt says so" if line.skipped else f"receipt {said[line.segment, line.update]} says so"
            faults.append(f"{line.where} was {'' if line.skipped else 'not '}skipped, but {word}")
    judged = 0
    # Manifest digest → the window that the checkpoint holds, and whether it lacks none of what training had.
    windows: dict[str, tuple[list[float], bool]] = {}
    for segment in told.segments:
        policy = policies[segment.number]
        began: tuple[list[float], bool] = ([], segment.mode != "continue-from")
        norms, full = windows.get(taken_from(segment.mode, segment.body["evidence"]) or "", began)
        saved: dict[int, list[str]] = {}  # one step may have a full checkpoint and its weights
        for item in told.saved:
            if item.segment == segment.number:
                saved.setdefault(item.step, []).append(item.manifest_sha256)
        windows |= dict.fromkeys(saved.get(segment.first, []), (norms, full))
        for line in by_segment.get(segment.number, []):
            full = full or policy.rule is None or len(norms) >= policy.rule[1]
            if full:
                judged += policy.policy != "none"
                wanted = spike_of(policy, norms, line.grad_norm) is not None
                if wanted != line.skipped:
                    faults.append(f"{line.where}: by the policy it was {'' if wanted else 'not '}to be skipped")
            if not line.skipped:
                norms = taken_up(policy, norms, line.grad_norm)
            windows |= dict.fromkeys(saved.get(line.update + 1, []), (norms, full))
    evidence = (
        f"{counted(sum(line.skipped for line in case.lines), 'update')} skipped, each with its receipt; the policy was "
        f"applied again to {counted(judged, 'recorded update')}"
    )
    return judge(METRICS, "skipped updates", faults, evidence)


def _policy(segment: Segment) -> Spikes:
    """The policy that the segment was begun with; a recipe from before there was one has none."""
    stated: Any = segment.body["resolved"].get("spikes")
    if not isinstance(stated, dict):
        return Spikes()
    try:
        deviations = stated.get("deviations")
        return Spikes(**{**stated, "deviations": None if deviations is None else float(deviations)})
    except (ValidationError, ValueError, TypeError):  # `segments_recipe_claim` says what is wrong with it
        return Spikes()
