"""A server that speaks what is used of the hub and of S3, and misbehaves as it is told to.

A fault is taken for a request whose path holds its word, a stated number of times or for ever; then the server is well
again. It counts what it answered, so that a test sees that its faults happened.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
ALWAYS = 1 << 30
PAGE = 2  # entries of a listing's page


@dataclass
class Fault:
    """What goes wrong: a status, or drop, hang, cut, wrong, page (an HTML page in place of the answer)."""

    word: str
    kind: str
    times: int = 1
    after: str | None = None  # Retry-After
    taken: int = 0


@dataclass
class Server:
    """`repositories`: files by OWNER/NAME (models and data sets); `buckets`: objects by bucket."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    large: int = 1000  # files of so many bytes are LFS
    etag: str | None = None  # of every object, in place of its MD5
    ranges: bool = True
    following: str | None = None  # the next page of every listing, in place of the right one

    def __enter__(self) -> Server:
        outer, self.well, self.reached = self, threading.Event(), threading.Event()

        class Handler(_Handler):
            server_state = outer

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.well.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What sends the clients here."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HUB_OFFLINE": "0",  # an export earlier in this process may have switched the hub off
            "HF_TOKEN": "hf_secretsecret",
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "AKIDSECRET",
            "AWS_SECRET_ACCESS_KEY": "verysecret",
            "AWS_REGION": "us-east-1",
        }

    def wants(self, path: str) -> Fault | None:
        """The fault for this request."""
        for fault in self.faults:
            if fault.word in path and fault.taken < fault.times:
                fault.taken += 1
                return fault
        return None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        """As GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Any request."""
        state = self.server_state
        state.answered.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        fault = state.wants(unquote(self.path))
        if fault is not None and fault.kind == "drop":
            self.close_connection = True
            return
        if fault is not None and fault.kind == "hang":
            state.reached.set()
            state.well.wait(5)
            self.close_connection = True
            return
        if fault is not None and fault.kind.isdigit():
            headers = {} if fault.after is None else {"Retry-After": fault.after}
            self._send(int(fault.kind), b"<Error><Code>SlowDown</Code></Error>", headers)
            return
        if fault is not None and fault.kind == "page":
            self._send(200, b"<html>come back later</html>", {})
            return
        parts = urlsplit(self.path)
        words = unquote(parts.path).strip("/").split("/")
        if words[0] == "api":
            self._api(words[1:], parse_qs(parts.query), fault)
        elif "resolve" in words:
            at = words.index("resolve")
            files = state.repositories.get("/".join(words[at - 2 : at]), {})
            self._file(files.get("/".join(words[at + 2 :])), fault)
        else:
            self._bucket(words, parse_qs(parts.query), fault)

    def _api(self, words: list[str], query: dict[str, list[str]], fault: Fault | None) -> None:
        files = self.server_state.repositories.get("/".join(words[1:3]))
        revision = words[4]
        if files is None:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif words[3] == "revision":
            self._send(200, json.dumps({"sha": COMMIT}).encode(), {}, fault)
        else:
            start = int(query.get("cursor", ["0"])[0])
            names = sorted(files)
            page = json.dumps([self._entry(name, files[name]) for name in names[start : start + PAGE]]).encode()
            following = f"{self.server_state.address}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}"
            following = self.server_state.following or following
            more = {"Link": f'<{following}>; rel="next"'} if start + PAGE < len(names) else {}
            self._send(200, page, more, fault)

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": blob}
        if len(data) >= self.server_state.large:
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entry |= {"lfs": lfs, "oid": OTHER}
        return entry

    def _bucket(self, words: list[str], query: dict[str, list[str]], fault: Fault | None) -> None:
        objects = self.server_state.buckets.get(words[0])
        if objects is None:
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>", {})
        elif "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            names = sorted(name for name in objects if name.startswith(prefix))
            start = int(query.get("continuation-token", ["0"])[0])
            shown = "".join(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-30T10:00:00.000Z</LastModified>"
                f"<ETag>&quot;{self._etag(objects[name])}&quot;</ETag><Size>{len(objects[name])}</Size></Contents>"
                for name in names[start : start + PAGE]
            )
            more = start + PAGE < len(names)
            token = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if more else ""
            self._send(
                200,
                f"<ListBucketResult><Name>b</Name><IsTruncated>{str(more).lower()}</IsTruncated>{token}{shown}"
                "</ListBucketResult>".encode(),
                {},
                fault,
            )
        else:
            data = objects.get("/".join(words[1:]))
            asked = self.headers.get("If-Match")
            if data is not None and asked is not None and asked.strip('"') != self._etag(data):
                self._send(412, b"", {})
            else:
                self._file(data, fault)

    def _etag(self, data: bytes) -> str:
        return self.server_state.etag or hashlib.md5(data, usedforsecurity=False).hexdigest()

    def _file(self, data: bytes | None, fault: Fault | None) -> None:
        if data is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{self._etag(data)}"', "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"}
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").removesuffix("-") or 0) if self.server_state.ranges else 0
        if fault is not None and fault.kind == "wrong":
            data = bytes(byte ^ 1 for byte in data)
        if start and start >= len(data):
            self._send(416, b"", {})
        elif asked and self.server_state.ranges:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers, fault)
        else:
            self._send(200, data, headers, fault)

    def _send(self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
