"""A decoder's forward pass, replayed where a step is nothing but decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.graphs.capture import Capture, Replay
from services.worker.graphs.decode_inputs import DecodeInputs, padded_size
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.interface import BatchMeta

_TOLD_EVERY = 8
"""Sizes captured between two lines of the log."""

Replaying = Callable[[ForwardPass, KvCaches], ForwardPass]
"""A forward pass on these caches → one that replays what it can."""

_log = logging.getLogger(__name__)


class ReplayedDecodes:
    """See :class:`services.worker.models.decoder.ForwardPass`. Steps that are no batch of decodes alone, or more of
    them
    than the largest size captured, run as `forward` does.

    Where several ranks compute together, each decides the same, as all are given the same rows.
    """

    def __init__(
        self,
        forward: ForwardPass,
        caches: KvCaches,
        capture: Capture,
        sizes: tuple[int, ...],
        inputs: DecodeInputs,
        features: Tensor | None = None,
    ) -> None:
        """Captures every size, the largest first: the others fit into the memory that it takes. `features`: room for
        the last hidden state of the largest size's rows, where these are going to be asked for."""
        self._forward = forward
        self._caches = caches
        self._sizes = sizes
        self._inputs = inputs
        self._features = features
        self._logits: Tensor | None = None
        """Room for the largest size. Each graph copies its logits there: as they lie in memory that graphs share, each
        would need its own place for them otherwise."""
        self._replays: dict[int, Replay] = {}
        for done, size in enumerate(reversed(sizes), start=1):
            self._replays[size] = capture.capture(self._of(size))
            if done % _TOLD_EVERY == 0 or done == len(sizes):
                _log.info("captured decodes", extra={"sizes": done, "of": len(sizes), "rows": size})

    def __call__(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """The logits are overwritten by the next call."""
        size = self._size(meta, caches, features)
        if size is None:
            return self._forward(ids, meta, caches, features)
        self._inputs.fill(ids, meta, size)
        self._replays[size]()
        if features is not None and self._features is not None:
            features.copy_(self._features[: len(ids)])
        return self._wanted(meta)

    def _size(self, meta: BatchMeta, caches: KvCaches, features: Tensor | None) -> int | None:
        """What to replay; None: nothing that was captured is this step."""
        if caches is not self._caches or meta.prefills or not self._inputs.holds(meta):
            return None
        if features is not None and self._features is None:
            return None
        return padded_size(len(meta.block_tables), self._sizes)

    def _wanted(self, meta: BatchMeta) -> Tensor | None:
        if self._logits is None or not len(meta.logits_rows):
            return None
        return self._logits[: meta.num_decodes] if meta.every_row else self._logits.index_select(0, meta.logits_rows)

    def _of(self, size: int) -> Callable[[], None]:
        """A step of `size` decodes."""
        ids, meta = self._inputs.views(size)
        features = None if self._features is None else self._features[:size]

        def step() -> None:
            logits = self._forward(ids, meta, self._caches, features)
            if logits is None:
                return
            if self._logits is None:
                # Made by the first run, which is not captured, so that no pool owns it.
                self._logits = torch.empty_like(logits)
            self._logits[:size].copy_(logits)

        return step
