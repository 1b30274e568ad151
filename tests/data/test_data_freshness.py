"""Fresh data: a strict queue's slots against a plain comparison of every token and every document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import checking, freshness
from assay.data import queue as queues
from assay.data.checking import Against
from assay.data.exposure import Consumed
from assay.data.queue import Part, Queue, Slot
from assay.data.shard import Shard, Source, write_shard
from assay.errors import Refused

BLOCK = 4


def part(shard: Shard, start: int, stop: int) -> Part:
    return Part(shard.sha256, None, start, stop, "s")


def slot(number: int, parts: list[Part], first: int = 0) -> Slot:
    return Slot(number, 1, 1, tuple(parts), sum(one.tokens for one in parts), None, f"line {number}", first)


def queue_of(slots: list[Slot], tokenizer: str = "t") -> Queue:
    return Queue(Path("queue.jsonl"), BLOCK, "uint16", 40, tokenizer, "base", "strict", None, b"{}", "header",
                 tuple(slots), b"")  # fmt: skip


@dataclass(frozen=True)
class World:
    """Three shards that share documents, some of them cut short or repeated."""

    shards: dict[str, Shard]
    texts: dict[str, list[list[int]]]

    def documents(self, ranges: list[Part]) -> set[tuple[str, int]]:
        """Addresses of the documents with a token in the ranges."""
        result = set()
        for one in ranges:
            begin = 0
            for number, text in enumerate(self.texts[one.shard]):
                if begin < one.stop and one.start < begin + len(text):
                    result.add((one.shard, number))
                begin += len(text)
        return result


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder, random = tmp_path_factory.mktemp("world"), np.random.default_rng(5)
    pool = [[*random.integers(1, 40, random.integers(0, 9)).tolist(), 0] for _ in range(60)]
    shards, texts = {}, {}
    for number in range(3):
        mine = [pool[index] for index in random.integers(0, len(pool), 25)]
        tokens = sum(map(len, mine))
        made = write_shard(folder / str(number), map(np.array, mine), vocabulary=40, tokenizer="t", end_of_text=0,
                           pool="base", sources=[Source("s", 0, tokens)])  # fmt: skip
        shards[made.sha256], texts[made.sha256] = made, mine
    return World(shards, texts)


@st.composite
def slots_of_parts(draw: st.DrawFn, world: World) -> list[Slot]:
    """One to three slots of one to three random ranges."""
    result = []
    for number in range(draw(st.integers(1, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            shard = world.shards[draw(st.sampled_from(sorted(world.shards)))]
            start = draw(st.integers(0, shard.tokens - 1))
            parts.append(part(shard, start, draw(st.integers(start + 1, min(start + 40, shard.tokens)))))
        result.append(slot(number, parts))
    return result


def repeats(world: World, slots: list[Slot]) -> bool:
    """Token by token and document by document: does the last slot hold what it or an earlier one held already?"""
    tokens = [(one.shard, at) for s in slots for one in s.parts for at in range(one.start, one.stop)]
    own = {(one.shard, at) for one in slots[-1].parts for at in range(one.start, one.stop)}
    if len(own) != slots[-1].tokens or any(tokens.count(one) > 1 for one in own):
        return True
    mine = world.documents(list(slots[-1].parts))
    before = world.documents([one for s in slots[:-1] for one in s.parts])
    return any(
        one != other and world.texts[one[0]][one[1]] == world.texts[other[0]][other[1]] != [0]
        for one in mine
        for other in mine | before
    )


@given(st.data())
def test_a_strict_slot_is_refused_exactly_when_it_repeats_something(world: World, data: st.DataObject) -> None:
    slots = data.draw(slots_of_parts(world))
    queue, last = queue_of(slots), slots[-1]
    against = Against(None, freshness.queued_before(queue, last, world.shards), [])
    try:
        checking.check(queue, last, world.shards, against, None, "the slot")
        refused = False
    except Refused:
        refused = True
    assert refused == repeats(world, slots)


def test_what_a_run_consumed_counts_by_the_targets_that_it_was_trained_on(world: World) -> None:
    (name, shard), *_ = world.shards.items()
    theirs = queue_of([slot(0, [part(shard, 10, 60)])])
    consumed = Consumed(theirs, 3, 2, 0, 1)  # two windows of four targets
    taken = freshness.consumed_before("run A", {}, consumed, world.shards)
    stream = theirs.slots[0].stream(3, BLOCK)
    targets = {10 + start + k for start in stream.starts(0, 2).tolist() for k in range(1, BLOCK + 1)}
    for at in range(shard.tokens - 1):
        one = slot(0, [part(shard, at, at + 1)])
        if at in targets:
            with pytest.raises(Refused, match=rf"repeats tokens \[{at}, {at + 1}\) of {name}, which run A took before"):
                freshness.refuse_ranges(one, [taken], "the slot")
        else:
            freshness.refuse_ranges(one, [taken], "the slot")


def test_a_document_under_another_address_is_named_with_both(tmp_path: Path, make_shard: Callable[..., Shard]) -> None:
    old = make_shard(tmp_path / "old", documents=30, seed=1)
    texts = np.split(old.ids, old.documents_end[:-1].astype(int))
    new = make_shard(tmp_path / "new", documents=30, seed=2)
    mixed = [*np.split(new.ids, new.documents_end[:-1].astype(int))[:7], texts[12]]
    tokens = sum(map(len, mixed))
    hiding = write_shard(tmp_path / "hiding", mixed, vocabulary=500, tokenizer="test", end_of_text=0, pool="base",
                         sources=[Source("s", 0, tokens)])  # fmt: skip
    shards = {one.sha256: one for one in (old, hiding)}
    slots = [slot(0, [part(old, 0, old.tokens)]), slot(1, [part(hiding, 0, hiding.tokens)], 1)]
    queue = queue_of(slots, "test")

    def check(shards: dict[str, Shard], tokenizer: str = "test") -> Against:
        taken = [*freshness.queued_before(queue, slots[1], shards)]
        against = Against(None, [*taken[:-1], _with(taken[-1], tokenizer)], [])
        checking.check(queue, slots[1], shards | {hiding.sha256: hiding}, against, None, "slot 1")
        return against

    words = f"document 7 of {hiding.sha256} equals document 12 of {old.sha256}, which slot 0 took before"
    with pytest.raises(Refused, match=words):
        check(shards)
    # Bytes that are not here, or ids of another tokenizer: not compared, and said.
    assert check({}).not_compared(queue) == [f"slot 0: shard {old.sha256} is not on this machine"]
    assert check(shards, "other").not_compared(queue) == ["slot 0: its ids are of tokenizer other"]


def _with(taken: freshness.Taken, tokenizer: str) -> freshness.Taken:
    return freshness.Taken(taken.name, taken.facts, tokenizer, taken.ranges, taken.shards)


def test_what_is_taken_up_in_one_queue_is_what_the_queue_itself_refuses(
    tmp_path: Path, make_shard: Callable[..., Shard]
) -> None:
    shard = make_shard(tmp_path / "shard")
    path = tmp_path / "queue.jsonl"
    queue = queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test", freshness="strict")
    line = queues.propose(queue, updates=1, parts=queues.parts_of(queue, shard, 0, 500), global_batch=2)
    queues.append(path, line)
    queue = queues.load(path)
    parts = queues.parts_of(queue, shard, 499, 900)
    with pytest.raises(Refused, match=r"tokens \[499, 500\)"):
        queues.propose(queue, updates=1, parts=parts, global_batch=2)
    again = slot(1, parts)
    with pytest.raises(Refused, match=r"tokens \[499, 500\) .* which slot 0 took before"):
        freshness.refuse_ranges(again, freshness.queued_before(queue, again, {}), "slot 1")
