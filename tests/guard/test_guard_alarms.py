"""Alarms arrive: at a webhook, at a program and at a mail server, each of them real and on this machine."""

from __future__ import annotations

import http.server
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.guard import policy as policies
from assay.guard.alarms import NAME, PASSWORD, send, targets

FACTS = {"alarm": "stalled", "run": "small", "detail": "no update for 20 minutes: żółw"}


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    """The port of a server that runs in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Hook(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; `/broken` answers 500."""

    got: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(500 if self.path == "/broken" else 204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""


class MailBox(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs to hand over a message; without STARTTLS, it takes any password."""

    lines: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 box\r\n")
        reading = False
        for raw in self.rfile:
            line = raw.decode().rstrip("\r\n")
            self.lines.append(line)
            if reading:
                reading = line != "."
                if not reading:
                    self.wfile.write(b"250 taken\r\n")
            elif line.lower().startswith("ehlo"):
                self.wfile.write(b"250-box\r\n250 AUTH PLAIN LOGIN\r\n")
            elif line.lower() == "data":
                reading = True
                self.wfile.write(b"354 go on\r\n")
            elif line.lower() == "quit":
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 good\r\n")


def policy_with(alarms: list[dict[str, Any]]) -> policies.Policy:
    """A policy with these alarms."""
    prices = [{"fixed": {"value": "2", "unit": "machine-hour", "currency": "USD"}}]
    whole = {"name": "alarms", "alarms": alarms, "prices": prices, "machine": {"gpus": 1, "provider": "none"}}
    return policies.from_plain(whole, "policy.yaml")


def test_an_alarm_arrives_at_a_webhook_and_a_program_and_a_refusal_is_told(tmp_path: Path) -> None:
    handler = type("Handler", (Hook,), {"got": []})
    keep = [sys.executable, "-c", "import sys; open('kept.json', 'w', encoding='utf-8').write(sys.stdin.read())"]
    with serving(http.server.HTTPServer(("127.0.0.1", 0), handler)) as port:
        policy = policy_with([
            {"webhook": {"url": f"http://127.0.0.1:{port}/"}},
            {"webhook": {"url": f"http://127.0.0.1:{port}/broken"}, "on": ["stalled"]},
            {"command": {"argv": keep}},
            {"command": {"argv": ["/nowhere/program"]}, "on": ["stop"]},
        ])  # fmt: skip
        wanted = targets(policy, "stalled")
        assert wanted == ["1 webhook", "2 webhook", "3 command"], "the last wants other events"
        told = send(policy, wanted, FACTS, tmp_path, {})
    assert told == {"1 webhook": None, "2 webhook": "HTTP status 500", "3 command": None}
    assert handler.got == [("application/json", FACTS)] * 2  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8")) == FACTS
    gone = send(policy, ["1 webhook", "4 command"], FACTS, tmp_path, {})
    assert gone["1 webhook"] is not None, "nobody listens any more"
    assert str(port) not in gone["1 webhook"], "no address in what is recorded"
    assert gone["4 command"] is not None


def test_a_mail_is_handed_over_and_a_password_never_in_the_clear(tmp_path: Path) -> None:
    handler = type("Handler", (MailBox,), {"lines": []})
    with serving(socketserver.TCPServer(("127.0.0.1", 0), handler)) as port:
        mail = {"server": f"127.0.0.1:{port}", "sender": "assay@example.org", "to": ["a@example.org", "b@example.org"]}
        policy = policy_with([{"mail": mail}])
        assert send(policy, ["1 mail"], FACTS, tmp_path, {}) == {"1 mail": None}
        lines: list[str] = handler.lines  # type: ignore[attr-defined]
        assert [line.lower() for line in lines if line.lower().startswith("rcpt")] == [
            "rcpt to:<a@example.org>", "rcpt to:<b@example.org>",
        ]  # fmt: skip
        assert "Subject: assay: stalled of small" in lines
        lines.clear()
        refused = send(policy, ["1 mail"], FACTS, tmp_path, {NAME: "me", PASSWORD: "hush-13"})
        assert refused["1 mail"] is not None
        assert "in the clear" in refused["1 mail"]
        assert not any("auth" in line.lower() or "hush" in line for line in lines)
