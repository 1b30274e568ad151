"""`assay budget …`: funds in, a provider's bill, the expense report.

Parses, calls the room `guard` and shows. Runs without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from datetime import datetime
    from decimal import Decimal

    from assay.guard.budget import Money

budget_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

AmountOption = Annotated[str, typer.Option(metavar="X", help="The amount, such as 425 or 16.50")]
CurrencyOption = Annotated[str, typer.Option(metavar="CODE", help="Its currency; others than USD need a rate")]
PerUnitOption = Annotated[
    str | None, typer.Option("--usd-per-unit", metavar="X", help="US dollars for one unit of that currency")
]
RateSourceOption = Annotated[str | None, typer.Option(metavar="TEXT", help="By whose word that is the rate")]
RateDateOption = Annotated[str | None, typer.Option(metavar="DAY", help="Of which day the rate is")]
PolicyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The policy that the reserve is computed or set by")
]
ReplacesOption = Annotated[
    int | None, typer.Option(metavar="SEQ", min=0, help="The receipt that this one stands in for, to mend a mistake")
]


@budget_app.callback()
def _budget() -> None:
    """Keep a run's funds, bills and expenses"""


@budget_app.command("fund")
def fund_command(
    run: RunArgument,
    amount: AmountOption,
    purpose: Annotated[str, typer.Option(metavar="TEXT", help="What it is for; all funds of a run have one purpose")],
    currency: CurrencyOption = "USD",
    usd_per_unit: PerUnitOption = None,
    rate_source: RateSourceOption = None,
    rate_date: RateDateOption = None,
    date: Annotated[str | None, typer.Option(metavar="DAY", help="When it was received; default: today")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The transfer's name; refused twice, and kept as a digest alone")
    ] = None,
    reserve_usd: Annotated[
        str | None, typer.Option("--reserve-usd", metavar="X", help="Set the reserve for a safe end")
    ] = None,
    policy: PolicyOption = None,
    replaces: ReplacesOption = None,
    json: JsonOption = False,
) -> None:
    """Enter money received for a run

    It is bound to this run and its purpose, and spent nowhere else.
    """
    from assay.errors import InputError
    from assay.guard import budget
    from assay.guard.expenses import dollars
    from assay.run.folder import RunFolder

    if policy is not None and reserve_usd is not None:
        raise InputError("--policy and --reserve-usd both say what the reserve is; give one of them")
    folder = RunFolder(run)
    reserve = _reserve(folder, policy)
    if reserve_usd is not None:
        reserve = budget.stated_reserve(_decimal("--reserve-usd", reserve_usd))
    money = _money(amount, currency, usd_per_unit, rate_source, rate_date)
    done = budget.fund(
        folder, money, purpose=purpose, received=date, reference=reference, reserve=reserve, replaces=replaces
    )
    title = f"{run} has {dollars(done.body['usd'])} US dollars more, for {purpose} (receipt {done.seq})"
    _answer(folder, done.seq, title, json)


@budget_app.command("bill")
def bill_command(
    run: RunArgument,
    amount: AmountOption,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="Its period's begin, such as 2026-11-10 (UTC)")],
    stop: Annotated[str, typer.Option("--to", metavar="TIME", help="Its period's end, not included")],
    covers: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="One of gpu, disk and egress; may be repeated; default: all"),
    ] = None,
    allocation: Annotated[
        str | None, typer.Option(metavar="NAME", help="The allocation that it is for; default: all")
    ] = None,
    provider: Annotated[str | None, typer.Option(metavar="NAME", help="Whose bill it is")] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="The bill itself; its digest is kept")] = None,
    currency: CurrencyOption = "USD",
    usd_per_unit: PerUnitOption = None,
    rate_source: RateSourceOption = None,
    rate_date: RateDateOption = None,
    replaces: ReplacesOption = None,
    json: JsonOption = False,
) -> None:
    """Enter a provider's bill

    How far the estimate was off is shown. From then on the bill counts as what was spent on what it covers.
    """
    from assay.guard import budget
    from assay.guard.expenses import dollars
    from assay.run.accounts import GROUPS
    from assay.run.folder import RunFolder

    folder = RunFolder(run)
    money = _money(amount, currency, usd_per_unit, rate_source, rate_date)
    done = budget.bill(
        folder, money, start=_moment("--from", start), stop=_moment("--to", stop), covers=covers or GROUPS,
        allocation=allocation, provider=provider, file=file, replaces=replaces,
    )  # fmt: skip
    estimate, difference = done.body["estimated_usd"], done.body["difference_usd"]
    said = "nothing was metered there"
    if estimate is not None:
        said = f"{dollars(estimate)} were estimated, a difference of {dollars(difference)}"
    title = f"{run} was billed {dollars(done.body['usd'])} US dollars; {said} (receipt {done.seq})"
    _answer(folder, done.seq, title, json, estimated_usd=estimate, difference_usd=difference)


@budget_app.command("report")
def report_command(
    run: RunArgument,
    policy: PolicyOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write expenses.md and expenses.csv into this folder")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a run cost and can still pay

    Allocation by allocation: estimated and billed, useful and wasted, per billion positions.
    """
    from assay.cli import show
    from assay.files.publish import publish_file
    from assay.guard import expenses
    from assay.run.folder import RunFolder

    folder = RunFolder(run)
    facts = expenses.report(folder, _reserve(folder, policy))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in (("expenses.md", expenses.as_markdown(facts)), ("expenses.csv", expenses.as_csv(facts))):
            publish_file(out / name, content.encode())
    if json:
        show.as_json(facts)
        return
    _show("", facts)
    if facts["allocations"]:
        columns = ("allocation", "hours", "estimated_usd", "billed_usd", "useful_usd", "wasted_usd", "useful_updates",
                   "recomputed_updates", "usd_per_billion_positions")  # fmt: skip
        rows = ([_cell(row, column) for column in columns] for row in facts["allocations"])
        show.console().print(show.table("", columns, rows))
    if out is not None:
        show.note(f"written: {out / 'expenses.md'}, {out / 'expenses.csv'}")


def _cell(row: dict[str, Any], column: str) -> object:
    from assay.guard.expenses import dollars

    if column == "allocation":
        return row[column] or "not stated"
    return dollars(row[column]) if "usd" in column else row[column]


def _answer(run: Any, receipt: int, title: str, json: bool, **more: Any) -> None:
    from assay.cli import show
    from assay.guard import expenses

    facts = expenses.report(run)
    if json:
        keys = ("funds", "spent_estimated", "spent_billed", "spent", "reserve", "remaining", "affordable")
        show.as_json({"receipt": receipt, **{key: facts[key] for key in keys}, **more})
        return
    show.console().print(title, markup=False)
    _show("", facts)


def _show(title: str, facts: dict[str, Any]) -> None:
    from assay.cli import show
    from assay.guard.expenses import dollars, gaps

    at_least = "at least " if facts["reserve_at_least"] else ""
    shown = {
        "funds": dollars(facts["funds"]) if facts["funds"] else "none entered",
        "spent, estimated": dollars(facts["spent_estimated"]),
        "spent, billed": dollars(facts["spent_billed"]) if facts["spent_billed"] else "no bill entered",
        "reserve": at_least + dollars(facts["reserve"])
        if facts["reserve"]
        else "not stated; --policy or --reserve-usd state it",
        **{f"reserve for {name.replace('_', ' ')}": dollars(value) for name, value in facts["reserve_parts"].items()},
        "remaining": dollars(facts["remaining"]),
        "affordable updates": facts["affordable"] if facts["affordable"] is not None else facts["affordable_unknown"],
        "reported updates": facts["step"] if facts["step"] is not None else "none yet",
        "usd per billion positions": dollars(facts["usd_per_billion_positions"]),
        "metered until": facts["metered_until"] or "nothing was metered",
    }
    if facts["not_measured"]:
        shown["not in these sums"] = f"{', '.join(facts['not_measured'])}: not measured"
    show.console().print(show.pairs(title, shown))
    for sentence in gaps(facts):
        show.console().print(sentence, markup=False)


def _reserve(run: Any, path: Path | None) -> dict[str, Any] | None:
    """The reserve by a policy, at the price that was metered last, else at the one that its source says now.

    None without a policy, and, said on standard error, without a price that it needs.
    """
    if path is None:
        return None
    from datetime import UTC, datetime

    from assay.cli.show import note
    from assay.guard import adapters, budget, policy
    from assay.guard.prices import Reading
    from assay.run.folder import require_run
    from assay.run.history import history

    require_run(run)
    rules, told = policy.load(path), history(run.ledger)
    price = budget.last_price(told)
    if price is None:
        found = adapters.current(rules, path.parent, [], datetime.now(UTC))
        price = found.value if isinstance(found, Reading) else None
        if not isinstance(found, Reading) and rules.reserve == "computed":
            note(f"no reserve can be computed, for want of a price: {found.source}: {found.reason}")
    reserve = budget.reserve(run, told, rules, price)
    return reserve if reserve["usd"] is not None else None


def _money(amount: str, currency: str, per_unit: str | None, rate_source: str | None, rate_date: str | None) -> Money:
    from assay.errors import InputError
    from assay.guard import policy
    from assay.guard.budget import Money

    given = [one for one in (per_unit, rate_source, rate_date) if one is not None]
    if len(given) not in (0, 3):
        raise InputError("a rate is --usd-per-unit, --rate-source and --rate-date; give all three of them")
    rate = None
    if per_unit is not None and rate_source is not None and rate_date is not None:
        rate = policy.rate(_decimal("--usd-per-unit", per_unit), rate_source, rate_date)
    return Money(_decimal("--amount", amount), currency, rate)


def _decimal(option: str, text: str) -> Decimal:
    from decimal import Decimal, InvalidOperation

    from assay.errors import InputError

    try:
        return Decimal(text)
    except InvalidOperation:
        raise InputError(f"{option} is {text!r}; a decimal number such as 16.50 is expected") from None


def _moment(option: str, text: str) -> datetime:
    from datetime import UTC, datetime

    from assay.errors import InputError

    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: in UTC it lies outside the years 1 to 9999
        raise InputError(
            f"{option} is {text!r}; a time such as 2026-11-10 or 2026-11-10T04:50:00Z is expected"
        ) from None
