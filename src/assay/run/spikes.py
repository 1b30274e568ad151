"""The policy for loss spikes: whether an update is left out because its gradient is far steeper than usual.

A pure function of the recipe and of the gradient norms of the updates before, so that all ranks, every resume and
`verify` decide alike. It writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from assay.recipe.operational import Spikes

# The least standard deviation of the norms' logarithms that is believed: two per cent of a norm. Without it a run
# whose norms are nearly constant would call the smallest change a spike.
FLOOR = 0.02


@dataclass(frozen=True)
class Spike:
    """A gradient norm beyond the bound: how many deviations, and above which norm the policy says so."""

    deviations: float
    limit: float


def judge(config: Spikes, norms: Sequence[float], norm: float) -> Spike | None:
    """The spike that `norm` is after the `norms` of the updates before, oldest first; None: it is none.

    On logarithms: mean and standard deviation (of the whole window, at least FLOOR) of the last `window` norms.
    """
    if config.rule is None or len(norms) < config.rule[1] or norm <= 0:
        return None
    allowed, window, _ = config.rule
    logs = [math.log(max(one, 1e-300)) for one in norms[-window:]]
    mean = math.fsum(logs) / len(logs)
    spread = max(math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / len(logs)), FLOOR)
    deviations = (math.log(norm) - mean) / spread
    if deviations <= allowed:
        return None
    return Spike(deviations, math.exp(min(mean + allowed * spread, 700.0)))


def taken_up(config: Spikes, norms: Sequence[float], norm: float) -> list[float]:
    """The window after an update that was not skipped."""
    return [] if config.rule is None else [*norms, norm][-config.rule[1] :]
