"""The trainer on one GPU, in one run of under eight minutes: speed, memory, saving, bits, control.

Two shapes: that of l20-edu-135m (block 2,048) and that of Slayer1B (1.07B, block 4,096), random tokens, bfloat16,
compiled by block. Every figure comes from what the commands write: metrics lines, receipts, `assay plan`. MFU is
given by 6N and by 6N + attention, against the datasheet's dense peak and against the matmul rate of the same run.
First the main figures of both shapes, then the checks by value; each step has its own bound in time, one that fails or
no longer fits into `--minutes` is named and the next is done. On a CPU a toy shape passes through the same steps.

    .venv/bin/python bench/gpu.py [--minutes 7.5] [--device cpu] [--out TABLE.json]
    PYTHONPATH=src python3 bench/gpu.py       # from a checkout, where only the libraries are installed

TMPDIR names another place for the runs: about 35 GB are needed for the GPU's shapes, 10 MB for the toy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from assay.checkpoint.room import free_memory
from assay.data import queue as queues
from assay.data.shard import Source, open_shard, write_shard
from assay.errors import AssayError
from assay.ledger.ledger import read
from assay.plan.figures import flops_per_position
from assay.plan.memory import memory
from assay.plan.peaks import peak
from assay.recipe import load as recipes
from assay.run import metrics

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # updates at the start of a segment that are not counted: kernels are compiled in them
SHORT = 4  # updates of the runs that are only compared
MARGIN = 10  # seconds behind --minutes in which the last step may still end
GRACE = 5  # seconds for a command that is ended because its time is over
FAULTS = (RuntimeError, OSError, ValueError, subprocess.SubprocessError, AssayError)  # ValueError: unreadable answers


@dataclass(frozen=True)
class Shape:
    """A model with its batch. Three saves, `every` updates apart: two in the background, and a blocking one at the end.

    A save should be written before the next one begins. `seconds`: what each step is expected to take.
    """

    name: str
    recipe: dict[str, Any]
    every: int
    seconds: Mapping[str, int]
    aim: float | None = None  # MFU on an H200, deterministic
    kernels: str = "kernels"  # the folder of those of the second run


L20 = Shape(
    "135M",
    {
        "model": {
            "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "block": 2048, "ffn": 1536,
        },
        "batch": {"micro": 16, "accumulation": 2, "lanes": 2},
        "optimizer": {"kind": "adamw", "lr": 4.0e-4},
        "loss": {"chunk": 4096},
    },
    every=16, aim=0.50, kernels="kernels-again",
    seconds={"whole": 90, "again": 55, "resume": 30, "two": 40, "free": 50, "control": 45},
)  # fmt: skip
SLAYER = Shape(
    "1.07B",
    {
        "model": {
            "layers": 20, "width": 2048, "heads": 16, "kv_heads": 16, "vocabulary": 32768, "block": 4096,
            "ffn_multiple": 2.667, "rope_theta": 500000, "qk_norm": True, "value_residual": True,
        },
        "batch": {"micro": 8, "accumulation": 4, "lanes": 1},
        "optimizer": {"kind": "muon", "lr": 6.0e-4, "muon_lr": 0.02},
        "loss": {"chunk": 4096},
    },
    every=8, aim=0.58,
    seconds={"whole": 160, "again": 70, "resume": 70, "free": 105, "control": 70},
)  # fmt: skip
TOY = Shape(
    "toy",
    {
        "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 512, "block": 64, "ffn": 128},
        "batch": {"micro": 2, "accumulation": 1, "lanes": 2},
        "optimizer": {"kind": "muon", "lr": 6.0e-4, "muon_lr": 0.02},
    },
    every=6,
    seconds={"whole": 25, "again": 25, "resume": 20, "two": 30, "free": 25, "control": 35},
)  # fmt: skip


@dataclass
class Bench:
    """Where it works, until when, and what it found."""

    folder: Path
    deadline: float
    cpu: bool
    out: Path | None
    dense: int | None = None  # FLOP/s by the datasheet
    matmul: float | None = None  # FLOP/s as measured
    limit: float = 0.0  # when the present step is ended
    rows: list[tuple[str, str]] = field(default_factory=list)

    def say(self, name: str, value: str) -> None:
        """One row, shown and kept at once: a run that is cut short has told what it found."""
        self.rows.append((name, value))
        print(f"{name:<58} {value}", flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.rows, indent=1))

    def step(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        """Do it when `seconds` are left for it, in twice that time at most; a fault of it is its own."""
        began = time.monotonic()
        if began + seconds > self.deadline:
            self.say(name, f"left out: about {seconds:.0f} s are needed, {self.deadline - began:.0f} s are left")
            return
        self.limit = min(began + 2 * seconds, self.deadline + MARGIN)
        try:
            act()
        except FAULTS as fault:
            before = f"; after {fault.__context__}" if fault.__context__ and not fault.__suppress_context__ else ""
            self.say(f"{name}: FAILED", f"{type(fault).__name__}: {fault}{before}")
        self.say(f"{name}: took", f"{time.monotonic() - began:.0f} s, {seconds:.0f} expected")

    def assay(self, *words: object, kernels: str = "kernels") -> str:
        """What a command prints; RuntimeError with its last words when it does not end with 0, or not in time."""
        paths = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / kernels),
            **({"CUDA_VISIBLE_DEVICES": ""} if self.cpu else {}),
        }
        printed, told = self.folder / "printed", self.folder / "told"
        with printed.open("wb") as out, told.open("wb") as err:  # no pipe that a grandchild could keep open
            command = [sys.executable, "-m", "assay.cli.main", *map(str, words)]
            process = subprocess.Popen(command, stdout=out, stderr=err, cwd=self.folder, env=environment)
            try:
                code: int | None = process.wait(max(self.limit - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                code = None
                process.terminate()  # `train` ends its ranks, which would else keep the GPU
                try:
                    process.wait(2 * GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if code != 0:
            end = "its time was over" if code is None else f"exit {code}"
            last = told.read_text(errors="replace")[-2000:] + printed.read_text(errors="replace")[-500:]
            raise RuntimeError(f"assay {words[0]}: {end}: {last}")
        return printed.read_text()

    def train(self, shape: Shape, run: str, *words: object, recipe: str = "recipe", kernels: str = "kernels") -> Path:
        """The folder of the run, trained with the shape's recipe."""
        folder = self.folder / shape.name
        self.assay("train", folder / f"{recipe}.yaml", "--run", folder / run, "--grace", GRACE, *words, kernels=kernels)
        return folder / run


def project(bench: Bench, shape: Shape) -> None:
    """Random tokens, a queue of one slot, the recipe twice: deterministic and not."""
    folder = bench.folder / shape.name
    (folder / "data").mkdir(parents=True)
    model, batch = shape.recipe["model"], shape.recipe["batch"]
    items = batch["micro"] * batch["accumulation"] * batch["lanes"]
    updates, generator = 3 * shape.every, np.random.default_rng(0)
    count = -(-(updates * items + 2) * model["block"] // 1024)
    drawn = (generator.integers(1, model["vocabulary"], 1023) for _ in range(count))
    texts = [np.append(tokens, 0).astype(np.uint16) for tokens in drawn]
    shard = write_shard(
        folder / "data" / "train", texts, vocabulary=model["vocabulary"], tokenizer="sha256:" + "0" * 64,
        end_of_text=0, pool="base", sources=[Source("random", 0, 1024 * count, "none", "CC0-1.0", "1")],
    )  # fmt: skip
    queue = queues.create(
        folder / "data" / "queue.jsonl", block=model["block"], dtype=shard.dtype, vocabulary=model["vocabulary"],
        tokenizer=shard.tokenizer,
    )  # fmt: skip
    parts = queues.parts_of(queue, open_shard(shard.path))
    queues.append(queue.path, queues.propose(queue, global_batch=items, updates=updates, epochs=1, parts=parts))
    for variant, deterministic in (("recipe", True), ("free", False)):
        recipe = {
            "name": shape.name, "start": "scratch", "seed": 1, "log": {"every": 1},
            "data": {"queue": "data/queue.jsonl", "seed": 1},
            "schedule": {"kind": "constant", "updates": updates, "warmup": 2},
            "precision": {"compute": "float32" if bench.cpu else "bfloat16", "master": "float32"},
            "runtime": {"compile": not bench.cpu, "deterministic": deterministic},
            "checkpoint": {"every": shape.every, "keep": 1},  # the disk may be small
        }  # fmt: skip
        (folder / f"{variant}.yaml").write_text(json.dumps(recipe | shape.recipe))


def matmul_rate(bench: Bench) -> None:
    """FLOP/s: the best of some products of two square matrices, bfloat16 on the GPU and float32 on the CPU."""
    size, dtype, device = (1024, torch.float32, "cpu") if bench.cpu else (8192, torch.bfloat16, "cuda")
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    wait: Callable[[], object] = (lambda: None) if bench.cpu else torch.cuda.synchronize
    rates = []
    for _ in range(5):
        wait()
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        wait()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - began))
    bench.matmul = max(rates)
    bench.say("matmul rate", f"{bench.matmul / 1e12:.4g} TFLOP/s, {size} × {size} × {size}, {dtype}")


def bodies(run: Path, *kinds: str) -> list[Mapping[str, Any]]:
    """The receipts of some kinds."""
    return [receipt.body for receipt in read(run / "ledger.jsonl") if receipt.kind in kinds]


def state_of(run: Path, step: int) -> str:
    """The digest of the full state at a step; RuntimeError when the run saved none."""
    for body in bodies(run, "checkpoint.saved"):
        if (body["step"], body["checkpoint"]) == (step, "full"):
            return str(body["state_sha256"])
    raise RuntimeError(f"the run {run.name} saved no full checkpoint at step {step}")


def compared(bench: Bench, name: str, expected: object, found: object) -> None:
    """The row of a comparison."""
    bench.say(name, "bit-equal" if found == expected else "DIFFERENT")


def speed(bench: Bench, shape: Shape, name: str, run: Path, recipe_name: str) -> None:
    """Tokens/s of the updates between the warm-up and the first save, TFLOP/s, MFU, memory against the plan."""
    recipe = recipes.load(bench.folder / shape.name / f"{recipe_name}.yaml")
    lines = list(metrics.updates(run / "metrics.jsonl"))
    counted = lines[WARM_UP : shape.every]
    if not counted:
        bench.say(f"{name}: tokens/s", f"not measured: {len(lines)} updates were done")
        return
    positions, flops = recipe.positions_per_update, flops_per_position(recipe)
    rate = positions / median(line["seconds"] for line in counted)
    bench.say(f"{name}: tokens/s, median of {len(counted)} updates", f"{rate:,.0f}")
    if saving := lines[shape.every :]:
        slower = positions / median(line["seconds"] for line in saving)
        bench.say(f"{name}: tokens/s of {len(saving)} updates beside saves", f"{slower:,.0f}, {slower / rate:.1%}")
    for kind, count in (("6N", flops["six_n"]), ("6N + attention", sum(flops.values()))):
        done = rate * count
        mfu = f"MFU {done / bench.dense:.1%} of {bench.dense / 1e12:,.1f}" if bench.dense else "peak unknown"
        if bench.dense and shape.aim and recipe.runtime.deterministic:
            mfu += f" (aim on an H200 {shape.aim:.0%}: {'met' if done / bench.dense >= shape.aim else 'MISSED'})"
        share = f"{done / bench.matmul:.1%} of matmul" if bench.matmul else "no matmul rate"
        bench.say(f"{name}: by {kind}", f"{done / 1e12:.4g} TFLOP/s, {mfu}, {share}")
    planned, found = memory(recipe, 1)["total"], max(line["memory_peak"] for line in lines)
    ratio = "of the whole process" if bench.cpu else f"ratio {found / planned:.2f}"
    bench.say(f"{name}: peak memory", f"{found / 2**30:.2f} GiB beside the plan's {planned / 2**30:.2f}, {ratio}")


def saves(bench: Bench, shape: Shape, run: Path) -> None:
    """What each save cost, as its receipt says; the first in the background also allocates the copies."""
    found = bodies(run, "checkpoint.saved")
    blocking = [float(body["stall_seconds"]) for body in found if not body["asynchronous"]]
    updates = [line["seconds"] for line in metrics.updates(run / "metrics.jsonl")]
    count = 0
    for body in found:
        stall, whole = float(body["stall_seconds"]), float(body["seconds"])
        words = f"stall {stall:.3f} s, whole {whole:.3f} s, {body['bytes'] / 1e6:,.1f} MB"
        if body["asynchronous"]:
            count += 1
            words += f"; the stall is {stall / blocking[-1]:.1%} of the blocking save's" if blocking else ""
            if whole - stall >= sum(updates[body["step"] : body["step"] + shape.every]):
                words += "; written for longer than the updates took until the next save, which waited"
        way = f"asynchronous save {count}" if body["asynchronous"] else "blocking save"
        bench.say(f"{shape.name}: {way}, step {body['step']}", words)
    if not count:
        bench.say(f"{shape.name}: asynchronous saves", "none: too little host memory, or the run ended before")


def whole(bench: Bench, shape: Shape) -> None:
    """The main figures; what a failed run has written is told as well."""
    project(bench, shape)
    try:
        bench.train(shape, "whole")
    finally:
        run = bench.folder / shape.name / "whole"
        if (run / "metrics.jsonl").is_file():
            for body in bodies(run, "start"):
                facts = body["numerics"]
                bench.say(f"{shape.name}: driver; bits", f"{facts['driver'] or 'not stated'}; {facts['bits']}")
            speed(bench, shape, f"{shape.name}, deterministic", run, "recipe")
            saves(bench, shape, run)


def again(bench: Bench, shape: Shape) -> None:
    """A second run of a few updates; compared by every number of its metrics lines that does not tell time."""
    first = metrics.updates(bench.folder / shape.name / "whole" / "metrics.jsonl")
    expected = [metrics.comparable(line) for line in first][:SHORT]
    if len(expected) < SHORT:
        raise RuntimeError(f"the first run did {len(expected)} updates")
    run = bench.train(shape, "again", "--until", SHORT, kernels=shape.kernels)
    found = [metrics.comparable(line) for line in metrics.updates(run / "metrics.jsonl")]
    compiled = "" if bench.cpu else ", the same kernels" if shape.kernels == "kernels" else ", compiled apart"
    compared(bench, f"{shape.name}: two runs{compiled}, {SHORT} losses and norms", expected, found)


def resume(bench: Bench, shape: Shape) -> None:
    """The second run goes on in a new process to the step of the first run's first save."""
    folder, step = bench.folder / shape.name, shape.every
    expected, _ = state_of(folder / "whole", step), state_of(folder / "again", SHORT)
    run = bench.train(shape, "again", "--start", "resume", "--until", step, kernels=shape.kernels)
    compared(bench, f"{shape.name}: a resume at {SHORT}, state at step {step}", expected, state_of(run, step))


def two(bench: Bench, shape: Shape) -> None:
    """Two ranks share the device, one lane each; compared with the second run."""
    expected = state_of(bench.folder / shape.name / "again", SHORT)
    run = bench.train(shape, "two", "--ranks", 2, "--until", SHORT)
    compared(bench, f"{shape.name}: 1 and 2 processes, gloo, state at step {SHORT}", expected, state_of(run, SHORT))
    shutil.rmtree(run)


def free(bench: Bench, shape: Shape) -> None:
    """Speed without determinism."""
    run = bench.train(shape, "free", "--until", min(shape.every, 8), recipe="free")
    speed(bench, shape, f"{shape.name}, not deterministic", run, "free")
    shutil.rmtree(run)


def control(bench: Bench, shape: Shape) -> None:
    """Two updates kept from the first run's weights, and done again."""
    folder = bench.folder / shape.name
    bench.assay("control", "record", folder / "whole", folder / "control", "--updates", 2)
    told = json.loads(bench.assay("control", "check", folder / "control", "--json"))
    bench.say(f"{shape.name}: control checked", f"passed {told.get('passed')}, identical {told.get('identical')}")


CHECKS: dict[str, tuple[str, Callable[[Bench, Shape], None]]] = {  # by value; with the file that each needs
    "again": ("whole/ledger.jsonl", again),
    "resume": ("again/ledger.jsonl", resume),
    "two": ("again/ledger.jsonl", two),
    "free": ("free.yaml", free),
    "control": ("whole/ledger.jsonl", control),
}


def main() -> None:
    """The main figures of all shapes, then the checks of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no step begins; the last ends soon")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="the rows as JSON")
    options = parser.parse_args()
    began, cpu = time.monotonic(), options.device == "cpu"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        bench = Bench(Path(place), began + 60 * options.minutes, cpu, options.out)
        device = "cpu" if cpu else torch.cuda.get_device_name()
        bench.dense = None if cpu else peak(device, "bfloat16")
        disk, host = shutil.disk_usage(place), free_memory()
        bench.say("date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
        bench.say("device, torch, CUDA", f"{device}, {torch.__version__}, {torch.version.cuda}")
        pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        if pinned and torch.__version__.partition("+")[0] != pinned[1]:
            bench.say("torch that the project pins", f"{pinned[1]}: the figures are of another version")
        bench.say(f"disk of {tempfile.gettempdir()}", f"{disk.free / 1e9:,.1f} of {disk.total / 1e9:,.1f} GB free")
        bench.say("host memory", f"{host / 1e9:,.1f} GB free" if host else "not stated")
        bench.say("NCCL over several GPUs", "not tested here")
        bench.step("matmul", 10, partial(matmul_rate, bench))
        shapes = [TOY] if cpu else [L20, SLAYER]
        for shape in shapes:
            bench.step(f"{shape.name}: main figures", shape.seconds["whole"], partial(whole, bench, shape))
        for shape in shapes:
            for key, (needed, check) in CHECKS.items():
                if key not in shape.seconds:  # one lane is not shared by two processes
                    continue
                if (bench.folder / shape.name / needed).is_file():
                    bench.step(f"{shape.name}: {key}", shape.seconds[key], partial(check, bench, shape))
                else:
                    bench.say(f"{shape.name}: {key}", f"left out: there is no {needed}")
            shutil.rmtree(bench.folder / shape.name, ignore_errors=True)
        bench.say("whole time", f"{time.monotonic() - began:.0f} s")
    if any("DIFFERENT" in value or name.endswith("FAILED") for name, value in bench.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
