"""Encoding by stretches gives the ids of the whole text, for any text, or the text is encoded as it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from corpus_samples import WORDS, prose
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from assay.corpus import encoding, tokenizer
from assay.corpus.encoding import stretches
from assay.corpus.tokenizer import Tokenizer, round_trip
from assay.files.shared import shared

END = "<|endoftext|>"
# Everything that splits texts in some tokenizer: white space of all kinds, contractions, marks, digits of other
# scripts, letters younger and older than this Python's tables, halves of the end of text.
NASTY = [*" \t\n\r\v\f\x1c\x85\xa0\u1680\u180e\u2003\u2028\u200b\ufeff", "  ", "\r\n", "'s", "'ll", "'", "’", "it's",
         "a", "Z", "é", "ł", "ż", "z\u0307", "\u0301", "ß", "ɏ", "ɐ", "ж", "漢字", "か", "ก", "\u0e33", "𝒳", "👩‍👩‍👦",
         "🫨", "1", "42", "²", "½", "٣", "Ⅷ", "_", "-", "...", "…", "—", "«", "<|", "|>", END, "\ufffd", "\u1c89",
         "\U00016d40", *WORDS]  # fmt: skip


@pytest.fixture(scope="module")
def english() -> Tokenizer:
    """Byte-level BPE trained on some real text."""
    with shared("corpora/gnome-help/documents-pl.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(60)]
    return tokenizer.from_bytes(tokenizer.train(texts, 600, END), END, "trained")


def plain(of: Tokenizer) -> Tokenizer:
    """The same tokenizer, used as it is."""
    return Tokenizer(of.inner, of.data, of.digest, of.vocabulary, of.end_of_text, None)


def words(of: Tokenizer, text: str) -> list[str]:
    """Where the tokenizer's own expression cuts."""
    return [word for word, _ in of.inner.pre_tokenizer.pre_tokenize_str(text)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(NASTY), st.characters(exclude_categories=["Cs"])), max_size=40).map("".join))
def test_the_ids_are_those_of_the_whole_text(english: Tokenizer, text: str) -> None:
    pieces = stretches(text)
    assert "".join(pieces) == text
    assert [word for piece in pieces for word in words(english, piece)] == words(english, text)
    assert english.stretches is not None
    [(ids, lossy)] = round_trip(english, [text])
    [(expected, as_it_is)] = round_trip(plain(english), [text])
    assert (ids.tolist(), lossy) == (expected.tolist(), as_it_is) == (expected.tolist(), None)


def test_no_character_is_cut_off_from_its_neighbours_where_the_tokenizer_joins_them(english: Tokenizer) -> None:
    alike = {*range(0x3500, 0x9F00), *range(0xAD00, 0xF800)}  # ideographs, Hangul, halves of characters, private use
    characters = [chr(code) for code in range(0x10000) if code not in alike]
    for at in range(0, len(characters), 1024):
        text = "".join(f"{c} {c}.{c}  ż{c}\na{c}'s" for c in characters[at : at + 1024])
        assert [word for piece in stretches(text) for word in words(english, piece)] == words(english, text)


def test_texts_that_decoding_does_not_give_back_are_told_as_before() -> None:
    letters = {letter: place for place, letter in enumerate([END, "a", "b", "Ġ", "Ċ"])}
    inner = Inner.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 0, "content": END, "special": True, "single_word": False, "lstrip": False,
                                  "rstrip": False, "normalized": False}],
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                "model": {"type": "BPE", "vocab": letters, "merges": []},
            }
        )
    )  # fmt: skip
    narrow = tokenizer.from_bytes(inner.to_str().encode(), END, "narrow")
    assert narrow.stretches is not None
    texts = ["a b", "ab\nzba b", "ba", ""]
    found = round_trip(narrow, texts)
    assert [lossy for _, lossy in found] == [None, tokenizer.Lossy("bytes_dropped", 3, ord("z")), None, None]
    assert [ids.tolist() for ids, _ in found] == [ids.tolist() for ids, _ in round_trip(plain(narrow), texts)]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"decoder": None},
    ],
)
def test_another_tokenizer_is_used_as_it_is(english: Tokenizer, change: dict[str, object]) -> None:
    data = json.dumps({**json.loads(english.data), **change}).encode()
    assert tokenizer.from_bytes(data, END, "changed").stretches is None


def test_added_tokens_that_text_becomes_are_not_cut(english: Tokenizer) -> None:
    record = json.loads(english.data)
    added = {**record["added_tokens"][0], "id": 600, "content": "a b", "special": False}
    changed = tokenizer.from_bytes(
        json.dumps({**record, "added_tokens": [*record["added_tokens"], added]}).encode(), END, "changed"
    )
    [(ids, _)] = round_trip(changed, ["a b"])
    assert ids.tolist() == [600, 0]


def test_what_is_held_does_not_grow_with_the_text(english: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "HELD", 200)
    fresh = encoding.Stretches(english.inner, english.end_of_text)
    for number in range(20):
        texts = [prose(number * 50 + k) + f" {number}x{k} {'long' * 20}{k}" for k in range(50)]
        for ids, (expected, _) in zip(fresh.encode(texts), round_trip(plain(english), texts), strict=True):
            assert ids is not None
            assert np.array_equal(ids, expected)
        assert len(fresh._known) <= 200
        assert max(map(len, fresh._known), default=0) <= encoding.LONG
