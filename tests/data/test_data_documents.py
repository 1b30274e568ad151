"""Documents of a shard: bounds and digests against a plain reading of the ids, one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import documents
from assay.data.shard import Shard, Source, adopt, open_shard, write_shard
from assay.errors import DataError

MakeShard = Callable[..., Shard]


def plainly(ids: list[int]) -> tuple[int, int]:
    """The digest of one document, written down without the code under test."""
    data = hashlib.sha256(b"".join(number.to_bytes(4, "little") for number in ids)).digest()
    return int.from_bytes(data[:8], "big"), int.from_bytes(data[8:16], "big")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, make_shard: MakeShard) -> Shard:
    return make_shard(tmp_path_factory.mktemp("documents") / "shard", documents=50)


@given(st.data())
def test_bounds_and_digests_are_those_of_a_plain_reading(one: Shard, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, one.tokens))
    stop = data.draw(st.integers(start, one.tokens))
    touched = data.draw(st.booleans())
    ids, expected, begin = one.ids.tolist(), [], 0
    for number, end in enumerate(one.documents_end.tolist()):
        within = begin < stop and start < end if touched else start <= begin and end <= stop
        if within:
            expected.append((number, begin, end, plainly(ids[begin : end - 1])))
        begin = end
    found = documents.bounds(one, start, stop, touched=touched)
    numbers = range(found.first, found.first + len(found))
    digests = documents.document_digests(one, start, stop, touched=touched)
    seen = zip(numbers, found.starts.tolist(), found.stops.tolist(), map(tuple, digests.tolist()), strict=True)
    assert list(seen) == expected
    assert digests.dtype == np.uint64
    assert digests.shape == (len(expected), 2)


def test_equal_documents_have_equal_digests_in_every_shard_and_dtype(tmp_path: Path) -> None:
    texts = [np.array([5, 9, 0]), np.array([0]), np.array([7, 7, 7, 0])]
    known = {"tokenizer": "t", "end_of_text": 0, "pool": "base"}

    def write(name: str, chosen: list[int], vocabulary: int) -> Shard:
        parts = [texts[index] for index in chosen]
        source = Source("s", 0, sum(map(len, parts)))
        return write_shard(tmp_path / name, parts, vocabulary=vocabulary, sources=[source], **known)  # type: ignore[arg-type]

    narrow = documents.document_digests(write("narrow", [0, 1, 2], 100))
    wide = documents.document_digests(write("wide", [2, 0], 100_000))
    assert wide.tolist() == narrow[[2, 0]].tolist()
    assert narrow[1].tolist() == list(plainly([])), "a document of its end alone is the empty one"


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_size_of_the_pieces_changes_nothing(one: Shard, size: int) -> None:
    found = documents.bounds(one)
    for low, high, ids in documents.pieces(one, found, size):
        assert len(ids) <= size or high == low + 1, "only a document longer than a piece is held whole"
    cut = [part for _, part in documents.digest_pieces(one, found, size)]
    assert len(cut) > 1
    assert np.concatenate(cut).tolist() == documents.document_digests(one).tolist()


def test_a_pack_without_document_ends_is_cut_at_each_end_of_text(one: Shard, tmp_path: Path) -> None:
    pack = adopt(one.path / "tokens.bin", None, tmp_path / "pack", dtype="uint16", vocabulary=500, tokenizer="test",
                 end_of_text=0, pool="base")  # fmt: skip
    assert documents.document_digests(pack).tolist() == documents.document_digests(one).tolist()
    (tmp_path / "open.bin").write_bytes(np.array([3, 4, 0, 8, 9], "<u2").tobytes())
    unended = adopt(tmp_path / "open.bin", None, tmp_path / "open", dtype="uint16", vocabulary=500, tokenizer="test",
                    end_of_text=0, pool="base")  # fmt: skip
    assert [tuple(row) for row in documents.document_digests(unended).tolist()] == [plainly([3, 4]), plainly([8, 9])]


def test_files_that_are_cut_meanwhile_are_a_fault_with_a_sentence(tmp_path: Path, make_shard: MakeShard) -> None:
    shard = open_shard(make_shard(tmp_path / "shard").path)
    tokens = shard.path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match="it was cut"):
        documents.document_digests(shard)
    (shard.path / "documents.idx").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        documents.bounds(shard)


def test_a_document_of_any_length_is_taken_in_bounded_pieces(one: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = documents.bounds(one)
    monkeypatch.setattr(documents, "LONGEST", 10)
    cut = documents.bounds(one)
    assert int((cut.stops - cut.starts).max()) == 10
    assert set(whole.stops.tolist()) <= set(cut.stops.tolist())
    assert cut.starts.tolist() == [0, *cut.stops.tolist()[:-1]]
    first = one.ids[: int(whole.stops[0])].tolist()
    pieces = [first[at : at + 10] for at in range(0, len(first), 10)]
    expected = [plainly(piece[:-1] if piece[-1] == 0 else piece) for piece in pieces]
    found = documents.document_digests(one)[: len(expected)]
    assert [tuple(row) for row in found.tolist()] == expected
