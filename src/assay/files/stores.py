"""Object stores (S3 and what speaks like it; Google's, Azure's and local folders in the same way) through obstore.

Every call is one try without retries of the client: `files.retry` decides about the next. Credentials come from the
usual environment variables or the machine's role and stand in no message. One object is removed at a time, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from assay.errors import AssayError, DataError, InputError, MachineError, Refused
from assay.files.publish import flush_file, flush_folder
from assay.files.retry import Transient, again, patience

_CHUNK = 1 << 16  # what is lost of a stream that breaks off
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_SYSTEM = re.compile(r"([A-Z][^:\n]*) \(os error (\d+)\)")
_FOLDER = "file://"
_FULL = ("28", "122")  # no space left, quota exceeded
_METADATA = ("http://169.254.169.254", "http://[fd00:ec2::254]")  # where a machine's role is asked for


@dataclass(frozen=True)
class Object:
    """An object as the store lists it. `etag` without quotes; None when the store gives none."""

    key: str
    bytes: int
    etag: str | None


@dataclass(frozen=True)
class Store:
    """A bucket, opened; `address` is how messages name it, such as s3://bucket."""

    address: str
    inner: Any


def opened(address: str, deadline: float, wait: float | None = None) -> tuple[Store, str]:
    """The store of `scheme://bucket/prefix` and the prefix; no request is made.

    `deadline`: of the policy that its calls are made with. `wait`: seconds that one answer may take, which for a put
    is the sending of its whole body too; None: what `patience` says. InputError for an address that names no store.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    root, prefix = split(address)
    endpoint = next((os.environ[n] for n in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(n)), "")
    pause = timedelta(seconds=patience(deadline))
    read = pause if wait is None else timedelta(seconds=wait)
    try:
        inner = from_url(
            root,
            retry_config={"max_retries": 0, "retry_timeout": pause},
            client_options={
                "connect_timeout": pause,
                "read_timeout": read,
                "timeout": timedelta(days=7),  # of a whole body; the read time-out finds one that stands still
                "allow_http": endpoint.startswith("http://"),
            },
        )
    except (BaseError, ValueError):
        raise InputError(
            f"{address} names no object store that can be opened; s3://bucket/prefix is expected"
        ) from None
    return Store(root, inner), prefix


def split(address: str) -> tuple[str, str]:
    """`scheme://bucket` and the prefix, which may hold `#`, and in a folder `?` too.

    InputError for an address with credentials or a query; it does not repeat them.
    """
    scheme, _, rest = address.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ("?" in rest and scheme != "file"):
        raise InputError(
            "the address of a store holds '?' or '@' where bucket and prefix are expected, as in s3://bucket/prefix; "
            "give credentials by the environment, such as AWS_ACCESS_KEY_ID, not in the address"
        )
    return f"{scheme}://{bucket}", prefix.strip("/")


def folder_of(address: str) -> Path | None:
    """The folder that an address means, whatever letters its name has; None for an object store."""
    return Path(address.removeprefix(_FOLDER)) if "://" not in address or address.startswith(_FOLDER) else None


def objects(store: Store, prefix: str) -> list[Object]:
    """All objects below `prefix`, or the one that is called so, in the order of their keys' UTF-8 bytes.

    The client takes any answer with status 200 for a page, one of something in between for an empty one: a listing
    that must be whole is asked for twice.
    """
    import obstore

    what = f"{store.address}/{prefix}".rstrip("/")
    with _explained(what):
        found = obstore.list(store.inner, prefix or None).collect()
        if not found and prefix:
            try:
                found = [obstore.head(store.inner, prefix)]
            except FileNotFoundError:
                raise DataError(f"{what} holds no object; correct the bucket or the prefix") from None
    listed = [Object(str(o["path"]), int(o["size"]), (o["e_tag"] or "").strip('"') or None) for o in found]
    return sorted(listed, key=lambda each: each.key.encode("utf-8"))


def chunks(store: Store, wanted: Object, offset: int = 0) -> Iterator[bytes]:
    """The bytes of an object from `offset` on, 64 KiB or more at a time; DataError when it is another one by now."""
    import obstore

    options: dict[str, Any] = {"range": {"offset": offset}} if offset else {}
    if wanted.etag is not None:
        options["if_match"] = f'"{wanted.etag}"'
    with _explained(f"{store.address}/{wanted.key}"):
        result = obstore.get(store.inner, wanted.key, options=options)
        if result.meta["size"] != wanted.bytes or result.range[0] != offset:
            raise Transient(f"another range or size was sent than byte {offset} of {wanted.bytes} and on")
        for chunk in result.stream(_CHUNK):
            yield bytes(chunk)


def look(store: Store, key: str) -> Object | None:
    """The object of that name, or None when there is none."""
    import obstore

    with _explained(f"{store.address}/{key}"):
        try:
            found = obstore.head(store.inner, key)
        except FileNotFoundError:
            return None
    return Object(key, int(found["size"]), (found["e_tag"] or "").strip('"') or None)


def get(store: Store, key: str, limit: int) -> bytes | None:
    """A small object whole, or None when there is none; DataError when it is above `limit` bytes."""
    import obstore

    what = f"{store.address}/{key}"
    with _explained(what):
        try:
            result = obstore.get(store.inner, key)
        except FileNotFoundError as fault:
            if "NoSuchBucket" in str(fault):
                raise
            return None
        if result.meta["size"] > limit:
            raise DataError(
                f"{what} has {result.meta['size']:,} bytes, {limit:,} at most are expected; is it the right one?"
            )
        data = bytes(result.bytes())
    if len(data) != result.meta["size"]:
        raise Transient(f"{len(data)} of {result.meta['size']} bytes were sent")
    return data


def put(store: Store, key: str, data: bytes, create: bool = False) -> bool:
    """Write one object, whole or not at all; False when `create` is set and one of that name is there already.

    Whether the store honours `create` is for the caller to prove. In a folder the bytes are flushed to the disk and
    dropped from memory, so that who reads them back reads the disk.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError

    with _explained(f"{store.address}/{key}", "written"):
        try:
            obstore.put(store.inner, key, data, mode="create" if create else "overwrite", use_multipart=False)
        except AlreadyExistsError:
            return False
    if store.address == _FOLDER:
        path = Path("/") / key
        flush_file(path)
        flush_folder(path.parent)
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def remove(store: Store, key: str) -> None:
    """Remove one object; it is no fault when there is none."""
    import obstore

    with _explained(f"{store.address}/{key}", "removed"):
        try:
            obstore.delete(store.inner, key)
        except FileNotFoundError:
            return


class _explained:
    """A fault of the client as what it means: `Transient`, or one sentence that names `what`."""

    def __init__(self, what: str, act: str = "read") -> None:
        self._what = what
        self._act = act

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> None:
        from obstore.exceptions import BaseError

        if isinstance(fault, (BaseError, FileNotFoundError)):
            raise explained(fault, self._what, self._act) from None


def explained(fault: BaseException, what: str, act: str = "read") -> Transient | AssayError:
    """What a fault of obstore means. It keeps a failed answer's headers to itself, so no Retry-After is known."""
    from obstore import exceptions

    text = str(fault)
    found, named = _STATUS.search(text), _CODE.search(text)
    status, code = int(found[1]) if found else 0, named[1] if named else ""
    answer = f"HTTP {status}{' ' + code if code else ''}"
    if any(address in text for address in _METADATA):
        return Refused(f"{what}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                       "AWS_SKIP_SIGNATURE=true for a public bucket")  # fmt: skip
    if isinstance(fault, exceptions.PreconditionError) or status == 412:
        return DataError(f"{what} changed after it was listed; build again when it is at rest")
    if isinstance(fault, FileNotFoundError) or status == 404:
        return DataError(f"{what} is not there (HTTP 404{' ' + code if code else ''}); correct the bucket or the path")
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(fault, denied) or status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        return Refused(f"{what} may not be {act} with these credentials ({answer}); give others by AWS_ACCESS_KEY_ID, "
                       "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN")  # fmt: skip
    if "BareRedirect" in text or 300 <= status <= 399:
        return InputError(f"{what} is in another region; set AWS_REGION")
    system = _SYSTEM.search(text) if what.startswith(_FOLDER) else None
    if system is not None:
        kind = MachineError if system[2] in _FULL else Refused
        return kind(f"{what} cannot be {act}: {system[1]}; correct the folder, or free space there")
    if act == "written" and status == 409:
        return Transient(answer)  # another put of the same name at the same time
    if status and not again(status) and code not in ("RequestTimeout", "SlowDown"):
        return DataError(f"{what}: the store refuses the request ({answer}); correct the path or AWS_ENDPOINT_URL")
    if status:
        return Transient(answer)
    return Transient("timed out" if "Timeout" in text or "TimedOut" in text else "the connection failed or broke off")
