"""One small run for all tests of this room, trained by the real command: two segments, updates done again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from assay.data import approval
from assay.data import queue as queues
from assay.data.shard import Source, write_shard
from assay.files.digest import digest
from assay.ledger import keys

RECIPE = """# a comment that stays
name: small
start: scratch
model: {layers: 2, width: 32, heads: 2, vocabulary: 64, block: 32, ffn: 48, qk_norm: true, value_residual: true}
data: {queue: data/queue.jsonl, roots: [data], validation: data/validation, seed: 7}
batch: {micro: 2, accumulation: 2, lanes: 1}
optimizer: {kind: muon, lr: 6.0e-4, muon_lr: 0.02}
schedule: {kind: wsd, updates: 12, warmup: 3, decay_fraction: 0.25, decay: linear, min_lr: 6.0e-5}
seed: 1
runtime: {device: cpu}
checkpoint: {every: 4, keep: 2, weights_every: 3}
log: {every: 2}
"""
NAMES = ("alice", "bob", "mallory")  # alice and bob review the queue, both; mallory does not
TOKENIZER = b'{"version": "1.0"}\n'


def assay(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process, in `folder`, on one thread."""
    return subprocess.run(
        [sys.executable, "-m", "assay.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
        check=False,
    )


def _shard(path: Path, documents: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    texts = [np.append(random.integers(1, 64, random.integers(20, 80)), 0) for _ in range(documents)]
    tokens, half = sum(map(len, texts)), sum(map(len, texts[: documents // 2]))
    write_shard(
        path,
        texts,
        vocabulary=64,
        tokenizer=digest(TOKENIZER),
        end_of_text=0,
        pool="base",
        sources=[Source("en-docs", 0, half, "en", "CC-BY", "1"), Source("pl-docs", half, tokens, "pl", "CC-BY", "1")],
    )


def public(project: Path, *names: str) -> list[str]:
    """The public keys of these people."""
    return [keys.read_public(str(project / "keys" / f"{name}.pub")) for name in names]


def train(project: Path) -> Path:
    """A project whose `run` did updates 0:6, went on from step 4 to 12, and was evaluated.

    Its queue has three slots, each approved by alice and bob; the third is not reached.
    """
    data = project / "data"
    data.mkdir(parents=True)
    (project / "keys").mkdir()
    for name in NAMES:
        keys.new_key(project / "keys" / name)
    for name, documents, seed in (("first", 60, 1), ("second", 30, 2), ("validation", 12, 3)):
        _shard(data / name, documents, seed)
    (data / "tokenizer").mkdir()
    (data / "tokenizer" / "tokenizer.json").write_bytes(TOKENIZER)
    path = data / "queue.jsonl"
    trust = {"reviewer": public(project, "alice", "bob"), "threshold": 2}
    queue = queues.create(
        path, block=32, dtype="uint16", vocabulary=64, tokenizer=digest(TOKENIZER), pool="base", trust=trust
    )
    for updates, epochs, name in ((7, 1, "first"), (8, 2, "second"), (7, 1, "first")):
        shard = queues.open_shard(data / name)
        line = queues.propose(
            queue, updates=updates, epochs=epochs, parts=queues.parts_of(queue, shard), global_batch=4
        )
        for person in ("alice", "bob"):
            slot = queues.next_slot(queue, line, "the line")
            approval.approve(
                queue, slot, keys.load_key(project / "keys" / person), {shard.digests["tokens.bin"]: shard}
            )
        queues.append(path, line)
        queue = queues.load(path)
    (project / "recipe.yaml").write_text(RECIPE)
    for words in (
        ("train", "recipe.yaml", "--run", "run", "--until", 6),
        ("train", "recipe.yaml", "--run", "run", "--start", "resume", "--from-step", 4),
        ("evaluate", "run"),
    ):
        done = assay(project, *words)
        assert done.returncode == 0, done.stderr
    return project
