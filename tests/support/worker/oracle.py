"""A proposer of drafts that is told what will come."""

from __future__ import annotations

from random import Random

import numpy as np

from services.worker.batch.batch import DraftTokens
from services.worker.speculation.proposer import ComputedStep, DraftRequest, Int32s, SequenceHistories
from shared.messages.worker import NewSequence
from tests.support.models.tiny_models import VOCABULARY


class Oracle:
    """Drafts what it was told will come, and errs now and then."""

    most = 4

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}
        """Prompt → what follows it."""
        self._random = Random(11)

    def propose(self, asked: DraftRequest) -> DraftTokens:
        tokens = np.zeros((len(asked.seq_indices), self.most), dtype=np.int32)
        counts = np.zeros(len(asked.seq_indices), dtype=np.int32)
        for row, seq_index in enumerate(asked.seq_indices):
            held = asked.histories.tokens[seq_index, : asked.histories.lengths[seq_index]].tolist()
            drafts = self._following(held)[: min(self.most, asked.limits[row])]
            counts[row] = self._random.randint(0, len(drafts))
            for i in range(counts[row]):
                wrong = self._random.random() < 0.2
                tokens[row, i] = (drafts[i] + wrong) % VOCABULARY
        return DraftTokens(tokens, counts)

    def _following(self, held: list[int]) -> list[int]:
        for prompt, output in self.known.items():
            if tuple(held[: len(prompt)]) == prompt:
                return output[len(held) - len(prompt) :]
        return []

    def observe(self, computed: ComputedStep) -> None:
        assert len(computed.seq_indices) == len(computed.positions)

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None: ...
    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None: ...
    def forget_blocks(self, blocks: Int32s) -> None: ...
    def clear(self) -> None: ...
