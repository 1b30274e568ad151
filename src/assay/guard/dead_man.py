"""The dead-man switch: on the node, when the guard's sign of life stops, the run is saved, held, and stopped when told.

What counts is that the sign changes, by a clock of this machine that no one sets. It decides nothing else, and it
takes up what lies in the run's inbox while it waits.
"""

from __future__ import annotations

from assay.errors import InputError
from assay.guard.acting import act
from assay.guard.decision import Decision, Step
from assay.guard.watch import Guard, Site, ToldToStop
from assay.run import inbox
from assay.run.history import history

LONGEST_LOOK = 30.0  # seconds between two looks
WHY = "dead_man"  # of the hold: only a person lifts it


def watch(site: Site) -> bool:
    """Wait until told to stop or the run's history is over; whether the switch was ever released.

    InputError when the policy has no `dead_man`.
    """
    rule = site.policy.dead_man
    if rule is None:
        raise InputError(
            f"policy {site.policy.name} has no dead_man; give it after_seconds, and stop: true if it may stop"
        )
    clock = site.clock
    seen, since, tripped, ever = inbox.last_beat(site.run), clock.steady(), False, False
    guard: Guard | None = None
    while not site.told_to_stop():
        site.journal.receipts()  # takes up the inbox
        told = history(site.run.ledger)
        if told.ended or told.abandoned is not None:
            break
        newest = inbox.last_beat(site.run)
        if newest != seen:
            seen, since, tripped = newest, clock.steady(), False
        silent = clock.steady() - since
        if silent >= rule.after_seconds and not tripped:
            ever = True
            guard = guard or Guard(site)
            try:
                tripped = not act(guard, _release(silent, rule.stop), guard.observe())
            except ToldToStop:
                break
        left = 0.0 if tripped else max(0.0, rule.after_seconds - silent)
        clock.sleep(max(1.0, min(LONGEST_LOOK, left or rule.after_seconds / 10)))
    return ever


def _release(silent: float, stop: bool) -> Decision:
    steps = [Step("save"), Step("copy"), Step("hold", WHY)]
    steps += [Step("stop"), Step("prove")] if stop else []
    reason = f"the guard gave no sign of life for {silent:,.0f} s"
    return Decision("stop", "held", reason, (*steps, Step("alarm", "stop")))
