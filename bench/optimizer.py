"""Which refinement of Muon helps: loss at equal positions on real text, paired seeds, one data order.

Trains one small model on the demo's corpus with AdamW, `torch.optim.Muon`, Assay's Muon and Muon with
one refinement each (and with all): every variant gets its best matrix rate of a grid on a seed that is
not counted, then the same seeds (initial weights) and the same windows in the same order. Prints all
values, the differences to `muon` and a paired t-test; then what Newton–Schulz costs alone and in batches of one shape.
Losses do not depend on how busy the machine is.

    .venv/bin/python bench/optimizer.py [--seeds 5] [--updates 200] [--out RESULTS.json]

Sources: Polar Express, Amsel et al. 2025, arXiv:2505.16932 (five steps, safety 2 %); RMS-matched scale
0.2·√max(rows, columns), Liu et al. 2025, arXiv:2502.16982; per-row second moment, Li et al. 2025 (NorMuon),
arXiv:2510.05491; cautious weight decay, Chen et al. 2025, arXiv:2510.12402.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import assay
from assay.corpus.build import build
from assay.corpus.description import load as load_description
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.shard import Shard, open_shard
from assay.files.digest import canonical, digest
from assay.files.shared import shared
from assay.model import initial
from assay.recipe import load as recipes
from assay.recipe.load import from_yaml
from assay.recipe.schedule import rates
from assay.recipe.schema import Recipe
from assay.train.loss import window_loss
from assay.train.optimizers import (
    COEFFICIENTS,
    by_rows,
    gradient_norm,
    parameter_groups,
    scale_gradients,
)
from assay.train.validation import validation_loss

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.02  # of the norm that Polar Express divides by
VALIDATION_WINDOWS = 256
TUNING_SEED = 1000


@dataclass(frozen=True)
class Variant:
    """A treatment of the blocks' matrices, and the matrix rates that are tried."""

    name: str
    grid: tuple[float, ...]
    polar: bool = False
    rms: bool = False
    rows: bool = False
    cautious: bool = False


ORTHOGONAL = (0.005, 0.01, 0.02, 0.04)
POLAR = (0.0025, *ORTHOGONAL)  # its best rate lies lower
RMS = (0.0022, 0.0045, 0.009, 0.018)  # the same step on a square matrix of 128
VARIANTS = (
    Variant("adamw", (0.0004, 0.00075, 0.0015, 0.003)),
    Variant("torch.optim.Muon", ORTHOGONAL),
    Variant("muon", ORTHOGONAL),
    Variant("polar express", POLAR, polar=True),
    Variant("rms scale", RMS, rms=True),
    Variant("row moment", ORTHOGONAL, rows=True),
    Variant("cautious decay", ORTHOGONAL, cautious=True),
    Variant("polar+row+cautious", POLAR, polar=True, rows=True, cautious=True),
)


class Refined(torch.optim.Optimizer):
    """Muon as `assay.train.optimizers.Muon`, with the refinements that a variant has."""

    def __init__(self, params: Iterable[nn.Parameter], variant: Variant, weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": 0.95})
        self.variant = variant
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, requires_grad=False)
                if variant.rows:
                    self.state[parameter]["rows"] = torch.zeros(len(parameter), 1)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"].lerp_(parameter.grad, 1 - momentum)
                ahead = parameter.grad.lerp(state["momentum"], momentum)
                direction = orthogonalise(ahead, self.variant.polar)
                if self.variant.rows:
                    direction = by_rows(direction, state["rows"])
                rows, columns = parameter.shape
                scale = 0.2 * math.sqrt(max(rows, columns)) if self.variant.rms else math.sqrt(max(1.0, rows / columns))
                if self.variant.cautious:  # decay only where the update goes towards zero as well
                    parameter.mul_(1 - lr * decay * (direction * parameter > 0))
                else:
                    parameter.mul_(1 - lr * decay)
                parameter.add_(direction, alpha=-lr * scale)


def orthogonalise(matrix: Tensor, polar: bool) -> Tensor:
    """Five steps of Newton–Schulz with the fixed or the Polar Express coefficients."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() * (SAFETY if polar else 1.0)).clamp(min=1e-7)
    for a, b, c in POLAR_EXPRESS if polar else (COEFFICIENTS,) * 5:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def together(matrices: Tensor) -> Tensor:
    """`orthogonalise` with the fixed coefficients, of matrices [n, rows, columns], rows ≤ columns, in shared calls."""
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def batched(rounds: int = 7) -> None:
    """Matrices of one shape, one by one and in shared calls, in turn: seconds, and whether the bits are the same."""
    for count, rows, columns in ((8, 128, 128), (8, 128, 344), (8, 512, 512), (8, 512, 1408)):
        matrices = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(1))
        ways: dict[str, Callable[[], Tensor]] = {
            "alone": lambda some=matrices: torch.stack([orthogonalise(one, False) for one in some]),
            "together": lambda some=matrices: together(some),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        results: dict[str, Tensor] = {}
        for _ in range(rounds):
            for way, act in ways.items():
                began = time.perf_counter()
                results[way] = act()
                seconds[way].append(time.perf_counter() - began)
        alone, shared_calls = (median(seconds[way]) for way in ways)
        same = "the same bits" if torch.equal(results["alone"], results["together"]) else "other bits"
        print(f"{count} matrices {rows} × {columns}: alone {alone * 1e3:.1f} ms, together {shared_calls * 1e3:.1f} ms, "
              f"alone ÷ together {alone / shared_calls:.2f}, {same}")  # fmt: skip


def optimizers(
    model: nn.Module, recipe: Recipe, variant: Variant
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """(for the blocks' matrices, for the rest by AdamW)."""
    groups, config = parameter_groups(model, recipe.optimizer), recipe.optimizer
    named = dict(model.named_parameters())
    matrices = [named[name] for name in groups["muon"]]
    rest = torch.optim.AdamW(
        [
            {"params": [named[name] for name in groups["decay"]], "weight_decay": config.weight_decay},
            {"params": [named[name] for name in groups["no_decay"]], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=config.betas,
        eps=config.eps,
    )
    own: torch.optim.Optimizer
    if variant.name == "adamw":
        own = torch.optim.AdamW(matrices, lr=0.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    elif variant.name == "torch.optim.Muon":
        own = torch.optim.Muon(matrices, lr=0.0, weight_decay=config.weight_decay, momentum=0.95)
    else:
        own = Refined(matrices, variant, config.weight_decay)
    return own, rest


@dataclass(frozen=True)
class Bench:
    """One recipe, one order of windows, one held-out shard."""

    recipe: Recipe
    windows: list[Tensor]
    validation: Shard

    def loss(self, variant: Variant, rate: float, seed: int) -> float:
        """Held-out loss in nats after all updates."""
        recipe = self.recipe
        model = initial.build(recipe.model, seed)
        own, rest = optimizers(model, recipe, variant)
        named = dict(model.named_parameters())
        for update, tokens in enumerate(self.windows):
            for parameter in named.values():
                parameter.grad = None
            nll, _ = window_loss(model, recipe, tokens, None)
            torch.autograd.backward(nll / recipe.positions_per_update)
            gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
            scale_gradients(gradients, gradient_norm(gradients), recipe.optimizer.grad_clip)
            factor = rates(recipe, update)["lr"] / recipe.optimizer.lr
            for optimizer, peak in ((own, rate), (rest, recipe.optimizer.lr)):
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
                optimizer.step()
        return validation_loss(model, self.validation, recipe, torch.device("cpu"), VALIDATION_WINDOWS).loss


def identity(bench: Bench) -> str:
    """What decides a loss besides variant, rate and seed: code that computes, torch, recipe, windows, held-out text."""
    package = Path(assay.__file__).parent
    files = [Path(__file__), *sorted((package / "model").glob("*.py")), package / "recipe" / "schedule.py"]
    files += [package / "train" / f"{name}.py" for name in ("loss", "optimizers", "validation")]
    told = {
        "code": [digest(path.read_bytes()) for path in files],
        "torch": torch.__version__,
        "recipe": recipes.digest(bench.recipe),
        "windows": digest(np.stack([tokens.numpy() for tokens in bench.windows]).tobytes()),
        "validation": bench.validation.sha256,
    }
    return digest(canonical(told))


def prepare(folder: Path, updates: int) -> Bench:
    """The demo's corpus, built; a queue of one slot over its training shards; the recipe."""
    out = folder / "corpus"
    build(load_description(shared("corpora/demo.yaml")), out)
    train = [open_shard(path) for path in sorted(out.glob("train-*"))]
    block, batch = 64, 16
    queue = queues.create(
        folder / "queue.jsonl",
        block=block,
        dtype=train[0].dtype,
        vocabulary=train[0].vocabulary,
        tokenizer=train[0].tokenizer,
    )
    parts = [part for shard in train for part in queues.parts_of(queue, shard)]
    queues.append(queue.path, queues.propose(queue, global_batch=batch, updates=updates, parts=parts, epochs=2))
    recipe = from_yaml(
        json.dumps({
            "name": "optimizers",
            "start": "scratch",
            "model": {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "vocabulary": train[0].vocabulary,
                      "block": block, "ffn": 344, "qk_norm": True, "value_residual": True},
            "data": {"queue": "queue.jsonl", "seed": 1},
            "batch": {"micro": batch, "accumulation": 1},
            "optimizer": {"kind": "muon", "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1},
            "schedule": {"kind": "wsd", "updates": updates, "warmup": updates // 15, "decay_fraction": 0.4,
                         "decay": "linear", "min_lr": 0.00003},
            "seed": 1,
        }),
        "bench/optimizer.py",
    )  # fmt: skip
    batches = Batches(queues.load(queue.path), [out], recipe.data.seed, batch)
    windows = [torch.from_numpy(batches.batch(update).astype(np.int64)) for update in range(updates)]
    return Bench(recipe, windows, open_shard(out / "validation"))


def main() -> None:
    """Tune, run all pairs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument(
        "--out", type=Path, default=None, help="results as JSON; what this code and recipe gave is not run again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}

    with tempfile.TemporaryDirectory() as place:
        bench = prepare(Path(place), options.updates)
        same = identity(bench)

        def once(variant: Variant, rate: float, seed: int) -> float:
            key = f"{variant.name} {rate} {seed} {options.updates} {same}"
            if key not in results:
                results[key] = bench.loss(variant, rate, seed)
                print(f"{variant.name:<20} rate {rate:<8} seed {seed:<5} {results[key]:.4f}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1))
            return float(results[key])

        chosen = {v.name: min(v.grid, key=lambda rate, v=v: once(v, rate, TUNING_SEED)) for v in VARIANTS}
        losses = {v.name: [once(v, chosen[v.name], seed) for seed in range(1, options.seeds + 1)] for v in VARIANTS}

    positions = options.updates * bench.recipe.positions_per_update
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, float32; {positions:,} positions; held-out loss in nats"
    )
    print(f"{'variant':<20}{'rate':>8}  {'mean':>7}  {'- muon':>8}  {'p':>8}  values by seed")
    for variant in VARIANTS:
        values = losses[variant.name]
        difference = mean(values) - mean(losses["muon"])
        p = float(stats.ttest_rel(values, losses["muon"]).pvalue) if variant.name != "muon" else math.nan
        shown = "      —" if math.isnan(p) else f"{p:8.4f}"
        print(f"{variant.name:<20}{chosen[variant.name]:>8}  {mean(values):7.4f}  {difference:+8.4f}  {shown}  "
              + " ".join(f"{value:.4f}" for value in values))  # fmt: skip
    batched()
    edges = [v.name for v in VARIANTS if chosen[v.name] in (v.grid[0], v.grid[-1])]
    if edges:
        print(f"the best rate lies at the edge of the grid for: {', '.join(edges)}")


if __name__ == "__main__":
    main()
