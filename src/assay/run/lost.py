"""Work that was lost: updates done again after recoveries, their seconds and what they cost.

Counted from the metrics, where an update that is done again stands again under its later segment. Updates that a kill
kept from being written are not known of. No price is guessed: where no receipt states one money is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

from assay.run.history import History

DIFFERS = "recomputed update differs"  # the alarm of one that is not what it replaces


@dataclass
class Again:
    """Takes lines of completed updates in file order; `updates` are those that were done before, with their seconds."""

    reach: int = 0
    updates: int = 0
    seconds: float = 0.0
    timed: int = 0

    def take(self, line: Mapping[str, Any]) -> None:
        """One line. A segment begins at or below the step that was reached, so that what lies below was done before."""
        if line["update"] >= self.reach:
            self.reach = line["update"] + 1
            return
        self.updates += 1
        if isinstance(line.get("seconds"), float):
            self.seconds += line["seconds"]
            self.timed += 1

    def facts(self, told: History, positions_per_update: int) -> dict[str, Any]:
        """As status and exposure show it; `seconds` is null when some update has none, `usd` without a price.

        `differing` counts those that were not what they replaced. Money is the newest price for the seconds.
        """
        updates, spent, timed = self.updates, self.seconds, self.timed
        for one in told.orphaned:  # what a machine did that had lost the run, as far as it was done here again
            here = sum(max(0, min(stop, self.reach) - start) for start, stop in one.body["updates"])
            updates += here
            if here == sum(stop - start for start, stop in one.body["updates"]) and one.body.get("seconds") is not None:
                spent, timed = spent + float(one.body["seconds"]), timed + here
        seconds = round(spent, 3) if timed == updates else None
        rate = price(told)
        return {
            "updates": updates,
            "positions": updates * positions_per_update,
            "seconds": seconds,
            "usd": None if seconds is None or rate is None else _usd(seconds, rate),
            "usd_per_hour": None if rate is None else str(rate),
            "differing": sum(one.body.get("alarm") == DIFFERS for one in told.alarms),
        }


def price(told: History) -> Decimal | None:
    """Dollars an hour of the machine, or None where nothing states any.

    By the newest receipt `price`, else what was metered with last, else what the allocation was said to cost.
    """
    bodies = {kind: [one.body for one in reversed(told.money) if one.kind == kind] for kind in ("spend", "allocation")}
    stated = [
        told.price.body.get("usd_per_hour") if told.price else None,
        *(body.get("usd_per_hour") for body in bodies["spend"]),
        *(body.get("usd_per_machine_hour") for body in bodies["allocation"]),
    ]
    return next((value for value in map(_rate, stated) if value is not None), None)


def _rate(stated: object) -> Decimal | None:
    try:
        value = Decimal(stated) if isinstance(stated, str) else None
    except InvalidOperation:
        return None
    return value if value is not None and value.is_finite() and value > 0 else None


def in_words(facts: Mapping[str, Any]) -> str:
    """One line for people."""
    if not facts["updates"]:
        return "none"
    seconds = "time not measured" if facts["seconds"] is None else f"{facts['seconds']:,.1f} s"
    money = (
        "cost not measured" if facts["usd"] is None else f"{facts['usd']} dollars at {facts['usd_per_hour']} an hour"
    )
    differ = "none differs from" if not facts["differing"] else f"{facts['differing']:,} DIFFER from"
    return f"{facts['updates']:,} ({seconds}, {money}; {differ} what it replaces)"


def _usd(seconds: float, rate: Decimal) -> str:
    return str((Decimal(repr(seconds)) * rate / 3600).quantize(Decimal("0.0001"), rounding=ROUND_HALF_UP))
