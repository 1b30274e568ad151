"""The converter keeps prose and leaves markup, code and foreign text out; its output is what the repository holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from corpus_samples import listed

from assay.files.shared import shared

PAGE = """<page xmlns="http://projectmallard.org/1.0/" xmlns:if="http://projectmallard.org/if/1.0/" id="{name}">
<info><credit type="author"><name>Ada  B</name></credit><desc>Not prose</desc>
<include href="legal.xml" xmlns="http://www.w3.org/2001/XInclude"/></info>
<title>{title}</title>
{body}</page>"""
LEGAL = '<license xmlns="http://projectmallard.org/1.0/" href="https://creativecommons.org/licenses/by-sa/{}/"/>'


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    """`corpora/gnome-help/convert.py` as a module."""
    spec = importlib.util.spec_from_file_location("convert", shared("corpora/gnome-help/convert.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def help_folder(root: Path, language: str, pages: dict[str, tuple[str, str]], licence: str = "3.0") -> Path:
    """A folder of help pages (name → title, body)."""
    folder = root / language / "gnome-help"
    folder.mkdir(parents=True)
    (folder / "legal.xml").write_text(LEGAL.format(licence), encoding="utf-8")
    for name, (title, body) in pages.items():
        page = PAGE.replace("{name}", name).replace("{title}", title).replace("{body}", body)
        (folder / f"{name}.page").write_text(page, encoding="utf-8")
    return root


def test_prose_is_kept_and_the_rest_is_left_out(tmp_path: Path, converter: ModuleType) -> None:
    body = """<p>Press <keyseq><key>Ctrl</key>
      <key>C</key></keyseq> or open <guiseq><gui>Settings</gui><gui>Power</gui></guiseq>.</p>
      <p if:test="platform:gnome-classic">Classic only.</p><p if:test="!platform:gnome-classic">Usual.</p>
      <steps><item><p>See <link xref="b"/> and <link xref="b#s">this</link>.</p></item></steps>
      <code>rm -rf</code><screen>$ ls</screen><media type="image" src="x.png"><p>A picture</p></media>
      <p>Type <code>ls</code>, a <media src="i.svg">PS</media> icon.</p><comment><p>Draft</p></comment>
      <table><tr><td><p>F1</p></td><td><p>Help</p></td></tr></table>"""
    root = help_folder(tmp_path, "C", {"a": ("First  page", body), "b": ("Other", '<section id="s"/><p>Text.</p>')})
    first, second = converter.convert("en", root, {})
    assert first["text"].split("\n") == [
        "First page",
        "Press Ctrl+C or open Settings ▸ Power.",
        "Usual.",
        "See Other and this.",
        "Type ls, a PS icon.",
        "F1 – Help",
    ]
    assert (first["id"], first["title"], first["authors"]) == ("en/gnome-help/a", "First page", ["Ada B"])
    assert (first["licence"], first["licence_stated_by"], second["text"]) == ("CC-BY-SA-3.0", "page", "Other\nText.")


def test_untranslated_paragraphs_and_pages_do_not_become_polish_documents(
    tmp_path: Path, converter: ModuleType
) -> None:
    english = "<p>This text was not translated.</p>"
    pages = {"a": ("Title", english), "b": ("Two", english)}
    polish = {"a": ("Tytuł", "<p>" + "Tekst po polsku. " * 12 + "</p>" + english), "b": ("Dwa", english)}
    root = help_folder(help_folder(tmp_path, "C", pages), "pl", polish)
    blocks: dict[str, set[str]] = {}
    assert len(list(converter.convert("en", root, blocks))) == 2
    (only,) = converter.convert("pl", root, blocks)
    assert only["id"] == "pl/gnome-help/a"
    assert "translated" not in only["text"]


@pytest.mark.parametrize(
    "head", ['<!DOCTYPE page [<!ENTITY e "boom">]>', '<!DOCTYPE page SYSTEM "file:///etc/passwd">', "<!DOCTYPE page>"]
)
def test_entities_and_document_types_are_refused(head: str, converter: ModuleType) -> None:
    with pytest.raises(SystemExit, match="declares a document type or entity"):
        converter.parse(f"{head}<page>&amp;</page>".encode(), "a.page")


def test_another_licence_stops_the_conversion(tmp_path: Path, converter: ModuleType) -> None:
    with pytest.raises(SystemExit, match="states"):
        list(converter.convert("en", help_folder(tmp_path, "C", {"a": ("T", "<p>x</p>")}, licence="4.0"), {}))


def test_the_documents_in_the_repository_are_complete_and_credited() -> None:
    attribution = shared("corpora/gnome-help/ATTRIBUTION.md").read_text(encoding="utf-8")
    for language, count in (("en", 348), ("pl", 293)):
        documents = listed(shared(f"corpora/gnome-help/documents-{language}.jsonl"))
        assert len(documents) == count
        assert [document["id"] for document in documents] == sorted(document["id"] for document in documents)
        for document in documents:
            assert document["licence"] == "CC-BY-SA-3.0"
            assert document["text"].startswith(document["title"])
            assert all(author in attribution for author in document["authors"])
            assert all(line == " ".join(line.split()) != "" for line in document["text"].split("\n"))
