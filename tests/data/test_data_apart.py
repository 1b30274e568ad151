"""Validation kept apart: exact and near documents are found in whatever form, and what only resembles is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.data import documents
from assay.data.apart import COMMON, LEAST, RUN, SHARE, Find, HeldOut
from assay.data.shard import Shard, Source, write_shard

Write = Callable[..., Shard]
VOCABULARY = 5000


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes documents given without their end-of-text as a shard."""
    made = 0

    def do(texts: Sequence[Any], vocabulary: int = VOCABULARY) -> Shard:
        nonlocal made
        made += 1
        parts = [np.append(np.asarray(text, dtype=np.int64), 0) for text in texts]
        source = Source("s", 0, sum(map(len, parts)))
        return write_shard(tmp_path / str(made), parts, vocabulary=vocabulary, tokenizer="t", end_of_text=0,
                           pool="base", sources=[source])  # fmt: skip

    return do


def finds(held_out: HeldOut, shard: Shard, size: int = documents.PIECE) -> list[Find]:
    """All finds, looked for as `checking` does."""
    found, result = documents.bounds(shard), []
    for low, high, ids in documents.pieces(shard, found, size):
        starts, stops = found.starts[low:high], found.stops[low:high]
        result += held_out.look(ids, starts, stops, low, documents.digests_of(ids, starts, stops, shard.end_of_text))
    return result


def prose(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCABULARY, count)


def runs(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + RUN]) for i in range(len(text) - RUN + 1)}


def test_copies_in_every_dress_are_found_and_named(write: Write) -> None:
    secret = prose(1, 400)
    edited = secret.copy()
    edited[::60] = 4999
    dressed = {
        "alone": secret,
        "cut at both ends": secret[30:370],
        "a chunk": secret[100:200],
        "inside another": np.concatenate([prose(2, 3000), secret, prose(3, 3000)]),
        "edited here and there": edited,
        "its half, with other text": np.concatenate([secret[:200], prose(4, 30)]),
    }
    held_out = HeldOut(write([prose(5, 100), secret, prose(6, 100)]))
    for name, text in dressed.items():
        found = finds(held_out, write([prose(7, 500), text, prose(8, 500)]))
        assert [(one.document, one.held_out) for one in found] == [(1, 1)], name
    assert "equals validation document 1" in finds(held_out, write([secret]))[0].words()
    assert "runs of 8 ids (0." in finds(held_out, write([edited]))[0].words()


def test_what_only_resembles_is_left_alone(write: Write) -> None:
    secret = prose(1, 400)
    mixed = np.concatenate([secret[:150], prose(2, 300)])
    shuffled = np.random.default_rng(3).permutation(secret)
    often = secret.copy()
    often[::8] = 4999
    held_out = HeldOut(write([secret]))
    assert finds(held_out, write([mixed, shuffled, often, prose(4, 400)])) == []


def test_short_documents_are_compared_exactly_alone(write: Write) -> None:
    short, shorter, nothing = prose(1, LEAST + RUN - 2), prose(2, 3), prose(3, 0)
    held_out = HeldOut(write([short, shorter, nothing]))
    assert finds(held_out, write([np.append(short, 7), np.append(shorter, 7), nothing])) == []
    found = finds(held_out, write([nothing, shorter, short]))
    assert [(one.document, one.held_out, one.shared) for one in found] == [(1, 1, None), (2, 0, None)]


def test_set_phrases_of_many_validation_documents_count_on_neither_side(write: Write) -> None:
    footer = prose(0, 200)
    pages = [np.concatenate([prose(10 + number, 60), footer]) for number in range(COMMON + 1)]
    new = np.concatenate([prose(99, 60), footer])
    assert finds(HeldOut(write(pages)), write([new, footer])) == []
    # What is left without them is what counts: a chunk of a page under the same footer is a chunk of that page.
    longer = [np.concatenate([prose(40 + number, 300), footer]) for number in range(COMMON + 1)]
    chunk = np.concatenate([longer[4][:45], footer])
    assert [(one.document, one.held_out) for one in finds(HeldOut(write(longer)), write([new, chunk]))] == [(1, 4)]
    few = HeldOut(write(pages[:2]))
    assert [one.document for one in finds(few, write([footer, prose(98, 300)]))] == [0]


def test_wide_ids_and_small_pieces_change_nothing(write: Write) -> None:
    texts = [prose(number, 90) for number in range(12)]
    training = [texts[3], prose(50, 90), np.append(texts[5], 9)]
    narrow = finds(HeldOut(write(texts)), write(training))
    assert [one.held_out for one in narrow] == [3, 5]
    wide, wider = write(texts, vocabulary=100_000), write(training, vocabulary=100_000)
    assert wide.dtype == "uint32"
    assert finds(HeldOut(wide), wider) == narrow
    assert finds(HeldOut(wide), wider, size=50) == narrow


@settings(max_examples=30)
@given(st.data())
def test_the_finds_are_those_of_comparing_every_pair(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # Few ids and texts that are pieced together from the same stretches: runs are shared in every proportion.
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    stretches = [random.integers(1, 40, random.integers(1, 60)) for _ in range(6)]

    def texts(count: int) -> list[np.ndarray]:
        return [
            np.concatenate([stretches[k] for k in random.integers(0, len(stretches), random.integers(1, 5))])
            for _ in range(count)
        ]

    held, training = texts(5), texts(8)
    folder = tmp_path_factory.mktemp("pairs")

    def write(name: str, parts: list[np.ndarray]) -> Shard:
        ended = [np.append(part, 0) for part in parts]
        return write_shard(folder / name, ended, vocabulary=40, tokenizer="t", end_of_text=0, pool="base",
                           sources=[Source("s", 0, sum(map(len, ended)))])  # fmt: skip

    found = finds(HeldOut(write("held", held)), write("training", training), data.draw(st.integers(1, 500)))
    expected = {}
    for number, text in enumerate(training):
        near = []
        for other in held:
            shared, fewer = len(runs(text) & runs(other)), min(len(runs(text)), len(runs(other)))
            near.append(2.0 if text.tolist() == other.tolist() else shared / fewer if fewer >= LEAST else 0.0)
        if max(near) >= SHARE:
            expected[number] = max(near)
    seen = {one.document: 2.0 if one.shared is None else one.shared / (one.runs or 1) for one in found}
    assert seen == expected
    assert len(found) == len(seen)
