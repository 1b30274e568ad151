"""Every parameter begins with a value that somebody chose, whatever was in memory before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from assay.model.initial import build, empty, initial_value, initialise
from assay.recipe.schema import Model


def full(**changes: Any) -> Model:
    """A model with every kind of parameter."""
    fields = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 300, "block": 16, "ffn": 96}
    options = {"qk_norm": True, "value_residual": True, "attention_bias": True, "tie_embeddings": False}
    return Model.model_validate(fields | options | changes)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN for as long as the test runs."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # a run in this process switched it off
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("poisoned_memory")
def test_no_poison_is_left() -> None:
    model = empty(full())
    assert all(parameter.isnan().all() for parameter in model.parameters())
    initialise(model, seed=1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_parameter_that_nobody_thought_of_is_refused() -> None:
    model = empty(full())
    model.blocks[1].attention.sink = nn.Parameter(torch.zeros(4))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"no initial value .* 'blocks\.1\.attention\.sink'"):
        initialise(model, seed=1)
    for name in ("blocks.0.attention.router.weight", "blocks.0.ffn.gate.bias", "weight", ""):
        with pytest.raises(ValueError, match="no initial value"):
            initial_value(name, (2, 2), layers=2, seed=1)


def test_values_are_the_intended_ones() -> None:
    layers = 2
    for name, parameter in build(full(), seed=3).named_parameters():
        kind = name.split(".")[-2]
        if name.endswith("value_residual"):
            assert parameter.tolist() == [0.5]
        elif name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in kind:
            assert (parameter == 1).all()
        else:
            deviation = 0.02 / (math.sqrt(2 * layers) if kind in ("o", "down") else 1)
            assert abs(parameter.std().item() / deviation - 1) < 5 / math.sqrt(2 * parameter.numel()), name
            assert abs(parameter.mean().item()) < 5 * deviation / math.sqrt(parameter.numel()), name


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    wide, deep = build(full(), seed=3), build(full(layers=5, qk_norm=False, attention_bias=False), seed=3)
    others = dict(deep.named_parameters())
    for name, parameter in wide.named_parameters():
        if name in others and not name.endswith(("o.weight", "down.weight")):  # those know the depth
            assert torch.equal(parameter, others[name]), name
    gate = "blocks.0.ffn.gate.weight"
    drawn = [initial_value(n, (8, 8), 2, s) for n, s in ((gate, 3), (gate, 4), ("blocks.1.ffn.gate.weight", 3))]
    assert not any(torch.equal(a, b) for a, b in ((drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[1], drawn[2])))


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(full(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = build(full(), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_hold_the_same_float32_draws(dtype: torch.dtype) -> None:
    single, other = build(full(), seed=3), build(full(), seed=3, dtype=dtype)
    for a, b in zip(single.parameters(), other.parameters(), strict=True):
        assert b.dtype == dtype
        assert torch.equal(a.to(dtype), b)
