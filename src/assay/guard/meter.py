"""The meter: what a machine costs from one look to the next, as receipts `spend`.

GPU time in useful updates, in recomputed ones, around them, and while the machine is made ready; the disk of a running
and of a stopped machine; egress: told apart. It estimates from prices and never reads a bill; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from assay.files.reading import parse_json
from assay.guard import budget
from assay.guard.journal import Journal
from assay.guard.policy import Policy
from assay.guard.prices import SECONDS_PER_HOUR, NoReading, Reading, from_body, stamp, text
from assay.ledger.ledger import Ledger, Receipt, read
from assay.run import accounts, metrics
from assay.run.folder import RunFolder

State = Literal["provisioning", "running", "stopped"]


@dataclass(frozen=True)
class Use:
    """What a machine is doing since the last look, and the price that was read now.

    `provisioning`: GPUs are billed and no training process runs; `running`: one does; `stopped`: the disk alone is
    billed. `egress_bytes` None: as the receipts of the mirror say.
    """

    allocation: str | None
    state: State
    price: Reading | NoReading
    egress_bytes: int | None = None


@dataclass
class _Updates:
    """Metrics lines that are new to the meter: bytes, the first update that nobody metered, counts, microseconds."""

    start: int
    stop: int
    first: int
    reached: int
    useful: int = 0
    recomputed: int = 0
    useful_us: int = 0
    recomputed_us: int = 0


class Meter:
    """Charges intervals one after another. Built from the ledger, so that it goes on where another process ended."""

    def __init__(self, run: RunFolder, policy: Policy) -> None:
        """Take up what the ledger of `run` says was metered before."""
        self.run, self.policy = run, policy
        recipe = run.recipe()
        self._first, self._positions = recipe.start.first_update, recipe.positions_per_update
        self.account = accounts.Account()
        self._begun: dict[str | None, datetime] = {}
        self._read: tuple[int, Decimal] | None = None  # the newest price that was read, and when
        self._sent = 0  # bytes that the mirror sent since the last interval
        self.see(read(run.ledger))

    def see(self, receipts: Iterable[Receipt]) -> None:
        """Take up receipts that others wrote, in order."""
        for receipt in receipts:
            if receipt.kind in accounts.KINDS:
                accounts.take(self.account, receipt)
                self._sent = 0 if receipt.kind == "spend" else self._sent
            elif receipt.kind == "checkpoint.mirrored" and type(receipt.body.get("bytes")) is int:
                self._sent += receipt.body["bytes"]
            elif receipt.kind == "price":
                self._remember(from_body(receipt.body), receipt.body.get("at") or receipt.body["fetched"])

    def _remember(self, price: Reading | NoReading, at: str) -> None:
        """Keep a price for the interval that begins with it."""
        value = price.value if isinstance(price, Reading) else price.unconfirmed
        if value is not None:
            self._read = accounts.moment(at), value

    def charge(
        self,
        ledger: Ledger | Journal,
        use: Use,
        now: datetime,
        *,
        since: datetime | None = None,
        reserve: dict[str, Any] | None = None,
    ) -> Receipt | None:
        """Append `spend` for the time from the last look at this allocation until now; None when no time has passed.

        `since` is when the allocation began to be billed, for its first look; without it billing begins at the first
        look. An interval costs the higher of the readings at its ends, the last one known where there is none now, and
        GPU time is not measured where none ever was. A price that nobody confirmed counts where it is the higher one.
        A clock that was set back gives no interval. `reserve`: see `budget.reserve`.
        """
        metered = self.account.until.get(use.allocation)
        begin = metered or accounts.moment(stamp(self._begun.setdefault(use.allocation, since or now)))
        end = accounts.moment(stamp(now))
        if end <= begin:
            if metered is None:
                self._remember(use.price, stamp(now))
            return None
        body = self._interval(use, begin, end)
        changed = reserve is not None and reserve["usd"] is not None and reserve != self.account.reserve
        receipt = ledger.append("spend", {**body, "reserve": reserve if changed else None})
        self.see([receipt])
        return receipt

    def _interval(self, use: Use, begin: int, end: int) -> dict[str, Any]:
        length = end - begin
        seconds = Decimal(length) / accounts.MICROSECONDS
        seen = _updates(self.run.metrics, self.account, self._first, begin)
        late_useful, late_recomputed = self.account.late
        stopped = use.state == "stopped"
        recomputed = 0 if stopped else min(length, late_recomputed + seen.recomputed_us)
        useful = 0 if stopped else min(length - recomputed, late_useful + seen.useful_us)
        known = self.account.prices.get(use.allocation)
        fell_into = self._read[1] if self._read is not None and begin <= self._read[0] <= end else None
        latest = use.price.value if isinstance(use.price, Reading) else known or fell_into
        unconfirmed = use.price.unconfirmed if isinstance(use.price, NoReading) else None
        ends = (latest, known, self.account.unconfirmed.get(use.allocation), unconfirmed, fell_into)
        paid = max((one for one in ends if one is not None), default=None)
        sent = self._sent if use.egress_bytes is None else use.egress_bytes
        usd: dict[str, Decimal | None] = {
            **_gpu(use.state, Decimal(0) if stopped else paid, length, useful, recomputed),
            "disk_running": Decimal(0) if stopped else budget.disk_time(self.policy, stopped=False, seconds=seconds),
            "disk_stopped": budget.disk_time(self.policy, stopped=True, seconds=seconds) if stopped else Decimal(0),
            "egress": budget.egress(self.policy, sent),
        }
        price: dict[str, Any] | None = None
        if paid is not None and not stopped:
            fresh, value = isinstance(use.price, Reading), None if latest is None else text(latest)
            price = {"usd_per_hour": value, "source": use.price.source, "read": fresh}
            if isinstance(use.price, NoReading):
                price["reason"] = use.price.reason
                if unconfirmed is not None:
                    price["unconfirmed_usd_per_hour"] = text(unconfirmed)
            else:
                price["catalogue"] = use.price.catalogue
        return {
            "allocation": use.allocation, "state": use.state, "start": _stamp(begin), "stop": _stamp(end),
            "usd": {part: None if value is None else text(budget.nano(value)) for part, value in usd.items()},
            "usd_per_hour": None if paid is None or stopped else text(paid), "price": price, "egress_bytes": sent,
            "metrics": {
                "start": seen.start, "stop": seen.stop, "first": seen.first, "reached": seen.reached,
                "useful": seen.useful, "recomputed": seen.recomputed,
            },
            "positions": {"useful": seen.useful * self._positions, "recomputed": seen.recomputed * self._positions},
            "microseconds": {"useful": useful, "recomputed": recomputed, "rest": length - useful - recomputed},
            "late": {
                "useful": 0 if stopped else late_useful + seen.useful_us - useful,
                "recomputed": 0 if stopped else late_recomputed + seen.recomputed_us - recomputed,
            },
        }  # fmt: skip


def _gpu(state: State, paid: Decimal | None, length: int, useful: int, recomputed: int) -> dict[str, Decimal | None]:
    """The GPU parts, which add up to price × time; `paid` None: none of them is measured."""
    rest = "gpu_provisioning" if state == "provisioning" else "gpu_overhead"
    parts: dict[str, Decimal | None] = dict.fromkeys(accounts.GROUPS["gpu"], None if paid is None else Decimal(0))
    if paid is None:
        return parts

    def cost(microseconds: int) -> Decimal:
        assert paid is not None
        return budget.nano(paid * microseconds / (SECONDS_PER_HOUR * accounts.MICROSECONDS))

    parts["gpu_useful"], parts["gpu_recomputed"] = cost(useful), cost(recomputed)
    parts[rest] = cost(length) - cost(useful) - cost(recomputed)
    return parts


def _updates(path: Path, account: accounts.Account, first: int, begin: int) -> _Updates:
    """The lines of completed updates behind what was taken up; the very first look leaves out those before `begin`.

    An update is useful when it is the first of its number, recomputed when it was done before. Lines come some updates
    late (`log.every`): what does not fit into this interval is left to the next one.
    """
    begins_now = account.reached is None
    reached = first if account.reached is None else account.reached
    start = account.metrics_bytes
    seen = _Updates(start, start, reached, reached)
    if not path.is_file():
        return seen
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    for number, raw in enumerate(data[:whole].splitlines(), 1):
        line = parse_json(raw, f"{path}, line {number} behind byte {start}")
        if not isinstance(line, dict) or not metrics.completed(line):
            continue
        if begins_now and accounts.moment(line["time"]) <= begin:
            seen.reached = seen.first = max(seen.reached, line["update"] + 1)
            continue
        seconds = line.get("seconds")
        timed = isinstance(seconds, (int, float)) and seconds > 0
        took = round(line["seconds"] * accounts.MICROSECONDS) if timed else 0
        if line["update"] >= seen.reached:
            seen.reached = line["update"] + 1
            seen.useful, seen.useful_us = seen.useful + 1, seen.useful_us + took
        else:
            seen.recomputed, seen.recomputed_us = seen.recomputed + 1, seen.recomputed_us + took
    seen.stop = start + whole
    return seen


def _stamp(microseconds: int) -> str:
    return stamp(accounts.instant(microseconds))
