"""The trainer on one GPU, in one run of under eight minutes: speed, memory, saving, bits, control.

Two shapes: that of l20-edu-135m (block 2,048) and that of Slayer1B (1.07B, block 4,096), random tokens, bfloat16,
compiled by block. Every figure comes from what the command writes: metrics lines, receipts, `assay plan`. MFU is
given by 6N and by 6N + attention, against the datasheet's dense peak and against the matmul rate of the same run.
A step that no longer fits into `--minutes` is named and left out. On a CPU a toy shape passes through the same steps.

    .venv/bin/python bench/gpu.py [--minutes 8] [--device cpu] [--out TABLE.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from assay.data import queue as queues
from assay.data.shard import Source, open_shard, write_shard
from assay.ledger.ledger import read
from assay.plan.figures import flops_per_position
from assay.plan.memory import memory
from assay.plan.peaks import peak
from assay.recipe import load as recipes
from assay.run import metrics

WARM_UP = 3  # updates at the start of a segment that are not counted: kernels are compiled in them
UPDATES = 12

L20 = {
    "model": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "block": 2048, "ffn": 1536},
    "batch": {"micro": 16, "accumulation": 2, "lanes": 2},
    "optimizer": {"kind": "adamw", "lr": 4.0e-4},
    "loss": {"chunk": 4096},
}
SLAYER = {
    "model": {
        "layers": 20, "width": 2048, "heads": 16, "kv_heads": 16, "vocabulary": 32768, "block": 4096,
        "ffn_multiple": 2.667, "rope_theta": 500000, "qk_norm": True, "value_residual": True,
    },
    "batch": {"micro": 8, "accumulation": 4, "lanes": 1},
    "optimizer": {"kind": "muon", "lr": 6.0e-4, "muon_lr": 0.02},
    "loss": {"chunk": 4096},
}  # fmt: skip
TOY = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 512, "block": 64, "ffn": 128},
    "batch": {"micro": 2, "accumulation": 1, "lanes": 2},
    "optimizer": {"kind": "muon", "lr": 6.0e-4, "muon_lr": 0.02},
}


@dataclass
class Bench:
    """Where it works, until when, and what it found."""

    folder: Path
    deadline: float
    cpu: bool
    rows: list[tuple[str, str]] = field(default_factory=list)

    def say(self, name: str, value: str) -> None:
        """One row, shown at once: a run that is cut short has shown what it found."""
        self.rows.append((name, value))
        print(f"{name:<58} {value}", flush=True)

    def step(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        """Do it when `seconds` are left for it."""
        if time.monotonic() + seconds > self.deadline:
            self.say(name, "left out: no time")
        else:
            act()

    def assay(self, *words: object) -> str:
        """What a command prints; RuntimeError with its last words when it does not end with 0."""
        done = subprocess.run(
            [sys.executable, "-m", "assay.cli.main", *map(str, words)],
            capture_output=True, text=True, check=False, cwd=self.folder,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"assay {words[0]}: exit {done.returncode}: {done.stderr[-2000:]}{done.stdout[-500:]}")
        return done.stdout


def project(bench: Bench, name: str, shape: dict[str, Any]) -> Path:
    """Random tokens, a queue of one slot, the recipe."""
    folder = bench.folder / name
    (folder / "data").mkdir(parents=True)
    model, batch = shape["model"], shape["batch"]
    items = batch["micro"] * batch["accumulation"] * batch["lanes"]
    generator = np.random.default_rng(0)
    length = (UPDATES * items + 2) * model["block"]
    texts = [
        np.append(generator.integers(1, model["vocabulary"], 1023), 0).astype(np.uint16)
        for _ in range(-(-length // 1024))
    ]
    shard = write_shard(
        folder / "data" / "train", texts, vocabulary=model["vocabulary"], tokenizer="sha256:" + "0" * 64,
        end_of_text=0, pool="base", sources=[Source("random", 0, 1024 * len(texts), "none", "CC0-1.0", "1")],
    )  # fmt: skip
    queue = queues.create(
        folder / "data" / "queue.jsonl", block=model["block"], dtype=shard.dtype, vocabulary=model["vocabulary"],
        tokenizer=shard.tokenizer,
    )  # fmt: skip
    parts = queues.parts_of(queue, open_shard(shard.path))
    queues.append(queue.path, queues.propose(queue, global_batch=items, updates=UPDATES, epochs=1, parts=parts))
    precision = {"compute": "float32" if bench.cpu else "bfloat16", "master": "float32"}
    for variant, deterministic in (("recipe", True), ("free", False)):
        recipe = {
            "name": name,
            "start": "scratch",
            "data": {"queue": "data/queue.jsonl", "seed": 1},
            "schedule": {"kind": "constant", "updates": UPDATES, "warmup": 2},
            "seed": 1,
            "precision": precision,
            "runtime": {"compile": not bench.cpu, "deterministic": deterministic},
            "checkpoint": {"every": UPDATES // 2},
            "log": {"every": 1},
            **shape,
        }
        (folder / f"{variant}.yaml").write_text(json.dumps(recipe))
    return folder


def matmul_rate(cpu: bool) -> float:
    """FLOP/s: the best of some products of two square matrices, bfloat16 on the GPU and float32 on the CPU."""
    size, dtype, device = (1024, torch.float32, "cpu") if cpu else (8192, torch.bfloat16, "cuda")
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = 0.0
    for _ in range(5):
        if not cpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        if not cpu:
            torch.cuda.synchronize()
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - began))
    return best


def state_of(run: Path, step: int) -> str:
    """The digest of the full state at a step."""
    found = [
        receipt.body["state_sha256"]
        for receipt in read(run / "ledger.jsonl")
        if receipt.kind == "checkpoint.saved" and receipt.body["step"] == step and receipt.body["checkpoint"] == "full"
    ]
    return str(found[-1])


def speed(bench: Bench, name: str, folder: Path, run: Path, dense: int | None, matmul: float) -> None:
    """Tokens/s after the warm-up, TFLOP/s, MFU, memory against the plan."""
    recipe = recipes.load(folder / "recipe.yaml")
    lines = list(metrics.updates(run / "metrics.jsonl"))
    rate = recipe.positions_per_update / median(line["seconds"] for line in lines[WARM_UP:])
    flops = flops_per_position(recipe)
    bench.say(f"{name}: tokens/s, median of {len(lines) - WARM_UP} updates", f"{rate:,.0f}")
    for kind, count in (("6N", flops["six_n"]), ("6N + attention", sum(flops.values()))):
        per_second = rate * count
        share = f"{per_second / dense:.1%} of the datasheet's {dense / 1e12:,.0f}" if dense else "peak unknown"
        bench.say(
            f"{name}: TFLOP/s by {kind}", f"{per_second / 1e12:,.2f}; {share}; {per_second / matmul:.1%} of matmul"
        )
    planned, found = memory(recipe, 1)["total"], max(line["memory_peak"] for line in lines)
    words = f"{found / 2**30:.2f} GiB beside the plan's {planned / 2**30:.2f}"
    bench.say(
        f"{name}: peak memory", words + (" (of the whole process)" if bench.cpu else f", ratio {found / planned:.2f}")
    )


def saves(bench: Bench, name: str, run: Path) -> None:
    """What each save cost, as its receipt says."""
    for receipt in read(run / "ledger.jsonl"):
        body = receipt.body
        if receipt.kind == "checkpoint.saved":
            way = "asynchronous" if body["asynchronous"] else "blocking"
            words = f"stall {float(body['stall_seconds']):.3f} s, whole {float(body['seconds']):.3f} s"
            bench.say(f"{name}: {way} save at step {body['step']}, {body['bytes'] / 1e9:.2f} GB", words)


def one_shape(bench: Bench, name: str, shape: dict[str, Any], dense: int | None, matmul: float) -> None:
    """All steps of a shape, the telling ones first."""
    folder = project(bench, name, shape)
    whole, again, free, two = (folder / run for run in ("whole", "again", "free", "two"))
    recipe, half = folder / "recipe.yaml", UPDATES // 2
    bench.assay("train", recipe, "--run", whole)
    speed(bench, f"{name}, deterministic", folder, whole, dense, matmul)
    saves(bench, name, whole)
    took = time.monotonic()

    def twice() -> None:
        bench.assay("train", recipe, "--run", again, "--until", half)
        bench.assay("train", recipe, "--run", again, "--start", "resume")
        for step, what in ((half, "two runs"), (UPDATES, "a resume")):
            same = state_of(whole, step) == state_of(again, step)
            bench.say(f"{name}: {what}, state at step {step}", "bit-equal" if same else "DIFFERENT")
        saves(bench, f"{name}, stopped", again)

    def freely() -> None:
        bench.assay("train", folder / "free.yaml", "--run", free)
        speed(bench, f"{name}, not deterministic", folder, free, dense, matmul)

    def by_two() -> None:
        bench.assay("train", recipe, "--run", two, "--ranks", 2, "--until", half)
        same = state_of(whole, half) == state_of(two, half)
        words = "bit-equal" if same else "DIFFERENT"
        bench.say(f"{name}: 2 processes on one device, gloo through the host", words)

    def control() -> None:
        bench.assay("control", "record", whole, folder / "control", "--updates", 2)
        told = json.loads(bench.assay("control", "check", folder / "control", "--json"))
        bench.say(f"{name}: control checked", f"passed {told['passed']}, identical {told['identical']}")

    bench.step(f"{name}: two runs and a resume", 60, twice)
    bench.step(f"{name}: not deterministic", 40, freely)
    bench.step(f"{name}: control", 40, control)
    if shape["batch"]["lanes"] > 1:
        bench.step(f"{name}: two processes", 60, by_two)
    bench.say(f"{name}: the checks took", f"{time.monotonic() - took:.0f} s")


def main() -> None:
    """All shapes; the table again at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="the rows as JSON")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as place:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(place) / "compiled")
        bench = Bench(Path(place), time.monotonic() + 60 * options.minutes, cpu)
        device = "cpu" if cpu else torch.cuda.get_device_name()
        bench.say("date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
        bench.say("device, torch, CUDA", f"{device}, {torch.__version__}, {torch.version.cuda}")
        bench.say("NCCL over several GPUs", "not tested here")
        matmul, dense = matmul_rate(cpu), None if cpu else peak(device, "bfloat16")
        bench.say("matmul rate", f"{matmul / 1e12:.3f} TFLOP/s")
        shapes = {"toy": TOY} if cpu else {"135M": L20, "1.07B": SLAYER}
        for name, shape in shapes.items():
            try:
                bench.step(name, 60, lambda name=name, shape=shape: one_shape(bench, name, shape, dense, matmul))
            except RuntimeError as fault:  # the next shape is still worth its time
                bench.say(f"{name}: FAILED", str(fault))
        if options.out:
            options.out.write_text(json.dumps(bench.rows, indent=1))
    if any("DIFFERENT" in value or "FAILED" in name for name, value in bench.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
