"""Copies blocks between a GPU's caches and an arena: on a stream of its own, so that steps go on beside it.

Blocks are gathered on the device, a few at a time, in the arena's layout, by one launch for all layers; each slot is
then one copy. Where the arena could be page-locked that copy goes straight to it, else by way of page-locked memory of
our own. Two such stages take turns: while one is on its way, the host sums up the other.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from services.worker.kv.copier import CacheRun, Copied, Piece
from services.worker.kv.rank_heads import RankHeads

if TYPE_CHECKING:
    from services.worker.kernels.kv_blocks import BlockCaches

_STAGED_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class CudaKvCopier:
    """See :class:`services.worker.kv.copier.KvCopier`."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._caches = caches

    @property
    def runs(self) -> tuple[CacheRun, ...]:
        return ()

    def bind(self, heads: RankHeads) -> BoundCudaKvCopier:
        from services.worker.kernels.kv_blocks import BlockCaches  # Triton is needed only where a GPU is

        return BoundCudaKvCopier(self._caches, BlockCaches(self._caches), heads)


class _Stage:
    """Some blocks on their way: on the device, and where needed on the host."""

    def __init__(self, like: Tensor, device: torch.device, *, bounce: bool) -> None:
        self.device = torch.empty(like.shape, dtype=like.dtype, device=device)
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True) if bounce else None
        # A blocking event lets the waiting thread sleep: the core belongs to the compute thread.
        self.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.slots: list[tuple[int, int]] = []
        """On their way, and with which generations."""


class BoundCudaKvCopier:
    """See :class:`services.worker.kv.copier.BoundCopier`."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]], blocks: BlockCaches, heads: RankHeads) -> None:
        device = caches[0][0].device
        self._caches = caches
        self._blocks = blocks
        self._heads = heads
        self._slots = _slots_as_tensor(heads, caches[0][0].dtype)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A copy between the device and what is no single run of bytes is made by way of one that is.
        self._locked = heads.contiguous and _page_lock(self._slots)
        count = max(1, _STAGED_BYTES // heads.bytes_of_slot)
        like = torch.empty((count, *self._slots.shape[1:]), dtype=self._slots.dtype, device="meta")
        self._stages = [_Stage(like, device, bounce=not self._locked) for _ in range(2)]

    @torch.inference_mode()
    def save(self, piece: Piece) -> Copied:
        slots, generations = piece.slots.tolist(), piece.generations.tolist()
        self._heads.touch(slots)
        if not self._heads.unchanged(slots, generations):
            return "other generation"
        with torch.cuda.stream(self._stream):
            for turn, (first, blocks) in enumerate(_parts_of(piece, self._stage_blocks)):
                stage = self._stages[turn % 2]
                self._arrive(stage)
                last = first + len(blocks)
                stage.slots = list(zip(slots[first:last], generations[first:last], strict=True))
                self._send(stage, blocks)
            for stage in self._stages:
                self._arrive(stage)
        if self._heads.unchanged(slots, generations):
            return "all"
        self._heads.forget_checksums(slots)
        return "other generation"

    @torch.inference_mode()
    def load(self, piece: Piece) -> Copied:
        with torch.cuda.stream(self._stream):
            copied = self._loaded(piece)
            if copied != "all":
                _clear(self._caches, self._on_device(torch.from_numpy(piece.blocks)))
            self._stream.record_event(self._stages[0].arrived)
        self._stages[0].arrived.synchronize()
        return copied

    def close(self) -> None:
        self._stream.synchronize()
        if self._locked:
            _runtime().cudaHostUnregister(self._slots.data_ptr())
        del self._slots
        self._heads.close()

    @property
    def _stage_blocks(self) -> int:
        return len(self._stages[0].device)

    def _send(self, stage: _Stage, blocks: Tensor) -> None:
        """Device → host, without waiting."""
        on_device = stage.device[: len(blocks)]
        self._blocks.gather(self._on_device(blocks), on_device)
        if stage.host is not None:
            stage.host[: len(blocks)].copy_(on_device, non_blocking=True)
        else:
            for row, (slot, _) in enumerate(stage.slots):
                self._slots[slot].copy_(on_device[row], non_blocking=True)
        self._stream.record_event(stage.arrived)

    def _arrive(self, stage: _Stage) -> None:
        """Waits for what is on its way to the arena, and sums it up."""
        if not stage.slots:
            return
        stage.arrived.synchronize()
        for row, (slot, generation) in enumerate(stage.slots):
            if stage.host is not None:
                self._slots[slot].copy_(stage.host[row])
            self._heads.write_checksums(slot, generation)  # what is another's by now, `save` finds out at its end
        stage.slots = []

    def _loaded(self, piece: Piece) -> Copied:
        slots, generations = piece.slots.tolist(), piece.generations.tolist()
        if not self._heads.unchanged(slots, generations):
            return "other generation"
        for turn, (first, blocks) in enumerate(_parts_of(piece, self._stage_blocks)):
            stage = self._stages[turn % 2]
            stage.arrived.synchronize()  # an event that was never recorded is over
            for row, slot in enumerate(slots[first : first + len(blocks)]):
                if not self._heads.verified(slot):
                    return "other checksum"
                self._fetch(stage, row, slot)
            self._blocks.scatter(self._on_device(blocks), stage.device[: len(blocks)])
            self._stream.record_event(stage.arrived)
        self._stream.synchronize()
        return "all" if self._heads.unchanged(slots, generations) else "other generation"

    def _fetch(self, stage: _Stage, row: int, slot: int) -> None:
        """Arena → device, without waiting."""
        source = self._slots[slot]
        if stage.host is not None:
            stage.host[row].copy_(source)
            source = stage.host[row]
        stage.device[row].copy_(source, non_blocking=True)

    def _on_device(self, blocks: Tensor) -> Tensor:
        return blocks.to(self._caches[0][0].device, non_blocking=True)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _page_lock(slots: Tensor) -> bool:
    """Whether the arena's payloads are page-locked now, for this process's device."""
    size = slots.untyped_storage().nbytes()
    refused = int(_runtime().cudaHostRegister(slots.data_ptr(), size, 0))
    if refused:
        _log.info("the arena could not be page-locked, so its blocks take one copy more", extra={"error": refused})
    return not refused


def _slots_as_tensor(heads: RankHeads, dtype: torch.dtype) -> Tensor:
    """[slots, heads, layers, 2, elements of 16 tokens] where the arena lies; the caller keeps it mapped."""
    shape = heads.arena.geometry
    room = (shape.slots - 1) * shape.payload_stride + heads.span
    whole = torch.frombuffer((ctypes.c_char * room).from_address(heads.payloads), dtype=dtype)
    item = dtype.itemsize
    per_half = shape.cell_bytes // (2 * item)
    return whole.as_strided(
        (shape.slots, heads.count, heads.layers, 2, per_half),
        (shape.payload_stride // item, heads.head_stride // item, 2 * per_half, per_half, 1),
    )


def _parts_of(piece: Piece, count: int) -> list[tuple[int, Tensor]]:
    """The piece's blocks in parts of at most `count`, each with the place of its first."""
    blocks = torch.from_numpy(piece.blocks)
    return [(first, blocks[first : first + count]) for first in range(0, len(blocks), count)]


def _clear(caches: list[tuple[Tensor, Tensor]], blocks: Tensor) -> None:
    """What is undefined must be finite: attention multiplies it with 0."""
    index = blocks.long()
    for halves in caches:
        for cache in halves:
            cache.index_fill_(0, index, 0)
