"""What copies blocks: the interface between transfers and a device's memory. Knows no bus, no threads, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from services.worker.kv.rank_heads import RankHeads
    from shared.messages.kvstore import KvLayout

Copied = Literal["all", "other generation", "other checksum"]
"""other generation: a slot has become another block's. other checksum: what was read is not what was written."""


class TransferChunk(NamedTuple):
    """Some blocks of a transfer, each with its slot, all of them there."""

    blocks: NDArray[np.int32]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]


class HostLayerCache(NamedTuple):
    """One layer's keys or values in main memory: block after block."""

    address: int
    block_bytes: int


class BoundCopier(Protocol):
    """Copies between one rank's caches and its cells in one arena. Used from the copy thread, beside steps."""

    def save(self, chunk: TransferChunk) -> Copied:
        """Writes the cells of each block, then their checksums. A slot that became another's meanwhile is left
        without checksums, so that nobody takes it for whole. Raises OSError."""

    def load(self, chunk: TransferChunk) -> Copied:
        """Reads the cells of each block, which equal their checksums, or the blocks are zeros. Raises OSError."""

    def close(self) -> None:
        """Lets go of the arena's memory."""


class KvCopier(Protocol):
    """Knows how a device lays out all layers' caches."""

    @property
    def runs(self) -> Sequence[HostLayerCache]:
        """The caches as far as they are pages of this process's memory: none where a device has its own."""

    def bind(self, heads: RankHeads) -> BoundCopier:
        """For these heads and layers of an arena, as many as the caches have. Raises OSError."""


@dataclass(frozen=True, slots=True)
class RankKvCache:
    """One rank's KV memory, as far as it is shared with the other engines of the node."""

    layout: KvLayout
    first_head: int
    """First of the model's KV heads that this rank holds; `copier` knows how many."""
    num_heads: int
    writes: bool
    """Several ranks may hold the same heads: one of them writes, all read."""
    num_blocks: int
    """Those that are pages of checkpoints of states included."""
    copier: KvCopier
    first_layer: int
    """First of the model's layers that this rank holds."""
    num_layers: int
    caches: list[tuple[Any, Any]] = field(default_factory=list)
    """Each layer's keys and values: tensors whose first dimension is the block."""
    operations: str = ""
    """The name of the operations whose layout of a block these are."""
    pages: int = 0
    """The last ones of the blocks, which are of no cache; see `StatePagesCopier`."""
    device: str = "cpu"
    """PyTorch's kind of device: "cpu", "cuda"."""
