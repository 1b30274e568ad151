"""Finding equal 128-bit digests among many: a sorted table that is asked row by row.

Memory is 24 bytes a row. It knows nothing of what the digests are of.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]


class Lookup:
    """Digests [n, 2], uint64, with their row numbers; rows may repeat."""

    def __init__(self, digests: Digests) -> None:
        self._order = np.lexsort((digests[:, 1], digests[:, 0]))
        self._high = digests[self._order, 0]
        self._low = digests[self._order, 1]
        # How often one first half occurs at most: as often as its digest, unless two digests share 64 bits.
        edges = np.flatnonzero(np.concatenate([[True], self._high[1:] != self._high[:-1], [True]]))
        self._most = int(np.diff(edges).max(initial=0)) if len(digests) else 0

    def find(self, digests: Digests) -> Iterator[tuple[int, int]]:
        """(row of `digests`, a row of the table that equals it), each row of `digests` once, ascending."""
        found = np.full(len(digests), -1, dtype=np.int64)
        place = np.searchsorted(self._high, digests[:, 0])
        for step in range(self._most):
            at = np.minimum(place + step, len(self._high) - 1)
            equal = (self._high[at] == digests[:, 0]) & (self._low[at] == digests[:, 1]) & (found < 0)
            found[equal] = self._order[at[equal]]
            if not bool((self._high[at] == digests[:, 0]).any()):
                break
        for row in np.flatnonzero(found >= 0).tolist():
            yield row, int(found[row])

    def repeats(self) -> Iterator[tuple[int, int]]:
        """(row, later row) of equal digests beside each other in the table."""
        same = (self._high[1:] == self._high[:-1]) & (self._low[1:] == self._low[:-1])
        for at in np.flatnonzero(same).tolist():
            first, second = sorted((int(self._order[at]), int(self._order[at + 1])))
            yield first, second
