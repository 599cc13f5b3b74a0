"""Operations that store keys and values of all ranks' rows where one rank alone computes some of them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from services.worker.distributed.host_memory import HostExchange
from services.worker.models.context_parallel.shared_step import Scattered, SharedStep
from services.worker.ops.interface import BatchMeta, LatentCache, LatentOps, Ops


class ContextRanks:
    """Owns which rows of the current step the ranks have, and gathers them. Used by the thread that computes."""

    step: SharedStep | None = None
    """None: every rank computes all rows."""

    def __init__(self, exchange: HostExchange, rank: int, count: int) -> None:
        """`rank`: this one's number among `count`."""
        self._exchange, self.rank, self.count = exchange, rank, count

    def gathered(self, x: Tensor, rows: Scattered) -> Tensor:
        """x, this rank's rows → those of all ranks in the step's order [n, width]. Raises RankGone."""
        whole = x.new_empty(rows.shares[-1].end, x.shape[1])
        whole[slice(*rows.shares[self.rank])] = x
        self._exchange.all_gather(whole, rows.shares)
        return whole.index_select(0, rows.places)


class SharedOps:
    """Stands before a device's operations in a shared step, where a layer's keys and values are needed of all rows and
    queries of a rank's own. What ranks send each other is what keys and values are made of, before they are rotated and
    rounded: so it is the same whatever a cache is like, and each rank's cache is that of a rank alone."""

    def __init__(self, ops: Ops, rows: ContextRanks) -> None:
        self._ops, self._rows = ops, rows

    def __getattr__(self, name: str) -> Any:
        """As the device does it."""
        return getattr(self._ops, name)

    @property
    def latents(self) -> SharedLatentOps:
        """See `Ops.latents`."""
        return SharedLatentOps(self._ops.latents, self._rows)

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See `Ops.rope_and_store`; keys and values of all ranks' rows are stored. Raises RankGone."""
        assert self._rows.step is not None, "the step is shared"
        store = partial(
            self._ops.rope_and_store,
            cos_sin=cos_sin,
            k_cache=k_cache,
            v_cache=v_cache,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )
        first = heads * cos_sin.shape[1]
        keys_and_values = self._rows.gathered(qkv[:, first:], self._rows.step.every_row)
        queries = store(qkv, meta, heads=heads)
        store(keys_and_values, self._rows.step.whole_of(meta), heads=0)
        return queries


class SharedLatentOps:
    """The same for latent attention."""

    def __init__(self, ops: LatentOps, rows: ContextRanks) -> None:
        self._ops, self._rows = ops, rows

    def __getattr__(self, name: str) -> Any:
        """As the device does it."""
        return getattr(self._ops, name)

    def rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        cache: LatentCache,
        *,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """See `LatentOps.rope_and_store`; latents of all ranks' rows are stored. Raises RankGone."""
        assert self._rows.step is not None, "the step is shared"
        whole = self._rows.gathered(latents, self._rows.step.every_row)
        queries = self._ops.rope_and_store(q, latents, meta, cos_sin, cache, norm=norm, eps=eps)
        none = q.new_empty(len(whole), 0, q.shape[2])
        self._ops.rope_and_store(none, whole, self._rows.step.whole_of(meta), cos_sin, cache, norm=norm, eps=eps)
        return queries
