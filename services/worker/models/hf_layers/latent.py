"""Reads from a Hugging Face config whether attention is latent, and of what sizes. No torch."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from services.worker.models.hf_layers.mixture import RawMixture

SPARSE_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Of which an indexer chooses what a token attends to."""
MISTRAL_LARGE_4 = "MistralLarge4ForCausalLM"
"""As the language model within the published whole is called here: the library has no class of it alone."""
LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", *SPARSE_ARCHITECTURES)


class IndexConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2): few small heads score all tokens that are
    cached, by one key of each that is cached beside its latent, and attention goes to those with the best scores."""

    heads: int
    dim: int
    """Elements of a key, and of each head's query; as many as are rotated elsewhere are rotated."""
    chosen: int
    """Tokens that are attended to."""
    interleaved: bool
    """As `LatentConfig.interleaved`, of the indexer's keys and queries."""
    rotates_last: bool = False
    """The last elements of keys and queries are rotated, and not the first ones."""
    norm_eps: float = 1e-6
    """Of the norm of keys."""
    shared: tuple[int, ...] = ()
    """Layers without one, which attend to what the layer before them chose (IndexCache, arXiv:2603.12201)."""
    pool: int = 1
    """Tokens that are scored, and chosen, together; behind a token's key is cached how much each element counts in its
    pool (GLM-5-Next)."""
    reads_rows: bool = False
    """Queries are made of the normed row, and not of the latent of queries; how much each head's count goes by the
    position, as `LatentConfig.by_position` has it (Mistral Large 4)."""

    def parameters(self, hidden: int, q_rank: int) -> int:
        """Weights of one layer's matrices."""
        return (hidden if self.reads_rows else q_rank) * self.heads * self.dim + hidden * (self.cached_dim + self.heads)

    @property
    def cached_dim(self) -> int:
        """Elements that a token has in a layer's cache."""
        return self.dim * (1 if self.pool == 1 else 2)


class BlockIndexConfig(Struct, frozen=True, omit_defaults=True):
    """An indexer that chooses blocks of keys, of usual attention: for each key/value head (MiniMax-M3), or for all
    together (Qwen4)."""

    heads: int
    """One for each key/value head, or as many as there are."""
    dim: int
    """Elements of a head's queries, and of the key that they share."""
    block: int
    """Tokens of a block, from the first of a sequence on."""
    chosen: int
    """Blocks that a token attends to; of the last one what is not behind the token."""
    local: int
    """Of these the token's own, and those before it, which are chosen whatever their scores are."""
    pooled: bool = False
    """A block's key is the mean of its tokens', and heads' scores are added up. Whole blocks are chosen, and all that
    is behind the last one; there are no local ones."""

    @property
    def block_key(self) -> str:
        """What a configuration calls `block`."""
        return "indexer_compress_ratio" if self.pooled else "index_block_size"

    @property
    def dim_key(self) -> str:
        """What a configuration calls `dim`."""
        return "indexer_head_dim" if self.pooled else "index_head_dim"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of which all is chosen."""
        return self.block * self.chosen + (self.block - 1 if self.pooled else 0)

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.heads + 1) * self.dim


class LatentConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    index: IndexConfig | None = None
    """None: a token attends to all before it."""
    gates: Literal["heads", "elements"] | None = None
    """Of what the sigmoid of a number that the row is projected to says how much is taken: of each head's values (Ling
    3), or of each element of these (HY4); None: all is taken."""
    norm_eps: float = 1e-6
    """Of the norms of latents, whatever the model's others have."""
    unrotated: tuple[int, ...] = ()
    """Layers without rotation: their queries and keys have as many elements, and no key that heads share."""
    sources: tuple[int, ...] = ()
    """For each layer, the one whose latents it attends to; (): each has its own."""
    by_position: bool = False
    """A head's queries are multiplied by a number that grows with the logarithm of the position, by two numbers of the
    head."""
    learned_frequencies: bool = False
    """The checkpoint has the logarithm of what each frequency of the rotation is multiplied by."""

    def of_layer(self, number: int) -> LatentConfig:
        """What this layer's matrices are made for."""
        if number not in self.unrotated:
            return self
        return replace(self, nope_dim=self.query_dim, rope_dim=0)

    def borrows(self, number: int) -> bool:
        """Whether this layer attends to another's latents, and has none."""
        return bool(self.sources) and self.sources[number] != number

    def lends(self, number: int) -> bool:
        """Whether layers behind this one attend to its latents."""
        return number in self.sources[number + 1 :]

    @property
    def query_dim(self) -> int:
        """Elements of a head's queries."""
        return self.nope_dim + self.rope_dim

    @property
    def gates_of_head(self) -> int:
        """How many of these numbers a head has."""
        return 0 if self.gates is None else 1 if self.gates == "heads" else self.value_dim

    @property
    def cached_dim(self) -> int:
        """Elements that a token has in a layer's cache, but for those of an indexer."""
        return self.kv_rank + self.rope_dim

    @property
    def beside_dim(self) -> int:
        """Elements of them that lie beside the latent: the rotated key, and behind it the indexer's."""
        return self.rope_dim + (0 if self.index is None else self.index.cached_dim)

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's matrices."""
        queries = heads * self.query_dim
        made = hidden * queries if self.q_rank is None else self.q_rank * (hidden + queries)
        keys_and_values = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        index = 0 if self.index is None else self.index.parameters(hidden, self.q_rank or 0)
        of_values = heads * (self.value_dim + self.gates_of_head)
        return made + index + hidden * self.cached_dim + keys_and_values + hidden * of_values


class RawLatent(RawMixture, kw_only=True):
    """The keys of `config.json` that latent attention follows from; defaults are those of all families, or in
    `_DEFAULTS`."""

    q_lora_rank: int | UnsetType | None = UNSET
    kv_lora_rank: int = 512
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = None
    rope_interleave: bool = True
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int | None = None
    indexer_rope_interleave: bool | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2


class _SizeDefaults(Struct, frozen=True):
    """Sizes that a family's config may leave out."""

    q_rank: int = 1536
    nope_dim: int = 128
    value_dim: int = 128
    index_heads: int = 64


_DEFAULTS = {"GlmMoeDsaForCausalLM": _SizeDefaults(q_rank=2048, nope_dim=192, value_dim=256, index_heads=32)}
_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_INDEX_SIZES = ("index_topk", "index_head_dim", "index_n_heads")


def read_latent(raw: RawLatent) -> LatentConfig | None:
    """None for architectures with the usual attention. Raises ValueError, naming key and value."""
    if not any(each in LATENT_ARCHITECTURES for each in raw.architectures):
        return None
    architecture = raw.architectures[0]
    sparse = architecture in SPARSE_ARCHITECTURES
    for key in (*_SIZES, *_INDEX_SIZES) if sparse else _SIZES:
        value = getattr(raw, key)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key} {value} is not positive")
    if raw.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim {raw.qk_rope_head_dim} is odd")
    default = _DEFAULTS.get(architecture, _SizeDefaults())
    q_rank = default.q_rank if isinstance(raw.q_lora_rank, UnsetType) else raw.q_lora_rank
    if sparse and q_rank is None:
        raise ValueError("q_lora_rank null: the indexer's queries are made of the latent of queries")
    return LatentConfig(
        q_rank=q_rank,
        kv_rank=raw.kv_lora_rank,
        nope_dim=default.nope_dim if raw.qk_nope_head_dim is None else raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=default.value_dim if raw.v_head_dim is None else raw.v_head_dim,
        interleaved=raw.rope_interleave or architecture != "DeepseekV3ForCausalLM",
        index=_read_index(raw, default.index_heads) if sparse else None,
    )


def _read_index(raw: RawLatent, heads: int) -> IndexConfig:
    if raw.index_head_dim < raw.qk_rope_head_dim:
        raise ValueError(
            f"index_head_dim {raw.index_head_dim} is less than qk_rope_head_dim {raw.qk_rope_head_dim}, of which its "
            "rotated elements are"
        )
    interleaved = raw.indexer_rope_interleave
    return IndexConfig(
        heads=heads if raw.index_n_heads is None else raw.index_n_heads,
        dim=raw.index_head_dim,
        chosen=raw.index_topk,
        interleaved=raw.architectures[0] == "GlmMoeDsaForCausalLM" if interleaved is None else interleaved,
        shared=_shared_layers(raw) if raw.architectures[0] == "GlmMoeDsaForCausalLM" else (),
    )


_KINDS = {"F": "full", "S": "shared"}


def _shared_layers(raw: RawLatent) -> tuple[int, ...]:
    """By the types of layers, else by a pattern of letters, else by how often there is an indexer."""
    every, first = max(raw.index_topk_freq, 1), raw.index_skip_topk_offset - 1
    kinds = ["shared" if max(each - first, 0) % every else "full" for each in range(raw.num_hidden_layers)]
    if raw.index_topk_pattern is not None:
        kinds = [_KINDS.get(each, each) for each in raw.index_topk_pattern]
    kinds = kinds if raw.indexer_types is None else raw.indexer_types
    unknown = sorted(set(kinds) - set(_KINDS.values()))
    if unknown:
        raise ValueError(f"indexer_types {unknown[0]!r} is not supported; supported: full, shared")
    if len(kinds) < raw.num_hidden_layers or kinds[0] != "full":
        raise ValueError(f"indexer_types {kinds}: must name {raw.num_hidden_layers} layers, of which the first is full")
    return tuple(number for number in range(raw.num_hidden_layers) if kinds[number] == "shared")
