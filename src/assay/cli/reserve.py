"""`assay corpus reserve`: the list of documents that a pool keeps for itself.

Parses, calls `corpus.reserving` and shows what was written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption


def reserve_command(
    origin: Annotated[Path, typer.Argument(metavar="FROM", help="A built corpus, or a file of held-out items")],
    out: Annotated[Path, typer.Argument(metavar="LIST", help="The list to make; it must not exist")],
    pool: Annotated[str | None, typer.Option(metavar="NAME", help="Who keeps them; default: the corpus's pool")] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Known by text, id or title; may be repeated; default: text"),
    ] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why, shown with each rejection")] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Fields with text of held-out items; default: text")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what a pool keeps for itself

    Other corpora name the list in admission.reserved and reject what is on it. Digests are written, never texts.
    """
    from assay.cli import show
    from assay.corpus.reserving import reserve

    facts = reserve(origin, out, by=by or ["text"], pool=pool, reason=reason, text_fields=field or ["text"])
    if as_json:
        show.as_json(facts)
    else:
        show.console().print(show.pairs(f"reserved documents of {origin}", facts))
