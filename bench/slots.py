"""How fast a slot is checked: bytes, document digests, validation documents exact and near, taken documents.

Run it as `.venv/bin/python bench/slots.py`. It makes 32 million tokens of documents with the frequencies of words
and a million of validation in a temporary folder, and prints processor seconds of one core. It asserts nothing.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.cli import show
from assay.data import checking, freshness
from assay.data import queue as queues
from assay.data.apart import HeldOut
from assay.data.checking import Against
from assay.data.documents import document_digests
from assay.data.shard import Shard, Source, verify_shard, write_shard

TOKENS, HELD_OUT, VOCABULARY = 32_000_000, 1_000_000, 32_768


def main() -> None:
    """Make the shards, check one slot step by step and whole, print the table."""
    rows: list[tuple[str, str, str]] = []

    def timed(what: str, tokens: int, work: Callable[[], Any]) -> Any:
        before = time.process_time()
        result = work()
        seconds = time.process_time() - before
        rows.append((what, f"{seconds:,.2f} s", f"{tokens / seconds / 1e6:,.0f} × 10^6"))
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old, new = (written(folder / f"shard-{seed}", TOKENS, seed) for seed in (1, 2))
        validation = written(folder / "validation", HELD_OUT, 3)
        path = folder / "queue.jsonl"
        queue = queues.create(path, block=4096, dtype="uint16", vocabulary=VOCABULARY, tokenizer="bench",
                              freshness="strict")  # fmt: skip
        for shard in (old, new):
            line = queues.propose(queue, updates=20, parts=queues.parts_of(queue, shard), global_batch=256)
            queues.append(path, line)
            queue = queues.load(path)
        shards = {shard.sha256: shard for shard in (old, new)}
        timed("hash a shard and check its ids and ends", TOKENS, lambda: verify_shard(new))
        timed("digest its documents", TOKENS, lambda: document_digests(new))
        held_out = timed("index the validation documents", HELD_OUT, lambda: HeldOut(validation))
        slot = queue.slots[1]
        alone = Against(validation, [], [])
        loose = timed("find validation documents, exact and near", TOKENS, lambda: checking.check(
            replace(queue, freshness=None), slot, shards, alone, held_out, "slot 1"))  # fmt: skip
        against = Against(validation, freshness.queued_before(queue, slot, shards), [])
        timed("the same, and fresh against as many tokens", TOKENS, lambda: checking.check(
            queue, slot, shards, against, held_out, "slot 1"))  # fmt: skip
    show.console().print(show.table(f"a slot of {loose['documents']:,} documents", ("what", "CPU", "tokens/s"), rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    show.console().print(f"peak memory of this process: {peak:,} MiB")


def written(path: Path, tokens: int, seed: int) -> Shard:
    """Documents of 100 to 1,900 ids, each id as frequent as a word of its rank."""
    random = np.random.default_rng(seed)
    weights = 1 / (np.arange(1, VOCABULARY) + 2.7)
    ids = random.choice(np.arange(1, VOCABULARY), tokens, p=weights / weights.sum())

    def documents() -> Iterator[np.ndarray]:
        at = 0
        while at < tokens:
            end = min(at + int(random.integers(100, 1_900)), tokens)
            ids[end - 1] = 0
            yield ids[at:end]
            at = end

    return write_shard(path, documents(), vocabulary=VOCABULARY, tokenizer="bench", end_of_text=0, pool="bench",
                       sources=[Source("random", 0, tokens)])  # fmt: skip


if __name__ == "__main__":
    main()
