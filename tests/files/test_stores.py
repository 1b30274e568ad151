"""Object stores are listed and read the same way, whoever keeps them; faults say what they mean and nothing secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore import exceptions

from assay.errors import AssayError, DataError, InputError, Refused
from assay.files.retry import Transient
from assay.files.stores import chunks, explained, get, look, objects, opened, put

PART = 5 << 20  # the smallest part of an upload in several


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of a whole S3 on this machine, to which this process is sent."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as local:
        local.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        local.setenv("AWS_ACCESS_KEY_ID", "key")
        local.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="corpora")
        yield client
    server.stop()


def test_a_bucket_is_listed_and_read_whole_and_from_any_byte(client: Any) -> None:
    bodies = {"p/zażółć +&.jsonl": b"x" * 200_000, "p/empty.jsonl": b"", "p/a/b.txt": b"text", "other": b"o"}
    for key, body in bodies.items():
        client.put_object(Bucket="corpora", Key=key, Body=body)
    store, prefix = opened("s3://corpora/p/", 10)
    found = objects(store, prefix)
    assert [each.key for each in found] == ["p/a/b.txt", "p/empty.jsonl", "p/zażółć +&.jsonl"]
    for each in found:
        assert each.bytes == len(bodies[each.key])
        if each.bytes:
            assert b"".join(chunks(store, each)) == bodies[each.key]
            assert b"".join(chunks(store, each, 3)) == bodies[each.key][3:]
    assert [each.key for each in objects(store, "other")] == ["other"]
    assert len(objects(store, "")) == 4


def test_an_etag_is_an_md5_for_one_part_and_is_none_for_several(client: Any) -> None:
    import hashlib

    client.put_object(Bucket="corpora", Key="e/one", Body=b"one")
    upload = client.create_multipart_upload(Bucket="corpora", Key="e/two")["UploadId"]
    parts = []
    for number, body in ((1, b"a" * PART), (2, b"b")):
        sent = client.upload_part(Bucket="corpora", Key="e/two", UploadId=upload, PartNumber=number, Body=body)
        parts.append({"ETag": sent["ETag"], "PartNumber": number})
    client.complete_multipart_upload(
        Bucket="corpora", Key="e/two", UploadId=upload, MultipartUpload={"Parts": parts}
    )  # fmt: skip
    store, _ = opened("s3://corpora", 10)
    one, two = objects(store, "e")
    assert one.etag == hashlib.md5(b"one", usedforsecurity=False).hexdigest()
    assert two.etag is not None
    assert two.etag.endswith("-2")
    assert b"".join(chunks(store, two, PART - 1)) == b"ab"


def test_another_object_under_the_name_is_noticed(client: Any) -> None:
    client.put_object(Bucket="corpora", Key="c/it", Body=b"before")
    store, _ = opened("s3://corpora", 10)
    [listed] = objects(store, "c")
    client.put_object(Bucket="corpora", Key="c/it", Body=b"after!")
    with pytest.raises(DataError, match="s3://corpora/c/it changed after it was listed"):
        list(chunks(store, listed))
    client.delete_object(Bucket="corpora", Key="c/it")
    with pytest.raises(DataError, match="s3://corpora/c/it is not there"):
        list(chunks(store, listed))
    with pytest.raises(DataError, match=r"s3://nothing is not there \(HTTP 404 NoSuchBucket\)"):
        objects(opened("s3://nothing", 10)[0], "")


def test_what_was_put_is_there_and_create_replaces_nothing(client: Any, tmp_path: Path) -> None:
    for address in ("s3://corpora/w", f"file://{tmp_path}"):
        store, prefix = opened(address, 10, 5.0)
        key = f"{prefix}/new/ą"
        assert (look(store, key), get(store, key, 10)) == (None, None)
        assert put(store, key, b"first", create=True)
        assert not put(store, key, b"other", create=True)
        assert get(store, key, 10) == b"first"
        assert put(store, key, b"second")
        found = look(store, key)
        assert found is not None
        assert found.bytes == 6
        with pytest.raises(DataError, match="has 6 bytes, 5 at most are expected"):
            get(store, key, 5)
    with pytest.raises(DataError, match=r"s3://nothing/x is not there \(HTTP 404 NoSuchBucket\)"):
        get(opened("s3://nothing", 10)[0], "x", 10)
    (tmp_path / "file").write_bytes(b"")
    store, prefix = opened(f"file://{tmp_path}/file", 10)
    with pytest.raises(Refused, match=r"cannot be written: .*; correct the folder"):
        put(store, f"{prefix}/below-a-file", b"x")


def test_a_folder_is_a_store_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"0123")
    store, prefix = opened(f"file://{tmp_path}", 10)
    [found] = objects(store, prefix)
    assert (found.key.endswith("a/b"), found.bytes, b"".join(chunks(store, found, 2))) == (True, 4, b"23")


def test_a_prefix_keeps_every_letter_of_its_name(client: Any, tmp_path: Path) -> None:
    for key in ("c", "c#-code/x/a", "c#-code/y"):
        client.put_object(Bucket="corpora", Key=key, Body=key.encode())
    store, prefix = opened("s3://corpora/c#-code/x", 10)
    [found] = objects(store, prefix)
    assert (found.key, b"".join(chunks(store, found))) == ("c#-code/x/a", b"c#-code/x/a")
    (tmp_path / "c#" / "why?").mkdir(parents=True)
    (tmp_path / "c#" / "why?" / "a").write_bytes(b"0123")
    store, prefix = opened(f"file://{tmp_path}/c#/why?", 10)
    assert [each.bytes for each in objects(store, prefix)] == [4]


@pytest.mark.parametrize(
    "address",
    ["s3://KEY:SECRET@bucket/p", "s3://SECRET@bucket", "s3://bucket/p?X-Amz-Signature=SECRET", "s3://b?SECRET"],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(InputError, match="not in the address") as fault:
        opened(address, 10)
    assert "SECRET" not in str(fault.value)


@pytest.mark.parametrize("address", ["nothing", "unknown://bucket/p", "s3://"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="names no object store"):
        opened(address, 10)


SENT = "Error performing GET http://127.0.0.1:9/b?X-Amz-Signature=verysecret in 5ms - "


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (exceptions.GenericError(f"{SENT}Server returned non-2xx status code: 503 Slow Down"), Transient, "HTTP 503"),
        (exceptions.GenericError(f"{SENT}Server returned non-2xx status code: 429 x"), Transient, "HTTP 429"),
        (exceptions.GenericError(f"{SENT}HTTP error: error sending request kind: Timeout"), Transient, "timed out"),
        (exceptions.GenericError(f"{SENT}HTTP error: request or response body error"), Transient, "broke off"),
        (exceptions.GenericError(f"{SENT}status code: 400 Bad: <Code>ExpiredToken</Code>"), Refused, "ExpiredToken"),
        (exceptions.GenericError(f"{SENT}status code: 400 Bad: <Code>RequestTimeout</Code>"), Transient, "HTTP 400"),
        (exceptions.GenericError(f"{SENT}status code: 403 Forbidden"), Refused, "may not be read"),
        (exceptions.GenericError(f"{SENT}status code: 416 Range"), DataError, "refuses the request"),
        (exceptions.GenericError(f"{SENT}inner: BareRedirect"), InputError, "set AWS_REGION"),
        (exceptions.GenericError("PUT http://169.254.169.254/latest/api/token"), Refused, "there are no credentials"),
        (exceptions.UnauthenticatedError(f"{SENT}status code: 401"), Refused, "may not be read"),
        (exceptions.PreconditionError("x"), DataError, "changed after it was listed"),
        (FileNotFoundError("x"), DataError, "is not there"),
    ],
)
def test_a_fault_says_what_it_means_and_nothing_secret(
    fault: Exception, kind: type[Transient | AssayError], told: str
) -> None:
    meaning = explained(fault, "s3://b/x")
    assert isinstance(meaning, kind)
    assert told in str(meaning)
    assert isinstance(meaning, Transient) or str(meaning).startswith("s3://b/x")
    assert "verysecret" not in str(meaning)
    assert "127.0.0.1" not in str(meaning)
