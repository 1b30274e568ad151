"""Arguments and options that several commands take, said once and in the same words.

Help texts begin with a capital and end without a full stop; what stands for a value is in capitals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output")]
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder")]
QueueArgument = Annotated[Path, typer.Argument(metavar="QUEUE", help="The queue file")]
RootOption = Annotated[
    list[Path] | None,
    typer.Option("--root", metavar="DIR", help="Where shards are looked for, besides the hints; may be repeated"),
]
StepOption = Annotated[int | None, typer.Option(metavar="N", help="The step; default: the newest that holds")]
