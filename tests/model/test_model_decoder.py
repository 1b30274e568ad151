"""The decoder computes the formulas, has the planned parameters, and gives the same bits twice."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from assay.model.decoder import Decoder, Linear, RMSNorm, document_mask, document_tiles, soft_cap
from assay.model.initial import build
from assay.plan.parameters import count, shapes
from assay.recipe.operational import Recompute
from assay.recipe.schema import Model

TOKENS = torch.tensor([[3, 9, 1, 0, 22, 5, 5, 18, 7, 2, 11, 30], [8, 8, 4, 19, 28, 1, 2, 3, 0, 17, 25, 6]])


def small(**changes: Any) -> Model:
    """A model of a few hundred parameters with grouped queries."""
    fields = {"layers": 3, "width": 24, "heads": 4, "kv_heads": 2, "vocabulary": 31, "block": 16, "ffn": 40}
    return Model.model_validate(fields | changes)


def loud(config: Model, dtype: torch.dtype = torch.float64, recompute: Recompute = False) -> Decoder:
    """A decoder with weights far from their initial values, so that each term matters."""
    model = build(config, seed=5, dtype=dtype, recompute=recompute)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def by_hand(config: Model, w: dict[str, Tensor], tokens: Tensor, documents: Tensor) -> Tensor:
    """Logits [V] of the last position, in float64, written for one sequence, position by position."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum() / len(x) + config.norm_eps) * weight

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        turned = torch.empty_like(x)
        for i in range(half):
            angle = position / config.rope_theta ** (2 * i / len(x))
            turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return turned

    size = config.head_size
    stream = [w["embedding.weight"][int(token)] for token in tokens]
    first_values: list[Tensor] = []
    for layer in range(config.layers):
        at = f"blocks.{layer}."
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            y = norm(x, w[at + "attention_norm.weight"])
            parts = {}
            for part in "qkv":
                parts[part] = w[f"{at}attention.{part}.weight"] @ y + w.get(f"{at}attention.{part}.bias", 0.0)
            q, k, v = (parts[part].view(-1, size) for part in "qkv")
            if config.qk_norm:
                q = torch.stack([norm(head, w[at + "attention.q_norm.weight"]) for head in q])
                k = torch.stack([norm(head, w[at + "attention.k_norm.weight"]) for head in k])
            queries.append(torch.stack([turn(head, position) for head in q]))
            keys.append(torch.stack([turn(head, position) for head in k]))
            values.append(v)
        if layer == 0:
            first_values = values
        elif config.value_residual:
            s = w[at + "attention.value_residual"]
            values = [(1 - s) * v + s * v0 for v, v0 in zip(values, first_values, strict=True)]
        after = []
        for position, x in enumerate(stream):
            seen = [j for j in range(position + 1) if not config.document_mask or documents[j] == documents[position]]
            heads = []
            for head in range(config.heads):
                group = head // (config.heads // config.kv_heads)
                scores = torch.stack([queries[position][head] @ keys[j][group] for j in seen]) / math.sqrt(size)
                share = torch.exp(scores) / torch.exp(scores).sum()
                heads.append(sum(share[n] * values[j][group] for n, j in enumerate(seen)))
            x = x + w[at + "attention.o.weight"] @ torch.cat(heads) + w.get(at + "attention.o.bias", 0.0)
            y = norm(x, w[at + "ffn_norm.weight"])
            gate = w[at + "ffn.gate.weight"] @ y
            x = x + w[at + "ffn.down.weight"] @ (gate / (1 + torch.exp(-gate)) * (w[at + "ffn.up.weight"] @ y))
            after.append(x)
        stream = after
    head = w["embedding.weight"] if config.tie_embeddings else w["head.weight"]
    logits = head @ norm(stream[-1], w["norm.weight"])
    return config.logit_cap * torch.tanh(logits / config.logit_cap) if config.logit_cap else logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "kv_heads": 4},
        {"qk_norm": True},
        {"value_residual": True},
        {"attention_bias": True, "rope_theta": 500.0},
        {"logit_cap": 2.0},
        {"document_mask": True, "kv_heads": 1},
        {"qk_norm": True, "value_residual": True, "attention_bias": True, "logit_cap": 3.0, "document_mask": True},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_logits_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    config = small(**changes)
    model = loud(config)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 9]])
    with torch.no_grad():
        logits = model.logits(model(TOKENS, documents if config.document_mask else None))[:, -1]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for row in range(2):
        expected = by_hand(config, weights, TOKENS[row], documents[row])
        assert expected.std() > 0.3  # the comparison would be empty if all were near zero
        # The decoder forms norms and angles in float32, as transformers does.
        torch.testing.assert_close(logits[row], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=4)))
def test_the_parameters_are_exactly_the_planned_ones(switches: tuple[bool, ...]) -> None:
    named = dict(zip(("qk_norm", "value_residual", "attention_bias", "tie_embeddings"), switches, strict=True))
    config = small(**named)
    model = build(config, seed=1)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes(config)
    assert sum(p.numel() for p in model.parameters()) == count(config)
    assert list(model.named_buffers()) == []


def test_a_position_sees_nothing_that_comes_later() -> None:
    model = loud(small(qk_norm=True, value_residual=True))
    changed = TOKENS.clone()
    changed[:, 7] = 12
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_under_the_document_mask_a_document_reads_as_if_it_were_alone() -> None:
    model = loud(small(document_mask=True, value_residual=True))
    documents = torch.tensor([[5] * 7 + [6] * 5])
    with torch.no_grad():
        together = model(TOKENS[:1], documents)
        alone = model(TOKENS[:1, 7:], documents[:, 7:])
    # Rotary positions are relative, so that they are not reset does not show.
    torch.testing.assert_close(together[:, 7:], alone, rtol=1e-5, atol=1e-5)


def test_document_ids_are_neither_forgotten_nor_ignored() -> None:
    with pytest.raises(ValueError, match="document ids"):
        loud(small(document_mask=True))(TOKENS)
    with pytest.raises(ValueError, match="document ids"):
        loud(small())(TOKENS, torch.zeros_like(TOKENS))


def gradients(model: Decoder, documents: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model.logits(model(TOKENS, documents)).flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Of the library: FlexAttention asks to be compiled, which a test of one forward pass does not need.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_documents_kept_apart_by_tiles_give_the_hidden_states_of_the_mask() -> None:
    """Documents of all lengths, over and within tiles, some wholly seen and some not at all; no [T, T] is made."""
    config = small(document_mask=True, block=600, layers=1)
    model = loud(config, torch.float32)
    lengths = [[3, 300, 1, 140, 156], [600], [128, 128, 128, 128, 88]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    tokens = torch.randint(0, 31, documents.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens, documents)
        model.tiled = True
        torch.testing.assert_close(model(tokens, documents), expected, rtol=1e-5, atol=1e-5)
        with Sizes() as sizes:
            tiles = document_tiles(documents)
    assert sizes.largest <= 3 * 640
    kept = create_mask(tiles.mask_mod, 3, 1, 600, 600, device="cpu")
    assert torch.equal(kept, document_mask(documents))
    dense = tiles.to_dense()[:, 0]
    pairs = F.pad(kept[:, 0], (0, 40, 0, 40)).view(3, 5, 128, 5, 128)
    assert torch.equal(dense.bool(), pairs.any(-1).any(2)), "the tiles that are computed are those with a pair in them"
    assert tiles.full_kv_num_blocks is not None
    assert tiles.full_kv_num_blocks.sum() == 4 + 3 + 2 + 1, "the window of one document"


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that was made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_other_documents_are_no_reason_to_compile_again() -> None:
    config = small(document_mask=True, block=16)
    model = loud(config, torch.float32)
    model.tiled = True
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="eager", dynamic=False)
    with torch.no_grad():
        for number in range(4):
            model(TOKENS, (TOKENS.cumsum(1) + number) // 40)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True])
def test_recomputation_and_repetition_change_no_bit_of_any_gradient(masked: bool) -> None:
    config = small(qk_norm=True, value_residual=True, document_mask=masked)
    documents = TOKENS.cumsum(1) // 40 if masked else None
    plain, again = loud(config, torch.float32), loud(config, torch.float32, recompute=True)
    selective = loud(config, torch.float32, recompute="selective")
    first = gradients(plain, documents)
    assert first.keys() == shapes(config).keys()
    for other in (gradients(plain, documents), gradients(again, documents), gradients(selective, documents)):
        assert all(torch.equal(first[name], other[name]) for name in first)


class Counts(TorchDispatchMode):
    """How often each operation ran, and how often a parameter was put into another type."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        self.casts += str(func) == "aten._to_copy.default" and isinstance(args[0], torch.nn.Parameter)
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_multiplies_and_attends_no_second_time() -> None:
    dear = ("aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default")
    found = {}
    for recompute in (False, "selective", True):
        model = loud(small(qk_norm=True), torch.float32, recompute=recompute)
        with Counts() as counts:
            gradients(model, None)
        found[recompute] = ([counts.operations[name] for name in dear], counts.operations["aten.silu.default"])
    assert found["selective"][0] == found[False][0]
    assert found["selective"][1] == 2 * found[False][1] == found[True][1]
    assert all(again > once > 0 for again, once in zip(found[True][0], found[False][0], strict=True))


def test_weights_are_cast_once_an_update_and_the_gradients_are_those_of_casting_each_time() -> None:
    model = loud(small(), torch.float32)
    matrices = 7 * model.config.layers
    results = []
    for once in (False, True):
        model.zero_grad()
        with Counts() as counts:
            if once:
                model.take_up(torch.bfloat16)
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = model(TOKENS)
                hidden.square().sum().backward()
            model.let_go()
        assert counts.casts == (1 if once else 3) * matrices
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for name, gradient in results[0].items():
        assert gradient is not None
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, results[1][name]), name
    model.take_up(torch.float32)
    assert all(module.copy is None for module in model.modules() if isinstance(module, Linear))


def test_the_norm_of_a_low_precision_input_is_formed_in_float32() -> None:
    norm = RMSNorm(512, 1e-6)
    with torch.no_grad():
        norm.weight.fill_(1.0)
    x = torch.linspace(-3, 5, 512).to(torch.bfloat16)
    exact = x.double() / torch.sqrt((x.double() ** 2).mean() + 1e-6)
    assert torch.equal(norm.to(torch.bfloat16)(x), exact.to(torch.bfloat16))


def test_the_cap_bounds_the_logits_and_leaves_small_ones() -> None:
    logits = torch.tensor([-1e4, -0.001, 0.0, 0.001, 1e4], dtype=torch.float64)
    torch.testing.assert_close(
        soft_cap(logits, 15.0), torch.tensor([-15.0, -0.001, 0.0, 0.001, 15.0], dtype=torch.float64), rtol=1e-7, atol=0
    )
    assert soft_cap(logits, 0.0) is logits


def test_bfloat16_arithmetic_over_float32_weights_stays_near_the_float32_result() -> None:
    config = small(qk_norm=True, value_residual=True)
    model = build(config, seed=2)
    with torch.no_grad():
        exact = model(TOKENS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(TOKENS)
    assert 0 < (low - exact).norm() < 0.02 * exact.norm()
