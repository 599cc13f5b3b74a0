"""The sizes of lightning attention, and which architectures have some. No torch."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

LIGHTNING_ARCHITECTURES = ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
"""Those whose layers, or most of them, have a state in place of keys and values. The first as `transformers` writes it,
the others as checkpoints are published."""


class LightningConfig(Struct, frozen=True, kw_only=True):
    """Lightning attention (Qin et al., "Lightning Attention-2", arXiv:2401.04658): linear attention whose heads each
    keep a sum of values by keys, `head_dim` times `head_dim` numbers, and forget at a fixed rate of their own;
    each head has a query, a key and a value of its own."""

    heads: int
    head_dim: int
    """Elements of a value, and of a key and a query."""
    norm_eps: float
    """Of the norm over all heads behind it."""

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "lightning attention"

    @property
    def groups(self) -> int:
        """No head shares its key or its query."""
        return self.heads

    @property
    def inner(self) -> int:
        """Elements of all heads' values, as many as of keys and of queries."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> int:
        """What a row is projected to: queries, keys and values. Gates are a product of their own."""
        return 3 * self.inner

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return self.inner * self.head_dim

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.projected + 2 * self.inner)

    def share(self, heads: int, _groups: int) -> LightningConfig:
        """The sizes of so many heads."""
        return replace(self, heads=heads)
