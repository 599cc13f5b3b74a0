"""Where the keys of a token, what entries are made of, and entries lie in blocks; and which layers' share block tables.

A block holds two things in memory of its own: for each of its tokens a key; and behind each other, for each of its
tokens, the numbers that entries are made of, then the entries whose last token lies in the block. An entry lies with
its last token because a block is named by its tokens and all before: what it holds must follow from these. So sequences
may share any full block, and go on behind it.

Keys and numbers are wanted while a window is open, entries for ever. In groups these are layers of their own: blocks of
the ones are freed behind the window, and a block of the others holds the entries of as many layers as have room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import Compression, ModelConfig, ModelError
from services.worker.ops.interface import BatchMeta


class EntryPlace(NamedTuple):
    """Where the entries of a layer lie in groups."""

    holder: int
    """Which of the layers that hold entries alone."""
    first: int
    """Its first number in a block's second part."""


class CompressedLayout:
    """Of a model whose blocks have so many tokens. Raises ModelError for windows that blocks do not divide by, nor
    divide."""

    def __init__(self, config: ModelConfig, block_size: int) -> None:
        assert config.compressed is not None, "keys are compressed"
        self._sizes, self.key_dim, self.block_size = config.compressed, config.head_dim, block_size
        kinds = [layer.compression for layer in config.layers]
        for kind in kinds:
            if kind is not None and block_size % kind.rate and kind.rate % block_size:
                raise ModelError(
                    f"block_size {block_size} neither divides nor is divided by compress_rates {kind.rate}"
                )
        made = max(self._sizes.made_of_row(self.key_dim, kind) for kind in kinds)
        shares = [-(-self._entry_numbers(kind) // block_size) for kind in kinds if kind is not None]
        self.together = max((self._own_numbers(kind) for kind in kinds), default=0)
        """Numbers of a token beside its key where a layer has all in one block."""
        self.apart = max(made, max(shares, default=0), 1)
        """The same where entries lie in blocks of their own."""
        self.places = self._placed(kinds)
        """For each layer; None: it has no entries."""
        self.holders = 1 + max((each.holder for each in self.places if each is not None), default=-1)
        """Layers that hold entries alone, where they lie apart."""
        self.window = max(self._sizes.window, *(kind.span for kind in kinds if kind is not None), 1)
        """Tokens whose keys and numbers are still wanted."""

    def entries_of_block(self, kind: Compression) -> int:
        """Entries that end in a block, at the most."""
        return max(1, self.block_size // kind.rate)

    def _entry_numbers(self, kind: Compression) -> int:
        """Of a block."""
        return self.entries_of_block(kind) * self._sizes.entry_dim(self.key_dim, kind)

    def _own_numbers(self, kind: Compression | None) -> int:
        """Of a token, its share of the block's entries among them."""
        made = self._sizes.made_of_row(self.key_dim, kind)
        return max(1, made + (0 if kind is None else -(-self._entry_numbers(kind) // self.block_size)))

    def _placed(self, kinds: Sequence[Compression | None]) -> list[EntryPlace | None]:
        """One behind the other, as many in a holder as have room."""
        places: list[EntryPlace | None] = []
        room, holder, first = self.apart * self.block_size, 0, 0
        for kind in kinds:
            if kind is None:
                places.append(None)
                continue
            if first + self._entry_numbers(kind) > room:
                holder, first = holder + 1, 0
            places.append(EntryPlace(holder, first))
            first += self._entry_numbers(kind)
        return places

    def rows_of(self, cache: tuple[Tensor, Tensor], kind: Compression | None, meta: BatchMeta) -> RowCache:
        """What a layer's `cache` has of its tokens."""
        made, flat = self._sizes.made_of_row(self.key_dim, kind), cache[1].flatten(1)
        numbers = flat[:, : self.block_size * made].view(len(flat), self.block_size, made) if made else None
        return RowCache(cache[0].squeeze(1), numbers, meta)

    def entries_of(self, cache: Tensor, kind: Compression, meta: BatchMeta, place: EntryPlace | None) -> EntryCache:
        """What the second part of a layer's cache has of entries; `place`: where they lie apart."""
        first = self.block_size * self._sizes.made_of_row(self.key_dim, kind) if place is None else place.first
        part = cache.flatten(1)[:, first : first + self._entry_numbers(kind)]
        entries = part.view(len(cache), self.entries_of_block(kind), -1)
        return EntryCache(entries, kind.rate, self.block_size, meta)


class RowCache(NamedTuple):
    """What one layer has of tokens in one step."""

    keys: Tensor
    """[blocks, block_size, D]"""
    numbers: Tensor | None
    """[blocks, block_size, numbers] that entries are made of; None: there are no entries."""
    meta: BatchMeta
    """Whose tables and slots are those of the layer's group."""

    def store(self, rows: Tensor, cache: Tensor) -> None:
        """rows [n, …] of the step, in `keys` or `numbers`."""
        block_size = cache.shape[1]
        block = self.meta.slots // block_size
        cache[block, self.meta.slots - block * block_size] = rows.to(cache.dtype)

    def gather(self, cache: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
        """positions [S, k] of sequences with these block tables → [S, k, …]; of negative ones anything finite."""
        block_size, known = cache.shape[1], positions.clamp_min(0)
        block = tables.long().gather(1, known // block_size)
        return cache[block, known % block_size]


class EntryCache(NamedTuple):
    """What one layer has of entries in one step."""

    entries: Tensor
    """[blocks, entries of a block, dim]"""
    rate: int
    block_size: int
    meta: BatchMeta

    def place(self, tables: Tensor, lasts: Tensor) -> tuple[Tensor, Tensor]:
        """Block and place in it of the entries whose last tokens are at lasts [S, k]; of those beyond a table's end
        anything."""
        blocks = (lasts // self.block_size).clamp_max(tables.shape[1] - 1)
        inside = (lasts % self.block_size) // self.rate if self.rate < self.block_size else torch.zeros_like(lasts)
        return tables.long().gather(1, blocks), inside

    def gather(self, tables: Tensor, count: int) -> Tensor:
        """The first `count` entries of sequences with these block tables, [S, count, dim]."""
        numbers = torch.arange(1, count + 1, device=tables.device)
        lasts = (numbers * self.rate - 1).expand(len(tables), -1)
        return self.entries[self.place(tables, lasts)]
