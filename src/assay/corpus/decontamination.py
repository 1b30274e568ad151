"""Finding held-out text in documents: word for word in any disguise, and partly edited.

Texts are compared as word streams (`assay.corpus.words`), read plainly and with diacritics folded. What is
found is told by the item's name, never by its words. It drops nothing itself, and it does not know paraphrases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from assay.corpus.held_out import Item, Set, read_sets
from assay.corpus.words import STREAM, fold, numbers, place, unbroken, words
from assay.errors import InputError

GRAM = 5  # words; every finding is made of such grams
N = 13
NEAR = 0.5
LEAST_BYTES = 20  # a shorter run of words in UTF-8 is no evidence: single letters, digits
COMMON = 64  # a gram that more texts share is a template's, and no evidence by itself
_PLACES = 20
_ODD = 0x9E3779B97F4A7C15  # an odd base loses no word's weight in a hash
_BASE, _SQUARE = np.uint64(_ODD), np.uint64(_ODD**2 % 2**64)
_STRANGE = bytes(4)  # the place of every word that no held-out item has
_BIT, _SEVEN = np.uint8(1) << np.arange(8, dtype=np.uint8), np.uint64(7)
_STEPS = np.arange(GRAM)

Ints = NDArray[np.int64]
Words = NDArray[np.int32]


@dataclass(frozen=True)
class Contamination:
    """A held-out item found in a document.

    `kind` exact: a run of `n` words of the item, or a whole text of it that is shorter; near: no such run, but
    at least the asked share of its grams. `reading`: plain, or folded when it is there only without regard to
    diacritics. `share`: of the item's own grams of five words, those in the document. `words`: the longest run of
    words. `start`: the character of the document where the first piece with a word of it begins.
    """

    set: str
    item: str
    kind: Literal["exact", "near"]
    reading: Literal["plain", "folded"]
    share: float
    words: int
    start: int

    def evidence(self) -> str:
        """One line for a list of rejected documents; holds no word of the item."""
        return (
            f"{self.kind} match, {self.reading}, with item {self.item} of {self.set} from character {self.start}: "
            f"{self.words} words in a row, {self.share:.1%} of its five-word grams"
        )


@dataclass
class _Found:
    """What became of one item so far."""

    times: int = 0
    kinds: set[str] = field(default_factory=set)
    documents: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Match:
    """A part of an item found in a document; `at`: the number of the first matching word there."""

    part: int
    exact: bool
    plain: bool
    share: float
    run: int
    at: int


@dataclass(frozen=True)
class _Document:
    """A text's words by their numbers, diacritics folded and kept; equally many."""

    folded: Words
    plain: Words


class HeldOut:
    """Held-out sets, ready to be looked for. Made by `load`; about 60 bytes for each word of a part, and a
    table of 64 to 128 for each of its grams, 128 MB at most.

    The texts of an item (each field, each string of a list, and all of them as one) are its parts, and the item
    is found when a part is. All arrays run over the words of all distinct parts, one after another.
    """

    def __init__(self, sets: Sequence[Set], items: Sequence[Item], n: int, near: float) -> None:
        if n < GRAM:
            raise InputError(f"decontamination: n is {n}, but at least {GRAM} words make a run")
        if not 0 < near <= 1:
            raise InputError(f"decontamination: near is {near}, a share above 0 and at most 1 is expected")
        self.sets, self.items, self.n, self.near = tuple(sets), tuple(items), n, near
        self._found: dict[int, _Found] = {}
        self._folded_words: dict[str, bytes] = {}
        self._plain_words: dict[str, bytes] = {}
        self._read_parts()
        self._index()

    @classmethod
    def load(cls, paths: Sequence[Path], fields: Sequence[str] = ("text",), n: int = N, near: float = NEAR) -> HeldOut:
        """Read the sets (see `held_out.read_sets`); `n`: words of a run; `near`: the share for a near match."""
        return cls(*read_sets(paths, fields), n, near)

    def check(self, text: str) -> Contamination | None:
        """The strongest finding in a document, or None: exact before near, plain before folded, larger share first."""
        found = self.find(text)
        return found[0] if found else None

    def find(self, text: str) -> tuple[Contamination, ...]:
        """All held-out items found in a document, strongest first; changes nothing, so processes may share the work.

        A text with words hyphenated over line ends is read as it stands and with these words joined.
        """
        best: dict[int, Contamination] = {}
        for version in (text, unbroken(text)):
            for match in self._matches(version) if version is not None else ():
                for number in self._holders[match.part]:
                    item = self.items[number]
                    kind: Literal["exact", "near"] = "exact" if match.exact else "near"
                    start = place(version or "", match.at)
                    reading: Literal["plain", "folded"] = "plain" if match.plain else "folded"
                    one = Contamination(item.set, item.id, kind, reading, round(match.share, 4), match.run, start)
                    if number not in best or _strength(one) < _strength(best[number]):
                        best[number] = one
        return tuple(sorted(best.values(), key=lambda one: (*_strength(one), one.set, one.item)))

    def record(self, document: str, findings: Sequence[Contamination]) -> None:
        """Count a document's findings for `report`; called in the order of the documents by whoever drops them."""
        for one in findings:
            entry = self._found.setdefault(self._number[one.set, one.item], _Found())
            entry.times += 1
            entry.kinds.add(f"{one.kind}, {one.reading}")
            if len(entry.documents) < _PLACES:
                entry.documents.append(document)

    def report(self) -> list[dict[str, Any]]:
        """For each item: set, item, checkable, found (documents), kinds, and the first 20 documents by name.

        An item is not checkable when no text of it has five words and 20 bytes that are not only a template's.
        """
        checkable = {number for part in np.flatnonzero(self._own_count) for number in self._holders[part]}
        rows = []
        for number, item in enumerate(self.items):
            found = self._found.get(number, _Found())
            row = {"set": item.set, "item": item.id, "checkable": number in checkable, "found": found.times}
            rows.append({**row, "kinds": sorted(found.kinds), "documents": list(found.documents)})
        return rows

    def method(self) -> dict[str, Any]:
        """What a finding depends on, for receipts: the sets by digest, the word stream, the lengths."""
        sets = [{"name": one.name, "sha256": one.sha256, "items": one.items} for one in self.sets]
        return {"sets": sets, "stream": STREAM, "n": self.n, "gram": GRAM, "near": str(self.near), "common": COMMON}

    def _read_parts(self) -> None:
        """Give the words of all distinct parts their numbers, plain and folded, and note who holds a part."""
        self._number = {(item.set, item.id): number for number, item in enumerate(self.items)}
        self._holders: list[list[int]] = []
        known: dict[tuple[bytes, bytes], int] = {}
        hashes = [np.empty(0, dtype=np.uint64)]
        sizes: list[int] = []
        lengths: list[int] = []
        for number, item in enumerate(self.items):
            for text in dict.fromkeys([*item.texts, "\n".join(item.texts)]):
                stream = words(text)
                bare = [fold(word) for word in stream]
                weights = [len(word.encode()) for word in bare]
                if len(stream) < GRAM or sum(weights) < LEAST_BYTES:
                    continue
                one = b"".join(_numbered(word, self._folded_words) for word in bare)
                other = b"".join(_numbered(word, self._plain_words) for word in stream)
                part = known.setdefault((one, other), len(known))
                if part == len(self._holders):
                    self._holders.append([])
                    hashes.append(numbers(text))
                    sizes.extend(weights)
                    lengths.append(len(stream))
                if number not in self._holders[part][-1:]:
                    self._holders[part].append(number)
        self._hashes = np.concatenate(hashes)
        self._folded: Words = np.frombuffer(b"".join(one for one, _ in known), dtype="<i4")
        self._plain: Words = np.frombuffer(b"".join(other for _, other in known), dtype="<i4")
        self._bytes: Ints = np.cumsum([0, *sizes], dtype=np.int64)  # bytes before each word
        self._ends: Ints = np.cumsum(lengths, dtype=np.int64)
        self._starts: Ints = self._ends - np.array(lengths, dtype=np.int64)
        self._part: Ints = np.repeat(np.arange(len(lengths)), lengths)

    def _index(self) -> None:
        """The hashes of all grams that are evidence, sorted, with a first filter: a table of a bit of each hash."""
        total = len(self._folded)
        whole = np.zeros(total, dtype=bool)
        if total >= GRAM:
            whole[: total - GRAM + 1] = self._part[: total - GRAM + 1] == self._part[GRAM - 1 :]
        positions = np.flatnonzero(whole)
        hashes = _gram_hashes(self._hashes)[positions]
        # How many parts hold a gram: each (hash, part) once.
        pairs = np.unique(np.stack([hashes, self._part[positions].astype(np.uint64)]), axis=1)
        keys, holders = np.unique(pairs[0], return_counts=True)
        rare = keys[holders <= COMMON]
        own = np.isin(hashes, rare)
        positions, hashes = positions[own], hashes[own]
        order = np.argsort(hashes, kind="stable")
        self._positions, ordered = positions[order], hashes[order]
        self._keys, first = np.unique(ordered, return_index=True)
        self._first = np.append(first, len(ordered))
        self._own = np.zeros(total, dtype=bool)
        self._own[positions] = True
        self._own_count = np.bincount(self._part[positions], minlength=len(self._holders))
        self._demand()
        width = max(10, min(27, len(self._keys).bit_length() + 6))  # 64 to 128 bytes a gram, 128 MB at most
        self._shift = np.uint64(64 - width)
        self._table = np.zeros(1 << width, dtype=np.uint8)
        np.bitwise_or.at(self._table, self._keys >> self._shift, _BIT[self._keys & _SEVEN])

    def _demand(self) -> None:
        """The fewest indexed grams that a run long enough for an exact match can hold, for each part."""
        sums = np.concatenate(([0], np.cumsum(self._own)))
        self._need = np.ones(len(self._holders), dtype=np.int64)
        for part, (start, end) in enumerate(zip(self._starts.tolist(), self._ends.tolist(), strict=True)):
            grams = min(self.n, end - start) - GRAM + 1
            held = sums[start + grams : end - GRAM + 2] - sums[start : end - GRAM + 2 - grams]
            self._need[part] = max(1, int(held.min()))
        near = np.maximum(1, np.ceil(self.near * self._own_count)).astype(np.int64)
        near[self._ends - self._starts < self.n] = np.iinfo(np.int64).max  # a shorter part is found whole or not at all
        self._near_need: Ints = near
        self._least: list[int] = np.minimum(self._need, near).tolist()

    def _matches(self, text: str) -> Iterator[_Match]:
        """The parts found in one version of a text. Most texts leave at one of the first returns."""
        hashed = numbers(text)
        if len(hashed) < GRAM or not len(self._keys):
            return
        hashes = _gram_hashes(hashed)
        at = (self._table[hashes >> self._shift] & _BIT[hashes & _SEVEN]).nonzero()[0]
        if not len(at):
            return
        hashes = hashes[at]
        key = self._keys[:-1].searchsorted(hashes)  # without the last, so that each answer is a place in `_keys`
        real = (self._keys[key] == hashes).nonzero()[0]
        if not len(real):
            return
        at, key = at[real], key[real]
        counts = self._first[key + 1] - self._first[key]
        before = counts.cumsum() - counts
        positions = self._positions[(self._first[key] - before).repeat(counts) + np.arange(counts.sum())]
        parts = self._part[positions]
        hits = Counter(parts.tolist())
        candidates = [part for part, number in hits.items() if number >= self._least[part]]
        if not candidates:
            return
        at = at.repeat(counts)
        document = self._document(text)
        for part in sorted(candidates):
            mine = (parts == part).nonzero()[0]
            match = self._judge(part, at[mine], positions[mine], document)
            if match is not None:
                yield match

    def _document(self, text: str) -> _Document:
        """The words of a text by their places in the vocabularies of the held-out ones."""
        stream = words(text)
        folded = b"".join(self._folded_words.get(fold(word), _STRANGE) for word in stream)
        plain = b"".join(self._plain_words.get(word, _STRANGE) for word in stream)
        return _Document(np.frombuffer(folded, dtype="<i4"), np.frombuffer(plain, dtype="<i4"))

    def _judge(self, part: int, at: Ints, positions: Ints, document: _Document) -> _Match | None:
        """Compare words: the best match of one part, exact before near, plain before folded; None: it is not there.

        `at`, `positions`: where a gram of the document has the hash of one of the part.
        """
        # The line of a hit, its document word minus its part's word, is the same for all grams of one run.
        lines, on_line = np.unique(at - positions, return_counts=True)
        lines = lines[on_line >= self._need[part]]
        matches: list[_Match] = []
        for plain, of_part, of_text in ((True, self._plain, document.plain), (False, self._folded, document.folded)):
            same = (of_part[positions[:, None] + _STEPS] == of_text[at[:, None] + _STEPS]).all(axis=1)
            held = len(np.unique(positions[same]))
            run, first = self._longest(part, lines, of_part, of_text)
            exact = run >= min(self.n, int(self._ends[part] - self._starts[part]))
            if exact or held >= self._near_need[part]:
                first = first if exact else int(at[same].min())
                matches.append(_Match(part, exact, plain, held / int(self._own_count[part]), run, first))
        return min(matches, key=lambda match: (not match.exact, not match.plain), default=None)

    def _longest(self, part: int, lines: Ints, of_part: Words, of_text: Words) -> tuple[int, int]:
        """(words, number of its first word in the text) of the longest run that is evidence; (0, 0): there is none."""
        best = (0, 0)
        for line in lines.tolist():
            start = max(int(self._starts[part]), -line)
            end = min(int(self._ends[part]), len(of_text) - line)
            equal = of_part[start:end] == of_text[start + line : end + line]
            edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0])))) + start
            for first, last in edges.reshape(-1, 2).tolist():
                evidence = self._own[first : max(first, last - GRAM + 1)].any()
                if last - first > best[0] and evidence and self._bytes[last] - self._bytes[first] >= LEAST_BYTES:
                    best = (last - first, first + line)
        return best


def _numbered(word: str, known: dict[str, bytes]) -> bytes:
    """The place of a held-out word in their vocabulary, entered when it is new."""
    return known.setdefault(word, (len(known) + 1).to_bytes(4, "little"))


def _gram_hashes(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of all runs of five values: ((v0 B + v1) B + …) + v4 modulo 2^64, by where they begin."""
    pairs = values[:-1] * _BASE + values[1:]
    fours = pairs[:-2] * _SQUARE + pairs[2:]
    return fours[:-1] * _BASE + values[4:]


def _strength(one: Contamination) -> tuple[bool, bool, float, int, int]:
    return one.kind != "exact", one.reading != "plain", -one.share, -one.words, one.start
