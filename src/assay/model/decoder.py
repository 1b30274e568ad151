"""The decoder: every option of the recipe's `model` section, in plain PyTorch, on one page.

Promises the numbers of transformers' LlamaForCausalLM and Qwen3ForCausalLM where the shapes agree,
and exactly the parameters that `assay.plan.parameters` counts. It does not initialise (see
`initial`), does not compute the loss, and keeps no cache for generation.

Axes in names: B sequences, T positions, W width, H heads, D one head's size, V vocabulary, F hidden
size of the feed-forward part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.recipe.schema import Model


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
        self.q = nn.Linear(config.width, self.heads * self.size, bias=bias)
        self.k = nn.Linear(config.width, self.kv_heads * self.size, bias=bias)
        self.v = nn.Linear(config.width, self.kv_heads * self.size, bias=bias)
        self.o = nn.Linear(self.heads * self.size, config.width, bias=bias)
        self.q_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None
        mixes = config.value_residual and layer > 0
        self.value_residual = nn.Parameter(torch.empty(1)) if mixes else None

    def forward(
        self, x_BTW: Tensor, first_BHTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output [B, T, W] and this layer's own values, before any mixing.

        `first_BHTD` are the values of layer 0; `mask` [B, 1, T, T] is true where a query may look,
        None for plain causal attention.
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
        if mask is not None and grouped:  # the memory-saving kernels for masks know no groups
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
            grouped = False
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).reshape(B, T, self.heads * self.size)), own


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) × up(x))."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW))
        return y


class Block(nn.Module):
    """One layer, pre-norm: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x_BTW: Tensor, first_BHTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, own = self.attention(self.attention_norm(x_BTW), first_BHTD, rope, mask)
        x_BTW = x_BTW + y
        return x_BTW + self.ffn(self.ffn_norm(x_BTW)), own


class Decoder(nn.Module):
    """The whole model. Construct it through `initial.build`; the parameters are unset here.

    With `recompute` each block's activations are dropped after the forward pass and computed again
    in the backward pass; the numbers are the same.
    """

    def __init__(self, config: Model, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.width, config.vocabulary, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, W]: the embedding itself when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, W] after the final norm.

        `documents_BT` are integers that tell the documents of a window apart; they are required
        when the recipe sets `document_mask`, and refused otherwise, so that neither is forgotten.
        Positions are not reset at a document's start.
        """
        if self.config.document_mask != (documents_BT is not None):
            raise ValueError("document ids are given to forward exactly when the recipe sets document_mask")
        mask = None if documents_BT is None else document_mask(documents_BT)
        size = self.config.head_size
        rope = rotation(tokens_BT.shape[1], size, self.config.rope_theta, tokens_BT.device)
        x = self.embedding(tokens_BT)
        first: Tensor | None = None
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x, own = checkpoint(block, x, first, rope, mask, use_reentrant=False, preserve_rng_state=False)
            else:
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
