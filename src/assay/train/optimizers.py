"""Muon for the matrices of the blocks, AdamW for the rest, and AdamW alone.

Promises that every parameter is in exactly one group, that state is complete before the first
update, and that no function here makes the host wait for a device. It knows no schedule: the rates
are given to it before each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from assay.errors import InputError
from assay.recipe.schema import MUONS
from assay.recipe.schema import Optimizer as OptimizerConfig

# Of the quintic iteration; slope at zero as steep as it gets (Jordan 2024, Muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_FLOOR = 1e-7  # of the norm that the first step divides by, as in torch.optim.Muon
ROW_MOMENTUM = 0.95  # of NorMuon's second moment, as Li et al. 2025 have it
_ROW_EPSILON = 1e-8
_MUON_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class Named(Protocol):
    """Parameters by name: a model, or those of it that one rank owns."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), each once."""
        ...


def parameter_groups(model: Named, config: OptimizerConfig) -> dict[str, list[str]]:
    """Names of the parameters by treatment: `muon`, `decay` and `no_decay` (both AdamW).

    Muon acts on q, k, v, o, gate, up and down of every block when the kind is muon or normuon. Weight decay
    falls on tensors of two or more dimensions alone.
    """
    groups: dict[str, list[str]] = {"muon": [], "decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        if config.kind in MUONS and _is_muon_matrix(name, parameter):
            groups["muon"].append(name)
        else:
            groups["decay" if parameter.ndim >= 2 else "no_decay"].append(name)
    grouped = sorted(name for names in groups.values() for name in names)
    assert grouped == sorted(name for name, _ in model.named_parameters()), "groups do not cover each parameter once"
    return groups


def _is_muon_matrix(name: str, parameter: Tensor) -> bool:
    parts = name.split(".")
    return parts[0] == "blocks" and parts[-1] == "weight" and parts[-2] in _MUON_MATRICES and parameter.ndim == 2


def build_optimizers(model: Named, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of the recipe over the model's parameters, state allocated, rates 0 until `set_rates`.

    State is made here and not at the first update, so that a run holds the same memory after a
    resume as before it, and a fresh optimizer can be saved and loaded like any other. Of what one rank owns there may
    be none of a kind, or none at all.
    """
    groups = parameter_groups(model, config)
    parameters = dict(model.named_parameters())

    def of(name: str) -> list[nn.Parameter]:
        return [parameters[each] for each in groups[name]]

    optimizers: list[torch.optim.Optimizer] = []
    if groups["muon"]:
        momentum, steps, dtype = config.muon_momentum, config.muon_steps, config.muon_dtype
        if momentum is None or steps is None or dtype is None:
            raise AssertionError("the schema fills Muon's keys in when the kind is muon or normuon")
        optimizers.append(Muon(of("muon"), momentum, steps, dtype, config.weight_decay, config.kind == "normuon"))
    adamw_groups = [
        {"params": of("decay"), "weight_decay": config.weight_decay},
        {"params": of("no_decay"), "weight_decay": 0.0},
    ]
    if not groups["decay"] and not groups["no_decay"]:
        return optimizers
    beta1, beta2 = config.betas
    adamw = torch.optim.AdamW(
        [group for group in adamw_groups if group["params"]], lr=0.0, betas=(beta1, beta2), eps=config.eps, fused=True
    )
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                # With fused=True the counter lies on the parameter's device and is float32.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    optimizers.append(adamw)
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan 2024): W ← W − lr·wd·W − lr·√max(1, rows ÷ columns)·NS(g·(1 − m) + m·M).

    M ← m·M + (1 − m)·g is the running mean of the gradient and the argument of NS its Nesterov look-ahead.
    Each matrix is treated by itself, in calls that do not depend on how many matrices there are.
    `torch.optim.Muon` is the same but for its arithmetic, which is fixed to bfloat16. With `rows` it is NorMuon
    (Li et al. 2025, arXiv:2510.05491), see `by_rows`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        momentum: float,
        steps: int,
        dtype: str,
        weight_decay: float,
        rows: bool = False,
    ) -> None:
        """`dtype` is `auto` (bfloat16 on CUDA, float32 elsewhere), `float32` or `bfloat16`; lr begins at 0."""
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum, "steps": steps})
        self.dtype = dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.ndim == 2, f"Muon takes matrices, not a tensor of shape {tuple(parameter.shape)}"
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, requires_grad=False)
                if rows:
                    self.state[parameter]["rows"] = torch.zeros_like(parameter[:, :1], requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix; each must have its gradient."""
        assert closure is None, "closures are not used"
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                grad = parameter.grad
                assert grad is not None, "a matrix of the model has no gradient"
                mean = self.state[parameter]["momentum"]
                mean.lerp_(grad, 1 - momentum)
                ahead = grad.lerp(mean, momentum)
                direction = orthogonalise(ahead, group["steps"], arithmetic(self.dtype, parameter)).to(parameter.dtype)
                if "rows" in self.state[parameter]:
                    direction = by_rows(direction, self.state[parameter]["rows"])
                rows, columns = parameter.shape
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(direction, alpha=-lr * math.sqrt(max(1.0, rows / columns)))


def arithmetic(choice: str, parameter: Tensor) -> torch.dtype:
    """The type in which Newton–Schulz runs: `auto` is bfloat16 on CUDA and float32 elsewhere.

    A float64 model (used in comparisons) keeps float64 under `auto`.
    """
    if choice == "auto":
        if parameter.dtype == torch.float64:
            return torch.float64
        return torch.bfloat16 if parameter.device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[choice]


def orthogonalise(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """An approximation of U·Vᵀ for matrix = U·S·Vᵀ by `steps` of Newton–Schulz, X ← aX + (bA + cA²)X, A = XXᵀ.

    Computed in `dtype`, which the result has; the smaller side is put first, to keep A small.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_FLOOR)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def by_rows(direction: Tensor, moment: Tensor) -> Tensor:
    """Each row of `direction` [rows, columns] divided by the root of its running mean square; the whole keeps its norm.

    `moment` [rows, 1] is updated in place. So no neuron's row is moved far more than another's.
    """
    norm = direction.norm()
    moment.lerp_(direction.square().mean(dim=1, keepdim=True), 1 - ROW_MOMENTUM)
    scaled: Tensor = direction / (moment.sqrt() + _ROW_EPSILON)
    return scaled.mul_(norm / scaled.norm().clamp(min=_FLOOR))


def set_rates(optimizers: Iterable[torch.optim.Optimizer], rates: Mapping[str, float]) -> None:
    """Set this update's rates: `lr` for AdamW and `muon_lr` for Muon."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rates["muon_lr" if isinstance(optimizer, Muon) else "lr"]


@torch.no_grad()
def tensor_norms(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Euclidean norm of each gradient, by one float32 call per whole tensor, as float64 scalars.

    A tensor whose squares leave float32 (a norm above 1.8e19) has an infinite norm. No value is looked at.
    """
    return {
        name: torch.linalg.vector_norm(grad, dtype=_at_least_float32(grad)).double() for name, grad in grads.items()
    }


def joined_norm(norms: Mapping[str, float]) -> float:
    """The Euclidean norm over all gradients from those of the tensors: squares added in float64 in the order of names.

    The bits do not depend on who owns what.
    """
    total = 0.0
    for name in sorted(norms):
        total += norms[name] * norms[name]
    return math.sqrt(total)


@torch.no_grad()
def gradient_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """`joined_norm` of gradients that lie on one device, as a float64 scalar there; the value is not looked at."""
    norms = tensor_norms(grads)
    total = torch.zeros((), dtype=torch.float64, device=next(iter(norms.values())).device)
    for name in sorted(norms):
        total = total + norms[name].square()
    return total.sqrt()


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def scale_gradients(grads: Mapping[str, Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Multiply every gradient in place by min(1, max_norm ÷ norm); None leaves them as they are."""
    if max_norm is None:
        return
    factor = (max_norm / norm).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(factor.to(grad.dtype))


def state_tensors(model: Named, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' tensors by name, not copied: `optimizer.<parameter>.<kind>`.

    The kinds are `exp_avg`, `exp_avg_sq` and `step` with AdamW, `momentum` with Muon, and `rows` with NorMuon as well.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{kind}": tensor
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for kind, tensor in optimizer.state[parameter].items()
    }


@torch.no_grad()
def load_state_tensors(
    model: Named, optimizers: Iterable[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Set the optimizers' state to `tensors`, named as by `state_tensors`; nothing changes unless all fit.

    Raises InputError for a missing or foreign name, a shape or a dtype that is not the optimizer's.
    """
    state = state_tensors(model, optimizers)
    for name in sorted(state.keys() | tensors.keys()):
        if name not in tensors:
            raise InputError(f"the optimizer's state lacks {name!r}; the checkpoint is of another recipe or incomplete")
        if name not in state:
            raise InputError(f"the optimizer has no state {name!r}; the checkpoint is of another recipe")
        have, want = tensors[name], state[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise InputError(
                f"the optimizer's state {name!r} is {have.dtype} {list(have.shape)} in the checkpoint, "
                f"but {want.dtype} {list(want.shape)} is needed; the checkpoint is of another recipe"
            )
    for name, tensor in state.items():
        tensor.copy_(tensors[name])
