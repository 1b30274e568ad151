"""Config and split of a hub data set are resolved as its README.md states them, and by nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from corpus_samples import source
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus.description import Source
from assay.corpus.splits import chosen, matches
from assay.errors import DataError, InputError

NAMES = sorted(
    [
        "README.md", ".gitattributes", "data/train-00000.parquet", "data/train-00001.parquet", "data/test.parquet",
        "data/deep/er/train-x.parquet", "data/.hidden/train-y.parquet", "en/a.jsonl", "en/b.jsonl", "pl/a.jsonl",
    ]
)  # fmt: skip


def asked(config: str | None = None, split: str | None = None) -> Source:
    """A source that asks for these."""
    return Source.model_validate(source("s", path="hf://datasets/o/n", config=config, split=split))


def readme(configs: str) -> bytes:
    """A README.md whose front matter states this."""
    return f"---\nlicense: mit\nconfigs:\n{configs}---\n# Text\n".encode()


def names(configs: str, config: str | None = None, split: str | None = None) -> list[str]:
    """What is chosen."""
    return chosen(asked(config, split), "hf://datasets/o/n", readme(configs), NAMES)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("data/train-*", ["data/train-00000.parquet", "data/train-00001.parquet"]),
        ("data/train-0000?.parquet", ["data/train-00000.parquet", "data/train-00001.parquet"]),
        ("data/train-0000[1-9].parquet", ["data/train-00001.parquet"]),
        ("data/train-0000[!1].parquet", ["data/train-00000.parquet"]),
        ("**/train-*", ["data/deep/er/train-x.parquet", "data/train-00000.parquet", "data/train-00001.parquet"]),
        ("data/**/train-*", ["data/deep/er/train-x.parquet", "data/train-00000.parquet", "data/train-00001.parquet"]),
        ("*/a.jsonl", ["en/a.jsonl", "pl/a.jsonl"]),
        ("*.jsonl", []),
        ("data/.hidden/*", ["data/.hidden/train-y.parquet"]),
        ("data/train-00000.parquet", ["data/train-00000.parquet"]),
        ("data/train-00000xparquet", []),
    ],
)
def test_patterns_stay_in_their_folder_unless_they_say_otherwise(pattern: str, found: list[str]) -> None:
    assert [name for name in NAMES if matches(pattern, name)] == found


@given(st.text(st.sampled_from("ab/*?"), max_size=9), st.text(st.sampled_from("ab/"), max_size=9))
def test_patterns_mean_what_their_regular_expressions_mean(pattern: str, name: str) -> None:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|.", pattern)
    assert matches(pattern, name) == bool(re.fullmatch("".join(known.get(each, each) for each in tokens), name))


@pytest.mark.parametrize("pattern", ["**/" * 300 + "x", "*" * 999 + "x", "**/*a" * 150 + "b", "*a" * 300 + "**/b"])
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    assert not matches(pattern, "a/" * 100 + "a" * 99 + "/c")


@pytest.mark.parametrize("pattern", ["data/[z-a]*", "x" * 1001])
def test_what_is_no_pattern_is_one_sentence(pattern: str) -> None:
    with pytest.raises(DataError, match=r"README.md .*; name another revision"):
        names(f"- data_files: '{pattern}'\n")


@given(st.lists(st.text(st.sampled_from("ab.-_0(+ ż"), min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_name_matches_itself_and_what_its_folder_holds(parts: list[str]) -> None:
    name = "/".join(parts)
    assert matches(name, name)
    visible = not re.search(r"(^|/)(\.|__)", name)
    assert matches("/".join([*parts[:-1], "*"]), name) == (
        visible or re.search(r"(^|/)(\.|__)", name[: -len(parts[-1])]) is not None
    )
    assert matches("**", name) == visible
    assert not matches(name, name + "x")


@pytest.mark.parametrize(
    ("configs", "config", "split", "found"),
    [
        ("- data_files: data/test.parquet\n", None, None, ["data/test.parquet"]),
        ("- data_files: [en/*, pl/*]\n", "default", "train", ["en/a.jsonl", "en/b.jsonl", "pl/a.jsonl"]),
        ("- data_files: {test: data/test.parquet, train: en/*}\n", None, "test", ["data/test.parquet"]),
        ("- {config_name: en, data_dir: en, data_files: '*'}\n- config_name: pl\n  data_dir: /pl/\n", "pl", None,
         ["pl/a.jsonl"]),
        ("- {config_name: en, data_dir: en, data_files: '*'}\n- config_name: pl\n  data_dir: /pl/\n", "en", "train",
         ["en/a.jsonl", "en/b.jsonl"]),
        ("- {config_name: 2024, data_files: en/*}\n- {config_name: b, default: true, data_files: pl/*}\n", None, None,
         ["pl/a.jsonl"]),
        ("- {config_name: 2024, data_files: en/*}\n- {config_name: b, data_files: pl/*}\n", "2024", None,
         ["en/a.jsonl", "en/b.jsonl"]),
        ("- data_files:\n  - {split: train, path: en/*}\n  - {split: train, path: pl/*}\n", None, "train",
         ["en/a.jsonl", "en/b.jsonl", "pl/a.jsonl"]),
    ],
)  # fmt: skip
def test_what_a_readme_may_state(configs: str, config: str | None, split: str | None, found: list[str]) -> None:
    assert names(configs, config, split) == found


@pytest.mark.parametrize(
    ("configs", "config", "split", "error", "told"),
    [
        ("- {config_name: a, data_files: en/*}\n", "c", None, InputError, "config is 'c'; hf://datasets/o/n has a"),
        ("- {config_name: a, data_files: en/*}\n- {config_name: b, data_files: pl/*}\n", None, None, InputError,
         "config is null, and there are several; hf://datasets/o/n has a, b"),
        ("- data_files: en/*\n", None, "test", InputError, "split is 'test'; hf://datasets/o/n has train"),
        ("- data_dir: en\n", None, "train", InputError, "states no splits"),
        ("- data_files: fr/*\n", None, None, DataError, "no file matches 'fr/.*'"),
        ("- data_files: [{split: train, path: 3}]\n", None, None, DataError, "are no patterns"),
        ("- data_files: []\n", None, None, DataError, "are no patterns"),
        ("  one: two\n", None, None, DataError, "no list of configs"),
        ("- a\n", None, None, DataError, "no list of configs"),
        ("- {config_name: a, config_name: b}\n", None, None, DataError, "README.md"),
    ],
)  # fmt: skip
def test_what_cannot_be_resolved_is_one_sentence_with_the_known_names(
    configs: str, config: str | None, split: str | None, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told) as end:
        names(configs, config, split)
    assert "\n" not in str(end.value)


@pytest.mark.parametrize("text", [b"", b"# Title\n", b"---\nlicense: mit\n---\n", b"---\nlicense: mit\n", b"\xff\xfe"])
def test_without_configs_all_files_are_meant_and_a_name_names_nothing(text: bytes) -> None:
    assert chosen(asked(), "hf://datasets/o/n", text, NAMES) == NAMES
    with pytest.raises(InputError, match="leave both null"):
        chosen(asked(split="train"), "hf://datasets/o/n", text, NAMES)


@given(st.binary(max_size=200))
def test_any_readme_gives_names_or_one_sentence(data: bytes) -> None:
    wanted: Any = None
    try:
        wanted = chosen(asked(), "hf://datasets/o/n", b"---\nconfigs:\n" + data + b"\n---\n", NAMES)
    except (InputError, DataError) as fault:
        assert "hf://datasets/o/n" in str(fault)  # noqa: PT017 - any outcome but a crash is right
    assert wanted is None or set(wanted) <= set(NAMES)
