"""Layers with states by the C++ library; see :class:`services.worker.ops.interface.StateOps`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.ops.interface import (
    BatchMeta,
    DeltaNet,
    RecurrentUnit,
    SelectiveSpace,
    ShortConvolution,
    StateCache,
    StateMixer,
    StateSpace,
)
from services.worker.ops.native import library
from services.worker.ops.torch_mixers.states import TorchStates

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps

MAX_KERNEL = 64
"""Tokens that a convolution sees at the most, as states.cpp counts them."""

_STATE_SPACE, _GATED_DELTA, _CONVOLUTION, _SELECTIVE, _GATED_CONVOLUTION, _LIGHTNING, _ELEMENT_DELTA = range(7)
_RECURRENCE = 7
"""`StateRule` of states.h."""


class NativeStates:
    """Beside `ops`, on their threads."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._plain = TorchStates()

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """In float32, token by token: a row's result does not depend on other sequences, nor on how its own is cut into
        steps."""
        described = described_mixer(mixer)
        if described is None:
            return self._plain.mix(projected, mixer, cache, meta)
        assert meta.states is not None, "a model with states has them in every step"
        projected = projected.float()
        if projected.stride(1) != 1:
            projected = projected.contiguous()
        to = torch.empty(len(projected), mixer.heads * mixer.head_dim)
        what = library.MixStates(
            *(projected.data_ptr(), projected.stride(0), meta.states.slots.data_ptr(), to.data_ptr(), to.shape[1])
        )
        caches = library.NativeStateCache(cache.windows.data_ptr(), cache.states.data_ptr())
        batch = self._ops.batch_of(meta)
        self._ops.kernels.library.baton_mix_states(
            self._ops.kernels.pool, *map(ctypes.byref, (what, batch, described, caches))
        )
        return to


def described_mixer(mixer: StateMixer) -> library.NativeStateMixer | None:
    """For the library, with pointers to its tensors; None: the library does not know it."""
    if mixer.conv_weight.shape[0] > MAX_KERNEL:
        return None
    if isinstance(mixer, ShortConvolution | SelectiveSpace | RecurrentUnit):
        return _described_channels(mixer)
    return library.NativeStateMixer(
        rule=_rule_of(mixer),
        heads=mixer.heads,
        head_dim=mixer.head_dim,
        groups=mixer.groups,
        state_dim=mixer.state_dim,
        kernel=mixer.conv_weight.shape[0],
        conv_weight=mixer.conv_weight.data_ptr(),
        conv_bias=mixer.conv_bias.data_ptr(),
        decay=mixer.decay.data_ptr(),
        skip=None if isinstance(mixer, DeltaNet) else mixer.skip.data_ptr(),
        step_bias=mixer.step_bias.data_ptr(),
        norm=None if mixer.norm is None else mixer.norm.data_ptr(),
        eps=mixer.eps,
        most_written=mixer.most_written if isinstance(mixer, DeltaNet) else 0.0,
        lower_bound=(mixer.lower_bound or 0.0) if isinstance(mixer, DeltaNet) else 0.0,
    )


def _rule_of(mixer: StateSpace | DeltaNet) -> int:
    if isinstance(mixer, DeltaNet):
        return _ELEMENT_DELTA if mixer.by_element else _GATED_DELTA
    return _LIGHTNING if mixer.lightning else _STATE_SPACE


def _described_channels(mixer: ShortConvolution | SelectiveSpace | RecurrentUnit) -> library.NativeStateMixer:
    weights = (mixer.conv_weight.data_ptr(), mixer.conv_bias.data_ptr())
    sizes = (mixer.heads, mixer.head_dim, 0, mixer.state_dim, mixer.conv_weight.shape[0])
    if isinstance(mixer, ShortConvolution):
        return library.NativeStateMixer(_GATED_CONVOLUTION if mixer.gated else _CONVOLUTION, *sizes, *weights)
    if isinstance(mixer, RecurrentUnit):
        return library.NativeStateMixer(_RECURRENCE, *sizes, *weights, mixer.decay.data_ptr())
    rest = (mixer.decay.data_ptr(), mixer.skip.data_ptr(), mixer.step_bias.data_ptr())
    return library.NativeStateMixer(_SELECTIVE, *sizes, *weights, *rest)
