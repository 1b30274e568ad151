"""`assay control record` and `assay control check`: a known computation, kept, and done again on another machine.

Parses, gathers weights and batches, calls `train.control` and shows. `assay train` runs a demanded control by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, StepOption

if TYPE_CHECKING:
    from assay.run.control import Update

control_app = typer.Typer(
    help="Known weights and losses to test a machine", no_args_is_help=True, rich_markup_mode=None
)


@control_app.callback()
def _control() -> None:
    """Known weights and losses to test a machine"""


@control_app.command("record")
def record_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run, a checkpoint folder or a Hugging Face folder")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the control, which must not exist")],
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Whose batch, optimizer and data; default: the run's own")
    ] = None,
    updates: Annotated[int, typer.Option(metavar="K", min=1, max=100, help="How many updates")] = 3,
    step: StepOption = None,
    json: JsonOption = False,
) -> None:
    """Keep weights, batches and what they give

    One micro-batch a lane, at peak rates from a fresh optimizer; the weights are copied.
    """
    import math

    import numpy as np

    from assay.cli import show
    from assay.data import queue as queues
    from assay.data.batches import Batches
    from assay.errors import InputError
    from assay.evaluate.subject import open_subject
    from assay.recipe import load as recipes
    from assay.train.control import record, reduced

    subject = open_subject(source, step)
    if recipe is not None:
        given, folder = recipes.load(recipe), recipe.resolve().parent
    elif subject.run is not None:
        given, folder = subject.run.recipe(), subject.run.recipe_folder()
    else:
        raise InputError(f"{source} is no run and lies in none; name a recipe with --recipe for batch and data")
    short = reduced(given, subject.shape.model_dump(mode="json"))
    queue = queues.load(folder / given.data.queue)
    if queue.block != short.model.block or queue.vocabulary > short.model.vocabulary:
        raise InputError(
            f"{queue.path} does not fit the model: its block is {queue.block}, the model's {short.model.block}"
        )
    batches = Batches(queue, [folder / root for root in given.data.roots], given.data.seed, given.global_batch)
    if updates > batches.updates:
        raise InputError(f"--updates is {updates}, but {queue.path} holds {batches.updates:,}")
    rows = slice(0, short.global_batch)
    windows = np.stack([batches.batch(update, rows).astype(np.uint32) for update in range(updates)])
    about = {"weights_sha256": subject.weights_sha256, "step": subject.step,
             "run_id": subject.run.run_id() if subject.run else None}  # fmt: skip
    control = record(out, short, subject.tensors, windows, about)
    facts = {
        "updates": updates,
        "max_difference": 0.0,
        "tolerance": given.control.tolerance,
        "identical": True,
        "passed": True,
        "control": control.sha256,
        "weights_sha256": subject.weights_sha256,
        "positions": updates * math.prod(windows.shape[1:2]) * short.model.block,
        "folder": str(out),
    }
    if json:
        show.as_json(facts)
        return
    shown = {key: facts[key] for key in ("control", "weights_sha256", "updates", "positions")}
    show.console().print(show.pairs(f"recorded {out}", shown))
    show.console().print(_table(control.expected, control.expected))


@control_app.command("check")
def check_command(
    control: Annotated[Path, typer.Argument(metavar="CONTROL", help="The folder of a control, or its control.json")],
    tolerance: Annotated[
        str, typer.Option(metavar="X", help="Allowed where bits are not expected: loss in nats, norm relative")
    ] = "0.001",
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="As runtime.device; default: as recorded")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compute a control again here

    Equal bits are demanded where device kind, versions and settings are those of the recording (exit 6 otherwise).
    """
    from decimal import Decimal, InvalidOperation

    from assay.cli import show
    from assay.errors import InputError
    from assay.recipe import load as recipes
    from assay.run.control import read_control
    from assay.train import numerics
    from assay.train.control import check
    from assay.train.ranks import Ranks

    try:
        sound = Decimal(tolerance).is_finite() and Decimal(tolerance) >= 0
    except InvalidOperation:
        sound = False
    if not sound:
        raise InputError(f"--tolerance is {tolerance!r}; a decimal number of at least 0 is expected, such as 0.001")
    found = read_control(control)
    recipe = found.recipe
    if device is not None:
        whole: dict[str, Any] = recipes.resolved(recipe)
        whole["runtime"]["device"] = device
        recipe = recipes.from_resolved(whole, "--device")
    here = numerics.switch_on(recipe)
    numerics.keep_threads(here, 1, found.promise.get("threads"))
    outcome = check(found, recipe.runtime, tolerance, Ranks(), here)
    if json:
        show.as_json(
            {"ok": outcome.passed, **outcome.facts(), "by_update": _by_update(found.expected, outcome.updates)}
        )
    else:
        show.console().print(show.pairs(f"{'passed' if outcome.passed else 'FAILED'}: {control}", outcome.facts()))
        show.console().print(_table(found.expected, outcome.updates))
    if not outcome.passed:
        show.note(f"assay: the control {control} failed: this machine computes other numbers than were recorded")
        raise SystemExit(6)


def _by_update(expected: tuple[Update, ...], found: tuple[Update, ...]) -> list[dict[str, Any]]:
    """The figures of the table for scripts; what is not finite is null."""
    import math

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return [
        {
            "update": number,
            "loss_recorded": one.loss,
            "loss": finite(other.loss),
            "grad_norm_recorded": one.grad_norm,
            "grad_norm": finite(other.grad_norm),
        }
        for number, (one, other) in enumerate(zip(expected, found, strict=True))
    ]


def _table(expected: tuple[Update, ...], found: tuple[Update, ...]) -> Any:
    from assay.cli import show

    rows = [
        (number, one.loss, other.loss, one.grad_norm, other.grad_norm)
        for number, (one, other) in enumerate(zip(expected, found, strict=True))
    ]
    return show.table("", ("update", "loss recorded", "loss", "gradient norm recorded", "gradient norm"), rows)
