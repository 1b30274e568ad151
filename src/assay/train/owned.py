"""State that lives with its owners: weights gathered at rank 0, state handed out after a load, proved.

Bytes travel as they are, tensor by tensor in the order of names, through host memory. It writes and
reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint.save import tensor_digests
from assay.checkpoint.tensors import state_digest
from assay.errors import InputError
from assay.train.optimizers import Named, load_state_tensors, state_tensors
from assay.train.ranks import Ranks

Optimizers = Iterable[torch.optim.Optimizer]


def gather(ranks: Ranks, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """At rank 0 the tensors of all ranks by name, those of the others in host memory; elsewhere this rank's."""
    if ranks.size == 1:
        return mine
    result = dict(mine)
    for name, rank, dtype, shape in _layout(ranks, mine):
        if rank != 0 and ranks.rank in (0, rank):
            tensor = mine[name].detach().cpu() if ranks.rank == rank else torch.empty(shape, dtype=dtype)
            ranks.hand_over(tensor, rank, 0)
            if ranks.first:
                result[name] = tensor
    return result


@torch.no_grad()
def hand_out_state(ranks: Ranks, owned: Named, optimizers: Optimizers, loaded: Mapping[str, Tensor]) -> None:
    """Set every rank's optimizer state from what rank 0 loaded; InputError on all ranks unless all of it fits."""
    mine = state_tensors(owned, optimizers)
    if ranks.size == 1:
        load_state_tensors(owned, optimizers, loaded)
        return
    layout = _layout(ranks, mine)
    ranks.lead(lambda: _check(layout, loaded))
    taken = {}
    for name, rank, dtype, shape in layout:
        if ranks.rank in (0, rank):
            tensor = loaded[name].contiguous() if ranks.first else torch.empty(shape, dtype=dtype)
            if rank != 0:
                ranks.hand_over(tensor, 0, rank)
            if rank == ranks.rank:
                taken[name] = tensor
    load_state_tensors(owned, optimizers, taken)


def proof(ranks: Ranks, owned: Named, optimizers: Optimizers) -> dict[str, Any]:
    """Digests of the weights and of the whole state as they lie in memory, each tensor's taken by its owner."""
    digests: dict[str, dict[str, Any]] = {}
    weights: dict[str, dict[str, Any]] = {}
    mine = [tensor_digests(dict(owned.named_parameters())), tensor_digests(state_tensors(owned, optimizers))]
    for own, state in ranks.collect(mine):
        weights |= own
        digests |= state
    return {
        "weights_sha256": state_digest(weights),
        "state_sha256": state_digest(weights | digests),
        "optimizer_tensors": len(digests),
    }


def _layout(ranks: Ranks, mine: Mapping[str, Tensor]) -> list[tuple[str, int, torch.dtype, list[int]]]:
    """(name, owner, dtype, shape) of all ranks' tensors, by name."""
    here = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in mine.items()]
    found = [
        (name, rank, getattr(torch, dtype), shape)
        for rank, some in enumerate(ranks.collect(here))
        for name, dtype, shape in some
    ]
    return sorted(found)


def _check(layout: list[tuple[str, int, torch.dtype, list[int]]], loaded: Mapping[str, Tensor]) -> None:
    """InputError as `load_state_tensors` gives it, before anything is sent."""
    wanted = {name: (dtype, shape) for name, _, dtype, shape in layout}
    for name in sorted(wanted.keys() | loaded.keys()):
        if name not in loaded:
            raise InputError(f"the optimizer's state lacks {name!r}; the checkpoint is of another recipe or incomplete")
        if name not in wanted:
            raise InputError(f"the optimizer has no state {name!r}; the checkpoint is of another recipe")
        have = (loaded[name].dtype, list(loaded[name].shape))
        if have != wanted[name]:
            raise InputError(
                f"the optimizer's state {name!r} is {have[0]} {have[1]} in the checkpoint, "
                f"but {wanted[name][0]} {wanted[name][1]} is needed; the checkpoint is of another recipe"
            )
