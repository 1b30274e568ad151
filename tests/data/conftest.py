"""Small shards and queues that the tests of the data room are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from assay.cli.main import main
from assay.data import queue as queues
from assay.data.shard import Shard, Source, write_shard

settings.register_profile("assay", deadline=None)
settings.load_profile("assay")

MakeShard = Callable[..., Shard]


@pytest.fixture(scope="session")
def make_shard() -> MakeShard:
    """Writes a shard of random documents, half English and half Polish."""

    def make(path: Path, documents: int = 120, vocabulary: int = 500, seed: int = 0, **more: Any) -> Shard:
        random = np.random.default_rng(seed)
        texts = [np.append(random.integers(1, vocabulary, random.integers(4, 60)), 0) for _ in range(documents)]
        tokens, half = sum(map(len, texts)), sum(map(len, texts[: documents // 2]))
        sources = [Source("en-docs", 0, half, "en", "CC-BY", "1"), Source("pl-docs", half, tokens, "pl")]
        known: dict[str, Any] = {"tokenizer": "test", "end_of_text": 0, "pool": "base", "sources": sources}
        return write_shard(path, texts, vocabulary=vocabulary, **{**known, **more})

    return make


@pytest.fixture
def assay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["assay", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def shard(tmp_path: Path, make_shard: MakeShard) -> Shard:
    """One shard in the folder that also holds the queue."""
    return make_shard(tmp_path / "data" / "first")


@pytest.fixture
def queue(tmp_path: Path, shard: Shard, make_shard: MakeShard) -> queues.Queue:
    """A queue of three slots: one shard, a piece of it twice over, and two shards joined."""
    path = tmp_path / "data" / "queue.jsonl"
    other = make_shard(tmp_path / "data" / "second", seed=1)
    made = queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test", pool="base")
    whole, again = queues.parts_of(made, shard), queues.parts_of(made, shard, 100, 900)
    both = queues.parts_of(made, other, 7, 1500) + queues.parts_of(made, shard, 50, 1800)
    for updates, epochs, parts in ((20, 1, whole), (9, 2, again), (21, 1, both)):
        queues.append(path, queues.propose(made, updates=updates, epochs=epochs, parts=parts, global_batch=8))
        made = queues.load(path)
    return made
