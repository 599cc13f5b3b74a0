"""The sizes of attention over compressed keys, and of hyper-connections (DeepSeek-V4). No torch."""

from __future__ import annotations

from msgspec import Struct

DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
HY4 = "HYV4ForCausalLM"
"""Its residual is several streams, too; its attention is latent."""


class Compression(Struct, frozen=True):
    """How a layer makes one entry of the tokens of a window, windows following one another."""

    rate: int
    """Tokens of a window."""
    sparse: bool
    """An entry is made of the window before its own, too, and an indexer chooses the entries that are attended to
    (compressed sparse attention, CSA); else all are (heavily compressed attention, HCA)."""

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.rate * (2 if self.sparse else 1)


class CompressedConfig(Struct, frozen=True, kw_only=True):
    """A token attends to the last ones, and to entries that are made of what lies before. All heads read one key, which
    is the value, too."""

    q_rank: int
    rope_dim: int
    """The last elements of a head, of which neighbours are rotated together."""
    groups: int
    """Of heads, each with a matrix of its own behind attention."""
    output_rank: int
    """What that gives."""
    window: int
    """Tokens that are attended to as they are."""
    index_heads: int
    index_dim: int
    index_chosen: int
    """Entries that a token attends to in sparse layers."""

    def made_of_row(self, head_dim: int, kind: Compression | None) -> int:
        """Numbers of a token that entries are made of: keys, then how much they count, of both windows' parts; behind
        them the same of the indexer's entries."""
        if kind is None:
            return 0
        return 4 * (head_dim + self.index_dim) if kind.sparse else 2 * head_dim

    def entry_dim(self, head_dim: int, kind: Compression) -> int:
        """Elements of an entry, and of its key of the indexer's."""
        return head_dim + (self.index_dim if kind.sparse else 0)

    def parameters(self, hidden: int, heads: int, head_dim: int, kind: Compression | None) -> int:
        """Weights of a layer's matrices."""
        queries = heads * head_dim
        grouped = queries * self.output_rank + self.groups * self.output_rank * hidden
        index = self.index_heads * (hidden + self.q_rank * self.index_dim) if kind is not None and kind.sparse else 0
        made = hidden * (self.q_rank + head_dim + self.made_of_row(head_dim, kind))
        return made + self.q_rank * queries + grouped + index


class HyperConnections(Struct, frozen=True, omit_defaults=True):
    """Manifold-constrained hyper-connections (Xie et al., 2026): the residual is several streams."""

    streams: int
    iterations: int
    """Of Sinkhorn and Knopp's, which make what mixes the streams nearly doubly stochastic."""
    eps: float
    mixes: bool = True
    """Streams are mixed behind a block; else each stays what it is, and gets a part of the output (HY4)."""
    averaged: bool = False
    """Behind the last layer the mean of the streams is taken; else the checkpoint says how much of each."""
    magnitude: float = 2.0
    """The most of the output that a stream gets."""
    rank: int = 0
    """Streams are normed each by itself, and how much of each element is read is made of so many numbers (Qwen4);
    blocks have no norms before them then. 0: a block reads so much of each stream."""

    @property
    def outputs(self) -> int:
        """Numbers that are computed of a row: what a block reads, where its output goes, how streams mix."""
        return self.streams * (2 + (self.streams if self.mixes else 0))

    def parameters(self, hidden: int, layers: int) -> int:
        """Weights of the matrices of so many layers."""
        outputs = 2 * self.rank + self.streams if self.rank else self.outputs
        return 2 * layers * outputs * self.streams * hidden


class GramConfig(Struct, frozen=True):
    """What some layers add to the streams of a token and those before it (Qwen4): embeddings of n-grams, which the
    streams gate, and a convolution over what they let through."""

    size: int
    """Tokens of the longest n-gram; there are some of 2 and more."""
    heads: int
    """Embeddings of each n-gram, by hashes of their own."""
    dim: int
    """Elements of all of a token's embeddings."""
    kernel: int
    """Rows that the convolution sees, each `size` behind the next."""
    base: int
    """Each hash has so many values, or little more."""
    divisor: int
    """Of the rows of a layer's table."""
    seed: int
    shards: int
    """Tensors of a layer's table where it is not one."""
    end: int
    """The token that n-grams do not reach beyond."""
    image: int | None = None
    """The one that they have for a row of an image; None: the model takes none."""

    @property
    def hashes(self) -> int:
        """Embeddings of a token."""
        return (self.size - 1) * self.heads

    @property
    def window(self) -> int:
        """Rows from the first one that the convolution sees to the newest."""
        return (self.kernel - 1) * self.size + 1

    def state_elements(self, width: int) -> int:
        """Numbers that one layer keeps of a sequence whose streams together have `width` elements."""
        return (self.window - 1) * width + (self.size - 1) ** 2

    def parameters(self, width: int, hidden: int) -> int:
        """Weights of one layer's matrices, but for the table, of which a token reads few rows."""
        return self.dim * (width + hidden)
