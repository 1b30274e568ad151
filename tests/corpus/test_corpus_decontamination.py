"""Held-out text is found in every disguise and named, and clean text is not; known by counting word by word."""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import listed
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.corpus.decontamination import COMMON, Contamination, HeldOut
from assay.corpus.words import fold, words
from assay.errors import InputError
from assay.files.digest import digest_file
from assay.files.shared import shared

HELP = shared("corpora/gnome-help")
PAGES = {code: [page["text"] for page in listed(HELP / f"documents-{code}.jsonl")] for code in ("en", "pl")}
FILLER = " ".join(f"wypełniacz{n} niczego{n} tu" for n in range(60))


def passage(code: str, number: int, length: int) -> str:
    """Words of a real page, from its end, which is less often shared with other pages than its beginning."""
    return " ".join(PAGES[code][number].split()[-length:])


ITEMS = [
    {"id": f"{code}/{number}", "text": passage(code, number, 13 + number % 40)}
    for code in ("en", "pl")
    for number in range(0, 120, 3)
    if len(PAGES[code][number].split()) > 60
]


def bare(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c)).translate(
        str.maketrans("łŁ", "lL")
    )


def hyphenated(text: str) -> str:
    """Every line ends within a word, as a typesetter's may."""
    return " ".join(w if len(w) < 8 or not w.isalpha() else f"{w[:4]}-\n  {w[4:]}" for w in text.split())


DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "wrapped to short lines": lambda text: "\n".join(textwrap.wrap(text, 24)),
    "wrapped and indented with carriage returns": lambda text: "\r\n\t> ".join(textwrap.wrap(text, 31)),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "without diacritics": bare,
    "upper case": str.upper,
    "other punctuation": lambda text: " — ".join(text.replace(".", "…").replace(",", ";").split()),
    "without punctuation": lambda text: " ".join(words(text)),
    "soft hyphens and no-break spaces": lambda text: "\u00a0".join(f"{w[:3]}\u00ad{w[3:]}" for w in text.split()),
    "hyphenated over line ends": hyphenated,
    "fullwidth letters": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" < c < "~" else c for c in text),
}


def held_out(folder: Path, items: list[dict[str, Any]], name: str = "set.jsonl", **options: Any) -> HeldOut:
    path = folder / name
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return HeldOut.load([path], **options)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> HeldOut:
    return held_out(tmp_path_factory.mktemp("held"), ITEMS)


@pytest.mark.parametrize("disguise", sorted(DISGUISES))
def test_an_injected_item_is_found_in_every_disguise(real: HeldOut, disguise: str) -> None:
    missed = []
    for item in ITEMS:
        text = DISGUISES[disguise](item["text"])
        found = {one.item: one for one in real.find(f"{FILLER}\n{text}\n{FILLER}")}
        mine = found.get(item["id"])
        reading = "plain" if grams(words(text), 13) & grams(words(item["text"]), 13) else "folded"
        if disguise == "hyphenated over line ends":
            reading = "plain"  # which is what joining is for
        if mine is None or (mine.kind, mine.reading) != ("exact", reading) or mine.words < 13:
            missed.append((item["id"], mine))
    assert missed == []


def test_a_whole_item_is_told_with_its_share_and_place(real: HeldOut) -> None:
    item = next(item for item in ITEMS if item["id"].startswith("pl") and len(words(item["text"])) >= 30)
    found = real.check(f"{FILLER} {item['text'].upper()} {FILLER}")
    expected = Contamination("set.jsonl", item["id"], "exact", "plain", 1.0, len(words(item["text"])), len(FILLER) + 1)
    assert found == expected
    assert not set(words(found.evidence())) & {w for w in words(item["text"]) if len(w) > 4 and not w.isdigit()}


def test_clean_text_is_not_found(real: HeldOut) -> None:
    # Other pages of the same handbook, in pieces, less those in which counting finds a run of an item.
    runs = {run for item in ITEMS for run in grams(folded(item["text"]), 13)}
    clean = 0
    for code in ("en", "pl"):
        for text in PAGES[code][121:200]:
            if not runs & grams(folded(text), 13):
                clean += 1
                assert [one.evidence() for one in real.find(text) if one.kind == "exact"] == []
    assert clean > 100
    assert real.check(FILLER) is None


def folded(text: str) -> list[str]:
    return [fold(word) for word in words(text)]


def grams(stream: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(stream[place : place + n]) for place in range(len(stream) - n + 1)}


STREAM = st.lists(st.sampled_from(["zamek", "żółty", "zolty", "river", "stone"]), min_size=5, max_size=24)


def expected(item: list[str], document: list[str], n: int, near: float) -> str | None:
    """Exact, near or None by counting."""
    run = min(n, len(item))
    if grams(item, run) & grams(document, run):
        return "exact"
    places = [tuple(item[place : place + 5]) for place in range(len(item) - 4)]
    share = sum(gram in grams(document, 5) for gram in places) / len(places)
    return "near" if len(item) >= n and share >= near else None


@settings(max_examples=150, deadline=None)
@given(item=STREAM, document=STREAM, n=st.integers(5, 15), near=st.sampled_from([0.2, 0.5, 1.0]))
def test_findings_agree_with_counting(
    tmp_path_factory: pytest.TempPathFactory, item: list[str], document: list[str], n: int, near: float
) -> None:
    held = held_out(tmp_path_factory.mktemp("h"), [{"text": " ".join(item)}], n=n, near=near)
    found = held.check(" ".join(document))
    bared = expected([fold(w) for w in item], [fold(w) for w in document], n, near)
    assert (found.kind if found else None) == bared
    if found is not None:
        plain = expected(item, document, n, near)
        assert (found.reading == "plain") == (plain == bared)


def test_an_edited_item_is_near(real: HeldOut) -> None:
    item = next(item for item in ITEMS if len(words(item["text"])) >= 40)
    stream = item["text"].split()
    for place in range(5, len(stream), 12):
        stream[place] = "inaczej"
    found = real.check(f"{FILLER} {' '.join(stream)}")
    assert found is not None
    assert (found.item, found.kind) == (item["id"], "near")
    assert 0.5 <= found.share < 1
    assert real.check(" ".join(sorted(item["text"].split()))) is None  # its words in another order


def test_short_items_are_found_whole_or_not_at_all(tmp_path: Path) -> None:
    items = [
        {"id": "short", "text": "Jaka jest stolica Wysp Zielonego Przylądka?"},
        {"id": "few", "text": "Jaka jest stolica?"},
        {"id": "digits", "text": "1 2 3 4 5 6 7"},
        {"id": "none", "text": "…"},
    ]
    held = held_out(tmp_path, items)
    found = held.check("xx\njaka jest STOLICA wysp\nzielonego przyladka, xx")
    assert found == Contamination("set.jsonl", "short", "exact", "folded", 1.0, 6, 3)
    assert held.check("Jaka jest stolica Wysp Zielonego Lądu? Jaka jest stolica? 1 2 3 4 5 6 7 …") is None
    assert {row["item"]: row["checkable"] for row in held.report()} == {
        "short": True, "few": False, "digits": False, "none": False,
    }  # fmt: skip


def test_ideographs_are_words_of_their_own(tmp_path: Path) -> None:
    held = held_out(tmp_path, [{"text": "这个国家的首都是哪一座城市"}])
    assert held.check("请问，这个国家的首都\n是哪一座城市？谢谢") is not None
    assert held.check("请问，这个国家的首都在哪里？谢谢") is None


def test_a_template_that_many_items_share_is_no_evidence(tmp_path: Path) -> None:
    template = "Read the following passage with care and then choose the one right answer from the list below"
    many = COMMON + 1
    items = [{"text": f"{template}: question{n} about matter{n} or thing{n} in place{n}"} for n in range(many)]
    held = held_out(tmp_path, items)
    assert held.check(f"{FILLER} {template} {FILLER}") is None
    found = held.find(f"{FILLER} {items[7]['text']} {FILLER}")
    assert [(one.item, one.kind, one.words) for one in found] == [("8", "exact", len(words(items[7]["text"])))]
    (tmp_path / "few").mkdir()
    few = held_out(tmp_path / "few", items[:-1])
    assert few.check(f"{FILLER} {template} {FILLER}") is not None


def test_questions_answers_and_both_together_are_looked_for(tmp_path: Path) -> None:
    question = "Which of these rivers flows through the largest number of capital cities in all of Europe?"
    choices = [["The Danube, which passes through four capitals"], "Rhine", None]
    held = held_out(tmp_path, [{"id": 7, "question": question, "choices": choices}], fields=("question", "choices"))
    assert held.check(f"So: {question}") is not None
    assert held.check("He said: the Danube, which passes through four capitals.") is not None
    across = held.check("of capital cities in all of Europe? The Danube, which passes through four")
    assert across is not None
    assert (across.item, across.words) == ("7", 13)
    assert held.check("Rhine Rhine Rhine") is None


def test_the_report_names_every_item(tmp_path: Path) -> None:
    same = "a sentence that two of the held out items have word for word in common here"
    items = [{"id": "a", "text": same}, {"id": "b", "text": same}, {"id": "c", "text": same + " but longer now it is"}]
    held = held_out(tmp_path, items)
    for number in range(25):
        held.record(f"document {number}", held.find(f"{FILLER} {same}"))
    held.record("clean", held.find(FILLER))
    documents = [f"document {number}" for number in range(20)]
    row = {"set": "set.jsonl", "checkable": True, "found": 25, "kinds": ["exact, plain"], "documents": documents}
    assert held.report() == [{**row, "item": name} for name in ("a", "b", "c")]
    shares = {one.item: one.share for one in held.find(same)}
    assert shares["a"] == shares["b"] == 1.0 > shares["c"]


def test_plain_text_sets_hold_an_item_a_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("\n\nLitwo ojczyzno moja\nty jesteś jak zdrowie\n \n\nIle cię trzeba cenić ten tylko się dowie\n")
    held = HeldOut.load([path])
    assert [(item.set, item.id) for item in held.items] == [("poem.txt", "1"), ("poem.txt", "2")]
    found = held.check("litwo, ojczyzno moja, ty jesteś jak zdrowie; ile cię")
    assert found is not None
    assert found.item == "1"
    assert held.method()["sets"] == [{"name": "poem.txt", "sha256": digest_file(path), "items": 2}]


@pytest.mark.parametrize(
    ("files", "options", "told"),
    [
        ({"a.jsonl": '{"question": "x"}'}, {}, "line 1: no field text is there, only question"),
        ({"a.jsonl": '{"text": "x"}'}, {"fields": ("text", "txet")}, "no held-out item has the field 'txet'"),
        ({"a.jsonl": '{"text": 7}'}, {}, "line 1: 'text' is neither a string nor a list"),
        ({"a.jsonl": "[1]"}, {}, "line 1: an object is expected"),
        ({"a.jsonl": '{"text": "x"}\n{"text'}, {}, "line 2 is not valid JSON"),
        ({"a.jsonl": '{"id": "p", "text": "x"}\n{"id": "p", "text": "y"}'}, {}, "two items are called 'p'"),
        ({"a.jsonl": ""}, {}, "is empty"),
        ({"a.csv": "x"}, {}, "neither .jsonl nor .txt"),
        ({"a/x.txt": "x", "b/x.txt": "y"}, {}, "have one name"),
        ({"a.txt": "x"}, {"n": 4}, "n is 4"),
        ({"a.txt": "x"}, {"near": 0.0}, "near is 0.0"),
    ],
)
def test_a_fault_of_a_set_is_named(tmp_path: Path, files: dict[str, str], options: dict[str, Any], told: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        HeldOut.load([tmp_path / name for name in files], **options)
    assert told in str(caught.value)


def test_nothing_to_look_for_finds_nothing(tmp_path: Path) -> None:
    held = held_out(tmp_path, [{"text": "too short"}])
    assert held.check(FILLER) is None
    assert HeldOut.load([]).check(FILLER) is None
    assert held_out(tmp_path, ITEMS).check("") is None
