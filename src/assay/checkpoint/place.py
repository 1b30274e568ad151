"""Where the checkpoint lies that a path and a step name. It looks at names and receipts, and opens no tensor."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint import manifest as manifests
from assay.errors import DataError
from assay.files.digest import digest_file
from assay.run.folder import RunFolder
from assay.run.history import history


def checkpoint_folder(path: Path, step: int) -> Path:
    """`path` itself when it is a checkpoint folder, else the folder of `step` in the run at `path`."""
    if (path / manifests.MANIFEST).exists():
        return path
    parent = RunFolder(path)
    if not parent.exists():
        raise DataError(f"{path} is neither a checkpoint folder nor a run; start.continue_from.path names one of them")
    saved = [item for item in history(parent.ledger).line if item.kind == "full" and item.step == step]
    if not saved:
        raise DataError(f"{path} has no full checkpoint of step {step}; name another step or a checkpoint folder")
    folder = path / saved[-1].folder
    if digest_file(folder / manifests.MANIFEST) != saved[-1].manifest_sha256:
        raise DataError(f"{folder} is not what receipt {saved[-1].seq} of its run names; it is damaged or another")
    return folder
