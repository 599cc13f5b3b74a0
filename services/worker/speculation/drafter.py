"""What a method has to bring: weights read once, and a proposer for every runner that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.worker.model.checkpoint import open_checkpoint
from services.worker.model.config import ModelConfig, ModelError
from services.worker.model.decoder import Decoder, ForwardPass, KvCaches
from services.worker.ops import Ops, PackedLinear
from services.worker.speculation.proposer import Proposer


class Drafter(Protocol):
    """Owns a method's weights."""

    @property
    def kv_block_bytes(self) -> int:
        """Memory that it takes for each of the engine's KV blocks."""

    def proposer(self, num_blocks: int, max_sequences: int) -> Proposer:
        """With memory of its own, for a runner of so many blocks and sequences."""


@runtime_checkable
class HasDecoder(Protocol):
    """A drafter that is a model itself."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def decodes(self) -> int:
        """Rows that one sequence has in a step of its decodes, at the most."""


@runtime_checkable
class ReplaysDecodes(Protocol):
    """A proposer that runs a decoder."""

    def replay_by(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass]) -> None:
        """From here on what `replaying` makes of its decoder's forward pass on its caches."""


@runtime_checkable
class DraftsInHalf(Protocol):
    """An `Ops` that knows faster ones for drafters."""

    def for_drafts(self) -> Ops:
        """They compute in bfloat16; itself where that is not faster."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for."""

    folder: Path
    config: ModelConfig
    decoder: Decoder
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    ranks: int

    def check_same(self, folder: Path, **sizes: int) -> None:
        """Raises ModelError where a size of the drafter in `folder` is not the model's."""
        for name, size in sizes.items():
            own = getattr(self.config, name)
            if size != own:
                raise ModelError(f"{folder}: {name} is {size}, the model's is {own}")

    def for_drafts(self) -> Target:
        """With the operations that drafters run by: in half the memory, where that is faster. They may be wrong."""
        if not isinstance(self.ops, DraftsInHalf) or (faster := self.ops.for_drafts()) is self.ops:
            return self
        return replace(self, ops=faster, dtype=torch.bfloat16)

    def words(self) -> tuple[Tensor, PackedLinear]:
        """The whole embedding, and the whole head; ranks of several hold shares, so they are read anew."""
        weights, tied = self.decoder.weights, self.config.tied_embeddings
        if self.ranks == 1 and weights.embedding is not None and weights.head is not None:
            if self.ops is self.decoder.ops:
                return weights.embedding, weights.head
            if tied:
                embedding = weights.embedding.to(self.dtype)
                return embedding, self.ops.pack_linear(embedding, None)
        shape = (self.config.vocab_size, self.config.hidden_size)
        with open_checkpoint(self.folder, self.dtype) as checkpoint:
            embedding = checkpoint.read("model.embed_tokens.weight", shape).to(self.device)
            head = embedding if tied else checkpoint.read("lm_head.weight", shape).to(self.device)
        return embedding, self.ops.pack_linear(head, None)
