"""A control as files, and what a run's ledger says about the controls that it passed.

A folder `control.json`, `model.safetensors`, `windows.bin`, `SHA256SUMS`: known weights, known batches, and the losses,
gradient norms and final state that they gave where it was recorded. It computes nothing (see `train.control`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, digest_file, is_digest
from assay.files.reading import inside, read_object, read_text
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.history import History

FORMAT = "assay-control/1"
FILE, MODEL, WINDOWS, SUMS = "control.json", "model.safetensors", "windows.bin", "SHA256SUMS"
DTYPE = "<u4"  # of the stored windows, whatever the shards' own is


@dataclass(frozen=True)
class Update:
    """What one update of a control gave: loss in nats and gradient norm before clipping."""

    loss: float
    grad_norm: float

    def record(self) -> dict[str, str]:
        """As the file and receipts have it: the shortest decimal strings that read back to the same bits."""
        return {"loss": repr(self.loss), "grad_norm": repr(self.grad_norm)}


@dataclass(frozen=True)
class Control:
    """A recorded control; `recipe` is the reduced one that it trains with, `promise` where it was recorded."""

    folder: Path
    sha256: str
    recipe: Recipe
    weights_sha256: str
    expected: tuple[Update, ...]
    state_sha256: str
    promise: dict[str, Any]
    files: dict[str, str]


def read_control(path: Path) -> Control:
    """The control at `path`, its folder or its `control.json`, every byte checked.

    InputError when there is none, DataError (exit 4) when a file is not the one that was recorded.
    """
    folder = path.parent if path.name == FILE else path
    file = folder / FILE
    value = read_object(file, "a control (assay control record makes one)")
    if value.get("format") != FORMAT:
        raise InputError(f"{file}: format is {value.get('format')!r:.60}; {FORMAT!r} is expected")
    sha256 = digest_file(file)
    _refuse_edited(folder, sha256)
    expected, files, promise = value.get("expected"), value.get("files"), value.get("promise")
    if (
        not isinstance(expected, list)
        or not expected
        or not isinstance(promise, dict)
        or not isinstance(files, dict)
        or files.keys() != {MODEL, WINDOWS}
        or not all(map(is_digest, [*files.values(), value.get("weights_sha256"), value.get("state_sha256")]))
    ):
        raise InputError(f"{file} is no control: expected, files, promise or a digest is missing or of another form")
    recipe = recipes.from_resolved(value.get("recipe"), f"{file}, recipe")
    for name, stated in files.items():
        part = inside(folder, name, str(file))
        if not part.is_file():
            raise DataError(f"{part} is missing; bring the control's folder as it was recorded")
        if digest_file(part) != stated:
            raise DataError(
                f"{part} is not what was recorded: its digest is not {stated}; bring the recorded bytes back"
            )
    updates = tuple(_update(item, f"{file}, expected[{number}]") for number, item in enumerate(expected))
    size = len(updates) * recipe.global_batch * (recipe.model.block + 1) * 4
    if (folder / WINDOWS).stat().st_size != size:
        raise DataError(f"{folder / WINDOWS} has not the {size:,} bytes of {len(updates)} update(s)")
    weights, state = str(value["weights_sha256"]), str(value["state_sha256"])
    return Control(folder, sha256, recipe, weights, updates, state, promise, files)


def sums(sha256: str, files: Mapping[str, str]) -> bytes:
    """The bytes of SHA256SUMS, as `sha256sum -c` reads them: every file of the control, `control.json` by `sha256`."""
    lines = sorted({**files, FILE: sha256}.items(), key=lambda item: item[0])
    return "".join(f"{stated.removeprefix(PREFIX)}  {name}\n" for name, stated in lines).encode("ascii")


def _refuse_edited(folder: Path, sha256: str) -> None:
    """DataError when `control.json` is not the file that SHA256SUMS was written for; what it promises decides."""
    path = folder / SUMS
    if not path.is_file():
        raise DataError(f"{path} is missing; bring the control's folder as it was recorded")
    if f"{sha256.removeprefix(PREFIX)}  {FILE}" not in read_text(path, "a list of SHA-256 sums").split("\n"):
        raise DataError(
            f"{folder / FILE} is not what was recorded: {SUMS} does not state its digest {sha256}; bring the recorded "
            "bytes back"
        )


def _update(item: object, where: str) -> Update:
    record = item if isinstance(item, dict) else {}
    try:
        found = Update(float(record["loss"]), float(record["grad_norm"]))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where} is {item!r:.80}; loss and grad_norm are expected, as decimal strings") from None
    if not (math.isfinite(found.loss) and math.isfinite(found.grad_norm)):
        raise InputError(f"{where} is not finite; record the control again where numbers are sound")
    return found


def place(recipe: Recipe, folder: Path) -> Path | None:
    """Where the recipe's control lies, or None when it demands none."""
    if not recipe.control.required or recipe.control.path is None:
        return None
    return folder / recipe.control.path


def passed(told: History, control: str, allocation: dict[str, Any]) -> bool:
    """True when the newest control of the run passed, was this one and ran on this very allocation."""
    if not told.controls:
        return False
    body = told.controls[-1].body
    return body.get("passed") is True and body.get("control") == control and body.get("allocation") == allocation
