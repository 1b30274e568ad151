"""A corpus ten times as large is built in about the same memory; the index of near duplicates states its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from corpus_samples import description, lines, source, write

from assay.corpus import pieces, stages
from assay.corpus.description import load
from assay.corpus.sources import survey
from assay.corpus.tokenizer import train
from assay.corpus.workers import Workers
from assay.files import digest

LONG_WORDS = [f"{number * 7919:x}".rjust(16, "abcdefgh"[number % 8]) for number in range(1, 300)]

# Everything that is held at a time is made small, so that a small corpus fills it; then the peaks of two builds in one
# process, Python's and numpy's memory by tracemalloc, Arrow's by its own pool.
PEAKS = """
import gc, json, sys, tracemalloc
from pathlib import Path
import pyarrow as pa
from assay.corpus import build, description, pieces, shards, sources, stages, tokenizer
from assay.data import shard
from assay.files import digest
pieces.GROUP_CHARACTERS, pieces.GROUP_ROWS, stages._NAMED = 1 << 14, 64, 16
sources.PIECE_BYTES = 1 << 16
shards._GROUP = 64
sources._READ = digest._PIECE = shard._PIECE = shards._COUNTED = tokenizer.BATCH_CHARACTERS = 1 << 13
for name in ("warm", "one", "ten"):
    path, out = Path(sys.argv[1]) / name / "corpus.yaml", Path(sys.argv[1]) / name / "out"
    gc.collect()
    tracemalloc.start()
    facts = build.build(description.load(path), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrow = pa.default_memory_pool().max_memory()
    print(json.dumps({"peak": peak, "arrow": arrow, "admitted": facts["admitted"]}))
"""


def corpus(folder: Path, documents: int) -> None:
    """Documents of 24 long words that are not alike, behind each a second one with its text."""
    folder.mkdir()
    data, chance = b"", random.Random(1)
    for number in range(documents):
        words = chance.choices(LONG_WORDS, k=24)
        for copy in ("", " again"):
            data += json.dumps({"id": f"d{number}{copy}", "text": " ".join(words)}).encode() + b"\n"
    given = description(
        [source("a", columns={})],
        tokenizer={"path": "tokenizer.json"},
        validation={"fraction": 0.1},
    )
    write(folder, given, {"a": data})


def test_ten_times_the_text_takes_at_most_half_as_much_memory_again(tmp_path: Path) -> None:
    learned = train(LONG_WORDS, 300, "<|endoftext|>")
    for name, documents in (("warm", 50), ("one", 150), ("ten", 1500)):
        corpus(tmp_path / name, documents)
        (tmp_path / name / "tokenizer.json").write_bytes(learned)
    done = subprocess.run([sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    _, one, ten = map(json.loads, done.stdout.splitlines())
    print(one, ten)
    assert ten["admitted"] > 9 * one["admitted"]
    assert ten["peak"] <= 1.5 * one["peak"]
    assert ten["arrow"] <= 1.5 * one["arrow"]


def test_the_names_of_duplicate_families_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "GROUP_ROWS", 64)
    monkeypatch.setattr(digest, "_PIECE", 1 << 13)
    monkeypatch.setattr(stages, "_NAMED", 16)
    families, name = 1000, "n" * 4000
    documents = [{"id": f"{name}{n}", "text": f"the text number {n // 2}"} for n in range(2 * families)]
    path = write(
        tmp_path, description([source("a", columns={})], validation={"fraction": 0.1}), {"a": lines(documents)}
    )
    corpus = load(path).corpus
    with Workers(1) as workers:
        _, [piece] = survey(corpus, tmp_path, workers)
    cleaned, doubled = pieces.Stage(tmp_path / "clean"), pieces.Stage(tmp_path / "duplicates")
    assert stages.clean(stages.Clean(corpus, tmp_path, cleaned, piece))["kept"] == 2 * families
    tracemalloc.start()
    stages.exact_duplicates(corpus, [piece], stages.Standing(cleaned), doubled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = list(pieces.rows(doubled.opened(piece.number, stages.LEFT)))
    assert [row["evidence"] for row in rows] == [
        f"same text as a: {name}{2 * n} at {2 * n + 1}" for n in range(families)
    ]
    assert peak < families * len(name) / 2  # of the names alone
