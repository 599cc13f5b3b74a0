"""Copies checkpoints of states beside blocks of keys and values: as pages of the size of a block's record.

The pages are numbered behind the blocks, and lie in a record as they lie here. What a page means is nobody's business
but the rank's that wrote it: some bytes of what it keeps of a sequence, in the order of its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.kv.copier import BoundCopier, Copied, HostLayerCache, KvCopier, TransferChunk
from services.worker.kv.plain_copier import BoundPlainKvCopier
from services.worker.kv.rank_heads import RankHeads

if TYPE_CHECKING:
    from torch import Tensor

_WORD: np.dtype[Any] = np.dtype("<u4")


class RankCheckpoints(NamedTuple):
    """What a rank keeps of sequences' states."""

    first_page: int
    """The number of the first page: as many blocks of tokens there are."""
    numbers: Tensor
    """[checkpoints, numbers] float32: whole pages each."""


class StatePagesCopier:
    """The `KvCopier` of a rank on a CPU whose model has states."""

    def __init__(self, blocks: KvCopier | None, num_blocks: int, pages: NDArray[np.generic]) -> None:
        """`blocks`: copies those before `num_blocks`; None: no layer attends, and they hold nothing. `pages`
        [pages, heads, layers, words of 4 bytes], contiguous."""
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._pages = pages.view(_WORD)  # as they are: a number would be rounded

    @property
    def runs(self) -> tuple[HostLayerCache, ...]:
        """Those of the blocks."""
        return () if self._blocks is None else tuple(self._blocks.runs)

    def bind(self, heads: RankHeads) -> BoundCopier:
        """See `KvCopier.bind`. Raises OSError."""
        layers = [(self._pages[:, :, layer],) for layer in range(heads.layers)]
        pages = BoundPlainKvCopier(layers, heads, _WORD, (slice(None),))
        blocks = None if self._blocks is None else self._blocks.bind(heads)
        return _BoundCopier(blocks, self._num_blocks, pages)


class _BoundCopier:
    def __init__(self, blocks: BoundCopier | None, num_blocks: int, pages: BoundPlainKvCopier) -> None:
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._pages = pages

    def save(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.save`."""
        blocks, pages = self._split(chunk)
        if self._blocks is not None and len(blocks.blocks) and (copied := self._blocks.save(blocks)) != "all":
            return copied
        return self._pages.save(pages)

    def load(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.load`."""
        blocks, pages = self._split(chunk)
        if self._blocks is not None and len(blocks.blocks) and (copied := self._blocks.load(blocks)) != "all":
            return copied
        return self._pages.load(pages)

    def close(self) -> None:
        """Lets go of the arena, which both have mapped."""
        if self._blocks is None:
            self._pages.close()
        else:
            self._pages.forget()
            self._blocks.close()

    def _split(self, chunk: TransferChunk) -> tuple[TransferChunk, TransferChunk]:
        is_page = chunk.blocks >= self._num_blocks
        numbers, slots, generations = chunk
        blocks = TransferChunk(numbers[~is_page], slots[~is_page], generations[~is_page])
        return blocks, TransferChunk(
            numbers[is_page] - np.int32(self._num_blocks), slots[is_page], generations[is_page]
        )
