"""`assay key …`: keys of reviewers, operators and publishers.

The private key goes into its file and nowhere else; what is printed is the public one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption

key_app = typer.Typer(help="Keys that sign approvals and releases", no_args_is_help=True, rich_markup_mode=None)


@key_app.callback()
def _keys() -> None:
    """Keys that sign approvals and releases"""


@key_app.command("new")
def new_command(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="File of the private key; NAME.pub holds the public one")
    ],
    as_json: JsonOption = False,
) -> None:
    """Make an Ed25519 key pair

    What exists is never replaced.
    """
    from assay.cli import show
    from assay.ledger.keys import keyid, new_key

    public = new_key(name)
    facts = {"public_key": public, "keyid": keyid(public), "private": str(name), "public": f"{name}.pub"}
    if as_json:
        show.as_json(facts)
        return
    show.console().print(show.pairs("made a key pair", facts))
    show.note(f"keep {name} to yourself: who holds it signs in your name; hand out the public key alone")
