"""Where a guard writes: the run's own ledger on the node, or a chain of its own elsewhere.

A guard elsewhere appends to its chain first and then leaves each receipt in the run's inbox, from which the owner of
the ledger takes it up with its place and digest. It never writes another machine's ledger.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from assay.errors import VerificationError
from assay.ledger.ledger import FILE, Ledger, Receipt, read
from assay.run import inbox
from assay.run.folder import RunFolder


class Journal(Protocol):
    """What a guard writes with, and the receipts that it decides from."""

    def append(self, kind: str, body: dict[str, Any]) -> Receipt:
        """Append one receipt."""

    def receipts(self) -> tuple[list[Receipt], list[Receipt]]:
        """All receipts of the run, and what this guard said that the run has not taken up, numbered behind them."""


class OnNode:
    """Writes the run's ledger, and takes up what others left in its inbox."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.ledger = run, run.open_ledger()
        last = self.ledger.head["seq"]
        self._all = [one for one in read(run.ledger) if one.seq <= last]  # verified once, then only what is new

    def append(self, kind: str, body: dict[str, Any]) -> Receipt:
        """Append to the run's ledger."""
        receipt = self.ledger.append(kind, body)
        self._take([*self.ledger.others(), receipt])
        return receipt

    def receipts(self) -> tuple[list[Receipt], list[Receipt]]:
        """The ledger's, the inbox taken up."""
        new = inbox.take_up(self.run, self.ledger)
        self._take([*self.ledger.others(), *new])
        return list(self._all), []

    def _take(self, new: list[Receipt]) -> None:
        self._all += sorted(new, key=lambda one: one.seq)


class Elsewhere:
    """Writes a chain in a folder of its own; `run` may be a synchronised copy, of which only the inbox is written."""

    def __init__(self, run: RunFolder, folder: Path) -> None:
        """Take up the chain in `folder`, or begin it; VerificationError when it is another run's."""
        self.run, self.name = run, f"guard-{run.run_id()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        self.chain = Ledger(path, self.name) if path.exists() else Ledger.create(path, self.name)
        mine = list(read(path, self.name))
        if not mine:
            self.append("guard", {"action": "chain", "chain": self.name, "run_id": run.run_id()})
        elif mine[0].body.get("run_id") != run.run_id():
            raise VerificationError(f"{path} is the chain of a guard of another run; give each run a folder of its own")
        self._leave(mine)

    def append(self, kind: str, body: dict[str, Any]) -> Receipt:
        """Append to the chain, then tell the run."""
        receipt = self.chain.append(kind, body)
        inbox.put(self.run, receipt, self.name)
        return receipt

    def receipts(self) -> tuple[list[Receipt], list[Receipt]]:
        """The run's, and what the run has not taken up."""
        theirs = list(read(self.run.ledger))
        seen = inbox.taken_up(self.run, self.name)
        mine = [one for one in read(self.chain.path, self.name) if one.seq > seen]
        return theirs, [replace(one, seq=len(theirs) + place) for place, one in enumerate(mine)]

    def _leave(self, mine: list[Receipt]) -> None:
        """What an interrupted guard appended and did not leave, or a copy lost on its way, is left again."""
        seen = inbox.taken_up(self.run, self.name)
        for one in mine:
            if one.seq > seen:
                inbox.put(self.run, one, self.name)
