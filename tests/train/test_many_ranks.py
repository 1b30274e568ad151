"""The same bits on any number of ranks: weights, optimizer, losses, norms and order, for every kind of recipe."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import BLOCK, Project
from torch import nn

from assay.checkpoint.save import Facts, document, save
from assay.data import queue as queues
from assay.data.batches import Batches
from assay.ledger.ledger import read
from assay.model import initial
from assay.plan.owners import owners
from assay.recipe import load as recipes
from assay.run import metrics
from assay.run.history import history
from assay.train.ranks import Ranks, apart
from assay.train.reduction import Exchange, LaneSums, share, tree

COUNTS = (1, 2, 4, 8)
UPDATES = 20
GROUPS = {"embedding", "attention", "ffn", "norms", "value_residual"}
Done = tuple[Path, dict[str, list[int]]]  # the project, and the exit codes of each rank by run
SPIKES = {"policy": "skip", "window": 4, "deviations": 1.0, "most": 20}  # so little that there are some
NORMUON = {"kind": "normuon", "lr": 0.003, "muon_lr": 0.02}
FAR = {"every": 10, "batches": 16}
LANES = {"micro": 1, "accumulation": 1, "lanes": 8}
SHORT = {"kind": "wsd", "updates": UPDATES, "warmup": 3, "decay_fraction": 0.25, "min_lr": 0.0003}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """All recipes on all numbers of ranks, and the exit codes of each rank by number of ranks."""
    project = Project(tmp_path_factory.mktemp("ranks") / "project", slots=((9, 9), (11, 10)))

    def small(name: str, **changes: Any) -> Path:
        few = {"batch": LANES, "schedule": SHORT, "checkpoint": {"every": 10, "keep": "all"}, "evaluate__every": 10}
        few |= {"log": {"every": 1, "norms_every": 4}}
        return project.recipe(name, **few | changes)

    thrice = {"micro": 1, "accumulation": 3, "lanes": 8}
    adamw = {"kind": "adamw", "lr": 0.003, "grad_clip": 0.2}
    jobs = {
        # Value residual, grouped queries, tied embeddings, QK-norm, an odd vocabulary, clipping at every update.
        # Validation reaches the second source of its shard.
        "muon": (
            small("muon", model__vocabulary=4099, optimizer__grad_clip=0.3, evaluate=FAR),
            COUNTS,
        ),
        "adamw": (
            small(
                "adamw", checkpoint={"every": "auto", "auto": {"least": 10, "most": 10}, "keep": "all"},
                batch=thrice, optimizer=adamw, model__layers=1, model__tie_embeddings=False,
                model__attention_bias=True, model__logit_cap=20.0,
            ),
            (1, 2, 8),
        ),
        # Seven matrices for eight ranks, by NorMuon; activations computed again; documents apart.
        "few": (
            small(
                "few", optimizer=NORMUON, model__layers=1, model__document_mask=True,
                runtime={"device": "cpu", "recompute": True}, spikes=SPIKES,
            ),
            (1, 8),
        ),
        "compiled": (
            small("compiled", model__layers=1, runtime={"device": "cpu", "compile": True}, evaluate={"every": None}),
            (1,),
        ),
        "fast": (
            small("fast", reduction="fast", schedule=SHORT | {"updates": 4}, batch=LANES | {"micro": 2, "lanes": 4}),
            (2,),
        ),
        "sick": (sick(project), (2,)),
        "odd": (small("odd"), (3,)),
        "short": (small("short", model__layers=1, schedule=SHORT | {"updates": 24}), (2,)),
        # The same recipes, sharded; of the smallest model some of eight ranks hold no rows of a tensor.
        "muon-fsdp": (
            small(
                "muon-fsdp", model__vocabulary=4099, optimizer__grad_clip=0.3, evaluate=FAR, runtime__engine="fsdp",
            ),
            (4,),
        ),
        "adamw-fsdp": (
            small(
                "adamw-fsdp", batch=thrice, optimizer=adamw, model__layers=1, model__tie_embeddings=False,
                model__attention_bias=True, model__logit_cap=20.0, runtime__engine="fsdp",
            ),
            (2,),
        ),
        "few-fsdp": (
            small(
                "few-fsdp", optimizer=NORMUON, model__layers=1, model__document_mask=True,
                runtime={"device": "cpu", "recompute": True, "engine": "fsdp"}, spikes=SPIKES,
            ),
            (8,),
        ),
        "compiled-fsdp": (
            small(
                "compiled-fsdp", model__layers=1, runtime={"device": "cpu", "compile": True, "engine": "fsdp"},
                evaluate={"every": None},
            ),
            (2,),
        ),
    }  # fmt: skip
    listed = [{"recipe": str(path), "run": str(project.path / name), "ranks": on} for name, (path, on) in jobs.items()]
    lags = small("lags", model__layers=1, schedule=SHORT | {"updates": 8}, evaluate={"every": None})
    listed.append(
        {"recipe": str(lags), "run": str(project.path / "lags"), "ranks": [2], "slow_rank": 1, "slow_updates": 5}
    )
    (project.path / "jobs.json").write_text(json.dumps(listed))
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("many_ranks.py")), str(project.path / "jobs.json")],
        check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return project.path, json.loads(ended.stdout.splitlines()[-1])


def sick(project: Project) -> Path:
    """A start whose first update is not finite on rank 1 alone: an id that only its half of the batch holds."""
    path = project.recipe("sick-base", batch=LANES, model__tie_embeddings=False)
    recipe = recipes.load(path)
    ids = Batches(queues.load(project.path / "data" / "queue.jsonl"), [], recipe.data.seed, 8).batch(0)[:, :BLOCK]
    alone = sorted(set(ids[4:].ravel().tolist()) - set(ids[:4].ravel().tolist()))
    model = initial.build(recipe.model, 3)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["embedding.weight"][alone[0]] = torch.inf
    facts = Facts("planted", 1, 1, "stable", "2026-11-30T10:00:00Z", "r", "sha256:" + "0" * 64, {})
    config = document(recipe.model.model_dump(mode="json"))
    folder = save(project.path / "planted", facts, weights, None, {"config.json": config}, {}).folder
    start = {"init_from": {"path": f"planted/{folder.name}"}}
    return project.recipe("sick", batch=LANES, model__tie_embeddings=False, start=start)


def facts(run: Path) -> dict[str, Any]:
    """Everything that must not depend on the number of ranks."""
    told = history(run / "ledger.jsonl")
    return {
        "states": {item.step: item.state_sha256 for item in told.saved if item.kind == "full"},
        "lines": {u: metrics.comparable(line) for u, line in metrics.by_update(run / "metrics.jsonl").items()},
    }  # fmt: skip


@pytest.mark.parametrize(("name", "counts"), [("muon", COUNTS), ("adamw", (1, 2, 8)), ("few", (1, 8))])
def test_weights_optimizer_losses_norms_and_order_are_the_same_on_every_number_of_ranks(
    done: Done, name: str, counts: tuple[int, ...]
) -> None:
    project, _ = done
    one = facts(project / f"{name}-1")
    assert set(one["states"]) >= {10, UPDATES}
    assert len(one["lines"]) == UPDATES
    for count in counts[1:]:
        assert facts(project / f"{name}-{count}") == one, f"{count} ranks"
        run = project / f"{name}-{count}"
        behind = {one.body["step"]: one.body for one in read(run / "ledger.jsonl") if one.kind == "checkpoint.saved"}
        assert behind[10]["asynchronous"]
        assert len(list((run / behind[10]["folder"]).glob(f"model-*-of-{count:05d}.safetensors"))) == count
        opening = history(run / "ledger.jsonl").segments[0].body["numerics"]
        assert (opening["world"], len(opening["devices"]), opening["bits"]) == (count, count, "promised")
    norms = [line["grad_norm"] for line in one["lines"].values()]
    if name in ("muon", "adamw"):
        clip = recipes.load(project / f"{name}.yaml").optimizer.grad_clip
        assert clip is not None
        assert min(norms) > clip, "every update was clipped"


@pytest.mark.parametrize(("name", "counts"), [("muon", (4,)), ("adamw", (2,)), ("few", (8,)), ("compiled", (2,))])
def test_a_sharded_model_has_the_bits_of_a_whole_one(done: Done, name: str, counts: tuple[int, ...]) -> None:
    project, _ = done
    for count in counts:
        run = project / f"{name}-fsdp-{count}"
        assert facts(run) == facts(project / f"{name}-1"), f"{count} ranks"
        opening = history(run / "ledger.jsonl").segments[0].body["numerics"]
        assert (opening["world"], opening["engine"], opening["bits"]) == (count, "fsdp", "promised")


def test_norms_by_group_gradient_noise_and_validation_by_source_are_among_what_is_the_same(done: Done) -> None:
    project, _ = done
    lines = facts(project / "muon-1")["lines"]
    assert [update for update, line in lines.items() if "grad_norms" in line] == [0, 4, 8, 12, 16]
    first = lines[0]
    assert first["weight_norms"].keys() == first["grad_norms"].keys() == GROUPS
    assert math.fsum(norm**2 for norm in first["grad_norms"].values()) == pytest.approx(first["grad_norm"] ** 2)
    assert first["gradient_noise"]["noise"] > 0
    assert set(lines[9]["validation_by_source"]) == {"first", "second"}
    assert facts(project / "adamw-fsdp-2")["lines"][4]["gradient_noise"] is not None


def test_updates_are_skipped_alike_on_every_number_of_ranks(done: Done) -> None:
    project, _ = done
    skipped = {
        run: [one.body["update"] for one in history(project / run / "ledger.jsonl").skipped]
        for run in ("few-1", "few-8", "few-fsdp-8")
    }
    assert skipped["few-1"]
    assert skipped["few-8"] == skipped["few-fsdp-8"] == skipped["few-1"]


def test_a_rank_that_computes_slowly_for_long_is_named_once_and_no_other_is(done: Done) -> None:
    project, _ = done
    (straggler,) = history(project / "lags-2" / "ledger.jsonl").stragglers
    body = straggler.body
    assert (body["rank"], body["updates"], body["nvml"]) == (1, 5, "not measured")
    fast, slow = body["microseconds"]
    assert slow > 1.15 * (fast + slow) / 2, "the median of two is their mean"


def test_every_rank_ends_with_the_same_code(done: Done) -> None:
    _, codes = done
    wanted = {"sick-2": 5, "short-2": 4, "odd-3": 3}
    assert {run: set(ended) for run, ended in codes.items()} == {run: {wanted.get(run, 0)} for run in codes}
    assert all(len(ended) == int(run.rpartition("-")[2]) for run, ended in codes.items())


def test_a_number_of_ranks_that_cannot_run_is_refused_without_pre_flight(done: Done) -> None:
    """As under torch's own launcher."""
    project, _ = done
    told = json.loads((project / "odd-3" / "outcome.json").read_text())
    assert told["code"] == 3
    assert "1, 2, 4, 8 ranks can" in told["message"]


def test_where_the_queue_ends_all_ranks_stop_saved(done: Done) -> None:
    project, _ = done
    told = history(project / "short-2" / "ledger.jsonl")
    assert [item.step for item in told.saved if item.kind == "full"][-1] == UPDATES
    assert [
        receipt.body["code"] for receipt in read(project / "short-2" / "ledger.jsonl") if receipt.kind == "failed"
    ] == [4]


def test_a_number_that_is_not_finite_on_one_rank_stops_all_before_the_optimizer(
    done: Done,
) -> None:
    project, _ = done
    run = project / "sick-2"
    assert [receipt.body["code"] for receipt in read(run / "ledger.jsonl") if receipt.kind == "failed"] == [5]
    assert not history(run / "ledger.jsonl").saved
    assert json.loads((run / "outcome.json").read_text())["code"] == 5
    (line,) = metrics.read(run / "metrics.jsonl")
    assert "loss" in line["nonfinite"]


def test_a_fast_reduction_says_that_bits_are_not_promised_and_computes_the_same_sums(
    done: Done,
) -> None:
    project, _ = done
    told = history(project / "fast-2" / "ledger.jsonl")
    assert told.segments[0].body["numerics"]["bits"] == "not promised"
    assert recipes.load(project / "fast.yaml").rank_counts == (1, 2, 4)
    assert [item.step for item in told.saved if item.kind == "full"] == [4]
    lines = metrics.by_update(project / "fast-2" / "metrics.jsonl")
    other = metrics.by_update(project / "few-1" / "metrics.jsonl")
    assert [line["order_digest"] for line in lines.values()] == [other[update]["order_digest"] for update in lines]
    assert all(3.9 < line["loss"] < 4.4 and 0 < line["grad_norm"] < 5 for line in lines.values())


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(1, 1000), min_size=1), st.integers(1, 16))
def test_every_tensor_has_one_owner_and_no_rank_is_loaded_beyond_the_largest_more(
    sizes: Mapping[str, int], ranks: int
) -> None:
    owner = owners(sizes, ranks)
    assert owner.keys() == sizes.keys()
    loads = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values())
    assert owners(dict(sorted(sizes.items())), ranks) == owner, "the order in which they are named does not matter"


def float32s(count: int, seed: int) -> list[torch.Tensor]:
    generator = np.random.default_rng(seed)
    return [torch.from_numpy((generator.normal(size=5) * 10.0**exponent).astype(np.float32)) for exponent in
            generator.integers(-3, 4, count)]  # fmt: skip


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 99))
def test_lanes_joined_rank_by_rank_are_the_tree_over_all_lanes(lanes: int, cut: int, seed: int) -> None:
    parts = float32s(1 << lanes, seed)
    whole = tree(parts)
    ranks = 1 << min(cut, lanes)
    each = len(parts) // ranks
    by_rank = []
    for rank in range(ranks):
        parameter = nn.Parameter(torch.zeros(5))
        sums = LaneSums([parameter], each)
        for part in parts[rank * each : (rank + 1) * each]:
            parameter.grad = part.clone()
            sums.close_lane()
        sums.finish()
        assert parameter.grad is not None
        by_rank.append(parameter.grad)
    assert torch.equal(tree(by_rank), whole)


def test_the_running_sum_would_give_other_bits_than_the_tree() -> None:
    """The test above is worth something: order matters for these numbers."""
    parts = float32s(8, 1)
    running = parts[0]
    for part in parts[1:]:
        running = running + part
    assert not torch.equal(tree(parts), running)


def test_the_ranks_share_every_micro_batch_out_once() -> None:
    recipe = recipes.load(Path(__file__).parents[2] / "recipes" / "slayer1b-1.09.yaml")
    for count in recipe.rank_counts:
        shares = [share(recipe, Ranks(rank, count)) for rank in range(count)]
        done = [place for mine in shares for place in range(mine.first, mine.first + mine.micro_batches)]
        assert done == list(range(recipe.batch.lanes * recipe.batch.accumulation))


@pytest.mark.parametrize(
    ("gpus", "nccl"),
    [
        ([["host", "a"], ["host", "b"]], True),
        ([["host", "a"], ["host", "a"]], False),  # more ranks than GPUs, or runtime.device with an index
        ([["one", "a"], ["other", "a"]], True),
        ([["host", "a"], ["host", "b"], ["host", "a"]], False),  # rank 1 alone has a GPU for itself
        ([["host", "a"], None], False),
        ([None, None], False),
    ],
)
def test_nccl_joins_the_ranks_only_where_each_has_a_gpu_of_its_own(gpus: list[list[str] | None], nccl: bool) -> None:
    assert apart(gpus) == nccl


def test_one_rank_owns_everything_and_sends_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    ranks = Ranks()
    exchange = Exchange({"a": parameter}, ranks, canonical=True)
    assert exchange.reduce()["a"] is parameter.grad
    exchange.spread()
    assert ranks.sent == 0
