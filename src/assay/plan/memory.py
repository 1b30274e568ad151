"""What one GPU must hold while training, in bytes, from the recipe alone.

The large terms are exact counts of the tensors that the trainer keeps; activations are counted from
the operations of the decoder. Not in it: the allocator's fragmentation, CUDA's own context,
communication buffers and the optimizer's passing work space; leave a tenth of the memory free for them.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

from assay.plan.owners import BUCKET, owners
from assay.plan.parameters import MATRICES, count, matrix_count, shapes
from assay.recipe.operational import Recompute
from assay.recipe.schema import MUONS, Recipe

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4  # weights, gradients and optimizer state are float32


def optimizer_bytes(recipe: Recipe, ranks: int | None = None) -> int:
    """State of the optimizer: two moments a parameter with AdamW, one momentum for each parameter that Muon updates.

    With NorMuon one number a row more. Of all ranks together, or of the busiest owner among `ranks`.
    """
    every, kind = shapes(recipe.model), recipe.optimizer.kind
    owner = owners({name: prod(shape) for name, shape in every.items()}, ranks or 1)
    load = [0] * (ranks or 1)
    for name, shape in every.items():
        held = 2 * prod(shape)
        if kind in MUONS and name.removesuffix(".weight").endswith(MATRICES):
            held = prod(shape) + (shape[0] if kind == "normuon" else 0)
        load[owner[name]] += MASTER * held
    return max(load)


def state_bytes(recipe: Recipe, kind: str = "full") -> int:
    """Tensors of a checkpoint: weights, and with `full` the optimizer's state; manifest and headers not counted."""
    return MASTER * count(recipe.model) + (optimizer_bytes(recipe) if kind == "full" else 0)


def host_bytes(recipe: Recipe, ranks: int) -> int:
    """Host memory of all ranks together for copies that are written while training goes on.

    A full checkpoint's tensors, each once; of several ranks the first also holds whole weights where weights
    checkpoints are due (not with `fsdp`, which writes those at once).
    """
    whole = ranks > 1 and recipe.checkpoint.weights_every is not None and recipe.runtime.engine != "fsdp"
    return state_bytes(recipe) + (state_bytes(recipe, "weights") if whole else 0)


def block_activation_bytes(recipe: Recipe) -> int:
    """Bytes one block keeps for the backward pass, for one micro-batch, without recomputation.

    Counted tensor by tensor as in Korthikanti et al. 2022 ("Reducing activation recomputation in large
    transformer models", section 4), for this decoder: a memory-saving attention kernel keeps no scores,
    only its log-sum-exp. Per position, with W the width, K the width of keys and of values, F the
    feed-forward size, c bytes of the arithmetic and s of the residual stream (float32 under bfloat16):

    - two norms: input and quotient, 4·W·s;
    - the inputs of q, k, v and of gate, up: 2·W·c, or 5·W·c under autocast, which casts once for each;
    - QK-norm: input in float32 and quotient, (W + K)·(4 + c), under float32 (W + K)·8;
    - attention: q, k, v and output, (2·W + 2·K)·c, and 4 bytes a head;
    - value residual: the values before mixing, K·c;
    - SwiGLU: gate, silu(gate), up and their product, 4·F·c.
    """
    model = recipe.model
    width, keys = model.width, model.kv_heads * model.head_size
    compute = BYTES[recipe.precision.compute]
    stream = max(compute, MASTER)
    cast = compute < stream
    each = 4 * width * stream + (5 if cast else 2) * width * compute
    if model.qk_norm:
        each += (width + keys) * (MASTER + compute)
    each += (2 * width + 2 * keys) * compute + 4 * model.heads
    if model.value_residual:
        each += keys * compute
    each += 4 * model.ffn * compute
    return each * recipe.batch.micro * model.block


def selective_bytes(recipe: Recipe) -> int:
    """Bytes one block keeps for the backward pass of a micro-batch with `recompute: selective`.

    Per position: its input, W·s, and the results of its products and of attention: q, k, v, attention, o, gate,
    up and down, (4·W + 2·K + 2·F)·c, with 4 bytes a head for the log-sum-exp.
    """
    model = recipe.model
    width, keys = model.width, model.kv_heads * model.head_size
    compute = BYTES[recipe.precision.compute]
    each = width * max(compute, MASTER) + (4 * width + 2 * keys + 2 * model.ffn) * compute + 4 * model.heads
    return each * recipe.batch.micro * model.block


def activation_bytes(recipe: Recipe, recompute: Recompute) -> int:
    """Bytes kept for the backward pass of one micro-batch at its fullest moment.

    With recomputation each block keeps its input alone, or with `selective` the results of its products as well, and
    one block at a time is whole again. Outside of the blocks: the final norm's input and quotient, its output and
    the gradient of that output.
    """
    model = recipe.model
    compute = BYTES[recipe.precision.compute]
    stream = max(compute, MASTER)
    positions = recipe.batch.micro * model.block
    outside = 4 * model.width * stream * positions
    whole = block_activation_bytes(recipe)
    if not recompute:
        return outside + model.layers * whole
    if recompute == "selective":
        return outside + (model.layers - 1) * selective_bytes(recipe) + whole
    kept = model.width * stream * positions
    shared = model.kv_heads * model.head_size * compute * positions if model.value_residual else 0
    return outside + model.layers * kept + whole + shared


def logits_bytes(recipe: Recipe) -> int:
    """The chunked loss at its fullest: logits, log-probabilities and their slope for one chunk of positions.

    Under bfloat16 the slope and the raw logits are two bytes each, the two others four.
    """
    positions = min(recipe.loss.chunk, recipe.batch.micro * recipe.model.block)
    compute = BYTES[recipe.precision.compute]
    exact = max(compute, MASTER)
    return positions * recipe.model.vocabulary * (2 * exact + compute)


def memory(recipe: Recipe, ranks: int, recompute: Recompute | None = None) -> dict[str, int]:
    """Bytes on one GPU when `ranks` of them run the recipe, and their `total`, with `recompute` or the recipe's own.

    Weights are whole on each rank (`replicated`) or spread over the ranks with the blocks in work whole (`fsdp`);
    optimizer state and the joined gradients lie with the owners of whole tensors, of whom the busiest is counted.
    A lane's gradient is whole on its rank until the exchange, which sends and receives one bucket at a time; the
    canonical reduction keeps log2(lanes ÷ ranks) partial sums beside it.
    """
    recompute = recipe.runtime.recompute if recompute is None else recompute
    parameters = count(recipe.model)
    sizes = {name: prod(shape) for name, shape in shapes(recipe.model).items()}
    owner = owners(sizes, ranks)
    owned = max(sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(ranks))
    compute = BYTES[recipe.precision.compute]
    sharded = ranks > 1 and recipe.runtime.engine == "fsdp"
    copy = parameters * compute if compute != MASTER else 0
    gradients, weights = parameters, parameters
    if sharded:
        # the embedding and the two blocks that are gathered at one time
        embedding = recipe.model.vocabulary * recipe.model.width
        work = embedding + 2 * -(-(parameters - embedding) // recipe.model.layers)
        copy = work * MASTER
        if compute != MASTER:
            # The backward pass needs the matrices in the arithmetic's type; without recomputation they wait for it.
            copy += compute * (work if recompute else embedding + matrix_count(recipe.model))
        weights = -(-parameters // ranks) + owned
        # Between the micro-batches of a lane its gradient is whole; otherwise it leaves block by block.
        gradients = parameters if recipe.batch.accumulation > 1 else work
    partial = int(log2(recipe.batch.lanes // ranks)) if recipe.reduction == "canonical" else 0
    parts = {
        "weights": MASTER * weights,
        "compute_copy": copy,
        "gradients": MASTER * gradients,
        "partial_sums": partial * MASTER * parameters,
        "exchange": MASTER * (owned + 2 * min(BUCKET, parameters)) if ranks > 1 else 0,
        "optimizer": optimizer_bytes(recipe, None if ranks == 1 else ranks),
        "activations": activation_bytes(recipe, recompute),
        "logits": logits_bytes(recipe),
    }
    return {**parts, "total": sum(parts.values())}


def memory_by_ranks(recipe: Recipe) -> dict[str, Any]:
    """The plan's `memory_bytes`: the terms for one GPU, activations both ways, and the totals for each rank count."""
    most = recipe.batch.lanes
    per_rank = {str(ranks): memory(recipe, ranks) for ranks in recipe.rank_counts}
    one = per_rank[str(most)]
    with_recompute = memory(recipe, most, True)
    selective = memory(recipe, most, "selective")
    without = memory(recipe, most, False)
    return {
        **one,
        "ranks": most,
        "activations_with_recomputation": with_recompute["activations"],
        "activations_with_selective_recomputation": selective["activations"],
        "activations_without_recomputation": without["activations"],
        "total_with_recomputation": with_recompute["total"],
        "total_with_selective_recomputation": selective["total"],
        "total_without_recomputation": without["total"],
        "host_copies": host_bytes(recipe, most),
        "per_gpu": per_rank,
    }
