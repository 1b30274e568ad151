"""The plan counts what the trainer will hold and save, with or without data, and says what is missing."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.data import queue as queues
from assay.errors import InputError
from assay.model.initial import build
from assay.plan.cadence import checkpoint_steps, disk, every
from assay.plan.figures import mfu, plan
from assay.plan.memory import activation_bytes, memory, optimizer_bytes, selective_bytes
from assay.plan.parameters import count, matrix_count, shapes
from assay.recipe.load import from_resolved, load, resolved
from assay.recipe.schema import Recipe
from assay.train.optimizers import build_optimizers, state_tensors

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = load(RECIPES / "tiny.yaml")
KEYS = {
    *("parameters", "positions_per_update", "updates", "planned_positions", "positions_per_parameter", "decay_start"),
    *("warmup", "global_batch", "block", "micro_batches", "flops_per_position", "memory_bytes", "disk_bytes"),
    *("checkpoints", "slots", "hours", "cost", "cost_excludes", "inherited", "shortfall", "warnings"),
}


def tiny(**sections: Any) -> Recipe:
    value = resolved(TINY)
    for section, keys in sections.items():
        value[section] = value[section] | keys if isinstance(keys, dict) and isinstance(value[section], dict) else keys
    return from_resolved(value, "tiny")


def test_shapes_follow_the_options() -> None:
    plain = shapes(TINY.model)
    assert plain["blocks.3.ffn.down.weight"] == (128, 341)
    assert "blocks.0.attention.value_residual" not in plain
    assert plain["blocks.1.attention.value_residual"] == (1,)
    assert "head.weight" not in plain
    other = shapes(tiny(model={"tie_embeddings": False, "attention_bias": True, "kv_heads": 2, "qk_norm": False}).model)
    assert other["head.weight"] == (4096, 128)
    assert other["blocks.0.attention.k.weight"] == (64, 128)
    assert other["blocks.0.attention.k.bias"] == (64,)
    assert not any("_norm" in name and "attention.q" in name for name in other)
    assert matrix_count(TINY.model) == sum(
        prod(shape) for name, shape in plain.items() if len(shape) == 2 and name.startswith("blocks.")
    )


@pytest.mark.parametrize(
    "model",
    [{}, {"qk_norm": False, "value_residual": False}, {"kv_heads": 2, "ffn": 200}, {"heads": 8, "kv_heads": 1}],
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps(model: dict[str, Any], compute: str) -> None:
    """Every storage that the decoder saves for its backward pass, against the count from the recipe alone."""
    recipe = tiny(model={"layers": 2, "block": 64, **model}, batch={"micro": 2}, precision={"compute": compute})
    decoder = build(recipe.model, 1)
    own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        hidden = decoder(torch.zeros(2, 64, dtype=torch.int64))
    copies = 2 * matrix_count(recipe.model) if compute == "bfloat16" else 0  # the plan counts them as `compute_copy`
    loss_keeps = 2 * hidden.numel() * hidden.element_size()  # hidden states and their gradient
    measured = sum(storage.nbytes() for storage in kept.values()) - copies + loss_keeps
    assert activation_bytes(recipe, recompute=False) == pytest.approx(measured, rel=0.03)


def tensors() -> list[torch.Tensor]:
    """All that the program holds in memory: not those of a compiler's traces, which other tests may have left.

    `isinstance` would wake the library's deprecated names.
    """
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return [one for one in found if not torch._is_functional_tensor(one) and one.device.type == "cpu"]


@pytest.mark.parametrize("model", [{"qk_norm": True, "value_residual": False}, {"kv_heads": 2, "ffn": 200}])
def test_selective_recomputation_keeps_what_is_counted(model: dict[str, Any]) -> None:
    """Every storage that a tensor held by the program lies in, after the forward pass of one block less than of two."""
    live = []
    for layers in (1, 2):
        recipe = tiny(model={"layers": layers, "block": 64, **model}, batch={"micro": 2})
        decoder = build(recipe.model, 1, recompute="selective")
        gc.collect()
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors()}
        hidden = decoder(torch.zeros(2, 64, dtype=torch.int64))
        made = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors()}
        live.append(sum(size for place, size in made.items() if place not in before))
        del hidden
    assert selective_bytes(recipe) == pytest.approx(live[1] - live[0], rel=0.05)


def test_memory_terms_are_exact_counts() -> None:
    n = count(TINY.model)
    one = memory(TINY, 1)
    assert one["weights"] == one["gradients"] == 4 * n
    assert one["compute_copy"] == one["partial_sums"] == 0
    assert optimizer_bytes(TINY) == 4 * matrix_count(TINY.model) + 8 * (n - matrix_count(TINY.model))
    adamw = {"kind": "adamw", "muon_lr": None, "muon_momentum": None, "muon_steps": None, "muon_dtype": None}
    assert optimizer_bytes(tiny(optimizer=adamw)) == 8 * n
    for recipe in (TINY, tiny(optimizer=adamw), tiny(optimizer={"kind": "normuon"})):
        model = build(recipe.model, 1)
        state = state_tensors(model, build_optimizers(model, recipe.optimizer))
        held = {name: tensor.nbytes for name, tensor in state.items() if not name.endswith(".step")}
        assert optimizer_bytes(recipe) == sum(held.values())
    assert sum(value for key, value in one.items() if key != "total") == one["total"]


def test_fewer_gpus_hold_more_partial_sums() -> None:
    recipe = tiny(batch={"lanes": 8})
    n = count(recipe.model)
    assert [memory(recipe, ranks)["partial_sums"] // (4 * n) for ranks in (1, 2, 4, 8)] == [3, 2, 1, 0]
    assert memory(tiny(batch={"lanes": 8}, reduction="fast"), 1)["partial_sums"] == 0
    assert plan(recipe, RECIPES)["memory_bytes"]["per_gpu"].keys() == {"1", "2", "4", "8"}
    assert memory(recipe, 1)["exchange"] == 0
    # Two buckets and what the busiest rank owns; together the owners hold the whole optimizer state.
    assert 4 * (2 * n + n / 4) <= memory(recipe, 4)["exchange"] < 4 * 3 * n
    assert optimizer_bytes(recipe) / 4 <= memory(recipe, 4)["optimizer"] < optimizer_bytes(recipe)
    sharded = tiny(batch={"lanes": 8}, runtime={"engine": "fsdp"})
    assert memory(sharded, 1) == memory(recipe, 1), "one rank has nobody to share with"
    assert memory(sharded, 8)["weights"] < memory(recipe, 8)["weights"] == 4 * n
    assert plan(recipe, RECIPES)["micro_batches"]["per_rank"] == {"1": 32, "2": 16, "4": 8, "8": 4}


def test_recomputation_saves_memory_in_deep_models() -> None:
    facts = plan(load(RECIPES / "slayer1b-1.09.yaml"), RECIPES)["memory_bytes"]
    assert facts["activations_with_recomputation"] < facts["activations_without_recomputation"] / 5
    least, most = (facts[f"activations_{which}_recomputation"] for which in ("with", "without"))
    assert least < facts["activations_with_selective_recomputation"] < most / 2
    assert facts["total"] == facts["total_without_recomputation"]


def test_auto_is_a_hundredth_of_the_schedule() -> None:
    assert [every(tiny(checkpoint={"every": "auto"}, schedule={"updates": u})) for u in (150, 2000, 500_000)] == [
        1,
        20,
        1000,
    ]


def test_slot_ends_and_extra_steps_are_permanent() -> None:
    recipe = tiny(checkpoint={"every": 400, "extra": [5], "weights_every": 900})
    steps = checkpoint_steps(recipe, [300, 1000, 5000])
    assert steps["full"] == [5, 300, 400, 800, 1200, 1300, 1600, 2000]
    assert steps["permanent"] == [5, 300, 1300, 2000]
    assert steps["weights"] == [900, 1800]
    without = tiny(checkpoint={"every": 400, "extra": [5], "slot_ends": False})
    assert checkpoint_steps(without, [300])["full"] == [5, 400, 800, 1200, 1600, 2000]
    assert checkpoint_steps(recipe, None)["permanent"] == [5, 2000]


@given(
    st.integers(1, 60),
    st.one_of(st.just("all"), st.integers(1, 9)),
    st.lists(st.integers(1, 60), max_size=5, unique=True),
    st.integers(1, 20),
)
def test_no_moment_of_a_run_needs_more_disk_than_planned(last: int, keep: Any, extra: list[int], cadence: int) -> None:
    """Replays the retention: the newest `keep` and the permanent ones stay, the new one is written before others go."""
    recipe = tiny(
        schedule={"updates": last, "kind": "constant", "warmup": 0, "decay": None, "decay_fraction": None},
        checkpoint={"every": cadence, "keep": keep, "extra": [step for step in extra if step <= last]},
    )
    steps = checkpoint_steps(recipe, None)
    standing: list[int] = []
    most = cleaned = 0
    for step in steps["full"]:
        standing.append(step)
        most = max(most, len(standing))
        if keep != "all":
            standing = [s for s in standing if s in standing[-keep:] or s in steps["permanent"]]
        cleaned = max(cleaned, len(standing))
    space = disk(recipe, steps)
    assert cleaned == space["full_kept"]
    assert most <= space["full_kept"] + space["in_flight"]
    assert space["total"] >= most * space["full_checkpoint"]


def test_a_continued_run_counts_what_it_does_itself() -> None:
    recipe = tiny(start={"continue_from": {"path": "runs/parent", "step": 500}})
    facts = plan(recipe, Path("/nowhere"), Decimal(8192), goal_positions=2000 * 8192)
    assert facts["positions_of_this_run"] == 1500 * 8192
    assert facts["hours"] == pytest.approx(1500 / 3600, abs=0.005)
    assert facts["inherited"] == {
        "start": "continue-from",
        "positions": 500 * 8192,
        "in_planned_positions": True,
        "source": "500 updates of the parent run, which the planned positions include",
    }
    assert facts["shortfall"]["missing_updates"] == 1500
    assert facts["shortfall"]["goal_missing_positions"] == 1500 * 8192


def test_a_parent_run_at_hand_tells_what_is_inherited(tmp_path: Path) -> None:
    recipe = tiny(start={"init_from": {"path": "runs/a/checkpoints/step-000300"}})
    assert plan(recipe, tmp_path)["inherited"]["positions"] is None
    checkpoint = tmp_path / "runs/a/checkpoints/step-000300"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"step": 300}')
    (tmp_path / "runs/a/recipe.json").write_text(json.dumps(resolved(TINY)))
    facts = plan(recipe, tmp_path, goal_positions=5000 * 8192)
    assert facts["inherited"]["positions"] == 300 * 8192
    assert facts["shortfall"]["goal_updates"] == 4700
    assert facts["shortfall"]["goal_unscheduled_positions"] == 2700 * 8192


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    warnings = plan(TINY, tmp_path)["warnings"]
    assert any("queue.jsonl is not there yet" in warning for warning in warnings)
    assert any("validation is not there yet" in warning for warning in warnings)
    assert any(warning.startswith("not pinned: tokenizer") for warning in warnings)
    assert "gives no cost" in plan(TINY, tmp_path, usd_per_hour=Decimal(1))["warnings"][-1]


def make_queue(folder: Path, block: int = 256, vocabulary: int = 4096, tokens: int = 100_000) -> None:
    path = folder / TINY.data.queue
    queue = queues.create(path, block=block, dtype="uint16", vocabulary=vocabulary, tokenizer="test")
    part = queues.Part("sha256:" + "2" * 64, None, 0, tokens, "en")
    queues.append(path, queues.propose(queue, updates=3, parts=[part], global_batch=8))


def test_a_slot_that_is_too_short_is_named_with_its_shortfall(tmp_path: Path) -> None:
    make_queue(tmp_path, tokens=10_000)
    facts = plan(TINY, tmp_path)
    assert not facts["slots"][0]["enough"]
    assert any("slot 0 is too short: 96 windows are needed" in warning for warning in facts["warnings"])


@pytest.mark.parametrize(("key", "value"), [("block", 128), ("vocabulary", 5000)])
def test_a_queue_that_does_not_fit_the_model_is_refused(tmp_path: Path, key: str, value: int) -> None:
    make_queue(tmp_path, **{key: value})
    with pytest.raises(InputError, match=f"model.{key} is .*, but .*queue.jsonl has {key} {value}"):
        plan(TINY, tmp_path)


def test_a_file_that_is_no_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / TINY.data.queue).write_text("nothing\n")
    with pytest.raises(InputError, match=r"queue\.jsonl"):
        plan(TINY, tmp_path)


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "Infinity"])
def test_speeds_and_rates_are_positive(value: str) -> None:
    with pytest.raises(InputError, match="--tokens-per-second is"):
        plan(TINY, RECIPES, tokens_per_second=Decimal(value))
    with pytest.raises(InputError, match="--usd-per-hour is"):
        plan(TINY, RECIPES, usd_per_hour=Decimal(value))


def test_an_impossible_mfu_is_an_error() -> None:
    assert mfu(1000, 10**9, 1e13) == pytest.approx(0.1)
    with pytest.raises(InputError, match="impossible"):
        mfu(1000, 10**9, 1e11)
    with pytest.raises(InputError, match="must be positive"):
        mfu(1000, 10**9, 0)


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_prints_one_json_object_with_the_contracts_keys() -> None:
    path = str(RECIPES / "slayer1b-1.09.yaml")
    done = assay(
        "plan", path, "--tokens-per-second", "300000", "--usd-per-hour", "25", "--goal-positions", "9", "--json"
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"] is True
    assert facts.keys() >= KEYS


def test_the_command_shows_tables_to_people() -> None:
    done = assay("plan", str(RECIPES / "l20-edu-135m.yaml"), "--tokens-per-second", "38587", "--usd-per-hour", "0.6")
    assert done.returncode == 0, done.stderr
    for shown in ("134,515,008", "10,001,252,352", "72.0", "43.20", "network egress", "is not there yet"):
        assert shown in done.stdout


def test_a_wrong_recipe_ends_with_code_2_and_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text((RECIPES / "tiny.yaml").read_text(encoding="utf-8").replace("layers:", "layer:"), encoding="utf-8")
    done = assay("plan", str(path), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit"] == 2
    assert "the nearest known key is model.layers" in done.stderr
    assert "Traceback" not in done.stderr
