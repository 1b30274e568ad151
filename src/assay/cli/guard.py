"""`assay guard …`: watch a run under a policy about money and machines; what a policy would have done on a trace.

Parses, calls the guard's room and shows. Nothing is decided here. `assay guard RUN` is `assay guard watch RUN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.amend import ProposeByDefault
from assay.cli.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


class WatchByDefault(ProposeByDefault):
    """`assay guard RUN …` is `assay guard watch RUN …`."""

    default = "watch"


guard_app = typer.Typer(cls=WatchByDefault, no_args_is_help=True, rich_markup_mode=None)


@guard_app.callback()
def _guard() -> None:
    """Watch what a run costs, and stop it safely"""


@guard_app.command("watch")
def watch_command(
    run: RunArgument,
    policy: Annotated[Path, typer.Option(metavar="FILE", help="The policy, a YAML file")],
    chain: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Not on the node: keep a chain here, and tell the run by its inbox"),
    ] = None,
    dead_man: Annotated[
        bool, typer.Option("--dead-man", help="On the node: wait for the guard's silence instead of guarding")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, do what follows, and end")] = False,
    json: JsonOption = False,
) -> None:
    """Stop a run safely before money runs out

    Runs until it is told to end (SIGTERM, Ctrl-C) or the run's history is over; killed anywhere, it goes on there.
    """
    import signal
    import threading

    from assay.cli import show
    from assay.errors import InputError
    from assay.guard import dead_man as switch
    from assay.guard import journal, providers, watch
    from assay.guard.policy import load
    from assay.run.folder import RunFolder, require_run

    rules, folder = load(policy), RunFolder(run)
    require_run(folder)
    if dead_man and (chain is not None or once):
        raise InputError("--dead-man is on the node and waits; it goes with neither --chain nor --once")
    wake = threading.Event()
    before = {number: signal.signal(number, lambda *_: wake.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    where = policy.absolute().parent
    site = watch.Site(
        folder, rules, where, journal.OnNode(folder) if chain is None else journal.Elsewhere(folder, chain),
        providers.access(rules, folder, where), watch.Clock(sleep=wake.wait), told_to_stop=wake.is_set,
        heart=not dead_man, tell=lambda text: show.note(f"guard: {text}"),
    )  # fmt: skip
    try:
        if dead_man:
            released = switch.watch(site)
            show.as_json({"released": released}) if json else show.console().print(
                "the guard fell silent, and the run was held" if released else "the guard gave signs of life"
            )
            return
        with watch.alone(folder):
            site.tell(f"guarding {run} under {rules.name}, through {site.machine.name}")
            facts = watch.facts(*watch.Guard(site).watch(once=once))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if json:
        show.as_json(facts)
        return
    decision = facts.pop("decision")
    rows = [("decision", f"{decision['verb']}: {decision['reason']}"), *facts.items()]
    show.console().print(show.table("", ("what", "now"), rows))


@guard_app.command("simulate")
def simulate_command(
    policy: Annotated[list[Path], typer.Option(metavar="FILE", help="The policy, a YAML file; may be repeated")],
    prices: Annotated[
        Path, typer.Option(metavar="CSV", help="The trace: time, zone, available, usd_per_hour of the whole machine")
    ],
    begin: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Begin here; what came before is known as past")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="End here; default: the end")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the policies side by side, as SVG")] = None,
    json: JsonOption = False,
) -> None:
    """Replay a trace against policies

    The decisions are the guard's own. The optimum knows the future and trains at least as long as the policy it
    stands beside: what is left to gain.
    """
    from assay.cli import show
    from assay.guard import clairvoyant, drawing, simulator, traces
    from assay.guard.policy import load

    policies = [load(path) for path in policy]
    trace = traces.load(prices)
    first = trace.start if begin is None else traces.moment(begin, "--from")
    last = trace.end if until is None else traces.moment(until, "--until")
    outcomes = [simulator.simulate(trace, one, first, last) for one in policies]
    found: list[dict[str, Any]] = []
    for rules, outcome in zip(policies, outcomes, strict=True):
        show.note(f"looking for the optimum beside {rules.name}")
        plan = clairvoyant.optimum(trace, rules, first, last, outcome.useful)
        found.append({**simulator.facts(outcome), "optimum": clairvoyant.facts(plan, outcome.useful)})
    unequal = simulator.unequal(policies)
    if image is not None:
        from assay.files.publish import publish_file

        publish_file(image, drawing.svg(outcomes, f"{prices.name}, {first:%Y-%m-%d} to {last:%Y-%m-%d}"))
    if json:
        whole = {"from": first.isoformat(), "until": last.isoformat(), "image": None if image is None else str(image)}
        show.as_json({**found[0], **whole, "policies": found, "unequal": unequal})
        return
    _show(found, image)
    for key, values in unequal.items():
        console = show.console()
        console.print(f"not the same in all: {key} is {', '.join(map(str, values))}", markup=False)


def _show(found: Sequence[dict[str, Any]], image: Path | None) -> None:
    from assay.cli import show

    console = show.console()
    columns = {
        "policy": "policy", "spent": "dollars", "useful_hours": "useful hours",
        "usd_per_useful_hour": "dollars a useful hour", "positions": "positions", "interruptions": "interruptions",
        "starts": "starts", "moves": "moves", "stops": "stops", "waiting_hours": "waiting hours",
    }  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        (*(one[key] for key in columns), f"{one['decision']['verb']}: {one['decision']['reason']}") for one in found
    ]
    console.print(show.table("What each would have done", (*columns.values(), "at the end"), rows))
    causes = list(found[0]["waste_usd"])
    rows = [(one["policy"], *one["waste_usd"].values(), one["disk_usd"]) for one in found]
    console.print(show.table("Dollars without an update, by cause", ("policy", *causes, "disk"), rows))
    columns = {"spent": "dollars", "useful_hours": "useful hours", "usd_per_useful_hour": "dollars a useful hour",
               "starts": "starts",
               "least_usd_per_useful_hour": "for the same hours no less than"}  # fmt: skip
    rows = [(one["policy"], *(one["optimum"][key] for key in columns)) for one in found if one["optimum"] is not None]
    console.print(show.table("The optimum, which knows the future", ("beside", *columns.values()), rows))
    if image is not None:
        console.print(f"drawn: {image}", markup=False)
