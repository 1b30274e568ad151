"""The canonical reduction on one process: lanes joined by a balanced binary tree.

A lane's gradient is the running float32 sum of its micro-batches in ascending order; lanes are
joined as ((0+1)+(2+3))+…, so that the bits do not depend on how many ranks share the lanes out.
At most log2(lanes) partial sums are held. Exchange between ranks is not here.
"""

from __future__ import annotations

from torch import Tensor, nn


class LaneSums:
    """Joins the gradients of lanes 0, 1, 2, … as they come; a binary counter of partial sums."""

    def __init__(self, parameters: list[nn.Parameter], lanes: int) -> None:
        """`lanes` is a power of two (the recipe's schema refuses others)."""
        self._parameters, self._lanes = parameters, lanes
        self._partial: list[tuple[int, list[Tensor]]] = []

    def close_lane(self) -> None:
        """Take the finished lane's gradients away from the parameters and join what can be joined."""
        if self._lanes == 1:
            return  # the one lane's gradient is the update's
        gradients = []
        for parameter in self._parameters:
            assert parameter.grad is not None, "every parameter takes part in every lane"
            gradients.append(parameter.grad)
            parameter.grad = None
        level = 0
        while self._partial and self._partial[-1][0] == level:
            _, left = self._partial.pop()
            for mine, theirs in zip(left, gradients, strict=True):
                mine.add_(theirs)
            gradients, level = left, level + 1
        self._partial.append((level, gradients))

    def finish(self) -> None:
        """Give the joined gradient back to the parameters; all lanes must have been closed."""
        if self._lanes == 1:
            return
        ((level, gradients),) = self._partial
        assert 1 << level == self._lanes, "all lanes must be closed before the update"
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._partial.clear()
