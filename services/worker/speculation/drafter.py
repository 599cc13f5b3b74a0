"""What a method has to bring: weights read once, and a proposer for every runner that is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.checkpoint import open_checkpoint
from services.worker.model.config import ModelConfig, ModelError
from services.worker.model.decoder import Decoder
from services.worker.ops import Ops, PackedLinear
from services.worker.speculation.proposer import Proposer


class Drafter(Protocol):
    """Owns a method's weights."""

    @property
    def kv_block_bytes(self) -> int:
        """Memory that it takes for each of the engine's KV blocks."""

    def proposer(self, num_blocks: int, max_sequences: int) -> Proposer:
        """With memory of its own, for a runner of so many blocks and sequences."""


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

    def words(self) -> tuple[Tensor, PackedLinear]:
        """The whole embedding, and the whole head; ranks of several hold shares, so they are read anew."""
        weights = self.decoder.weights
        if self.ranks == 1 and weights.embedding is not None and weights.head is not None:
            return weights.embedding, weights.head
        shape = (self.config.vocab_size, self.config.hidden_size)
        with open_checkpoint(self.folder, self.dtype) as checkpoint:
            embedding = checkpoint.read("model.embed_tokens.weight", shape).to(self.device)
            tied = self.config.tied_embeddings
            head = embedding if tied else checkpoint.read("lm_head.weight", shape).to(self.device)
        return embedding, self.ops.pack_linear(head, None)
