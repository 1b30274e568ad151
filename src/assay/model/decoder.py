"""The decoder: every option of the recipe's `model` section, in plain PyTorch, on one page.

Promises the numbers of transformers' LlamaForCausalLM and Qwen3ForCausalLM where the shapes agree,
and exactly the parameters that `assay.plan.parameters` counts. It does not initialise (see
`initial`), does not compute the loss, and keeps no cache for generation.

Axes in names: B sequences, T positions, W width, H heads, D one head's size, V vocabulary, F hidden
size of the feed-forward part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from assay.recipe.operational import Recompute
from assay.recipe.schema import Model

# What `recompute: selective` keeps: it is dear to compute again. The rest takes about as much memory and little time.
_KEPT = [
    torch.ops.higher_order.flex_attention,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]

Mask = Tensor | BlockMask | None
TILE = 128  # positions of a side of the tiles in which FlexAttention works


class Linear(nn.Linear):
    """x · weightᵀ + bias; with `copy`, the weight in the type of the arithmetic, in the weight's place."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.copy: Tensor | None = None  # see `Decoder.take_up`; here, for a compiler asks where an attribute lies

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight if self.copy is None else self.copy, self.bias)


class RMSNorm(nn.Module):
    """x ÷ √(mean(x²) + eps) × weight over the last axis (Zhang and Sennrich 2019).

    The quotient is formed in float32 whatever the input's type, float64 included, because
    transformers' LlamaRMSNorm does so and the logits are to agree with it to 1e-9.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


def rotation(positions: int, size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D] of RoPE (Su et al. 2021), float32, frequencies θ^(−2i ÷ D) laid out twice.

    Computed anew in each forward pass: cheap, and no buffer can be left unset by a construction on
    the meta device. Always float32, for the reason given at `RMSNorm`.
    """
    with torch.autocast(device.type, enabled=False):
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequency = 1.0 / (theta**exponent)
        angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate(x_BHTD: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
    """RoPE in the half-rotation layout of the Hugging Face models: pairs are (i, i + D ÷ 2)."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cosine_TD + torch.cat((-second, first), dim=-1) * sine_TD


class Attention(nn.Module):
    """Causal grouped-query attention, with QK-norm, value residual and bias where the recipe says so."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_size
        bias = config.attention_bias
        self.q = Linear(config.width, self.heads * self.size, bias=bias)
        self.k = Linear(config.width, self.kv_heads * self.size, bias=bias)
        self.v = Linear(config.width, self.kv_heads * self.size, bias=bias)
        self.o = Linear(self.heads * self.size, config.width, bias=bias)
        self.q_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None
        mixes = config.value_residual and layer > 0
        self.value_residual = nn.Parameter(torch.empty(1)) if mixes else None

    def forward(
        self, x_BTW: Tensor, first_BHTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """The output [B, T, W] and this layer's own values, before any mixing.

        `first_BHTD` are the values of layer 0; `mask` [B, 1, T, T] is true where a query may look, or says the same
        as a `BlockMask`; None for plain causal attention.
        """
        B, T, _ = x_BTW.shape
        q = self.q(x_BTW).view(B, T, self.heads, self.size)
        k = self.k(x_BTW).view(B, T, self.kv_heads, self.size)
        v = own = self.v(x_BTW).view(B, T, self.kv_heads, self.size).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cosine, sine = (part.to(q.dtype) for part in rope)
        q, k = rotate(q.transpose(1, 2), cosine, sine), rotate(k.transpose(1, 2), cosine, sine)
        if self.value_residual is not None:
            # Value residual (Zhou et al. 2024), one learned scalar a layer.
            assert first_BHTD is not None
            share = self.value_residual
            v = ((1 - share) * own + share * first_BHTD).to(own.dtype)
        grouped = self.kv_heads < self.heads
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
            return self.o(y.transpose(1, 2).reshape(B, T, self.heads * self.size)), own
        if mask is not None and grouped:  # the memory-saving kernels for masks know no groups
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
            grouped = False
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).reshape(B, T, self.heads * self.size)), own


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) × up(x))."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.ffn, bias=False)
        self.up = Linear(config.width, config.ffn, bias=False)
        self.down = Linear(config.ffn, config.width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW))
        return y


class Block(nn.Module):
    """One layer, pre-norm: x + attention(norm(x)), then x + ffn(norm(x)).

    Recomputation happens in here, so that a compiler sees it and engines that gather weights do so once.
    """

    def __init__(self, config: Model, layer: int, recompute: Recompute = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x_BTW: Tensor, first_BHTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> tuple[Tensor, Tensor]:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._whole(x_BTW, first_BHTD, rope, mask)
        more: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.recompute == "selective":
            more["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
        result: tuple[Tensor, Tensor] = checkpoint(self._whole, x_BTW, first_BHTD, rope, mask, **more)
        return result

    def _whole(
        self, x_BTW: Tensor, first_BHTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> tuple[Tensor, Tensor]:
        y, own = self.attention(self.attention_norm(x_BTW), first_BHTD, rope, mask)
        x_BTW = x_BTW + y
        return x_BTW + self.ffn(self.ffn_norm(x_BTW)), own


class Decoder(nn.Module):
    """The whole model. Construct it through `initial.build`; the parameters are unset here.

    With `recompute` each block's activations are dropped after the forward pass and computed again
    in the backward pass; with `selective` only those that are cheap. The numbers are the same.
    """

    def __init__(self, config: Model, recompute: Recompute = False) -> None:
        super().__init__()
        self.config = config
        self.sliced = False  # set by the engine under which no parameter is whole between the blocks
        self.tiled = False  # whether masks are `document_tiles` for FlexAttention, in place of one bit a pair
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer, recompute) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.width, config.vocabulary, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, W]: the embedding itself when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def compile_blocks(self) -> None:
        """Compile each block when it is first used; all blocks of one kind share what is compiled.

        On a GPU documents are then kept apart by FlexAttention, which must be compiled and has no backward on CPUs.
        """
        for block in self.blocks:
            block.compile(dynamic=False)
        self.tiled = self.embedding.weight.device.type == "cuda"

    def take_up(self, dtype: torch.dtype) -> None:
        """Once an update: the blocks' matrices in `dtype`, copied where they have another, for all its micro-batches.

        Gradients flow on to the parameters with every backward pass. `let_go` before parameters change. Under an
        engine that slices the parameters each block casts its own when it is in work; the numbers are the same.
        """
        for module in self.modules():
            if isinstance(module, Linear) and module.weight.dtype != dtype and not self.sliced:
                module.copy = module.weight.to(dtype)

    def let_go(self) -> None:
        """Give up what `take_up` made."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.copy = None

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, W] after the final norm.

        `documents_BT` are integers that tell the documents of a window apart; they are required
        when the recipe sets `document_mask`, and refused otherwise, so that neither is forgotten.
        Positions are not reset at a document's start.
        """
        if self.config.document_mask != (documents_BT is not None):
            raise ValueError("document ids are given to forward exactly when the recipe sets document_mask")
        mask: Mask = None
        if documents_BT is not None:
            mask = document_tiles(documents_BT) if self.tiled else document_mask(documents_BT)
        size = self.config.head_size
        rope = rotation(tokens_BT.shape[1], size, self.config.rope_theta, tokens_BT.device)
        x = self.embedding(tokens_BT)
        first: Tensor | None = None
        for block in self.blocks:
            x, own = block(x, first, rope, mask)
            if first is None and self.config.value_residual:
                first = own
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., W], capped where the recipe says so: c·tanh(x ÷ c)."""
        return soft_cap(F.linear(hidden, self.head_weight), self.config.logit_cap)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """c·tanh(x ÷ c); a cap of 0 means none."""
    return cap * torch.tanh(logits / cap) if cap else logits


def document_mask(documents_BT: Tensor) -> Tensor:
    """[B, 1, T, T], true where query and key are of one document and the key is not later."""
    T = documents_BT.shape[1]
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()


def document_tiles(documents_BT: Tensor) -> BlockMask:
    """As `document_mask`, for FlexAttention: which tiles of queries and keys meet, wholly or in part.

    Found from each tile's least and greatest document alone, so that nothing of the size [T, T] is made; whatever the
    order of the documents, a pair that may not meet is kept apart. Tiles without a common document are never computed.
    """
    B, T = documents_BT.shape
    tiles = -(-T // TILE)
    filled = torch.cat((documents_BT, documents_BT[:, -1:].expand(B, tiles * TILE - T)), dim=1).view(B, tiles, TILE)
    low, high = filled.amin(-1), filled.amax(-1)
    q_low, q_high, k_low, k_high = low[:, :, None], high[:, :, None], low[:, None, :], high[:, None, :]
    place = torch.arange(tiles, device=documents_BT.device)
    earlier = place[:, None] > place[None, :]
    meet = (earlier | torch.eye(tiles, dtype=torch.bool, device=place.device)) & (k_low <= q_high) & (k_high >= q_low)
    whole = earlier & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)

    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BT[batch, query] == documents_BT[batch, key])

    part, parts = _listed(meet & ~whole)
    full, fulls = _listed(whole)
    return BlockMask.from_kv_blocks(part, parts, full, fulls, BLOCK_SIZE=TILE, mask_mod=may_look, seq_lengths=(T, T))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of [B, rows, columns] how many columns are chosen, and all places, the chosen first.

    With an axis for the heads, which are all alike.
    """
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
