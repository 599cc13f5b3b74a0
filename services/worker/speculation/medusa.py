"""Medusa: heads on the model's last hidden state that each foresee one token further ahead.

Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple decoding heads", arXiv:2401.10774. One
chain of drafts, each head's own favourite; no tree.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from services.worker.model.config import ModelError
from services.worker.ops import Ops, PackedLinear
from services.worker.sampling.sampler import draw_plainly
from services.worker.speculation.drafter import Target
from services.worker.speculation.drafter_files import DrafterCheckpoint, read_drafter
from services.worker.speculation.proposer import Asked, Computed, Drafts, Histories, Int32s
from services.worker.speculation.settings import Speculation

_HEAD = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.")
"""`0.0.linear.weight` as Medusa's own files have it, with or without `medusa_head.`; and, as vLLM's converted ones,
`blocks.0.layers.0.weight` with `lm_heads.0.weight`."""


class _Head(NamedTuple):
    blocks: tuple[PackedLinear, ...]
    """Each added to what goes in: x + silu(linear(x))."""
    words: PackedLinear


class MedusaDrafter(Struct, frozen=True):
    """See `drafter.Drafter`. Keeps no keys and values."""

    heads: tuple[_Head, ...]
    target: Target
    most: int
    kv_block_bytes: int = 0

    def proposer(self, num_blocks: int, max_sequences: int) -> MedusaProposer:
        return MedusaProposer(self.heads, self.target, self.most, max_sequences)


def open_medusa(settings: Speculation, target: Target, most: int) -> MedusaDrafter:
    """Raises ModelError."""
    folder = settings.folder()
    checkpoint = _by_official_names(read_drafter(folder, target.dtype))
    count = 1 + max((int(found[1]) for name in checkpoint.names if (found := _HEAD.match(name))), default=-1)
    if count < most:
        raise ModelError(f"{folder} has {count} Medusa heads, num_speculative_tokens asks for {most}")
    return MedusaDrafter(tuple(_head(checkpoint, target, number) for number in range(most)), target, most)


def _by_official_names(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    for prefix in ("medusa_heads.", "medusa_head."):
        checkpoint = checkpoint.renamed(prefix, "")
    for name in checkpoint.names:
        block = re.match(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$", name)
        words = re.match(r"^lm_heads\.(\d+)\.weight$", name)
        if block is not None:
            checkpoint = checkpoint.renamed(name, f"{block[1]}.{block[2]}.linear.{block[3]}")
        if words is not None:
            depth = sum(
                other.startswith(f"blocks.{words[1]}.") or _is_block(other, words[1]) for other in checkpoint.names
            )
            checkpoint = checkpoint.renamed(name, f"{words[1]}.{depth}.weight")
    return checkpoint


def _is_block(name: str, head: str) -> bool:
    return name.startswith(f"{head}.") and name.endswith("linear.weight")


def _head(checkpoint: DrafterCheckpoint, target: Target, number: int) -> _Head:
    hidden, pack = target.config.hidden_size, target.ops.pack_linear
    blocks: list[PackedLinear] = []
    while (name := f"{number}.{len(blocks)}.linear") + ".weight" in checkpoint:
        weight = checkpoint.read(f"{name}.weight", (hidden, hidden)).to(target.device)
        bias = checkpoint.read(f"{name}.bias", (hidden,)).to(target.device) if f"{name}.bias" in checkpoint else None
        blocks.append(pack(weight, bias))
    words = checkpoint.read(f"{number}.{len(blocks)}.weight", (target.config.vocab_size, hidden))
    return _Head(tuple(blocks), pack(words.to(target.device), None))


class MedusaProposer:
    """Owns the hidden state behind which each sequence's last token was drawn."""

    def __init__(self, heads: tuple[_Head, ...], target: Target, most: int, max_sequences: int) -> None:
        self._heads = heads
        self._ops: Ops = target.ops
        self._device = target.device
        self._most = most
        self._features: Tensor | None = None
        self._max_sequences = max_sequences

    def propose(self, asked: Asked) -> Drafts:
        if self._features is None:
            return Drafts.none(asked)
        features = self._features.index_select(0, torch.from_numpy(asked.slots).to(self._device))
        wanted = min(self._most, int(asked.most.max()))
        drafts = [
            draw_plainly(self._logits(head, features), asked.histories.choose(asked.slots, ahead))
            for ahead, head in enumerate(self._heads[:wanted])
        ]
        tokens = torch.stack(drafts, dim=1).to(torch.int32).cpu().numpy()
        return Drafts(tokens, np.minimum(asked.most, wanted).astype(np.int32))

    def _logits(self, head: _Head, x: Tensor) -> Tensor:
        for block in head.blocks:
            x = x + F.silu(self._ops.linear(x, block)).to(x.dtype)
        return self._ops.linear(x, head.words)

    def observe(self, computed: Computed) -> None:
        assert computed.features is not None, "asked for"
        if self._features is None:
            self._features = computed.features.new_zeros(self._max_sequences, computed.features.shape[1])
        rows = torch.from_numpy(computed.last_rows).to(self._device)
        slots = torch.from_numpy(computed.sampled_slots).to(self._device)
        self._features.index_copy_(0, slots, computed.features.index_select(0, rows))

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        """Its first decode follows a step that computes its last row."""

    def loaded(self, blocks: Int32s) -> None:
        pass

    def clear(self) -> None:
        pass
