"""Which full checkpoints stay: the newest `keep`, extra and slot-end steps, the final one, and what a mirror needs.

The newest one with a verified copy stays, and with a mirror in the recipe every newer one, until it has a copy of its
own. Weights checkpoints always stay. Removal is a receipt first and a deletion after it, and a clean-up
that fails never stops training.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from assay.checkpoint.manifest import MANIFEST, SUMS, read_manifest
from assay.errors import AssayError
from assay.files.publish import MARK, leftovers, publish_file
from assay.ledger.ledger import Ledger, read
from assay.run.history import AWAITED, SAFE, History, Saved


def surplus(line: list[Saved], keep: int | str, permanent: Collection[int]) -> list[Saved]:
    """Full checkpoints of the line that may go, oldest first; `permanent` are steps that always stay."""
    if keep == "all":
        return []
    full = sorted((item for item in line if item.kind == "full"), key=lambda one: (one.step, one.segment))
    newest_steps = sorted({item.step for item in full})[-int(keep) :]
    safe = max(((item.step, item.segment) for item in full if item.copy == SAFE), default=(-1, 0))

    def needed(item: Saved) -> bool:
        place = (item.step, item.segment)
        return place == safe or (item.copy == AWAITED and place > safe)

    return [item for item in full if item.step not in newest_steps and item.step not in permanent and not needed(item)]


def remove(run_path: Path, ledger: Ledger, items: list[Saved], tell: Callable[[str], None]) -> list[Saved]:
    """Remove each: the receipt, then the manifest (so that no reader takes a half-removed folder), then the rest."""
    for item in items:
        ledger.append(
            "checkpoint.removed", {"folder": item.folder, "step": item.step, "manifest_sha256": item.manifest_sha256}
        )
        folder = run_path / item.folder
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as fault:
            tell(f"{folder} could not be removed ({fault.strerror or fault}); training goes on")
    return items


def clear_half_written(folder: Path, tell: Callable[[str], None]) -> None:
    """Remove what interrupted saves left in `folder`: no reader takes it, and it holds room that the next save needs.

    Only for the run's owner, before it saves anything; what cannot be removed is told and stays.
    """
    for rest in leftovers(folder):
        try:
            shutil.rmtree(rest) if rest.is_dir() and not rest.is_symlink() else rest.unlink()
            tell(f"{rest.name} was left half-written by an interrupted save; it is removed")
        except OSError as fault:
            tell(
                f"{rest.name} was left half-written and could not be removed ({fault.strerror or fault}); it is ignored"
            )


def clear_unrecorded(run_path: Path, ledger: Path, told: History, tell: Callable[[str], None]) -> None:
    """Remove whole checkpoints that no receipt names: their process was gone between the folder and the receipt.

    No start takes them, and the step that is saved again needs their name. Only for the run's owner, before it saves
    anything, and only what states a head of this very ledger: a folder from elsewhere, or of a ledger that lost its
    last receipts, is not this function's to remove.
    """
    named = {item.folder for item in told.saved}
    for folder in sorted(run_path.glob(f"*/step-*/{MANIFEST}")):
        place = folder.parent
        if f"{place.parent.name}/{place.name}" in named or MARK in place.name or place.is_symlink():
            continue
        try:
            manifest = read_manifest(place)
            digests = {(receipt.seq, receipt.digest) for receipt in read(ledger)}
        except AssayError:
            continue
        head = manifest.ledger.get("seq"), manifest.ledger.get("digest")
        if manifest.run_id != told.run_id or head not in digests:
            continue
        try:
            _forget_sums(place)
            folder.unlink()
            shutil.rmtree(place)
            tell(f"{place.name} was saved, but its process ended before the receipt; it is removed and saved again")
        except OSError as fault:
            tell(f"{place} has no receipt and could not be removed ({fault.strerror or fault}); it is ignored")


def _forget_sums(folder: Path) -> None:
    """The folder's lines leave SHA256SUMS, where the next folder of its name will have its own."""
    path = folder.parent / SUMS
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        publish_file(path, b"".join(line for line in lines if f"  {folder.name}/".encode() not in line))
