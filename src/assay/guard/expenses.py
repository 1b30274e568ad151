"""The expense report: allocation by allocation, estimated and billed, useful and wasted, per billion positions.

All of it comes from the run's receipts; what nobody measured is null, and "not measured" in Markdown and CSV. It
computes no price and asks nobody.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from assay.guard.budget import nano
from assay.guard.prices import stamp, text
from assay.run import accounts
from assay.run.folder import RunFolder, require_run
from assay.run.history import history
from assay.run.status import reported

NOT_MEASURED = "not measured"
# Paid for and no use: updates done again, and GPUs that waited while the machine was made ready.
WASTED = ("gpu_recomputed", "gpu_provisioning")
BILLION = 10**9
COLUMNS = (
    "allocation", "provider", "zone", "gpus", "start", "stop", "hours", *accounts.PARTS, "estimated_usd", "billed_usd",
    "difference_usd", "useful_usd", "wasted_usd", "useful_updates", "recomputed_updates", "useful_positions",
    "recomputed_positions", "usd_per_billion_positions",
)  # fmt: skip
METHOD = (
    "Estimates are metered from price readings; bills are what the provider charged. Spent counts a bill for the time "
    "and things that it covers and the estimate for the rest. Useful positions are those of updates that stand; wasted "
    "are updates done again after a recovery, and GPU time while a machine was made ready. gpu_overhead is GPU time of "
    "a training process around its updates: start, compilation, validation, saving."
)


def report(run: RunFolder, reserve: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contract's keys of `budget`, and every figure of the report, as plain JSON data.

    Amounts are decimal strings in US dollars. `reserve` (see `budget.reserve`) stands in for the one that the
    receipts state. Raises InputError when this is no run.
    """
    require_run(run)
    told = history(run.ledger)
    money = accounts.account(told.money)
    money.reserve = reserve or money.reserve
    recipe = run.recipe()
    each, step = recipe.positions_per_update, reported(run.metrics).step
    useful = sum(one.useful for one in money.spends)
    recomputed = sum(one.recomputed for one in money.spends)
    lost = max(0, (money.reached or 0) - (step or 0)) if money.spends else 0
    done_before = money.first_reached if money.spends else step
    before = max(0, (done_before or 0) - recipe.start.first_update)
    standing = useful - min(lost, useful)
    spent = money.spent if money.priced and money.nobody_meters is None else None
    return {
        "run_id": told.run_id,
        "name": recipe.name,
        "purpose": money.purpose,
        "funds": _text(money.received),
        "spent_estimated": _text(money.estimated),
        "spent_billed": _text(money.billed),
        "spent": _text(spent),
        "reserve": _text(money.reserve_usd),
        "reserve_how": money.reserve["how"] if money.reserve else None,
        "reserve_parts": (parts := money.reserve["parts"] if money.reserve else {}),
        "reserve_at_least": None in parts.values(),
        "reserve_from": money.reserve["from"] if money.reserve else {},
        "remaining": _text(money.remaining),
        "affordable": money.affordable(step),
        "affordable_unknown": money.unknown(step),
        "step": step,
        "metered_from": _stamp(min((one.start for one in money.spends), default=None)),
        "metered_until": _stamp(max((one.stop for one in money.spends), default=None)),
        "useful_updates": standing if money.spends else None,
        "recomputed_updates": recomputed if money.spends else None,
        "lost_updates": lost if money.spends else None,
        "updates_before_metering": before,
        "useful_positions": standing * each if money.spends else None,
        "recomputed_positions": recomputed * each if money.spends else None,
        "usd_per_billion_positions": _per_billion(spent, standing * each),
        "not_measured": money.not_measured(),
        "unpriced_seconds": money.unpriced // accounts.MICROSECONDS,
        "unmetered": [_unmetered(money, one) for one in money.unmetered],
        "nobody_meters": money.nobody_meters,
        "allocations": [
            _row(money, name, each)
            for name in dict.fromkeys([*money.allocations, *(one.allocation for one in money.spends)])
        ],
        "bills": [_bill(money, one) for one in money.bills],
        "received": [
            {"receipt": one.seq, "date": one.date, "usd": text(one.usd), "purpose": one.purpose} for one in money.funds
        ],
    }


def _row(money: accounts.Account, name: str | None, each: int) -> dict[str, Any]:
    """One allocation; one that nobody metered has its times alone, where a launcher stated them."""
    spends = [one for one in money.spends if one.allocation == name]
    said = money.allocations.get(name or "", {})
    start = min((one.start for one in spends), default=said.get("began"))
    stop = max((one.stop for one in spends), default=said.get("ended"))
    busy = sum(one.stop - one.start for one in spends if one.state != "stopped")
    if not spends and start is not None and stop is not None:
        busy = max(0, stop - start)
    parts = {part: accounts.total([one.usd[part] for one in spends] or [None]) for part in accounts.PARTS}
    estimated = accounts.total([money.cost(one) for one in spends]) if spends else None
    bills = [one for one in money.bills if name is not None and one.allocation == name]
    useful, recomputed = sum(one.useful for one in spends), sum(one.recomputed for one in spends)
    counts = {
        "useful_updates": useful,
        "recomputed_updates": recomputed,
        "useful_positions": useful * each,
        "recomputed_positions": recomputed * each,
    }
    return {
        "allocation": name,
        "provider": said.get("provider"),
        "zone": said.get("zone"),
        "gpus": said.get("gpus"),
        "start": _stamp(start),
        "stop": _stamp(stop),
        "hours": text((Decimal(busy) / accounts.HOUR).quantize(Decimal("0.0001"))) if busy or spends else None,
        **{part: _text(value) for part, value in parts.items()},
        "estimated_usd": _text(estimated),
        "billed_usd": _text(sum((one.usd for one in bills), Decimal(0))) if bills else None,
        "difference_usd": _text(_difference(money, bills)),
        "useful_usd": _text(parts["gpu_useful"]),
        "wasted_usd": _text(accounts.total([parts[part] for part in WASTED])),
        **(counts if spends else dict.fromkeys(counts)),
        "usd_per_billion_positions": _per_billion(estimated, useful * each),
    }


def _unmetered(money: accounts.Account, gap: accounts.Spend) -> dict[str, Any]:
    """GPU time of an allocation that nobody metered, and what it is counted at."""
    return {
        "allocation": gap.allocation,
        "start": _stamp(gap.start),
        "stop": _stamp(gap.stop),
        "hours": text((Decimal(gap.stop - gap.start) / accounts.HOUR).quantize(Decimal("0.0001"))),
        "usd": _text(money.cost(gap, "gpu")),
    }


def _bill(money: accounts.Account, bill: accounts.Bill) -> dict[str, Any]:
    return {
        "receipt": bill.seq,
        "start": _stamp(bill.start),
        "stop": _stamp(bill.stop),
        "covers": list(bill.covers),
        "allocation": bill.allocation,
        "provider": bill.provider,
        "billed_usd": _text(bill.usd),
        "estimated_usd": _text(money.estimate_of(bill)),
        "difference_usd": _text(_difference(money, [bill])),
    }


def _difference(money: accounts.Account, bills: Sequence[accounts.Bill]) -> Decimal | None:
    """Bills less the estimates of the same; None without a bill, or where one has no estimate."""
    differences = [None if (estimate := money.estimate_of(bill)) is None else bill.usd - estimate for bill in bills]
    return accounts.total(differences) if bills else None


def _per_billion(usd: Decimal | None, positions: int) -> str | None:
    return None if usd is None or positions <= 0 else _text(usd * BILLION / positions)


def _text(value: Decimal | None) -> str | None:
    return None if value is None else text(nano(value))


def _stamp(microseconds: int | None) -> str | None:
    return None if microseconds is None else stamp(accounts.instant(microseconds))


def dollars(value: str | None) -> str:
    """An amount for people: cents, or four digits where it is below a dollar; None is "not measured"."""
    if value is None:
        return NOT_MEASURED
    number = Decimal(value)
    return f"{number:,.2f}" if abs(number) >= 1 or number == 0 else f"{number:.4f}"


def as_csv(facts: Mapping[str, Any]) -> str:
    """One line an allocation, and a last one for the whole run; the columns are `COLUMNS`, amounts US dollars."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in facts["allocations"]:
        writer.writerow(["not stated" if row["allocation"] is None else row["allocation"],
                         *(_cell(row[column]) for column in COLUMNS[1:])])  # fmt: skip
    writer.writerow(["whole run", *(_cell(value) for value in _whole(facts))])
    return out.getvalue()


def _whole(facts: Mapping[str, Any]) -> list[Any]:
    """The columns behind the first of the line for the whole run."""
    rows = facts["allocations"]

    def total(column: str) -> str | None:
        values = [None if row[column] is None else Decimal(row[column]) for row in rows]
        return _text(accounts.total(values)) if rows else None

    differences = [one["difference_usd"] for one in facts["bills"]]
    own = {
        "start": facts["metered_from"],
        "stop": facts["metered_until"],
        "estimated_usd": facts["spent_estimated"],
        "billed_usd": facts["spent_billed"],
        "difference_usd": _text(accounts.total([None if one is None else Decimal(one) for one in differences]))
        if differences
        else None,
    }
    shared = ("useful_updates", "recomputed_updates", "useful_positions", "recomputed_positions",
              "usd_per_billion_positions")  # fmt: skip
    own |= {column: facts[column] for column in shared}
    summed = (*accounts.PARTS, "hours", "useful_usd", "wasted_usd")
    return [own[column] if column in own else total(column) if column in summed else "" for column in COLUMNS[1:]]


def as_markdown(facts: Mapping[str, Any]) -> str:
    """The report as a page of Markdown."""
    lines = [f"# Expenses of {_word(facts['name'])}", "", f"Run `{facts['run_id']}`. Amounts are US dollars."]
    until, how = facts["metered_until"], facts["reserve_how"]
    how = f"{how}, at least" if facts["reserve_at_least"] else how
    lines += ["", "## Budget", "", *_table(("", "US dollars"), [
        ("funds" + (f" ({facts['purpose']})" if facts["purpose"] else ""), dollars(facts["funds"])),
        ("spent, estimated" + (f" (metered until {until})" if until else ""), dollars(facts["spent_estimated"])),
        ("spent, billed", dollars(facts["spent_billed"])),
        ("spent: bills, and estimates of what no bill covers", dollars(facts["spent"])),
        ("reserve" + (f" ({how})" if how else ""), dollars(facts["reserve"])),
        ("remaining: funds less spent less reserve", dollars(facts["remaining"])),
        ("per billion useful positions", dollars(facts["usd_per_billion_positions"])),
    ])]  # fmt: skip
    counts = ("affordable", "step", "useful_updates", "recomputed_updates", "lost_updates", "updates_before_metering",
              "useful_positions", "recomputed_positions")  # fmt: skip
    lines += ["", "## Updates", "", *_table(("", "count"), [(LABELS[key], facts[key]) for key in counts])]
    if facts["reserve_parts"]:
        parts = [(name.replace("_", " "), dollars(value)) for name, value in facts["reserve_parts"].items()]
        used = ", ".join(f"{_word(key)} {_cell(value)}" for key, value in facts["reserve_from"].items())
        lines += ["", "## Reserve", "", *_table(("part", "US dollars"), parts), "", f"From: {used}."]
    lines += ["", "## Allocations", ""]
    for row in facts["allocations"]:
        name = "not stated" if row["allocation"] is None else row["allocation"]
        values = [
            (column.replace("_", " "), dollars(row[column]) if column in _AMOUNTS else row[column])
            for column in COLUMNS[1:]
        ]
        lines += [f"### {_word(name)}", "", *_table(("", "value"), values), ""]
    if not facts["allocations"]:
        lines += ["No allocation is known.", ""]
    columns = ("receipt", "start", "stop", "covers", "allocation", "provider", "billed_usd", "estimated_usd",
               "difference_usd")  # fmt: skip
    bills = [[_covers(one, column) for column in columns] for one in facts["bills"]]
    lines += ["## Bills", "", *(_table([one.replace("_", " ") for one in columns], bills) if bills else ["None."])]
    funds = [(one["receipt"], one["date"], one["purpose"], dollars(one["usd"])) for one in facts["received"]]
    lines += [
        "",
        "## Funds",
        "",
        *(_table(("receipt", "date", "purpose", "US dollars"), funds) if funds else ["None."]),
    ]
    missing = facts["not_measured"]
    lines += ["", "## Method", "", METHOD, ""]
    if missing:
        lines += [f"Not measured in some interval, and not in the sums: {', '.join(missing)}.", ""]
    lines += [line for sentence in gaps(facts) for line in (_word(sentence), "")]
    return "\n".join(lines)


def gaps(facts: Mapping[str, Any]) -> list[str]:
    """What was not metered, or not priced, and how the sums take it, in sentences."""
    found = []
    if facts["unpriced_seconds"]:
        counted = "nobody knows what was spent" if facts["spent"] is None else "counted at the highest price known"
        found.append(f"For {facts['unpriced_seconds']:,} s of GPU time no price was known: {counted}.")
    for one in facts["unmetered"]:
        counted = (
            "its price is not known" if one["usd"] is None else f"counted as {dollars(one['usd'])} in what is spent"
        )
        found.append(f"Nobody metered {one['hours']} GPU machine-hours of allocation {one['allocation']}: {counted}.")
    if facts["nobody_meters"] is not None:
        found.append(f"Nobody has metered allocation {facts['nobody_meters']} yet, which has not ended.")
    return found


LABELS = {
    "affordable": "affordable updates",
    "step": "reported updates",
    "useful_updates": "metered updates that stand",
    "recomputed_updates": "updates done again",
    "lost_updates": "metered updates that do not stand now",
    "updates_before_metering": "updates that nobody metered",
    "useful_positions": "useful positions",
    "recomputed_positions": "recomputed positions",
}
_AMOUNTS = {*accounts.PARTS, *(column for column in COLUMNS if column.endswith("_usd")), "usd_per_billion_positions"}


def _covers(bill: Mapping[str, Any], column: str) -> object:
    value = bill[column]
    if column.endswith("_usd"):
        return dollars(value)
    return (value or "all") if column == "allocation" else value


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    head = f"| {' | '.join(columns)} |"
    body = [f"| {' | '.join(_word(_cell(value)) for value in row)} |" for row in rows]
    return [head, f"|{'---|' * len(columns)}", *body]


def _cell(value: object) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _word(value: str) -> str:
    """Text that neither ends a cell of a table nor a line, and is no markup."""
    plain = " ".join(value.split())
    for sign in "\\|<>`*[]":
        plain = plain.replace(sign, f"\\{sign}")
    return plain
