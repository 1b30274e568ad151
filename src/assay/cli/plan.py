"""`assay plan RECIPE`: every derived figure before anything is spent.

Parses, calls `plan.figures.plan` and shows the result: tables for people, one JSON object with `--json`.
Needs no torch and no data. It computes nothing but units for people.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, RecipeArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from decimal import Decimal

    from assay.cli.show import Trimmed
    from assay.recipe.schema import Recipe


def plan_command(
    recipe: RecipeArgument,
    tokens_per_second: Annotated[
        str | None, typer.Option(metavar="X", help="Speed of the whole machine, for the hours")
    ] = None,
    usd_per_hour: Annotated[
        str | None, typer.Option(metavar="Y", help="Price of the whole machine, for the cost")
    ] = None,
    goal_positions: Annotated[
        int | None, typer.Option(metavar="N", help="Positions to reach; shows what is missing")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=1, help="Warn when N ranks cannot run the recipe")
    ] = None,
    save_seconds: Annotated[
        str | None, typer.Option(metavar="S", help="How long training stands for a save; otherwise presumed")
    ] = None,
    interruption_hours: Annotated[
        str | None, typer.Option(metavar="H", help="Mean time between interruptions; otherwise presumed")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Take it from a trace of machines that come and go")
    ] = None,
    usd_per_gb: Annotated[
        str | None, typer.Option(metavar="P", help="Price of a gigabyte read back from the mirror")
    ] = None,
    funds: Annotated[
        str | None, typer.Option(metavar="USD", help="Warn when reading back takes over 5 % of it")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Derive every figure before spending

    Parameters, positions, memory, disk, hours and cost of a recipe. Needs neither data nor PyTorch.
    """
    from assay.cli.show import as_json
    from assay.plan.figures import Saves, plan
    from assay.recipe.load import load

    loaded = load(recipe)
    figures = plan(
        loaded,
        recipe.parent,
        _decimal("--tokens-per-second", tokens_per_second),
        _decimal("--usd-per-hour", usd_per_hour),
        goal_positions,
        ranks,
        Saves(_decimal("--save-seconds", save_seconds), _decimal("--interruption-hours", interruption_hours), trace),
        _decimal("--usd-per-gb", usd_per_gb),
        _decimal("--funds", funds),
    )
    if json:
        as_json(figures)
    else:
        _show(figures, loaded)


def _decimal(option: str, value: str | None) -> Decimal | None:
    from decimal import Decimal, InvalidOperation

    from assay.errors import InputError

    if value is None:
        return None
    try:
        return Decimal(value)
    except InvalidOperation:
        raise InputError(f"{option} is {value!r}; a number is expected, such as 38587 or 0.60") from None


def _show(facts: dict[str, Any], recipe: Recipe) -> None:
    from assay.cli.show import console, note

    screen = console()
    for index, (title, rows) in enumerate(_groups(facts, recipe)):
        if index:
            screen.print()
        screen.print(_table(title, rows))
    if facts["warnings"]:
        screen.print()
        screen.print("To know before starting", style="bold")
        for warning in facts["warnings"]:
            screen.print(f"  - {warning}", markup=False)
    if facts["hours"] is None:
        note("hours need --tokens-per-second, cost --usd-per-hour as well")


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Trimmed:
    from rich.table import Table

    from assay.cli.show import Trimmed, cell

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(min_width=34)
    table.add_column(justify="right", min_width=20, no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for name, value, remark in rows:
        table.add_row("  " + cell(name), cell(value), cell(remark))
    return Trimmed(title, table)


def _groups(facts: dict[str, Any], recipe: Recipe) -> list[tuple[str, list[tuple[str, str, str]]]]:
    on_cpu = recipe.runtime.device == "cpu"
    one, many = ("the CPU process", "processes") if on_cpu else ("one GPU", "GPUs")
    ranks = facts["memory_bytes"]["ranks"]
    running = f", {ranks} running it" if ranks > 1 or not on_cpu else ""
    groups = [
        (f"Plan of {facts['name']}", _training(facts, many)),
        (f"Memory of {one}{running} (estimated)", _memory(facts["memory_bytes"], many)),
        ("Checkpoints", _cadence(facts["cadence"])),
        ("Disk", _disk(facts, recipe)),
        ("Data", _data(facts)),
    ]
    if facts["mirror"] is not None:
        groups.insert(-1, ("Mirror (estimated)", _mirror(facts["mirror"])))
    if facts["hours"] is not None:
        groups.append(("Time and money (estimated)", _money(facts)))
    return groups


def _training(facts: dict[str, Any], many: str) -> list[tuple[str, str, str]]:
    micro, flops = facts["micro_batches"], facts["flops_per_position"]
    start = facts["decay_start"]
    rows = [
        ("parameters", _number(facts["parameters"]), "tied embeddings counted once"),
        (
            "positions per update",
            _number(facts["positions_per_update"]),
            f"{facts['global_batch']:,} sequences × block {facts['block']:,}",
        ),
        ("scheduled updates", _number(facts["updates"]), "the length of the schedule, not a promise to run them"),
        ("planned positions", _number(facts["planned_positions"]), f"{facts['positions_per_parameter']:g} a parameter"),
    ]
    if facts["first_update"]:
        rows.append(
            ("positions of this run", _number(facts["positions_of_this_run"]), f"from update {facts['first_update']:,}")
        )
    ranks = ", ".join(micro["per_rank"])
    rows += [
        ("warm-up, updates", _number(facts["warmup"]), ""),
        (
            "decay starts at update",
            "none" if start is None else _number(start),
            "a cosine falls from the end of the warm-up on" if facts["schedule"] == "cosine" else "",
        ),
        (
            "micro-batches an update",
            _number(micro["per_update"]),
            f"of {micro['sequences']:,} sequences; {micro['per_lane']:,} a lane, {micro['lanes']:,} lane(s); "
            f"{many} allowed: {ranks}",
        ),
        ("FLOPs a position, 6 N", _number(flops["six_n"]), f"and {flops['attention']:,} for attention"),
    ]
    return rows


def _memory(memory: dict[str, Any], many: str) -> list[tuple[str, str, str]]:
    names = {
        "weights": ("weights", "float32"),
        "compute_copy": ("copy for the arithmetic", ""),
        "gradients": ("gradients", "float32"),
        "partial_sums": ("partial sums", "of the canonical reduction"),
        "exchange": ("exchange of gradients", f"with {memory['ranks']} {many}, two buckets and the joined gradients"),
        "optimizer": ("optimizer state", ""),
        "activations_without_recomputation": ("activations", "without recomputation"),
        "activations_with_selective_recomputation": ("activations", "with selective recomputation"),
        "activations_with_recomputation": ("activations", "with recomputation"),
        "logits": ("logits of one chunk", ""),
        "total_without_recomputation": ("total", "without recomputation"),
        "total_with_selective_recomputation": ("total", "with selective recomputation"),
        "total_with_recomputation": ("total", "with recomputation"),
    }
    if len(memory["per_gpu"]) > 1:
        names["optimizer"] = ("optimizer state", f"shared out over the {many}, the busiest")
    rows = []
    for key, (name, remark) in names.items():
        if not memory[key]:
            continue  # what this recipe does not have
        mark = "; the recipe's choice" if key.startswith("total") and memory[key] == memory["total"] else ""
        rows.append((name, _bytes(memory[key]), remark + mark))
    if memory["host_copies"]:
        rows.append(
            (
                "host memory for copies",
                _bytes(memory["host_copies"]),
                "of all together; without it training stands still while it saves",
            )
        )
    if len(memory["per_gpu"]) > 1:
        single = {"processes": "process"}.get(many, "GPU")
        rows += [
            (f"total with {ranks} {single if ranks == '1' else many}", _bytes(one["total"]), "by the recipe's choice")
            for ranks, one in memory["per_gpu"].items()
        ]
    return rows


def _cadence(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    auto = facts["auto"]
    bounds = f"from {auto['least']:,} to {auto['most']:,} updates"
    share = "of the training time is expected to stay; the starts of machines are left out"
    if auto["by"] == "schedule":
        remark = f"a hundredth of the schedule, {bounds}; the trainer chooses anew once saves and updates are measured"
    else:
        remark = f"√(2 × save × between interruptions) ÷ update, {bounds}"
    rows = []
    if facts["stated"]:
        rows.append(("full checkpoint every", f"{facts['every']:,} updates", "checkpoint.every"))
    else:
        rows.append(("full checkpoint every", f"{facts['every']:,} updates", f"auto: {remark}"))
    if facts["goodput"] is not None:
        rows.append(("expected goodput", f"{float(facts['goodput']):.1%}", share))
        if facts["stated"]:
            more = f"expected goodput {float(auto['goodput']):.1%}; {remark}"
            rows.append(("auto would take", f"{auto['every']:,} updates", more))
    hours = float(auto["between_seconds"]) / 3600
    rows.append(("one save", f"{float(auto['save_seconds']):,.3g} s", auto["save_from"]))
    rows.append(("between interruptions", f"{hours:,.1f} h", auto["between_from"]))
    if auto["update_seconds"] is not None:
        rows.append(("one update", f"{float(auto['update_seconds']):,.3g} s", auto["update_from"]))
    return rows


def _disk(facts: dict[str, Any], recipe: Recipe) -> list[tuple[str, str, str]]:
    disk, steps = facts["disk_bytes"], facts["checkpoints"]
    keep, most = recipe.checkpoint.keep, disk["full_kept"]
    kept = "all" if keep == "all" else f"the newest {keep}"
    kept += ", and slot ends, extra steps and the last" if keep != "all" and most > keep else ""
    rows = [
        ("full checkpoint", _bytes(disk["full_checkpoint"]), "weights and optimizer"),
        ("weights checkpoint", _bytes(disk["weights_checkpoint"]), ""),
        ("full checkpoints saved", _number(steps["count"]), _some(steps["full"])),
        ("of them kept at most", _number(most), f"{kept}; one more while it is written"),
    ]
    if steps["weights"]:
        rows.append(("weights checkpoints saved", _number(len(steps["weights"])), _some(steps["weights"])))
    return [*rows, ("disk needed", _bytes(disk["total"]), "checkpoints alone")]


def _mirror(mirror: dict[str, Any]) -> list[tuple[str, str, str]]:
    copies = f"{mirror['full_copies']:,} full and {mirror['weights_copies']:,} weights"
    stored = "the store checks instead: stored, not verified" if mirror["verify"] == "stored" else ""
    rows = [
        ("sent to the mirror", _bytes(mirror["bytes_sent"]), copies),
        ("read back from it", _bytes(mirror["bytes_read_back"]), stored),
    ]
    if mirror["usd_read_back"] is not None:
        remark = f"at {mirror['usd_per_gb']} dollars a gigabyte that leaves the store"
        rows.append(("reading back, dollars", mirror["usd_read_back"], remark))
    return rows


def _data(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    inherited, short = facts["inherited"], facts["shortfall"]
    before = inherited["positions"]
    rows = [
        ("inherited positions", "unknown" if before is None else _number(before), inherited["source"]),
        ("prepared positions", _number(short["prepared_positions"]), f"{short['prepared_updates']:,} updates"),
        ("missing for the schedule", _number(short["missing_positions"]), f"{short['missing_updates']:,} updates"),
    ]
    if short["goal_positions"] is not None:
        rows += [
            ("goal, positions", _number(short["goal_positions"]), f"{short['goal_updates']:,} updates of this recipe"),
            ("prepared input missing for it", _number(short["goal_missing_positions"]), ""),
            ("beyond the schedule", _number(short["goal_unscheduled_positions"]), ""),
        ]
    for slot in facts["slots"] or []:
        windows = f"{slot['windows_needed']:,} of {slot['windows_available']:,} windows"
        remark = windows if slot["enough"] else f"{windows}: too short"
        rows.append((f"slot {slot['slot']}, updates", _number(slot["used_updates"]), remark))
    return rows


def _money(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [("hours", f"{facts['hours']:,.1f}", "at the speed given, without interruption")]
    cost = facts["cost"]
    if cost is not None:
        rows.append(("cost, dollars", f"{cost['usd']}", f"at {cost['usd_per_hour']} dollars an hour"))
        rows.append(("the cost excludes", "", ", ".join(facts["cost_excludes"])))
    return rows


def _number(value: int) -> str:
    return f"{value:,}"


def _bytes(value: int) -> str:
    """Bytes in the unit that GPUs and disks are compared in: GiB, or MiB below one."""
    return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"


def _some(steps: list[int]) -> str:
    if len(steps) <= 6:
        return ", ".join(f"{step:,}" for step in steps)
    return f"{steps[0]:,}, {steps[1]:,}, {steps[2]:,} … {steps[-2]:,}, {steps[-1]:,}"
