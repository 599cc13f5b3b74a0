"""Tensor parallelism: who holds which share of a model, and how the ranks of an engine exchange tensors.

Heads and MLP columns are split (Shoeybi et al., "Megatron-LM", arXiv:1909.08053): each rank computes partial sums of
the attention's and the MLP's outputs, which are added up over the ranks. Key/value heads are replicated where there
are fewer of them than ranks.

Rank 0 alone draws the next tokens and tells them to the others. Drawing on every rank would save that message, but then
ranks on CPUs or GPUs of different kinds could draw different tokens, and no one would notice.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from services.worker.model.config import ModelConfig, ModelError


class Communicator(Protocol):
    """Collectives over the ranks of one engine; every rank calls them in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank; may overwrite `x`."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x` by rank, on rank 0; the others get an empty list."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank; overwrites `x`."""

    def least(self, value: int) -> int:
        """The smallest of every rank's `value`, on every rank."""


class SingleRank:
    """An engine of one rank: nothing to exchange."""

    rank = 0
    world_size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def least(self, value: int) -> int:
        return value


class TorchCommunicator:
    """The ranks' process group of torch.distributed: gloo on CPUs, NCCL on GPUs.

    Blocks until every rank has joined. A rank that dies makes the others' collectives raise.
    """

    def __init__(
        self, *, rank: int, world_size: int, init_method: str, device: torch.device, timeout: timedelta
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(x, parts, dst=0)
        return parts or []

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def least(self, value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()


class Share(Struct, frozen=True):
    """What one rank holds of each layer, as half-open ranges over the whole model's heads, columns and words."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    first_of_kv_heads: bool
    """No lower rank holds the same key/value heads."""
    mlp: tuple[int, int]
    vocab: tuple[int, int]
    padded_vocab: int
    """Words of each rank's share of the logits, padding included: the same on every rank."""

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def share_of(config: ModelConfig, rank: int, world_size: int) -> Share:
    """What `rank` holds. Raises ModelError where the model does not divide by `world_size`."""
    for key, count in (("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size)):
        if count % world_size:
            raise ModelError(f"{key} {count} does not divide over {world_size} tensor-parallel ranks")
    if config.num_kv_heads % world_size and world_size % config.num_kv_heads:
        raise ModelError(
            f"num_key_value_heads {config.num_kv_heads} neither divides over {world_size} ranks nor divides them"
        )
    words = -(-config.vocab_size // world_size)
    return Share(
        heads=_part(config.num_heads, rank, world_size),
        kv_heads=_kv_part(config.num_kv_heads, rank, world_size),
        first_of_kv_heads=rank == 0
        or _kv_part(config.num_kv_heads, rank - 1, world_size) != _kv_part(config.num_kv_heads, rank, world_size),
        mlp=_part(config.intermediate_size, rank, world_size),
        vocab=(min(rank * words, config.vocab_size), min((rank + 1) * words, config.vocab_size)),
        padded_vocab=words,
    )


def _part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    size = count // world_size
    return rank * size, (rank + 1) * size


def _kv_part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    if count >= world_size:
        return _part(count, rank, world_size)
    head = rank * count // world_size
    return head, head + 1
