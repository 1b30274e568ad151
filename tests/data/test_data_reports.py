"""A reviewer signs a report on overlap only about the very line and head, and sees licences and overlap before."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import approval
from assay.data import queue as queues
from assay.data.exposure import Intervals, union
from assay.data.queue import Queue
from assay.data.reports import by_licence, joined
from assay.data.shard import Shard
from assay.errors import InputError, Refused
from assay.files.digest import digest
from assay.ledger import keys

Answer = tuple[int, str, str]
Command = Callable[..., Answer]
MakeShard = Callable[..., Shard]
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda s: (s[0], s[0] + s[1])), max_size=6)


@given(SPANS, SPANS)
def test_intervals_count_what_they_cover(spans: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    held = union([Intervals(np.array([low]), np.array([high])) for low, high in spans])
    inside = {place for low, high in spans for place in range(low, high)}
    starts, stops = (np.array([span[side] for span in asked], np.int64) for side in (0, 1))
    assert held.covered(starts, stops).tolist() == [len(inside & set(range(low, high))) for low, high in asked]
    whole = joined([("x", low, high) for low, high in spans]).get("x", [])
    assert whole == list(zip(held.starts.tolist(), held.stops.tolist(), strict=True))


@pytest.fixture
def reviewed(tmp_path: Path, make_shard: MakeShard) -> Queue:
    """A queue whose one reviewer must see a report on overlap; its first slot's line lies in `line`."""
    shard = make_shard(tmp_path / "data" / "first")
    trust = {"reviewer": [keys.new_key(tmp_path / "key")], "overlap": "required"}
    path = tmp_path / "data" / "queue.jsonl"
    made = queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test", trust=trust)
    line = queues.propose(made, updates=5, parts=queues.parts_of(made, shard, 0, 3000), global_batch=4)
    (tmp_path / "line").write_bytes(line + b"\n")
    return made


def fact(answer: Answer, code: int = 0) -> dict[str, Any]:
    assert answer[0] == code, answer
    return dict(json.loads(answer[1]))


def test_a_demanded_report_is_shown_then_signed_with_its_key_figures(
    assay: Command, tmp_path: Path, reviewed: Queue
) -> None:
    approve = ("data", "approve", tmp_path / "line", "--queue", reviewed.path)
    sign, report = ("--key", tmp_path / "key"), tmp_path / "overlap.json"
    assert "demands a report on overlap" in fact(assay(*approve, *sign, "--json"), 3)["error"]
    shard = reviewed.path.with_name("first")
    ranges = (f"{shard}:0:1000", f"{shard}:1000:3000")  # the same tokens in other words than the line's
    made = fact(assay("data", "overlap", *ranges, "--queue", reviewed.path, "--exact", "--out", report, "--json"))
    assert made["total"]["fresh"] == {"documents": made["total"]["documents"], "tokens": 3000}

    seen = assay(*approve, "--overlap", report, "--show")
    assert (seen[0], "nothing is signed" in seen[1], "not stated" in seen[1]) == (0, True, True)
    assert not approval.folder(reviewed.path).exists()
    assert assay(*approve, "--overlap", report)[0] == assay(*approve, *sign, "--overlap", report, "--show")[0] == 2

    shown = assay(*approve, *sign, "--overlap", report)
    assert shown[0] == 0
    assert shown[1].index("overlap, in source positions") < shown[1].index("approved slot 0")
    [envelope] = approval.folder(reviewed.path).iterdir()
    predicate = json.loads(base64.b64decode(json.loads(envelope.read_bytes())["payload"]))["predicate"]
    assert predicate["overlap_report"] == digest(report.read_bytes())
    assert predicate["overlap"]["fresh"] == made["total"]["fresh"]
    assert predicate["overlap"]["not_compared"] == {"shards": 0, "unaccounted": 0, "declared": 0, "near": True}
    half = 3000 - sum(entry["tokens"] for entry in predicate["licences"] if entry["licence"] == "CC-BY")
    assert predicate["by_licence"] == [{"licence": "CC-BY", "tokens": 3000 - half}, *_unstated(half)]
    assert fact(assay("data", "append", reviewed.path, tmp_path / "line", "--json"))["slot"] == 0


def _unstated(tokens: int) -> list[dict[str, Any]]:
    return [{"licence": None, "tokens": tokens}] if tokens else []


def test_a_report_about_anything_else_is_refused(assay: Command, tmp_path: Path, reviewed: Queue) -> None:
    shard, number = reviewed.path.with_name("first"), 0
    other = queues.create(tmp_path / "data" / "other.jsonl", block=8, dtype="uint16", vocabulary=500, tokenizer="test")

    def answer(*words: object, change: Callable[[dict[str, Any]], object] = lambda record: None) -> Answer:
        nonlocal number
        number += 1
        report = tmp_path / f"report-{number}"
        made = assay("data", "overlap", *words, "--exact", "--out", report, "--json")
        assert made[0] == 0, made
        record = json.loads(report.read_bytes())
        change(record)
        report.write_text(json.dumps(record))
        key = ("--key", tmp_path / "key", "--json")
        return assay("data", "approve", tmp_path / "line", "--queue", reviewed.path, "--overlap", report, *key)

    good = (f"{shard}:0:3000", "--queue", reviewed.path)
    for words, said in (
        ((f"{shard}:0:2999", "--queue", reviewed.path), "has [0, 2,999), the line [0, 3,000)"),
        ((f"{shard}:0:3000", "--queue", other.path), "compares with another queue"),
    ):
        assert said in fact(answer(*words), 3)["error"]

    def headless(record: dict[str, Any]) -> None:
        record["queue"] = None

    assert "made without the queue" in fact(answer(*good, change=headless), 3)["error"]
    moved: Callable[[dict[str, Any]], object] = lambda record: record["queue"].update(head=digest(b"before"))  # noqa: E731
    assert "stands at" in fact(answer(*good, change=moved), 3)["error"]
    for change, said in (
        (lambda record: record.update(format="assay-overlap/2"), "'assay-overlap/1' is expected"),
        (lambda record: record.pop("total"), "the key 'total' is missing"),
        (lambda record: record.update(parts=[]), "parts is []"),
        (lambda record: record["not_compared"].update(shards=3), "not_compared.shards is 3"),
        (lambda record: record["total"]["near"].pop("tokens"), "the key 'tokens' is missing"),
        (lambda record: record.update(runs=["x"]), "runs is ['x']"),
    ):
        assert said in fact(answer(*good, change=change), 2)["error"]
    assert not approval.folder(reviewed.path).exists()


def test_an_approval_without_the_demanded_report_does_not_count(
    assay: Command, tmp_path: Path, reviewed: Queue
) -> None:
    """Somebody signs by other means what this software would not."""
    from assay.ledger import signing

    line = (tmp_path / "line").read_bytes().rstrip(b"\n")
    slot = queues.next_slot(reviewed, line, "line")
    facts = approval._facts(reviewed, slot)
    private = keys.load_key(tmp_path / "key")
    said = signing.statement("slot 0", slot.digest, approval.PREDICATE_TYPE, {"role": "reviewer", **facts})
    place = approval.folder(reviewed.path)
    place.mkdir(parents=True)
    (place / f"{slot.digest[7:]}.0123456789abcdef.json").write_bytes(signing.encode(signing.sign(said, private)))
    answer = fact(assay("data", "append", reviewed.path, tmp_path / "line", "--json"), 3)
    assert "it was signed without a report on overlap, which the queue demands" in answer["error"]


def test_a_line_that_calls_a_source_by_another_name_is_not_approved(tmp_path: Path, make_shard: MakeShard) -> None:
    shard = make_shard(tmp_path / "first")
    made = queues.create(tmp_path / "queue.jsonl", block=16, dtype="uint16", vocabulary=500, tokenizer="test")
    part = queues.Part(shard.sha256, "first", 0, 2000, "another")
    slot = queues.next_slot(made, queues.propose(made, updates=2, parts=[part], global_batch=4), "line")
    with pytest.raises(Refused, match="'another', but its manifest 'en-docs'"):
        approval.predicate(made, slot, {shard.sha256: shard})
    absent = approval.predicate(made, slot, {})
    assert absent["by_licence"] == [{"licence": None, "tokens": 2000}]
    assert absent["shards_not_here"] == [shard.sha256]


def test_licences_are_summed_up_most_first_and_unstated_last() -> None:
    entries = [{"licence": name, "tokens": n} for name, n in ((None, 90), ("B", 5), ("A", 5), ("C", 7), ("B", 1))]
    assert [(one["licence"], one["tokens"]) for one in by_licence(entries)] == [
        ("C", 7),
        ("B", 6),
        ("A", 5),
        (None, 90),
    ]


def test_a_queue_is_made_that_demands_reports(assay: Command, tmp_path: Path, make_shard: MakeShard) -> None:
    shard = make_shard(tmp_path / "first")
    queue, public = tmp_path / "queue.jsonl", keys.new_key(tmp_path / "key")
    words = ("data", "create", queue, "--shard", shard.path, "--block", 16, "--demand-overlap")
    assert assay(*words)[0] == 2
    assert "with a report on overlap" in assay(*words, "--reviewer", public)[1]
    assert approval.trust_of(queues.load(queue).trust, "queue") == approval.Trust((public,), 1, True)
    for wrong in ("demanded", True):
        with pytest.raises(InputError, match="overlap is"):
            approval.trust_of({"reviewer": [public], "overlap": wrong}, "queue")
