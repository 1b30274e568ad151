"""Tokens per second of the whole trainer beside other loops, and beside what this machine can multiply.

In one run, in turn, one shape, the same windows, float32, AdamW: Assay's loop with its ledger, plain and
compiled by block; a loop in nanoGPT's manner (fused projections, whole logits, clipping, AdamW), plain
and compiled whole; transformers' LlamaForCausalLM; litgpt's GPT, where it is installed. Prints every
round, medians, ratios, and the share by 6N + attention FLOPs of the machine's own matmul rate, measured in a run
of their own between all updates; then what the optimizer takes of an update, how often blocks were compiled, and how
often the host waited.

    .venv/bin/python bench/speed.py [--rounds 5] [--updates 12] [--width 512] [--layers 4] [--no-compile]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accounting import WARM_UP, assay_round, plain_loop, project, transformers_round
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from assay.data import queue as queues
from assay.data.batches import Batches
from assay.model import initial
from assay.plan.figures import flops_per_position
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.train.optimizers import build_optimizers


class Layer(nn.Module):
    """One Llama layer in nanoGPT's manner: one projection for q, k and v, one for gate and up."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        model = recipe.model
        self.heads, self.kv_heads, self.size = model.heads, model.kv_heads, model.head_size
        self.attention_norm, self.ffn_norm = nn.RMSNorm(model.width), nn.RMSNorm(model.width)
        self.qkv = nn.Linear(model.width, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, model.width, bias=False)
        self.up = nn.Linear(model.width, 2 * model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (
            part.view(batch, length, -1, self.size).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(split, dim=-1)
        )
        q, k = turned(q, cosine, sine), turned(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Plain(nn.Module):
    """The whole model with whole logits and the loss inside, as nanoGPT's."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        model = recipe.model
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width)
        frequency = 1.0 / model.rope_theta ** (torch.arange(0, model.head_size, 2) / model.head_size)
        angle = torch.outer(torch.arange(model.block).float(), frequency).repeat(1, 2)
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def nanogpt_style(recipe: Recipe, windows: list[Tensor], compiled: bool) -> float:
    """`plain_loop` with the model above."""
    model = Plain(recipe)
    return plain_loop(recipe, windows, model, torch.compile(model) if compiled else model)


def litgpt(recipe: Recipe, windows: list[Tensor]) -> float:
    """`plain_loop` with litgpt's GPT in the same shape, tied as well."""
    from litgpt.config import Config
    from litgpt.model import GPT

    shape = recipe.model
    config = Config(
        block_size=shape.block, vocab_size=shape.vocabulary, padded_vocab_size=shape.vocabulary, n_layer=shape.layers,
        n_head=shape.heads, n_embd=shape.width, n_query_groups=shape.kv_heads, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        intermediate_size=shape.ffn,
    )  # fmt: skip
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    return plain_loop(recipe, windows, model, loss)


def matmul_rate(size: int = 1024, seconds: float = 1.0) -> float:
    """FLOP/s of products of two square float32 matrices, one after another for so many seconds.

    Sustained as the loops are: the best of a few products is what a shared machine gives for a moment.
    """
    a, b = torch.randn(size, size), torch.randn(size, size)
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        torch.mm(a, b)
        done += 1
    return 2 * size**3 * done / passed


class Ruler:
    """Inside a loop, before each update: how fast the machine multiplies in this very moment.

    Neighbours change that by half within seconds, so that a rate of before or after a loop says little. An update
    begins where the embedding is called for its first micro-batch.
    """

    def __init__(self, micro_batches: int, dry: int) -> None:
        """`dry` calls of the embedding come before the first update."""
        self._micro_batches, self._calls = micro_batches, -dry
        self._out: float | None = None
        self.seconds: list[float] = []
        self.rates: list[float] = []

    def __enter__(self) -> None:
        self._handle = register_module_forward_pre_hook(self._look)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, inputs: Any) -> None:
        if not isinstance(module, nn.Embedding):
            return
        call, self._calls = self._calls, self._calls + 1
        if call < 0 or call % self._micro_batches:
            return
        now = time.perf_counter()
        if self._out is not None:
            self.seconds.append(now - self._out)
        self.rates.append(matmul_rate(seconds=0.5))
        self._out = time.perf_counter()

    def share(self, work: float) -> float:
        """Median over the updates of their FLOP/s by that of the products right before and after."""
        both = [mean(pair) for pair in pairwise(self.rates)]
        found = [work / seconds / rate for seconds, rate in zip(self.seconds, both, strict=True)]
        return median(found[WARM_UP:])


class Looks(TorchFunctionMode):
    """Counts looks at the values of tensors: on a GPU the host would wait at each."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
        self.seen += getattr(func, "__name__", "") in names
        return func(*args, **(kwargs or {}))


def waits(path: Path, folder: Path, updates: int) -> float:
    """Looks an update, from two runs that differ by some updates alone."""
    seen = []
    for until in (1, updates):
        with Looks() as looks:
            assay_round(path, folder / f"waits-{until}", until)
        seen.append(looks.seen)
    return (seen[1] - seen[0]) / (updates - 1)


def optimizer_seconds(recipe: Recipe, rounds: int = 5) -> float:
    """Seconds of one step of the recipe's optimizers, the median of some."""
    model = initial.build(recipe.model, recipe.seed)
    optimizers = build_optimizers(model, recipe.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def compiled_recipe(path: Path) -> Path:
    """The same recipe with runtime.compile."""
    value = json.loads(path.read_text())
    value["runtime"]["compile"] = True
    target = path.with_name("compiled.yaml")
    target.write_text(json.dumps(value))
    return target


def main() -> None:
    """Run the rounds in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=1408)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        shape = {key: getattr(options, key) for key in ("width", "layers", "heads", "ffn")}
        path = project(folder, options.updates, shape)
        recipe = recipes.load(path)
        batches = Batches(queues.load(folder / recipe.data.queue), [], recipe.data.seed, recipe.global_batch)
        windows = [torch.from_numpy(batches.batch(u).astype(np.int64)) for u in range(options.updates)]
        runs = iter(range(1000))
        loops: dict[str, Callable[[], float]] = {
            "assay": lambda: assay_round(path, folder / f"run-{next(runs)}")[0],
            "nanoGPT style": lambda: nanogpt_style(recipe, windows, compiled=False),
            "transformers": lambda: transformers_round(recipe, windows),
        }
        if importlib.util.find_spec("litgpt"):
            loops["litgpt"] = lambda: litgpt(recipe, windows)
        else:
            print("litgpt is not installed: not measured")
        if not options.no_compile:
            by_block = compiled_recipe(path)
            loops["assay, compiled"] = lambda: assay_round(by_block, folder / f"run-{next(runs)}")[0]
            loops["nanoGPT style, compiled"] = lambda: nanogpt_style(recipe, windows, compiled=True)
        flops = sum(flops_per_position(recipe).values())
        speeds: dict[str, list[float]] = {name: [] for name in loops}
        graphs = []  # compiled in each round by the loop that compiles by block
        for number in range(options.rounds):
            for name, loop in loops.items():
                before = counters["stats"]["unique_graphs"]
                speeds[name].append(loop())
                if name == "assay, compiled":
                    graphs.append(counters["stats"]["unique_graphs"] - before)
            shown = "  ".join(f"{name} {found[-1]:,.0f}" for name, found in speeds.items())
            print(f"round {number + 1}: {shown}", flush=True)
        rulers = {}
        for name in ("assay", "nanoGPT style", "transformers", "litgpt", "assay, compiled"):
            if name in loops:
                rulers[name] = Ruler(recipe.batch.accumulation, dry=name.startswith("assay"))
                with rulers[name]:
                    loops[name]()
        looks = waits(path, folder, min(options.updates, 4))
        step = optimizer_seconds(recipe)
    rates = [rate for ruler in rulers.values() for rate in ruler.rates]
    work = flops * recipe.positions_per_update
    middle = {name: median(found) for name, found in speeds.items()}
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, float32, width "
        f"{recipe.model.width}, {flops / 1e6:.1f} MFLOP a position, "
        f"matmul {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GFLOP/s, median {median(rates) / 1e9:.1f}; medians:"
    )
    print(f"{'loop':<26}{'tokens/s':>10}{'assay ÷ it':>12}{'of matmul':>14}")
    for name, value in middle.items():
        share = f"{rulers[name].share(work):.1%}" if name in rulers else "not measured"
        print(f"{name:<26}{value:>10,.0f}{middle['assay'] / value:>12.3f}{share:>14}")
    update = recipe.positions_per_update / middle["assay"]
    print(f"optimizer: {step * 1e3:.1f} ms, {step / update:.1%} of an update of {update:.2f} s (its work is not in 6N)")
    print(f"host waits an update: {looks:g}")
    if graphs:
        print(
            f"compiled in each round: {graphs} (the first block, the others, the loss; nothing while training goes on)"
        )


if __name__ == "__main__":
    main()
