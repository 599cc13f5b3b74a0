"""Medusa: heads on the model's last hidden state that each foresee one token further ahead.

Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple decoding heads", arXiv:2401.10774. One
chain of drafts, each head's own favourite; no tree.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.models.config import ModelError
from services.worker.ops.interface import Ops, PackedLinear
from services.worker.ops.transfer import on_this_device, to_device
from services.worker.sampling.races import draw_of
from services.worker.speculation.chain import DraftSampler
from services.worker.speculation.drafter import DrafterCheckpoint, TargetModel, read_drafter
from services.worker.speculation.proposer import ComputedStep, DraftRequest, Int32s, SequenceHistories
from services.worker.speculation.settings import SpeculationSettings
from shared.messages.worker import NewSequence

_HEAD = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.")
"""`0.0.linear.weight` as Medusa's own files have it, with or without `medusa_head.`; and, as vLLM's converted ones,
`blocks.0.layers.0.weight` with `lm_heads.0.weight`."""


class _MedusaHead(NamedTuple):
    blocks: tuple[PackedLinear, ...]
    """The blocks after the first; each adds its output to its input: x + silu(linear(x))."""
    words: PackedLinear


class _MedusaHeads(NamedTuple):
    first: PackedLinear | None
    """The first blocks of all heads side by side: they have the same input. None where heads have none."""
    each: tuple[_MedusaHead, ...]


class MedusaDrafter(Struct, frozen=True):
    """Owns the heads' weights, see `Drafter`. Keeps no keys and values."""

    heads: _MedusaHeads
    target: TargetModel
    most: int
    kv_block_bytes: int = 0

    def proposer(self, num_blocks: int, max_sequences: int) -> MedusaProposer:
        """A proposer with room for a hidden state of each of `max_sequences`."""
        return MedusaProposer(self.heads, self.target, self.most, max_sequences)


def open_medusa(settings: SpeculationSettings, target: TargetModel, most: int) -> MedusaDrafter:
    """Reads the heads. Raises ModelError where they do not fit the model, or are too few."""
    folder = settings.folder()
    checkpoint = _by_official_names(read_drafter(folder, target.dtype))
    count = 1 + max((int(found[1]) for name in checkpoint.names if (found := _HEAD.match(name))), default=-1)
    if count < most:
        raise ModelError(f"{folder} has {count} Medusa heads, num_speculative_tokens asks for {most}")
    return MedusaDrafter(_heads(checkpoint, target, most), target, most)


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


def _heads(checkpoint: DrafterCheckpoint, target: TargetModel, count: int) -> _MedusaHeads:
    pack = target.ops.pack_linear
    read = [_blocks(checkpoint, target, number) for number in range(count)]
    if len({len(blocks) for blocks in read}) > 1:
        raise ModelError(f"{checkpoint.folder}: Medusa heads of different depths are not supported")
    shape = (target.config.vocab_size, target.config.hidden_size)
    words = [checkpoint.read(f"{number}.{len(read[0])}.weight", shape).to(target.device) for number in range(count)]
    each = tuple(
        _MedusaHead(tuple(pack(*block) for block in blocks[1:]), pack(last, None))
        for blocks, last in zip(read, words, strict=True)
    )
    return _MedusaHeads(_side_by_side(target, [blocks[0] for blocks in read]) if read[0] else None, each)


def _blocks(checkpoint: DrafterCheckpoint, target: TargetModel, number: int) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of one head's blocks."""
    hidden = target.config.hidden_size
    blocks: list[tuple[Tensor, Tensor | None]] = []
    while (name := f"{number}.{len(blocks)}.linear") + ".weight" in checkpoint:
        weight = checkpoint.read(f"{name}.weight", (hidden, hidden)).to(target.device)
        bias = checkpoint.read(f"{name}.bias", (hidden,)).to(target.device) if f"{name}.bias" in checkpoint else None
        blocks.append((weight, bias))
    return blocks


def _side_by_side(target: TargetModel, blocks: list[tuple[Tensor, Tensor | None]]) -> PackedLinear:
    weights = torch.cat([weight for weight, _ in blocks])
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in blocks]
    return target.ops.pack_linear(weights, torch.cat(biases))


class MedusaProposer:
    """Owns the hidden state behind which each sequence's last token was drawn."""

    drafts_ahead: Literal[True] = True

    def __init__(self, heads: _MedusaHeads, target: TargetModel, most: int, max_sequences: int) -> None:
        self._heads = heads
        self._ops: Ops = target.ops
        self._device = target.device
        self._most = most
        self._features: Tensor | None = None
        self._max_sequences = max_sequences

    def propose(self, request: DraftRequest) -> DraftTokens:
        """One token from each of the first heads, as many as the longest limit asks for."""
        if self._features is None:
            return DraftTokens.none(len(request.seq_indices))
        features = self._features.index_select(0, to_device(request.seq_indices, self._device))
        wanted = min(self._most, int(request.limits.max()))
        draws = DraftSampler(request.seq_indices, request.histories, request.rejected, draw_of(self._ops))
        tokens = draws.tokens(self._logits(features, wanted))
        return DraftTokens(tokens, np.minimum(request.limits, wanted).astype(np.int32))

    def _logits(self, features: Tensor, wanted: int) -> list[Tensor]:
        """Logits of the first `wanted` heads."""
        rows, hidden = features.shape
        states: Tensor = features.unsqueeze(1).expand(rows, len(self._heads.each), hidden)
        if self._heads.first is not None:
            states = states + F.silu(self._ops.linear(features, self._heads.first)).view(rows, -1, hidden)
        return [self._words(head, states[:, number]) for number, head in enumerate(self._heads.each[:wanted])]

    def _words(self, head: _MedusaHead, x: Tensor) -> Tensor:
        for block in head.blocks:
            x = x + F.silu(self._ops.linear(x, block)).to(x.dtype)
        return self._ops.linear(x.contiguous(), head.words)

    def observe(self, computed: ComputedStep) -> None:
        """Remembers the hidden state behind each sequence's last token."""
        if computed.features is None:
            return  # no drafts were asked for in a while
        if self._features is None:
            self._features = computed.features.new_zeros(self._max_sequences, computed.features.shape[1])
        rows, seq_indices = (
            on_this_device(computed.last_rows, self._device),
            to_device(computed.sampled_indices, self._device),
        )
        self._features.index_copy_(0, seq_indices, computed.features.index_select(0, rows))

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Nothing to do: its first decode follows a step that computes its last row."""

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Nothing to do: its place is written anew before it is read again."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """Nothing to do: heads keep no keys and values."""

    def clear(self) -> None:
        """Nothing to do: what is remembered of a sequence is overwritten before it is used again."""
