"""A decoder whose mixtures are computed by the ranks of all engines of its data-parallel group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.worker.distributed.all2all import All2AllBackend
from services.worker.distributed.communicator import Communicator
from services.worker.distributed.lockstep import LockstepMember, StepRows
from services.worker.distributed.residual_rows import even_shares
from services.worker.distributed.row_exchange import RowExchange, shares_of
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.expert_parallel.local_experts import count_picks
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import (
    DecoderWeights,
    KvCaches,
    LayerWeights,
    MixtureMlp,
    Mlp,
    dispatch_rows,
    mixed_arrivals,
    shared_expert_rows,
)
from services.worker.ops.interface import BatchMeta, Ops


class GroupDecoder(LockstepMember, Decoder):
    """A `Decoder` that meets those of the group's other ranks in each mixture: rows go to the ranks of the experts that
    they pick, each computes its own picks, and what comes of an engine's rows is added up for its ranks.

    Which rows there are is agreed on once for each step. A rank whose engine has none computes its experts all the
    same, and nothing else."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        share: LayerShard,
        ops: Ops,
        communicator: Communicator,
        group: RankGroup,
        all2all: All2AllBackend,
    ) -> None:
        """`communicator`: of the engine's ranks. `share.placements`: of the group's. `all2all`: how its rows travel."""
        super().__init__(config, weights, share, ops, communicator)
        self.group = group
        self.lockstep = group.lockstep
        self._all2all, self._exchange = all2all, group.row_exchange(all2all)
        self._step = StepRows((), ())

    @property
    def wire(self) -> str:
        """See `Decoder.wire`."""
        return f"{super().wire}, of {self.group.place.engines} data-parallel engines by {self._all2all}"

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`; it is a step of the whole group. Raises RankGone, StepsOutOfSync."""
        last = len(ids) if features is not None and self.ends_every_row else len(meta.logits_rows)
        self._step = self.lockstep.begin(len(ids), last)
        logits = super().forward(ids, meta, caches, features)
        if not last:  # which has ended before the last layer's MLP
            self._compute_for_others(self._weights.layers[-1])
        return logits

    def execute_dummy_step(self) -> None:
        """See `LockstepMember.execute_dummy_step`."""
        self._step = self.lockstep.begin(0, 0)
        if self.rearranger is not None:
            self.rearranger.begin_step()
        for layer in self._weights.layers:
            self._compute_for_others(layer)

    def _compute_for_others(self, layer: LayerWeights) -> None:
        if isinstance(layer.mlp, MixtureMlp):
            none = self._ops.empty_rows(0, self._config.hidden_size)
            assert layer.mlp_norm is not None, "there is an MLP"
            self._mix(layer, layer.mlp, self._ops.rms_norm(none, layer.mlp_norm, self._config.norm_eps))

    def _mlp_sum(self, layer: LayerWeights, mlp: Mlp, x: Tensor) -> Tensor:
        """See `Decoder._mlp_sum`."""
        return self._mix(layer, mlp, x) if isinstance(mlp, MixtureMlp) else super()._mlp_sum(layer, mlp, x)

    def _mix(self, layer: LayerWeights, mixture: MixtureMlp, x: Tensor) -> Tensor:
        """x [n, hidden], this engine's rows, on all of its ranks → what the mixture makes of them. Shared experts are
        computed while rows are on their way."""
        counts = self._step.last if layer is self._weights.layers[-1] else self._step.rows
        if not sum(counts):
            return x
        if self._routed is not None:
            return self._mix_shares(mixture, x, self._routed, counts)
        activation = self._config.activation
        dispatch_rows(self._ops, mixture, x, self._exchange, counts)
        shared: Tensor | None = None
        if mixture.shared is not None and len(x):
            shared = self._communicator.sum(shared_expert_rows(self._ops, mixture.shared, x, activation))
        _, computed = mixed_arrivals(self._ops, mixture, self._exchange, activation)
        mixed = self._exchange.combine(computed)
        return mixed if shared is None else mixed.add_(shared)

    def _mix_shares(self, mixture: MixtureMlp, x: Tensor, routed: RowExchange, counts: Sequence[int]) -> Tensor:
        """The same by sequence parallelism: x is this rank's rows of its engine's, and so is what comes of them.
        `counts`: each engine's rows, all of which come to all ranks."""
        place, activation = self.group.place, self._config.activation
        shares = [share for rows in counts for share in even_shares(rows, place.tp)]
        dispatch_rows(self._ops, mixture, x, routed, [share.end - share.first for share in shares], counted=False)
        met, computed = mixed_arrivals(self._ops, mixture, routed, activation)
        own = slice(*shares_of(counts)[place.engine])
        if mixture.counts is not None and mixture.experts.local is not None:
            count_picks(mixture.counts, mixture.experts.local.experts_of(met.picks[own]))
        mixed = routed.combine(computed)
        if mixture.shared is None or not counts[place.engine]:
            return mixed
        return mixed.add_(self._rows.summed(shared_expert_rows(self._ops, mixture.shared, met.rows[own], activation)))
