"""One word stream for all disguises of a text, and the remembered numbers say the same as the plain function."""

from __future__ import annotations

import textwrap
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus.words import Numbers, fold, place, unbroken, words

POLISH = st.text("aąbcćdeęfghijklłmnńoóprsśtuwyzźż", min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t  STOP_here", ["don", "t", "stop", "here"]),
        ("zażółć\nGĘŚLĄ\u00a0jaźń.", ["zażółć", "gęślą", "jaźń"]),
        ("中国的 Hello", ["中", "国", "的", "hello"]),
        ("inter\u00adnation\u200bal ﬁne ½", ["international", "fine", "1", "2"]),
        ("STRASSE straße", ["strasse", "strasse"]),
        ("— … ´ ̈ 🙂", []),
    ],
)
def test_words_are_runs_of_letters_digits_and_marks(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_folding_takes_the_diacritics_and_the_letters_that_unicode_keeps_whole() -> None:
    assert [fold(word) for word in words("Zażółć gęślą jaźń ŁÓDŹ smørrebrød Æsop")] == [
        "zazolc", "gesla", "jazn", "lodz", "smorrebrod", "aesop",
    ]  # fmt: skip


@given(st.lists(POLISH, min_size=1, max_size=30))
def test_a_stream_survives_wraps_forms_and_case(stream: list[str]) -> None:
    text = " ".join(stream)
    assert words(text) == stream
    assert words("\n".join(textwrap.wrap(text, 20))) == stream
    assert words(unicodedata.normalize("NFD", text).upper()) == stream
    assert words("“" + ", ".join(stream) + "”!") == stream


@given(st.text())
def test_numbers_of_pieces_are_the_numbers_of_the_words(text: str) -> None:
    known: dict[str, int] = {}

    def number(word: str) -> int:
        return known.setdefault(word, len(known))

    numbers = Numbers(lambda word: number(word).to_bytes(4, "little"), "<i4")
    expected = [number(word) for word in words(text)]
    assert numbers.of(text).tolist() == expected
    assert numbers.of(text).tolist() == expected  # now remembered
    assert all(fold(word) for word in words(text))


@given(st.lists(POLISH, min_size=1, max_size=30), st.data())
def test_the_place_of_a_word_is_where_its_piece_begins(stream: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(stream) - 1))
    text = " … ".join(stream)
    assert text[place(text, index) :].startswith(stream[index])
    with pytest.raises(IndexError, match="words"):
        place(text, len(stream))


def test_words_broken_over_lines_are_joined_at_the_same_length() -> None:
    text = "an inter-\n    national well-known thing"
    joined = unbroken(text)
    assert joined is not None
    assert words(joined) == ["an", "international", "well", "known", "thing"]
    assert len(joined) == len(text)
    assert unbroken("a well-known thing\n- a list") is None


def test_memory_of_pieces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.corpus.words._REMEMBERED", 10)
    numbers = Numbers(lambda word: bytes([len(word)]), np.uint8)
    for count in range(1, 100):
        assert numbers.of(f"{'a' * count} b").tolist() == [count, 1]
        assert len(numbers) <= 10
