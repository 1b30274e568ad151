"""Builds of real English and Polish text: languages, licences, vocabularies, duplicates, held-out text."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import real_text
from corpus_samples import description, left, listed, source, write

from assay.corpus.build import build
from assay.corpus.description import load
from assay.corpus.tokenizer import decode
from assay.corpus.tokenizer import load as load_tokenizer
from assay.data.shard import open_shard
from assay.errors import Refused

END = "<|endoftext|>"
GPL = "GPL-2.0-or-later"
COPYRIGHT = "the copyright file of fortunes-pl 0.0.20130525-3: © 2000-2010, LinuxPL and PLD teams, GPL-2+"
QUOTING = {  # file of fortunes-pl → whose work it quotes, as read there
    "dwimc": "dialogues of the film Dude, Where's My Car?",
    "pratchett": "novels by Terry Pratchett, translated by Piotr W. Cholewa, with titles and pages",
    "psy1": "dialogues of the film Psy by Władysław Pasikowski",
    "puchatek": "A. A. Milne's Pooh books in Irena Tuwim's translation",
    "sapkowski": "novels by Andrzej Sapkowski, with titles and pages",
    "stachura": "songs by Edward Stachura",
}
ENGLISH = {"the", "of", "and", "is", "in", "that", "for", "are", "with", "this", "be", "or"}
POLISH = {
    "i",
    "w",
    "na",
    "z",
    "się",
    "jest",
    "nie",
    "że",
    "dla",
    "oraz",
    "są",
    "lub",
    "jako",
    "przez",
    "od",
    "po",
    "jak",
}


def spoken(text: str) -> tuple[int, int]:
    """English and Polish function words of a text: a second opinion that knows no model."""
    found = re.findall(r"\w+", text.lower())
    return sum(word in ENGLISH for word in found), sum(word in POLISH for word in found)


def gpt2(path: Path, merges: int = 50_000, without: frozenset[int] = frozenset()) -> Path:
    """GPT-2's vocabulary, or its first merges, as a tokenizer.json; `without`: bytes that no token may have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary, pairs = real_text.gpt2()
    gone = {letter(byte) for byte in without}
    inner = Tokenizer(
        models.BPE(
            vocab={
                token: number for token, number in vocabulary.items() if number < 256 + merges and not gone & set(token)
            },
            merges=[pair for pair in pairs[:merges] if not gone & set("".join(pair))],
        )
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    path.write_text(inner.to_str(), encoding="utf-8")
    return path


def letter(byte: int) -> str:
    """How byte-level vocabularies write a byte above 0xa0, or a letter."""
    assert byte > 0xAD or chr(byte).isalnum()
    return chr(byte)


def asked(sources: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A description without filters that holds out one document of twenty."""
    return description(sources, **{"filters": {}, "validation": {"fraction": 0.05}, "shards": 1, **changes})


def admitted(out: Path) -> dict[str, set[str]]:
    """Ids of the admitted documents by source."""
    found: dict[str, set[str]] = {}
    for record in listed(out / "admitted.jsonl"):
        found.setdefault(record["source"], set()).add(record["id"])
    return found


def expect_whole(facts: dict[str, Any], documents: int) -> None:
    """Every document is admitted or rejected, in total and by source."""
    assert facts["documents"] == documents
    assert facts["admitted"] + sum(facts["rejected"].values()) == documents
    for part in facts["by_source"].values():
        assert part["admitted"] + part["rejected"] == part["documents"]


TEXTS = {
    "gnome-en": ("en", lambda: real_text.gnome("en")),
    "handbook-en": ("en", lambda: real_text.handbook("en-US")),
    "gnome-pl": ("pl", lambda: real_text.gnome("pl")),
    "handbook-pl": ("pl", lambda: real_text.handbook("pl-PL")),
    "manpages-pl": ("pl", real_text.manual_pl),
}


@pytest.fixture(scope="module")
def texts() -> dict[str, dict[str, str]]:
    """The text of every document by source and id."""
    return {name: {each["id"]: each["text"] for each in read()} for name, (_, read) in TEXTS.items()}


@pytest.fixture(scope="module")
def everything(texts: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English and Polish pages, languages compared, tokenized with GPT-2's vocabulary; the corpus's folder."""
    folder = tmp_path_factory.mktemp("everything")
    given = asked(
        [source(name, language=language) for name, (language, _) in TEXTS.items()],
        language={"identify": True, "at_least": 0.8},
        tokenizer={"path": gpt2(folder / "gpt2.json").name},
    )
    build(
        load(write(folder, given, {name: real_text.lines(read()) for name, (_, read) in TEXTS.items()})), folder / "out"
    )
    return folder / "out"


def test_every_real_page_is_accounted_for(everything: Path, texts: dict[str, dict[str, str]]) -> None:
    facts = json.loads((everything / "corpus.json").read_text(encoding="utf-8"))
    expect_whole(facts, sum(map(len, texts.values())))
    for name, part in facts["by_source"].items():
        assert part["documents"] == len(texts[name])


def test_pages_that_were_never_translated_leave_by_name_and_the_translated_ones_enter(
    everything: Path, texts: dict[str, dict[str, str]]
) -> None:
    inside = admitted(everything)
    gone = {
        (row["source"], row["id"]): row["evidence"] for row in left(everything) if row["reason"] == "language_differs"
    }
    handbook = texts["handbook-pl"]
    english = {name for name, text in handbook.items() if (said := spoken(text))[0] > 3 * said[1]}
    assert len(english) > 2 * len(handbook) // 3, "this Polish is mostly English"
    assert english & inside["handbook-pl"] == set()
    assert all("identified as en (" in gone["handbook-pl", name] for name in english if ("handbook-pl", name) in gone)
    assert len(english - {name for source, name in gone if source == "handbook-pl"}) <= 1, "named by language"
    for name in ("gnome-pl", "manpages-pl", "handbook-pl"):
        for page, text in texts[name].items():
            in_english, in_polish = spoken(text)
            if in_polish > 3 * in_english and in_polish > 30:
                assert page in inside[name], f"{name}: {page} is Polish"
    for name in ("gnome-en", "handbook-en"):
        lost = {page for page in texts[name] if (name, page) in gone}
        assert all(len(texts[name][page]) < 60 for page in lost), "only titles are too short to tell"
        assert len(lost) < 10
    assert len(inside["gnome-pl"]) > 0.95 * len(texts["gnome-pl"])
    assert len(inside["manpages-pl"]) > 0.9 * len(texts["manpages-pl"])


def test_gpt2_s_vocabulary_gives_back_every_byte_of_english_and_polish(
    everything: Path, texts: dict[str, dict[str, str]]
) -> None:
    facts = json.loads((everything / "corpus.json").read_text(encoding="utf-8"))
    assert (facts["tokenizer"]["vocabulary"], facts["tokenizer"]["end_of_text_id"]) == (50257, 50256)
    assert (facts["lossy"], facts["lossy_by"]) == (0, [])
    assert all(shard["dtype"] == "uint16" for shard in facts["shards"])
    tokenizer = load_tokenizer(everything / "tokenizer" / "tokenizer.json", END)
    shards = {shard["path"]: open_shard(everything / shard["path"]) for shard in facts["shards"]}
    records = listed(everything / "admitted.jsonl")
    for record in records[::7]:
        ids = shards[record["shard"]].ids[record["start"] : record["stop"]].tolist()
        assert decode(tokenizer, ids) == texts[record["source"]][record["id"]]
    assert sum(part["text_bytes"] for part in facts["by_source"].values()) == sum(
        len(texts[record["source"]][record["id"]].encode("utf-8")) for record in records
    )


@pytest.mark.parametrize("dropped", [frozenset("ó".encode()), frozenset({0xC4, 0xC5})], ids=["ó", "halves of ą and ł"])
def test_a_vocabulary_that_drops_bytes_is_counted_by_byte_or_its_documents_leave_by_name(
    tmp_path: Path, dropped: frozenset[int]
) -> None:
    pages = real_text.gnome("pl")[:80] + real_text.gnome("en")[:80]
    tokenizer = {"path": gpt2(tmp_path / "holed.json", 2_000, dropped).name}
    given = asked([source("pages")], tokenizer=tokenizer, duplicates={"exact": False})
    files = {"pages": real_text.lines(pages)}
    expected = Counter[tuple[str, str]]()
    for data in (page["text"].encode("utf-8") for page in pages):
        back = bytes(byte for byte in data if byte not in dropped).decode("utf-8", "replace").encode("utf-8")
        if back != data:
            reason = "bytes_dropped" if len(back) < len(data) else "bytes_added"  # U+FFFD for a half takes three
            expected[reason, f"0x{next(byte for byte in data if byte in dropped):02x}"] += 1
    assert 0 < expected.total() < len(pages)
    facts = build(load(write(tmp_path, given, files)), tmp_path / "counted")
    assert (facts["admitted"], facts["lossy"]) == (len(pages), expected.total())
    assert {(each["reason"], each["byte"]): each["documents"] for each in facts["lossy_by"]} == expected

    strict = build(load(write(tmp_path, {**given, "lossy": "reject"}, files)), tmp_path / "strict")
    expect_whole(strict, len(pages))
    gone = left(tmp_path / "strict")
    assert {row["id"] for row in gone} == {page["id"] for page in pages if dropped & set(page["text"].encode("utf-8"))}
    assert Counter(row["reason"] for row in gone) == {"lossy": expected.total()}
    for row in gone:
        assert re.search(r"^bytes_(dropped|added) from byte \d+ \(0xc[345]\) when decoded$", row["evidence"])


def test_a_label_on_a_package_does_not_let_in_what_its_files_quote(tmp_path: Path) -> None:
    fortunes = real_text.fortunes()
    names = {each["title"] for each in fortunes}
    assert set(QUOTING) < names
    records = [
        {
            "title": name,
            "licence": GPL,
            "evidence": f"read on 2026-11-30: {QUOTING[name]}; the package's label cannot license them"
            if name in QUOTING
            else COPYRIGHT,
            "decision": "refused: quotes a work in copyright" if name in QUOTING else "admitted under the label",
        }
        for name in sorted(names - {"bajki"})  # one file that nobody looked at yet
    ]
    (tmp_path / "records.jsonl").write_bytes(real_text.lines(records))
    by_title = source("fortunes", language="pl", licence={"records": "records.jsonl"}, revision="0.0.20130525-3")
    given = asked([by_title], admission={"licences": [GPL]})
    files = {"fortunes": real_text.lines(fortunes)}
    facts = build(load(write(tmp_path, given, files)), tmp_path / "out")
    expect_whole(facts, len(fortunes))
    by_file = Counter(each["title"] for each in fortunes)
    refused = [row for row in left(tmp_path / "out") if row["stage"] == "admission"]
    assert Counter(row["id"].rpartition("/")[0] for row in refused) == {
        name: by_file[name] for name in [*QUOTING, "bajki"]
    }
    assert {row["reason"] for row in refused if row["id"].startswith("bajki/")} == {"licence_record_missing"}
    for row in refused:
        if not row["id"].startswith("bajki/"):
            assert (row["reason"], row["evidence"]) == (
                "not_admitted",
                "the decision is 'refused: quotes a work in copyright', which does not begin with 'admitted'",
            )
    entered = {record["title"] for record in listed(tmp_path / "out" / "admitted.jsonl")}
    assert entered == names - set(QUOTING) - {"bajki"}
    assert not any("Wiedźmin utkwił" in each["text"] for each in fortunes if each["title"] in entered)

    labelled = source("fortunes", language="pl", licence={"spdx": GPL, "evidence": COPYRIGHT})
    with pytest.raises(Refused, match=rf"{len(fortunes)} of fortunes: licence_record_incomplete"):
        build(load(write(tmp_path, {**given, "sources": [labelled]}, files)), tmp_path / "labelled")


def test_pages_with_small_edits_are_found_across_sources_and_others_are_not(tmp_path: Path) -> None:
    pages = [page for page in real_text.gnome("en") if len(page["text"].split()) >= 120][:100]
    edited = [
        {
            "id": f"copy-of/{page['id']}",
            "title": page["title"],
            "text": page["text"].replace(" the ", " that ", 1).upper() + "\n\nCopied by somebody.",
        }
        for page in pages
    ]
    others = [page for page in real_text.handbook("en-US") if len(page["text"].split()) >= 120][:100]
    given = asked(
        [source("pages"), source("others"), source("mirror")],
        duplicates={"exact": True, "near": {"threshold": 0.75}},
        tokenizer={"train": {"vocabulary": 600}},
    )
    files = {name: real_text.lines(each) for name, each in (("pages", pages), ("others", others), ("mirror", edited))}
    facts = build(load(write(tmp_path, given, files)), tmp_path / "out")
    expect_whole(facts, len(pages) + len(others) + len(edited))
    gone = [row for row in left(tmp_path / "out") if row["reason"] == "near_duplicate"]
    assert {row["source"] for row in gone} == {"mirror"}
    assert len(gone) >= 0.97 * len(edited)
    for row in gone:
        original = row["id"].removeprefix("copy-of/")
        assert row["evidence"].endswith(f" to small/pages: {original}")


def test_rewrapped_held_out_paragraphs_are_found_in_real_pages_and_clean_pages_stay(tmp_path: Path) -> None:
    held = [
        line for page in real_text.gnome("en") for line in page["text"].split("\n") if 25 <= len(line.split()) <= 60
    ][:60]
    clean = real_text.handbook("en-US")
    planted = [
        {
            "id": f"planted/{number}",
            "title": "planted",
            "text": "\n".join([page["text"][:1500], *textwrap.wrap(item, 31), page["text"][1500:3000]]),
        }
        for number, (item, page) in enumerate(zip(held, clean, strict=False))
    ]
    (tmp_path / "held-out.jsonl").write_bytes(real_text.lines({"text": item} for item in held))
    given = asked(
        [source("clean"), source("planted")],
        duplicates={"exact": True},
        decontamination={"held_out": ["held-out.jsonl"]},
        tokenizer={"train": {"vocabulary": 600}},
    )
    files = {"clean": real_text.lines(clean), "planted": real_text.lines(planted)}
    facts = build(load(write(tmp_path, given, files)), tmp_path / "out")
    expect_whole(facts, len(clean) + len(planted))
    gone = {row["id"] for row in left(tmp_path / "out") if row["stage"] == "decontamination"}
    assert gone == {each["id"] for each in planted}
    assert facts["held_out"]["found"] == len(set(held))
