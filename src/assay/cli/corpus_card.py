"""`assay corpus card`: the data card and the Croissant metadata of a built corpus.

Parses, calls the room, says what was written and what nobody stated. Nothing that exists is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import JsonOption
from assay.cli.show import as_json, console, note, pairs


def card_command(
    corpus: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that `assay corpus build` made")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write; default: into OUT")] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Where the corpus is published")] = None,
    creator: Annotated[str | None, typer.Option(metavar="NAME", help="The organisation that publishes it")] = None,
    published: Annotated[str | None, typer.Option(metavar="DATE", help="When, such as 2026-11-30")] = None,
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Its version, such as 1.0.0")] = None,
    json: JsonOption = False,
) -> None:
    """Write the data card of a corpus

    README.md for people and croissant.json for machines, both from the corpus's receipt alone. The options are what
    only the publisher knows.
    """
    from assay.corpus.card import write_card
    from assay.corpus.evidence import Publication, facts

    said = Publication(url, creator, published, version)
    found = facts(corpus, said)
    written = write_card(found, out or corpus)
    absent = [f"--{name}" for name, value in vars(said).items() if value is None]
    record = {
        "files": [str(path) for path in written],
        "receipt": found.sha256,
        "documents": found.receipt["admitted"],
        "tokens": found.receipt["tokens"],
        "licences": found.licences,
        "not_asked": found.not_asked,
        "not_stated": [name.removeprefix("--") for name in absent],
    }
    if json:
        as_json(record)
    else:
        licences = ", ".join(f"{name} ({count:,})" for name, count in found.licences.items())
        shown = {**record, "files": ", ".join(record["files"]), "licences": licences}
        shown |= {name: ", ".join(record[name]) or "nothing" for name in ("not_asked", "not_stated")}
        console().print(pairs("", {name.replace("_", " "): value for name, value in shown.items()}))
    if absent:
        note(f"Croissant asks for what is not stated yet; give {', '.join(absent)} when you publish")
