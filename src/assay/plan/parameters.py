"""The parameters of a decoder: names, shapes and their exact number, from the recipe alone.

The model asserts that it has exactly these, so plan and model cannot drift apart.
It needs no torch and allocates nothing.
"""

from __future__ import annotations

from math import prod

from assay.recipe.schema import Model

MATRICES = ("attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down")


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter, in the order of the forward pass; tied embeddings appear once."""
    result: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocabulary, model.width)}
    for layer in range(model.layers):
        for name, shape in block_shapes(model, first=layer == 0).items():
            result[f"blocks.{layer}.{name}"] = shape
    result["norm.weight"] = (model.width,)
    if not model.tie_embeddings:
        result["head.weight"] = (model.vocabulary, model.width)
    return result


def block_shapes(model: Model, first: bool) -> dict[str, tuple[int, ...]]:
    """Name → shape within one block. The first block has no value residual: there is nothing before it to mix in."""
    width, head = model.width, model.head_size
    queries, keys = model.heads * head, model.kv_heads * head
    result: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,),
        "attention.q.weight": (queries, width),
        "attention.k.weight": (keys, width),
        "attention.v.weight": (keys, width),
        "attention.o.weight": (width, queries),
    }
    if model.attention_bias:
        result |= {
            "attention.q.bias": (queries,),
            "attention.k.bias": (keys,),
            "attention.v.bias": (keys,),
            "attention.o.bias": (width,),
        }
    if model.qk_norm:
        result |= {"attention.q_norm.weight": (head,), "attention.k_norm.weight": (head,)}
    if model.value_residual and not first:
        result["attention.value_residual"] = (1,)
    result |= {
        "ffn_norm.weight": (width,),
        "ffn.gate.weight": (model.ffn, width),
        "ffn.up.weight": (model.ffn, width),
        "ffn.down.weight": (width, model.ffn),
    }
    return result


def count(model: Model) -> int:
    """The number of parameters, tied embeddings counted once."""
    return sum(prod(shape) for shape in shapes(model).values())


def matrix_count(model: Model) -> int:
    """How many of them lie in the matrices that Muon updates: q, k, v, o, gate, up and down of every block."""
    one = block_shapes(model, first=True)
    return model.layers * sum(prod(one[f"{name}.weight"]) for name in MATRICES)
