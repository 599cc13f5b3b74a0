"""The states of a rank's sequences, and the checkpoints of them that others go on from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.worker.models.weights import KvCaches
from services.worker.ops.interface import StateCache, StateMixer


class SequenceStates:
    """Where in the caches of layers with states which states lie: those of a sequence at the index that it has in the
    rank's table. A checkpoint has the states of all layers, one after the other. Copies are made in the order of steps,
    on the device."""

    def __init__(self, caches: KvCaches, checkpoints: int, size: int) -> None:
        """`caches`: of all layers. `size`: bytes of a checkpoint, at least those of a sequence's states."""
        self._caches = [cache for cache in caches if isinstance(cache, StateCache)]
        device = self._caches[0].states.device
        self.checkpoints = checkpoints
        self.kept = torch.zeros(checkpoints, size // torch.float32.itemsize, device=device)
        """[checkpoints, numbers] what each holds; on a CPU it takes memory when it is first written to."""

    def restore(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Before a step: sequences that begin go on from checkpoints, (index, checkpoint)."""
        for seq_index, checkpoint in pairs:
            for own, kept in self._parts(seq_index, checkpoint):
                own.copy_(kept)

    def keep(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Behind a step: its sequences' states are checkpoints now, (index, checkpoint)."""
        for seq_index, checkpoint in pairs:
            for own, kept in self._parts(seq_index, checkpoint):
                kept.copy_(own)

    def _parts(self, seq_index: int, checkpoint: int) -> Iterable[tuple[Tensor, Tensor]]:
        """What a sequence has of each layer, and where that lies in a checkpoint."""
        kept, at = self.kept[checkpoint], 0
        for cache in self._caches:
            for part in (cache.windows[seq_index], cache.states[seq_index]):
                yield part, kept[at : at + part.numel()].view_as(part)
                at += part.numel()


def empty_states(mixer: StateMixer, sequences: int, device: torch.device) -> StateCache:
    """One layer's states of so many sequences: zeros, which on a CPU take memory when they are first written to."""
    kernel, channels = mixer.conv_weight.shape
    return StateCache(
        torch.zeros(sequences, kernel - 1, channels, device=device),
        torch.zeros(sequences, mixer.heads, mixer.head_dim, mixer.state_dim, device=device),
    )
