"""Where prices come from: a contract, a trace, a program, SkyPilot's catalogue, RunPod's HTTP API.

Each gives a `Reading` or a `NoReading`; nothing that a provider answers, or fails to answer, raises. One attempt a
call: the guard asks again at its next interval. It judges nothing: see `prices.judge`.
"""

from __future__ import annotations

import csv
import http.client
import io
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from assay.errors import AssayError
from assay.files.digest import canonical, digest
from assay.files.reading import inside, parse_json, read_bytes
from assay.guard.policy import Command, CsvTrace, Fixed, Policy, PriceSource, Runpod, SkypilotCatalogue
from assay.guard.prices import FIXED, NoReading, Reading, judge, moment, own, read
from assay.recipe.fields import short

LARGEST_ANSWER = 1 << 20
LARGEST_FILE = 256 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NOT_BILLED = ("EXITED", "TERMINATED", "ERROR")


def current(
    policy: Policy,
    folder: Path,
    previous: Sequence[Reading],
    now: datetime,
    environ: Mapping[str, str] | None = None,
) -> Reading | NoReading:
    """The price now by the policy's first source; the others are asked at its first and when it jumped: they confirm.

    `folder` is the policy's own, from which its paths count; `previous` are valid readings, the newest last;
    `environ` (None: this process's) holds a provider's key.
    """
    if not policy.prices:
        return NoReading("the policy names no price source (prices)", "none", now)
    lead, *others = policy.prices
    candidate = ask(lead, policy, folder, now, environ)
    found = judge(previous, candidate, policy, now)
    if isinstance(candidate, Reading) and others and (isinstance(found, NoReading) or own(previous, candidate) is None):
        found = judge(previous, candidate, policy, now, [ask(one, policy, folder, now, environ) for one in others])
    return found


def ask(
    source: PriceSource, policy: Policy, folder: Path, now: datetime, environ: Mapping[str, str] | None = None
) -> Reading | NoReading:
    """What one source says, not yet judged."""
    if source.fixed is not None:
        return _fixed(source.fixed, policy, now)
    if source.csv is not None:
        return _trace(source.csv, policy, folder, now)
    if source.command is not None:
        return _command(source.command, policy, folder, now)
    if source.skypilot is not None:
        return _catalogue(source.skypilot, policy, folder, now)
    assert source.runpod is not None  # exactly one is given
    return _runpod(source.runpod, policy, now, os.environ if environ is None else environ)


def _fixed(source: Fixed, policy: Policy, now: datetime) -> Reading | NoReading:
    return read(
        source.value, unit=source.unit, currency=source.currency, source=FIXED, fetched=now,
        gpus=policy.machine.gpus, rates=policy.rates, raw=format(source.value, "f").encode(),
    )  # fmt: skip


def _trace(source: CsvTrace, policy: Policy, folder: Path, now: datetime) -> Reading | NoReading:
    """The zone's last row that is not after `now`; a row stands until the next, the file's last time ends the trace."""
    name = f"csv {source.path} {source.zone}"
    try:
        raw = _file(folder, source.path, "a price trace")
        rows = _rows(raw, ("time", "zone", "usd_per_hour"), name)
        times = [moment(row["time"]) for row in rows]
    except (AssayError, ValueError) as fault:
        return NoReading(str(fault), name, now)
    dated = [(at, row) for row, at in zip(rows, times, strict=True) if row["zone"] == source.zone and at <= now]
    past = [row for _, row in sorted(dated, key=lambda one: one[0])]
    if not past:
        return NoReading(f"{source.path} states nothing of zone {source.zone} up to this time", name, now, digest(raw))
    if max(times) < now:
        return NoReading(f"{source.path} ends at {max(times).isoformat()}", name, now, digest(raw))
    return read(
        past[-1]["usd_per_hour"], unit="machine-hour", currency="USD", source=name, fetched=now,
        gpus=policy.machine.gpus, rates=policy.rates, raw=raw,
    )  # fmt: skip


def _command(source: Command, policy: Policy, folder: Path, now: datetime) -> Reading | NoReading:
    """A program's `{"value", "unit", "currency"}`, and `valid` (RFC 3339) and `gpus` where it knows them."""
    name = f"command {Path(source.argv[0]).name} {digest(canonical(list(source.argv)))[7:15]}"  # one, told from others
    try:
        done = subprocess.run(
            source.argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, check=False,
            timeout=source.timeout_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return NoReading(f"it did not end within {source.timeout_seconds} s", name, now)
    except (OSError, ValueError) as fault:
        return NoReading(f"it cannot be started: {getattr(fault, 'strerror', None) or fault}", name, now)
    raw = done.stdout
    if done.returncode != 0:
        return NoReading(f"it ended with code {done.returncode}", name, now, digest(raw))
    try:
        said = _object(raw, "its output")
        valid = None if said.get("valid") is None else moment(said["valid"])
    except (AssayError, ValueError) as fault:
        return NoReading(str(fault), name, now, digest(raw))
    if said.get("gpus") not in (None, policy.machine.gpus):
        return NoReading(_other_machine(said["gpus"], policy), name, now, digest(raw))
    return read(
        said.get("value"), unit=said.get("unit"), currency=said.get("currency"), source=name, fetched=now,
        gpus=policy.machine.gpus, rates=policy.rates, raw=raw, valid=valid,
    )  # fmt: skip


def _catalogue(source: SkypilotCatalogue, policy: Policy, folder: Path, now: datetime) -> Reading | NoReading:
    """A row of `vms.csv` (schema v5 to v8): `Price` or `SpotPrice`, US dollars per hour of the whole instance.

    Its time is the file's: what stands there was true when the file was written. Of several rows (zones) the dearest
    counts. On GCP, rows without `InstanceType` price accelerators alone; they never match.
    """
    name = f"skypilot catalogue {source.instance}"
    column = "SpotPrice" if source.spot else "Price"
    try:
        raw = _file(folder, source.path, "SkyPilot's catalogue")
        written = datetime.fromtimestamp((folder / source.path).stat().st_mtime, now.tzinfo)
        rows = _rows(raw, ("InstanceType", "Region", column), name)
    except (AssayError, ValueError, OverflowError, OSError) as fault:  # of a time that no calendar has, too
        return NoReading(str(fault), name, now)
    sha256 = digest(raw)
    found = [
        row
        for row in rows
        if row["InstanceType"] == source.instance
        and source.region in (None, row["Region"])
        and source.zone in (None, row.get("AvailabilityZone"))
    ]
    if not found:
        return NoReading(f"{source.path} has no row of {source.instance} there", name, now, sha256)
    counts = {row.get("AcceleratorCount") for row in found} - {None, ""}
    if any(_count(one) != policy.machine.gpus for one in counts):
        return NoReading(_other_machine(", ".join(sorted(map(str, counts))), policy), name, now, sha256)
    readings = [
        read(
            row[column], unit="machine-hour", currency="USD", source=name, fetched=now, gpus=policy.machine.gpus,
            rates=policy.rates, raw=raw, valid=written, catalogue=True,
        )
        for row in found
    ]  # fmt: skip
    for one in readings:
        if isinstance(one, NoReading):
            return one
    return max((one for one in readings if isinstance(one, Reading)), key=lambda one: one.value)


def _runpod(source: Runpod, policy: Policy, now: datetime, environ: Mapping[str, str]) -> Reading | NoReading:
    """RunPod's REST API v2 as documented in August 2026 (its v1 is deprecated); not yet met by this code.

    `GET /v2/pods/{id}` states `cost`: US dollars per hour of the pod, 0.0 when it is EXITED or TERMINATED.
    `GET /v2/catalog/gpus/{id}` states `price.secure` and `.community`: list prices of a single GPU per hour.
    """
    what, path = ("pod", f"/v2/pods/{quote(source.pod, safe='')}") if source.pod else (
        "gpu", f"/v2/catalog/gpus/{quote(source.gpu or '', safe='')}"
    )  # fmt: skip
    name = f"runpod {what}"
    key = environ.get(source.key_variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key or not key:  # a library's fault would quote the key
        return NoReading(f"{source.key_variable} holds no key; RunPod's API wants one", name, now)
    answer = call(source.url.rstrip("/") + path, key, source.timeout_seconds)
    if isinstance(answer, str):
        return NoReading(answer, name, now)
    sha256 = digest(answer)
    try:
        said = _object(answer, "RunPod's answer")
    except AssayError as fault:
        return NoReading(str(fault), name, now, sha256)
    if said.get("id") != (source.pod or source.gpu):
        return NoReading(f"the answer is about {short(said.get('id'))}", name, now, sha256)
    if what == "gpu":
        prices = said.get("price")
        stated = prices.get(source.cloud) if isinstance(prices, dict) else None
        return read(
            stated, unit="gpu-hour", currency="USD", source=f"{name} {source.cloud}", fetched=now,
            gpus=policy.machine.gpus, rates=policy.rates, raw=answer, catalogue=True,
        )  # fmt: skip
    if said.get("status") in _NOT_BILLED:
        return NoReading(f"the pod is {said['status']}: its GPUs are not billed", name, now, sha256)
    gpu = said.get("gpu")
    count = gpu.get("count") if isinstance(gpu, dict) else None
    if count != policy.machine.gpus:
        return NoReading(_other_machine(count, policy), name, now, sha256)
    return read(
        said.get("cost"), unit="machine-hour", currency="USD", source=name, fetched=now, gpus=policy.machine.gpus,
        rates=policy.rates, raw=answer,
    )  # fmt: skip


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is no answer: urllib would hand the key to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


def call(url: str, key: str, timeout: float, method: str = "GET") -> bytes | str:
    """The answer's bytes, or in words why there is none. The key travels over https, or to this machine, alone."""
    try:
        parts = urlsplit(url)
    except ValueError as fault:
        return f"the address cannot be read: {fault}"
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return f"the address has the scheme {parts.scheme!r}; https is expected"
    headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
    wanted = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310
    try:
        with urllib.request.build_opener(_NoRedirect).open(wanted, timeout=timeout) as answer:
            raw: bytes = answer.read(LARGEST_ANSWER + 1)
            missing = getattr(answer, "length", None) if len(raw) <= LARGEST_ANSWER else None
    except urllib.error.HTTPError as fault:
        after = fault.headers.get("Retry-After") if fault.headers else None
        fault.close()
        return f"HTTP status {fault.code}" + (f", asks to wait {after[:20]} s" if after else "")
    except (OSError, ValueError, http.client.HTTPException) as fault:  # URLError and time-outs are OSErrors
        return f"no answer: {getattr(fault, 'reason', None) or fault}"
    if missing:
        return f"no answer: it was cut, {missing:,} bytes are missing"
    return raw if len(raw) <= LARGEST_ANSWER else f"the answer has more than {LARGEST_ANSWER:,} bytes"


def _file(folder: Path, relative: str, what: str) -> bytes:
    try:
        return read_bytes(inside(folder, relative, "the policy"), what, LARGEST_FILE)
    except AssayError as fault:
        raise AssayError(str(fault).replace(f"{folder}{os.sep}", "")) from None  # reasons stand in receipts: no folders


def _object(raw: bytes, what: str) -> dict[str, Any]:
    if len(raw) > LARGEST_ANSWER:
        _refuse(f"{what} has {len(raw):,} bytes; {LARGEST_ANSWER:,} are the most")
    said = parse_json(raw, what)
    if not isinstance(said, dict):
        _refuse(f"{what} is not a JSON object")
    return dict(said)


def _rows(raw: bytes, columns: tuple[str, ...], where: str) -> list[dict[str, str]]:
    """The rows of a CSV file with a header, every named column in each."""
    try:
        reader = csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True)
        names = reader.fieldnames or []
        missing = [column for column in columns if column not in names]
        if missing:
            _refuse(f"{where}: the column {missing[0]} is missing")
        rows = [row for row in reader if any(row.values())]
    except (UnicodeDecodeError, csv.Error) as fault:
        _refuse(f"{where} is not CSV in UTF-8: {fault}")
    short = next((number for number, row in enumerate(rows, 2) if any(row[name] is None for name in columns)), None)
    if short is not None:
        _refuse(f"{where}, row {short} has too few columns")
    return rows


def _count(stated: object) -> float | None:
    try:
        return float(str(stated))
    except ValueError:
        return None


def _other_machine(count: object, policy: Policy) -> str:
    said = count[:60] if isinstance(count, str) else short(count)
    return f"it is the price of a machine with {said} GPUs; machine.gpus is {policy.machine.gpus}"


def _refuse(reason: str) -> NoReturn:
    raise AssayError(reason)
