"""Equal digests are found wherever they stand, and none in an empty table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from assay.data.lookup import Digests, Lookup

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12)


def digests(pairs: list[tuple[int, int]]) -> Digests:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


@given(PAIRS, PAIRS)
def test_every_digest_that_stands_in_the_table_is_found_once(
    table: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    found = list(Lookup(digests(table)).find(digests(asked)))
    assert [row for row, _ in found] == [row for row, pair in enumerate(asked) if pair in table]
    assert all(table[own] == asked[row] for row, own in found)
