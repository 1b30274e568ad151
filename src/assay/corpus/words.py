"""The normalised word stream that duplicates and decontamination compare texts by.

Two texts that differ in line wraps, white space, case, Unicode form, punctuation or invisible characters
have one stream; `fold` takes the diacritics as well. It is for comparing only: no document is changed by it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

STREAM = "NFKC, format characters dropped, words of letters, digits and marks, kana and ideographs singly, case folded"
_REMEMBERED = 1 << 18
_LONGEST_REMEMBERED = 32
_SINGLE = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_MODIFIERS = (0x02B0, 0x02FF)  # apostrophes among them, which other writers type as punctuation
_ASTRAL_WORDS = ((0x10000, 0x1CFFF), (0x1E000, 0x1EFFF))  # scripts; music, emoji and other symbols lie outside
# Letters that Unicode does not take apart, as people write them who lack the key.
_WHOLE = str.maketrans(
    {"ł": "l", "đ": "d", "ð": "d", "ø": "o", "ħ": "h", "ŧ": "t", "ı": "i", "æ": "ae", "œ": "oe", "þ": "th", "ŋ": "n"}
)
_ASCII = "".join(chr(code).lower() if chr(code).isalnum() else " " for code in range(128))
_BROKEN_ENDS = tuple(mark + end for mark in "-\u2010\u00ad" for end in ("\n", "\r\n"))
_BROKEN = re.compile(r"(?<=\w)[-\u2010\u00ad]\r?\n[ \t]*(?=\w)")


def words(text: str) -> list[str]:
    """The words of a text in their order, in the form that `STREAM` states. "Don’t  STOP" → don, t, stop.

    Scripts that write without spaces, other than kana and ideographs, give one word a phrase. The tables
    of letters are those of this Python's Unicode version.
    """
    if text.isascii():
        return text.translate(_ASCII).split()
    text = _invisible().sub("", unicodedata.normalize("NFKC", text))
    forms = map(_cased, _word().findall(text))
    return [form for form in forms if form[0].isalnum() or fold(form)]  # a mark alone is no word


def _cased(word: str) -> str:
    return word.lower() if word.isascii() else unicodedata.normalize("NFKC", word.casefold())


def fold(word: str) -> str:
    """A word of `words` without diacritics: combining marks dropped, ł → l, ø → o, æ → ae and their like."""
    if word.isascii():
        return word
    return word.translate(_LETTERS)


class _Letters(dict[int, str]):
    """What becomes of a letter when folded, found out once."""

    def __missing__(self, code: int) -> str:
        apart = unicodedata.normalize("NFKD", chr(code))
        bare = "".join(c for c in apart if unicodedata.category(c)[0] != "M").translate(_WHOLE)
        self[code] = bare
        return bare


_LETTERS = _Letters()


def unbroken(text: str) -> str | None:
    """The text with words joined that are hyphenated over a line end, at its old length; None: there are none.

    Soft hyphens, which `words` drops, take the places of what is removed, so that offsets stay true.
    """
    for end in _BROKEN_ENDS:  # looked for one by one, which takes a tenth of the expression's time
        if end in text:
            joined = _BROKEN.sub(lambda found: "\u00ad" * len(found[0]), text)
            return joined if joined != text else None
    return None


def place(text: str, index: int) -> int:
    """The character at which the piece of text with word number `index` begins, white space being the joint."""
    before = 0
    for piece in re.finditer(r"\S+", text):
        before += len(words(piece[0]))
        if before > index:
            return piece.start()
    raise IndexError(f"the text has {before} words, not {index + 1}")


class Numbers(dict[str, bytes]):
    """From texts to arrays of numbers, a number a word, by a given meaning of words.

    White space parts a text into pieces, and no step of the normal form reaches over white space; so the numbers
    of a piece are remembered: at most 262,144 pieces of up to 32 characters (about 50 MB), then anew.
    """

    def __init__(self, number: Callable[[str], bytes], dtype: DTypeLike, folded: bool = False) -> None:
        super().__init__()
        self._number = number  # a word's number as the bytes of `dtype`
        self._dtype = dtype
        self._folded = folded  # whether it is asked for words without diacritics

    def __missing__(self, piece: str) -> bytes:
        found: Iterable[str] = words(piece)
        if self._folded and not piece.isascii():
            found = map(fold, found)
        numbers = b"".join(map(self._number, found))
        if len(piece) <= _LONGEST_REMEMBERED:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[piece] = numbers
        return numbers

    def of(self, text: str) -> NDArray[Any]:
        """One number for each of the text's words, read-only."""
        return np.frombuffer(b"".join(map(self.__getitem__, text.split())), dtype=self._dtype)


@cache
def _word() -> re.Pattern[str]:
    """One kana or ideograph, or a run of letters, digits and marks."""
    single = "".join(f"{chr(first)}-{chr(last)}" for first, last in _SINGLE)
    lone = {code for first, last in (*_SINGLE, _MODIFIERS) for code in range(first, min(last, 0xFFFF) + 1)}
    letters = [n for n in range(0x10000) if n not in lone and unicodedata.category(chr(n))[0] in "LNM"]
    astral = "".join(f"{chr(first)}-{chr(last)}" for first, last in _ASTRAL_WORDS)
    return re.compile(f"[{_ranges(letters)}{astral}]+|[{single}]")


@cache
def _invisible() -> re.Pattern[str]:
    """Format characters: soft hyphens, zero-width spaces and joiners, marks of direction."""
    return re.compile(f"[{_ranges([n for n in range(0x10000) if unicodedata.category(chr(n)) == 'Cf'])}]")


def _ranges(codes: list[int]) -> str:
    """Ascending code points as the inside of a character class."""
    spans: list[tuple[int, int]] = []
    for code in codes:
        if spans and spans[-1][1] == code - 1:
            spans[-1] = (spans[-1][0], code)
        else:
            spans.append((code, code))
    return "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in spans)
