"""What is measured while training: norms by group, noise, stragglers, speed, MFU; and what is not measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import BLOCK, GLOBAL_BATCH, Project, drive, shard

from assay.data.shard import open_shard
from assay.ledger.ledger import read
from assay.plan.figures import flops_per_position, mfu
from assay.plan.parameters import shapes
from assay.plan.peaks import peak
from assay.recipe import load as recipes
from assay.run import metrics
from assay.run.folder import RunFolder
from assay.run.status import status
from assay.train.meters import SlowBounds, Stragglers
from assay.train.nvml import Sensor
from assay.train.optimizers import joined_norm
from assay.train.telemetry import by_group, group_of, mfu_of, noise

SHIPPED = Path(__file__).parents[2] / "recipes"
NVML = Path(__file__).with_name("nvml.c")


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=16), st.floats(0.01, 10), st.integers(1, 10**6))
def test_the_noise_scale_is_that_of_the_paper(squares: list[float], whole: float, small: int) -> None:
    lanes = len(squares)
    large = lanes * small
    # McCandlish et al. 2018, A.2 and A.3: a batch's gradient is a mean, and a lane enters the sum divided by all.
    big2, small2 = whole**2, float(np.mean([lanes**2 * one for one in squares]))
    signal = (large * big2 - small * small2) / (large - small)
    trace = (small2 - big2) / (1 / small - 1 / large)
    found = noise(squares, whole, large)
    assert found is not None
    size = big2 + small2
    assert found["signal"] == pytest.approx(signal, rel=1e-9, abs=1e-9 * size)
    assert found["noise"] == pytest.approx(trace, rel=1e-9, abs=1e-9 * size * large)
    assert (found["scale"] is None) == (found["signal"] <= 0)  # type: ignore[operator]


def test_noise_and_signal_are_found_again_where_they_are_known() -> None:
    """Positions with the gradient G + e, e of unit variance in each of 50 dimensions: |G|² = 200, trace = 50."""
    generator = np.random.default_rng(3)
    true = np.full(50, 2.0)
    signals, traces = [], []
    for _ in range(400):
        lanes = true + generator.normal(size=(8, 50)) / math.sqrt(4)  # means over four positions
        found = noise([float(lane @ lane) / 64 for lane in lanes], float(np.linalg.norm(lanes.mean(0))), 32)
        assert found is not None
        signals.append(found["signal"])
        traces.append(found["noise"])
    assert np.mean(signals) == pytest.approx(200, rel=0.02)
    assert np.mean(traces) == pytest.approx(50, rel=0.02)


def test_one_lane_tells_no_noise() -> None:
    assert noise([1.0], 1.0, 64) is None
    assert noise([], 1.0, 64) is None


@pytest.mark.parametrize("name", ["slayer1b-1.09", "l20-edu-135m", "tiny"])
def test_every_tensor_has_a_group_and_the_groups_make_up_the_whole(name: str) -> None:
    model = recipes.load(SHIPPED / f"{name}.yaml").model
    known = {"embedding", "head", "attention", "ffn", "norms", "biases", "value_residual"}
    norms = {tensor: 1.0 + index for index, tensor in enumerate(shapes(model))}
    assert {group_of(tensor) for tensor in norms} <= known
    assert math.hypot(*by_group(norms).values()) == pytest.approx(joined_norm(norms))
    assert group_of("blocks.0.attention.q_norm.weight") == group_of("norm.weight") == "norms"
    assert group_of("blocks.0.attention.q.bias") == "biases"
    assert group_of("head.weight") == "head"


def test_every_target_is_of_one_source(tmp_path: Path) -> None:
    held = open_shard(shard(tmp_path / "held", 12, 99))
    for start in range(0, held.tokens, 7):
        for stop in range(start, held.tokens + 1, 11):
            found = held.sources_in(start, stop)
            assert [low for _, low, _ in found] == [0, *(high for _, _, high in found)][: len(found)]
            assert (found[-1][2] if found else 0) == stop - start
            for name, low, high in found:
                (source,) = [one for one in held.sources if one.name == name]
                assert source.start <= start + low < start + high <= source.stop


def test_a_straggler_is_named_once_for_each_row_of_slow_updates() -> None:
    stragglers = Stragglers(SlowBounds(1.15, 3))
    slow, even = [1.0, 1.0, 1.2, 1.0], [1.0, 1.0, 1.1, 1.0]
    rows = [slow, slow, even, slow, slow, slow, slow, even, slow, slow, slow]
    assert [stragglers.take(row) for row in rows] == [[], [], [], [], [], [2], [], [], [], [], [2]]
    assert stragglers.take([None, 1.0, 9.0, 1.0]) == [], "before all have measured themselves nobody is slow"
    assert [stragglers.take(even) for _ in range(9)] == [[]] * 9


def test_the_known_mfu_of_l20_edu_comes_from_the_table_of_peaks() -> None:
    flops = flops_per_position(recipes.load(SHIPPED / "l20-edu-135m.yaml"))["six_n"]
    known = peak("NVIDIA L20", "bfloat16")
    assert known is not None
    assert round(100 * mfu(38541, flops, known), 1) == 26.0


def test_the_mfu_of_an_update_is_that_without_its_pauses() -> None:
    recipe = recipes.load(SHIPPED / "tiny.yaml")
    parts = {"compute": 0.5, "optimizer": 0.25, "data": 0.25}
    flops = flops_per_position(recipe)
    found = mfu_of(recipe, parts | {"validation": 3.0, "checkpoint": 2.0, "slot": 1.0}, 10**14)
    assert found == mfu_of(recipe, parts, 10**14)
    assert found["mfu"] == pytest.approx(recipe.positions_per_update * sum(flops.values()) / 10**14)
    assert mfu_of(recipe, parts, None) == mfu_of(recipe, {}, 10**14) == {"mfu": None, "mfu_six_n": None}


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [("NVIDIA H200 MIG 1g.18gb", "bfloat16"), ("Some Accelerator", "bfloat16"), ("NVIDIA H200", "float32")],
)
def test_a_device_or_arithmetic_that_is_not_known_has_no_peak(name: str, arithmetic: str) -> None:
    assert peak(name, arithmetic) is None


def test_a_nested_value_that_is_not_finite_is_null_and_named() -> None:
    line = metrics.encode({"update": 1, "grad_norms": {"ffn": math.nan, "norms": 1.0}})
    assert json.loads(line) == {"update": 1, "grad_norms": {"ffn": None, "norms": 1.0}, "nonfinite": ["grad_norms.ffn"]}


def test_without_a_gpu_nothing_is_measured_and_nothing_is_zero() -> None:
    for uuid in (None, "no-such-device"):
        sensor = Sensor(uuid)
        assert (sensor.power, sensor.energy, sensor.state()) == (None, None, None)
        sensor.close()


def test_power_energy_and_throttle_reasons_come_from_the_library(tmp_path: Path) -> None:
    """Against a library of the same symbols, with a device that tells no memory clock."""
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(NVML)], check=True)
    script = (
        "import json, threading, torch; from assay.train.nvml import Sensor; s = Sensor('7'); first = s.energy;"
        "from assay.train.meters import Meters, SlowBounds, Stragglers;"
        "m = Meters(torch.device('cpu'), ['GPU-7'], s, Stragglers(SlowBounds()));"
        "m.joules = 0.0; s.close(); m.finish();"
        "print(json.dumps([s.power, first, s.energy, s.state(), m.joules, threading.active_count()]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    power, first, last, state, joules, threads = json.loads(told.stdout)
    assert (power, first, last % 500) == (312_000, 0, 0), "each reading of the meter is 500 mJ further"
    assert last >= 500
    assert joules == last / 1000, "the last reading counts"
    assert threads == 1, "nothing reads on"
    assert state == {
        "sm_mhz": 1980, "memory_mhz": None, "celsius": 61, "milliwatts": 312_000,
        "throttle_reasons": ["SwPowerCap", "SwThermalSlowdown"],
    }  # fmt: skip


def test_a_run_tells_its_speed_with_and_without_pauses_and_says_what_is_not_measured(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    run = RunFolder(tmp_path / "run")
    assert drive(project.recipe(log={"every": 1, "norms_every": 6}), run.path, until="14") == 0
    lines = list(metrics.read(run.metrics))
    assert all({"data", "compute", "reduction"} <= line["parts"].keys() for line in lines)
    assert all(line["mfu"] is None and line["power_watts"] is None for line in lines)
    assert all(line["gradient_noise"] is None for line in lines if "gradient_noise" in line), "there is one lane"
    facts = status(run)
    positions = GLOBAL_BATCH * BLOCK
    whole = math.fsum(math.fsum(line["parts"].values()) for line in lines)
    assert facts["tokens_per_second"]["all"]["with_pauses"] == pytest.approx(14 * positions / whole)
    warm = facts["tokens_per_second"]["after_warm_up"]
    assert warm["without_pauses"] > warm["with_pauses"] > 0, "a checkpoint was saved after step 12"
    assert facts["peak"] == {"flops_per_second": None, "devices": 1, "kinds": ["cpu"], "source": "unknown"}
    (end,) = [receipt.body for receipt in read(run.ledger) if receipt.kind == "end"]
    assert end["energy_joules"] is None
    assert float(end["tokens_per_second"]["all"]["without_pauses"]) > 0
    outcome = json.loads(run.outcome.read_text())
    assert outcome["tokens_per_second"] == end["tokens_per_second"]
