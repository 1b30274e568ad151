"""Which small files go to a mirror with a run: its own, and of its project what a start elsewhere needs besides shards.

Names and paths alone; nothing is read but the queue's first line and, to find the tokenizer, digests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from assay.data import approval
from assay.data import queue as queues
from assay.errors import AssayError
from assay.files.publish import MARK
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.recipe.schema import Recipe
from assay.run import control as controls
from assay.run.folder import RunFolder
from assay.run.inputs import queue_path, tokenizer_file

LOCK_FILE = "mirror.lock"
PROJECT = "project"  # where the recipe's own folder lies in a fetched run
# What does not travel: secrets and locks of this machine, output of ranks, and what is copied by its own record.
_NOT_COPIED = (
    "salt",
    "owner.lock",
    "duties.lock",
    LOCK_FILE,
    "origin.json",
    "logs",
    PROJECT,
    LEDGER_FILE,
    "outcome.json",
)


def travelling(run: RunFolder) -> Iterator[tuple[str, Path]]:
    """Every small file of the run, and of its project what a start and a reader need besides the shards."""
    for path in _below(run.path):
        parts = path.relative_to(run.path).parts
        if parts[0] in _NOT_COPIED or (len(parts) > 2 and parts[0] in ("checkpoints", "weights", "exports")):
            continue
        yield "/".join(parts), path
    recipe = run.recipe()
    queue = queue_path(run, recipe)
    yield f"{PROJECT}/recipe.yaml", run.recipe_yaml
    if not queue.is_file():
        return
    at = f"{PROJECT}/{PurePosixPath(recipe.data.queue).as_posix()}"
    yield at, queue
    beside = approval.folder(queue).parent
    for path in _below(beside):
        yield f"{at}.d/{path.relative_to(beside).as_posix()}", path
    wanted, home = _tokenizer(queue), run.recipe_folder().resolve()
    tokenizer = tokenizer_file(run, recipe, wanted) if wanted else None
    for name in _needed(recipe):
        if (home / name).is_file():
            yield f"{PROJECT}/{name}", home / name
    if tokenizer is not None and tokenizer.resolve().is_relative_to(home):
        yield f"{PROJECT}/{tokenizer.resolve().relative_to(home).as_posix()}", tokenizer


def _needed(recipe: Recipe) -> list[str]:
    """Files of the project besides queue and tokenizer without which a start elsewhere is refused."""
    found = [recipe.checkpoint.auto.trace] if recipe.checkpoint.auto and recipe.checkpoint.auto.trace else []
    at = controls.place(recipe, Path())
    if at is not None:
        folder = at.parent if at.name == controls.FILE else at
        found += [
            (folder / name).as_posix() for name in (controls.FILE, controls.MODEL, controls.WINDOWS, controls.SUMS)
        ]
    return [PurePosixPath(name).as_posix() for name in found]


def _tokenizer(queue: Path) -> str | None:
    try:
        return queues.load(queue).tokenizer
    except AssayError:
        return None


def _below(folder: Path) -> Iterator[Path]:
    """Regular files below a folder, links and half-written ones left out, in the order of their names."""
    for place_, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if MARK not in name)
        for name in sorted(names):
            path = Path(place_) / name
            if MARK not in name and path.is_file() and not path.is_symlink():
                yield path
