"""The data card and the Croissant metadata say what the receipt says, to people and to programs, and nothing else."""

from __future__ import annotations

import html
import json
import re
import socket
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import mlcroissant
import pytest
from corpus_samples import built, description, lines, listed, prose, records, source
from huggingface_hub import DatasetCard
from markdown_it import MarkdownIt

from assay.cli.main import main
from assay.corpus.card import CARD, CROISSANT, hub_licence, write_card
from assay.corpus.evidence import Facts, Publication, facts
from assay.errors import DataError, InputError
from assay.files.digest import digest_file

# Inside mlcroissant; nothing that its callers could change.
pytestmark = pytest.mark.filterwarnings("ignore:ConjunctiveGraph is deprecated:DeprecationWarning")
SAID = Publication("https://example.org/small", "The Small Press", "2026-11-30", "1.2.0")
HOSTILE = (
    "| x |\n# Title\n<script>alert(1)</script> ![i](http://evil.example/x.png) [l](javascript:alert(1)) `a` **b** _c_ "
    "&lt; $x^2$ \\ ~~s~~ www.evil.example me@evil.example \u202e end"
)
PRIVATE = "the held out sentence about quinces that nobody may ever train a language model on again, says the rule"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a mix, near duplicates, held-out text, licences by source and by title, and a refused source."""
    folder = tmp_path_factory.mktemp("card")
    english, norwegian = records(40), records(40, "no")
    for one in norwegian:
        one["text"] = " ".join(reversed(one["text"].split()))  # else a near duplicate of the English page
    english += [
        {"id": "en/short", "page": "s", "title": "s", "text": "too few"},
        {"id": "en/private", "page": "p", "title": "p", "text": f"Before. {PRIVATE} {prose(99)}"},
        {"id": "en/almost", "page": "3", "title": "t", "text": f"en: {prose(3)} end"},
    ]
    (folder / "held-out.jsonl").write_text(json.dumps({"id": "secret-item", "text": PRIVATE}) + "\n")
    licence = {"spdx": "CC-BY-4.0", "evidence": HOSTILE, "decision": f"admitted {HOSTILE}", "attribution": HOSTILE}
    (folder / "a licence.txt").write_text("Attribution is enough.")
    by_title = [
        {"id": f"no/{n}", "licence": "CC0-1.0" if n % 2 else "CC-BY-4.0", "evidence": "page", "decision": "admitted"}
        for n in range(39)
    ]
    (folder / "titles.jsonl").write_bytes(lines(by_title))
    given = description(
        [
            source("a", licence={**licence, "files": ["a licence.txt"]}, revision=None, retrieved=None),
            source("b", language="no", licence={"records": "titles.jsonl"}),
            source("c", licence={"spdx": "CC-BY-4.0", "evidence": "none"}),
        ],
        admission={"licences": ["CC-BY-4.0", "CC0-1.0"]},
        duplicates={"near": {"threshold": 0.7}},
        decontamination={"held_out": ["held-out.jsonl"]},
        mix={"en": 0.75, "no": 0.25},
    )
    built(folder, given, {"a": lines(english), "b": lines(norwegian), "c": lines(records(3, "x"))})
    return folder / "out"


@pytest.fixture(scope="module")
def written(small: Path) -> Path:
    """The same corpus with both files in it."""
    write_card(facts(small, SAID), small)
    return small


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on the network fails."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("this test goes on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def rendered(markdown: str) -> str:
    """The card's body as HTML."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown.split("---\n", 2)[2])


def rows(markdown: str, first: str) -> list[list[str]]:
    """The rows, as text, of the table whose first column has this head."""
    table = re.search(rf"<table>\s*<thead>\s*<tr>\s*<th[^>]*>{first}</th>.*?</table>", rendered(markdown), re.DOTALL)
    assert table is not None
    found = re.findall(r"<tr>(.*?)</tr>", table[0], re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in found[1:]]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def loaded(path: Path, record_set: str) -> list[dict[str, Any]]:
    """The records of a set as mlcroissant reads them, by the fields' short names."""
    found = mlcroissant.Dataset(jsonld=str(path)).records(record_set)
    return [
        {key.split("/")[1]: value.decode() if isinstance(value, bytes) else value for key, value in record.items()}
        for record in found
    ]


def test_mlcroissant_finds_no_fault_and_reads_the_documents_that_were_published(written: Path, offline: None) -> None:
    dataset = mlcroissant.Dataset(jsonld=str(written / CROISSANT))
    assert (set(dataset.metadata.issues.errors), set(dataset.metadata.issues.warnings)) == (set(), set())
    assert dataset.metadata.ctx.is_v1_1()
    assert loaded(written / CROISSANT, "documents") == listed(written / "admitted.jsonl")


def test_the_inline_records_are_those_of_the_receipt(written: Path, offline: None) -> None:
    receipt = json.loads((written / "corpus.json").read_text())
    shards = loaded(written / CROISSANT, "shards")
    assert [(s["name"], s["tokens"], s["sha256"]) for s in shards] == [
        (s["path"], s["tokens"], s["sha256"]) for s in receipt["shards"]
    ]
    assert [s["split"] for s in shards] == ["cr:TrainingSplit", "cr:TrainingSplit", "cr:ValidationSplit"]
    sources = {s["name"]: s for s in loaded(written / CROISSANT, "sources")}
    assert {name: s["admitted"] for name, s in sources.items()} == {
        name: s["admitted"] for name, s in receipt["by_source"].items()
    }
    inline = json.loads((written / CROISSANT).read_text())["recordSet"][2]["data"]
    assert [one["sources/revision"] for one in inline] == [None, "1", "1"]
    assert [one["sources/licence"] for one in inline] == ["CC-BY-4.0", None, "CC-BY-4.0"]  # b's: by title
    left = Counter[str]()
    for one in loaded(written / CROISSANT, "rejections"):
        left[one["reason"]] += one["documents"]
    assert left == receipt["rejected"]
    stages = loaded(written / CROISSANT, "stages")
    assert (stages[0]["in"], stages[-1]["out"]) == (receipt["documents"], receipt["admitted"])


def test_every_file_of_the_metadata_is_there_with_its_digest_and_no_list_of_what_was_rejected(written: Path) -> None:
    stated = json.loads((written / CROISSANT).read_text())["distribution"]
    for one in stated:
        path = written / one["name"]
        assert digest_file(path) == f"sha256:{one['sha256']}"
        assert one.get("contentSize") in (None, f"{path.stat().st_size} B")
    names = {one["name"] for one in stated}
    assert names == {
        "corpus.json", "corpus.yaml", "admitted.jsonl", "tokenizer/tokenizer.json", "train-00/tokens.bin",
        "train-01/tokens.bin", "validation/tokens.bin", "licences/a licence.txt",
    }  # fmt: skip


def test_neither_file_holds_a_held_out_item_or_the_text_of_a_document(written: Path) -> None:
    for name in (CARD, CROISSANT):
        text = (written / name).read_text()
        assert "quinces" not in text
        assert "secret-item" not in text
        assert "Before." not in text
        assert "held-out.jsonl" in text or name == CROISSANT  # the set is named by its digest


def test_the_card_holds_the_figures_of_the_receipt(written: Path) -> None:
    receipt, card = json.loads((written / "corpus.json").read_text()), (written / CARD).read_text()
    stages = rows(card, "stage")
    assert [(s[0], number(s[1]), number(s[2])) for s in stages] == [
        (s["stage"], s["in"], s["out"]) for s in receipt["stages"]
    ]
    for before, after in pairwise(stages):
        assert before[2] == after[1]
    assert {s[0]: number(s[5]) for s in rows(card, "source")} == {
        name: s["tokens"] for name, s in receipt["by_source"].items()
    }
    assert sum(number(s[2]) for s in rows(card, "shard")) == receipt["admitted"]
    languages = {row[0]: row for row in rows(card, "language")}
    assert {name: Decimal(row[2]) for name, row in languages.items()} == {"en": Decimal("0.75"), "no": Decimal("0.25")}
    assert sum(Decimal(row[4]) for row in languages.values()) == 1
    near = next(s["in"] - s["out"] for s in receipt["stages"] if s["stage"] == "near duplicates")
    assert near > 0
    for text in (
        "Looked for: 1 held-out item; found: 1; too short to be looked for: 0. Documents taken out for them: 1.",
        f"Near duplicates: {near} documents taken out.",
        "threshold = 0.7",
        "library = rensa RMinHash",
        "Unicode NFC",
        "at least 10 characters, no upper bound",
    ):
        assert text in card


def test_what_nobody_measured_or_stated_says_so(small: Path, tmp_path: Path, offline: None) -> None:
    write_card(facts(small, Publication()), tmp_path / "bare")
    card = (tmp_path / "bare" / CARD).read_text()
    for text in (
        "Language of each document: not measured.",
        "Revision of a: not stated.",
        "Date of retrieval of a: not stated.",
        "The publication's url, creator, published, version: not stated.",
        "| creator | not stated |",
        "Personal data, offensive text, social bias, factual quality of the documents: not measured.",
    ):
        assert text in card
    metadata = json.loads((tmp_path / "bare" / CROISSANT).read_text())
    assert not {"url", "creator", "datePublished", "version"} & set(metadata)
    assert metadata["rai:dataLimitations"] == ["language of each document: not measured"]
    assert "rai:dataCollectionTimeFrame" not in metadata  # one source does not state its date
    warned = mlcroissant.Dataset(jsonld=str(tmp_path / "bare" / CROISSANT)).metadata.issues.warnings
    assert {re.findall(r"schema.org/(\w+)", text)[0] for text in warned} == {"datePublished", "version"}


def test_texts_of_other_people_are_shown_and_do_nothing(written: Path) -> None:
    page = rendered((written / CARD).read_text())
    assert "<script" not in page
    assert "<img" not in page
    assert re.findall(r"<a href=\"([^\"]*)", page) == [SAID.url]
    assert "Title" not in "".join(re.findall(r"<h\d>(.*?)</h\d>", page))
    assert not re.findall(r"<(em|strong|s|h1)>", page.replace("<h1>small</h1>", ""))
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert shown.count(" ".join(HOSTILE.replace("\u202e", " ").split())) == 3
    assert all(len(row) == 2 for row in rows((written / CARD).read_text(), ""))


def test_the_hub_reads_the_front_matter(written: Path, offline: None) -> None:
    data = DatasetCard.load(written / CARD).data.to_dict()
    assert data["license"] == ["cc-by-4.0", "cc0-1.0"]
    assert data["language"] == ["en", "no"]  # not the boolean that YAML 1.1 makes of a bare `no`
    assert data["size_categories"] == ["n<1K"]
    assert data["configs"] == [{"config_name": "documents", "data_files": "admitted.jsonl"}]


@pytest.mark.parametrize(
    ("spdx", "hub"),
    [
        ("CC-BY-SA-3.0", "cc-by-sa-3.0"),
        ("GPL-3.0-or-later", "gpl-3.0"),
        ("GFDL-1.3-only", "gfdl"),
        ("ODC-By-1.0", "odc-by"),
        ("LicenseRef-house", None),
        ("CC-BY-9.9", None),
    ],
)
def test_a_licence_has_the_hub_s_name_or_none(spdx: str, hub: str | None) -> None:
    assert hub_licence(spdx) == hub


def test_the_same_receipt_gives_the_same_bytes_and_nothing_is_replaced(written: Path, tmp_path: Path) -> None:
    again = facts(written, SAID)
    write_card(again, tmp_path / "again")
    for name in (CARD, CROISSANT):
        assert (tmp_path / "again" / name).read_bytes() == (written / name).read_bytes()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / CROISSANT).write_text("mine")
    with pytest.raises(InputError, match=r"croissant\.json exists already"):
        write_card(again, tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [CROISSANT]


@pytest.mark.parametrize("name", ["corpus.yaml", "admitted.jsonl"])
def test_evidence_that_the_receipt_does_not_name_is_refused(small: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for one in ("corpus.json", "corpus.yaml", "admitted.jsonl", "rejected.parquet"):
        (copy / one).write_bytes((small / one).read_bytes() + (b"\n" if one == name else b""))
    with pytest.raises(DataError, match=rf"{re.escape(name)} is not the file that corpus\.json names by digest"):
        facts(copy, SAID)


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ({"url": "example.org"}, "--url"),
        ({"url": "https://a|b"}, "--url"),
        ({"published": "yesterday"}, "--published"),
        ({"version": "1.0"}, "--version"),
        ({"creator": " "}, "--creator"),
    ],
)
def test_a_publication_that_croissant_would_not_take_is_refused(said: dict[str, str], option: str) -> None:
    with pytest.raises(InputError, match=option):
        Publication(**said)


def test_documents_by_licence_add_up_to_the_admitted_ones(small: Path) -> None:
    found: Facts = facts(small, SAID)
    assert sum(found.licences.values()) == found.receipt["admitted"]
    assert {name: sum(counts.values()) for name, counts in found.documents.items()} == {
        name: one["admitted"] for name, one in found.receipt["by_source"].items()
    }
    assert set(found.documents["b"]) == {"CC-BY-4.0", "CC0-1.0"}


def test_the_command_writes_both_files_and_names_what_is_not_stated(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "public"
    words = ["corpus", "card", str(small), "--out", str(out), "--creator", "The Small Press", "--json"]
    monkeypatch.setattr("sys.argv", ["assay", *words])
    with pytest.raises(SystemExit) as end:
        main()
    printed, told = capsys.readouterr()
    assert not end.value.code
    answer = json.loads(printed)
    assert answer["ok"]
    assert [Path(name).name for name in answer["files"]] == [CARD, CROISSANT]
    assert answer["receipt"] == digest_file(small / "corpus.json")
    assert answer["not_stated"] == ["url", "published", "version"]
    assert "give --url, --published, --version when you publish" in told
    assert "The Small Press" in (out / CARD).read_text()
