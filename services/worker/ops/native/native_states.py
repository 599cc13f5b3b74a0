"""State-space layers by the C++ library; see :class:`services.worker.ops.interface.StateOps`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta, DeltaNet, StateCache, StateMixer
from services.worker.ops.native import library
from services.worker.ops.torch_states import TorchStates

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps

MAX_KERNEL = 64
"""Tokens that a convolution sees at the most, as state_space.cpp counts them."""


class NativeStates:
    """Beside `ops`, on their threads."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._plain = TorchStates()

    def mix(self, projected: Tensor, space: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """In float32, token by token: a row's result does not depend on other sequences, nor on how its own is cut into
        steps."""
        if isinstance(space, DeltaNet) or space.conv_weight.shape[0] > MAX_KERNEL:
            return self._plain.mix(projected, space, cache, meta)
        assert meta.states is not None, "a model with states has them in every step"
        projected = projected.float().contiguous()
        to = torch.empty(len(projected), space.heads * space.head_dim)
        what = library.MixStates(projected.data_ptr(), meta.states.slots.data_ptr(), to.data_ptr())
        sizes = library.NativeStateSpace(
            *(space.heads, space.head_dim, space.groups, space.state_dim, space.conv_weight.shape[0]),
            *(space.conv_weight.data_ptr(), space.conv_bias.data_ptr(), space.decay.data_ptr(), space.skip.data_ptr()),
            *(space.step_bias.data_ptr(), space.norm.data_ptr(), space.eps),
        )
        caches = library.NativeStateCache(cache.windows.data_ptr(), cache.states.data_ptr())
        batch = self._ops.batch_of(meta)
        self._ops.kernels.library.baton_mix_states(
            self._ops.kernels.pool, *map(ctypes.byref, (what, batch, sizes, caches))
        )
        return to
