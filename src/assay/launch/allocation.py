"""Allocations in a run's ledger: a receipt when a machine was taken, one when it was given back, and what they tell.

The expense report counts from them, and the memory of failed places. Hosts are salted digests; a price that nobody
stated is null. It takes no machine and gives none back.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from assay.launch.coming_back import CONTROL, MACHINE, PREEMPTED, End, Failure
from assay.launch.description import Launch
from assay.ledger.ledger import Receipt, now, read
from assay.run.folder import RunFolder, salted
from assay.run.status import reported

KIND = "allocation"
BEGAN, ENDED = "began", "ended"


@dataclass(frozen=True)
class Here:
    """The machine that this process runs on, as far as it is known; `host` never enters a receipt as it is."""

    provider: str
    zone: str | None
    machine: str | None
    gpus: int | None
    usd_per_machine_hour: str | None
    host: str
    where: str  # for people, and for whoever takes another place: cloud/region/zone as far as they are known


def here(launch: Launch) -> Here:
    """What the launch file states; where it is silent, what SkyPilot or Slurm say in the environment."""
    cluster = _cluster(os.environ.get("SKYPILOT_CLUSTER_INFO"))
    provider = launch.provider or cluster.get("cloud") or ("slurm" if "SLURM_JOB_ID" in os.environ else "local")
    zone = launch.zone or cluster.get("zone") or cluster.get("region") or os.environ.get("SLURM_JOB_PARTITION")
    host = os.environ.get("SLURMD_NODENAME") or platform.node()
    levels = dict.fromkeys([provider, *(cluster.get(level) for level in ("region", "zone")), zone])
    where = "/".join(level for level in levels if level)
    return Here(provider, zone, launch.machine, launch.gpus, launch.usd_per_machine_hour, host, where)


def _cluster(text: str | None) -> dict[str, str]:
    """SkyPilot's variable: a JSON object with `cloud`, `region` and `zone`."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    found = {key: value[key] for key in ("cloud", "region", "zone") if isinstance(value.get(key), str)}
    return found | ({"cloud": found["cloud"].lower()} if "cloud" in found else {})


def begin(run: RunFolder, place: Here, time: str) -> str:
    """The receipt that the machine was taken at `time`; returns the allocation's name: its number, as text.

    An earlier allocation that never said its end, because its machine went away, gets it first: at the last sign of
    life, marked as an estimate.
    """
    past = [receipt for receipt in read(run.ledger) if receipt.kind == KIND]
    ledger = run.open_ledger()
    for lost in open_ones(past):
        last = max(stamp for stamp in (reported(run.metrics).time, _last_but(run, KIND), lost.body["time"]) if stamp)
        ledger.append(KIND, lost.body | {"event": ENDED, "time": min(last, time), "estimated": True, "why": PREEMPTED})
    name = str(1 + max((int(receipt.body["allocation"]) for receipt in past), default=0))
    ledger.append(KIND, {"allocation": name, "event": BEGAN, **_facts(run, place), "time": time})
    return name


def end(run: RunFolder, place: Here, name: str, last: End, restarts: int, why: str | None) -> None:
    """The receipt that the machine is given back, with how the last training process ended."""
    body = {"allocation": name, "event": ENDED, **_facts(run, place), "time": now(), "code": last.code}
    more = {"cause": last.cause, "step": last.step, "step_exact": last.exact, "saved": last.saved,
            "restarts": restarts, "why": why}  # fmt: skip
    run.open_ledger().append(KIND, body | more)


def open_ones(receipts: list[Receipt]) -> list[Receipt]:
    """The receipts `began` of allocations that have no `ended`, oldest first."""
    ended = {receipt.body["allocation"] for receipt in receipts if receipt.body["event"] == ENDED}
    return [one for one in receipts if one.body["event"] == BEGAN and one.body["allocation"] not in ended]


def failures(ledger: Path) -> list[Failure]:
    """Hosts (as salted digests) and zones (as `provider/zone`) whose allocations ended by a fault of the place."""
    found = []
    for receipt in read(ledger):
        body = receipt.body
        if receipt.kind == KIND and body["event"] == ENDED and body.get("why") in (CONTROL, MACHINE, PREEMPTED):
            time = datetime.fromisoformat(body["time"])
            found.append(Failure(body["host"], body["why"], time))
            if body["zone"] is not None and body["why"] == PREEMPTED:
                found.append(Failure(f"{body['provider']}/{body['zone']}", body["why"], time))
    return found


def past_ends(ledger: Path) -> list[End]:
    """How allocations ended that said so, oldest first: what fails again on another machine is the same failure."""
    ended = [one.body for one in read(ledger) if one.kind == KIND and one.body["event"] == ENDED and "code" in one.body]
    return [End(one["code"], one["cause"], one["step"], one["saved"], one.get("step_exact", True)) for one in ended]


def control_failed(ledger: Path, since: int) -> bool:
    """Whether the newest control after receipt `since` failed."""
    controls = [
        receipt.body.get("passed") for receipt in read(ledger) if receipt.kind == "control" and receipt.seq > since
    ]
    return bool(controls) and not controls[-1]


def _facts(run: RunFolder, place: Here) -> dict[str, Any]:
    return {
        "provider": place.provider,
        "zone": place.zone,
        "machine": place.machine,
        "gpus": place.gpus,
        "usd_per_machine_hour": place.usd_per_machine_hour,
        "host": salted(run, place.host),
    }


def _last_but(run: RunFolder, kind: str) -> str | None:
    """The time of the last receipt of another kind."""
    times = [receipt.time for receipt in read(run.ledger) if receipt.kind != kind]
    return times[-1] if times else None
