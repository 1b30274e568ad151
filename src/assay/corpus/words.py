"""The normalised word stream that duplicates and decontamination compare texts by.

Two texts that differ in line wraps, white space, case, Unicode form, punctuation or invisible characters
have one stream; `fold` takes the diacritics as well. It is for comparing only: no document is changed by it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

STREAM = (
    "NFKC, format characters dropped, words of letters, digits and marks, kana and ideographs singly, "
    "case and diacritics folded"
)
_SINGLE = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_MODIFIERS = (0x02B0, 0x02FF)  # apostrophes among them, which other writers type as punctuation
_ASTRAL_WORDS = ((0x10000, 0x1CFFF), (0x1E000, 0x1EFFF))  # scripts; music, emoji and other symbols lie outside
# Letters that Unicode does not take apart, as people write them who lack the key.
_WHOLE = str.maketrans(
    {"ł": "l", "đ": "d", "ð": "d", "ø": "o", "ħ": "h", "ŧ": "t", "ı": "i", "æ": "ae", "œ": "oe", "þ": "th", "ŋ": "n"}
)
_ASCII = "".join(chr(code).lower() if chr(code).isalnum() else " " for code in range(128))
_HYPHENATED = re.compile(r"-\r?\n")
_BROKEN = re.compile(r"(?<=\w)[-\u2010\u00ad]\r?\n[ \t]*(?=\w)")


def words(text: str) -> list[str]:
    """The words of a text in their order, as `STREAM` states but with diacritics. "Don’t  STOP" → don, t, stop.

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
        self[code] = unicodedata.normalize("NFC", bare)  # Hangul whole again
        return self[code]


_LETTERS = _Letters()


def unbroken(text: str) -> str | None:
    """The text with words joined that are hyphenated over a line end, at its old length; None: there are none.

    Soft hyphens, which `words` drops, take the places of what is removed, so that offsets stay true.
    """
    # Most texts leave here: the whole expression takes ten times as long.
    if not (_HYPHENATED.search(text) or "\u2010" in text or "\u00ad" in text):
        return None
    joined = _BROKEN.sub(lambda found: "\u00ad" * len(found[0]), text)
    return joined if joined != text else None


def place(text: str, index: int) -> int:
    """The character at which the piece of text with word number `index` begins, white space being the joint."""
    before = 0
    for piece in re.finditer(r"\S+", text):
        before += len(words(piece[0]))
        if before > index:
            return piece.start()
    raise IndexError(f"the text has {before} words, not {index + 1}")


def numbers(text: str) -> NDArray[np.uint64]:
    """A 64-bit number for each of `words(text)`, folded: the same everywhere, and different for different words.

    Different so far as 64 bits go; who must be sure compares the words. It is the fast way, a tenth of the time of
    `words`: all letters at once, Σ letter × B^place over each word, times B^-place of its first letter.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if len(text) > _STRETCH:
        return np.concatenate([_stretch(piece) for piece in _stretches(text)])
    return _stretch(text)


def _stretch(text: str) -> NDArray[np.uint64]:
    """`numbers` for a normalised text of moderate length."""
    if text.isascii():
        letters = _tables().letters.take(np.frombuffer(f" {text} ".encode("ascii"), dtype=np.uint8), mode="clip")
    else:
        units = _units(text)
        letters = _tables().first.take(units, mode="clip")
        if (letters == _SPECIAL).any():
            letters = _tables().letters.take(_units(text.translate(_SPELLED)), mode="clip")
    inside = letters != 0
    edges = (inside[1:] != inside[:-1]).nonzero()[0] + 1
    starts = edges[::2]
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    if len(letters) > len(_UP):  # one piece without white space: a word over the joint has another number there
        places = np.arange(len(letters)) % len(_UP)
        sums = np.add.reduceat(letters * _UP[places], starts) * _DOWN[places[starts]]
    else:
        sums = np.add.reduceat(letters * _UP[: len(letters)], starts) * _DOWN[starts]
    spread: NDArray[np.uint64] = (sums ^ (sums >> np.uint64(32))) * _SPREAD
    return spread


def _stretches(text: str) -> Iterator[str]:
    """A long text in stretches that end at white space."""
    start = 0
    while start < len(text):
        end = _SPACE.search(text, start + _STRETCH)
        stop = end.start() if end else len(text)
        yield text[start:stop]
        start = stop


def _units(text: str) -> NDArray[np.uint16]:
    """UTF-16 code units between two spaces."""
    return np.frombuffer(f" {text} ".encode("utf-16-le", errors="surrogatepass"), dtype="<u2")


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * base % 2**64)
    return np.array(powers, dtype=np.uint64)


_STRETCH = 1 << 13
_SPACE = re.compile(r"\s")
_BASE = 0x9E3779B97F4A7C15
_UP, _DOWN = _powers(_BASE, 1 << 16), _powers(pow(_BASE, -1, 2**64), 1 << 16)
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_SPECIAL = np.uint64(1)


class _Spelled(dict[int, str]):
    """What a character adds to the folded stream: letters, and spaces where words end; found out once."""

    def __missing__(self, code: int) -> str:
        self[code] = spelled = "".join(map(self._one, unicodedata.normalize("NFKC", chr(code))))
        return spelled

    @staticmethod
    def _one(character: str) -> str:
        if unicodedata.category(character) == "Cf":
            return ""
        if not _word().fullmatch(character):
            return " "
        alone = any(first <= ord(character) <= last for first, last in _SINGLE)
        return f" {fold(_cased(character))} " if alone else fold(_cased(character))


_SPELLED = _Spelled()


@dataclass(frozen=True)
class _Tables:
    """A letter's value for each UTF-16 code unit, 0 between words; `first`: 1 for what must be spelled out before."""

    first: NDArray[np.uint64]
    letters: NDArray[np.uint64]


@cache
def _tables() -> _Tables:
    letters = np.arange(1, 0x10001, dtype=np.uint64)
    special = np.zeros(0x10000, dtype=bool)
    special[0xD800:0xE000] = True
    # What is alike is not asked one by one: two thirds of the plane.
    special[0x3400:0x4DC0] = special[0x4E00:0xA000] = True  # ideographs, each a word
    letters[0xE000:0xF900] = 0  # private use; Hangul syllables stay as they are
    for code in (*range(0x3400), *range(0x4DC0, 0x4E00), *range(0xA000, 0xAC00), *range(0xD7A4, 0xD800),
                 *range(0xF900, 0x10000)):  # fmt: skip
        spelled = _SPELLED[code]
        special[code] = len(spelled) != 1
        if spelled == " ":
            letters[code] = 0
        elif len(spelled) == 1:
            letters[code] = ord(spelled) + 1
    # Letters far apart: the steps of SplitMix64, which keep 0.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        letters = (letters ^ (letters >> np.uint64(shift))) * np.uint64(factor)
    letters = letters ^ (letters >> np.uint64(31))
    return _Tables(np.where(special, _SPECIAL, letters), letters)


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
    planes = (*range(0x20000), *range(0xE0000, 0xE1000))
    return re.compile(f"[{_ranges([n for n in planes if unicodedata.category(chr(n)) == 'Cf'])}]")


def _ranges(codes: list[int]) -> str:
    """Ascending code points as the inside of a character class."""
    spans: list[tuple[int, int]] = []
    for code in codes:
        if spans and spans[-1][1] == code - 1:
            spans[-1] = (spans[-1][0], code)
        else:
            spans.append((code, code))
    return "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in spans)
