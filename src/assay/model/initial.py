"""Fresh weights: every parameter set on purpose, by its name, and none by a library's default.

The values of a tensor depend on the seed and its name alone: not on order, device, torch's global
generator or the other tensors. It does not load weights from files.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from assay.model.decoder import Decoder
from assay.plan.parameters import shapes
from assay.recipe.operational import Recompute
from assay.recipe.schema import Model

# No source states these for the Slayer line; 0.02 and the division by the square root of the number of
# residual additions are GPT-2's (Radford et al. 2019), one half keeps both values of the residual alive.
DEVIATION = 0.02
VALUE_RESIDUAL = 0.5

_MATRICES = ("q", "k", "v", "gate", "up", "embedding", "head")
_RESIDUAL_MATRICES = ("o", "down")
_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm", "norm")


def build(
    config: Model,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = False,
) -> Decoder:
    """A decoder with fresh weights on `device`.

    Raises AssertionError when model and plan disagree about the parameters: that is a bug.
    """
    model = empty(config, device, dtype, recompute)
    initialise(model, seed)
    return model


def empty(
    config: Model,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = False,
) -> Decoder:
    """A decoder whose parameters are NaN until somebody sets them; what is forgotten shows at once."""
    with torch.device("meta"):
        model = Decoder(config, recompute)
    have = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = shapes(config)
    assert have == planned, f"model and plan differ in parameters: {sorted(set(have.items()) ^ set(planned.items()))}"
    assert not list(model.named_buffers()), "a buffer would be left unset"
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Set every parameter of the model; the values are drawn on the CPU in float32."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, tuple(parameter.shape), model.config.layers, seed))


def initial_value(name: str, shape: tuple[int, ...], layers: int, seed: int) -> Tensor:
    """The float32 values with which the parameter `name` begins, on the CPU.

    Matrices and embedding: normal, standard deviation 0.02, divided by √(2 × layers) for `o` and
    `down`, which write to the residual stream. Norms 1, biases 0, value residual 0.5.
    Raises ValueError for a name that it does not know.
    """
    parts = name.split(".")
    owner, kind = (parts[-2] if len(parts) > 1 else ""), parts[-1]
    if kind == "weight" and owner in _MATRICES:
        return _normal(name, shape, DEVIATION, seed)
    if kind == "weight" and owner in _RESIDUAL_MATRICES:
        return _normal(name, shape, DEVIATION / math.sqrt(2 * layers), seed)
    if kind == "weight" and owner in _NORMS:
        return torch.ones(shape)
    if kind == "bias" and owner in ("q", "k", "v", "o"):
        return torch.zeros(shape)
    if kind == "value_residual":
        return torch.full(shape, VALUE_RESIDUAL)
    raise ValueError(f"no initial value is defined for the parameter {name!r}")


def _normal(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> Tensor:
    state = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(state[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
