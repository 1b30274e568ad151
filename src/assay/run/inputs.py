"""Where a run's recipe points on this machine: queue, data roots, tokenizer.

Paths only, found by digest where a digest is known. What is not there is None, never a substitute.
"""

from __future__ import annotations

from pathlib import Path

from assay.files.digest import digest_file
from assay.files.publish import MARK
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder

TOKENIZER = "tokenizer.json"
_DEPTH = 3  # folders below a data root in which a tokenizer.json is looked for


def queue_path(run: RunFolder, recipe: Recipe) -> Path:
    """The recipe's queue, whether it is there or not."""
    return run.recipe_folder() / recipe.data.queue


def data_roots(run: RunFolder, recipe: Recipe) -> list[Path]:
    """The folders under which parts are found by digest; without any in the recipe, the queue's own."""
    return [run.recipe_folder() / root for root in recipe.data.roots] or [queue_path(run, recipe).parent]


def tokenizer_file(run: RunFolder, recipe: Recipe, wanted: str) -> Path | None:
    """The `tokenizer.json` with the digest `wanted` under the data roots, or None."""
    for root in data_roots(run, recipe):
        for depth in range(_DEPTH + 1):
            for path in sorted(root.glob("*/" * depth + TOKENIZER)):
                whole = not any(MARK in part for part in path.parts)
                if whole and path.is_file() and digest_file(path) == wanted:
                    return path
    return None
