"""The run folder: one training history in one place, never shared and never replaced.

Creating it is atomic: recipe, resolved recipe, salt and the first receipt appear together or not
at all. It holds paths and opens files; it draws no conclusions from the ledger (see `history`).
"""

from __future__ import annotations

import json
import os
import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import InputError, Refused
from assay.files.digest import digest, digest_file
from assay.files.publish import publish_file, publish_folder
from assay.files.reading import read_object
from assay.files.stores import folder_of
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Ledger, read
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe

FORMAT = "assay-run/1"


@dataclass(frozen=True)
class RunFolder:
    """Names of everything inside one run's folder."""

    path: Path

    @property
    def recipe_yaml(self) -> Path:
        """The recipe byte for byte as given."""
        return self.path / "recipe.yaml"

    @property
    def recipe_json(self) -> Path:
        """The recipe as resolved."""
        return self.path / "recipe.json"

    @property
    def ledger(self) -> Path:
        """The chain of receipts."""
        return self.path / LEDGER_FILE

    @property
    def metrics(self) -> Path:
        """One line per update."""
        return self.path / "metrics.jsonl"

    @property
    def outcome(self) -> Path:
        """How the last process ended."""
        return self.path / "outcome.json"

    @property
    def checkpoints(self) -> Path:
        """Full checkpoints."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Weights checkpoints."""
        return self.path / "weights"

    @property
    def evaluations(self) -> Path:
        """Evaluation results, pinned to step and weights digest."""
        return self.path / "evaluations"

    @property
    def amendments(self) -> Path:
        """Proposed amendments, their curves and signatures, as files; the receipts hold the same."""
        return self.path / "amendments"

    @property
    def salt(self) -> Path:
        """Private salt of the host and device digests; never leaves the folder."""
        return self.path / "salt"

    @property
    def origin(self) -> Path:
        """Where the recipe came from on this machine, so that its relative paths can be followed."""
        return self.path / "origin.json"

    def logs(self, segment: int) -> Path:
        """Output of one segment's ranks."""
        return self.path / "logs" / f"segment-{segment:02d}"

    def exists(self) -> bool:
        """True when a history stands here."""
        return self.ledger.exists() or self.recipe_json.exists()

    def recipe(self) -> Recipe:
        """The resolved recipe; InputError when this is no run folder."""
        require_run(self)
        return recipes.from_resolved(read_object(self.recipe_json, "the resolved recipe"), str(self.recipe_json))

    def run_id(self) -> str:
        """The id that the first receipt states."""
        require_run(self)
        for receipt in read(self.ledger):
            return str(receipt.body["run_id"])
        raise InputError(f"{self.ledger} is empty; a ledger begins with the receipt run.created")

    def open_ledger(self) -> Ledger:
        """The writing side of the ledger, verified from the first line."""
        return Ledger(self.ledger, self.run_id())

    def recipe_folder(self) -> Path:
        """The folder that the recipe's relative paths start from, as far as this machine knows it."""
        if self.origin.is_file():
            relative = read_object(self.origin, "the origin of the recipe").get("recipe_folder")
            if isinstance(relative, str):
                return (self.path / relative).resolve()
        return self.path


def require_run(run: RunFolder) -> None:
    """InputError unless `run` is a run folder."""
    if not run.path.is_dir():
        raise InputError(f"{run.path} is not a folder; a run folder is expected (see assay train --run)")
    for path in (run.ledger, run.recipe_json):
        if not path.is_file():
            raise InputError(f"{run.path} is not a run folder: {path.name} is missing")


def create(path: Path, recipe_path: Path, recipe: Recipe) -> RunFolder:
    """A new run folder whose ledger begins with `run.created`.

    Raises Refused (exit 3) when a history stands at `path`: a run is never started over silently.
    """
    run = RunFolder(path)
    if run.exists():
        raise Refused(
            f"{path} holds a run already; continue it with --start resume, or choose another folder for a new run"
        )
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()  # an empty folder made by hand is no history
    run_id = uuid.uuid4().hex
    with publish_folder(path) as temporary:
        draft = RunFolder(temporary)
        publish_file(draft.recipe_yaml, recipe_path.read_bytes())
        publish_file(draft.recipe_json, _pretty(recipes.resolved(recipe)))
        publish_file(draft.salt, secrets.token_hex(16).encode("ascii"), mode=0o600)
        origin = os.path.relpath(recipe_path.resolve().parent, path.resolve())
        publish_file(draft.origin, _pretty({"recipe_folder": origin}))
        for folder in (draft.checkpoints, draft.weights, draft.evaluations):
            folder.mkdir()
        Ledger.create(draft.ledger, run_id).append(
            "run.created",
            {
                "format": FORMAT,
                "run_id": run_id,
                "name": recipe.name,
                "recipe": recipes.digest(recipe),
                "files": {
                    "recipe.yaml": digest_file(draft.recipe_yaml),
                    "recipe.json": digest_file(draft.recipe_json),
                },
                "start": recipes.learning(recipe)["start"],
                "scheduled": recipe.schedule.updates,
            },
        )
    return run


def salted(run: RunFolder, value: str) -> str:
    """A digest of a host's or device's name that cannot be looked up without the run's private salt."""
    salt = run.salt.read_bytes() if run.salt.is_file() else b""
    return digest(salt + b"\n" + value.encode())


def address_digest(run: RunFolder, url: str) -> str:
    """What receipts say in place of a mirror's address, which may be a path of this machine; a folder by where it is.

    The same address has the same digest in this folder, and another one on another machine.
    """
    at = folder_of(url)
    return salted(run, "mirror " + (url.rstrip("/") if at is None else f"file://{at.resolve()}"))


def _pretty(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n").encode()
