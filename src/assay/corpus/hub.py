"""The Hugging Face hub, as far as a corpus needs it: which commit a name is, which files it holds, their bytes.

Every request is one try, without the client's own retries: `files.retry` decides about the next. The server is
`HF_ENDPOINT`'s, the token huggingface_hub's own (`HF_TOKEN`); no address and no token stands in a message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from assay import __version__
from assay.errors import DataError, InputError, Refused
from assay.files.retry import Policy, Transient, again, patience, persist, retry_after

COMMIT = re.compile(r"[0-9a-f]{40}")
_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)((?:/[^/]+)*)/?")
_MODEL = re.compile(r"hf://((?!datasets/)[\w.-]+/[\w.-]+)/?")
_ANSWER = 256 << 20  # bytes of a listing's page or another answer at most
_PAGES = 10_000  # of a listing at most: the hub has up to 1,000 files on each


@dataclass(frozen=True)
class Repository:
    """A data set or a model of the hub, and a folder in it (empty: all)."""

    kind: str  # datasets or models
    name: str  # OWNER/NAME
    folder: str = ""

    @property
    def address(self) -> str:
        """How a description and messages name it."""
        return f"hf://{'datasets/' if self.kind == 'datasets' else ''}{self.name}"


@dataclass(frozen=True)
class Stated:
    """A file as the hub states it: SHA-256 of a large one's bytes; of others git's SHA-1, as a blob."""

    path: str
    bytes: int
    sha256: str | None
    blob: str


def dataset(path: str, where: str) -> Repository:
    """The data set of `hf://datasets/OWNER/NAME[/FOLDER]`; InputError for another path."""
    found = _DATASET.fullmatch(path)
    if found is None or ".." in path.split("/"):
        raise InputError(f"{where}: {path} names no data set; hf://datasets/OWNER/NAME is expected")
    return Repository("datasets", found[1], found[2].strip("/"))


def model(path: str, where: str) -> Repository:
    """The model of `hf://OWNER/NAME`; InputError for another path."""
    found = _MODEL.fullmatch(path)
    if found is None:
        raise InputError(f"{where}: {path} names no model; hf://OWNER/NAME is expected")
    return Repository("models", found[1])


def commit(repository: Repository, revision: str | None, seconds: float) -> str | None:
    """The commit that a branch or tag (null: main) is at now, asked once; None when that cannot be had."""
    revision = revision or "main"
    url = f"{_endpoint()}/api/{repository.kind}/{repository.name}/revision/{quote(revision, safe='')}"
    try:
        answer, _ = _json(url, repository.address, revision, seconds)
    except (Transient, DataError, Refused):
        return None
    sha = answer.get("sha") if isinstance(answer, dict) else None
    return sha if isinstance(sha, str) and COMMIT.fullmatch(sha) else None


def files(repository: Repository, revision: str, policy: Policy) -> list[Stated]:
    """All files of the repository at a commit, page by page, each page with the policy's deadline.

    Raises DataError (no such repository or commit, an answer that is no listing), Refused (no access), Interrupted.
    """
    first = f"{_endpoint()}/api/{repository.kind}/{repository.name}/tree/{revision}?recursive=true"
    what, found = f"{repository.address} at {revision}", list[Stated]()
    url: str | None = first
    pages = 0
    while url is not None:
        # The token goes with every page: to none but the hub's own, and not for ever.
        if _origin(url) != _origin(first) or pages == _PAGES:
            raise DataError(f"{what}: the hub's list of files goes on at another server or after {_PAGES:,} pages; "
                            "check HF_ENDPOINT")  # fmt: skip
        pages += 1

        def page(left: float, url: str = url) -> tuple[Any, str | None]:
            return _json(url, repository.address, revision, left)

        answer, following = persist(f"the list of files of {what}", page, policy)
        try:
            found += [_stated(entry) for entry in answer if entry["type"] == "file"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(f"{what}: the hub's answer is no list of files; check HF_ENDPOINT") from None
        url = None if following is None else _joined(url, following)
    return found


def chunks(repository: Repository, revision: str, path: str, offset: int, left: float) -> Iterator[bytes]:
    """A file's bytes from `offset` on, as they come."""
    url = f"{_endpoint()}/{'datasets/' if repository.kind == 'datasets' else ''}{repository.name}/resolve/{revision}"
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
    with _answer(f"{url}/{quote(path)}", f"{repository.address}/{path}", revision, left, headers) as answer:
        skip = offset if answer.status_code == 200 else 0  # a server without ranges begins at the beginning
        if answer.status_code == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            raise Transient("another range was sent than was asked for")
        for chunk in answer.iter_raw():
            yield chunk[skip:]
            skip = max(0, skip - len(chunk))


def _endpoint() -> str:
    """Read at each call, as the other clients of the hub do at their start."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _origin(url: str) -> tuple[str, str]:
    """Scheme, and host with port, which tell whose server an address is of."""
    try:
        parts = urlsplit(url)
    except ValueError:  # HF_ENDPOINT is no address, which the request will say
        return "", ""
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _joined(url: str, following: str) -> str:
    """The address of a next page; an empty one, which is nobody's, for what is none."""
    try:
        return urljoin(url, following)
    except ValueError:
        return ""


def _stated(entry: dict[str, Any]) -> Stated:
    lfs = entry.get("lfs")
    size, path = int(entry["size"] if lfs is None else lfs["size"]), str(entry["path"])
    sha256, blob = None if lfs is None else str(lfs["oid"]).removeprefix("sha256:"), str(entry["oid"])
    well = re.fullmatch(r"[0-9a-f]{64}", sha256) if sha256 is not None else COMMIT.fullmatch(blob)
    if well is None or size < 0 or not path.isprintable():
        raise ValueError(path)
    return Stated(path, size, sha256, blob)


def _json(url: str, what: str, revision: str, left: float) -> tuple[Any, str | None]:
    """A JSON answer and the address of its next page."""
    with _answer(url, what, revision, left, {}) as answer:
        data = bytearray()
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) > _ANSWER:
                raise DataError(f"{what}: the hub's answer has more than {_ANSWER:,} bytes; check HF_ENDPOINT")
        following = answer.links.get("next", {}).get("url")
    try:
        return json.loads(data), following
    except ValueError:  # an error page of something in between, or a cut body
        raise Transient("the answer is no JSON") from None


@contextmanager
def _answer(url: str, what: str, revision: str, left: float, headers: dict[str, str]) -> Iterator[Any]:
    """A successful answer, its body still to be read; any fault, of the body too, as what it means."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    pause = httpx2.Timeout(patience(left))
    sent = {**_own_headers(), **headers}
    try:
        with get_session().stream("GET", url, headers=sent, timeout=pause, follow_redirects=True) as answer:
            _expect_well(answer, what, revision)
            yield answer
    except OfflineModeIsEnabled:
        raise InputError(f"{what} is remote, but HF_HUB_OFFLINE is set; unset it") from None
    except httpx2.TimeoutException:
        raise Transient("timed out") from None
    except httpx2.UnsupportedProtocol:
        raise InputError("HF_ENDPOINT is no address such as https://huggingface.co; correct or unset it") from None
    except httpx2.RemoteProtocolError:
        raise Transient("the connection broke off") from None
    except (httpx2.RequestError, httpx2.InvalidURL) as fault:
        raise Transient(f"the connection failed ({type(fault).__name__})") from None


def _own_headers() -> dict[str, str]:
    """Who asks. Not by the client's `build_hf_headers`: it asks the server something by itself, without a deadline."""
    from huggingface_hub import get_token

    token = get_token()
    return {"User-Agent": f"assay/{__version__}", **({} if token is None else {"Authorization": f"Bearer {token}"})}


def _expect_well(answer: Any, what: str, revision: str) -> None:
    status, code = answer.status_code, answer.headers.get("X-Error-Code", "")
    if status in (200, 206):
        return
    if again(status) or status == 416:  # 416: the far side's file is shorter than it states
        raise Transient(f"HTTP {status}", _wait(answer.headers))
    if status == 401:
        raise Refused(f"{what}: the hub answers HTTP 401: it is not there, or needs a token; correct the name, or set "
                      "HF_TOKEN")  # fmt: skip
    if status == 403:
        raise Refused(f"{what}: the hub answers HTTP 403: its terms are not accepted, or HF_TOKEN lacks the right; "
                      "accept them on its page")  # fmt: skip
    if status == 404 and code == "RevisionNotFound":
        raise DataError(f"{what} has no commit {revision}; correct `revision`")
    if status == 404:
        raise DataError(f"{what} is not there at {revision} (HTTP 404); correct the name or `revision`")
    raise DataError(f"{what}: the hub answers HTTP {status}; check the name and HF_ENDPOINT")


def _wait(headers: Any) -> float | None:
    """What the hub asks to wait: Retry-After, or the end of its rate limit's window."""
    from huggingface_hub.utils import parse_ratelimit_headers

    asked, limit = retry_after(headers), parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if asked is None and limit is not None and not limit.remaining else asked
