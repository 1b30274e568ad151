"""The corpus description refuses what it cannot mean, and names key, value and way out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import description, source, write
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus.build import build
from assay.corpus.description import Corpus, check, description_digest, load
from assay.errors import InputError
from assay.files.shared import shared

GOOD = description([source("a"), source("b")])


def changed(path: str, value: Any) -> dict[str, Any]:
    """`GOOD` with another value at a dotted place."""
    result = copy.deepcopy(GOOD)
    place: Any = result
    *above, last = path.split(".")
    for step in above:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    return result


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("tokeniser", {}, "unknown key tokeniser; did you mean tokenizer?"),
        ("sources.0.langage", "en", "unknown key sources.0.langage; did you mean language?"),
        ("sources.1.licence.evidense", "x", "unknown key sources.1.licence.evidense; did you mean evidence?"),
        ("filters.min_chars", -1, "filters.min_chars is -1"),
        ("filters.max_chars", 9, "filters.max_chars is 9; it must be at least min_chars (10)"),
        ("filters.min_chars", "200", "filters.min_chars is '200'"),
        ("sources.0.path", "../a.jsonl", "sources.0.path is '../a.jsonl'"),
        ("sources.0.path", "/a.jsonl", "sources.0.path is '/a.jsonl'"),
        ("sources.0.licence.files", ["../x"], "sources.0.licence.files.0 is '../x'"),
        ("sources.0.format", "csv", "sources.0.format is 'csv'"),
        ("sources.0.sha256", "abc", "sources.0.sha256 is 'abc'; a digest"),
        ("sources.0.licence.spdx", "Creative Commons", "an SPDX licence id"),
        ("sources.0.retrieved", "yesterday", "a date such as 2026-11-30"),
        ("sources.1.name", "a", "the name a is given twice"),
        ("sources", [], "sources is []"),
        ("tokenizer", {}, "tokenizer.train and tokenizer.path are missing"),
        ("tokenizer", {"train": {"vocabulary": 300}, "path": "t.json"}, "are both given"),
        ("tokenizer.train.vocabulary", 256, "tokenizer.train.vocabulary is 256"),
        ("validation.fraction", 0, "validation.fraction is 0"),
        ("validation.fraction", 1.0, "validation.fraction is 1.0"),
        ("shards", 0, "shards is 0"),
        ("normalise", "NFKD", "normalise is 'NFKD'"),
        ("admission.licences", [], "admission.licences is []"),
        ("pool", "a/b", "pool is 'a/b'"),
        ("sources.0.path", "ftp://host/a", "sources.0.path is 'ftp://host/a'; a path inside"),
        ("sources.0.split", "train", "source a: config and split are for hf:// data sets"),
        ("sources.0.licence.records", "r.jsonl", "licence.records is given beside spdx"),
        ("filters.columns", [{"column": "score"}], "the predicate of column score asks for nothing"),
        ("filters.columns", [{"column": "s", "atleast": 3}], "did you mean at_least?"),
        ("filters.columns", [{"column": "s", "at_least": "3"}], "filters.columns.0.at_least"),
        ("filters.columns", [{"column": "s", "one_of": []}], "filters.columns.0.one_of is []"),
        ("language", {"identify": True, "at_least": 1.5}, "language.at_least is 1.5"),
        ("duplicates", {"near": {"threshold": 0}}, "duplicates.near.threshold is 0"),
        ("decontamination", {"held_out": []}, "decontamination.held_out is []"),
        ("decontamination", {"held_out": ["../x.jsonl"]}, "decontamination.held_out.0 is '../x.jsonl'"),
        ("lossy", "drop", "lossy is 'drop'"),
        ("target_tokens", 0, "target_tokens is 0"),
        ("mix", {"en": 0.8}, "mix: the shares add up to 0.8"),
        ("mix", {"en": 0.8, "pl": 0.2}, "mix names en, pl; the sources have en"),
    ],
)
def test_a_fault_is_told_with_its_key_and_value(place: str, value: Any, told: str) -> None:
    with pytest.raises(InputError) as fault:
        check(changed(place, value), "corpus.yaml")
    assert str(fault.value).startswith("corpus.yaml: ")
    assert told in str(fault.value)


@pytest.mark.parametrize("path", ["s3://KEY:SECRET@bucket/p", "s3://b/p?X-Amz-Signature=SECRET", "ftp://u:SECRET@h/p"])
def test_a_path_with_a_secret_is_refused_and_not_repeated(path: str) -> None:
    with pytest.raises(InputError, match="not in the path") as fault:
        check(changed("sources.0.path", path), "corpus.yaml")
    assert "SECRET" not in str(fault.value)


@pytest.mark.parametrize("key", ["name", "sources", "admission", "tokenizer", "validation"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(InputError, match=f"the key {key} is missing"):
        check({k: v for k, v in GOOD.items() if k != key}, "corpus.yaml")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), values)
def test_any_value_at_any_key_is_accepted_or_told(key: str, value: Any) -> None:
    told = ""
    try:
        assert isinstance(check({**GOOD, key: value}, "corpus.yaml"), Corpus)
    except InputError as fault:
        told = str(fault)
    assert "\n" not in told


@pytest.mark.parametrize("data", [b"", b"- 1\n", b"name: [", b"\xff\xfe", b"name: a\nname: b\n", b"just text\n"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "corpus.yaml"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"corpus\.yaml"):
        load(path)


def test_the_digest_ignores_comments_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, {})
    first = load(path)
    path.write_bytes(path.read_bytes() + b"\n# a comment\n")
    assert load(path).digest == first.digest
    assert load(path).data != first.data
    assert description_digest(check({**GOOD, "sources": GOOD["sources"][::-1]}, "")) != first.digest
    assert description_digest(check({**GOOD, "shards": 3}, "")) != first.digest


def test_the_demo_description_is_complete_and_pins_its_sources() -> None:
    corpus = load(shared("corpora/demo.yaml")).corpus
    assert corpus.shards == 2
    assert all(source.sha256 and source.licence and source.licence.files for source in corpus.sources)


def test_what_does_not_come_with_assay_is_named() -> None:
    with pytest.raises(InputError, match="no-such-file"):
        shared("corpora/no-such-file.yaml")


def test_the_l20_description_is_the_recipe_s_data_to_the_letter_and_building_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    corpus = load(shared("corpora/fineweb-edu-l20.yaml")).corpus
    [one] = corpus.sources
    assert (one.path, one.config, one.split) == ("hf://datasets/HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
    assert (corpus.filters.min_chars, corpus.filters.max_chars) == (300, 50_000)
    asked = {predicate.column: predicate.at_least for predicate in corpus.filters.columns}
    assert asked == {"score": 3.0, "int_score": 3}
    assert corpus.tokenizer.path == "hf://HuggingFaceTB/SmolLM2-135M"
    assert corpus.target_tokens == 18_928 * 258 * 2048
    with pytest.raises(InputError, match="fineweb-edu has the revision null, which may move; pin the commit"):
        build(load(shared("corpora/fineweb-edu-l20.yaml")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_mix_description_asks_for_four_fifths_english() -> None:
    assert load(shared("corpora/slayer-mix.yaml")).corpus.mix == {"en": 0.8, "pl": 0.2}
