"""Sharded training on torch's `fully_shard`, with the bits of whole models: the tree rides on its own hooks.

Blocks are whole only while they are in work. FSDP's reduce-scatter is replaced by an exchange and ordered
additions over the slices that it makes; owners of whole tensors take gradients from the slices, keep whole
float32 weights of what they own, and give the updated slices back.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from assay.errors import Refused
from assay.model.decoder import Decoder
from assay.plan.owners import owners
from assay.train.optimizers import tensor_norms
from assay.train.owned import gather
from assay.train.ranks import Ranks
from assay.train.reduction import Owned, squares


class TreeReduceScatter(ReduceScatter):
    """FSDP's hook for one group of parameters: lanes of each rank joined first, then the ranks, as by one rank.

    Until the rank's last lane what it gives to FSDP is no sum yet; `ShardedExchange` throws it away.
    """

    def __init__(self, ranks: Ranks, lanes: int, shapes: dict[str, tuple[int, ...]]) -> None:
        """`shapes` are those of the group's whole tensors, in FSDP's order."""
        self._ranks, self._lanes, self._shapes = ranks, lanes, shapes
        self._partial: list[tuple[int, Tensor]] = []
        self.norms: list[dict[str, Tensor]] | None = None  # of each lane's whole tensors, where they are asked for

    def clear(self, norms: bool) -> None:
        """Forget lanes that were begun."""
        self._partial.clear()
        self.norms = [] if norms else None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, so that nothing of the padding is left to chance."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """One lane's gradients of the group, a slice for each rank, in; this rank's slice of the sum out."""
        size = len(output_tensor)
        if self.norms is not None:
            self.norms.append(tensor_norms(self._whole(input_tensor)))
        rows, level = self._ranks.exchange(input_tensor, [size] * self._ranks.size), 0
        while self._partial and self._partial[-1][0] == level:
            rows, level = self._partial.pop()[1].add_(rows), level + 1
        if 1 << level < self._lanes:
            self._partial.append((level, rows))
            return None
        parts = list(rows.view(self._ranks.size, size))
        while len(parts) > 2:
            parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
        torch.add(parts[0], parts[1], out=output_tensor)
        return None

    def _whole(self, sent: Tensor) -> dict[str, Tensor]:
        """The tensors of one lane, whole, from the slices in which FSDP lays them out for the ranks."""
        result, place, rows = {}, 0, sent.view(self._ranks.size, -1)
        for name, shape in self._shapes.items():
            each = -(-shape[0] // self._ranks.size) * prod(shape[1:])
            flat = rows[:, place : place + each].reshape(-1)[: prod(shape)]
            result[name], place = flat.view(shape), place + each
        return result


class ShardedExchange:
    """As `reduction.Exchange`, for a model that lies in slices on the ranks."""

    def __init__(self, model: Decoder, ranks: Ranks, lanes: int) -> None:
        """`model` is whole and the same on every rank; afterwards its parameters are slices.

        Refused where several ranks share a GPU: FSDP's own collectives do not go through the host.
        """
        if ranks.staged:
            raise Refused("runtime.engine fsdp needs a GPU for each rank; lower --ranks, or set it to replicated")
        model.sliced = True
        whole = dict(model.named_parameters())
        self._ranks, self._lanes, self._closed = ranks, lanes, 0
        self._shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        self.owner = owners({name: parameter.numel() for name, parameter in whole.items()}, ranks.size)
        self._names = [[name for name in whole if self.owner[name] == rank] for rank in range(ranks.size)]
        mine = self._names[ranks.rank]
        self.owned = Owned({name: nn.Parameter(whole[name].detach().clone()) for name in mine})
        device = next(iter(whole.values())).device
        # A block returns its values as a view, which nobody changes in place.
        warnings.filterwarnings("ignore", category=UserWarning, message="FSDP2-wrapped module")
        mesh = DeviceMesh.from_group(ranks.data, device.type)
        self._modules: list[FSDPModule] = []
        for module in (*model.blocks, model):
            self._modules.append(fully_shard(cast(nn.Module, module), mesh=mesh))
        self._slices = {name: cast(DTensor, parameter) for name, parameter in model.named_parameters()}
        self._hooks = [TreeReduceScatter(ranks, lanes, self._group(sharded)) for sharded in self._modules]
        for sharded, hook in zip(self._modules, self._hooks, strict=True):
            sharded.set_custom_reduce_scatter(hook)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def _group(self, sharded: FSDPModule) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of the tensors that FSDP exchanges together, in its own order."""
        names = {id(parameter): name for name, parameter in self._slices.items()}
        group = sharded._get_fsdp_state()._fsdp_param_group
        assert group is not None, "every module that is sharded has parameters"
        found = [names[id(one.sharded_param)] for one in group.fsdp_params]
        return {name: self._shapes[name] for name in found}

    def clear(self, norms: bool = False) -> None:
        """Before an update: no gradient and no lane of an earlier one. `norms` as with `reduction.Exchange`."""
        self._closed = 0
        for parameter in self._slices.values():
            parameter.grad = None
        for hook in self._hooks:
            hook.clear(norms)

    def before_backward(self, ends_lane: bool) -> None:
        """Gradients flow with a lane's last micro-batch; before that they are added up where they arise."""
        self._modules[-1].set_requires_gradient_sync(ends_lane)

    def close_lane(self) -> None:
        """Take away what FSDP made of a lane that is not the last."""
        self._closed += 1
        if self._closed < self._lanes:
            for parameter in self._slices.values():
                parameter.grad = None

    def lane_squares(self) -> list[Tensor]:
        """As with `reduction.Exchange`, in the same bits."""
        lanes = zip(*(hook.norms or [] for hook in self._hooks), strict=True)
        return [squares({name: norm for group in lane for name, norm in group.items()}) for lane in lanes]

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """The update's gradients of the tensors that this rank owns, whole, from the slices of all ranks."""
        ranks = self._ranks
        pieces = [self._gradient(name) for names in self._names for name in names]
        splits = [sum(self._elements(name, ranks.rank) for name in names) for names in self._names]
        mine = self._names[ranks.rank]
        takes = [sum(self._elements(name, rank) for name in mine) for rank in range(ranks.size)]
        taken = iter(torch.split(ranks.exchange(torch.cat(pieces), splits, takes), self._cuts(mine)))
        found: dict[str, list[Tensor]] = {name: [] for name in mine}
        for _ in range(ranks.size):
            for name in mine:
                found[name].append(next(taken))
        for parameter in self._slices.values():
            parameter.grad = None
        result = {}
        for name, parts in found.items():
            result[name] = self.owned.parameters[name].grad = torch.cat(parts).view(self._shapes[name])
        return result

    @torch.no_grad()
    def spread(self) -> None:
        """After the optimizer's step every rank gets its slices of what the owners changed."""
        ranks = self._ranks
        for module in self._modules:
            module.reshard()
        mine = self._names[ranks.rank]
        pieces = [
            self._slice(self.owned.parameters[name].detach(), rank) for rank in range(ranks.size) for name in mine
        ]
        splits = [sum(self._elements(name, rank) for name in mine) for rank in range(ranks.size)]
        takes = [sum(self._elements(name, ranks.rank) for name in names) for names in self._names]
        some = next(iter(self._slices.values())).to_local()
        sent = torch.cat(pieces) if pieces else some.new_empty(0)
        order = [name for names in self._names for name in names]
        lengths = [self._elements(name, ranks.rank) for name in order]
        received = torch.split(ranks.exchange(sent, splits, takes), lengths)
        for name, values in zip(order, received, strict=True):
            local = self._slices[name].to_local()
            local.copy_(values.view(local.shape))
        for parameter in self.owned.parameters.values():
            parameter.grad = None

    def weights(self) -> dict[str, Tensor]:
        """All weights, at rank 0; every rank must call it."""
        return gather(self._ranks, {name: parameter.detach() for name, parameter in self.owned.parameters.items()})

    def _gradient(self, name: str) -> Tensor:
        gradient = self._slices[name].grad
        assert gradient is not None, "every parameter takes part in every update"
        return cast(DTensor, gradient).to_local().reshape(-1)

    def _elements(self, name: str, rank: int) -> int:
        first, last = _rows(self._shapes[name][0], rank, self._ranks.size)
        return (last - first) * prod(self._shapes[name][1:])

    def _slice(self, tensor: Tensor, rank: int) -> Tensor:
        first, last = _rows(len(tensor), rank, self._ranks.size)
        return tensor[first:last].reshape(-1)

    def _cuts(self, names: list[str]) -> list[int]:
        """Lengths of what this rank receives of its own tensors: rank by rank, tensor by tensor."""
        return [self._elements(name, rank) for rank in range(self._ranks.size) for name in names]


def _rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, last) of so many that a rank holds, as FSDP cuts them."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)
