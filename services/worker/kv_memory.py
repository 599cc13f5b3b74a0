"""Decides how many blocks of KV memory a rank has."""

from __future__ import annotations

import torch
from msgspec import Struct

from services.worker.memory import gib
from services.worker.model.config import ModelError
from shared.blocks import BLOCK_SIZE, blocks_for

_DEFAULT_MOST_ON_CPU = 4 << 30
"""Main memory belongs to others too; whoever wants more says so."""
_DEFAULT_SHARE_ON_CPU = 0.25
_MEAN_FILL_ON_CPU = 0.25
"""Of the context: sequences seldom fill it, and a block once written stays resident."""
_DEFAULT_SHARE_ON_CUDA = 0.9


class KvDemand(Struct, frozen=True, kw_only=True):
    block_bytes: int
    """Of one block over all layers of this rank."""
    max_num_seqs: int
    max_model_len: int
    explicit_model_len: bool
    """Whether the user asked for that length: then it must fit."""
    given: int | None
    """Bytes that the user gave; None: a sane share of what is free, and never more than could be used."""


class KvSize(Struct, frozen=True):
    num_blocks: int
    max_model_len: int
    """What was asked for, or what fits where nothing was."""


def size_kv(demand: KvDemand, *, free: int, activations: int, device: torch.device) -> KvSize:
    """Blocks that `free` bytes allow when a step takes `activations` of them. Raises ModelError for too few."""
    usable = free - activations
    if demand.given is not None and demand.given > usable:
        raise ModelError(
            f"{gib(demand.given)} of KV memory do not fit: {gib(free)} are free, "
            f"of which a step of the largest batch takes {gib(activations)}"
        )
    num_blocks = (_default(demand, usable, device) if demand.given is None else demand.given) // demand.block_bytes
    per_sequence = blocks_for(demand.max_model_len)
    if num_blocks < 1 or (demand.explicit_model_len and num_blocks < per_sequence):
        raise ModelError(
            f"one sequence of {demand.max_model_len} tokens needs {gib(per_sequence * demand.block_bytes)} of KV "
            f"memory and there are {gib(num_blocks * demand.block_bytes)}: give more KV memory, or lower the "
            f"maximum model length to {num_blocks * BLOCK_SIZE}"
        )
    return KvSize(num_blocks, min(demand.max_model_len, num_blocks * BLOCK_SIZE))


def _default(demand: KvDemand, usable: int, device: torch.device) -> int:
    needed = demand.max_num_seqs * blocks_for(demand.max_model_len) * demand.block_bytes
    if device.type == "cuda":
        return min(needed, int(usable * _DEFAULT_SHARE_ON_CUDA))
    one = blocks_for(demand.max_model_len) * demand.block_bytes
    expected = max(one, int(needed * _MEAN_FILL_ON_CPU))
    return min(expected, int(usable * _DEFAULT_SHARE_ON_CPU), _DEFAULT_MOST_ON_CPU)
