"""The sizes of blocks of attention and an MLP whose weights layers at several depths share, and which architectures
have some. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

ZAMBA2 = "Zamba2ForCausalLM"
SHARED_BLOCK, FED_MIXER = "shared_transformer", "mamba_decoder"
"""The two parts of a layer of its checkpoints that has such a block: that, and the mixer that what it gives goes to."""


class SharedBlocks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Zamba2's (Glorioso et al., "The Zamba2 Suite", arXiv:2411.15242): some layers have one of a few blocks, each in
    its turn, before their mixer. Block and mixer are two layers here. A block reads a row beside its token's embedding,
    and what it gives, through a matrix of its depth, is added to what the mixer reads, and not to the residual."""

    blocks: int
    """How many there are; the block of depth d is d modulo this."""
    adapter_rank: int
    """Of the low-rank products that gates and ups have at each depth."""
    adapts_attention: bool
    """Whether queries, keys and values have such, too."""

    def block_of(self, depth: int) -> int:
        """The block of the layer of this number among those that have one."""
        return depth % self.blocks

    def parameters(self, depths: Sequence[int], hidden: int, queries: int, keys: int, intermediate: int) -> int:
        """Weights of the matrices at these depths, for as many elements of all heads' queries, and keys."""
        blocks = len({self.block_of(depth) for depth in depths})
        made = queries + 2 * keys
        block = 2 * hidden * made + hidden * queries + 3 * hidden * intermediate
        own = hidden * hidden + self.adapter_rank * (hidden + 2 * intermediate)
        if self.adapts_attention:
            own += self.adapter_rank * (3 * 2 * hidden + made)
        return blocks * block + len(depths) * own
