"""How long order, seek, exposure, batches and digests take; prints one table.

Run it as `.venv/bin/python bench/data.py`. It makes a shard of 64 million tokens in a temporary
folder and an imagined queue of 100 billion tokens in 20 slots. It asserts nothing.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from assay.cli import show
from assay.data import queue as queues
from assay.data.batches import Batches, windows_digest
from assay.data.exposure import Consumed, Exposure
from assay.data.queue import Part, Queue
from assay.data.shard import Source, verify_shard, write_shard
from assay.files.digest import digest

BLOCK, BATCH, SEED = 4096, 256, 20261109


def main() -> None:
    """Measure everything once, the short ones several times, and print the table."""
    rows: list[tuple[str, str, str]] = []

    def timed(what: str, work: Callable[[], Any], amount: str = "", times: int = 1) -> Any:
        before = time.perf_counter()
        for _ in range(times):
            result = work()
        seconds = (time.perf_counter() - before) / times
        rows.append((what, f"{seconds * 1000:,.2f} ms", amount))
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = timed("make a queue of 20 slots", lambda: imagined(folder / "large.jsonl"), "100 × 10^9 tokens")
        timed("load and verify it", lambda: queues.load(large.path), times=10)
        slot = large.slots[19]
        last = slice((slot.updates - 1) * BATCH, slot.updates * BATCH)
        seek = lambda: slot.stream(SEED, BLOCK).starts(last.start, last.stop)  # noqa: E731
        timed("seek to the last update, first time", seek, "draws 1.2 × 10^6 windows")
        timed("seek to the last update, again", seek, times=100)
        consumed = Consumed(large, SEED, BATCH, 0, large.updates_total)
        timed("exposure of all slots", lambda: Exposure([consumed]).total, f"{large.updates_total:,} updates")

        shard = timed("write a shard", lambda: written(folder / "shard"), "64 × 10^6 tokens, 64,000 documents")
        timed("verify it", lambda: verify_shard(shard))
        small = queues.create(folder / "q.jsonl", block=BLOCK, dtype="uint16", vocabulary=32_768, tokenizer="bench")
        parts = queues.parts_of(small, shard)
        queues.append(small.path, queues.propose(small, updates=60, parts=parts, global_batch=BATCH))
        batches = Batches(queues.load(small.path), [], SEED, BATCH)
        numbers = iter(range(60))
        batch = timed("gather a batch", lambda: batches.batch(next(numbers)), "256 windows of 4,097 ids", 40)
        timed("digest a batch", lambda: windows_digest(batch), "2.1 MB", 40)
    show.console().print(show.table("data room, one process", ("what", "time", "amount"), rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    show.console().print(f"peak memory of this process: {peak:,} MiB")


def imagined(path: Path) -> Queue:
    """A queue of 20 slots of 5 billion tokens whose shards lie nowhere."""
    queue = queues.create(path, block=BLOCK, dtype="uint16", vocabulary=32_768, tokenizer="bench")
    for number in range(20):
        name = digest(str(number).encode())
        parts = [Part(name, None, 0, 4_000_000_000, "main"), Part(name, None, 4_000_000_000, 5_000_000_000, "second")]
        queues.append(path, queues.propose(queue, updates=4_700, parts=parts, global_batch=BATCH))
        queue = queues.load(path)
    return queue


def written(path: Path) -> Any:
    """A shard of 64,000 documents of 1,000 random tokens."""
    text = np.random.default_rng(0).integers(1, 32_768, (1_000, 1_000), dtype=np.int64)
    text[:, -1] = 0
    about: dict[str, Any] = {"vocabulary": 32_768, "tokenizer": "bench", "end_of_text": 0, "pool": "bench"}
    documents = (text[number % 1_000] for number in range(64_000))
    return write_shard(path, documents, sources=[Source("random", 0, 64_000_000)], **about)


if __name__ == "__main__":
    main()
