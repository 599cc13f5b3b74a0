"""Checkpoints that have inputs before outputs in some of their matrices, as GPT-2's `Conv1D` does."""

from __future__ import annotations

from torch import Tensor

from services.worker.models.checkpoint import Checkpoint
from services.worker.models.published.jais import JAIS

_MATRICES = {JAIS: ("c_attn.weight", "c_proj.weight", "c_fc.weight", "c_fc2.weight")}
"""By architecture, what the names of these end with."""


def has_transposed(architecture: str) -> bool:
    """Whether some matrices of the checkpoints of `architecture` lie so."""
    return architecture in _MATRICES


class TransposedCheckpoint:
    """An open checkpoint of such an architecture, with outputs first in all matrices."""

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        self._checkpoint, self._architecture = checkpoint, architecture

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def headers(self) -> TransposedCheckpoint:
        """The same tensors without their elements."""
        return TransposedCheckpoint(self._checkpoint.headers(), self._architecture)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `Checkpoint.read`."""
        if not name.endswith(_MATRICES[self._architecture]):
            return self._checkpoint.read(name, shape, rows=rows, columns=columns)
        return self._checkpoint.read(name, shape[::-1], rows=columns, columns=rows).T.contiguous()
