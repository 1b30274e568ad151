"""A small run on real text: a tokenizer, shards with byte counts, and a model trained by the real command.

Made once for a test session; tests that write into the run copy it first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.corpus import tokenizer as tokenizers
from assay.corpus.tokenizer import Tokenizer
from assay.data import queue as queues
from assay.data.shard import Shard, Source, open_shard, write_shard
from assay.files.shared import shared

BLOCK, GLOBAL_BATCH, UPDATES = 32, 8, 12
MODEL = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocabulary": 416, "block": BLOCK, "ffn": 48,
    "qk_norm": True, "value_residual": True, "logit_cap": 20.0,
}  # fmt: skip


@dataclass(frozen=True)
class Prose:
    """The project's folder, its recipe, its run and what its ids mean."""

    path: Path
    tokenizer: Tokenizer

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def validation(self) -> Shard:
        return open_shard(self.path / "data" / "validation")


def prose(base: Path) -> Prose:
    """The project below `base`, made at the first call."""
    path = base / "prose"
    if not (path / "run").is_dir():
        _make(path)
    data = (path / "data" / "corpus" / "tokenizer.json").read_bytes()
    return Prose(path, tokenizers.from_bytes(data, "<|endoftext|>", "the tokenizer"))


def texts() -> list[str]:
    """Paragraphs of the demo's pages, English and Polish in turn."""
    pages = []
    for language in ("en", "pl"):
        lines = shared(f"corpora/gnome-help/documents-{language}.jsonl").read_text(encoding="utf-8").splitlines()
        pages.append([json.loads(line)["text"][:500] for line in lines[:40]])
    return [text for pair in zip(*pages, strict=True) for text in pair]


def recipe(path: Path, name: str, **changes: Any) -> Path:
    value: dict[str, Any] = {
        "name": "prose",
        "start": "scratch",
        "model": MODEL,
        "data": {"queue": "data/queue.jsonl", "roots": ["data"], "validation": "data/validation", "seed": 5},
        "batch": {"micro": GLOBAL_BATCH},
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "schedule": {"kind": "constant", "updates": UPDATES},
        "seed": 3,
        "runtime": {"device": "cpu"},
        "checkpoint": {"every": 6, "weights_every": 9, "keep": "all"},
        "evaluate": {"every": UPDATES, "batches": 1000},
        **changes,
    }
    file = path / f"{name}.yaml"
    file.write_text(json.dumps(value))  # JSON is YAML 1.2
    return file


def _make(path: Path) -> None:
    data = path / "data"
    (data / "corpus").mkdir(parents=True)
    written = texts()
    (data / "corpus" / "tokenizer.json").write_bytes(tokenizers.train(written, 400, "<|endoftext|>"))
    tokenizer = tokenizers.load(data / "corpus" / "tokenizer.json", "<|endoftext|>")
    shards = {
        name: _shard(data / name, tokenizer, part)
        for name, part in (("train", written[12:]), ("validation", written[:12]))
    }
    queue = data / "queue.jsonl"
    made = queues.create(
        queue, block=BLOCK, dtype="uint16", vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.digest, pool="base"
    )
    parts = queues.parts_of(made, shards["train"])
    line = queues.propose(made, updates=UPDATES, epochs=1, parts=parts, global_batch=GLOBAL_BATCH)
    queues.append(queue, line, global_batch=GLOBAL_BATCH)
    subprocess.run(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe(path, "recipe")), "--run", str(path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )


def _shard(path: Path, tokenizer: Tokenizer, written: list[str]) -> Shard:
    ids = [one for one, _ in tokenizers.encode(tokenizer, written)]
    sizes = [len(text.encode()) for text in written]
    source = Source("gnome-help", 0, sum(map(len, ids)), None, "CC-BY-SA-3.0", "43")
    return write_shard(
        path, ids, vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.digest, end_of_text=tokenizer.end_of_text,
        pool="base", sources=[source], text_bytes=sizes,
    )  # fmt: skip
