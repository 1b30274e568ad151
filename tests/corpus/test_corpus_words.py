"""One word stream for all disguises of a text, and the remembered numbers say the same as the plain function."""

from __future__ import annotations

import textwrap
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.corpus.words import fold, numbers, place, unbroken, words

POLISH = st.text("aąbcćdeęfghijklłmnńoóprsśtuwyzźż", min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t  STOP_here", ["don", "t", "stop", "here"]),
        ("zażółć\nGĘŚLĄ\u00a0jaźń.", ["zażółć", "gęślą", "jaźń"]),
        ("中国的 Hello", ["中", "国", "的", "hello"]),
        ("inter\u00adnation\u200b\U000e0041al ﬁne ½", ["international", "fine", "1", "2"]),
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


@settings(deadline=None)  # the tables are made at the first use
@given(st.text())
def test_numbers_tell_folded_words_apart_and_nothing_else(text: str) -> None:
    stream = [fold(word) for word in words(text)]
    assert all(stream)
    found = numbers(text).tolist()
    assert [numbers(word).tolist() for word in stream] == [[number] for number in found]
    assert len(set(found)) == len(set(stream))


def test_numbers_differ_between_many_words() -> None:
    stream = [f"{a}{b}{c}{d}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx" for d in "yzabcdef0123456789"]
    long = ["a" * length for length in range(1, 1000)]
    found = numbers(" ".join(stream + long)).tolist()  # longer than one stretch
    assert len(set(found)) == len(found) == len(set(stream + long))
    assert numbers("\n".join(reversed(stream + long))).tolist() == found[::-1]


@pytest.mark.parametrize("joint", [" ", ",", "。"])
def test_a_long_text_is_read_to_its_end(joint: str) -> None:
    stream = [f"słowo{n}" for n in range(20_000)]
    found = numbers(joint.join(stream))
    assert len(found) == len(stream)
    expected = numbers(" ".join(stream))
    # Without white space at all a word in 65,536 letters may have another number.
    assert (found != expected).sum() <= (0 if joint == " " else 3)


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


@pytest.mark.parametrize("text", ["한국어 문장", "がぎぐ", "ᾴ ΐ", "Zażółć gęślą"])
def test_numbers_do_not_depend_on_the_unicode_form(text: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert numbers(unicodedata.normalize(form, text)).tolist() == numbers(text).tolist()
