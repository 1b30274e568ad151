"""A world for tests of the guard: a clock that tests set, a trainer, a mirror and a provider that are state machines.

They speak through a real run folder: the trainer reads wishes and holds from the ledger, and writes what it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from small import Project

from assay.guard.journal import OnNode
from assay.guard.policy import from_plain
from assay.guard.providers import CAPABILITIES, Access, Listing
from assay.guard.watch import Clock, Guard, Site
from assay.ledger.ledger import Receipt
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create

T0 = datetime(2026, 11, 30, 12, tzinfo=UTC)
TICK = 5
D = "sha256:" + "d" * 64
RULES: dict[str, Any] = {
    "name": "world", "machine": {"gpus": 8, "provider": "cloud", "save_seconds": 10, "restart_seconds": 60,
                                 "disk_days": 0, "through": {"local": True}},
    "prices": [{"csv": {"path": "prices.csv", "zone": "z"}}], "interval_seconds": 60, "window_seconds": 600,
    "readings": 3, "save_timeout_seconds": 120, "jump_factor": "2", "stale_seconds": 900,
}  # fmt: skip


class Killed(BaseException):
    """The guard's process is gone."""


class Mortal(OnNode):
    """Writes the ledger, and is killed after so many receipts (before the write of the one that is next)."""

    left: int | None = None

    def append(self, kind: str, body: dict[str, Any]) -> Receipt:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1
        return super().append(kind, body)


class World:
    """Time stands in `now`; what is billed in truth adds up in `billed`."""

    def __init__(self, folder: Path, prices: list[tuple[int, str]], **rules: Any) -> None:
        project = Project(folder / "project")
        path = project.recipe(schedule__updates=24)
        self.folder, self.run = folder, create(folder / "run", path, recipes.load(path))
        self.policy = from_plain({**RULES, **rules}, "the test's policy")
        self.now, self.jump, self.step = 0, timedelta(0), 0
        self.prices = prices
        rows = "".join(f"{(T0 + timedelta(seconds=at)).isoformat()},z,1,{usd}\n" for at, usd in prices)
        (folder / "prices.csv").write_text(f"time,zone,available,usd_per_hour\n{rows}2027-01-01T00:00:00Z,z,1,1\n")
        self.ledger = self.run.open_ledger()
        self.state, self.trains, self.billed = "running", True, Decimal(0)
        self.due: list[tuple[int, Callable[[], None]]] = []
        self.saves, self.copies, self.api, self.stops = True, True, True, True
        self.stop_calls = 0
        self.events: dict[int, Callable[[World], None]] = {}
        self.ledger.append("allocation", {
            "allocation": "1", "event": "began", "provider": "cloud", "zone": "z", "machine": None, "gpus": 8,
            "usd_per_machine_hour": None, "host": D, "time": T0.isoformat(),
        })  # fmt: skip
        self.ledger.append("start", {
            "segment": 1, "mode": "scratch", "step": 0,
            "resolved": {"checkpoint": {"mirror": {"url": "m", "every": 1, "verify": "readback"}}},
        })  # fmt: skip

    def price(self) -> Decimal:
        return Decimal(([usd for at, usd in self.prices if at <= self.now] or ["10"])[-1])

    def wall(self) -> datetime:
        return T0 + timedelta(seconds=self.now) + self.jump

    def sleep(self, seconds: float) -> None:
        end = self.now + max(TICK, round(seconds / TICK) * TICK)
        while self.now < end:
            self.now += TICK
            if self.state != "stopped":
                self.billed += self.price() * TICK / 3600
            if event := self.events.pop(self.now, None):
                event(self)
            for one in [one for one in self.due if one[0] <= self.now]:
                self.due.remove(one)
                one[1]()
            self._train()

    def _train(self) -> None:
        for receipt in self.ledger.others():
            if receipt.kind == "guard" and (receipt.body["action"], receipt.body.get("state")) == ("save", "asked"):
                self.due.append((self.now + 10, self._save))
            if receipt.kind == "hold":
                self.due.append((self.now + 10, self._leave))
        if self.trains:
            with self.run.metrics.open("a") as file:
                time = (T0 + timedelta(seconds=self.now)).isoformat()
                line = {"update": self.step, "segment": 1, "time": time, "loss": 4.0, "seconds": float(TICK),
                        "order_digest": "d"}  # fmt: skip
                file.write(json.dumps(line) + "\n")
            self.step += 1

    def _save(self) -> None:
        if not (self.saves and self.trains):
            return
        manifest = "sha256:" + f"{self.now:064x}"
        self.ledger.append("checkpoint.saved", {
            "segment": 1, "step": self.step, "checkpoint": "full", "folder": f"checkpoints/{self.step}",
            "manifest_sha256": manifest, "state_sha256": D, "weights_sha256": manifest, "order_digest": D,
            "bytes": 1000,
        })  # fmt: skip

        def copied() -> None:
            if self.copies:
                self.ledger.append("checkpoint.mirrored", {
                    "manifest_sha256": manifest, "mirror": D, "verify": "readback", "bytes": 1000,
                })  # fmt: skip

        self.due.append((self.now + 15, copied))

    def _leave(self) -> None:
        if self.trains:
            self._save()
            self.trains = False
            self.ledger.append("interrupted", {"segment": 1, "step": self.step, "cause": "guard", "order_digest": D})

    def look(self) -> Listing:
        if not self.api:
            return Listing("unknown", reason="no answer")
        return Listing("stopped", Decimal(0)) if self.state == "stopped" else Listing("running", self.price())

    def stop(self) -> str | None:
        self.stop_calls += 1
        if not self.api:
            return "no answer"

        def stopped() -> None:
            self.state, self.trains = "stopped", False

        if self.stops:
            self.due.append((self.now + 20, stopped))
        return None

    def guard(self, left: int | None = None) -> Guard:
        journal = Mortal(self.run)
        guard = Guard(self.site(journal))
        journal.left = left
        return guard

    def site(self, journal: Any, **more: Any) -> Site:
        access = Access("fake", CAPABILITIES["runpod"], self.look, self.stop)
        clock = Clock(self.wall, lambda: float(self.now), self.sleep)
        return Site(self.run, self.policy, self.folder, journal, access, clock, {}, **more)

    def kept(self, until: int, guard: Guard | None = None) -> Guard:
        """Guard until then."""
        guard = guard or self.guard()
        while self.now < until:
            if self.state == "stopped" and self.steps()[-1:] == [("alarm", "done")]:
                self.now = until
                break
            *_, pending = guard.look()
            guard.sleep(30 if pending else 60)
        return guard

    def receipts(self, kind: str) -> list[Receipt]:
        return [one for one in OnNode(RunFolder(self.run.path)).receipts()[0] if one.kind == kind]

    def steps(self) -> list[tuple[str, str]]:
        return [
            (one.body["action"], one.body["state"])
            for one in self.receipts("guard")
            if one.body.get("step") is not None
        ]

    def alarms(self) -> set[tuple[str, str]]:
        return {(one.body["alarm"], one.body["about"]) for one in self.receipts("alarm")}
