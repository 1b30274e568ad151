"""What decontamination finds and costs on real text, beside datatrove's n-gram filter; prints two tables.

Run it as `.venv/bin/python bench/decontamination.py --peer PYTHON`, PYTHON having datatrove, spacy and xxhash. Held-out
items are passages of half of the GNOME help pages; clean documents are the other half, the Debian manual
pages that are installed (manpages-pl; `--manual FOLDER` elsewhere) cut to 2,000 bytes. It asserts nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assay.cli import show
from assay.corpus.decontamination import Contamination, HeldOut, N
from assay.corpus.words import fold, words
from assay.files.shared import shared

SIZE = 2_000
ITEMS = 400
TURNS = 5
HALF = 100  # of 2,000 bytes: a document of which an item replaces the middle
MOST = 3_000  # documents of one kind
TIMED = 2_000
CHANCE = random.Random(20261130)  # noqa: S311
PEER_SCRIPT = Path(__file__).with_name("decontamination_peer.py")


def main() -> int:
    """Measure and print; 1 when the peer is missing, after Assay's own figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="an interpreter that has datatrove, spacy and xxhash")
    parser.add_argument("--manual", type=Path, nargs="+", default=[Path("/usr/share/man")], help="manual pages")
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()

    help_pages = {code: list(pages(code)) for code in ("en", "pl")}
    items = [item for texts in help_pages.values() for item in passages(texts[::2], ITEMS // 2)]
    manual = {
        code: [page for folder in arguments.manual for page in manual_pages(folder / part)]
        for code, part in (("en", "."), ("pl", "pl"))
    }
    groups = {f"GNOME help, {code}": pieces(texts[1::2]) for code, texts in help_pages.items()}
    groups |= {f"manual pages, {code}": pieces(texts) for code, texts in manual.items() if texts}
    groups = {name: CHANCE.sample(group, min(len(group), MOST)) for name, group in groups.items()}
    clean = [piece for group in groups.values() for piece in group]
    show.console().print(f"{len(items)} held-out items of 20 to 60 words from GNOME help; documents of {SIZE:,} bytes: "
                         + ", ".join(f"{len(group):,} {name}" for name, group in groups.items()))  # fmt: skip

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "items.jsonl"
        path.write_text("".join(json.dumps({"text": item}) + "\n" for item in items), encoding="utf-8")
        held = HeldOut.load([path])
        peer = Peer.start(arguments.peer, items, folder) if arguments.peer else None
        recall(held, peer, items, clean)
        false_positives(held, peer, items, clean)
        speed(held, peer, CHANCE.sample(clean, min(len(clean), TIMED)), arguments.turns)
    if peer is None:
        sys.stderr.write("the peer is missing: name an interpreter that has datatrove, spacy and xxhash with --peer\n")
        return 1
    peer.process.terminate()
    return 0


class Peer:
    """The other program's process; asked over a pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @classmethod
    def start(cls, python: str, items: list[str], folder: Path) -> Peer | None:
        """Start it and give it the items; None when it cannot run."""
        index = folder / "peer"
        index.mkdir()
        process = subprocess.Popen(
            [python, str(PEER_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LOGURU_LEVEL": "ERROR"},
        )
        try:
            started = cls(process).ask({"items": items, "n": N, "folder": str(index)})
        except (BrokenPipeError, json.JSONDecodeError):
            process.wait()
            return None
        show.console().print(f"peer: datatrove {started['version']}, {started['grams']:,} grams of {N} words")
        return cls(process)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question, one answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def bare(text: str) -> str:
    """As typed without diacritics."""
    return "".join(fold(c) if c.islower() else fold(c.lower()).upper() for c in unicodedata.normalize("NFC", text))


def replaced(every: int) -> Callable[[str], str]:
    """One word of so many replaced by another."""

    def edit(text: str) -> str:
        stream = text.split()
        for place in range(every // 2, len(stream), every):
            stream[place] = f"inne{place}"
        return " ".join(stream)

    return edit


DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "wrapped to 30 columns": lambda text: "\n".join(textwrap.wrap(text, 30)),
    "wrapped, words hyphenated": lambda text: re.sub(r"\b([^\W\d_]{4})([^\W\d_]{4,})", "\\1-\n\\2", text),
    "decomposed (NFD)": lambda text: unicodedata.normalize("NFD", text),
    "without diacritics": bare,
    "upper case": str.upper,
    "other punctuation": lambda text: " — ".join(re.sub(r"[.,]", "…", text).split()),
    "soft hyphens in words": lambda text: re.sub(r"(\w{4})(?=\w{3})", "\\1\u00ad", text),
    "one word of 25 replaced": replaced(25),
    "one word of 12 replaced": replaced(12),
    "one word of 8 replaced": replaced(8),
}


def recall(held: HeldOut, peer: Peer | None, items: list[str], clean: list[str]) -> None:
    """Each item, disguised, put into the middle of a clean document: who finds it."""
    rows = []
    hosts = CHANCE.choices(clean, k=len(items))
    for name, disguise in DISGUISES.items():
        documents = []
        for item, host in zip(items, hosts, strict=True):
            middle = len(host) // 2
            documents.append(f"{host[: middle - HALF]}\n{disguise(item)}\n{host[middle + HALF :]}")
        findings = [held.find(document) for document in documents]
        mine = [
            next((one for one in found if one.item == str(number)), None)
            for number, found in enumerate(findings, start=1)
        ]
        exact = sum(one is not None and one.kind == "exact" for one in mine)
        near = sum(one is not None and one.kind == "near" for one in mine)
        folded = sum(one is not None and one.reading == "folded" for one in mine)
        other = share(sum(peer.ask({"documents": documents})["found"]), len(items)) if peer else "-"
        rows.append((name, share(exact + near, len(items)), str(exact), str(near), str(folded), other))
    head = ("injected", "Assay finds", "exact", "near", "folded only", "datatrove finds")
    show.console().print(show.table(f"recall, {len(items)} items embedded in 2 kB documents", head, rows))


def false_positives(held: HeldOut, peer: Peer | None, items: list[str], clean: list[str]) -> None:
    """What is found in documents from elsewhere, and whether a run of words is really there, by counting."""
    runs = {run for item in items for run in grams(item)}
    found = [held.check(document) for document in clean]
    repeated = [bool(runs & grams(document)) for document in clean]
    answers = [[one is not None for one in found], peer.ask({"documents": clean})["found"] if peer else None]

    def counted(what: Callable[[bool, bool], bool]) -> list[str]:
        return ["-" if own is None else f"{sum(map(what, own, repeated)):,}" for own in answers]

    rows = [
        ("documents from elsewhere", *counted(lambda one, real: True)),
        ("found", *counted(lambda one, real: one)),
        (f"of these without {N} held-out words in a row", *counted(lambda one, real: one and not real)),
        (f"not found, but with {N} held-out words in a row", *counted(lambda one, real: real and not one)),
    ]
    show.console().print(show.table("false positives", ("what", "Assay", "datatrove"), rows))
    shown: list[Contamination] = [one for one, real in zip(found, repeated, strict=True) if one and not real]
    for one in shown[:10]:
        show.console().print(f"  without a run: {one.evidence()}")


def grams(text: str) -> set[tuple[str, ...]]:
    """All runs of N folded words, the plain way."""
    stream = [fold(word) for word in words(text)]
    return {tuple(stream[place : place + N]) for place in range(len(stream) - N + 1)}


def speed(held: HeldOut, peer: Peer | None, clean: list[str], turns: int) -> None:
    """Documents a second of processor time, in turns, both readings of a text included."""
    seconds: dict[str, list[float]] = {"Assay": [], "datatrove": []}
    for _ in range(turns):
        before = time.process_time()
        for document in clean:
            held.check(document)
        seconds["Assay"].append(time.process_time() - before)
        if peer is not None:
            seconds["datatrove"].append(peer.ask({"documents": clean})["seconds"])
    rows = []
    for name, times in seconds.items():
        rates = [len(clean) / spent for spent in times]
        shown = (f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}") if rates else ("-", "-")
        rows.append((name, *shown))
    head = ("one core", "documents/s, median", "range")
    show.console().print(show.table(f"speed on {len(clean):,} documents, {turns} turns", head, rows))


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def pages(code: str) -> Iterator[str]:
    """GNOME help pages that the repository carries."""
    for line in (shared("corpora/gnome-help") / f"documents-{code}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]


def passages(texts: list[str], count: int) -> list[str]:
    """Held-out items: stretches of 20 to 60 words, distinct."""
    found: dict[str, None] = {}
    long = [stream for text in texts if len(stream := text.split()) >= 80]
    while len(found) < count:
        stream = CHANCE.choice(long)
        length = CHANCE.randint(20, 60)
        start = CHANCE.randrange(len(stream) - length)
        if len(words(item := " ".join(stream[start : start + length]))) >= N:
            found[item] = None
    return list(found)


def manual_pages(folder: Path) -> Iterator[str]:
    """The running text of the manual pages in `folder`, roughly: requests and escapes of troff taken out."""
    for path in sorted(folder.glob("man[0-9]/*.gz")):
        if path.is_symlink():
            continue
        raw = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        lines = [re.sub(r"^\.(?:SH|SS|B|I|BR|IR|RB|RI|BI|IB|IP|Sh|Ss|Nd)\b", "", line) for line in raw.splitlines()]
        text = "\n".join(line.strip() for line in lines if line.strip() and line[0] not in ".'")
        text = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\[&,/|^)%:]|\\s[-+]?\d", "", text).replace("\\-", "-")
        yield re.sub(r"\\\(..|\\\[[^]]*\]|\\e|\\", "", text)


def pieces(texts: list[str]) -> list[str]:
    """The texts one after another, cut to documents of 2,000 bytes at white space; repeated ones once."""
    found: dict[str, None] = {}
    data = "\n".join(texts).encode("utf-8")
    start = 0
    while start + SIZE <= len(data):
        stop = max(data.rfind(b" ", start, start + SIZE), data.rfind(b"\n", start, start + SIZE), start + SIZE // 2)
        found[data[start:stop].decode("utf-8", errors="ignore")] = None
        start = stop
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
