"""Encoding by stretches: a text is cut where the tokenizer would cut it anyway, and each stretch is encoded once.

The ids are those of the whole text, for any text; a tokenizer for which that cannot be shown from its file is used
as it is. It holds what it has encoded, up to a stated number of stretches, and decides nothing about documents.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

HELD = 1 << 17  # stretches, about 220 bytes each: 29 MB
LONG = 48  # characters; longer stretches seldom come again and are not held

# GPT-2's expression, which byte-level pre-tokenizers use, cuts before the white space after anything else, and
# between a letter or digit and the punctuation after it: none of its alternatives goes over such a place, and it looks
# ahead no further than to the end of white space. The sets are small, so that no version of Unicode sees them
# otherwise: white space that all agree on, Latin letters of old, the punctuation of ASCII.
_SPACE, _LETTER, _MARK = r" \t\n\r", "0-9A-Za-zÀ-ÖØ-öø-ɏ", r"!-/:-@\[-`{-~"
_STRETCH = re.compile(
    rf"[{_SPACE}]?(?:[{_LETTER}]++(?![^{_SPACE}{_MARK}])|[{_MARK}]++(?=[{_SPACE}]))"  # the most frequent, for speed
    rf"|.+?(?:(?<=[^\s\u180e])(?=[{_SPACE}])|(?<=[{_LETTER}])(?=[{_MARK}])|\Z)",
    re.DOTALL,
)


def stretches(text: str) -> list[str]:
    """The text in pieces that end where GPT-2's expression cuts, whatever follows."""
    found: list[str] = _STRETCH.findall(text)
    return found


class Stretches:
    """The stretches that a tokenizer has encoded: bytes of uint32, native; None for what is not given back whole."""

    def __init__(self, inner: Inner, end_of_text: int) -> None:
        self._inner = inner
        self._end = end_of_text
        self._known: dict[str, bytes | None] = {}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32] | None]:
        """For each text its ids and the end of text; None when decoding would not give it back, or it holds that id."""
        cut = [stretches(text) for text in texts]
        new = {stretch for pieces in cut for stretch in pieces} - self._known.keys()
        self._learn(list(new))
        end = array("I", [self._end]).tobytes()
        coded: list[NDArray[np.uint32] | None] = []
        for pieces in cut:
            parts = [*map(self._known.__getitem__, pieces), end]
            whole = cast(list[bytes], parts)
            coded.append(None if None in parts else np.frombuffer(b"".join(whole), np.uint32))
        self._forget(new)
        return coded

    def _learn(self, new: list[str]) -> None:
        ids = [each.ids for each in self._inner.encode_batch_fast(new, add_special_tokens=False)]
        back = self._inner.decode_batch(ids, skip_special_tokens=False)
        for stretch, found, decoded in zip(new, ids, back, strict=True):
            whole = decoded == stretch and self._end not in found
            self._known[stretch] = array("I", found).tobytes() if whole else None

    def _forget(self, new: set[str]) -> None:
        for stretch in new:
            if len(stretch) > LONG:
                del self._known[stretch]
        if len(self._known) > HELD:
            self._known.clear()


def cuttable(inner: Inner) -> bool:
    """Whether this tokenizer gives a text the ids of its stretches one after another.

    So it is for byte-level BPE with GPT-2's expression and nothing before it, when all added tokens are special ones,
    which no text becomes.
    """
    record = json.loads(inner.to_str(pretty=False))
    model: dict[str, Any] = record["model"]
    first: dict[str, Any] = record["pre_tokenizer"] or {}
    last: dict[str, Any] = record["decoder"] or {}
    return (
        model["type"] == "BPE"
        and not model["dropout"]
        and record["normalizer"] is None
        and first.get("type") == last.get("type") == "ByteLevel"
        and first["use_regex"]
        and not first["add_prefix_space"]
        and all(token["special"] for token in record["added_tokens"])
    )
