"""A build accounts for every document, is the same bytes every time, and never trains on validation text."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_samples import built, description, left, lines, listed, prose, records, source, tree, write
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus import tokenizer as tokenizers
from assay.corpus.build import build, build_tokenizer
from assay.corpus.description import check, load
from assay.corpus.looking import receipt, rejected, samples
from assay.corpus.receipt import entropy
from assay.corpus.stages import part_names, part_of
from assay.data.shard import open_shard, verify_shard
from assay.errors import DataError, InputError, Refused
from assay.files.digest import digest_file
from assay.files.shared import shared

TWO = description([source("a"), source("b", language="pl")])
FILES = {"a": lines(records(40)), "b": lines(records(40, "pl"))}
FAULTY = {
    "a": FILES["a"] + b"not json\n\n" + lines([{"id": "short", "page": "s", "title": "t", "text": "x"}]),
    "b": FILES["b"] + lines([{**records(1)[0], "id": "again"}]) + b"\xff\n",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's corpus, built once."""
    out = tmp_path_factory.mktemp("demo") / "out"
    build(load(shared("corpora/demo.yaml")), out)
    return out


def test_admitted_and_rejected_add_up_in_total_by_source_by_stage_and_by_name(tmp_path: Path) -> None:
    facts = built(tmp_path, TWO, FAULTY)
    out = tmp_path / "out"
    assert facts["rejected"] == {
        "blank_line": 1,
        "exact_duplicate": 1,
        "malformed_json": 1,
        "not_utf8": 1,
        "too_short": 1,
    }
    assert facts["documents"] == sum(data.count(b"\n") for data in FAULTY.values())
    assert facts["documents"] == facts["admitted"] + sum(facts["rejected"].values())
    for part in facts["by_source"].values():
        assert part["documents"] == part["admitted"] + part["rejected"]
    remaining = facts["documents"]
    for stage in facts["stages"]:
        assert stage["in"] == remaining
        remaining -= sum(stage["rejected"].values())
        assert stage["out"] == remaining
    assert remaining == facts["admitted"] == len(listed(out / "admitted.jsonl"))
    assert Counter(r["reason"] for r in left(out)) == facts["rejected"]
    assert facts == receipt(out)


def test_shards_hold_exactly_the_admitted_texts_and_their_bytes(tmp_path: Path) -> None:
    facts = built(tmp_path, TWO, FAULTY)
    out = tmp_path / "out"
    tokenizer = tokenizers.load(out / "tokenizer" / "tokenizer.json", "<|endoftext|>")
    texts = {r["id"]: r["text"] for r in records(40) + records(40, "pl")}
    admitted = listed(out / "admitted.jsonl")
    assert sorted(record["id"] for record in admitted) == sorted(texts)
    for stated in facts["shards"]:
        shard = open_shard(out / stated["path"])
        assert verify_shard(shard) == []
        assert (shard.tokenizer, shard.pool) == (digest_file(out / "tokenizer" / "tokenizer.json"), "base")
        mine = [record for record in admitted if record["shard"] == stated["path"]]
        assert [record["stop"] for record in mine] == shard.documents_end.tolist()
        ends = shard.text_bytes_end
        assert ends is not None
        assert ends.tolist() == np.cumsum([len(texts[record["id"]].encode()) for record in mine]).tolist()
        for record in mine:
            ids = shard.ids[record["start"] : record["stop"]].tolist()
            assert ids[-1] == tokenizer.end_of_text
            assert tokenizers.decode(tokenizer, ids) == texts[record["id"]]
            assert shard.source_at(record["start"]).name == record["source"] == shard.source_at(record["stop"] - 1).name
    assert facts["tokens"] == sum(stated["tokens"] for stated in facts["shards"])
    assert {s.language for s in open_shard(out / "train-00").sources} == {"en", "pl"}


def test_the_entropy_in_the_receipt_is_that_of_the_training_tokens(tmp_path: Path) -> None:
    facts = built(tmp_path, TWO, FILES)
    ids = np.concatenate([open_shard(tmp_path / "out" / name).ids for name in ("train-00", "train-01")])
    shares = [count / len(ids) for count in Counter(ids.tolist()).values()]
    assert float(facts["unigram_entropy_nats"]) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-6)
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4), abs=1e-15)


def test_the_same_input_gives_the_same_bytes_whatever_process_or_threads(tmp_path: Path) -> None:
    built(tmp_path, TWO, FAULTY)
    script = "import sys; from pathlib import Path; from assay.corpus import build, description as d; "
    script += "build.build(d.load(Path(sys.argv[1])), Path(sys.argv[2]))"
    for name, threads in (("one", "1"), ("four", "4")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        arguments = [sys.executable, "-c", script, str(tmp_path / "corpus.yaml"), str(tmp_path / name)]
        subprocess.run(arguments, check=True, env=environment)
        assert tree(tmp_path / name) == tree(tmp_path / "out")


def test_validation_is_never_in_training_in_no_language(demo: Path) -> None:
    documents = {}
    for language in ("en", "pl"):
        for record in listed(shared(f"corpora/gnome-help/documents-{language}.jsonl")):
            documents[record["id"]] = record
    sides: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for record in listed(demo / "admitted.jsonl"):
        held_out = record["shard"] == "validation"
        sides[held_out].add(("page", documents[record["id"]]["page"]))
        sides[held_out].add(("text", documents[record["id"]]["text"]))
    assert not sides[True] & sides[False]
    pages = {kind: sum(1 for k, _ in sides[kind] if k == "page") for kind in sides}
    assert 0.03 <= pages[True] / (pages[True] + pages[False]) <= 0.05
    assert [s.name for s in open_shard(demo / "validation").sources] == ["gnome-help-en", "gnome-help-pl"]


@given(st.lists(st.text(min_size=1).filter(lambda key: key.isprintable()), min_size=1), st.integers(1, 5))
def test_the_side_of_a_key_depends_on_nothing_but_the_key_and_more_validation_keeps_what_was_held_out(
    keys: list[str], shards: int
) -> None:
    less = check({**TWO, "shards": shards, "validation": {"fraction": 0.1}}, "")
    more = check({**TWO, "shards": shards, "validation": {"fraction": 0.5}}, "")
    for key in keys:
        assert part_of(key, less) in part_names(less)
        if part_of(key, less) == "validation":
            assert part_of(key, more) == "validation"
        elif part_of(key, more) != "validation":
            assert part_of(key, more) == part_of(key, less)


def test_the_demo_corpus_is_what_the_demo_needs(demo: Path) -> None:
    facts = receipt(demo)
    assert 6.5 <= float(facts["unigram_entropy_nats"]) <= 6.9
    assert facts["lossy"] == 0
    assert [shard["path"] for shard in facts["shards"]] == ["train-00", "train-01", "validation"]
    assert all(shard["dtype"] == "uint16" for shard in facts["shards"])
    assert facts["documents"] == 641
    carried = demo / "licences" / "gnome-help" / "LICENSE-CC-BY-SA-3.0.txt"
    assert carried.read_text(encoding="utf-8").startswith("Creative Commons Attribution-ShareAlike 3.0 Unported")
    assert facts["licences"]["licences/gnome-help/ATTRIBUTION.md"] == digest_file(
        shared("corpora/gnome-help/ATTRIBUTION.md")
    )


def test_a_refused_source_leaves_with_all_its_documents_and_the_others_are_built(tmp_path: Path) -> None:
    given_sources = [source("a"), source("b", licence={"spdx": "CC-BY-4.0", "evidence": "none was looked for"})]
    facts = built(tmp_path, description(given_sources), FILES)
    assert facts["rejected"] == {"licence_record_incomplete": 40}
    assert facts["by_source"]["b"]["refused"] == "licence_record_incomplete: the licence record has no decision"
    assert facts["by_source"]["b"]["tokens"] == 0
    assert facts["by_source"]["a"]["refused"] is None
    assert {s.name for shard in facts["shards"] for s in open_shard(tmp_path / "out" / shard["path"]).sources} == {"a"}


def test_a_corpus_that_admits_nothing_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="40 of a: licence_not_admitted"):
        built(tmp_path, description([source("a")], admission={"licences": ["MIT"]}), FILES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "corpus.yaml", "out.work"]


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_bytes(b"kept")
    with pytest.raises(InputError, match="exists already"):
        built(tmp_path, TWO, FILES)
    assert tree(tmp_path / "out") == {"kept": b"kept"}


@pytest.mark.parametrize(
    ("changes", "fault", "told"),
    [
        ({"tokenizer": {"train": {"vocabulary": 5000}}}, InputError, "yields only"),
        ({"tokenizer": {"path": "gone.json"}}, InputError, "gone.json does not exist"),
        ({"tokenizer": {"path": "a.jsonl"}}, InputError, "is not a tokenizer.json"),
        ({"shards": 100}, DataError, "none falls into train-"),
        ({"sources": [source("a", sha256="sha256:" + "0" * 64)]}, DataError, "is pinned"),
        ({"sources": [source("gone")]}, DataError, "gone.jsonl is not there"),
    ],
)
def test_what_cannot_be_built_is_told_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], fault: type[Exception], told: str
) -> None:
    with pytest.raises(fault, match=told):
        built(tmp_path, {**TWO, **changes}, FILES)
    assert {path.name for path in tmp_path.glob("out*")} <= {"out.work"}


def test_text_that_spells_the_end_of_text_stays_text(tmp_path: Path) -> None:
    spelled = {"id": "trick", "page": "trick", "title": "t", "text": f"before <|endoftext|> after {prose(99)}"}
    facts = built(tmp_path, TWO, {**FILES, "a": FILES["a"] + lines([spelled])})
    assert facts["lossy"] == 0
    for stated in facts["shards"]:
        shard = open_shard(tmp_path / "out" / stated["path"])
        ends = np.flatnonzero(shard.ids == shard.end_of_text) + 1
        assert ends.tolist() == shard.documents_end.tolist()


def test_a_tokenizer_that_makes_text_into_its_end_of_text_is_refused(tmp_path: Path) -> None:
    built(tmp_path, TWO, FILES)
    (tmp_path / "given.json").write_bytes((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes())
    with pytest.raises(InputError, match="turns text into its end-of-text id"):
        built(tmp_path, {**TWO, "tokenizer": {"path": "given.json"}, "end_of_text": "e"}, FILES, "other")
    with pytest.raises(InputError, match="has no token"):
        built(tmp_path, {**TWO, "tokenizer": {"path": "given.json"}, "end_of_text": "<eos>"}, FILES, "other")


def test_a_given_tokenizer_is_taken_byte_for_byte_and_gives_the_same_shards(tmp_path: Path) -> None:
    first = built(tmp_path, TWO, FILES)
    data = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()
    (tmp_path / "given.json").write_bytes(data)
    second = built(tmp_path, {**TWO, "tokenizer": {"path": "given.json"}}, FILES, "other")
    assert (tmp_path / "other" / "tokenizer" / "tokenizer.json").read_bytes() == data
    assert second["shards"] == first["shards"]
    assert (first["tokenizer"]["trained"], second["tokenizer"]["trained"]) == (True, False)


def test_a_tokenizer_that_drops_characters_is_counted_as_lossy(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(c): c - 31 for c in range(32, 127)}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))  # no byte fallback: what it does not know is dropped
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    (tmp_path / "ascii.json").write_text(inner.to_str(), encoding="utf-8")
    facts = built(tmp_path, {**TWO, "tokenizer": {"path": "ascii.json"}, "end_of_text": "<end>"}, FILES)
    foreign = [r for r in records(40) + records(40, "pl") if not r["text"].isascii()]
    assert facts["lossy"] == len(foreign) > 0
    assert sorted(r["id"] for r in listed(tmp_path / "out" / "admitted.jsonl") if r["lossy"]) == sorted(
        r["id"] for r in foreign
    )


def test_the_tokenizer_command_gives_the_same_bytes_as_the_build(tmp_path: Path) -> None:
    facts = built(tmp_path, TWO, FAULTY)
    alone = build_tokenizer(load(tmp_path / "corpus.yaml"), tmp_path / "alone")
    assert (tmp_path / "alone" / "tokenizer.json").read_bytes() == (
        tmp_path / "out" / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    assert {key: alone[key] for key in ("documents", "admitted", "rejected", "tokenizer")} == {
        key: facts[key] for key in ("documents", "admitted", "rejected", "tokenizer")
    }
    assert alone["tokens"] is None


def test_validation_text_does_not_shape_the_tokenizer(tmp_path: Path) -> None:
    built(tmp_path, TWO, FILES)
    held_out = {r["id"] for r in listed(tmp_path / "out" / "admitted.jsonl") if r["shard"] == "validation"}
    changed = [{**r, "text": r["text"] + " qqqq" * 200} if r["id"] in held_out else r for r in records(40)]
    built(tmp_path, TWO, {**FILES, "a": lines(changed)}, "other")
    one, other = (tmp_path / name / "tokenizer" / "tokenizer.json" for name in ("out", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_samples_are_decoded_from_the_shards_and_rejected_ones_are_shown_by_reason(tmp_path: Path) -> None:
    built(tmp_path, TWO, FAULTY)
    out = tmp_path / "out"
    texts = {r["id"]: r["text"] for r in records(40) + records(40, "pl")}
    shown = samples(out, 7, "b", characters=30)
    assert len(shown) == 7
    for sample in shown:
        assert sample.source == "b"
        assert sample.text == texts[sample.id][:29] + "…"
    assert shown == samples(out, 7, "b", characters=30)
    reasons, shown_left = rejected(out, 1)
    assert {reason: count for (_, reason), count in reasons.items()} == receipt(out)["rejected"]
    assert [(r["stage"], r["reason"]) for r in shown_left] == list(reasons)
    assert rejected(out, 5, "b")[0] == {("read", "not_utf8"): 1, ("duplicates", "exact_duplicate"): 1}


def test_looking_at_what_is_no_corpus_or_was_changed_is_told(tmp_path: Path) -> None:
    built(tmp_path, TWO, FILES)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="is not a folder"):
        receipt(tmp_path / "gone")
    with pytest.raises(InputError, match=r"corpus\.json does not exist"):
        receipt(out / "train-00")
    with pytest.raises(InputError, match="has no source 'c'; it has a, b"):
        samples(out, 1, "c")
    with (out / "admitted.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(DataError, match=r"admitted\.jsonl is not the file"):
        samples(out, 1)


def test_a_line_ending_in_the_middle_of_the_last_document_is_counted(tmp_path: Path) -> None:
    facts = built(tmp_path, TWO, {**FILES, "b": FILES["b"][:-20]})
    assert facts["rejected"] == {"malformed_json": 1}
    assert facts["documents"] == 80


def test_the_description_is_kept_byte_for_byte(tmp_path: Path) -> None:
    path = write(tmp_path, TWO, FILES)
    path.write_bytes(b"# kept\n" + path.read_bytes())
    build(load(path), tmp_path / "out")
    assert (tmp_path / "out" / "corpus.yaml").read_bytes() == path.read_bytes()
