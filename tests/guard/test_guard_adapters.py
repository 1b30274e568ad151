"""Every adapter gives a reading or says why not; no answer of a provider raises, and the key stays where it belongs."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from assay.errors import InputError
from assay.files.digest import canonical, digest
from assay.guard import traces
from assay.guard.adapters import ask, current
from assay.guard.policy import Policy, from_plain
from assay.guard.prices import NoReading, Reading

NOW = datetime(2025, 10, 10, 12, 0, tzinfo=UTC)
KEY = "rpa_secret"


def policy(*sources: dict[str, Any], **more: Any) -> Policy:
    return from_plain({"name": "p", "machine": {"gpus": 8}, "prices": list(sources), **more}, "p")


def asked(source: dict[str, Any], folder: Path, now: datetime = NOW, key: str | None = KEY, **more: Any) -> Any:
    rules = policy(source, **more)
    return ask(rules.prices[0], rules, folder, now, {} if key is None else {"RUNPOD_API_KEY": key})


def reason(found: Reading | NoReading) -> str:
    assert isinstance(found, NoReading), found
    return found.reason


def test_a_fixed_price_is_the_contract_s_in_its_unit_and_currency(tmp_path: Path) -> None:
    assert asked({"fixed": {"value": "2.99", "unit": "gpu-hour"}}, tmp_path).value == Decimal("23.92")
    euro = {"fixed": {"value": "10", "unit": "machine-hour", "currency": "EUR"}}
    assert "currency" in reason(asked(euro, tmp_path))
    rates = {"EUR": {"usd": "1.08", "source": "ECB", "date": "2025-10-10"}}
    assert asked(euro, tmp_path, rates=rates).value == Decimal("10.8")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(
        "time,zone,available,usd_per_hour\n2025-10-10T10:00:00Z,a,1,20.5\n2025-10-10T10:00:00Z,b,1,18\n"
        "2025-10-10T11:30:00Z,a,0,21\n2025-10-10T14:00:00Z,b,1,17\n"
    )
    return tmp_path


def test_a_trace_s_row_stands_until_the_next_one(trace: Path) -> None:
    def at(hour: float, zone: str = "a") -> Any:
        source = {"csv": {"path": "trace.csv", "zone": zone}}
        return asked(source, trace, datetime(2025, 10, 10, tzinfo=UTC) + timedelta(hours=hour))

    assert [at(hour).value for hour in (10, 11.49, 11.5, 13.9)] == [Decimal("20.5"), Decimal("20.5"), 21, 21]
    assert at(13.99, "b").value == 18
    assert "nothing of zone a" in reason(at(9))
    assert "nothing of zone c" in reason(at(12, "c"))
    assert "ends at 2025-10-10T14:00" in reason(at(14.1)), "behind its end a trace says nothing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "column time is missing"),
        (b"time,zone\n", "column usd_per_hour is missing"),
        (b"time,zone,available,usd_per_hour\nyesterday,a,1,3\n", "yesterday"),
        (b"time,zone,available,usd_per_hour\n2025-10-10T10:00:00,a,1,3\n", "without its offset"),
        (b"time,zone,available,usd_per_hour\n2025-10-10T10:00:00Z,a\n", "too few columns"),
        (b"\xff\xfe,zone\n", "not CSV in UTF-8"),
        (
            b"time,zone,available,usd_per_hour\n2025-10-10T10:00:00Z,a,1,0\n2025-10-11T10:00:00Z,a,1,0\n",
            "costs nothing",
        ),
        (b"time,zone,available,usd_per_hour\n2025-10-10T10:00:00Z,a,1,\n2025-10-11T10:00:00Z,a,1,\n", "no price"),
    ],
)
def test_a_trace_that_is_none_is_no_reading(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "trace.csv").write_bytes(content)
    assert said in reason(asked({"csv": {"path": "trace.csv", "zone": "a"}}, tmp_path))


def test_a_missing_file_is_no_reading_and_names_no_folder(tmp_path: Path) -> None:
    found = reason(asked({"csv": {"path": "trace.csv", "zone": "a"}}, tmp_path))
    assert "trace.csv does not exist" in found
    assert str(tmp_path) not in found, "reasons stand in receipts"


def program(folder: Path, text: str) -> dict[str, Any]:
    (folder / "price.py").write_text(text)
    return {"command": {"argv": [sys.executable, "price.py"], "timeout_seconds": 20}}


def printing(folder: Path, **said: Any) -> dict[str, Any]:
    return program(folder, f"print({json.dumps(said)!r})")


def test_a_program_s_json_is_a_reading(tmp_path: Path) -> None:
    source = printing(tmp_path, value=2.99, unit="gpu-hour", currency="USD", gpus=8, valid="2025-10-10T13:59:00+02:00")
    found = asked(source, tmp_path)
    assert (found.value, found.stated, found.source) == (
        Decimal("23.92"),
        Decimal("2.99"),
        f"command {Path(sys.executable).name} {digest(canonical([sys.executable, 'price.py']))[7:15]}",
    )
    assert found.valid == datetime(2025, 10, 10, 11, 59, tzinfo=UTC)
    assert found.catalogue is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; print('{}'); sys.exit(3)", "ended with code 3"),
        ("print('NaN')", "not valid JSON"),
        ("print('[1]')", "not a JSON object"),
        ("print('{}')", "no price is stated"),
        ('print(\'{"value": 3, "currency": "USD"}\')', "unit is null"),
        ('print(\'{"value": 3, "unit": "gpu-hour"}\')', "currency is null"),
        ('print(\'{"value": 3, "value": 4}\')', "twice"),
        ('print(\'{"value": 3, "unit": "gpu-hour", "currency": "USD", "gpus": 4}\')', "machine with 4 GPUs"),
        ('print(\'{"value": 3, "unit": "gpu-hour", "currency": "USD", "valid": "now"}\')', "now"),
    ],
)
def test_a_program_that_says_less_is_no_reading(tmp_path: Path, text: str, said: str) -> None:
    assert said in reason(asked(program(tmp_path, text), tmp_path))


def test_a_program_that_is_not_there_or_does_not_end_is_no_reading(tmp_path: Path) -> None:
    missing = reason(asked({"command": {"argv": ["./no-such-program"]}}, tmp_path))
    assert "cannot be started" in missing
    assert str(tmp_path) not in missing
    endless = {"command": {"argv": [sys.executable, "-c", "import threading; threading.Event().wait()"],
                           "timeout_seconds": 1}}  # fmt: skip
    assert "did not end within 1 s" in reason(asked(endless, tmp_path))


CATALOGUE = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,AvailabilityZone
8x_H200_SECURE,H200,8.0,160.0,1440.0,US,,31.92,US-CA-2
8x_H200_SECURE,H200,8.0,160.0,1440.0,US,,31.92,US-GA-2
p5.48xlarge,H100,8.0,192.0,2048.0,us-east-1,21.5,98.32,us-east-1a
p5.48xlarge,H100,8.0,192.0,2048.0,us-east-1,24.25,98.32,us-east-1b
p5.48xlarge,H100,8.0,192.0,2048.0,us-west-2,19,98.32,us-west-2a
p5.4xlarge,H100,1.0,16.0,256.0,us-east-1,3,12.3,us-east-1a
,H100,8.0,,,us-east1,9,30,us-east1-b
"""


def test_skypilot_s_catalogue_is_of_the_whole_instance_and_marked_as_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "vms.csv"
    path.write_text(CATALOGUE)
    os.utime(path, (NOW.timestamp() - 600, NOW.timestamp() - 600))

    def price(instance: str = "p5.48xlarge", **more: Any) -> Any:
        return asked({"skypilot": {"path": "vms.csv", "instance": instance, **more}}, tmp_path)

    found = price(region="us-east-1", zone="us-east-1a")
    assert (found.value, found.catalogue, found.valid) == (Decimal("21.5"), True, NOW - timedelta(seconds=600))
    assert price(region="us-east-1").value == Decimal("24.25"), "of several zones the dearest"
    assert price(spot=False).value == Decimal("98.32")
    assert price("8x_H200_SECURE", spot=False).value == Decimal("31.92")
    assert "no price" in reason(price("8x_H200_SECURE")), "a blank spot price is not a cheap one"
    assert "machine with 1.0 GPUs" in reason(price("p5.4xlarge"))
    assert "no row of p6" in reason(price("p6"))
    assert "no row" in reason(price(region="eu-west-1"))


def test_an_old_catalogue_is_stale_and_never_confirms_a_live_price(tmp_path: Path) -> None:
    path = tmp_path / "vms.csv"
    path.write_text(CATALOGUE)
    os.utime(path, (NOW.timestamp() - 7200, NOW.timestamp() - 7200))
    listed = {"skypilot": {"path": "vms.csv", "instance": "p5.48xlarge", "zone": "us-east-1a"}}
    assert "7,200 s old" in reason(current(policy(listed), tmp_path, [], NOW))
    assert isinstance(current(policy(listed, stale_seconds=7200), tmp_path, [], NOW), Reading)
    live = says(21)
    before = replace(asked(says(5), tmp_path), source=asked(live, tmp_path).source)
    assert "no second source" in reason(current(policy(live, listed, stale_seconds=7200), tmp_path, [before], NOW))


def test_the_first_source_leads_and_the_others_only_confirm(tmp_path: Path, trace: Path) -> None:
    lead = {"csv": {"path": "trace.csv", "zone": "a"}}
    other = printing(tmp_path, value=20, unit="machine-hour", currency="USD")
    cheap = replace(asked({"fixed": {"value": "5", "unit": "machine-hour"}}, tmp_path), source="csv trace.csv a")
    assert current(policy(lead), trace, [], NOW).value == 21  # type: ignore[union-attr]
    assert "no second source" in reason(current(policy(lead), trace, [cheap], NOW))
    assert current(policy(lead, other), trace, [cheap], NOW).value == 21  # type: ignore[union-attr]
    broken = {"csv": {"path": "nothing.csv", "zone": "a"}}
    assert "does not exist" in reason(current(policy(broken, other), trace, [], NOW)), "another source is not the first"
    assert "names no price source" in reason(current(policy(), trace, [], NOW))


class Provider(ThreadingHTTPServer):
    """A server that follows RunPod's documentation of its API v2; `answers` overrides what a path gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.seen: list[tuple[str, str | None]] = []
        self.objects: dict[str, dict[str, Any]] = {
            "/v2/pods/7h9k2m4n6p": {
                "id": "7h9k2m4n6p", "name": "training", "status": "RUNNING", "actions": ["stop", "terminate"],
                "gpu": {"id": "NVIDIA H200", "count": 8}, "cloud": "SECURE", "dataCenterId": "US-KS-2", "cost": 28.72,
                "locked": False, "createdAt": "2026-06-01T12:00:00Z", "startedAt": "2026-06-01T12:02:00Z",
            },
            "/v2/catalog/gpus/NVIDIA H200": {
                "id": "NVIDIA H200", "name": "H200", "pool": None, "manufacturer": "NVIDIA", "memory": 141,
                "secure": True, "community": False, "price": {"secure": 3.59, "community": 0},
                "maxCount": {"secure": 8, "community": 0},
            },
        }  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, headers, content = self.server.answers.get(self.path, (0, {}, b""))
        found = self.server.objects.get(unquote(self.path))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            status, content = 401, b'{"title": "Unauthorized", "status": 401, "detail": "missing bearer token"}'
        elif not status:
            status, content = (
                (200, json.dumps(found).encode()) if found else (404, b'{"title": "Not Found", "status": 404}')
            )
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def serving() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def runpod(serving: Provider) -> Provider:
    serving.answers.clear()
    serving.seen.clear()
    return serving


POD, GPU = {"pod": "7h9k2m4n6p"}, {"gpu": "NVIDIA H200"}


def test_runpod_s_pod_costs_what_it_is_billed_for_the_whole_machine(runpod: Provider, tmp_path: Path) -> None:
    found = asked({"runpod": {**POD, "url": runpod.url}}, tmp_path)
    assert (found.value, found.unit, found.catalogue, found.fetched) == (Decimal("28.72"), "machine-hour", False, NOW)
    assert runpod.seen == [("/v2/pods/7h9k2m4n6p", f"Bearer {KEY}")]


def test_runpod_s_listed_price_is_per_gpu_and_a_catalogue_s(runpod: Provider, tmp_path: Path) -> None:
    found = asked({"runpod": {**GPU, "url": runpod.url + "/"}}, tmp_path)
    assert (found.value, found.stated, found.unit) == (Decimal("28.72"), Decimal("3.59"), "gpu-hour")
    assert found.catalogue
    assert "costs nothing" in reason(asked({"runpod": {**GPU, "url": runpod.url, "cloud": "community"}}, tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cost": 0.0, "status": "EXITED"}, "the pod is EXITED"),
        ({"status": "TERMINATED"}, "the pod is TERMINATED"),
        ({"cost": 0.0}, "costs nothing"),
        ({"cost": None}, "no price"),
        ({"cost": "28.72 $"}, "not a number"),
        ({"gpu": {"id": "NVIDIA H200", "count": 4}}, "machine with 4 GPUs"),
        ({"gpu": None}, "machine with null GPUs"),
        ({"id": "another"}, "about 'another'"),
    ],
)
def test_a_pod_that_does_not_fit_is_no_reading(
    runpod: Provider, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    content = json.dumps(runpod.objects["/v2/pods/7h9k2m4n6p"] | changes).encode()
    runpod.answers["/v2/pods/7h9k2m4n6p"] = (200, {}, content)
    assert said in reason(asked({"runpod": {**POD, "url": runpod.url}}, tmp_path))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((429, {"Retry-After": "12"}, b'{"title": "Too Many Requests", "status": 429}'), "429, asks to wait 12 s"),
        ((500, {}, b"<html>"), "HTTP status 500"),
        ((404, {}, b"{}"), "HTTP status 404"),
        ((302, {"Location": "/v2/elsewhere"}, b""), "HTTP status 302"),
        ((200, {}, b"<html>maintenance</html>"), "not valid JSON"),
        ((200, {}, b"[]"), "not a JSON object"),
        ((200, {}, b'{"id": "7h9k2m4n6p", "cost": NaN}'), "NaN"),
        ((200, {"Content-Length": "900"}, b'{"id"'), "no answer"),
        ((200, {}, b" " * (1 << 20) + b"{}"), "more than 1,048,576 bytes"),
    ],
)
def test_an_answer_that_is_none_is_no_reading(
    runpod: Provider, tmp_path: Path, answer: tuple[int, dict[str, str], bytes], said: str
) -> None:
    runpod.answers["/v2/pods/7h9k2m4n6p"] = answer
    found = reason(asked({"runpod": {**POD, "url": runpod.url, "timeout_seconds": 2}}, tmp_path))
    assert said in found
    assert KEY not in found
    assert len(runpod.seen) == 1, "neither tried again nor led elsewhere"


def test_the_key_is_needed_and_goes_to_no_stranger(runpod: Provider, tmp_path: Path) -> None:
    source = {"runpod": {**POD, "url": runpod.url}}
    assert "RUNPOD_API_KEY holds no key" in reason(asked(source, tmp_path, key=None))
    for wrong in ("", "two words", "line\nbreak", "klíč"):
        found = reason(asked(source, tmp_path, key=wrong))
        assert "holds no key" in found
    assert not runpod.seen
    assert "HTTP status 401" in reason(asked(source, tmp_path, key="another"))
    assert "https is expected" in reason(asked({"runpod": {**POD, "url": "http://prices.example"}}, tmp_path))
    assert "https is expected" in reason(asked({"runpod": {**POD, "url": "file:///etc"}}, tmp_path))


def test_nobody_there_is_no_reading(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as gone:
        port = gone.server_address[1]
    assert "no answer" in reason(asked({"runpod": {**POD, "url": f"http://127.0.0.1:{port}"}}, tmp_path))


def says(price: object, **more: Any) -> dict[str, Any]:
    """A program that prints a machine's price."""
    said = {"value": price, "unit": "machine-hour", "currency": "USD", **more}
    return {"command": {"argv": [sys.executable, "-S", "-c", f"print({json.dumps(said)!r})"]}}


def test_two_programs_of_one_interpreter_confirm_each_other(tmp_path: Path) -> None:
    script = "print(open('p').read())"
    lead = {"command": {"argv": [sys.executable, "-S", "-c", script]}}
    (tmp_path / "p").write_text(json.dumps({"value": 20, "unit": "machine-hour", "currency": "USD"}))
    first = current(policy(lead), tmp_path, [], NOW, {})
    assert isinstance(first, Reading)
    (tmp_path / "p").write_text(json.dumps({"value": 90, "unit": "machine-hour", "currency": "USD"}))
    alone = current(policy(lead), tmp_path, [first], NOW, {})
    assert "no second source" in reason(alone)
    assert alone.unconfirmed == 90
    assert "no second source" in reason(current(policy(lead, lead), tmp_path, [first], NOW, {})), "itself"
    found = current(policy(lead, says(91)), tmp_path, [first], NOW, {})
    assert isinstance(found, Reading)
    assert found.value == 90


def test_a_first_reading_that_another_source_contradicts_is_none(tmp_path: Path) -> None:
    assert current(policy(says(0.01)), tmp_path, [], NOW, {}).value == Decimal("0.01"), "nobody contradicts"
    found = current(policy(says(0.01), says(17)), tmp_path, [], NOW, {})
    assert "it is the first of its source" in reason(found)
    assert found.unconfirmed == 17
    assert isinstance(current(policy(says(16), says(17)), tmp_path, [], NOW, {}), Reading)


def test_a_contract_s_price_is_mended_in_the_policy(tmp_path: Path) -> None:
    wrong, right = ({"fixed": {"value": "2.99", "unit": unit}} for unit in ("machine-hour", "gpu-hour"))
    first = current(policy(wrong), tmp_path, [], NOW)
    found = current(policy(right), tmp_path, [first], NOW)
    assert isinstance(found, Reading)
    assert found.value == Decimal("23.92")
    assert isinstance(current(policy(says(99)), tmp_path, [first], NOW), Reading), "another source is no jump"


@pytest.mark.parametrize("edge", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_at_the_edge_of_the_calendar_is_no_reading(tmp_path: Path, edge: str) -> None:
    assert edge in reason(asked(says(3, valid=edge), tmp_path))
    (tmp_path / "t.csv").write_text(f"time,zone,available,usd_per_hour\n{edge},a,1,3\n")
    assert edge in reason(asked({"csv": {"path": "t.csv", "zone": "a"}}, tmp_path))
    with pytest.raises(InputError, match="is not a time such as"):
        traces.moment(edge, "t.csv")


def test_an_address_that_is_none_is_no_reading(tmp_path: Path) -> None:
    assert "address cannot be read" in reason(asked({"runpod": {"pod": "a", "url": "https://[bad"}}, tmp_path))


def test_a_long_answer_makes_no_long_reason(tmp_path: Path) -> None:
    long = "x" * 900_000
    for said in (
        {"value": 3, "currency": "USD", "unit": long}, {"value": 3, "currency": long, "unit": "gpu-hour"},
        {"value": 3, "gpus": long}, {"value": 3, "valid": long}, {long: 3},
    ):  # fmt: skip
        (tmp_path / "p").write_text(json.dumps(said))
        found = asked({"command": {"argv": [sys.executable, "-S", "-c", "print(open('p').read())"]}}, tmp_path)
        assert len(reason(found)) <= 400
    assert len(NoReading(long, "a", NOW).reason) == 400


def test_a_trace_s_rows_count_in_their_time_not_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "time,zone,available,usd_per_hour\n2025-10-10T11:00:00Z,a,1,30\n2025-10-10T10:00:00Z,a,1,3\n"
        "2025-10-10T13:00:00Z,a,1,30\n"
    )
    assert asked({"csv": {"path": "t.csv", "zone": "a"}}, tmp_path).value == 30
