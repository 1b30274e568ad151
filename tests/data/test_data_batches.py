"""A batch is a function of (queue, seed, update) alone, and its digest proves two trainers equal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.data import batches as reading
from assay.data import queue as queues
from assay.data.batches import Batches, joined_digest, order_next, row_digests, windows_digest
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard
from assay.errors import DataError, InputError
from assay.files.digest import PREFIX, raw

SEED, BATCH = 3, 8
MakeShard = Callable[..., Shard]


@pytest.fixture
def opened(queue: Queue) -> Batches:
    return Batches(queue, [], SEED, BATCH)


def expected_windows(opened: Batches, slot: Slot) -> list[list[int]]:
    """All windows of a slot in order, straight from the mission's words."""
    stream = np.concatenate([opened.shards[p.shard].ids[p.start : p.stop] for p in slot.parts]).tolist()
    block = opened.queue.block
    windows = []
    for epoch in range(slot.epochs):
        generator = np.random.default_rng([SEED, slot.number, epoch])
        offset = int(generator.integers(0, block))
        for window in generator.permutation((len(stream) - 1 - offset) // block).tolist():
            start = offset + window * block
            windows.append(stream[start : start + block + 1])
    return windows


def test_every_batch_is_the_one_that_the_order_says(opened: Batches) -> None:
    for slot in opened.queue.slots:
        windows = expected_windows(opened, slot)
        for k in range(slot.updates):
            batch = opened.batch(slot.first_update + k)
            assert batch.tolist() == windows[k * BATCH : (k + 1) * BATCH]
            assert (batch.shape, batch.dtype) == ((BATCH, opened.queue.block + 1), np.dtype("<u2"))


def test_some_window_crosses_a_joint_and_some_update_an_epoch(opened: Batches) -> None:
    """The data of the test above is worth something only if it holds the hard cases."""
    last = opened.queue.slots[2]
    joints = np.cumsum([part.tokens for part in last.parts])[:-1]
    starts = np.concatenate([opened.windows(update)[1] for update in range(last.first_update, last.end_update)])
    assert any(((starts < joint) & (starts + 16 >= joint)).any() for joint in joints)
    twice = opened.queue.slots[1]
    windows = twice.stream(SEED, 16).size(0)[1]
    assert windows % BATCH
    assert windows < twice.updates * BATCH


def test_the_digests_are_the_contracts(opened: Batches) -> None:
    order = hashlib.sha256(opened.queue.path.read_bytes().splitlines()[0] + b"\n" + b"3").digest()
    assert opened.order_start() == order
    for update in range(3):
        rows = [np.array(row, dtype="<u2").tobytes() for row in opened.batch(update).tolist()]
        batch = hashlib.sha256(b"".join(hashlib.sha256(row).digest() for row in rows)).hexdigest()
        assert opened.digest(update) == PREFIX + batch
        following = hashlib.sha256(order + bytes.fromhex(batch)).digest()
        order = order_next(order, opened.digest(update))
        assert order == following


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_and_ranks_do_not_change_the_digest(opened: Batches, accumulation: int, ranks: int) -> None:
    for update in reading.boundary_updates(opened.queue):
        batch = opened.batch(update)
        micro = np.split(batch, accumulation)
        assert joined_digest(b"".join(map(row_digests, micro))) == opened.digest(update)
        assert joined_digest(b"".join(map(row_digests, np.split(batch, ranks)))) == opened.digest(update)


def test_the_digest_is_over_little_endian_bytes_whatever_the_memory_layout(opened: Batches) -> None:
    batch = opened.batch(0)
    assert windows_digest(batch.astype(">u2")) == windows_digest(np.asfortranarray(batch)) == opened.digest(0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(updates=st.lists(st.integers(0, 49), min_size=1, max_size=6))
def test_any_update_read_in_any_order_by_anybody_is_the_same(queue: Queue, updates: list[int]) -> None:
    fresh = Batches(queues.load(queue.path), [], SEED, BATCH)
    kept = Batches(queue, [], SEED, BATCH)
    for update in updates:
        assert kept.digest(update) == fresh.digest(update)


def test_appending_changes_no_earlier_batch(opened: Batches) -> None:
    before = [opened.digest(update) for update in range(opened.updates)]
    queue = opened.queue
    queues.append(queue.path, queues.propose(queue, updates=5, parts=queue.slots[0].parts, global_batch=BATCH))
    longer = Batches(queues.load(queue.path), [], SEED, BATCH)
    assert longer.updates == 55
    assert [longer.digest(update) for update in range(50)] == before
    assert longer.digest(50) not in before


def test_behind_the_last_slot_the_shortfall_is_stated(opened: Batches) -> None:
    assert opened.digest(opened.updates - 1)
    with pytest.raises(DataError, match=r"update 54 needs slot 3.*hold 50 updates; 5 more updates"):
        opened.batch(54)


def test_a_slot_too_short_for_this_global_batch_is_refused_at_opening(queue: Queue) -> None:
    with pytest.raises(DataError, match=r"slot 0 is too short: 20 updates of 64 need 1,280 windows"):
        Batches(queue, [], SEED, 64)


def test_missing_shards_are_named_with_the_places_searched(queue: Queue, shard: Shard, tmp_path: Path) -> None:
    shard.path.rename(tmp_path / "gone")
    with pytest.raises(
        DataError, match=rf"1 shard\(s\) are not on this machine, the first is {shard.sha256}.*roots-a"
    ) as fault:
        Batches(queue, [queue.path.parent, tmp_path / "roots-a", tmp_path / "x" / ".." / "roots-a"], SEED, BATCH)
    assert f"under {queue.path.parent}, {tmp_path / 'roots-a'}: bring" in str(fault.value), "each folder once"


def test_the_data_of_slots_that_are_done_may_be_gone(tmp_path: Path, make_shard: MakeShard) -> None:
    old, new = make_shard(tmp_path / "old"), make_shard(tmp_path / "new", seed=1)
    path = tmp_path / "q.jsonl"
    queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test")
    for shard in (old, new):
        made = queues.load(path)
        queues.append(path, queues.propose(made, updates=4, parts=queues.parts_of(made, shard), global_batch=BATCH))
    made = queues.load(path)
    before = Batches(made, [], SEED, BATCH).digest(4)
    old.path.rename(tmp_path.parent / f"{tmp_path.name}-gone")
    later = Batches(made, [], SEED, BATCH, first_update=4)
    assert later.digest(4) == before
    with pytest.raises(DataError, match=f"update 3 reads shard {old.sha256}"):
        later.batch(3)
    with pytest.raises(DataError, match="are not on this machine"):
        Batches(made, [], SEED, BATCH, first_update=3)


def test_a_shard_cut_under_the_queue_is_refused_before_mapping(queue: Queue, shard: Shard) -> None:
    os.truncate(shard.path / "tokens.bin", 100)
    with pytest.raises(DataError, match="has 100 bytes, but the manifest states"):
        Batches(queue, [], SEED, BATCH)


def test_an_id_outside_the_vocabulary_is_found_when_read(opened: Batches, shard: Shard) -> None:
    damaged = np.full(shard.tokens, 500, dtype="<u2")
    (shard.path / "tokens.bin").write_bytes(damaged.tobytes())
    with pytest.raises(DataError, match="holds the id 500, outside the vocabulary of 500"):
        Batches(opened.queue, [], SEED, BATCH).batch(0)


def test_uint32_shards_are_read_in_their_own_dtype(tmp_path: Path, make_shard: MakeShard) -> None:
    wide = make_shard(tmp_path / "wide", vocabulary=65_537)
    made = queues.create(tmp_path / "q.jsonl", block=16, dtype="uint32", vocabulary=65_537, tokenizer="test")
    queues.append(made.path, queues.propose(made, updates=2, parts=queues.parts_of(made, wide), global_batch=BATCH))
    opened = Batches(queues.load(made.path), [], SEED, BATCH)
    assert opened.batch(1).dtype == np.dtype("<u4")
    assert opened.batch(1).tolist() == expected_windows(opened, opened.queue.slots[0])[BATCH : 2 * BATCH]


def test_both_sides_of_every_slot_boundary_are_compared_by_default(queue: Queue) -> None:
    assert reading.boundary_updates(queue) == [0, 19, 20, 28, 29, 49]


def test_differences_are_named_by_update(opened: Batches, tmp_path: Path) -> None:
    mine = {update: opened.digest(update) for update in (0, 5, 9)}
    file = tmp_path / "expected.json"
    file.write_text(json.dumps({"batches": [{"update": u, "sha256": mine[u]} for u in (0, 5)]}))
    assert reading.compare(mine, reading.read_expected(file)) == [{"update": 9, "sha256": mine[9], "expected": None}]
    other = {**mine, 5: PREFIX + hashlib.sha256(raw(mine[5])).hexdigest()}
    assert [entry["update"] for entry in reading.compare(mine, other)] == [5]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"batches": [{"update": 1}]}', '{"batches": [{"update": -1}]}'])
def test_a_file_that_data_batches_did_not_print_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(InputError, match=r"e\.json"):
        reading.read_expected(tmp_path / "e.json")


def test_validation_takes_windows_from_the_beginning_at_offset_0(shard: Shard) -> None:
    windows = reading.validation_windows(shard, 16, 1, 3)
    assert windows.tolist() == [shard.ids[16:33].tolist(), shard.ids[32:49].tolist()]
    held = (shard.tokens - 1) // 16
    assert len(reading.validation_windows(shard, 16, 0, held)) == held
    with pytest.raises(DataError, match=f"holds {held} windows"):
        reading.validation_windows(shard, 16, 0, held + 1)
