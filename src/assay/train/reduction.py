"""The canonical reduction: lanes joined by a balanced binary tree, whatever the number of ranks.

A lane's gradient is the running float32 sum of its micro-batches in ascending order; lanes are
joined as ((0+1)+(2+3))+…, first those of one rank, then the ranks' sums at the owner of each whole
tensor, so that the bits do not depend on how many ranks share the lanes out. With `fast` the sums
are the library's all-reduce and nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from assay.plan.owners import owners
from assay.recipe.schema import Recipe
from assay.train.ranks import Ranks

BUCKET = 1 << 26  # elements that are exchanged at one time, unless one tensor is larger
_Part = TypeVar("_Part", Tensor, float)
ALIGNED = 128  # elements: every tensor in a buffer begins where a fresh tensor of a device could (512 bytes)


@dataclass(frozen=True)
class Share:
    """What one rank computes of an update: `lanes` of `accumulation` micro-batches, from micro-batch `first` on."""

    lanes: int
    accumulation: int
    first: int

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the rank computes."""
        return self.lanes * self.accumulation


def share(recipe: Recipe, ranks: Ranks) -> Share:
    """The rank's part of every update. `fast` knows no lanes: each rank runs its micro-batches in one sum."""
    batch = recipe.batch
    assert ranks.size in recipe.rank_counts, "pre-flight refuses other numbers of ranks"
    if recipe.reduction == "fast":
        count = batch.lanes * batch.accumulation // ranks.size
        return Share(1, count, ranks.rank * count)
    lanes = batch.lanes // ranks.size
    return Share(lanes, batch.accumulation, ranks.rank * lanes * batch.accumulation)


def tree(parts: Sequence[_Part]) -> _Part:
    """The sum as ((0+1)+(2+3))+…; of a number that is no power of two the rest is carried upwards."""
    level = list(parts)
    while len(level) > 1:
        joined = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = joined + level[2 * len(joined) :]
    return level[0]


class LaneSums:
    """Joins the gradients of lanes 0, 1, 2, … of one rank as they come; a binary counter of partial sums."""

    def __init__(self, parameters: list[nn.Parameter], lanes: int) -> None:
        """`lanes` is a power of two (the recipe's schema refuses others)."""
        self._parameters, self._lanes = parameters, lanes
        self._partial: list[tuple[int, list[Tensor]]] = []

    def close_lane(self) -> None:
        """Take the finished lane's gradients away from the parameters and join what can be joined."""
        if self._lanes == 1:
            return  # the one lane's gradient is the rank's
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


class Exchange:
    """Carries gradients to the owners of whole tensors and updated parameters back to every rank.

    With several ranks the parameters are laid out in one buffer for each owner, so that they are sent
    without a copy. With one rank it owns everything and sends nothing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, canonical: bool) -> None:
        self._parameters, self._ranks, self._canonical = parameters, ranks, canonical
        self.owner = owners({name: parameter.numel() for name, parameter in parameters.items()}, ranks.size)
        self.owned = [name for name in parameters if self.owner[name] == ranks.rank]
        self._laid_out: list[Tensor] = []
        self._buckets: list[list[str]] = []
        if ranks.size > 1:
            self._lay_out()
            self._fill_buckets()

    @torch.no_grad()
    def _lay_out(self) -> None:
        for rank in range(self._ranks.size):
            names = [name for name in self._parameters if self.owner[name] == rank]
            some = next(iter(self._parameters.values()))
            size = sum(_room(self._parameters[name]) for name in names)
            buffer = torch.zeros(size, dtype=some.dtype, device=some.device)
            start = 0
            for name in names:
                parameter = self._parameters[name]
                place = buffer[start : start + parameter.numel()].view(parameter.shape)
                place.copy_(parameter)
                parameter.data = place
                start += _room(parameter)
            self._laid_out.append(buffer)

    def _fill_buckets(self) -> None:
        """Tensors in the order of the backward pass, so many at a time that the buffers stay small."""
        filled = BUCKET
        for name in reversed(list(self._parameters)):
            size = _room(self._parameters[name])
            if filled + size > BUCKET:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(name)
            filled += size

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """The update's gradients of the tensors that this rank owns; every other gradient is given up."""
        for names in self._buckets:
            self._reduce_bucket(sorted(names, key=lambda name: self.owner[name]))
        result = {}
        for name in self.owned:
            gradient = self._parameters[name].grad
            assert gradient is not None, "every parameter takes part in every update"
            result[name] = gradient
        return result

    def _reduce_bucket(self, names: list[str]) -> None:
        """Exchange one bucket; `names` are sorted by owner."""
        ranks, first = self._ranks, self._parameters[names[0]]
        splits = [0] * ranks.size
        for name in names:
            splits[self.owner[name]] += _room(self._parameters[name])
        send = torch.empty(sum(splits), dtype=first.dtype, device=first.device)
        start = 0
        for name in names:
            parameter = self._parameters[name]
            assert parameter.grad is not None, "every parameter takes part in every update"
            send[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
            start += _room(parameter)
        mine = splits[ranks.rank]
        if self._canonical:
            rows = list(ranks.exchange(send, splits, mine))
            while len(rows) > 2:
                rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
            total = rows[0] + rows[1]  # in memory of its own: the pieces of the others are let go
        else:
            ranks.add_up(send)
            begin = sum(splits[: ranks.rank])
            total = send[begin : begin + mine].clone()
        start = 0
        for name in names:
            parameter = self._parameters[name]
            if self.owner[name] == ranks.rank:
                parameter.grad = total[start : start + parameter.numel()].view(parameter.shape)
                start += _room(parameter)

    @torch.no_grad()
    def spread(self) -> None:
        """After the optimizer's step every rank gets the tensors that others own."""
        for rank, buffer in enumerate(self._laid_out):
            if len(buffer):
                self._ranks.spread(buffer, rank)


def _room(tensor: Tensor) -> int:
    """Elements that a tensor takes in a buffer."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED
