"""What a model is, as far as running it goes. Knows no file format: `hf_config` reads Hugging Face's."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from services.worker.model.rope import Rope
from services.worker.ops import Activation

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelError(Exception):
    """The model cannot be served as it is; the message says what to change, and names file, key and value."""


class LayerConfig(Struct, frozen=True):
    """Where layers of one model differ."""

    window: int | None
    """Positions that a token sees, itself included; None: all."""
    rope: Rope


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder of the Llama kind and its near relations."""

    architecture: str
    dtype: Dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Heads of queries and keys are RMS-normed before rotation (Qwen3, Gemma 3)."""
    post_norms: bool
    """Attention and MLP outputs are normed before they join the residual (Gemma)."""
    norm_offset: bool
    """Norm weights are stored as their difference from 1 (Gemma)."""
    embedding_scale: float | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def parameters(self) -> int:
        """Weights of the matrices (norms and biases are too few to count)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * self.layer_parameters + embeddings

    @property
    def layer_parameters(self) -> int:
        """Those of one layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size
