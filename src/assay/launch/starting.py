"""Which start a launch would make: mode, step, and whether the optimizer is empty or restored.

By receipts and manifests alone; the ranks load and prove the tensors (see `train.start`) and write the evidence down.
"""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import read_manifest
from assay.checkpoint.place import checkpoint_folder
from assay.errors import DataError, Refused
from assay.files.digest import digest_file
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder
from assay.run.history import History

EMPTY, RESTORED = "optimizer empty", "optimizer restored"


def start(recipe: Recipe, folder: Path, run: RunFolder, told: History | None, from_step: int | None) -> str:
    """What is going to be started, in words; refused with the right code when its evidence does not hold."""
    if told is None or not told.segments:
        return own_start(recipe, folder)
    if not any(one.kind == "full" for one in told.saved):
        if from_step is not None:
            raise DataError(
                f"{run.path} has no full checkpoint of step {from_step}; none was saved: leave --from-step out"
            )
        return f"resume, but no full checkpoint was saved: begins again, {own_start(recipe, folder)}"
    standing = told.line if from_step is None else [one for one in told.standing if one.step == from_step]
    full = [one for one in standing if one.kind == "full"]
    passed_over: list[str] = []
    for one in sorted(full, key=lambda one: (one.step, one.segment), reverse=True):
        manifest = run.path / one.folder / manifests.MANIFEST
        if manifest.is_file() and digest_file(manifest) == one.manifest_sha256:
            skipped = f"; passed over as damaged: {', '.join(passed_over)}" if passed_over else ""
            return f"resume at step {one.step:,}, {RESTORED}{skipped}"
        passed_over.append(one.folder)
    which = "no full checkpoint" if from_step is None else f"no full checkpoint of step {from_step}"
    damaged = f" that is whole (damaged: {', '.join(passed_over)})" if passed_over else ""
    raise DataError(f"{run.path} has {which}{damaged}; fetch a copy (assay fetch), or name another step (--from-step)")


def own_start(recipe: Recipe, folder: Path) -> str:
    """The start that the recipe names."""
    start = recipe.start
    if start.init_from is not None:
        place = folder / start.init_from.path
        manifest = read_manifest(place)
        if manifests.CONFIG not in manifest.files:
            raise DataError(
                f"{place}: the manifest lists no {manifests.CONFIG}; a checkpoint or an imported model is expected"
            )
        stated = manifests.weights_pin(manifest)
        if start.init_from.sha256 not in (None, stated):
            raise Refused(f"start.init_from.sha256 is {start.init_from.sha256}, but {place} states {stated}")
        return f"init-from {place.name} (step {manifest.step:,} of its run), {EMPTY}, step 0"
    if start.continue_from is not None:
        place = folder / start.continue_from.path
        if not place.is_dir():
            raise DataError(f"{place} does not exist; start.continue_from.path names a run or checkpoint folder")
        manifest = read_manifest(checkpoint_folder(place, start.continue_from.step))
        if manifest.kind != "full":
            raise Refused(
                f"{place} is a weights checkpoint; continue_from needs a full one (use init_from for weights)"
            )
        if manifest.step != start.continue_from.step:
            raise Refused(f"{place} holds step {manifest.step}, but start.continue_from.step is "
                          f"{start.continue_from.step}")  # fmt: skip
        if start.continue_from.sha256 not in (None, manifest.state_sha256):
            raise Refused(
                f"start.continue_from.sha256 is {start.continue_from.sha256}, but {place} has {manifest.state_sha256}"
            )
        return f"continue-from step {manifest.step:,} of {place.name}, {RESTORED}"
    return f"scratch, {EMPTY}, step 0"


def source_folder(recipe: Recipe, folder: Path) -> Path | None:
    """The folder whose weights and config the recipe's start takes, or None for scratch."""
    start = recipe.start
    if start.init_from is not None:
        return folder / start.init_from.path
    if start.continue_from is not None:
        return checkpoint_folder(folder / start.continue_from.path, start.continue_from.step)
    return None
