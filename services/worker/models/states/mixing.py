"""What a layer with states makes of rows, between its projections: a decoder's part of `StateOps.mix`."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.distributed.communicator import Communicator
from services.worker.models.weights import LayerWeights, LowRankGates, RecurrentWeights, SelectiveWeights
from services.worker.ops.interface import (
    BatchMeta,
    DeltaNet,
    Ops,
    RecurrentUnit,
    SelectiveSpace,
    StateCache,
    StateMixer,
    StateSpace,
)

_OPEN_GATE = 64.0
"""Of which SiLU makes the number itself: what goes through it is multiplied with that, and no digit is another one."""


class StateMixing:
    """By the operations of one rank, whose share of the heads, or of the channels, it has."""

    def __init__(self, ops: Ops, communicator: Communicator, eps: float) -> None:
        """`eps`: of a norm of queries and keys that goes over the heads of several ranks."""
        self._ops, self._communicator, self._eps = ops, communicator, eps
        self._states = ops.states
        """One for all steps: it lays out the prompts of a step once for all layers."""

    def mixed(
        self, layer: LayerWeights, projected: Tensor, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """projected [n, …], what `layer.qkv` makes of rows x [n, hidden] → [n, H * P]; states are in the cache then."""
        mixer, states = layer.mixer, StateCache(*cache)
        assert mixer is not None, "the layer has states"
        if isinstance(mixer, SelectiveSpace):
            assert isinstance(layer.selective, SelectiveWeights)
            return self._selected(mixer, layer.selective, projected, meta, states)
        if isinstance(mixer, RecurrentUnit):
            assert isinstance(layer.selective, RecurrentWeights)
            return self._recurred(mixer, layer.selective, projected, meta, states)
        if layer.steps is not None:
            projected = torch.cat((projected, self._ops.linear(x, layer.steps)), dim=1)
        if layer.gates is not None:
            projected = self._with_gates(projected, layer.gates, mixer.conv_weight.shape[1])
        if isinstance(mixer, DeltaNet) and mixer.sigmoid_gated:
            return self._gated_by_sigmoid(mixer, projected, meta, states)
        mixed = self.mix(projected, mixer, states, meta)
        if layer.split_norm is not None:
            assert isinstance(mixer, StateSpace)
            alone = self._communicator.world_size == 1
            normed = self._ops.rms_norm if alone else self._normed_over_ranks
            mixed = normed(mixed, layer.split_norm, mixer.eps)
        return mixed if layer.gate is None else self._ops.sigmoid_gated(mixed, self._ops.linear(x, layer.gate))

    def _gated_by_sigmoid(self, net: DeltaNet, projected: Tensor, meta: BatchMeta, cache: StateCache) -> Tensor:
        """Behind the mixer, whose own gates are open."""
        gates, rest = projected[:, : net.gates], projected[:, net.gates :]
        opened = torch.cat((torch.full_like(gates, _OPEN_GATE), rest), dim=1)
        return self._ops.sigmoid_gated(self.mix(opened, net, cache, meta) / _OPEN_GATE, gates)

    def _selected(
        self, space: SelectiveSpace, weights: SelectiveWeights, projected: Tensor, meta: BatchMeta, cache: StateCache
    ) -> Tensor:
        """The convolution and the states are mixed each by itself, with a cache of its own, as products lie between
        them: drafts that are computed again need only what was given to each."""
        inputs, gates = projected.chunk(2, dim=1)
        windows, states = cache
        rows = self.mix(inputs, space.convolution, StateCache(windows, states[..., :0]), meta)
        made = self._ops.linear(rows, weights.made)
        if self._communicator.world_size > 1:  # each rank has made its channels' part of these
            made = self._communicator.sum(made)
        steps, b, c = torch.split(made, list(weights.sizes), dim=1)
        if weights.norms is not None:
            steps, b, c = (
                self._ops.rms_norm(part.contiguous(), norm, weights.eps)
                for part, norm in zip((steps, b, c), weights.norms, strict=True)
            )
        steps = self._ops.linear(steps.contiguous(), weights.steps)
        given = torch.cat((gates, rows, b, c, steps), dim=1)
        return self.mix(given, space, StateCache(windows[:, :0], states), meta)

    def _recurred(
        self, unit: RecurrentUnit, weights: RecurrentWeights, projected: Tensor, meta: BatchMeta, cache: StateCache
    ) -> Tensor:
        """The convolution and the states each by itself, as of a selective space."""
        gates, x = projected.chunk(2, dim=1)
        windows, states = cache
        opened = torch.cat((torch.ones_like(x), torch.ones_like(x), x), dim=1)
        rows = self.mix(opened, unit.convolution, StateCache(windows, states[..., :0]), meta)
        blocks = rows.chunk(len(weights.blocks), dim=1)
        made = [self._ops.linear(part.contiguous(), each) for part, each in zip(blocks, weights.blocks, strict=True)]
        halves = torch.stack(made).view(len(made), len(rows), 2, -1).permute(1, 2, 0, 3).flatten(1)
        mixed = self.mix(torch.cat((halves, rows), dim=1), unit, StateCache(windows[:, :0], states), meta)
        return self._ops.gated_act(torch.cat((gates, mixed.to(gates.dtype)), dim=1), "gelu_tanh")

    def _with_gates(self, projected: Tensor, gates: LowRankGates, channels: int) -> Tensor:
        """projected [n, C + 2 * R + H] → [n, H * P + C + H * N + H], as `StateOps.mix` takes it."""
        low = projected[:, channels : channels + 2 * gates.rank]
        rates, outputs = (each.contiguous() for each in low.chunk(2, dim=1))
        made = (self._ops.linear(outputs, gates.outputs), projected[:, :channels], self._ops.linear(rates, gates.rates))
        return torch.cat((*made, projected[:, channels + 2 * gates.rank :]), dim=1)

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """See `StateOps.mix`; where sequences have drafts, by the step's trial."""
        assert meta.states is not None, "a model with states has them in every step"
        trial = meta.states.trial
        if trial is not None:
            return trial.mix(projected, mixer, cache)
        return self._states.mix(projected, mixer, cache, meta)

    def rows_normed(self, inputs: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
        """inputs [n, queries + keys + values] → the same, whose queries and keys are each RMS-normed over the heads of
        all ranks by their part of `norms`. Heads of keys that several ranks have weigh as much as others."""
        queries, keys = norms
        parts = torch.tensor_split(inputs, [len(queries), len(queries) + len(keys)], dim=1)
        normed = (self._normed_over_ranks(*each, self._eps) for each in zip(parts[:2], norms, strict=True))
        return torch.cat((*normed, parts[2]), dim=1)

    def _normed_over_ranks(self, mixed: Tensor, weight: Tensor, eps: float) -> Tensor:
        """mixed [n, H * P], RMS-normed over the heads of all ranks."""
        wide, elements = mixed.float(), mixed.shape[1] * self._communicator.world_size
        squares = self._communicator.sum(wide.square().sum(1, keepdim=True))
        return (wide * (squares / elements + eps).rsqrt() * weight).to(mixed.dtype)
