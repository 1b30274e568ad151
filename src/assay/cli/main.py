"""The `assay` command: parses, calls one function of a room, and ends with the contract's exit code.

A fault that a user can meet is one sentence on standard error (with `--json` an object on
standard output as well). Anything else is a bug: exit 70, with the traceback kept for the report.
"""

from __future__ import annotations

import errno
import os
import sys
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
from assay.errors import AssayError

INTERRUPTED = 130  # what the library makes of Ctrl-C where its caller is to give the exit code

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


def main() -> None:
    """Entry point of the command."""
    wants_json = "--json" in sys.argv[1:]
    # Threads that spin while they wait for work cost a shared machine most of its speed: six times slower
    # was measured beside one busy neighbour. Read when the OpenMP library is loaded, by children too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = app(standalone_mode=False)  # None, or what a command's typer.Exit says
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except typer.TyperException as fault:
        from assay.cli import usage

        if usage.is_help(fault):
            print(fault.format_message(), file=sys.stderr)
        else:
            _tell(usage.sentence(fault), 2, wants_json)
        sys.exit(2)
    except AssayError as fault:
        _tell(str(fault), fault.code, wants_json)
        sys.exit(fault.code)
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        _tell(
            f"{fault.filename or 'a file'} could not be read or written: {fault.strerror or fault}",
            71 if full else 2,
            wants_json,
        )
        sys.exit(71 if full else 2)
    except KeyboardInterrupt:
        _tell("interrupted", 75, wants_json)
        sys.exit(75)
    except ModuleNotFoundError as fault:
        extra = _extra(fault.name or "")
        if extra is None:
            raise
        _tell(f"{fault.name} is not installed; pip install 'assay[{extra}]' brings it", 2, wants_json)
        sys.exit(2)
    except Exception:  # noqa: BLE001 - the one place where a bug becomes exit code 70
        import traceback

        traceback.print_exc()
        _tell("internal fault: this is a bug in Assay; please report the lines above", 70, wants_json)
        sys.exit(70)


def _extra(module: str) -> str | None:
    """The extra that brings a module, or None when no extra does."""
    top = module.split(".")[0]
    if top in ("torch", "safetensors", "transformers"):
        return "train"
    corpus = ("httpx2", "huggingface_hub", "py3langid", "pyarrow", "rensa", "tokenizers", "zstandard")
    return "corpus" if top in corpus else None


def _tell(message: str, code: int, wants_json: bool) -> None:
    from assay.cli.show import as_json, note

    note(f"assay: {message}")
    if wants_json:
        as_json({"ok": False, "error": message, "exit": code})


if __name__ == "__main__":
    main()
