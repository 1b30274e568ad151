"""The language of a text is told offline, the same in every process and thread, from its beginning alone."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from assay.corpus.language import PREFIX, UNKNOWN, identify, method
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


def test_only_the_beginning_counts() -> None:
    english = ((SENTENCES["en"] + " ") * 20)[:PREFIX]
    assert identify("\n  " + english + SENTENCES["pl"] * 100) == identify(english)


def test_processes_and_threads_agree_offline_and_say_what_is_missing() -> None:
    expected = [identify(text) for text in SENTENCES.values()]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(identify, [*SENTENCES.values()] * 8)) == expected * 8
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(expected), "")


def test_receipts_can_say_what_an_answer_depends_on() -> None:
    assert method()["library"] == "py3langid"
    assert method()["characters"] == PREFIX
