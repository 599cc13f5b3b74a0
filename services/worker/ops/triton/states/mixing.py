"""Layers with states on a GPU: which of their operations are Triton kernels, and which are PyTorch's."""

from __future__ import annotations

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
    StateRows,
    StateSpace,
)
from services.worker.ops.torch_mixers.convolution import split_channels, states_of_prompts
from services.worker.ops.torch_mixers.delta import DeltaRule
from services.worker.ops.torch_mixers.states import StateSpaceRecurrence, TorchStates
from services.worker.ops.triton.states.chunks import hand_on, scan_delta
from services.worker.ops.triton.states.convolution import convolve
from services.worker.ops.triton.states.one_token import step_decodes
from services.worker.ops.triton.states.recurrent import recur
from services.worker.ops.triton.states.selective import select


class TritonStates(TorchStates):
    """See :class:`services.worker.ops.interface.StateOps`. All is kernels but what chunks of prompts are made of in
    state spaces and delta nets. A row whose context is 0 is padding and leaves nothing behind: decodes can be
    captured."""

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """In the dtype of `projected`; computed in float32."""
        rows = meta.states
        assert rows is not None, "a model with states has them in every step"
        if isinstance(mixer, ShortConvolution):
            return convolve(projected, mixer, cache.windows, meta, rows, projected.dtype, gated=mixer.gated)
        if isinstance(mixer, SelectiveSpace):
            return select(projected, mixer, cache.states, meta, rows)
        if isinstance(mixer, RecurrentUnit):
            return recur(projected, mixer, cache.states, meta, rows)
        rule = DeltaRule(mixer) if isinstance(mixer, DeltaNet) else StateSpaceRecurrence(mixer)
        gates, channels, decodes = mixer.gates, mixer.conv_weight.shape[1], meta.num_decodes
        gate, inputs, steps = projected.tensor_split([gates, gates + channels], dim=1)
        seen, parts = convolve(inputs, mixer, cache.windows, meta, rows, torch.float32), []
        if decodes:
            parts.append(step_decodes(seen, steps, mixer, cache.states, meta, rows))
        if meta.prefills:
            parts.append(self._scanned(rule, seen[decodes:], steps[decodes:].float(), mixer, cache, meta, rows))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rule.normed(mixed, gate.float()).to(projected.dtype)

    def _scanned(
        self,
        rule: StateSpaceRecurrence | DeltaRule,
        seen: Tensor,
        steps: Tensor,
        mixer: StateSpace | DeltaNet,
        cache: StateCache,
        meta: BatchMeta,
        rows: StateRows,
    ) -> Tensor:
        """The prompts of a step: chunks by PyTorch, all together; from chunk to chunk one kernel."""
        prompts = self._laid_out(rows, meta, mixer.conv_weight.shape[0])
        state = states_of_prompts(cache, prompts)
        channels = split_channels(seen, mixer)
        if isinstance(rule, DeltaRule):
            mixed = rule.scan(channels, steps, state, prompts, scan_delta)
        else:
            mixed = rule.scan(channels, steps, state, prompts, hand_on)
        cache.states.index_copy_(0, prompts.slots, state)
        return mixed
