"""Copies blocks between a GPU's caches and an arena: on a stream of its own, so that steps go on beside it.

Blocks are gathered on the device, a few at a time, in the arena's layout, by one launch for all layers, and pass
through page-locked memory of our own. Two such stages take turns: while one is on its way, the host copies and sums up
the other.

The arena itself is not page-locked, though that would spare the host's copy. Locking takes all of its pages from the
system at once, which the store takes as blocks come; and where the store has given a slot's memory back and taken it
anew, the slot lies in other pages than the locked ones: the device would read and write what nobody else sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.worker.kv.arena_cells import WORD, ArenaCells, Generations, Int32s, MakeCells, PlainArenaCells, Slots
from services.worker.kv.copier import Copied, HostLayerCache, TransferChunk
from services.worker.kv.rank_heads import RankHeads

_STAGED_BYTES = 1 << 20
"""Bytes of a part: a quarter of a transfer's chunk, so that the parts overlap."""
Caches = list[tuple[Tensor, Tensor]]


class StagingBuffer(Protocol):
    """Blocks on their way between a device and the host, in the arena's layout."""

    @property
    def host(self) -> Int32s:
        """[blocks, heads, layers, words of a cell]: keys, then values."""

    def wait(self) -> None:
        """Returns when what was asked for last is over."""


class BlockStream(Protocol):
    """What a device copies by itself, in order, beside its steps. Used from one thread, on which it was made."""

    def stage(self, shape: tuple[int, ...]) -> StagingBuffer:
        """Room for blocks of that many words."""

    def fetch(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """From the caches to `stage`, without waiting."""

    def bring(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """From `stage` to the caches, without waiting."""

    def clear(self, blocks: Int32s) -> None:
        """Zeros to the caches. Returns when they are there."""


class BlockCopies(Protocol):
    """All layers' caches on a device, of which blocks are copied by launches on the current stream."""

    def gather(self, blocks: Tensor, staged: Tensor) -> None:
        """staged [n, heads, layers, words of a cell], contiguous = the caches' `blocks` (int32 [n], on the device)."""

    def scatter(self, blocks: Tensor, staged: Tensor) -> None:
        """The caches' `blocks`, each named once = staged."""


class CudaKvCopier:
    """The `KvCopier` of a GPU: it copies through page-locked memory on a stream of its own."""

    def __init__(
        self,
        caches: Caches,
        make_stream: Callable[[Caches], BlockStream] | None = None,
        make_cells: MakeCells = PlainArenaCells,
    ) -> None:
        """Both are called on the thread that copies. `make_stream`: by default a `CudaBlockStream` on PyTorch's
        copies. `make_cells`: what copies between the host's memory and an arena."""
        self._caches = caches
        self._make_stream = make_stream or CudaBlockStream
        self._make_cells = make_cells

    @property
    def runs(self) -> tuple[HostLayerCache, ...]:
        """None: the caches are no pages of this process's memory."""
        return ()

    def bind(self, heads: RankHeads) -> BoundCudaKvCopier:
        """See `KvCopier.bind`. Called on the thread that copies."""
        return BoundCudaKvCopier(self._make_stream(self._caches), heads, self._make_cells(heads))


class _Part(NamedTuple):
    """The part of a chunk that one staging buffer holds."""

    blocks: Int32s
    slots: Slots
    generations: Generations


class BoundCudaKvCopier:
    """The `BoundCopier` of a GPU."""

    def __init__(self, stream: BlockStream, heads: RankHeads, cells: ArenaCells) -> None:
        self._stream = stream
        self._heads = heads
        self._cells = cells
        self._at_once = max(1, _STAGED_BYTES // heads.bytes_of_slot)
        shape = self._at_once, heads.count, heads.layers, heads.arena.geometry.cell_bytes // WORD.itemsize
        self._stages = tuple(stream.stage(shape) for _ in range(2))

    def save(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.save`."""
        self._heads.touch(chunk.slots.tolist())
        under_way: tuple[_Part, StagingBuffer] | None = None
        for part, stage in zip(self._parts(chunk), cycle(self._stages), strict=False):
            self._stream.fetch(part.blocks, stage)
            if under_way is not None and (copied := self._arrive(*under_way)) != "all":
                return copied
            under_way = part, stage
        return "all" if under_way is None else self._arrive(*under_way)

    def load(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.load`."""
        copied = self._loaded(chunk)
        for stage in self._stages:
            stage.wait()
        if copied != "all":
            # What is undefined must be finite: attention multiplies it with 0.
            self._stream.clear(chunk.blocks)
        return copied

    def close(self) -> None:
        """Waits for copies under way, and lets go of the arena."""
        for stage in self._stages:
            stage.wait()
        del self._cells
        self._heads.close()

    def _arrive(self, part: _Part, stage: StagingBuffer) -> Copied:
        """Waits for what is on its way from the device, and writes it to the arena."""
        stage.wait()
        return self._cells.write(stage.host[: len(part.blocks)], part.slots, part.generations)

    def _loaded(self, chunk: TransferChunk) -> Copied:
        """Under way to the device when it returns."""
        for part, stage in zip(self._parts(chunk), cycle(self._stages), strict=False):
            stage.wait()
            copied = self._cells.read(stage.host[: len(part.blocks)], part.slots, part.generations)
            if copied != "all":
                return copied
            self._stream.bring(part.blocks, stage)
        return "all"

    def _parts(self, chunk: TransferChunk) -> Iterator[_Part]:
        for first in range(0, len(chunk.blocks), self._at_once):
            part = slice(first, first + self._at_once)
            yield _Part(chunk.blocks[part], chunk.slots[part], chunk.generations[part])


class CudaStagingBuffer:
    """Memory on the device and page-locked memory on the host, both for the same blocks."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.on_device = torch.empty(shape, dtype=torch.int32, device=device)
        self.pinned = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self.host: Int32s = self.pinned.numpy()
        # A blocking event lets the waiting thread sleep: the core belongs to the compute thread.
        self.over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Lets this thread sleep until the last copy is over."""
        self.over.synchronize()  # one that was never recorded is over


class CudaBlockStream:
    """See `BlockStream`. The device is current on this thread from here on: calls that name none would take memory of
    another GPU, for a context there."""

    def __init__(self, caches: Caches, copies: Callable[[Caches], BlockCopies] | None = None) -> None:
        """`copies`: what gathers and scatters the caches' blocks; by default PyTorch, layer by layer."""
        self._caches = caches
        self._device = caches[0][0].device
        torch.cuda.set_device(self._device)
        self._blocks = (copies or TorchBlocks)(caches)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def stage(self, shape: tuple[int, ...]) -> CudaStagingBuffer:
        """See `BlockStream.stage`."""
        # Memory that steps gave back may be theirs until the device has come that far: this stream takes its own.
        with torch.cuda.stream(self._stream):
            return CudaStagingBuffer(shape, self._device)

    @torch.inference_mode()
    def fetch(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """See `BlockStream.fetch`."""
        assert isinstance(stage, CudaStagingBuffer)
        with torch.cuda.stream(self._stream):
            on_device = stage.on_device[: len(blocks)]
            self._blocks.gather(self._sent(blocks), on_device)
            stage.pinned[: len(blocks)].copy_(on_device, non_blocking=True)
            stage.over.record()

    @torch.inference_mode()
    def bring(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """See `BlockStream.bring`."""
        assert isinstance(stage, CudaStagingBuffer)
        with torch.cuda.stream(self._stream):
            on_device = stage.on_device[: len(blocks)]
            on_device.copy_(stage.pinned[: len(blocks)], non_blocking=True)
            self._blocks.scatter(self._sent(blocks), on_device)
            stage.over.record()

    @torch.inference_mode()
    def clear(self, blocks: Int32s) -> None:
        """See `BlockStream.clear`."""
        with torch.cuda.stream(self._stream):
            index = self._sent(blocks).long()
            for halves in self._caches:
                for cache in halves:
                    cache.index_fill_(0, index, 0)
        self._stream.synchronize()

    def _sent(self, blocks: Int32s) -> Tensor:
        return torch.from_numpy(blocks).to(self._device, non_blocking=True)


class PlainStagingBuffer:
    """Memory of the host alone: what is copied through it is over when the copy returns."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.words = torch.empty(shape, dtype=torch.int32)
        self.host: Int32s = self.words.numpy()

    def wait(self) -> None:
        """Nothing is under way."""


class PlainBlockStream:
    """See `BlockStream`. For devices of PyTorch's whose streams are not known here: each copy waits for its end."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._device = caches[0][0].device
        self._blocks = TorchBlocks(caches)

    def stage(self, shape: tuple[int, ...]) -> PlainStagingBuffer:
        """See `BlockStream.stage`."""
        return PlainStagingBuffer(shape)

    @torch.inference_mode()
    def fetch(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """See `BlockStream.fetch`."""
        assert isinstance(stage, PlainStagingBuffer)
        words = stage.words[: len(blocks)]
        gathered = torch.empty_like(words, device=self._device)
        self._blocks.gather(torch.from_numpy(blocks).to(self._device), gathered)
        words.copy_(gathered)

    @torch.inference_mode()
    def bring(self, blocks: Int32s, stage: StagingBuffer) -> None:
        """See `BlockStream.bring`."""
        assert isinstance(stage, PlainStagingBuffer)
        words = stage.words[: len(blocks)].to(self._device)
        self._blocks.scatter(torch.from_numpy(blocks).to(self._device), words)

    @torch.inference_mode()
    def clear(self, blocks: Int32s) -> None:
        """See `BlockStream.clear`."""
        index = torch.from_numpy(blocks).to(self._device).long()
        for halves in self._caches:
            for cache in halves:
                cache.index_fill_(0, index, 0)


# Blocks between all layers' caches and a stage by PyTorch: what `kernels.kv_blocks` does where Triton can be had.


class TorchBlocks:
    """Caches as `kernels.kv_blocks.BlockCaches` takes them. Launches for the keys and for the values of each layer."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._caches = [[cache.flatten(2).view(torch.int32) for cache in halves] for halves in caches]
        """Each [blocks, heads, words of a block]. What is only copied may be taken for numbers."""
        keys = self._caches[0][0].shape[2]
        self._parts = slice(0, keys), slice(keys, None)

    def gather(self, blocks: Tensor, staged: Tensor) -> None:
        """staged [n, heads, layers, words of a cell] = the caches' `blocks` (int32 [n])."""
        for layer, halves in enumerate(self._caches):
            for part, cache in zip(self._parts, halves, strict=True):
                staged[:, :, layer, part] = cache.index_select(0, blocks)

    def scatter(self, blocks: Tensor, staged: Tensor) -> None:
        """The caches' `blocks`, each named once = staged."""
        where = blocks.long()
        for layer, halves in enumerate(self._caches):
            for part, cache in zip(self._parts, halves, strict=True):
                cache.index_copy_(0, where, staged[:, :, layer, part])
