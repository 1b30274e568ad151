"""What the canonical reduction sends and takes, beside DistributedDataParallel, on gloo ranks of this machine.

Both train the same model on the same windows with AdamW and clipping: Assay's exchange (gradients to the
owners of whole tensors, joined there by the tree, parameters back) and torch's DDP (all-reduce, every rank
optimizes everything). Bytes are counted from the tensors that are given to the collectives, a ring all-reduce
of n bytes counting 2 × (ranks − 1) × n over all ranks, and compared with the formula. Rounds are in turn.

    .venv/bin/python bench/reduction.py [--ranks 2] [--rounds 5] [--updates 8]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from assay.model import initial
from assay.model.decoder import Decoder
from assay.plan.parameters import count
from assay.recipe.schema import Recipe
from assay.train.agreement import agree
from assay.train.loss import window_loss
from assay.train.optimizers import build_optimizers, scale_gradients, set_rates, tensor_norms
from assay.train.ranks import Ranks, join
from assay.train.reduction import Exchange

WARM_UP = 2  # updates of each round that are not counted
LIMIT = 1.05  # of DDP's bytes


def recipe_of(ranks: int) -> Recipe:
    """A Llama shape of a few million parameters, one lane a rank."""
    return Recipe.model_validate(
        {
            "name": "bench",
            "start": "scratch",
            "model": {
                "layers": 4,
                "width": 256,
                "heads": 8,
                "kv_heads": 4,
                "vocabulary": 8192,
                "block": 128,
                "ffn": 683,
            },
            "data": {"queue": "queue.jsonl", "seed": 1},
            "batch": {"micro": 4, "accumulation": 1, "lanes": ranks},
            "optimizer": {"kind": "adamw", "lr": 3e-4},
            "schedule": {"kind": "constant", "updates": 100, "warmup": 2},
            "seed": 1,
        }
    )


class Whole(nn.Module):
    """The model with its loss, as DDP wraps it."""

    def __init__(self, model: Decoder, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, windows: Tensor) -> Tensor:
        """The summed loss of [B, block + 1]."""
        return window_loss(self.model, self.recipe, windows, None)[0]


def assay_round(recipe: Recipe, ranks: Ranks, windows: list[Tensor]) -> tuple[float, int]:
    """Seconds of an update and bytes that this rank sends in one."""
    model = initial.build(recipe.model, 1)
    exchange = Exchange(dict(model.named_parameters()), ranks)
    optimizers = build_optimizers(exchange.owned, recipe.optimizer)
    set_rates(optimizers, {"lr": 3e-4})
    seconds, before = [], ranks.sent
    for update, tokens in enumerate(windows):
        began = time.perf_counter()
        nll, z = window_loss(model, recipe, tokens, None)
        torch.autograd.backward(nll / recipe.positions_per_update)
        gradients = exchange.reduce()
        sums = torch.stack((nll.detach(), z.detach())).double()
        told = agree(ranks, update, sums, tensor_norms(gradients), exchange.owner, None, bytes(32 * len(tokens)))
        scale_gradients(gradients, torch.tensor(told.grad_norm, dtype=torch.float64), recipe.optimizer.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        exchange.spread()
        exchange.clear()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:]), (ranks.sent - before) // len(windows)


def ddp_round(recipe: Recipe, ranks: Ranks, windows: list[Tensor]) -> tuple[float, int]:
    """The same with DDP; the all-reduced bytes are counted by its own communication hook."""
    whole = DistributedDataParallel(Whole(initial.build(recipe.model, 1), recipe))
    sent = 0

    def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal sent
        sent += 2 * (ranks.size - 1) * bucket.buffer().nbytes // ranks.size
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    counted.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # DDP looks at them
    whole.register_comm_hook(None, counted)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for tokens in windows:
        began = time.perf_counter()
        loss = whole(tokens)
        torch.autograd.backward(loss / recipe.positions_per_update)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:]), sent // len(windows)


def one_rank(rank: int, size: int, place: Path, rounds: int, updates: int) -> None:
    """A forked rank: all rounds, then its findings as a file."""
    ranks = join(rank, size, rank, torch.device("cpu"), place)
    recipe = recipe_of(size)
    generator = torch.Generator().manual_seed(rank)
    shape = (recipe.batch.micro, recipe.model.block + 1)
    windows = [torch.randint(0, recipe.model.vocabulary, shape, generator=generator) for _ in range(updates)]
    found: dict[str, list[Any]] = {"assay": [], "ddp": []}
    for _ in range(rounds):
        found["assay"].append(assay_round(recipe, ranks, windows))
        found["ddp"].append(ddp_round(recipe, ranks, windows))
    (place / f"found-{rank}").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    """Fork the ranks and print the table; exit 1 when more is sent than the limit allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        place, children = Path(folder), []
        for rank in range(options.ranks):
            child = os.fork()
            if child == 0:
                one_rank(rank, options.ranks, place, options.rounds, options.updates)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0, "a rank failed"
        found = [json.loads((place / f"found-{rank}").read_text()) for rank in range(options.ranks)]
    size = 4 * count(recipe_of(options.ranks).model)
    formula = 2 * (options.ranks - 1) * size
    total = {name: sum(one[name][0][1] for one in found) for name in ("assay", "ddp")}
    print(f"{options.ranks} ranks, torch {torch.__version__}, gloo, float32, {size / 1e6:,.1f} MB of parameters")
    print(f"{'':<8}{'bytes an update':>18}{'÷ 2(R−1)P':>12}{'busiest rank':>18}{'seconds, median of rounds':>28}")
    for name in ("assay", "ddp"):
        busiest = max(one[name][0][1] for one in found)
        taken = [max(one[name][round_][0] for one in found) for round_ in range(options.rounds)]
        each = " · ".join(f"{one:.3f}" for one in taken)
        print(f"{name:<8}{total[name]:>18,}{total[name] / formula:>12.4f}{busiest:>18,}{median(taken):>12.3f} ({each})")
    ratio = total["assay"] / total["ddp"]
    print(f"assay ÷ ddp: bytes {ratio:.4f} (at most {LIMIT} is the promise)")
    raise SystemExit(0 if ratio <= LIMIT else 1)


if __name__ == "__main__":
    main()
