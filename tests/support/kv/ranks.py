"""Ranks with KV memory on every kind of operations, and an arena between them as a store would make it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvstore.arena.owned_arena import OwnedArena
from services.worker.kv.arena_cells import PlainArenaCells
from services.worker.kv.copier import KvCopier, RankKvCache
from services.worker.kv.cuda_copier import CudaKvCopier, PlainBlockStream
from services.worker.kv.transfers import Outcome, Transfers
from services.worker.ops.interface import Ops
from services.worker.ops.native.build import Level
from services.worker.ops.native.native_kv import native_cells
from services.worker.ops.torch_ops import TorchOps
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout
from shared.messages.worker import Transfer
from shared.packing import pack
from tests.support.kv.delayed_copies import LateBlockStream
from tests.support.worker.native_batches import CPU, Rows, meta_of, native, random

OpsKind = Literal["torch", "native", "staged", "plain"]
_STAGED = {"staged": (LateBlockStream, native_cells), "plain": (PlainBlockStream, PlainArenaCells)}
"""As a GPU copies, by the library where it can; and as a device that nothing is known of, by Python."""
"""staged: PyTorch's operations, on a device that copies by itself, and late; plain: on one without streams."""
ARENA = ArenaId(99)
BLOCKS = 12


def make_layout(
    dtype: str,
    *,
    layers: int = 3,
    kv_heads: int = 4,
    head_dim: int = 16,
    model: str = "m",
    block_size: int = BLOCK_SIZE,
    value_dim: int | None = None,
) -> KvLayout:
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    return KvLayout(model=model, dtype=dtype, value_dim=value_dim, **sizes)


def make_arena(directory: Path, layout: KvLayout, slots: int = BLOCKS) -> OwnedArena:
    """With every slot reserved."""
    arena = OwnedArena.create(directory / "some.arena", ARENA, layout, slots)
    for slot in range(slots):
        reserve(arena, slot, slot + 1)
    return arena


def reserve(arena: OwnedArena, slot: int, generation: int) -> None:
    arena.reserve(slot, generation, arena.header(slot).hash, bytes(16), arena.layout.block_size)


def transfer(
    kind: Literal["save", "load"],
    blocks: Iterable[int],
    slots: Iterable[int],
    *,
    number: int = 0,
    arena: ArenaId = ARENA,
) -> Transfer:
    """As a scheduler asks for it whose slots have the generations of `make_arena`."""
    slots = list(slots)
    return Transfer(
        number=number,
        kind=kind,
        arena=arena,
        path="some.arena",
        blocks=pack(blocks),
        slots=pack(slots),
        generations=b"".join((slot + 1).to_bytes(8, "little") for slot in slots),
    )


class Rank:
    """One rank's caches and what copies them. Its blocks are written by the operations themselves."""

    def __init__(
        self,
        kind: OpsKind,
        layout: KvLayout,
        directory: Path,
        heads: tuple[int, int] | None = None,
        *,
        layers: tuple[int, int] | None = None,
        writes: bool = True,
        level: Level | None = None,
    ) -> None:
        coded = layout.dtype == "float8_e4m3fn"
        dtype = torch.float32 if coded else getattr(torch, layout.dtype)
        self.layout = layout
        self.first, last = heads or (0, layout.kv_heads)
        self.heads = last - self.first
        self.first_layer, end = layers or (0, layout.layers)
        size = layout.block_size
        self.ops: Ops = (
            native(dtype, level=level, block_size=size, cache_dtype=torch.float8_e4m3fn if coded else None)
            if kind == "native"
            else TorchOps(CPU, dtype, block_size=size)
        )
        self.caches = [self._allocated(layout) for _ in range(self.first_layer, end)]
        copier = CudaKvCopier(self.caches, *_STAGED[kind]) if kind in _STAGED else self._copier(layout)
        self.share = RankKvCache(
            layout, self.first, self.heads, writes, BLOCKS, copier, self.first_layer, len(self.caches)
        )
        self.transfers = Transfers(self.share, directory)

    def _allocated(self, layout: KvLayout) -> tuple[Tensor, Tensor]:
        if layout.value_dim is None:
            return self.ops.allocate_kv(BLOCKS, self.heads, layout.head_dim)
        return self.ops.latents.allocate(BLOCKS, layout.head_dim, layout.value_dim)

    def _copier(self, layout: KvLayout) -> KvCopier:
        if layout.value_dim is None:
            return self.ops.kv_copier(self.caches, layout.head_dim)
        return self.ops.latents.copier(self.caches)

    def compute(self, seed: int = 0) -> None:
        """Fills every block, each layer with the keys and values of `seed` for these heads; latents with noise."""
        if self.layout.value_dim is not None:
            for number, cache in enumerate(cache for halves in self.caches for cache in halves):
                cache.copy_(random(*cache.shape, seed=seed + number))
            return
        tokens = BLOCKS * self.layout.block_size
        meta = meta_of([Rows(tokens, tokens, tuple(range(BLOCKS)))], self.layout.block_size)
        for layer, (keys, values) in enumerate(self.caches, start=self.first_layer):
            self.ops.rope_and_store(
                computed(self.layout, seed + layer, self.first, self.heads),
                meta,
                unrotated(self.layout),
                keys,
                values,
                heads=1,
                q_norm=None,
                k_norm=None,
                eps=1e-6,
            )

    def save(self, blocks: Iterable[int], slots: Iterable[int]) -> Outcome:
        return self.transfers.run(transfer("save", blocks, slots), lambda: False)

    def load(self, blocks: Iterable[int], slots: Iterable[int]) -> Outcome:
        return self.transfers.run(transfer("load", blocks, slots), lambda: False)

    def block(self, number: int) -> Tensor:
        """All that the rank's caches hold of it, as the operations lay it out, flat."""
        return torch.cat([cache[number].flatten() for halves in self.caches for cache in halves])


def computed(layout: KvLayout, seed: int, first: int, heads: int) -> Tensor:
    """Rows of a query, keys and values: [tokens, (1 + 2 * heads) * head_dim], of a model's heads from `first` on."""
    rows = random(BLOCKS * layout.block_size, 2, layout.kv_heads, layout.head_dim, seed=seed)
    part = rows[:, :, first : first + heads].reshape(len(rows), -1)
    return torch.cat((torch.zeros(len(rows), layout.head_dim), part), dim=1).to(getattr(torch, layout.dtype))


def unrotated(layout: KvLayout) -> Tensor:
    """Positions that leave everything as it is."""
    half = torch.ones(BLOCKS * layout.block_size, layout.head_dim // 2)
    return torch.cat((half, torch.zeros_like(half)), dim=1)
