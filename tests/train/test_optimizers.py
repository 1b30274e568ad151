"""Groups cover every parameter once; Muon, AdamW and clipping follow their formulas; state survives exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from assay.errors import InputError
from assay.model.decoder import Decoder
from assay.model.initial import build
from assay.plan.parameters import count, matrix_count, shapes
from assay.recipe.schema import Model, Optimizer
from assay.train.loss import chunked_loss
from assay.train.optimizers import (
    Muon,
    arithmetic,
    build_optimizers,
    gradient_norm,
    load_state_tensors,
    orthogonalise,
    parameter_groups,
    scale_gradients,
    set_rates,
    state_tensors,
)

TOKENS = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(1))
RATES = {"lr": 3e-3, "muon_lr": 0.02}


def small(**changes: Any) -> Model:
    fields = {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "vocabulary": 31, "block": 16, "ffn": 40}
    options = {"qk_norm": True, "value_residual": True, "attention_bias": True, "tie_embeddings": False}
    return Model.model_validate(fields | options | changes)


def settings_of(kind: str, **changes: Any) -> Optimizer:
    fields = {"kind": kind, "lr": 3e-3, "weight_decay": 0.1} | ({} if kind == "adamw" else {"muon_lr": 0.02})
    return Optimizer.model_validate(fields | changes)


def parameters_and_grads(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        result.append(parameter)
    return result


def train(model: Decoder, optimizers: list[torch.optim.Optimizer], updates: int, first: int = 0) -> None:
    for update in range(first, first + updates):
        tokens = (TOKENS + update) % 31
        nll, _ = chunked_loss(model(tokens), model.head_weight, tokens.roll(-1, 1), 8, 0.0, 0.0)
        (nll / tokens.numel()).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        scale_gradients(grads, gradient_norm(grads), 1.0)
        set_rates(optimizers, {key: rate / (update + 1) for key, rate in RATES.items()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", ["muon", "normuon", "adamw"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group(kind: str, tied: bool) -> None:
    config = small(tie_embeddings=tied)
    model = build(config, seed=1)
    groups = parameter_groups(model, settings_of(kind))
    assert sorted(name for names in groups.values() for name in names) == sorted(shapes(config))
    sizes = {group: sum(math.prod(shapes(config)[name]) for name in names) for group, names in groups.items()}
    assert sizes["muon"] == (0 if kind == "adamw" else matrix_count(config))
    assert sum(sizes.values()) == count(config)
    assert all(len(shapes(config)[name]) >= 2 for name in groups["muon"] + groups["decay"])
    assert all(len(shapes(config)[name]) == 1 for name in groups["no_decay"])
    assert "embedding.weight" in groups["decay"]
    optimizers = build_optimizers(model, settings_of(kind))
    held = [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    decay = {id(p): group["weight_decay"] for o in optimizers for group in o.param_groups for p in group["params"]}
    assert all(decay[id(p)] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


def muon_by_hand(
    weight: Any, grads: list[Any], rates: list[float], momentum: float, decay: float, steps: int, by_rows: bool
) -> Any:
    """Muon's formula with NumPy, in the sum form of the momentum (Jordan 2024), which NS cannot tell apart."""
    total, squares = np.zeros_like(weight), np.zeros(len(weight))
    for grad, lr in zip(grads, rates, strict=True):
        total = momentum * total + grad
        x = grad + momentum * total
        x = x / np.sqrt((x**2).sum())
        for _ in range(steps):
            x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
        rows, columns = weight.shape
        if by_rows:  # the whole keeps its norm
            norm = np.sqrt((x**2).sum())
            squares = 0.95 * squares + 0.05 * (x**2).mean(axis=1)
            x = x / (np.sqrt(squares)[:, None] + 1e-8)
            x = x * norm / np.sqrt((x**2).sum())
        weight = weight - lr * decay * weight - lr * max(1.0, rows / columns) ** 0.5 * x
    return weight


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    steps=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    by_rows=st.booleans(),
)
def test_muon_is_its_formula(rows: int, columns: int, steps: int, seed: int, by_rows: bool) -> None:
    random = np.random.default_rng(seed)
    weight, *grads = (random.normal(size=(rows, columns)) for _ in range(5))
    rates = [0.02, 0.01, 0.03, 0.005]
    parameter = nn.Parameter(torch.from_numpy(weight.copy()))
    muon = Muon([parameter], 0.9, steps, "auto", 0.1, by_rows)
    for grad, lr in zip(grads, rates, strict=True):
        parameter.grad = torch.from_numpy(grad)
        set_rates([muon], {"muon_lr": lr})
        muon.step()
    expected = muon_by_hand(weight, grads, rates, 0.9, 0.1, steps, by_rows)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-6, atol=1e-8)


def test_muon_in_bfloat16_is_torchs_muon_bit_for_bit() -> None:
    sizes = [(16, 8), (8, 16), (12, 12), (3, 20)]
    ours, theirs = (parameters_and_grads(sizes, torch.float32, seed=4) for _ in range(2))
    mine = Muon(ours, 0.95, 5, "bfloat16", 0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(4):
        set_rates([mine], {"muon_lr": 0.02})
        mine.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None
            a.grad = b.grad = a.grad.roll(1, 0) * 1.5


def test_newton_schulz_keeps_the_singular_vectors_and_flattens_the_values() -> None:
    matrix = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    for each in (matrix, matrix.T):
        u, _, vh = torch.linalg.svd(each, full_matrices=False)
        inner = u.T @ orthogonalise(each, 5, torch.float32) @ vh.T
        assert ((inner.diagonal() > 0.65) & (inner.diagonal() < 1.25)).all()
        assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_newton_schulz_runs_in_float32_on_the_cpu_unless_told_otherwise() -> None:
    parameter = torch.zeros(2, 2)
    assert arithmetic("auto", parameter) == torch.float32
    assert arithmetic("auto", parameter.to(torch.bfloat16)) == torch.float32
    assert arithmetic("bfloat16", parameter) == torch.bfloat16
    assert orthogonalise(torch.eye(3), 5, torch.bfloat16).dtype == torch.bfloat16


def test_adamw_is_its_formula_and_spares_vectors_from_decay() -> None:
    model = build(small(), seed=1, dtype=torch.float64)
    config = settings_of("adamw", betas=[0.9, 0.95], eps=1e-8)
    optimizers = build_optimizers(model, config)
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    means, squares = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    random = np.random.default_rng(1)
    for update in range(1, 4):
        for name, parameter in model.named_parameters():
            grad = random.normal(size=parameter.shape)
            parameter.grad = torch.from_numpy(grad)
            means[name] = 0.9 * means[name] + 0.1 * grad
            squares[name] = 0.95 * squares[name] + 0.05 * grad**2
            step = means[name] / (1 - 0.9**update) / (np.sqrt(squares[name] / (1 - 0.95**update)) + 1e-8)
            weights[name] = weights[name] * (1 - 0.01 * (0.1 if grad.ndim >= 2 else 0)) - 0.01 * step
        set_rates(optimizers, {"lr": 0.01})
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["muon", "normuon", "adamw"])
def test_saved_and_loaded_state_goes_on_with_the_same_bits_twice(kind: str) -> None:
    config = small(attention_bias=False)
    straight = build(config, seed=1)
    its_optimizers = build_optimizers(straight, settings_of(kind))
    train(straight, its_optimizers, 6)

    model, optimizers = build(config, seed=1), []
    for first in (0, 2, 4):
        saved = {name: tensor.clone() for name, tensor in state_tensors(model, optimizers).items()}
        fresh = build(config, seed=99)
        fresh.load_state_dict(model.state_dict())
        model, optimizers = fresh, build_optimizers(fresh, settings_of(kind))
        if first:
            load_state_tensors(model, optimizers, saved)
        train(model, optimizers, 2, first)

    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), model.parameters(), strict=True))
    expected, got = state_tensors(straight, its_optimizers), state_tensors(model, optimizers)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_state_has_its_names_before_the_first_update_and_keeps_its_place() -> None:
    model = build(small(), seed=1)
    optimizers = build_optimizers(model, settings_of("normuon"))
    before = state_tensors(model, optimizers)
    groups = parameter_groups(model, settings_of("normuon"))
    expected = {f"optimizer.{name}.{part}" for name in groups["muon"] for part in ("momentum", "rows")} | {
        f"optimizer.{name}.{part}"
        for name in groups["decay"] + groups["no_decay"]
        for part in ("exp_avg", "exp_avg_sq", "step")
    }
    assert before.keys() == expected
    assert not any(tensor.any() for tensor in before.values())
    train(model, optimizers, 1)
    after = state_tensors(model, optimizers)
    assert all(after[name] is before[name] and after[name].any() for name in expected)


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = build(small(), seed=1)
    optimizers = build_optimizers(model, settings_of("muon"))
    good = {name: torch.ones_like(tensor) for name, tensor in state_tensors(model, optimizers).items()}
    name = "optimizer.norm.weight.exp_avg"
    for bad, said in (
        ({k: v for k, v in good.items() if k != name}, f"lacks '{name}'"),
        (good | {"optimizer.norm.weight.momentum": good[name]}, "no state 'optimizer.norm.weight.momentum'"),
        (good | {name: good[name][:-1]}, r"float32 \[23\] in the checkpoint.*\[24\]"),
        (good | {name: good[name].double()}, "float64"),
    ):
        with pytest.raises(InputError, match=said):
            load_state_tensors(model, optimizers, bad)
        assert not any(tensor.any() for tensor in state_tensors(model, optimizers).values())
    load_state_tensors(model, optimizers, good)
    assert all(tensor.all() for tensor in state_tensors(model, optimizers).values())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    largest=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_norm_is_over_all_gradients_and_clipping_brings_it_down(
    sizes: list[int], seed: int, largest: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = {f"p{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}
    norm = gradient_norm(grads)
    assert norm.dtype == torch.float64
    exact = math.sqrt(math.fsum(float(x) ** 2 for grad in grads.values() for x in grad))
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert torch.equal(norm, gradient_norm(dict(reversed(grads.items()))))  # the order of names decides, not of keys
    before = {name: grad.clone() for name, grad in grads.items()}
    scale_gradients(grads, norm, largest)
    for name, grad in grads.items():
        if exact < largest:
            assert torch.equal(grad, before[name])
        else:
            torch.testing.assert_close(grad, before[name] * (largest / exact))
    untouched = {name: grad.clone() for name, grad in before.items()}
    scale_gradients(untouched, norm, None)
    assert all(torch.equal(untouched[name], before[name]) for name in before)


def test_gradients_of_zero_stay_zero_and_a_nonfinite_one_shows_in_the_norm() -> None:
    zeros = {"a": torch.zeros(3)}
    scale_gradients(zeros, gradient_norm(zeros), 1.0)
    assert zeros["a"].tolist() == [0, 0, 0]
    for value in (math.nan, math.inf):
        assert not gradient_norm({"a": torch.ones(3), "b": torch.tensor([1.0, value])}).isfinite()
    # Beyond the root of the largest float32 a gradient counts as not finite: no training run comes back from there.
    assert gradient_norm({"a": torch.full((4,), 1e18)}).item() == pytest.approx(2e18)
    assert gradient_norm({"a": torch.full((4,), 1e20)}).isinf()


class Waits(TorchDispatchMode):
    """Notes the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_never_makes_the_host_wait() -> None:
    model = build(small(), seed=1)
    optimizers = build_optimizers(model, settings_of("muon"))
    with Waits() as waits:
        train(model, optimizers, 2)
    assert waits.seen == []
    with Waits() as waits:
        torch.ones(1).item()
    assert waits.seen  # the observer does observe


def test_the_same_inputs_give_the_same_bits() -> None:
    states = []
    for _ in range(2):
        model = build(small(), seed=1)
        optimizers = build_optimizers(model, settings_of("muon"))
        train(model, optimizers, 3)
        states.append([*model.parameters(), *state_tensors(model, optimizers).values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_matrix_without_a_gradient_is_a_fault() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(AssertionError, match="no gradient"):
        Muon([parameter], 0.95, 5, "auto", 0.1).step()
    with pytest.raises(AssertionError, match="matrices"):
        Muon([nn.Parameter(torch.ones(2))], 0.95, 5, "auto", 0.1)


def test_rates_go_to_their_optimizers() -> None:
    model = build(small(), seed=1)
    optimizers = build_optimizers(model, settings_of("muon"))
    assert all(group["lr"] == 0.0 for optimizer in optimizers for group in optimizer.param_groups)
    set_rates(optimizers, {"lr": 1e-4, "muon_lr": 2e-2})
    for optimizer in optimizers:
        expected = 2e-2 if isinstance(optimizer, Muon) else 1e-4
        assert all(group["lr"] == expected for group in optimizer.param_groups)
        assert all(isinstance(tensor, Tensor) for state in optimizer.state.values() for tensor in state.values())
