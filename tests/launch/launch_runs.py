"""One finished run and one that stopped half way, and how tests look at runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from small import Project, drive

from assay.files.digest import digest_file
from assay.ledger.ledger import Receipt, read
from assay.run.history import History, history

UPDATES, EVERY, HALF = 12, 3, 6


class Runs(Project):
    """A project with `whole` (12 updates, two slots) and `half` (stopped at step 6), and copies of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, slots=((7, 2), (8, 2)))
        self.plain = self.small("plain")
        assert drive(self.plain, path / "whole") == 0
        assert drive(self.plain, path / "half", until=str(HALF)) == 0

    def small(self, name: str, **changes: Any) -> Path:
        """A recipe of twelve updates."""
        short = {"kind": "wsd", "updates": UPDATES, "warmup": 2, "decay_fraction": 0.25, "min_lr": 0.0003}
        saves = {"every": EVERY, "keep": "all", "weights_every": 4}
        return self.recipe(name, **{"schedule": short, "checkpoint": saves, "evaluate": {"every": None}} | changes)

    def copy(self, of: str, name: str) -> Path:
        """A copy of a run, beside it."""
        shutil.copytree(self.path / of, self.path / name)
        return self.path / name


def told(run: Path) -> History:
    return history(run / "ledger.jsonl")


def receipts(run: Path, kind: str) -> list[Receipt]:
    return [receipt for receipt in read(run / "ledger.jsonl") if receipt.kind == kind]


def states(run: Path) -> dict[int, str | None]:
    """state_sha256 by step, as the receipts of the newest segment that saved it say."""
    return {item.step: item.state_sha256 for item in told(run).saved if item.kind == "full"}


def tree(path: Path) -> dict[str, str]:
    """Every file's digest."""
    return {str(one.relative_to(path)): digest_file(one) for one in sorted(path.rglob("*")) if one.is_file()}


def flip(path: Path, at: int = -9) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
