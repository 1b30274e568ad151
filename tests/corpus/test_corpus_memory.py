"""A corpus ten times as large is built in about the same memory; the index of near duplicates states its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from corpus_samples import description, source, write

from assay.corpus.tokenizer import train

LONG_WORDS = [f"{number * 7919:x}".rjust(16, "abcdefgh"[number % 8]) for number in range(1, 300)]

# Everything that is held at a time is made small, so that a small corpus fills it; then the peaks of two builds in one
# process, Python's and numpy's memory by tracemalloc, Arrow's by its own pool.
PEAKS = """
import gc, json, sys, tracemalloc
from pathlib import Path
import pyarrow as pa
from assay.corpus import build, description, pieces, shards, sources, tokenizer
from assay.data import shard
from assay.files import digest
pieces.GROUP_CHARACTERS, pieces.GROUP_ROWS = 1 << 14, 64
sources.PIECE_BYTES = 1 << 16
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
    """Documents of 24 long words that are not alike."""
    folder.mkdir()
    data, chance = b"", random.Random(1)
    for number in range(documents):
        words = chance.choices(LONG_WORDS, k=24)
        data += json.dumps({"id": f"d{number}", "text": " ".join(words)}).encode() + b"\n"
    given = description(
        [source("a", columns={})],
        tokenizer={"path": "tokenizer.json"},
        validation={"fraction": 0.1},
    )
    write(folder, given, {"a": data})


def test_ten_times_the_text_takes_at_most_half_as_much_memory_again(tmp_path: Path) -> None:
    learned = train(LONG_WORDS, 300, "<|endoftext|>")
    for name, documents in (("warm", 50), ("one", 200), ("ten", 2000)):
        corpus(tmp_path / name, documents)
        (tmp_path / name / "tokenizer.json").write_bytes(learned)
    done = subprocess.run([sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    _, one, ten = map(json.loads, done.stdout.splitlines())
    print(one, ten)
    assert ten["admitted"] > 9 * one["admitted"]
    assert ten["peak"] <= 1.5 * one["peak"]
    assert ten["arrow"] <= 1.5 * one["arrow"]
