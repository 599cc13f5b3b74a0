"""The memory that captured decodes read: a batch's rows are copied there, and padded to a captured size."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta, StateRows

PADDING_SLOT = -1
"""The slot of a padding row: nothing is stored for it."""
PADDING_CONTEXT = 0
"""The context length of a padding row: it reads nothing."""


class DecodeInputs:
    """Owns room for `most` rows with tables of `width` blocks. All of it is padding at first."""

    def __init__(
        self, device: torch.device, most: int, width: int, max_context: int, block_size: int, *, states: bool = False
    ) -> None:
        """`max_context`: what captured decodes are made for, however long the contexts of a batch are. `states`:
        whether sequences have some."""
        self._max_context = max_context
        self._block_size = block_size
        self._ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), PADDING_SLOT, dtype=torch.int32, device=device)
        self._contexts = torch.full((most,), PADDING_CONTEXT, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._states = torch.zeros(most, dtype=torch.int64, device=device) if states else None

    @property
    def width(self) -> int:
        """Blocks that a table has room for."""
        return self._tables.shape[1]

    def views(self, size: int) -> tuple[Tensor, BatchMeta]:
        """The token ids and the rest of `size` decodes, always at the same place."""
        meta = BatchMeta(
            query_starts=self._counting[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            slots=self._slots[:size],
            positions=self._positions[:size],
            logits_rows=self._counting[:size],
            num_decodes=size,
            prefills=(),
            max_query=1,
            max_context=self._max_context,
            block_size=self._block_size,
            every_row=True,
            # Operations that are captured find by its context whether a decode begins.
            states=None if self._states is None else StateRows(self._states[:size], None),
        )
        return self._ids[:size], meta

    def holds(self, meta: BatchMeta) -> bool:
        """Whether there is room for all that decodes of this kind have, however many they are."""
        if meta.inputs is not None or meta.rotations is not None or meta.block_tables.shape[1] > self.width:
            return False
        if self._states is None:
            return True
        return meta.states is not None and meta.states.trial is None

    def fill(self, ids: Tensor, meta: BatchMeta, size: int) -> None:
        """The first rows are those of a batch of decodes, the others of `size` are padding: their ids, positions and
        tables stay somebody's, which are valid and read by nobody; so do the slots of their states."""
        fill = _by_kernel if ids.is_cuda else _by_copies
        own = (self._ids, self._positions, self._slots, self._contexts, self._tables)
        fill((ids, meta.positions, meta.slots, meta.context_lens, meta.block_tables), own, size)
        if self._states is not None and meta.states is not None:
            self._states[: len(meta.states.slots)].copy_(meta.states.slots)


_Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Token ids, positions, slots, context lengths, block tables."""


def _by_kernel(rows: _Rows, into: _Rows, size: int) -> None:
    from services.worker.ops.triton.decode_inputs import DecodeRows, pad_decodes

    pad_decodes(DecodeRows(*rows), DecodeRows(*into), size, slot=PADDING_SLOT, context=PADDING_CONTEXT)


def _by_copies(rows: _Rows, into: _Rows, size: int) -> None:
    count, width = rows[-1].shape
    for own, given in zip(into[:-1], rows[:-1], strict=True):
        own[:count].copy_(given)
    into[-1][:count, :width].copy_(rows[-1])
    into[2][count:size].fill_(PADDING_SLOT)
    into[3][count:size].fill_(PADDING_CONTEXT)


# Which batch sizes are captured, and which of them a batch is padded to. Pure.


MAX_CAPTURED_ROWS = 512
"""Beyond that a step computes for so long that launching it costs nothing."""
_SMALL = (1, 2, 4)
_FINE, _COARSE, _COARSE_FROM = 8, 16, 256


def capture_sizes(most: int) -> tuple[int, ...]:
    """Rising, the last of them `most` or MAX_CAPTURED_ROWS: 1, 2, 4, then every 8th, from 256 on every 16th.

    So a batch is padded by an eighth of its rows at the most, but for the smallest, which cost what one row costs."""
    last = min(most, MAX_CAPTURED_ROWS)
    sizes = [*_SMALL, *range(_FINE, _COARSE_FROM, _FINE), *range(_COARSE_FROM, MAX_CAPTURED_ROWS + 1, _COARSE)]
    return (*(size for size in sizes if size < last), last)


def padded_size(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The least of `sizes` that `rows` fit into; None where none is large enough."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
