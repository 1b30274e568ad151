"""A small project for tests of all rooms: random shards, a queue of two slots, a recipe, and `drive`.

`drive` runs the worker's job in this process, where a test needs many short runs and a process each
would only cost time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from assay.data import queue as queues
from assay.data.shard import Source, open_shard, write_shard
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create

VOCABULARY, BLOCK, GLOBAL_BATCH = 61, 16, 8

RECIPE: dict[str, Any] = {
    "name": "small",
    "start": "scratch",
    "model": {
        "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "vocabulary": VOCABULARY, "block": BLOCK, "ffn": 24,
        "qk_norm": True, "value_residual": True,
    },
    "data": {"queue": "data/queue.jsonl", "validation": "data/validation", "seed": 7},
    "batch": {"micro": 4, "accumulation": 2, "lanes": 1},
    "optimizer": {"kind": "muon", "lr": 0.003, "muon_lr": 0.02},
    "schedule": {"kind": "wsd", "updates": 24, "warmup": 3, "decay_fraction": 0.25, "min_lr": 0.0003},
    "loss": {"chunk": 32, "z": 0.0001},
    "seed": 3,
    "runtime": {"device": "cpu"},
    "checkpoint": {"every": 6, "keep": "all"},
    "evaluate": {"every": 8, "batches": 2},
    "log": {"every": 1},
}  # fmt: skip


def documents(count: int, seed: int) -> Iterator[np.ndarray]:
    """Random documents of 5 to 40 tokens that end with the end-of-text id 0."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        body = generator.integers(1, VOCABULARY, generator.integers(5, 40))
        yield np.append(body, 0).astype(np.uint16)


def shard(path: Path, count: int, seed: int) -> Path:
    """A shard of random documents, two sources of two languages."""
    texts = list(documents(count, seed))
    half = sum(len(text) for text in texts[: count // 2])
    total = sum(len(text) for text in texts)
    write_shard(
        path,
        texts,
        vocabulary=VOCABULARY,
        tokenizer="sha256:" + "7" * 64,
        end_of_text=0,
        pool="base",
        sources=[
            Source("first", 0, half, "en", "CC0-1.0", "1"),
            Source("second", half, total, "pl", "CC0-1.0", "1"),
        ],
    )
    return path


class Project:
    """A folder with data, queue and recipe."""

    def __init__(self, path: Path, slots: tuple[tuple[int, int], ...] = ((10, 2), (14, 3))) -> None:
        self.path = path
        data = path / "data"
        data.mkdir(parents=True)
        shards = [shard(data / f"train-{number}", 44, number) for number in range(len(slots))]
        shard(data / "validation", 12, 99)
        queue = data / "queue.jsonl"
        first = open_shard(shards[0])
        queues.create(
            queue,
            block=BLOCK,
            dtype=first.dtype,
            vocabulary=first.vocabulary,
            tokenizer=first.tokenizer,
            pool="base",
        )
        for place, (updates, epochs) in zip(shards, slots, strict=True):
            loaded = queues.load(queue)
            line = queues.propose(
                loaded,
                global_batch=GLOBAL_BATCH,
                updates=updates,
                epochs=epochs,
                parts=queues.parts_of(loaded, open_shard(place)),
            )
            queues.append(queue, line, global_batch=GLOBAL_BATCH)

    def recipe(self, name: str = "recipe", **changes: Any) -> Path:
        """A recipe file; `changes` replace keys, `section__key` inside a section."""
        value = json.loads(json.dumps(RECIPE))
        for key, new in changes.items():
            section, _, inner = key.partition("__")
            if inner:
                value.setdefault(section, {})[inner] = new
            else:
                value[section] = new
        path = self.path / f"{name}.yaml"
        path.write_text(json.dumps(value))  # JSON is YAML 1.2
        return path


def drive(
    recipe: Path,
    run: Path,
    *,
    resume: bool = False,
    until: str | None = None,
    from_step: int | None = None,
    profile: int | None = None,
    grace: float | None = None,
) -> int:
    """Train in this process as the worker would; return the exit code."""
    from assay.train.worker import Place, run_job

    folder = RunFolder(run)
    if not folder.exists():
        create(run, recipe, recipes.load(recipe))
    return run_job(
        argparse.Namespace(
            run=run, recipe=recipe, resume=resume, from_step=from_step, until=until, profile=profile, terminal=False,
            token="1", command=json.dumps(["assay", "train"]),
        ),
        Place(grace=grace),
    )  # fmt: skip
