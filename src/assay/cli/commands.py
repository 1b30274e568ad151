"""All commands of `assay` under their names.

Each is one function of a file beside this one. What it answers with, and how a fault ends it, is `main`'s.
"""

from __future__ import annotations

from typing import Annotated

import typer

from assay import __version__
from assay.cli.amend import amend_app
from assay.cli.budget import budget_app
from assay.cli.control import control_app
from assay.cli.corpus import corpus_app
from assay.cli.data import data_app
from assay.cli.demo import demo_command
from assay.cli.duties import duties_command
from assay.cli.evaluate import evaluate_command, export_command, import_app
from assay.cli.guard import guard_app
from assay.cli.key import key_app
from assay.cli.launch import launch_command
from assay.cli.mirror import fetch_command, mirror_command
from assay.cli.plan import plan_command
from assay.cli.train import (
    abandon_command,
    preflight_command,
    release_command,
    status_command,
    stop_command,
    train,
)
from assay.cli.verify import bundle_command, verify_command

app = typer.Typer(
    name="assay",
    help="Language-model pretraining that can prove what it did",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo_command)
app.command("plan")(plan_command)
app.add_typer(corpus_app, name="corpus")
app.add_typer(data_app, name="data")
app.command("preflight")(preflight_command)
app.command("train")(train)
app.command("launch")(launch_command)
app.command("status")(status_command)
app.add_typer(control_app, name="control")
app.add_typer(amend_app, name="amend")
app.add_typer(budget_app, name="budget", help="Keep a run's funds, bills and expenses")
app.command("stop")(stop_command)
app.command("release")(release_command)
app.command("abandon")(abandon_command)
app.command("mirror")(mirror_command)
app.command("duties")(duties_command)
app.command("fetch")(fetch_command)
app.command("verify")(verify_command)
app.command("bundle")(bundle_command)
app.add_typer(guard_app, name="guard")
app.command("evaluate")(evaluate_command)
app.command("export")(export_command)
app.add_typer(import_app, name="import")
app.add_typer(key_app, name="key")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Language-model pretraining that can prove what it did"""
