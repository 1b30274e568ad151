"""How much of each language a corpus takes: target tokens and slot mix, shard by shard.

A pure function of the token counts in corpus order. The document that reaches a quota is the last one taken;
those behind it leave by name. Shares are decimal numbers, compared without rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from assay.corpus.description import Corpus
from assay.errors import DataError


@dataclass(frozen=True)
class Quota:
    """Tokens to take for (part, language); `short`: tokens that the target asks for and the corpus has not."""

    tokens: Mapping[tuple[int, str], Fraction]
    short: int


def quotas(corpus: Corpus, available: Mapping[tuple[int, str], int]) -> Quota | None:
    """What to take, from the tokens available by (part, language); None: everything.

    With a mix each training shard takes as many tokens as keep the shares, and no more than its part of the
    target. Validation is never cut.
    """
    if corpus.target_tokens is None and corpus.mix is None:
        return None
    taken: dict[tuple[int, str], Fraction] = {}
    asked = None if corpus.target_tokens is None else Fraction(corpus.target_tokens, corpus.shards)
    short = Fraction(0)
    for part in range(corpus.shards):
        if corpus.mix is None:
            languages = [language for number, language in available if number == part]
            # Without a mix the languages are one: the quota is of the shard.
            total = Fraction(sum(available[part, language] for language in languages))
            taken[part, ""] = total if asked is None else min(asked, total)
        else:
            shares = {language: Fraction(str(share)) for language, share in corpus.mix.items()}
            total = min(Fraction(available.get((part, language), 0)) / share for language, share in shares.items())
            total = total if asked is None else min(asked, total)
            taken.update({(part, language): total * share for language, share in shares.items()})
        if asked is not None:
            short += max(Fraction(0), asked - total)
    return Quota(taken, -int(-short // 1))


def expect_every_language(corpus: Corpus, available: Mapping[tuple[int, str], int]) -> None:
    """DataError when a mix asks for a share of a language of which a training shard has no token."""
    for part in range(corpus.shards):
        for language, share in (corpus.mix or {}).items():
            if not available.get((part, language)):
                raise DataError(
                    f"corpus {corpus.name!r}: mix asks for {share} of {language}, but no document in {language} is "
                    f"left for train-{part:02}; see why its sources' documents leave, add text, lower `shards`, or "
                    f"take {language} out of mix and sources"
                )


class Taking:
    """Walks over the documents in corpus order and says which are taken."""

    def __init__(self, corpus: Corpus, quota: Quota) -> None:
        self._corpus, self._quota = corpus, quota
        self._taken = Counter[tuple[int, str]]()

    def take(self, part: int, language: str, tokens: int) -> bool:
        """Whether the next document, of `tokens`, enters its part."""
        if part == self._corpus.shards:  # validation
            return True
        name = part, language if self._corpus.mix is not None else ""
        if self._taken[name] >= self._quota.tokens.get(name, 0):
            return False
        self._taken[name] += tokens
        return True

    def evidence(self, part: int, language: str) -> str:
        """Why the document is not taken."""
        whose = f"{language} in " if self._corpus.mix is not None else ""
        reached = self._taken[part, language if self._corpus.mix is not None else ""]
        return f"{whose}train-{part:02} is full with {reached:,} tokens"


def shares(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """By language: tokens and bytes of text, each with its share of the sum as a decimal string."""
    result: dict[str, dict[str, Any]] = {}
    totals = {unit: sum(each[unit] for each in counts.values()) for unit in ("tokens", "text_bytes")}
    for language, each in sorted(counts.items()):
        result[language] = dict(each)
        for unit, total in totals.items():
            result[language][f"{unit}_share"] = f"{each[unit] / total:.4f}" if total else "0.0000"
    return result
