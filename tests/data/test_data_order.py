"""The order is the mission's, bit for bit, and every epoch holds every window once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data.order import Stream, epoch_order, indices_digest, windows_available
from assay.errors import DataError, InputError

PACK = Stream(seed=20261109, slot=0, tokens=2_800_806_882, block=4096, epochs=1)
C01_TOKENS = 5_347_737_900


def test_the_order_of_1_08_comes_out() -> None:
    offset, windows, permutation = epoch_order(20261109, 0, 0, PACK.tokens, PACK.block)
    assert offset == 2_959
    assert windows == 683_790
    assert len(PACK.starts(0, 1709 * 256)) == 437_504
    assert permutation[:8].tolist() == [402131, 626699, 289375, 69024, 482708, 492553, 502848, 466216]
    assert PACK.starts(0, 8).tolist() == [offset + index * 4096 for index in permutation[:8].tolist()]


def test_golden_vectors_guard_numpys_permutation() -> None:
    """NumPy does not promise that `permutation` stays the same; these digests were taken with NumPy 2.x."""
    assert (
        indices_digest(PACK.epoch(0).permutation)
        == "sha256:f8c25c3ee54abe03ec3c8510370019d9125f308db185c59cdbacf846ac6dc3db"
    )
    later = Stream(seed=7, slot=3, tokens=100_000, block=64, epochs=3).epoch(2)
    assert (later.offset, later.windows) == (37, 1_561)
    assert (
        indices_digest(later.permutation) == "sha256:8ce1d9a505774373e07e0fc8079f08f2ec7a3045d6010fbafe07e017c0c73c43"
    )


def test_slot_c01_needs_and_has_the_stated_windows() -> None:
    needed = 5_000 * 256
    found = {windows_available(C01_TOKENS, 4096, offset) for offset in range(4096)}
    assert needed == 1_280_000
    assert found == {1_305_599, 1_305_600}
    assert needed * 4096 == 5_242_880_000


@given(
    seed=st.integers(0, 2**40),
    slot=st.integers(0, 9),
    tokens=st.integers(20, 900),
    block=st.integers(1, 19),
    epochs=st.integers(1, 4),
)
def test_every_epoch_holds_every_window_once(seed: int, slot: int, tokens: int, block: int, epochs: int) -> None:
    stream = Stream(seed, slot, tokens, block, epochs)
    starts = stream.starts(0, stream.capacity())
    reached = 0
    for epoch in range(epochs):
        generator = np.random.default_rng([seed, slot, epoch])
        offset = int(generator.integers(0, block))
        windows = (tokens - 1 - offset) // block
        whole = starts[reached : reached + windows]
        assert whole.tolist() == (offset + generator.permutation(windows) * block).tolist()
        assert sorted(whole.tolist()) == [offset + w * block for w in range(windows)]
        assert not windows or int(whole.max()) + block < tokens
        reached += windows
    assert reached == len(starts)
    assert stream.least() <= reached <= stream.most()


@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_any_stretch_is_reached_directly(seed: int, cuts: list[int]) -> None:
    stream = Stream(seed, 1, 400, 9, 3)
    whole = stream.starts(0, stream.capacity()).tolist()
    ends = [0, *sorted(cuts), len(whole)]
    pieces = [stream.starts(low, high) for low, high in itertools.pairwise(ends)]
    assert np.concatenate(pieces).tolist() == whole


def test_a_slot_that_ends_says_by_how_much() -> None:
    stream = Stream(1, 0, 1000, 10, 2)
    held = stream.capacity()
    assert stream.holds(held)
    assert not stream.holds(held + 1)
    with pytest.raises(DataError, match=rf"holds {held} windows .* 3 windows short"):
        stream.starts(held, held + 3)
    with pytest.raises(DataError, match="short"):
        Stream(1, 0, 5, 10, 10**9).starts(0, 1)  # no window at all: known at once, whatever the epochs
    with pytest.raises(InputError, match="data seed is -1"):
        Stream(-1, 0, 1000, 10, 2)
