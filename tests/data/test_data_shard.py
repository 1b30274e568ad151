"""A shard is published whole, read only when its sizes hold, and verified against every promise."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from assay.data.shard import Shard, Source, adopt, dtype_for, open_shard, scan, verify_shard, write_shard
from assay.errors import AssayError, DataError, InputError
from assay.files.digest import digest

MakeShard = Callable[..., Shard]


def write(path: Path, documents: list[list[int]], vocabulary: int = 100, **more: Any) -> Shard:
    known: dict[str, Any] = {"tokenizer": "test", "end_of_text": 0, "pool": "base"}
    tokens = sum(map(len, documents))
    known["sources"] = [Source("all", 0, tokens)]
    return write_shard(path, (np.array(d) for d in documents), vocabulary=vocabulary, **{**known, **more})


def test_a_written_shard_reads_back_and_verifies(tmp_path: Path) -> None:
    shard = write(tmp_path / "s", [[5, 6, 0], [7, 0], [0]], text_bytes=[11, 2, 0], extra={"built_by": "test"})
    assert shard.ids.tolist() == [5, 6, 0, 7, 0, 0]
    assert shard.ids.dtype == np.dtype("<u2")
    assert shard.documents_end.tolist() == [3, 5, 6]
    assert shard.text_bytes_end is not None
    assert shard.text_bytes_end.tolist() == [11, 13, 13]
    assert shard.extra == {"built_by": "test"}
    assert shard.sha256 == digest(np.array([5, 6, 0, 7, 0, 0], dtype="<u2").tobytes())
    assert verify_shard(shard) == []
    assert sorted(os.listdir(tmp_path)) == ["s"]


def test_the_sources_and_byte_counts_may_be_filled_while_documents_are_generated(tmp_path: Path) -> None:
    sources: list[Source] = []
    text_bytes: list[int] = []

    def documents() -> Iterator[NDArray[np.int64]]:
        for size in (3, 4):
            yield np.array([9] * size + [0])
            text_bytes.append(size)
        sources.append(Source("late", 0, 9))

    known: dict[str, Any] = {"vocabulary": 10, "tokenizer": "test", "end_of_text": 0, "pool": "base"}
    shard = write_shard(tmp_path / "s", documents(), sources=sources, text_bytes=text_bytes, **known)
    assert shard.sources == (Source("late", 0, 9),)
    assert verify_shard(shard) == []


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "highest"),
    [(65_535, "uint16", 65_534), (65_536, "uint16", 65_535), (65_537, "uint32", 65_536)],
)
def test_the_dtype_follows_from_the_largest_id_that_can_occur(
    tmp_path: Path, vocabulary: int, dtype: str, highest: int
) -> None:
    assert dtype_for(vocabulary) == dtype
    shard = write(tmp_path / "s", [[highest, 0]], vocabulary)
    assert (shard.dtype, shard.ids.tolist()) == (dtype, [highest, 0])
    assert (tmp_path / "s" / "tokens.bin").stat().st_size == 2 * np.dtype(dtype).itemsize
    with pytest.raises(InputError, match="outside the vocabulary"):
        write(tmp_path / "t", [[highest + 1, 0]], vocabulary)


@pytest.mark.parametrize(
    ("documents", "more", "says"),
    [
        ([[5, 6]], {}, "ends with the id 6, not with 0"),
        ([[5, -1, 0]], {}, "holds the id -1"),
        ([[5, 0], []], {}, "document 1 is not a row"),
        ([], {"sources": []}, "no document"),
        ([[5, 0]], {"sources": [Source("a", 0, 1)]}, "the sources end at 1"),
        ([[5, 0]], {"sources": [Source("a", 1, 2)]}, "does not continue at 0"),
        ([[5, 0]], {"sources": []}, "sources"),
        ([[5, 0]], {"text_bytes": [1, 2]}, "2 byte counts"),
        ([[5, 0]], {"extra": {"tokens": 3}}, "belongs to the shard format"),
        ([[5, 0]], {"end_of_text": 100}, "outside the vocabulary"),
        ([[5, 0]], {"tokenizer": ""}, "tokenizer"),
    ],
)
def test_what_is_no_shard_is_refused_and_leaves_nothing(
    tmp_path: Path, documents: list[list[int]], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        write(tmp_path / "s", documents, **more)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_shard_is_never_replaced(tmp_path: Path) -> None:
    before = write(tmp_path / "s", [[5, 0]])
    with pytest.raises(InputError, match="exists already"):
        write(tmp_path / "s", [[6, 0]])
    assert open_shard(tmp_path / "s").sha256 == before.sha256


@pytest.mark.parametrize("name", ["tokens.bin", "documents.idx", "text_bytes.idx"])
def test_a_file_that_was_cut_is_found_before_it_is_mapped(tmp_path: Path, name: str) -> None:
    shard = write(tmp_path / "s", [[5, 6, 0], [7, 0]], text_bytes=[1, 1])
    os.truncate(shard.path / name, 2)
    with pytest.raises(DataError, match=r"has 2 bytes, but the manifest states"):
        open_shard(shard.path)
    with pytest.raises(DataError, match=r"has 2 bytes"):  # also when it was cut after opening
        _ = (shard.ids, shard.documents_end, shard.text_bytes_end)
    (shard.path / name).unlink()
    with pytest.raises(DataError, match="cannot be had"):
        open_shard(shard.path)
    assert verify_shard(shard) == [f"{name} cannot be read: No such file or directory"]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.idx", "text_bytes.idx"])
def test_every_changed_byte_is_found_by_verification(tmp_path: Path, name: str) -> None:
    shard = write(tmp_path / "s", [[5, 6, 0], [7, 0]], text_bytes=[1, 1])
    good = (shard.path / name).read_bytes()
    for place in range(len(good)):
        (shard.path / name).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert f"{name} has the digest" in verify_shard(open_shard(shard.path))[0]


@pytest.mark.parametrize(
    ("ids", "ends", "says"),
    [
        ([5, 0, 100, 0], [2, 4], "token 2 is 100, outside"),
        ([5, 0, 6, 0], [2, 2], "does not rise"),
        ([5, 0, 6, 0], [2, 9], "beyond"),
        ([5, 0, 6, 0], [2], "the last document ends at 2"),
        ([5, 0, 6, 0], [1, 4], "the document ending at 1 ends with id 5"),
        ([5, 0, 6, 0], [0, 4], "does not rise"),
    ],
)
def test_a_shard_with_true_digests_but_false_promises_is_found(
    tmp_path: Path, ids: list[int], ends: list[int], says: str
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    tokens, index = np.array(ids, dtype="<u2").tobytes(), np.array(ends, dtype="<u8").tobytes()
    (folder / "tokens.bin").write_bytes(tokens)
    (folder / "documents.idx").write_bytes(index)
    manifest = {
        "format": "assay-shard/1",
        "tokens": len(ids),
        "documents": len(ends),
        "dtype": "uint16",
        "vocabulary": 100,
        "tokenizer": "test",
        "end_of_text": 0,
        "pool": "base",
        "sources": [{"name": "all", "start": 0, "stop": len(ids)}],
        "sha256": {"tokens.bin": digest(tokens), "documents.idx": digest(index)},
    }
    (folder / "shard.json").write_text(json.dumps(manifest))
    assert says in verify_shard(open_shard(folder))[0]


def test_a_pack_is_taken_over_without_copying(tmp_path: Path) -> None:
    tokens, documents = tmp_path / "train.bin", tmp_path / "docs.idx"
    np.array([5, 6, 0, 7, 0], dtype="<u2").tofile(tokens)
    np.array([3, 5], dtype="<u8").tofile(documents)
    known: dict[str, Any] = {"dtype": "uint16", "vocabulary": 100, "tokenizer": "t", "end_of_text": 0, "pool": "base"}
    shard = adopt(tokens, documents, tmp_path / "s", **known)
    assert (tmp_path / "s" / "tokens.bin").samefile(tokens)
    assert (shard.documents, shard.documents_end.tolist(), verify_shard(shard)) == (2, [3, 5], [])
    headerless = adopt(tokens, None, tmp_path / "t", **known)
    assert headerless.documents is None
    assert verify_shard(headerless) == []
    with pytest.raises(DataError, match="does not know where its documents end"):
        _ = headerless.documents_end


def test_a_pack_behind_a_symbolic_link_is_a_shard_too(tmp_path: Path) -> None:
    shard = write(tmp_path / "s", [[5, 0]])
    (shard.path / "tokens.bin").rename(tmp_path / "elsewhere.bin")
    (shard.path / "tokens.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert verify_shard(open_shard(shard.path)) == []


@pytest.mark.parametrize(
    ("tokens", "documents", "fault", "says"),
    [
        (b"", None, InputError, "0 bytes"),
        (b"\5\0\0", None, InputError, "no positive multiple of 2"),
        ((20240520).to_bytes(4, "little") + bytes(2044), None, InputError, "header"),
        (b"\5\0\0\0", b"\2", InputError, "no positive multiple of 8"),
        (b"\5\0\0\0", (1).to_bytes(8, "little"), DataError, "ends with id 5"),
        (b"\x65\0\0\0", None, DataError, "token 0 is 101"),
    ],
)
def test_a_pack_that_does_not_hold_is_not_adopted(
    tmp_path: Path, tokens: bytes, documents: bytes | None, fault: type[AssayError], says: str
) -> None:
    (tmp_path / "train.bin").write_bytes(tokens)
    index = None
    if documents is not None:
        index = tmp_path / "docs.idx"
        index.write_bytes(documents)
    known: dict[str, Any] = {"dtype": "uint16", "vocabulary": 100, "tokenizer": "t", "end_of_text": 0, "pool": "base"}
    with pytest.raises(fault, match=says):
        adopt(tmp_path / "train.bin", index, tmp_path / "s", **known)
    assert not (tmp_path / "s").exists()


def test_a_search_passes_over_half_written_and_foreign_folders(tmp_path: Path, make_shard: MakeShard) -> None:
    good = make_shard(tmp_path / "a" / "good")
    make_shard(tmp_path / "a" / "late").path.rename(tmp_path / "a" / "late.partial-0123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "shard.json").write_bytes(b"\xff")
    assert list(scan(tmp_path)) == [(good.sha256, good.path)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    shard = write(tmp_path_factory.mktemp("fuzz") / "s", [[5, 0]])
    return shard.path, json.loads((shard.path / "shard.json").read_bytes())


@given(
    key=st.sampled_from(["tokens", "documents", "dtype", "sources", "sha256", "vocabulary", "end_of_text"]), value=JSON
)
def test_no_manifest_ends_in_a_traceback(good: tuple[Path, dict[str, Any]], key: str, value: object) -> None:
    path, manifest = good
    (path / "shard.json").write_text(json.dumps({**manifest, key: value}))
    with contextlib.suppress(InputError, DataError):
        verify_shard(open_shard(path))


@given(data=st.binary(max_size=60))
def test_no_bytes_in_place_of_a_manifest_end_in_a_traceback(good: tuple[Path, dict[str, Any]], data: bytes) -> None:
    path, _ = good
    (path / "shard.json").write_bytes(data)
    with pytest.raises(InputError):
        open_shard(path)
