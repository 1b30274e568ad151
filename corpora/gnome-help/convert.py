"""Mallard help pages to plain prose: how documents-en.jsonl and documents-pl.jsonl were made.

`python convert.py HELP_FOLDER` reads the unpacked `usr/share/help` of Debian's gnome-user-docs 43.0-2 and
writes both files beside itself, the same bytes every time. It resolves no entities, loads no other file
and keeps no figures, code listings or fragments that a page includes from elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

PACKAGE = "gnome-user-docs 43.0-2"
LICENCE = "CC-BY-SA-3.0"
LICENCE_ADDRESS = "https://creativecommons.org/licenses/by-sa/3.0/"
BOOKS = {"en": [("C", "gnome-help"), ("C", "system-admin-guide")], "pl": [("pl", "gnome-help")]}
LEFT_OUT = {"info", "links", "media", "figure", "listing", "code", "screen", "synopsis", "comment", "include", "rules"}
UNTRANSLATED_WORDS = 4  # shorter blocks may rightly be the same in both languages: "GNOME", "Bluetooth"
UNTRANSLATED_SHARE = 0.2  # a page with more English than this is no Polish document


def parse(data: bytes, name: str) -> Element:
    """The element tree with bare local names; a document type or entity declaration ends the program."""
    builder = TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")

    def refuse(*_: object) -> None:
        raise SystemExit(f"{name}: declares a document type or entity, which help pages do not need; not read")

    def start(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag.rpartition("}")[2], {key.rpartition("}")[2]: value for key, value in attributes.items()})

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: builder.end(tag.rpartition("}")[2])
    parser.CharacterDataHandler = builder.data
    parser.Parse(data, True)
    return builder.close()


def shown(element: Element) -> bool:
    """Whether a reader on an ordinary GNOME desktop sees the element (Mallard's conditional processing)."""

    def holds(token: str) -> bool:
        return token.startswith("!")  # no platform, target or action of the tests in use holds there

    test = element.get("test")
    return test is None or any(all(map(holds, group.split())) for group in test.split(","))


def fold(text: str) -> str:
    """One line, single spaces."""
    return " ".join(text.split())


def inline(element: Element, titles: dict[str, str]) -> str:
    """The text of a paragraph or title; an empty link reads as the title of its target, keys are joined by +."""
    parts = [element.text or ""]
    children = [child for child in element if shown(child)]
    if element.tag in ("keyseq", "guiseq"):
        return ("+" if element.tag == "keyseq" else " ▸ ").join(fold(inline(child, titles)) for child in children)
    if element.tag == "link" and not children and not fold(parts[0]):
        return titles.get(element.get("xref", ""), "")
    for child in element:
        if child in children:
            parts.append(inline(child, titles))
        parts.append(child.tail or "")
    return "".join(parts)


def blocks(element: Element, titles: dict[str, str]) -> Iterator[str]:
    """Titles, paragraphs and list items in reading order, one folded line each; a table row is one line."""
    for child in element:
        if child.tag in LEFT_OUT or not shown(child):
            continue
        if child.tag == "tr":
            cells = (fold(" ".join(blocks(cell, titles))) for cell in child)
            line = " – ".join(cell for cell in cells if cell)
        elif child.tag in ("p", "title"):
            line = fold(inline(child, titles))
        else:
            yield from blocks(child, titles)
            continue
        if line:
            yield line


def link_titles(pages: dict[str, Element]) -> dict[str, str]:
    """`page` and `page#section` → title, for links that carry no text of their own."""
    titles: dict[str, str] = {}
    for page, root in pages.items():
        for element in root.iter():
            title = element.find("title")
            if title is not None and (element is root or element.get("id")):
                titles[page if element is root else f"{page}#{element.get('id')}"] = fold(inline(title, {}))
    return titles


def licence(root: Element, folder: Path) -> str:
    """`page` when the page includes the book's licence, `package` when only the package states it."""
    for include in root.iter("include"):
        if include.get("href") == "legal.xml":
            address = parse((folder / "legal.xml").read_bytes(), "legal.xml").get("href")
            if address != LICENCE_ADDRESS:
                raise SystemExit(
                    f"{folder}/legal.xml states {address!r}, not {LICENCE_ADDRESS}; look before converting"
                )
            return "page"
    if next(root.iter("license"), None) is not None:
        raise SystemExit(f"{folder}: a page states a licence of its own; look before converting")
    return "package"


def convert(language: str, help_folder: Path, english: dict[str, set[str]]) -> Iterator[dict[str, object]]:
    """The documents of one language; `english` holds the English blocks by page and is filled on the way."""
    for place, book in BOOKS[language]:
        folder = help_folder / place / book
        files = sorted(folder.glob("*.page"))
        pages = {file.stem: parse(file.read_bytes(), file.name) for file in files}
        titles = link_titles(pages)
        for stem, root in pages.items():
            page = f"{book}/{stem}"
            lines = list(blocks(root, titles))
            title = lines[0]
            if language == "en":
                english[page] = set(lines)
            else:
                kept = [x for x in lines if len(x.split()) < UNTRANSLATED_WORDS or x not in english.get(page, ())]
                if len("".join(kept)) < (1 - UNTRANSLATED_SHARE) * len("".join(lines)) or kept[:1] != [title]:
                    continue
                lines = kept
            names = (fold(name.text or "") for credit in root.iter("credit") for name in credit.iter("name"))
            yield {
                "id": f"{language}/{page}",
                "page": page,
                "title": title,
                "text": "\n".join(lines),
                "language": language,
                "authors": list(dict.fromkeys(name for name in names if name)),
                "licence": LICENCE,
                "licence_stated_by": licence(root, folder),
                "source": f"{PACKAGE}, help/{place}/{page}.page",
            }


def main() -> None:
    """Convert both languages; English first, because it tells what in a Polish page is not translated."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python convert.py HELP_FOLDER   (the unpacked usr/share/help)")
    english: dict[str, set[str]] = {}
    for language in BOOKS:
        documents = sorted(convert(language, Path(sys.argv[1]), english), key=lambda document: str(document["id"]))
        out = Path(__file__).with_name(f"documents-{language}.jsonl")
        lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        out.write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{out.name}: {len(documents)} documents, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
