"""Reads from a Hugging Face config whether attention is latent, and of what sizes. No torch."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from services.worker.models.hf_layers.mixture import RawMixture

LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


class LatentConfig(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one latent
    of each token, and of one rotated key that all heads share. These two are what is cached."""

    q_rank: int | None
    """Size of the latent that queries are made of; None: they are made of the row itself."""
    kv_rank: int
    """Size of the latent that keys and values are made of."""
    nope_dim: int
    """Elements of a head's queries and keys that know no position."""
    rope_dim: int
    """Elements that are rotated: of each head's query, and of the shared key."""
    value_dim: int
    """Elements of a head's values."""
    interleaved: bool
    """Elements 2i and 2i + 1 are rotated together, not i and i + rope_dim / 2."""

    @property
    def norm_eps(self) -> float:
        """Of the norms of latents, whatever the model's others have."""
        return 1e-6

    @property
    def query_dim(self) -> int:
        """Elements of a head's queries."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements that a token has in a layer's cache."""
        return self.kv_rank + self.rope_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's matrices."""
        queries = heads * self.query_dim
        made = hidden * queries if self.q_rank is None else self.q_rank * (hidden + queries)
        keys_and_values = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return made + hidden * self.cached_dim + keys_and_values + hidden * heads * self.value_dim


class RawLatent(RawMixture, kw_only=True):
    """The keys of `config.json` that latent attention follows from; defaults are those of both families."""

    q_lora_rank: int | UnsetType | None = UNSET
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True


_DEFAULT_Q_RANK = 1536


def read_latent(raw: RawLatent) -> LatentConfig | None:
    """None for architectures with the usual attention. Raises ValueError, naming key and value."""
    if not any(each in LATENT_ARCHITECTURES for each in raw.architectures):
        return None
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = getattr(raw, key)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key} {value} is not positive")
    if raw.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim {raw.qk_rope_head_dim} is odd")
    return LatentConfig(
        q_rank=_DEFAULT_Q_RANK if isinstance(raw.q_lora_rank, UnsetType) else raw.q_lora_rank,
        kv_rank=raw.kv_lora_rank,
        nope_dim=raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=raw.v_head_dim,
        interleaved=raw.rope_interleave or raw.architectures[0] == "DeepseekV2ForCausalLM",
    )
