"""How machines are listed and stopped: programs, `sky`, and RunPod's documented HTTP API on a local server."""

from __future__ import annotations

import json
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from assay.errors import InputError
from assay.guard.policy import from_plain
from assay.guard.providers import Access, access
from assay.run.folder import RunFolder


def through(folder: Path, environ: dict[str, str] | None = None, **how: Any) -> Access:
    machine = {"gpus": 8, "provider": "cloud", **({"through": how} if how else {})}
    return access(
        from_plain({"name": "tests", "machine": machine}, "a policy"), RunFolder(folder), folder, environ or {}
    )


def test_a_pod_is_stopped_over_http_and_its_status_and_cost_prove_the_end(tmp_path: Path) -> None:
    pod: dict[str, Any] = {"id": "p1", "status": "RUNNING", "cost": 23.9}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            known = self.headers["Authorization"] == "Bearer key"
            if known and (self.command, self.path) == ("POST", "/v1/pods/p1/stop"):
                pod.update(status="EXITED", cost=0.0)
            body = json.dumps(pod).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        how = {"runpod": {"pod": "p1", "url": url, "action_url": url}}
        machine = through(tmp_path, {"RUNPOD_API_KEY": "key"}, **how)
        assert (machine.look().state, machine.look().usd_per_hour) == ("running", Decimal("23.9"))
        assert through(tmp_path, {"RUNPOD_API_KEY": "other"}, **how).stop() == "HTTP status 401"
        assert not machine.look().billing_ended
        assert machine.stop() is None
        assert machine.look().billing_ended
        pod["cost"] = 1.0
        assert not machine.look().billing_ended, "a price speaks against the listing"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("said", "state", "ended"), [
    ('{"state": "stopped"}', "stopped", True), ('{"state": "stopped", "usd_per_hour": "1"}', "stopped", False),
    ('{"state": "asleep"}', "unknown", False), ("no JSON", "unknown", False),
    ('{"state": "gone", "usd_per_hour": "-1"}', "unknown", False),
])  # fmt: skip
def test_what_a_program_lists_is_believed_only_where_it_is_said(
    tmp_path: Path, said: str, state: str, ended: bool
) -> None:
    machine = through(tmp_path, command={"list": ["echo", said], "stop": ["false"]})
    listing = machine.look()
    assert (listing.state, listing.billing_ended) == (state, ended)
    assert machine.stop() == "false ended with code 1"
    assert machine.start is None


def test_a_cluster_is_what_sky_status_says(tmp_path: Path) -> None:
    sky = tmp_path / "sky"
    sky.write_text('#!/bin/sh\necho \'[{"name": "mine", "status": "STOPPED"}, {"name": "up", "status": "UP"}]\'\n')
    sky.chmod(0o755)
    states = {
        name: through(tmp_path, {"ASSAY_SKY": str(sky)}, skypilot={"cluster": name}).look().state
        for name in ("mine", "up", "none")
    }
    assert states == {"mine": "stopped", "up": "running", "none": "gone"}


def test_a_machine_that_nobody_says_how_to_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"machine\.through"):
        through(tmp_path)
