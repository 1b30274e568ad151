"""How each provider stops a machine and keeps its disk, and how it is asked whether billing has ended.

A table of what each can do, and plain functions: `look`, `stop`, `start`. Nothing that a provider answers, or fails to
answer, raises: what went wrong is said in words. One attempt a call; the guard's loop asks again.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from assay.errors import AssayError, InputError
from assay.files.digest import digest
from assay.files.reading import parse_json
from assay.guard.adapters import call
from assay.guard.policy import Argvs, Policy, RunpodPod, SkypilotCluster
from assay.run.folder import RunFolder
from assay.run.owner import is_owned, owner_process

State = Literal["running", "stopped", "gone", "unknown"]
SKY = "ASSAY_SKY"  # as the launcher's: the `sky` command, where it lies in an environment of its own


@dataclass(frozen=True)
class Listing:
    """What the provider says of the machine. `usd_per_hour`: what it is billed for GPUs now; None: it states no price.

    `unknown` has a `reason`; `raw_sha256` is the digest of what was answered.
    """

    state: State
    usd_per_hour: Decimal | None = None
    reason: str = ""
    raw_sha256: str | None = None

    @property
    def billing_ended(self) -> bool:
        """Whether listing and, where the provider states one, price prove that GPUs are billed no more."""
        return self.state in ("stopped", "gone") and not self.usd_per_hour


@dataclass(frozen=True)
class Capability:
    """One line of the table: how a stop keeps the disk, whether a price proves the end, whether it can start again."""

    stop: str
    keeps_disk: bool
    price_proves: bool
    starts: bool


CAPABILITIES: dict[str, Capability] = {
    "local": Capability("the launcher and the trainer end; the machine is not touched", True, False, False),
    "command": Capability("the policy's program, which must keep the disk", True, True, True),
    "runpod": Capability("POST /v1/pods/ID/stop: the volume stays, the container disk does not", True, True, True),
    "skypilot": Capability("sky stop; the cluster's disks stay", True, False, True),
}


@dataclass(frozen=True)
class Access:
    """A machine within reach. `stop` and `start` return None, or in words why they failed; they may be repeated."""

    name: str
    can: Capability
    look: Callable[[], Listing]
    stop: Callable[[], str | None]
    start: Callable[[], str | None] | None = None


def access(policy: Policy, run: RunFolder, folder: Path, environ: Mapping[str, str] | None = None) -> Access:
    """The machine that the policy names; `folder` is the policy's own, `environ` (None: this process's) holds keys.

    InputError when the policy does not say how it is reached.
    """
    through, environ = policy.machine.through, os.environ if environ is None else environ
    if through is None and policy.machine.provider != "local":
        raise InputError(
            f"policy {policy.name}: machine.provider is {policy.machine.provider}, and machine.through does not say "
            "how to stop it; give command, runpod, skypilot or local"
        )
    if through is not None and through.command is not None:
        argvs = through.command
        begin = None if argvs.start is None else partial(_program, argvs.start, folder, argvs.timeout_seconds)
        return Access(
            "command", CAPABILITIES["command"], partial(_listed, argvs, folder),
            partial(_program, argvs.stop, folder, argvs.timeout_seconds), begin,
        )  # fmt: skip
    if through is not None and through.runpod is not None:
        pod = through.runpod
        return Access(
            "runpod", CAPABILITIES["runpod"], partial(_pod, pod, environ), partial(_pod_act, pod, environ, "stop"),
            partial(_pod_act, pod, environ, "start"),
        )  # fmt: skip
    if through is not None and through.skypilot is not None:
        sky = through.skypilot
        words = [environ.get(SKY, "sky")]
        return Access(
            "skypilot", CAPABILITIES["skypilot"], partial(_cluster, sky, words[0], folder),
            partial(_program, [*words, "stop", "--yes", sky.cluster], folder, sky.timeout_seconds),
            partial(_program, [*words, "start", "--yes", sky.cluster], folder, sky.timeout_seconds),
        )  # fmt: skip
    return Access("local", CAPABILITIES["local"], partial(_here, run), partial(_leave, run))


def _here(run: RunFolder) -> Listing:
    """Whether a launcher or a trainer works on the run on this machine."""
    return Listing("running" if is_owned(run) or launched(run) else "stopped")


def launched(run: RunFolder) -> bool:
    """True while a launcher on this machine keeps the run."""
    path = run.path.with_name(f"{run.path.name}.launch")
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _leave(run: RunFolder) -> str | None:
    """Ask a trainer that is still there to leave; its launcher follows, since a hold stands."""
    process = owner_process(run)
    if process is None:
        return None
    try:
        os.kill(process, signal.SIGTERM)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "the trainer belongs to another user"
    return None


def _run(argv: tuple[str, ...] | list[str], folder: Path, timeout: float) -> bytes | str:
    """What a program printed, or in words why it failed."""
    name = Path(argv[0]).name
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, check=False, timeout=timeout,
            env={"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **os.environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{name} did not end within {timeout:g} s"
    except (OSError, ValueError) as fault:
        return f"{name} cannot be started: {getattr(fault, 'strerror', None) or fault}"
    return done.stdout if done.returncode == 0 else f"{name} ended with code {done.returncode}"


def _program(argv: tuple[str, ...] | list[str], folder: Path, timeout: float) -> str | None:
    done = _run(argv, folder, timeout)
    return done if isinstance(done, str) else None


def _listed(argvs: Argvs, folder: Path) -> Listing:
    raw = _run(argvs.list, folder, argvs.timeout_seconds)
    if isinstance(raw, str):
        return Listing("unknown", reason=raw)
    said = _object(raw)
    state = said.get("state")
    if state not in ("running", "stopped", "gone"):
        return Listing("unknown", reason=f"its state is {str(state)[:40]!r}", raw_sha256=digest(raw))
    return _with_price(state, said.get("usd_per_hour"), raw)


def _with_price(state: State, stated: object, raw: bytes) -> Listing:
    if stated is None:
        return Listing(state, raw_sha256=digest(raw))
    try:
        price = Decimal(str(stated))
    except ArithmeticError:
        price = Decimal("NaN")
    if isinstance(stated, bool) or not price.is_finite() or price < 0:
        return Listing("unknown", reason=f"its price is {str(stated)[:40]!r}", raw_sha256=digest(raw))
    return Listing(state, price, raw_sha256=digest(raw))


def _key(pod: RunpodPod, environ: Mapping[str, str]) -> str | None:
    key = environ.get(pod.key_variable, "").strip()
    return key if key and key.isascii() and key.isprintable() and " " not in key else None


def _pod(pod: RunpodPod, environ: Mapping[str, str]) -> Listing:
    """`GET /v2/pods/{id}`: `status` and `cost` (0 when it is EXITED or TERMINATED), as documented in August 2026."""
    if (key := _key(pod, environ)) is None:
        return Listing("unknown", reason=f"{pod.key_variable} holds no key; RunPod's API wants one")
    raw = call(f"{pod.url.rstrip('/')}/v2/pods/{quote(pod.pod, safe='')}", key, pod.timeout_seconds)
    if isinstance(raw, str):
        gone = raw.startswith("HTTP status 404")
        return Listing("gone") if gone else Listing("unknown", reason=raw)
    said = _object(raw)
    if said.get("id") != pod.pod:
        return Listing("unknown", reason="the answer is about another pod", raw_sha256=digest(raw))
    states: dict[object, State] = {"EXITED": "stopped", "TERMINATED": "gone"}
    state = states.get(said.get("status"), "running")  # of what is not known to be over, the bill goes on
    return _with_price(state, said.get("cost"), raw)


def _pod_act(pod: RunpodPod, environ: Mapping[str, str], what: str) -> str | None:
    """`POST /v1/pods/{id}/stop` or `/start`, as documented; a stop keeps the pod's volume."""
    if (key := _key(pod, environ)) is None:
        return f"{pod.key_variable} holds no key; RunPod's API wants one"
    url = f"{pod.action_url.rstrip('/')}/v1/pods/{quote(pod.pod, safe='')}/{what}"
    answer = call(url, key, pod.timeout_seconds, "POST")
    return answer if isinstance(answer, str) else None


def _cluster(sky: SkypilotCluster, command: str, folder: Path) -> Listing:
    """`sky status --refresh`, which asks the cloud itself; SkyPilot states no bill."""
    raw = _run([command, "status", "--refresh", "--output", "json", sky.cluster], folder, sky.timeout_seconds)
    if isinstance(raw, str):
        return Listing("unknown", reason=raw)
    try:
        said = json.loads(raw[raw.find(b"[") :] or b"[]")
    except ValueError:
        said = None
    if not isinstance(said, list) or not all(isinstance(one, dict) for one in said):
        return Listing("unknown", reason="sky status printed no list of clusters", raw_sha256=digest(raw))
    mine = [one for one in said if one.get("name") == sky.cluster]
    if not mine:
        return Listing("gone", raw_sha256=digest(raw))
    stopped = str(mine[0].get("status")).rsplit(".", 1)[-1] == "STOPPED"
    return Listing("stopped" if stopped else "running", raw_sha256=digest(raw))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        said = parse_json(raw, "the answer")
    except AssayError:
        return {}
    return said if isinstance(said, dict) else {}
