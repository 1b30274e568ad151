"""What proof costs: tokens per second of Assay's loop against loops that prove nothing.

In one run, in turn: Assay's training loop (ledger, digests, metrics, checks and all), the same model
and optimizer in a bare PyTorch loop, and transformers' LlamaForCausalLM with torch.optim.AdamW. All
three train the same shape on the same windows in float32. Prints every round, medians and ratios,
and the share of step seconds that went to accounting, as the run itself measured it.

    .venv/bin/python bench/accounting.py [--rounds 5] [--updates 12]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.shard import Source, open_shard, write_shard
from assay.model import initial
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run import metrics
from assay.run.folder import RunFolder, create
from assay.run.history import history
from assay.train.loss import window_loss
from assay.train.optimizers import build_optimizers, gradient_norm, scale_gradients, set_rates
from assay.train.worker import run_job

WARM_UP = 2  # updates of each round that are not counted


def project(folder: Path, updates: int, shape: dict[str, int] | None = None) -> Path:
    """A shard of random text, a queue of one slot, a Llama-shaped recipe; `shape` replaces keys of its model."""
    vocabulary, block, batch = 4096, 256, 8
    generator = np.random.default_rng(0)
    texts = [np.append(generator.integers(1, vocabulary, 511), 0).astype(np.uint16) for _ in range(256)]
    total = sum(map(len, texts))
    (folder / "data").mkdir()
    shard = write_shard(
        folder / "data" / "train",
        texts,
        vocabulary=vocabulary,
        tokenizer="sha256:" + "0" * 64,
        end_of_text=0,
        pool="base",
        sources=[Source("random", 0, total, "none", "CC0-1.0", "1")],
    )
    queue = queues.create(
        folder / "data" / "queue.jsonl",
        block=block,
        dtype=shard.dtype,
        vocabulary=vocabulary,
        tokenizer=shard.tokenizer,
    )
    parts = queues.parts_of(queue, open_shard(shard.path))
    queues.append(queue.path, queues.propose(queue, global_batch=batch, updates=updates, epochs=1, parts=parts))
    recipe = {
        "name": "bench",
        "start": "scratch",
        "model": {
            "layers": 6,
            "width": 256,
            "heads": 8,
            "kv_heads": 4,
            "vocabulary": vocabulary,
            "block": block,
            "ffn": 768,
            **(shape or {}),
        },
        "data": {"queue": "data/queue.jsonl", "seed": 1},
        "batch": {"micro": 4, "accumulation": 2},
        "optimizer": {"kind": "adamw", "lr": 3e-4},
        "schedule": {"kind": "constant", "updates": updates, "warmup": 2},
        "seed": 1,
        "runtime": {"device": "cpu"},
        "checkpoint": {"every": updates},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def assay_round(recipe: Path, run: Path, until: int | None = None) -> tuple[float, float, dict[str, float]]:
    """Tokens per second of one run, the share of accounting, and its parts."""
    loaded = recipes.load(recipe)
    create(run, recipe, loaded)
    job = argparse.Namespace(
        run=run, recipe=recipe, resume=False, from_step=None,
        until=None if until is None else str(until), profile=None, terminal=False,
        token="0", command="[]",
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        code = run_job(job)
    assert code == 0, code
    lines = list(metrics.read(run / "metrics.jsonl"))
    seconds = [line["seconds"] for line in lines[WARM_UP if len(lines) > WARM_UP else 0 :]]
    spent: dict[str, int] = {}
    for segment in history(RunFolder(run).ledger).segments:
        spent = segment.closing["microseconds"]
    parts = {name: value / spent["updates"] for name, value in spent.items() if name != "updates"}
    return loaded.positions_per_update / median(seconds), parts.pop("accounting"), parts


def bare_round(recipe: Recipe, windows: list[torch.Tensor]) -> float:
    """The same model, loss and optimizer; no ledger, no digests, no metrics, no checks."""
    model = initial.build(recipe.model, recipe.seed)
    optimizers = build_optimizers(model, recipe.optimizer)
    set_rates(optimizers, {"lr": recipe.optimizer.lr})
    micro, parameters = recipe.batch.micro, dict(model.named_parameters())
    seconds = []
    for tokens in windows:
        began = time.perf_counter()
        for parameter in parameters.values():
            parameter.grad = None
        total = torch.zeros(())
        for first in range(0, len(tokens), micro):
            nll, _ = window_loss(model, recipe, tokens[first : first + micro], None)
            torch.autograd.backward(nll / recipe.positions_per_update)
            total += nll.detach()
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in parameters.items()}
        norm = gradient_norm(gradients)
        scale_gradients(gradients, norm, recipe.optimizer.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        total.item()
        seconds.append(time.perf_counter() - began)
    return recipe.positions_per_update / median(seconds[WARM_UP:])


def transformers_round(recipe: Recipe, windows: list[torch.Tensor]) -> float:
    """transformers' LlamaForCausalLM of the same shape with torch.optim.AdamW and clipping."""
    config = transformers.LlamaConfig(
        vocab_size=recipe.model.vocabulary,
        hidden_size=recipe.model.width,
        intermediate_size=recipe.model.ffn,
        num_hidden_layers=recipe.model.layers,
        num_attention_heads=recipe.model.heads,
        num_key_value_heads=recipe.model.kv_heads,
        max_position_embeddings=recipe.model.block,
        rms_norm_eps=recipe.model.norm_eps,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).train()

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Targets are one place later, as in Assay: the model shifts labels by itself.
        targets = targets.contiguous()
        found: torch.Tensor = model(input_ids=tokens, shift_labels=targets, labels=targets, use_cache=False).loss
        return found

    return plain_loop(recipe, windows, model, loss)


def plain_loop(
    recipe: Recipe, windows: list[torch.Tensor], model: torch.nn.Module, loss: Callable[..., torch.Tensor]
) -> float:
    """Tokens per second of the usual short loop: accumulate, clip, fused AdamW, one look at the loss.

    `loss` gives the mean over inputs and targets [micro, block].
    """
    rest, micro = recipe.optimizer, recipe.batch.micro
    optimizer = torch.optim.AdamW(model.parameters(), lr=rest.lr, betas=rest.betas, weight_decay=0.1, fused=True)
    pieces = len(windows[0]) // micro
    seconds = []
    for tokens in windows:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for first in range(0, len(tokens), micro):
            rows = tokens[first : first + micro]
            value = loss(rows[:, :-1], rows[:, 1:])
            torch.autograd.backward(value / pieces)
            total += value.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.item()
        seconds.append(time.perf_counter() - began)
    return recipe.positions_per_update / median(seconds[WARM_UP:])


def main() -> None:
    """Run the rounds in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=12)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    speeds: dict[str, list[float]] = {"assay": [], "bare": [], "transformers": []}
    shares: list[float] = []
    parts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = project(folder, options.updates)
        recipe = recipes.load(path)
        batches = Batches(queues.load(folder / recipe.data.queue), [], recipe.data.seed, recipe.global_batch)
        windows = [torch.from_numpy(batches.batch(u).astype(np.int64)) for u in range(options.updates)]
        for number in range(options.rounds):
            speed, share, spent = assay_round(path, folder / f"run-{number}")
            speeds["assay"].append(speed)
            shares.append(share)
            for name, value in spent.items():
                parts.setdefault(name, []).append(value)
            speeds["bare"].append(bare_round(recipe, windows))
            speeds["transformers"].append(transformers_round(recipe, windows))
            print(f"round {number + 1}: " + "  ".join(f"{name} {found[-1]:,.0f}" for name, found in speeds.items()))
    middle = {name: median(found) for name, found in speeds.items()}
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, float32, medians:")
    for name, value in middle.items():
        print(f"  {name:<13}{value:>10,.0f} tokens/s   assay ÷ {name}: {middle['assay'] / value:.3f}")
    print(f"accounting: {100 * median(shares):.2f} % of step seconds (at most 3 % is the promise)")
    for name, found in parts.items():
        print(f"  {name.removeprefix('accounting_'):<13}{100 * median(found):>9.3f} %")


if __name__ == "__main__":
    main()
