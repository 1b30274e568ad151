"""Modelling file of an exported Assay model, for transformers 5 and later (`trust_remote_code=True`).

Computes the logits of Assay's decoder from weights under Assay's names; it imports nothing of Assay
and is copied beside the weights. It keeps no cache, so generating costs a whole pass a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput


class AssayConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of the decoder. `logit_cap` 0 means none."""

    model_type = "assay"

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        max_position_embeddings: int = 256,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10_000.0,
        attention_bias: bool = False,
        qk_norm: bool = False,
        value_residual: bool = False,
        logit_cap: float = 0.0,
        document_mask: bool = False,
        tie_word_embeddings: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.attention_bias = attention_bias
        self.qk_norm = qk_norm
        self.value_residual = value_residual
        self.logit_cap = logit_cap
        self.document_mask = document_mask
        self.tie_word_embeddings = tie_word_embeddings
        self.use_cache = False
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """x ÷ √(mean(x²) + eps) × weight, the quotient in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Causal grouped-query attention with optional QK-norm and value residual."""

    def __init__(self, config: AssayConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        bias = config.attention_bias
        self.q = nn.Linear(config.hidden_size, self.heads * self.size, bias=bias)
        self.k = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=bias)
        self.v = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=bias)
        self.o = nn.Linear(self.heads * self.size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size, config.rms_norm_eps) if config.qk_norm else None
        mixes = config.value_residual and layer > 0
        self.value_residual = nn.Parameter(torch.full((1,), 0.5)) if mixes else None

    def forward(
        self, x: Tensor, first: Tensor | None, cosine: Tensor, sine: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size)
        k = self.k(x).view(batch, length, self.kv_heads, self.size)
        v = own = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cosine, sine), rotate(k.transpose(1, 2), cosine, sine)
        if self.value_residual is not None and first is not None:
            v = ((1 - self.value_residual) * own + self.value_residual * first).to(own.dtype)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(y.transpose(1, 2).reshape(batch, length, self.heads * self.size)), own


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) × up(x))."""

    def __init__(self, config: AssayConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """One layer, pre-norm."""

    def __init__(self, config: AssayConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, first: Tensor | None, cosine: Tensor, sine: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, own = self.attention(self.attention_norm(x), first, cosine, sine, mask)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), own


class AssayForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder with its output matrix."""

    config_class = AssayConfig
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config: AssayConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits [B, T, V] for token ids [B, T].

        `attention_mask` [B, T] is 0 at padding. `documents` [B, T] tells documents apart for a model that
        was trained with `document_mask`; without it the whole row is one document. The loss for `labels`
        is the mean cross-entropy in nats, the labels being shifted here.
        """
        length, device = input_ids.shape[1], input_ids.device
        x = self.embedding(input_ids)
        size = self.config.hidden_size // self.config.num_attention_heads
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequency = 1.0 / (self.config.rope_theta**exponent)
        angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
        angle = torch.cat((angle, angle), dim=-1)
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = None
        if attention_mask is not None or documents is not None:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
            if documents is not None:
                mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
            if attention_mask is not None:
                # Padding may look at itself: a row without a single key is NaN in some attention kernels.
                itself = torch.eye(length, dtype=torch.bool, device=device)
                mask = mask & (attention_mask.bool()[:, None, None, :] | itself)
        first = None
        for block in self.blocks:
            x, own = block(x, first, cosine, sine, mask)
            first = own if first is None else first
        matrix = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), matrix)
        if self.config.logit_cap:
            logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
