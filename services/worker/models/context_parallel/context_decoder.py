"""A decoder whose ranks have all weights each, and share the rows of long steps: context-parallel prefill.

In each layer of a shared step the ranks gather what keys and values are made of, and each stores all of them in its own
cache ("pass-KV" by an all-gather: Llama 3, arXiv:2407.21783, section 3.3.2). So every rank has the cache that a rank
alone would have, and small steps, decodes above all, are computed by each rank without the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from services.worker.distributed.communicator import SingleRank
from services.worker.kv.layer_groups import LayerGroups
from services.worker.models.config import ModelConfig
from services.worker.models.context_parallel.shared_ops import ContextRanks, SharedOps
from services.worker.models.context_parallel.shared_step import share_step
from services.worker.models.decoder import Decoder
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import DecoderWeights, KvCaches
from services.worker.ops.interface import BatchMeta, Ops


class ContextDecoder(Decoder):
    """A `Decoder` that computes its share of a step's rows where there are many."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        share: LayerShard,
        ops: Ops,
        ranks: ContextRanks,
        min_rows: int,
    ) -> None:
        """`share`: of a rank that has all of each layer. `min_rows`: a step of so many rows is shared."""
        self._ranks, self._min_rows = ranks, min_rows
        self._shares_steps = True
        super().__init__(config, weights, share, ops, SingleRank())

    def _compute_by(self, ops: Ops) -> None:
        """See `Decoder`; a step that is not shared is computed by a decoder as of a rank alone."""
        super()._compute_by(cast(Ops, SharedOps(ops, self._ranks)))
        self._plain_ops = ops
        self._alone = Decoder(self._config, self._weights, self._share, ops, SingleRank())
        if self._groups is not None:
            self._alone.use_groups(self._groups)
        if self._taps:
            self._alone.use_taps(self._taps)

    def on(self, ops: Ops) -> Decoder:
        """See `Decoder.on`. Steps are not shared by other operations, which may know what each row of a step is."""
        decoder = cast(ContextDecoder, super().on(ops))
        decoder._shares_steps = False
        return decoder

    @property
    def ops(self) -> Ops:
        """See `Decoder.ops`."""
        return self._plain_ops

    @property
    def wire(self) -> str:
        """See `Decoder.wire`."""
        return f"{super().wire}, steps of {self._min_rows} rows shared by context"

    def use_groups(self, groups: LayerGroups) -> None:
        """See `CausalLm.use_groups`."""
        super().use_groups(groups)
        self._alone.use_groups(groups)

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """See `Decoder.use_taps`."""
        super().use_taps(layers)
        self._alone.use_taps(layers)

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`: logits on the engine's first rank. Raises RankGone."""
        shared = self._shares_steps and len(ids) >= self._min_rows
        self._ranks.step = step = share_step(meta, self._ranks.rank, self._ranks.count) if shared else None
        if step is None:
            if self._ranks.rank:  # which nobody draws on
                meta = replace(meta, logits_rows=meta.logits_rows[:0], every_row=False)
            return self._alone.forward(ids, meta, caches, features)
        own = None if features is None else self.empty_features(len(step.rows))
        logits = super().forward(ids.index_select(0, step.rows), step.own, caches, own)
        if len(meta.logits_rows) and not len(step.own.logits_rows):  # others have some
            assert self._weights.final_norm is not None, "the model is whole"
            none = self._ops.empty_rows(0, self._config.hidden_size)
            logits = self.logits(self._ops.rms_norm(none, self._weights.final_norm, self._config.norm_eps))
        if features is not None and own is not None:
            features.copy_(self._ranks.gathered(own, step.every_row))
        return logits

    def logits(self, x: Tensor) -> Tensor | None:
        """x, this rank's rows of those whose logits are wanted, normed → [R, vocab] on the first rank, else None."""
        assert self._ranks.step is not None, "the step is shared"
        gathered = self._ranks.gathered(x, self._ranks.step.logits)
        return None if self._ranks.rank else super().logits(gathered)
