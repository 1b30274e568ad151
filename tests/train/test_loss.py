"""The chunked loss is the plain one: value, gradients, cap and z, whatever the chunk."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import RECIPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assay.model.initial import build
from assay.plan.parameters import matrix_count
from assay.recipe.load import from_yaml
from assay.recipe.operational import Recompute
from assay.train.loss import chunked_loss, window_loss


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The two sums, written out from the definition: −log of the target's share of the exponentials."""
    logits = torch.einsum("...w,vw->...v", hidden, weight)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    partition = torch.exp(logits).sum(-1)
    share = torch.exp(logits.gather(-1, targets[..., None])[..., 0]) / partition
    return -torch.log(share).sum(), (torch.log(partition) ** 2).sum()


def inputs(seed: int, positions: tuple[int, ...], width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((*positions, width), generator=generator, dtype=torch.float64)
    weight = torch.randn((vocabulary, width), generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, positions, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    positions=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    width=st.integers(1, 7),
    vocabulary=st.integers(2, 13),
    chunk=st.integers(0, 30),
    cap=st.sampled_from([0.0, 1.5, 30.0]),
    z=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_value_and_gradients_are_those_of_the_plain_formula(
    seed: int, positions: tuple[int, int], width: int, vocabulary: int, chunk: int, cap: float, z: float
) -> None:
    hidden, weight, targets = inputs(seed, positions, width, vocabulary)
    nll, square = chunked_loss(hidden, weight, targets, chunk, cap, z)
    nll_plain, square_plain = plain(hidden, weight, targets, cap)
    torch.testing.assert_close((nll, square), (nll_plain, square_plain), rtol=1e-10, atol=1e-10)
    divisor = 7.0
    ours = torch.autograd.grad((nll + z * square) / divisor, (hidden, weight))
    expected = torch.autograd.grad((nll_plain + z * square_plain) / divisor, (hidden, weight))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


def test_only_wanted_gradients_are_formed() -> None:
    hidden, weight, targets = inputs(1, (5,), 3, 4)
    for a, b in ((hidden, weight.detach()), (hidden.detach(), weight)):
        wanted = a if a.requires_grad else b
        (ours,) = torch.autograd.grad(chunked_loss(a, b, targets, 2, 0.0, 0.0)[0], wanted)
        (expected,) = torch.autograd.grad(plain(a, b, targets, 0.0)[0], wanted)
        torch.testing.assert_close(ours, expected)
    with torch.no_grad():
        nll, _ = chunked_loss(hidden, weight, targets, 2, 0.0, 0.1)
    assert not nll.requires_grad
    torch.testing.assert_close(nll, plain(hidden, weight, targets, 0.0)[0])


def test_another_mixture_than_the_announced_one_gets_no_plausible_gradient() -> None:
    hidden, weight, targets = inputs(2, (6,), 3, 5)
    nll, square = chunked_loss(hidden, weight, targets, 4, 0.0, 0.1)
    (nll + 0.2 * square).backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()
    nll, _ = chunked_loss(hidden, weight, targets, 4, 0.0, 0.1)
    with pytest.raises(RuntimeError, match=r"nll_sum \+ z \* z_sum"):
        nll.backward()
    nll, _ = chunked_loss(hidden, weight, targets, 4, 0.0, 0.0)
    nll.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        nll.backward()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, and whether one makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.waits.append(str(func))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_a_batch_never_exist_at_once_and_the_host_never_waits() -> None:
    positions, vocabulary, width, chunk = 64, 50, 4, 8
    hidden, weight, targets = inputs(3, (positions,), width, vocabulary)
    with Largest() as seen:
        nll, square = chunked_loss(hidden, weight, targets, chunk, 5.0, 0.1)
        ((nll + 0.1 * square) / positions).backward()
    assert seen.elements == chunk * vocabulary
    assert seen.waits == []
    with Largest() as seen:
        chunked_loss(hidden, weight, targets, 0, 5.0, 0.1)
    assert seen.elements == positions * vocabulary


def test_low_precision_logits_are_summed_in_float32() -> None:
    hidden, weight, targets = (x.detach() for x in inputs(4, (40,), 16, 300))
    low_hidden, low_weight = hidden.bfloat16(), weight.bfloat16().requires_grad_()
    nll, square = chunked_loss(low_hidden, low_weight, targets, 7, 0.0, 0.0)
    assert nll.dtype == square.dtype == torch.float32
    logits = (low_hidden @ low_weight.T).double()  # rounded to bfloat16 once, exact from there on
    exact = -logits.log_softmax(-1).gather(-1, targets[:, None]).sum()
    torch.testing.assert_close(nll.double(), exact, rtol=1e-6, atol=0)
    nll.backward()
    assert low_weight.grad is not None
    assert low_weight.grad.dtype == torch.bfloat16


def test_under_autocast_master_weights_get_float32_gradients() -> None:
    hidden, weight, targets = (x.detach() for x in inputs(5, (24,), 16, 40))
    single = weight.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll, _ = chunked_loss(hidden.float(), single, targets, 7, 0.0, 0.0)
    nll.backward()
    assert single.grad is not None
    assert single.grad.dtype == torch.float32
    exact = weight.requires_grad_()
    plain(hidden, exact, targets, 0.0)[0].backward()
    assert exact.grad is not None
    assert 0 < (single.grad - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_the_same_inputs_give_the_same_bits() -> None:
    hidden, weight, targets = (x.detach() for x in inputs(6, (4, 33), 24, 97))
    results = []
    for _ in range(2):
        a, b = hidden.float().requires_grad_(), weight.float().requires_grad_()
        nll, square = chunked_loss(a, b, targets, 10, 4.0, 1e-3)
        ((nll + 1e-3 * square) / 132).backward()
        results.append((nll, square, a.grad, b.grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True) if x is not None and y is not None)


class Casts(TorchDispatchMode):
    """Elements of weights cast to bfloat16 that are still held when the first logits are turned into a loss."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.made, self.held = shapes, list[tuple[weakref.ref[Tensor], int]](), -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            if tuple(result.shape) in self.shapes:
                self.made.append((weakref.ref(result), result.numel()))
        elif func is torch.ops.aten._log_softmax.default and self.held < 0:
            self.held = sum(count for reference, count in self.made if reference() is not None)
        return result


@pytest.mark.parametrize("recompute", [True, "selective", False])
def test_casts_of_sliced_weights_live_no_longer_than_their_block_unless_the_backward_pass_needs_them(
    recompute: Recompute,
) -> None:
    """As the plan counts them for fsdp under bfloat16."""
    recipe = from_yaml(json.dumps(RECIPE | {"precision": {"compute": "bfloat16"}}), "small")
    model = build(recipe.model, 1, recompute=recompute)
    model.sliced = True  # no copies are made once an update
    matrices = {name: p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    with Casts({tuple(p.shape) for p in matrices.values()}) as casts:
        window_loss(model, recipe, torch.zeros(1, 8, dtype=torch.int64), None)  # no activation has a shape of theirs
    assert sum(count for _, count in casts.made) == matrix_count(recipe.model)
    assert casts.held == (0 if recompute else matrix_count(recipe.model))
