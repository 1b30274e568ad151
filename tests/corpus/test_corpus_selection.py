"""Target and mix take from each shard what they say, to a document, and name what they leave."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from corpus_samples import built, description, lines, records, source
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus.description import Corpus, check
from assay.corpus.selection import Taking, quotas
from assay.errors import DataError

documents = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["en", "pl"]), st.integers(1, 50)), max_size=60)


def corpus(target: int | None, mix: dict[str, float] | None, shards: int = 3) -> Corpus:
    two = [source("a"), source("b", language="pl")]
    return check(description(two, target_tokens=target, mix=mix, shards=shards), "")


def taken(asked: Corpus, given_documents: list[tuple[int, str, int]]) -> Counter[tuple[int, str]] | None:
    available = Counter[tuple[int, str]]()
    for part, language, tokens in given_documents:
        available[part, language] += tokens
    quota = quotas(asked, available)
    if quota is None:
        return None
    taking, found = Taking(asked, quota), Counter[tuple[int, str]]()
    for part, language, tokens in given_documents:
        if taking.take(part, language, tokens):
            found[part, language] += tokens
    return found


@given(documents, st.integers(1, 9))
def test_a_mix_is_kept_to_one_document_of_each_language_and_uses_all_that_it_can(
    given_documents: list[tuple[int, str, int]], tenths: int
) -> None:
    share = {"en": Fraction(tenths, 10), "pl": Fraction(10 - tenths, 10)}
    found = taken(corpus(None, {"en": tenths / 10, "pl": (10 - tenths) / 10}), given_documents)
    assert found is not None
    available = Counter[tuple[int, str]]()
    for part, language, tokens in given_documents:
        available[part, language] += tokens
    for part in range(3):
        total = min(available[part, language] / share[language] for language in share)
        for language in share:
            assert 0 <= found[part, language] - total * share[language] < 50
        assert any(found[part, language] == available[part, language] for language in share)
    assert all(found[3, language] == available[3, language] for language in share)  # validation is never cut


@given(documents, st.integers(1, 2000))
def test_a_target_is_reached_by_the_last_document_that_is_taken_or_all_are_taken_and_the_lack_is_told(
    given_documents: list[tuple[int, str, int]], target: int
) -> None:
    asked = corpus(target, None)
    found = taken(asked, given_documents)
    available = Counter[int]()
    for part, _, tokens in given_documents:
        available[part] += tokens
    assert found is not None
    missing = Fraction(0)
    for part in range(3):
        mine = sum(count for (number, _), count in found.items() if number == part)
        each = Fraction(target, 3)
        missing += max(Fraction(0), each - available[part])
        assert mine == available[part] if available[part] <= each else each <= mine < each + 50
    quota = quotas(asked, Counter({(part, "en"): tokens for part, tokens in available.items()}))
    assert quota is not None
    assert missing <= quota.short < missing + 1


def test_without_target_and_mix_nothing_is_selected() -> None:
    assert taken(corpus(None, None), [(0, "en", 5)]) is None


def test_a_mix_with_a_language_that_a_shard_lacks_is_told_with_both(tmp_path: Path) -> None:
    unlicensed = source("b", language="pl", licence=None)
    given_corpus = description([source("a"), unlicensed], mix={"en": 0.7, "pl": 0.3})
    with pytest.raises(DataError, match=r"mix asks for 0\.3 of pl, but no document in pl is left for train-00"):
        built(tmp_path, given_corpus, {"a": lines(records(40)), "b": lines(records(40, "pl"))})
