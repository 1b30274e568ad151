"""What the corpus chain costs on real text, stage by stage, beside datatrove doing the same work; prints tables.

Run it as `.venv/bin/python bench/corpus.py --peer PYTHON`, PYTHON having datatrove, spacy, tokenizers, xxhash and
orjson. Text: the paragraphs of GNOME's help pages, of the manual pages and of the Debian handbook that are installed,
English and Polish, put together anew to documents of stated sizes. One core each, in turn; it asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

from decontamination import manual_pages, pages

from assay.cli import show
from assay.corpus import admission, build, description, language, stages
from assay.corpus.duplicates import NearDuplicates

SIZE = 5  # MB of text, half of it in each language; the second corpus is `TIMES` as large
TIMES = 10
TURNS = 3
SMALLEST, LARGEST = 400, 16_000  # bytes of a document; sizes are spread evenly by their logarithm, 4.2 kB on average
SAME, ALIKE, SHORT, HELD = 0.03, 0.03, 0.02, 0.01  # exact and near duplicates, too short, with a held-out passage
ITEMS = 100  # held-out passages in each language
LEAST = 200  # characters: the length filter of both
POOL = 8_000_000  # letters of paragraphs in each language at most
VOCABULARY, TRAINING = 16_384, 4_000_000  # of the tokenizer of both, and the bytes that it learns from
SHINGLE, BANDS, ROWS = 5, 16, 8  # MinHash of both
END = "<|endoftext|>"
HANDBOOK = Path("/usr/share/doc/debian-handbook/html/en-US")
MANUAL = {"en": Path("/usr/share/man"), "pl": Path("/usr/share/man/pl")}
PEER_SCRIPT = Path(__file__).with_name("corpus_peer.py")
ALONE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
SAME_WORK, ALL = "the same work", "all stages"


def main() -> int:
    """Measure and print; 1 when the peer is missing, after Assay's own figures."""
    if len(sys.argv) == 4 and sys.argv[1] == "build":
        return once(Path(sys.argv[2]), Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="an interpreter that has datatrove, spacy, tokenizers, xxhash and orjson")
    parser.add_argument("--size", type=int, default=SIZE, help="MB of the smaller corpus")
    parser.add_argument("--times", type=int, default=TIMES, help="how much larger the other one is; 0: none")
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, arguments.size, arguments.times)
        answers: dict[str, list[dict[str, Any]]] = {SAME_WORK: [], ALL: [], "datatrove": []}
        for _ in range(arguments.turns):
            for what in (SAME_WORK, ALL):
                answers[what].append(assay(folder / "small" / f"{what}.yaml", folder / "out"))
            if arguments.peer:
                answers["datatrove"].append(peer(arguments.peer, folder))
        answers = {what: found for what, found in answers.items() if found}
        large = assay(folder / "large" / f"{ALL}.yaml", folder / "out") if arguments.times else None
        end_to_end(answers)
        stage_by_stage(answers[ALL], large)
        if "datatrove" in answers:
            peer_steps(answers["datatrove"])
        if large is not None:
            memory(answers[ALL], large)
    if "datatrove" not in answers:
        sys.stderr.write("the peer is missing: name an interpreter that has it with --peer\n")
        return 1
    return 0


# --- text


class _Paragraphs(HTMLParser):
    """The text of a page of the handbook by its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        begins = tag == "p" or dict(attrs).get("class") == "para"
        self._open = self._open or begins
        if begins:
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("p", "div")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1] += data


def paragraphs(code: str) -> Iterator[str]:
    """Real paragraphs, a manual page's lines by six."""
    for text in pages(code):
        yield from text.split("\n")
    if code == "en" and HANDBOOK.is_dir():
        for path in sorted(HANDBOOK.glob("*.html")):
            parser = _Paragraphs()
            parser.feed(path.read_text(encoding="utf-8"))
            yield from (" ".join(each.split()) for each in parser.found)
    for page in manual_pages(MANUAL[code]):
        lines = page.split("\n")
        yield from (" ".join(lines[at : at + 6]) for at in range(0, len(lines), 6))


def pool_of(code: str) -> list[str]:
    """Paragraphs of 40 letters or more, mostly letters, each once, in a fixed order."""
    found: dict[str, None] = {}
    size = 0
    for text in paragraphs(code):
        if len(text) >= 40 and text not in found and sum(map(str.isalpha, text)) > len(text) / 2:
            found[text] = None
            size += len(text)
            if size >= POOL:
                break
    return list(found)


def documents(code: str, pool: list[str], size: int, held: list[str]) -> Iterator[str]:
    """JSON lines of about `size` bytes of text: the paragraphs in ever new orders, some documents planted."""
    chance = random.Random(f"{code} 20261130")  # noqa: S311
    order: list[str] = []
    earlier: list[list[str]] = []
    total = number = 0
    while total < size:
        kind = chance.random()
        wanted = int(SMALLEST * (LARGEST / SMALLEST) ** chance.random())
        document: list[str] = []
        if earlier and kind < SAME:
            document = chance.choice(earlier)
        elif earlier and kind < SAME + ALIKE:
            document = [*chance.choice(earlier), f"Strona {number}."]
        elif kind < SAME + ALIKE + SHORT:
            document = [f"Page {number}."]
        else:
            have = 0
            while have < wanted:
                if not order:
                    order = chance.sample(pool, len(pool))
                document.append(order.pop())
                have += len(document[-1].encode("utf-8")) + 1
            if kind > 1 - HELD:
                document.insert(len(document) // 2, chance.choice(held))
            if len(earlier) < 500:
                earlier.append(document)
            else:
                earlier[chance.randrange(500)] = document
        text = "\n".join(document)
        total += len(text.encode("utf-8"))
        number += 1
        yield json.dumps({"id": f"{code}/{number}", "text": text}, ensure_ascii=False) + "\n"


def write(folder: Path, size: int, times: int) -> None:
    """Sources, descriptions, held-out passages and the tokenizer of both corpora."""
    pools = {code: pool_of(code) for code in ("en", "pl")}
    held: dict[str, list[str]] = {}
    for code, pool in pools.items():
        long = [text for text in pool if 30 <= len(text.split()) <= 80]
        held[code] = random.Random(code).sample(long, ITEMS)  # noqa: S311
        grams = {gram for text in held[code] for gram in runs(text)}
        pools[code] = [text for text in pool if grams.isdisjoint(runs(text))]
        known = sum(len(text.encode("utf-8")) for text in pools[code])
        show.console().print(f"{code}: {len(pools[code]):,} real paragraphs, {known / 1e6:.1f} MB")
    for name, wanted in {"small": size, **({"large": size * times} if times else {})}.items():
        here = folder / name
        (here / "sources").mkdir(parents=True)
        for code, pool in pools.items():
            with (here / "sources" / f"{code}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(documents(code, pool, wanted * 500_000, held[code]))
        items = "".join(json.dumps({"text": text}) + "\n" for texts in held.values() for text in texts)
        (here / "held-out.jsonl").write_text(items, encoding="utf-8")
        if name == "small":
            train(here)
        else:
            (here / "tokenizer.json").write_bytes((folder / "small" / "tokenizer.json").read_bytes())
        for what in (SAME_WORK, ALL):
            (here / f"{what}.yaml").write_text(json.dumps(described(what)), encoding="utf-8")


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Eight words in a row, so that a passage is held out from what is left as well."""
    stream = text.lower().split()
    return (tuple(stream[at : at + 8]) for at in range(len(stream) - 7))


def train(folder: Path) -> None:
    """A tokenizer from the beginning of both sources."""
    from assay.corpus import tokenizer

    texts = []
    for code in ("en", "pl"):
        with (folder / "sources" / f"{code}.jsonl").open(encoding="utf-8") as file:
            size = 0
            for text in (json.loads(line)["text"] for line in file):
                texts.append(text)
                size += len(text.encode("utf-8"))
                if size >= TRAINING // 2:
                    break
    (folder / "tokenizer.json").write_bytes(tokenizer.train(texts, VOCABULARY, END))


def described(what: str) -> dict[str, Any]:
    """A description: YAML is JSON as well."""
    licence = {"spdx": "CC-BY-SA-3.0", "evidence": "installed packages", "decision": "admitted for this benchmark"}
    every = {"language": {"identify": True}, "decontamination": {"held_out": ["held-out.jsonl"], "fields": ["text"]}}
    return {
        "name": "bench",
        "sources": [
            {"name": code, "path": f"sources/{code}.jsonl", "language": code, "licence": licence, "revision": "1",
             "retrieved": "2026-11-30"}
            for code in ("en", "pl")
        ],
        "normalise": "NFC",
        "admission": {"licences": ["CC-BY-SA-3.0"]},
        "filters": {"min_chars": LEAST},
        "duplicates": {"exact": True, "near": {"shingle": SHINGLE, "bands": BANDS, "rows": ROWS}},
        "tokenizer": {"path": "tokenizer.json"},
        "end_of_text": END,
        "validation": {"fraction": 0.01},
        **(every if what == ALL else {}),
    }  # fmt: skip


# --- the runs, each in a process of its own


def once(path: Path, out: Path) -> int:
    """Build one corpus in this process and print what each stage cost."""
    meter = Meter()
    meter.watch(build, "survey", "survey and hash")
    meter.watch(build, "clean", "clean")
    meter.watch(admission.Gate, "through", "through")
    meter.watch(language, "identify", "language")
    meter.watch(admission, "lengths", "filters")
    meter.watch(admission, "predicates", "filters")
    meter.watch(build, "exact_duplicates", "exact duplicates")
    meter.watch(build, "sign", "near duplicates: sign")
    meter.watch(build, "near_duplicates", "near duplicates: join")
    meter.watch(build, "decontaminate", "decontamination")
    meter.watch(build, "tokenize", "tokenize")
    meter.watch(build, "write_part", "write shards")
    read = stages.read
    stages.read = lambda *given: meter.iterated("read", read(*given))
    before = time.process_time()
    facts = build.build(description.load(path), out, workers=1)
    total = time.process_time() - before
    seconds = meter.seconds
    seconds["normalise, admission"] = seconds["through"] - seconds["language"] - seconds["filters"]
    seconds["write what is clean"] = seconds.pop("clean") - seconds["read"] - seconds.pop("through")
    seconds["receipts, lists, digests"] = total - sum(seconds.values())
    answer = {
        "bytes": sum(source["bytes"] for source in facts["by_source"].values()),
        "total": total,
        "seconds": seconds,
        "read": facts["documents"],
        "documents": facts["admitted"],
        "rejected": facts["rejected"],
        "tokens": facts["tokens"],
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    index = NearDuplicates.load(out / "near-duplicates")  # after the peak was read
    print(json.dumps({**answer, "index": index.bytes, "indexed": len(index)}))
    return 0


class Meter:
    """Processor seconds by stage."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count what a function of a module or class takes."""
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*given: Any, **named: Any) -> Any:
            before = time.process_time()
            try:
                return inner(*given, **named)
            finally:
                self.seconds[stage] += time.process_time() - before

        setattr(owner, name, outer)

    def iterated(self, stage: str, items: Iterator[Any]) -> Iterator[Any]:
        """Count what it takes to get each item."""
        while True:
            before = time.process_time()
            found = list(islice(items, 1))
            self.seconds[stage] += time.process_time() - before
            if not found:
                return
            yield found[0]


def assay(path: Path, out: Path) -> dict[str, Any]:
    """One build on one core."""
    return ran([sys.executable, __file__, "build", str(path), str(out)], out)


def peer(python: str, folder: Path) -> dict[str, Any]:
    """datatrove on one core."""
    here, out = folder / "small", folder / "out"
    numbers = map(str, (LEAST, BANDS, ROWS, SHINGLE))
    return ran([python, str(PEER_SCRIPT), str(here / "sources"), str(here / "tokenizer.json"), str(out), *numbers], out)


def ran(command: list[str], out: Path) -> dict[str, Any]:
    """What a process printed that ran on one core with one thread a library; what it wrote is removed."""
    begin = time.monotonic()
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **ALONE, "LOGURU_LEVEL": "ERROR"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out)
    return {**answer, "wall": time.monotonic() - begin}


# --- tables


def end_to_end(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Rates of the whole chains, in turn."""
    size = answers[SAME_WORK][0]["bytes"]
    rates = {
        what: [size / 1e6 / (each["total"] if "total" in each else sum(each["seconds"].values())) for each in found]
        for what, found in answers.items()
    }
    base = rates.get("datatrove")
    rows = []
    for what, found in rates.items():
        last = answers[what][-1]
        ratios = [own / other for own, other in zip(found, base, strict=True)] if base else []
        rows.append(
            (
                what if what == "datatrove" else f"Assay, {what}",
                f"{statistics.median(found):.3f}",
                " · ".join(f"{rate:.3f}" for rate in found),
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                f"{statistics.median(each['wall'] for each in answers[what]):.1f}",
                f"{last['documents']:,}",
                f"{last['tokens']:,}",
                f"{last['rss'] / 2**20:.0f}",
            )
        )
    head = ("one core", "MB/s, median", "in turn", "÷ datatrove", "wall s", "documents left", "tokens", "peak MiB")
    title = f"{size / 1e6:.1f} MB, {answers[ALL][0]['read']:,} documents, MB of the sources a processor second"
    show.console().print(show.table(title, head, rows))
    show.console().print(
        f"The same work: JSON Lines, at least {LEAST} characters (the peer's language filters need a model that is not "
        f"at hand), MinHash of {SHINGLE} words in {BANDS} bands of {ROWS}, one tokenizer file. Assay's includes exact "
        "duplicates, the check that decoding gives the text back, digests and receipts. All stages: language and "
        "decontamination too."
    )


def stage_by_stage(small: list[dict[str, Any]], large: dict[str, Any] | None) -> None:
    """Where the time of all stages goes; a stage's rate is that of the whole sources through it."""
    order = ("survey and hash", "read", "normalise, admission", "language", "filters", "write what is clean",
             "exact duplicates", "near duplicates: sign", "near duplicates: join", "decontamination", "tokenize",
             "write shards", "receipts, lists, digests")  # fmt: skip
    rows = []
    for stage in (*order, "in all"):
        row = [stage]
        for runs_of in (small, [large] if large is not None else []):
            if not runs_of:
                continue
            times = [each["total"] if stage == "in all" else each["seconds"].get(stage, 0.0) for each in runs_of]
            spent, total = statistics.median(times), statistics.median(each["total"] for each in runs_of)
            rate = runs_of[0]["bytes"] / 1e6 / spent if spent > 0.001 else 0
            row += [f"{spent:.2f}", f"{rate:,.1f}" if rate else "-", f"{spent / total:.0%}"]
        rows.append(tuple(row))
    sizes = [each["bytes"] for each in (small[0], large) if each is not None]
    head = ["stage", *(f"{size / 1e6:.0f} MB: {what}" for size in sizes for what in ("s", "MB/s", "share"))]
    show.console().print(show.table("Assay, all stages, one core", tuple(head), rows))


def peer_steps(found: list[dict[str, Any]]) -> None:
    """Where the peer's time goes."""
    steps = {step: statistics.median(each["seconds"][step] for each in found) for step in found[0]["seconds"]}
    rows = [(step, f"{spent:.2f}", f"{spent / sum(steps.values()):.0%}") for step, spent in steps.items()]
    show.console().print(show.table(f"datatrove {found[0]['version']}, one core", ("step", "s", "share"), rows))


def memory(small: list[dict[str, Any]], large: dict[str, Any]) -> None:
    """Peaks of the two sizes, and how much of the growth the duplicate index accounts for."""
    least = statistics.median(each["rss"] for each in small)
    index = large["index"] - small[0]["index"]
    rows = [
        (f"{each['bytes'] / 1e6:.0f} MB, {each['read']:,} documents", f"{peak / 2**20:.0f}")
        for each, peak in ((small[0], least), (large, large["rss"]))
    ]
    rows += [
        ("ratio", f"{large['rss'] / least:.2f}"),
        ("of the growth, the index of near duplicates", f"{index / 2**20:.0f}"),
        ("ratio without it", f"{(large['rss'] - index) / least:.2f}"),
        ("bytes of that index a kept document", f"{large['index'] / large['indexed']:.0f}"),
    ]
    show.console().print(show.table("peak memory of one build, one process", ("corpus", "MiB"), rows))


if __name__ == "__main__":
    sys.exit(main())
