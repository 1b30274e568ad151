"""A proxy before an S3 server that passes requests on, writes them down, and misbehaves as it is told to.

A fault is taken for a request whose method and path hold its word, a stated number of times or for ever.
"""

from __future__ import annotations

import http.client
import http.server
import threading
from dataclasses import dataclass, field
from types import TracebackType

ALWAYS = 1 << 30


@dataclass
class Fault:
    """`word`: of "METHOD path". `kind`: a status, or drop (before), lost (the answer), cut, wrong, hang, or
    unconditional (If-None-Match is taken away)."""

    word: str
    kind: str
    times: int = 1
    skip: int = 0  # requests of the kind that pass before
    taken: int = 0


@dataclass
class Proxy:
    """`asked` are the requests that arrived, as "METHOD path"."""

    host: str
    port: int
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        outer, self.well, self.reached = self, threading.Event(), threading.Event()

        class Handler(_Handler):
            proxy = outer

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.well.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What sends a client here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._http.server_port}",
            "AWS_ACCESS_KEY_ID": "AKIDSECRET",
            "AWS_SECRET_ACCESS_KEY": "verysecret",
            "AWS_REGION": "us-east-1",
        }

    def wants(self, request: str) -> str:
        """The kind of fault for this request, or nothing."""
        for fault in self.faults:
            if fault.word in request and fault.taken < fault.skip + fault.times:
                fault.taken += 1
                if fault.taken > fault.skip:
                    return fault.kind
        return ""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        """Any request."""
        request = f"{self.command} {self.path}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.proxy.wants(request)
        self.proxy.asked.append(request)
        if kind in ("drop", "hang"):
            if kind == "hang":
                self.proxy.reached.set()
                self.proxy.well.wait(30)
            self.close_connection = True
            return
        if kind.isdigit():
            code = "ExpiredToken" if kind == "403" else "InternalError"
            self._answer(int(kind), f"<Error><Code>{code}</Code></Error>".encode(), {}, "")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        if kind == "unconditional":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        connection = http.client.HTTPConnection(self.proxy.host, self.proxy.port, timeout=30)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if kind == "lost":
            self.close_connection = True
            return
        self._answer(answer.status, data, dict(answer.getheaders()), kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD

    def _answer(self, status: int, data: bytes, headers: dict[str, str], kind: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), "0")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "wrong":
            data = bytes(byte ^ 1 for byte in data)
        if kind == "cut":
            data, self.close_connection = data[: len(data) // 2], True
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
