"""What a run and its ancestors consumed is counted once each, and recomputed updates are told apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.cli.main import main
from assay.data import queue as queues
from assay.data.exposure import Exposure, already, bound_of, parse_declared
from assay.data.shard import Source, write_shard
from assay.errors import InputError
from assay.files.digest import digest
from assay.recipe import load as recipes
from assay.run.consumption import ancestry, consumption
from assay.run.folder import RunFolder, create

PER_UPDATE = 8 * 16
RECIPE = """
name: NAME
start: START
model: {layers: 1, width: 16, heads: 2, kv_heads: 2, vocabulary: 500, block: 16, ffn: 32,
        norm_eps: 1.0e-6, rope_theta: 10000, qk_norm: true, value_residual: true,
        attention_bias: false, logit_cap: 0, tie_embeddings: true, document_mask: false}
data: {queue: data/queue.jsonl, roots: [data], seed: 1}
batch: {micro: 8, accumulation: 1, lanes: 1}
optimizer: {kind: adamw, lr: 6.0e-4, weight_decay: 0.1, betas: [0.9, 0.95], eps: 1.0e-8, grad_clip: 1.0}
schedule: {kind: constant, updates: 20, warmup: 2, min_lr: 0}
seed: 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with a shard and a queue of 20 updates of 8 windows of 16."""
    documents = [np.append(np.arange(1, 300), 0) for _ in range(10)]
    sources = [Source("en-docs", 0, 1_000, "en"), Source("pl-docs", 1_000, 3_000, "pl")]
    about: dict[str, Any] = {"vocabulary": 500, "tokenizer": "test", "end_of_text": 0, "pool": "base"}
    shard = write_shard(tmp_path / "data" / "shard", documents, sources=sources, **about)
    made = queues.create(tmp_path / "data" / "queue.jsonl", block=16, dtype="uint16", vocabulary=500, tokenizer="test")
    parts = queues.parts_of(made, shard)
    queues.append(made.path, queues.propose(made, updates=20, parts=parts, global_batch=8))
    return tmp_path


def started(project: Path, name: str, start: str, segments: list[tuple[int, int | None, range]]) -> RunFolder:
    """A run folder as trainers leave it: (first step, step at the end or None after a kill, updates in the metrics)."""
    recipe = project / f"{name}.yaml"
    recipe.write_text(RECIPE.replace("NAME", name).replace("START", start))
    run = create(project / name, recipe, recipes.load(recipe))
    ledger = run.open_ledger()
    lines = []
    for number, (first, last, updates) in enumerate(segments, 1):
        kind = "start" if number == 1 else "recovery"
        ledger.append(kind, {"segment": number, "mode": "test", "step": first, "evidence": {}})
        same = {"segment": number, "loss": 1.0, "time": "2026-11-30T10:00:00Z", "order_digest": ""}
        lines += [json.dumps({"update": update, **same}) + "\n" for update in updates]
        if last is not None:
            ledger.append("interrupted", {"segment": number, "step": last, "cause": "signal"})
    run.metrics.write_text("".join(lines))
    return run


def test_a_run_consumed_what_it_reached_and_recomputed_the_rest(project: Path) -> None:
    run = started(project, "killed", "scratch", [(0, None, range(7)), (4, 11, range(4, 11))])
    found = consumption(run)
    assert (found.consumed.first, found.consumed.last) == (0, 11)
    assert found.recomputed == 3 * PER_UPDATE
    early = consumption(run, until=5)
    assert (early.consumed.last, early.recomputed) == (5, 1 * PER_UPDATE)


def test_a_run_that_never_trained_consumed_nothing(project: Path) -> None:
    found = consumption(started(project, "new", "scratch", []))
    assert (found.consumed.first, found.consumed.last, found.recomputed) == (0, 0, 0)


def test_a_whole_ancestry_is_one_union(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest = started(project, "oldest", "{init_from: {path: elsewhere/weights}}", [(0, 9, range(9))])
    (oldest.weights / "step-000006").mkdir()
    (oldest.weights / "step-000006" / "manifest.json").write_text('{"step": 6}')
    started(project, "middle", "{init_from: {path: oldest/weights/step-000006}}", [(0, 12, range(12))])
    newest = started(project, "newest", "{continue_from: {path: middle, step: 10}}", [(10, 15, range(10, 15))])
    found, unaccounted = ancestry(newest)
    assert [(a.name, a.consumed.first, a.consumed.last) for a in found] == [("middle", 0, 10), ("oldest", 0, 6)]
    assert unaccounted == ["elsewhere/weights"]

    (project / "card.md").write_bytes(b"1,000 positions at least")
    term = f"card:at-least:1_000:{project / 'card.md'}"
    words = ["assay", "data", "exposure", str(newest.path), "--ancestry", "--declared", term, "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["positions"] == (5 + 10 + 6) * PER_UPDATE
    assert (facts["distinct"], facts["repeated"]) == (15 * PER_UPDATE, 6 * PER_UPDATE)  # the same slot, seed and order
    assert facts["positions_with_declared"] == facts["positions"] + 1_000
    assert set(facts["by_language"]) == {"en", "pl"}
    assert facts["unaccounted"] == ["elsewhere/weights"]
    evidence = digest(b"1,000 positions at least")
    assert facts["declared"] == [{"name": "card", "bound": "at least", "positions": 1_000, "evidence": evidence}]
    assert facts["bound"] == "at least"
    # The newest run did updates 10 to 15 of an order whose first 10 its parent did: nothing twice.
    assert {key: facts["already"][key] for key in ("distinct", "in_ancestors")} == {
        "distinct": 5 * PER_UPDATE,
        "in_ancestors": 0,
    }
    assert [(one["name"], one["positions"]) for one in facts["ancestors"]] == [
        ("middle", 10 * PER_UPDATE),
        ("oldest", 6 * PER_UPDATE),
    ]

    words = [
        "assay",
        "data",
        "overlap",
        str(project / "data" / "shard"),
        "--run",
        str(newest.path),
        "--exact",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["first"], one["last"]) for one in found["runs"]] == [
        ("newest", 10, 15),
        ("middle", 0, 10),
        ("oldest", 0, 6),
    ]
    assert found["runs"][0]["ledger"] == digest(newest.ledger.read_bytes())
    assert found["not_compared"]["unaccounted"] == ["elsewhere/weights"]
    assert found["parts"][0]["same_range_consumed"] == found["earlier"]["positions_consumed"] == facts["distinct"]
    assert found["total"]["exact"]["documents"] == 10


def test_what_a_run_and_its_ancestor_both_read_is_counted_as_already(project: Path) -> None:
    oldest = started(project, "oldest", "scratch", [(0, 9, range(9))])
    (oldest.weights / "step-000006").mkdir()
    (oldest.weights / "step-000006" / "manifest.json").write_text('{"step": 6}')
    newest = started(project, "newest", "{init_from: {path: oldest/weights/step-000006}}", [(0, 4, range(4))])
    mine, theirs = consumption(newest).consumed, ancestry(newest)[0][0].consumed
    found = already(Exposure([mine]), Exposure([theirs]), Exposure([mine, theirs]))
    assert (found["distinct"], found["in_ancestors"]) == (4 * PER_UPDATE, 4 * PER_UPDATE)  # one slot, seed and order
    assert sum(each["in_ancestors"] for each in found["by_source"].values()) == 4 * PER_UPDATE


def test_a_declared_term_states_its_bound_and_evidence(tmp_path: Path) -> None:
    (tmp_path / "card").write_bytes(b"card")
    exact = parse_declared(f"1.07:exact:14520680448:{tmp_path / 'card'}")
    assert exact.facts() == {"name": "1.07", "bound": "exact", "positions": 14520680448, "evidence": digest(b"card")}
    least, most = parse_declared(f"a:at-least:1:{digest(b'x')}"), parse_declared(f"b:at most:2:{digest(b'x')}")
    assert least.evidence == digest(b"x")
    for text in ("1.07:14520680448", "a:exact:1", "a:about:1:card", "a:exact:x:card", ":exact:1:card", "a:exact:1:"):
        with pytest.raises(InputError, match="NAME:BOUND:POSITIONS:EVIDENCE is expected"):
            parse_declared(text)
    with pytest.raises(InputError, match="the evidence of --declared is expected there"):
        parse_declared("a:exact:1:nowhere.md")

    for terms, open_ends, bound in (
        ([], [], "exact"),
        ([exact], [], "exact"),
        ([exact], ["1.07"], "exact"),  # the term of that name stands for it
        ([exact], ["1.08"], "at least"),
        ([exact, least], [], "at least"),
        ([most], [], "at most"),
        ([most], ["1.08"], None),
        ([most, least], [], None),
    ):
        assert bound_of(terms, open_ends) == bound


def test_a_run_cannot_be_its_own_ancestor(project: Path) -> None:
    run = started(project, "loop", "{continue_from: {path: loop, step: 3}}", [(3, 5, range(3, 5))])
    with pytest.raises(InputError, match="its own ancestor"):
        ancestry(run)


def test_an_ancestor_without_its_queue_is_named_and_its_own_ancestors_are_looked_for(project: Path) -> None:
    oldest = started(project, "oldest", "{init_from: {path: elsewhere/weights}}", [(0, 9, range(9))])
    checkpoint = oldest.weights / "step-000006"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text('{"step": 6}')
    newest = started(project, "newest", "{init_from: {path: oldest/weights/step-000006}}", [(0, 2, range(2))])
    queue = project / "data" / "queue.jsonl"
    queue.rename(project / "away")
    assert ancestry(newest) == ([], ["oldest/weights/step-000006", "elsewhere/weights"])
    (project / "away").rename(queue)
    assert [one.name for one in ancestry(newest)[0]] == ["oldest"]
    # Weights of one run in the folder of another say nothing about that other one.
    (checkpoint / "manifest.json").write_text('{"step": 6, "run_id": "another"}')
    assert ancestry(newest) == ([], ["oldest/weights/step-000006"])
