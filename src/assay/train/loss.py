"""Cross-entropy over chunks of positions, so that the logits of a batch never exist at once.

Promises the sums and the gradients of the plain formula, in the same bits every time; the gradients
are formed in the forward pass, chunk by chunk, so nothing is computed twice. It does not average:
the caller divides by global batch × block, for every target counts the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from assay.model.decoder import Decoder
from assay.recipe.schema import Recipe


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float, z: float, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Sums over all targets of the cross-entropy in nats and of logsumexp(logits)², as scalars.

    `hidden` [..., W], `weight` [V, W], `targets` [...] integers below V; `chunk` positions at a time,
    0 for all at once; logits are c·tanh(x ÷ c) of hidden · weightᵀ for a `cap` c, 0 for none. From the
    logits on everything is float32 (float64 when the input is), whatever autocast says. With `compiled` what is done
    to a chunk's logits is one kernel or two in place of a dozen passes over them.

    What may be differentiated is (nll_sum + z × z_sum) times any one factor, with the very `z` given
    here; any other mixture gets NaN gradients, which the loop's check for finiteness stops.
    """
    assert hidden.shape[:-1] == targets.shape, f"{tuple(hidden.shape)} hidden, {tuple(targets.shape)} targets"
    nll_sum, z_sum = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), chunk, cap, z, torch.is_grad_enabled(),
        _compiled_terms() if compiled else _terms,
    )  # fmt: skip
    return nll_sum, z_sum


def window_loss(model: Decoder, recipe: Recipe, windows: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """`chunked_loss` of the model on windows [B, block + 1], in the recipe's precision: (nll_sum, z_sum).

    `documents` [B, block] are given exactly when the recipe sets `document_mask`.
    """
    with _precision(recipe, windows.device):
        hidden = model(windows[:, :-1], documents)
        return chunked_loss(
            hidden, model.head_weight, windows[:, 1:], recipe.loss.chunk, recipe.model.logit_cap, recipe.loss.z,
            recipe.runtime.compile,
        )  # fmt: skip


def _precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The recipe's arithmetic. Nothing is cached: casts would live to the end, of all blocks, also of sliced ones."""
    low = recipe.precision.compute == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=low, cache_enabled=False)


def arithmetic(recipe: Recipe) -> torch.dtype:
    """The type in which the recipe's matrices are multiplied."""
    return torch.bfloat16 if recipe.precision.compute == "bfloat16" else torch.float32


def _terms(
    logits: Tensor, target: Tensor, cap: float, z: float, exact: torch.dtype, slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of a chunk [n, V] with targets [n, 1], and with `slope` d (nll + z·lse²) by the raw logits, in their type.

    `logits` may be overwritten.
    """
    compute = logits.dtype
    logits = logits.to(exact)
    if cap:
        logits = logits.div_(cap).tanh_().mul_(cap)
    log_p = torch.log_softmax(logits, dim=-1)
    log_p_target = log_p.gather(1, target)
    total = logits.gather(1, target) - log_p_target  # logsumexp
    nll, square = -log_p_target.sum(), total.square().sum()
    if not slope:
        return nll, square, None
    # d nll = p − onehot; d z·lse² = 2·z·lse·p; through the cap × (1 − (logit ÷ c)²).
    rate = log_p.exp_()
    if z:
        rate *= 1 + 2 * z * total
    if torch.compiler.is_compiling():  # the same, without a scattered write between the kernels
        rate = rate - (torch.arange(rate.shape[1], device=rate.device) == target).to(exact)
    else:
        rate.scatter_add_(1, target, rate.new_full((), -1.0).expand_as(target))
    if cap:
        rate *= 1 - (logits / cap).square()
    return nll, square, rate.to(compute)


@cache
def _compiled_terms() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """`_terms` for fixed shapes: a chunk that is shorter than the others is compiled for itself."""
    return torch.compile(_terms, dynamic=False)


@torch.no_grad()
def part_losses(
    model: Decoder, recipe: Recipe, windows: Tensor, documents: Tensor | None, parts: Sequence[tuple[int, int]]
) -> tuple[Tensor, list[Tensor]]:
    """The `nll_sum` of `window_loss`, and the same over each of the `parts` [low, high) of the flat positions."""
    with _precision(recipe, windows.device):
        hidden, targets = model(windows[:, :-1], documents).flatten(0, 1), windows[:, 1:].flatten()
        settings = (recipe.loss.chunk, recipe.model.logit_cap, recipe.loss.z)
        whole, _ = chunked_loss(hidden, model.head_weight, targets, *settings, recipe.runtime.compile)
        if len(parts) == 1 and parts[0] == (0, len(targets)):
            return whole, [whole]
        cut = [(hidden[low:high], targets[low:high]) for low, high in parts]
        return whole, [chunked_loss(some, model.head_weight, wanted, *settings)[0] for some, wanted in cut]


class _ChunkedLoss(Function):
    """`chunked_loss` on flat positions N: hidden [N, W], targets [N]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float, z: float, backward: bool,
        terms: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        exact = torch.promote_types(compute, torch.float32)  # float32, or float64 for float64
        want_hidden = backward and ctx.needs_input_grad[0]
        want_weight = backward and ctx.needs_input_grad[1]
        nll_sum = torch.zeros((), dtype=exact, device=hidden.device)
        z_sum = torch.zeros((), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight: Tensor | None = None
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(compute)
            size = chunk or max(1, len(hidden))
            for start in range(0, len(hidden), size):
                part, target = hidden[start : start + size].to(compute), targets[start : start + size, None]
                nll, square, slope = terms(part @ matrix.T, target, cap, z, exact, want_hidden or want_weight)
                nll_sum += nll
                z_sum += square
                if slope is None:
                    continue
                if grad_hidden is not None:
                    grad_hidden[start : start + size] = slope @ matrix
                if want_weight:
                    if grad_weight is None:
                        grad_weight = (slope.T @ part).to(exact)
                    elif compute == exact:
                        grad_weight.addmm_(slope.T, part)
                    else:
                        grad_weight += slope.T @ part
        ctx.z = z
        ctx.grads = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.set_materialize_grads(False)
        if not z:
            ctx.mark_non_differentiable(z_sum)
        return nll_sum, z_sum

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        factor, factor_z = slopes
        if ctx.grads is None:
            raise RuntimeError("the gradients of chunked_loss can be taken once; compute the loss again")
        if factor is None or (ctx.z and factor_z is None):
            raise RuntimeError("differentiate nll_sum + z * z_sum with the z that chunked_loss was given")
        if factor_z is not None:  # z is not 0; decided on the device, without making the host wait
            asked = torch.isclose(factor_z, ctx.z * factor, rtol=1e-3, atol=0.0)
            factor = torch.where(asked, factor, torch.nan)
        grad_hidden, grad_weight = (None if grad is None else grad.mul_(factor) for grad in ctx.grads)
        ctx.grads = None
        return grad_hidden, grad_weight, None, None, None, None, None, None
