"""Batches made ahead are those of the order, one update ahead at most, and nothing of them outlives the feed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from small import GLOBAL_BATCH, Project

from assay.data import queue as queues
from assay.data.batches import Batches, row_digests
from assay.errors import DataError
from assay.train.batch import documents_of
from assay.train.feed import Feed

ALL = slice(0, GLOBAL_BATCH)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("feed") / "project", slots=((3, 2), (2, 2)))


@pytest.fixture
def batches(project: Project) -> Batches:
    return Batches(queues.load(project.path / "data" / "queue.jsonl"), [], 7, GLOBAL_BATCH)


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed(torch.device("cpu"), ALL, documents=False)
    yield made
    made.close()


def makers() -> list[str]:
    """The updates that threads are at work on, or have made and nobody took."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batch of update")]


def test_every_batch_is_that_of_the_order_whatever_was_made_ahead(batches: Batches, feed: Feed) -> None:
    for update in (0, 1, 2, 3, 4, 1, 2, 0):  # in turn, over the joint of the slots, and back as after a recovery
        batch, ids = feed.take(batches, update), batches.batch(update)
        assert batch.tokens.dtype == torch.int64
        np.testing.assert_array_equal(batch.tokens.numpy(), ids)
        assert batch.digests == row_digests(ids)
        assert batch.documents is None


def test_a_rank_gets_its_items_and_their_documents(batches: Batches) -> None:
    feed, mine = Feed(torch.device("cpu"), slice(2, 5), documents=True), slice(2, 5)
    for update in range(3):
        batch = feed.take(batches, update)
        np.testing.assert_array_equal(batch.tokens.numpy(), batches.batch(update)[mine])
        assert batch.documents is not None
        assert torch.equal(batch.documents, documents_of(batches, update)[mine])
    feed.close()


class Slow(Batches):
    """Batches whose reads wait to be let through, and which remember what was read."""

    def __init__(self, like: Batches) -> None:
        super().__init__(like.queue, [], like.seed, like.global_batch)
        self.gate, self.read = threading.Event(), list[int]()

    def batch(self, update: int, rows: slice = ALL) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        self.read.append(update)
        return super().batch(update, rows)


def test_one_update_is_made_ahead_and_none_of_a_slot_that_was_not_entered(batches: Batches, feed: Feed) -> None:
    slow = Slow(batches)
    feed.take(slow, 0)
    assert makers() == ["batch of update 1"]
    assert slow.read == [0], "it has not waited for the next one"
    slow.gate.set()
    feed.take(slow, 1)
    feed.take(slow, 2)
    assert slow.read == [0, 1, 2], "the first slot has three updates: nothing of the second was read"
    assert makers() == []
    feed.take(slow, 3)
    feed.close()
    assert slow.read == [0, 1, 2, 3, 4]
    assert makers() == []


def test_other_batches_than_those_made_ahead_are_read_anew(batches: Batches, feed: Feed) -> None:
    feed.take(batches, 0)
    grown = Slow(batches)  # as after an append: another object for the queue as it is now
    grown.gate.set()
    feed.take(grown, 1)
    assert grown.read[0] == 1


def test_a_bug_in_the_thread_is_raised_as_what_it_is(batches: Batches, feed: Feed) -> None:
    class Broken(Batches):
        def batch(self, update: int, rows: slice = ALL) -> np.ndarray:
            if update == 1:
                raise ValueError("cannot reshape array of size 7")
            return super().batch(update, rows)

    broken = Broken(batches.queue, [], batches.seed, batches.global_batch)
    feed.take(broken, 0)
    with pytest.raises(ValueError, match="cannot reshape array of size 7"):
        feed.take(broken, 1)


def test_a_fault_is_raised_with_the_batch_that_has_it(project: Project, batches: Batches, feed: Feed) -> None:
    class Damaged(Batches):
        def batch(self, update: int, rows: slice = ALL) -> np.ndarray:
            if update == 1:
                raise DataError("update 1 holds the id 99, outside the vocabulary")
            return super().batch(update, rows)

    damaged = Damaged(batches.queue, [], batches.seed, batches.global_batch)
    feed.take(damaged, 0)
    with pytest.raises(DataError, match="update 1 holds the id 99"):
        feed.take(damaged, 1)
    assert makers() == []
