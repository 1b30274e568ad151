"""Near duplicates are found as theory says, the earliest stands, and an index continues where it was saved."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.corpus.duplicates import HEADER, IDENTITIES, SIGNATURES, Match, NearDuplicates, Parameters, method
from assay.corpus.words import words
from assay.errors import AssayError, DataError, InputError

WORDS = st.lists(st.sampled_from([f"słowo{n}" for n in range(40)]), min_size=1, max_size=60)
FEW = settings(max_examples=50, deadline=None)


def text(seed: int, count: int = 200) -> str:
    """Words that no other seed has."""
    return " ".join(f"w{seed}x{n}" for n in range(count))


def edited(original: str, edits: int, seed: int) -> str:
    """Some words replaced."""
    stream = original.split()
    for place in random.Random(seed).sample(range(len(stream)), edits):
        stream[place] = f"new{seed}x{place}"
    return " ".join(stream)


def jaccard(one: str, other: str, shingle: int = 5) -> float:
    """Intersection over union of the sets of shingles, counted one by one."""
    first, second = (
        {tuple(s[n : n + shingle]) for n in range(len(s) - shingle + 1)} for s in (words(one), words(other))
    )
    return len(first & second) / len(first | second)


@FEW
@given(WORDS)
def test_the_same_words_always_match_in_full(stream: list[str]) -> None:
    index = NearDuplicates()
    assert index.add("first", " ".join(stream)) is None
    assert index.add("second", "\n— ".join(stream).upper()) == Match("first", 1.0)
    assert len(index) == 1


@FEW
@given(st.lists(WORDS, min_size=1, max_size=5), st.lists(WORDS, min_size=1, max_size=5))
def test_texts_without_a_common_word_never_match(some: list[list[str]], others: list[list[str]]) -> None:
    index = NearDuplicates()
    for number, stream in enumerate(some):
        index.add(f"some {number}", " ".join(stream))
    for number, stream in enumerate(others):
        match = index.add(f"other {number}", " ".join(f"{word}q" for word in stream))
        assert match is None or match.identity.startswith("other")


def test_recall_is_what_the_formula_says() -> None:
    # 4 bands of 16 rows: about two of three pairs at a similarity of 0.9, so that a wrong formula shows.
    parameters = Parameters(bands=4, rows=16, threshold=0.5)
    pairs = [(text(n), edited(text(n), 2, n)) for n in range(500)]
    expected = [parameters.recall(jaccard(*pair)) for pair in pairs]
    assert 0.4 < math.fsum(expected) / len(pairs) < 0.8
    index = NearDuplicates(parameters)
    for number, (original, _) in enumerate(pairs):
        assert index.add(str(number), original) is None
    found = [index._alike(index._band_hashes(signature)) for _, copy in pairs
             if (signature := index.signature(copy)) is not None]  # fmt: skip
    hits = sum(number in numbers for number, numbers in enumerate(found))
    deviation = math.sqrt(math.fsum(p * (1 - p) for p in expected))
    assert abs(hits - math.fsum(expected)) < 4 * deviation
    matches = [index.add(f"copy {number}", copy) for number, (_, copy) in enumerate(pairs)]
    assert sum(match is not None for match in matches) == hits
    assert all(match is None or match.identity == str(number) for number, match in enumerate(matches))


def test_small_edits_are_found_and_large_ones_are_not() -> None:
    index = NearDuplicates()
    for number in range(100):
        index.add(str(number), text(number))
    near = [index.add("near", edited(text(number), 1, number)) for number in range(100)]
    assert [match.identity for match in near if match] == [str(number) for number in range(100)]
    far = [edited(text(number), 25, number) for number in range(100)]
    assert max(jaccard(text(number), copy) for number, copy in enumerate(far)) < 0.5
    assert [match for copy in far if (match := index.add("far", copy))] == []


def test_the_estimate_is_right_on_average() -> None:
    pairs = [(text(n), edited(text(n), 3, n)) for n in range(200)]
    truth = [jaccard(*pair) for pair in pairs]
    index = NearDuplicates()
    estimates = [float(np.mean(index.signature(one) == index.signature(other))) for one, other in pairs]
    deviation = math.sqrt(math.fsum(s * (1 - s) / 128 for s in truth)) / len(pairs)
    assert abs(np.mean(estimates) - np.mean(truth)) < 4 * deviation


@FEW
@given(st.lists(WORDS, min_size=1, max_size=8), st.randoms())
def test_an_estimate_depends_on_the_two_texts_alone(streams: list[list[str]], chance: random.Random) -> None:
    first, again = NearDuplicates(), NearDuplicates()
    texts = [" ".join(stream) for stream in streams]
    signatures = {given: first.signature(given) for given in texts}
    chance.shuffle(texts)
    for number, given_text in enumerate(texts):
        again.add(str(number), given_text)
        assert np.array_equal(again.signature(given_text), signatures[given_text])


def test_the_earliest_of_a_family_is_named_whatever_came_between() -> None:
    index = NearDuplicates()
    index.add("first", text(1))
    for number in range(2, 3000):
        index.add(str(number), text(number, 12))  # the table grows meanwhile
    assert index.add("again", text(1)) == Match("first", 1.0)
    assert len(index) == 2999


def changed(first: int, last: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """A signature that differs from `changed(0, 0)` in the places [first, last)."""
    signature = np.arange(128, dtype=np.uint32)
    signature[first:last] += 1000
    return signature


def test_the_most_similar_is_named_and_of_equals_the_earliest() -> None:
    index = NearDuplicates()
    assert index.add_signature("98 alike", changed(98, 128)) is None
    assert index.add_signature("100 alike", changed(0, 28)) is None
    assert index.add_signature("100 alike too", changed(40, 68)) is None
    assert index.add_signature("98 alike too", changed(68, 98)) is None
    assert index.add_signature("x", changed(0, 0)) == Match("100 alike", 100 / 128)


def test_the_threshold_itself_is_a_match() -> None:
    index = NearDuplicates()
    index.add_signature("a", changed(0, 0))
    assert index.add_signature("b", changed(0, 32)) == Match("a", 0.75)
    assert index.add_signature("c", changed(0, 33)) is None


@pytest.mark.parametrize("blank", ["", " \n", "… — !"])
def test_a_text_without_words_is_like_none(blank: str) -> None:
    index = NearDuplicates()
    assert [index.add("a", blank), index.add("b", blank), len(index)] == [None, None, 0]


def test_an_index_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    texts = [(f"ż/{n}", text(n % 150) if n % 3 else edited(text(n % 150), 1, n)) for n in range(300)]
    whole, begun = NearDuplicates(), NearDuplicates()
    expected = [whole.add(*one) for one in texts]
    assert sum(match is not None for match in expected) > 100
    first = [begun.add(*one) for one in texts[:100]]
    begun.save(tmp_path / "a")
    continued = NearDuplicates.load(tmp_path / "a")
    assert first + [continued.add(*one) for one in texts[100:]] == expected
    continued.save(tmp_path / "b")
    whole.save(tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted([HEADER, IDENTITIES, SIGNATURES])
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes()
    with pytest.raises(InputError, match="never replaced"):
        whole.save(tmp_path / "c")


def test_an_empty_index_can_be_kept(tmp_path: Path) -> None:
    NearDuplicates().save(tmp_path / "empty")
    assert len(NearDuplicates.load(tmp_path / "empty")) == 0


@pytest.mark.parametrize("name", [SIGNATURES, IDENTITIES])
def test_changed_bytes_are_refused(tmp_path: Path, name: str) -> None:
    index = NearDuplicates()
    index.add("a", text(1))
    index.save(tmp_path / "i")
    data = bytearray((tmp_path / "i" / name).read_bytes())
    data[1] ^= 1
    (tmp_path / "i" / name).write_bytes(data)
    with pytest.raises(DataError, match=name):
        NearDuplicates.load(tmp_path / "i")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("probe", "sha256:" + "0" * 64, "arithmetic"),
        ("format", "assay-duplicates/2", "arithmetic"),
        ("stream", "other", "arithmetic"),
        ("documents", 2, "2 documents"),
        ("sha256", None, "is not the file"),
        ("parameters", {"bands": 16}, "exactly"),
        ("parameters", {**method(Parameters())["parameters"], "bands": "x"}, "no number"),
        ("parameters", {**method(Parameters())["parameters"], "rows": 0}, "at least 1"),
        ("parameters", {**method(Parameters())["parameters"], "bands": 10**9}, "bands is 1000000000, .* at most 256"),
        ("parameters", {**method(Parameters())["parameters"], "shingle": 10**9}, "at most 100"),
    ],
)
def test_an_index_of_another_making_is_refused(tmp_path: Path, key: str, value: object, told: str) -> None:
    index = NearDuplicates()
    index.add("a", text(1))
    index.save(tmp_path / "i")
    header = json.loads((tmp_path / "i" / HEADER).read_text(encoding="utf-8"))
    (tmp_path / "i" / HEADER).write_text(json.dumps({**header, key: value}), encoding="utf-8")
    with pytest.raises(AssayError, match=told):
        NearDuplicates.load(tmp_path / "i")


def test_signatures_are_the_same_in_every_process_and_version() -> None:
    # A golden vector: when rensa or the word stream changes, kept indexes can no longer be continued.
    golden = "sha256:c34643a9a2073be7976ff3d40631aa15bfa8ff37588a4d9453cdf44a37c299b7"
    assert method(Parameters())["probe"] == golden
    assert method(Parameters(seed=2))["probe"] != golden
    code = "from assay.corpus.duplicates import *; print(method(Parameters())['probe'])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == golden


def test_a_document_takes_the_memory_that_is_stated() -> None:
    random_bits = np.random.default_rng(0).integers(0, 2**32, (3100, 128), dtype=np.uint32)
    NearDuplicates().add("a", "load what is loaded once")
    tracemalloc.start()
    try:
        index = NearDuplicates()
        for number, signature in enumerate(random_bits):  # just after the table has grown, its worst moment
            index.add_signature(f"{'a source of documents/with pages/':<50}{number:020}", signature)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    block = 1024 * 512  # the last one is not full yet
    assert used < 3100 * (512 + 341 + 60 + 70) + block
    assert len(index) == 3100


@pytest.mark.parametrize(
    ("key", "value"), [("bands", 0), ("rows", 0), ("shingle", 0), ("threshold", 1.5), ("seed", -1)]
)
def test_impossible_parameters_are_named(key: str, value: float) -> None:
    with pytest.raises(InputError, match=key):
        Parameters(**{key: value})  # type: ignore[arg-type]
