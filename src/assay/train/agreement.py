"""What all ranks must know alike before the optimizer changes anything, by one message and one wait.

Each rank sends its loss sums, the norms of the gradients that it owns, why it wants to stop, the digests of the
windows that it trained on, whether its save is written, and what it measured of itself; every rank draws the same
conclusions from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batches import joined_digest
from assay.train.optimizers import joined_norm
from assay.train.ranks import LostRanks, Ranks
from assay.train.reduction import tree

# A rank's word is a place in it; the lowest rank with a cause decides. `save` alone is no cause to stop.
CAUSES = (None, "signal", "preempted", "stop", "guard", "network", "lease", "save")


@dataclass(frozen=True)
class Agreed:
    """The same on every rank: sums over all lanes, norm of the whole gradient, a cause to stop, batch digest.

    `ready`: whether on every rank the save in the air can be taken further without waiting. `norms` are those of the
    gradients by tensor; `facts` and `values` [ranks, n] what each rank gave along.
    """

    nll_sum: float
    z_sum: float
    grad_norm: float
    cause: str | None
    batch_digest: str
    ready: bool
    norms: dict[str, float]
    facts: list[list[int]]
    values: NDArray[np.float64]


def agree(
    ranks: Ranks,
    update: int,
    sums: Tensor,
    norms: Mapping[str, Tensor],
    owner: Mapping[str, int],
    cause: str | None,
    digests: bytes,
    ready: bool = False,
    facts: Sequence[int] = (),
    values: Tensor | None = None,
    sent: Callable[[], None] = lambda: None,
) -> Agreed:
    """`sums` are float64 [2] of this rank's lanes, `norms` float64 of the tensors that it owns, `digests` its windows'.

    `facts` (integers of the host) and `values` (float64 of the device) are carried along; as many from every rank.
    `sent` is called when the message is on its way and nobody waits yet.

    The sums of the ranks are joined by the tree of the lanes; the norm is formed on the host, in float64, in the order
    of names. LostRanks when a rank stands at another update, which only a bug can bring about.
    """
    names = sorted(owner)
    host = np.concatenate(
        (np.array([update, CAUSES.index(cause), ready, *facts], dtype=np.int64), np.frombuffer(digests, dtype=np.int64))
    )
    absent = sums.new_zeros(())  # other ranks own the tensor
    numbers_here = [sums, torch.stack([norms.get(name, absent) for name in names])]
    floats = torch.cat(numbers_here if values is None else [*numbers_here, values])
    message = torch.cat((torch.from_numpy(host).to(sums.device, non_blocking=True), floats.view(torch.int64)))
    everyone = ranks.together(message)
    sent()
    told = np.array(wait_for(everyone), dtype=np.int64)
    if (told[:, 0] != update).any():
        raise LostRanks(f"the ranks stand at different updates ({told[:, 0].tolist()})")
    own, windows = 3 + len(facts), len(host)
    numbers = np.ascontiguousarray(told[:, windows:]).view(np.float64)
    causes = [CAUSES[code] for code in told[:, 1] if code]
    by_tensor = {name: float(numbers[owner[name], 2 + place]) for place, name in enumerate(names)}
    return Agreed(
        nll_sum=tree(numbers[:, 0].tolist()),
        z_sum=tree(numbers[:, 1].tolist()),
        grad_norm=joined_norm(by_tensor),
        cause=next((one for one in causes if one != "save"), causes[0] if causes else None),
        batch_digest=joined_digest(np.ascontiguousarray(told[:, own:windows]).tobytes()),
        ready=bool(told[:, 2].all()),
        norms=by_tensor,
        facts=told[:, 3:own].tolist(),
        values=numbers[:, 2 + len(names) :],
    )


def wait_for(values: Tensor) -> list[list[int]]:
    """The only place of the update path where the host waits for the device."""
    result: list[list[int]] = values.tolist()
    return result
