"""The canonical reduction: lanes joined by a balanced binary tree, whatever the number of ranks.

A lane's gradient is the running float32 sum of its micro-batches in ascending order; lanes are
joined as ((0+1)+(2+3))+…, first those of one rank, then the ranks' sums at the owner of each whole
tensor, so that the bits do not depend on how many ranks share the lanes out. With `fast` the sums
are the library's all-reduce and nothing is promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from assay.plan.owners import BUCKET, owners
from assay.recipe.schema import Recipe
from assay.train.optimizers import tensor_norms
from assay.train.ranks import Ranks

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

    def items(self, micro: int) -> slice:
        """The sequences of an update that the rank computes, `micro` to a micro-batch."""
        return slice(self.first * micro, (self.first + self.micro_batches) * micro)


def share(recipe: Recipe, ranks: Ranks) -> Share:
    """The rank's part of every update. `fast` knows no lanes: each rank runs its micro-batches in one sum."""
    batch = recipe.batch
    assert ranks.size in recipe.rank_counts, "pre-flight and the worker refuse other numbers of ranks"
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


@dataclass(frozen=True)
class Owned:
    """The whole tensors that this rank owns, by name: what its optimizers work on."""

    parameters: Mapping[str, nn.Parameter]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As a model names them."""
        yield from self.parameters.items()


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of the tensor `name`, and where they lie in what one step sends."""

    name: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class _Step:
    """One exchange: a stretch of each owner's tensors. `lengths` by owner; `last` are tensors that are done with it."""

    begin: int
    lengths: list[int]
    pieces: list[_Piece]
    last: list[str]


class Exchange:
    """Carries gradients to the owners of whole tensors and updated parameters back to every rank.

    With several ranks the parameters are laid out in one buffer for each owner, so that they are sent
    without a copy. Gradients go a stretch of each owner's buffer at a time, so that little more than the
    gradients themselves is held. One rank owns everything and sends nothing.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, lanes: int = 1, canonical: bool = True
    ) -> None:
        """`lanes` are those of this rank; without `canonical` the sum over the ranks is the library's."""
        self._parameters, self._ranks, self._canonical = parameters, ranks, canonical
        self.owner = owners({name: parameter.numel() for name, parameter in parameters.items()}, ranks.size)
        self._names = [[name for name in parameters if self.owner[name] == rank] for rank in range(ranks.size)]
        self._laid_out: list[Tensor] = []
        self._steps: list[_Step] = []
        if ranks.size > 1:
            self._lay_out()
            self._steps = self._plan()
        self._lanes = LaneSums(list(parameters.values()), lanes)
        self._squares: list[Tensor] | None = None
        self.owned = Owned({name: parameters[name] for name in self._names[ranks.rank]})

    def clear(self, norms: bool = False) -> None:
        """Before an update: no gradient anywhere. With `norms` the update's lanes are measured, see `lane_squares`."""
        self._squares = [] if norms else None
        for parameter in self._parameters.values():
            parameter.grad = None

    def before_backward(self, ends_lane: bool) -> None:
        """Nothing flows before all lanes are closed."""

    def close_lane(self) -> None:
        """The lane's last micro-batch is done."""
        if self._squares is not None:
            gradients = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
            self._squares.append(squares(tensor_norms(gradients)))
        self._lanes.close_lane()

    def lane_squares(self) -> list[Tensor]:
        """The squared norm of each of this rank's lanes' gradients, float64, where the update was to be measured."""
        return self._squares or []

    def weights(self) -> dict[str, Tensor]:
        """All weights, on every rank."""
        return dict(self._parameters)

    @torch.no_grad()
    def _lay_out(self) -> None:
        some = next(iter(self._parameters.values()))
        for names in self._names:
            size = sum(_room(self._parameters[name]) for name in names)
            buffer = torch.zeros(size, dtype=some.dtype, device=some.device)
            for name, place in self._places(names):
                parameter = self._parameters[name]
                own = buffer[place : place + parameter.numel()].view(parameter.shape)
                own.copy_(parameter)
                parameter.data = own
            self._laid_out.append(buffer)

    def _places(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Where each of an owner's tensors begins in its buffer."""
        place = 0
        for name in names:
            yield name, place
            place += _room(self._parameters[name])

    def _plan(self) -> list[_Step]:
        """The steps of an exchange: the same stretch of every owner's buffer, cut where tensors begin and end."""
        length = max(BUCKET // self._ranks.size // ALIGNED, 1) * ALIGNED
        sizes = [len(buffer) for buffer in self._laid_out]
        steps = []
        for begin in range(0, max(sizes), length):
            lengths = [max(0, min(length, size - begin)) for size in sizes]
            pieces, last, sent = [], [], 0
            for names, count in zip(self._names, lengths, strict=True):
                for name, place in self._places(names):
                    end = place + self._parameters[name].numel()
                    low, high = max(begin, place), min(begin + count, end)
                    if low < high:
                        pieces.append(_Piece(name, low - place, high - place, sent + low - begin))
                        last += [name] if high == end else []
                sent += count
            steps.append(_Step(begin, lengths, pieces, last))
        return steps

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """The update's gradients of the tensors that this rank owns; every other gradient is given up."""
        self._lanes.finish()
        mine = self._names[self._ranks.rank]
        if self._ranks.size > 1:
            sums = torch.empty_like(self._laid_out[self._ranks.rank])
            for step in self._steps:
                self._exchange(step, sums)
            for name, place in self._places(mine):
                parameter = self._parameters[name]
                parameter.grad = sums[place : place + parameter.numel()].view(parameter.shape)
        return {name: _gradient(self._parameters[name]) for name in mine}

    def _exchange(self, step: _Step, sums: Tensor) -> None:
        """One step; the sums over all ranks of this rank's stretch are written into `sums`."""
        ranks = self._ranks
        send = torch.empty(sum(step.lengths), dtype=sums.dtype, device=sums.device)
        for piece in step.pieces:
            flat = _gradient(self._parameters[piece.name]).reshape(-1)
            send[piece.place : piece.place + piece.stop - piece.start].copy_(flat[piece.start : piece.stop])
        for name in step.last:
            self._parameters[name].grad = None
        mine = step.lengths[ranks.rank]
        target = sums[step.begin : step.begin + mine]
        if self._canonical:
            rows = list(ranks.exchange(send, step.lengths).view(ranks.size, mine))
            while len(rows) > 2:
                rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
            torch.add(rows[0], rows[1], out=target)
        else:
            ranks.add_up(send)
            begin = sum(step.lengths[: ranks.rank])
            target.copy_(send[begin : begin + mine])

    @torch.no_grad()
    def spread(self) -> None:
        """After the optimizer's step every rank gets the tensors that others own."""
        for rank, buffer in enumerate(self._laid_out):
            if len(buffer):
                self._ranks.spread(buffer, rank)


def squares(norms: Mapping[str, Tensor]) -> Tensor:
    """The squares of the tensors' norms added up in the order of names: the same bits in every engine."""
    return torch.stack([norms[name] for name in sorted(norms)]).square().sum()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every update"
    return parameter.grad


def _room(tensor: Tensor) -> int:
    """Elements that a tensor takes in a buffer."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED
