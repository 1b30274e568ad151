"""The language of a text is told offline, the same in every process and thread, from stretches of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.corpus.language import CHARACTERS, UNKNOWN, identify, method, stretches
from assay.files.shared import shared

SENTENCES = {
    "en": "The notary read the will aloud while the rain beat against the windows of the small office.",
    "pl": "Notariusz odczytał na głos testament, a deszcz bębnił o szyby niewielkiej kancelarii.",
    "de": "Der Notar verlas das Testament, während der Regen gegen die Fenster des kleinen Büros schlug.",
}

OFFLINE = f"""
import socket, sys
def refuse(*_, **__): raise AssertionError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import assay.corpus.duplicates, assay.corpus.decontamination
from assay.corpus.language import identify
from assay.errors import InputError
assert not {{"py3langid", "rensa"}} & set(sys.modules), "a room imports its extras too early"
for library, work in (("rensa", lambda: assay.corpus.duplicates.NearDuplicates().add("a", "b")),
                      ("py3langid", lambda: identify("b"))):
    sys.modules[library] = None
    try: work()
    except InputError as error: assert "assay[corpus]" in str(error)
    else: raise AssertionError("a missing extra was not named")
    del sys.modules[library]
print([identify(text) for text in {list(SENTENCES.values())!r}])
"""


@pytest.mark.parametrize("code", sorted(SENTENCES))
def test_a_sentence_is_told_with_confidence(code: str) -> None:
    found, probability = identify(SENTENCES[code])
    assert found == code
    assert 0.9 < probability <= 1


@pytest.mark.parametrize("code", ["en", "pl"])
def test_real_pages_are_in_the_language_they_are_in(code: str) -> None:
    lines = (shared("corpora/gnome-help") / f"documents-{code}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [found for line in lines[:60] if (found := identify(json.loads(line)["text"])[0]) != code] == []


@pytest.mark.parametrize("text", ["", "  \n ", "12.50 € → 3 / 4", "… — !"])
def test_a_text_without_letters_has_no_language(text: str) -> None:
    assert identify(text) == (UNKNOWN, 0.0)


def test_a_text_that_only_begins_in_a_language_is_in_that_of_the_rest() -> None:
    begun = SENTENCES["pl"] * 20 + SENTENCES["en"] * 80
    assert len(SENTENCES["pl"] * 20) > CHARACTERS
    assert identify(begun)[0] == "en"
    assert identify(SENTENCES["en"] * 20 + SENTENCES["pl"] * 80)[0] == "pl"


@given(st.text(max_size=3 * CHARACTERS))
def test_a_thousand_characters_are_looked_at_with_both_ends(text: str) -> None:
    seen = stretches(text)
    if len(text) <= CHARACTERS:
        assert seen == text
    else:
        assert len(seen) == CHARACTERS + 9
        assert (seen[:100], seen[-100:]) == (text[:100], text[-100:])
        assert all(seen[at : at + 100] in text for at in range(0, len(seen), 101))


def test_processes_and_threads_agree_offline_and_say_what_is_missing() -> None:
    expected = [identify(text) for text in SENTENCES.values()]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(identify, [*SENTENCES.values()] * 8)) == expected * 8
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(expected), "")


def test_receipts_can_say_what_an_answer_depends_on() -> None:
    assert method()["library"] == "py3langid"
    assert (method()["characters"], method()["stretches"]) == (CHARACTERS, 10)
