"""A proposer of trees that is told what will come, and hides it among other tokens."""

from __future__ import annotations

import numpy as np

from services.worker.batch.batch import DraftTokens
from services.worker.speculation.proposer import DraftRequest
from tests.support.models.tiny_models import VOCABULARY
from tests.support.worker.oracle import Oracle


class TreeOracle(Oracle):
    """Drafts what it was told will come as a path of a tree, seldom the first; errs now and then."""

    drafts = 12

    def __init__(self) -> None:
        super().__init__()
        self.branched = 0
        """Trees with more than one path."""

    def propose(self, asked: DraftRequest) -> DraftTokens:
        """A tree for each sequence; a chain where `frequency_penalty` or the like looks at what was drafted."""
        chains = super().propose(asked)
        tokens = np.zeros((len(chains.counts), self.drafts), dtype=np.int32)
        parents, counts = np.zeros_like(tokens), np.zeros_like(chains.counts)
        for row, seq_index in enumerate(asked.seq_indices):
            path = chains.known()[row, : chains.counts[row]].tolist()
            penalised = asked.histories.sampling_batch(np.array([seq_index]), 0).table.repetition[seq_index] != 1.0
            tree = [(token, depth) for depth, token in enumerate(path)] if penalised else self._tree(path)
            counts[row] = len(tree)
            self.branched += any(parent != number for number, (_, parent) in enumerate(tree))
            for number, (token, parent) in enumerate(tree):
                tokens[row, number], parents[row, number] = token, parent
        return DraftTokens(tokens, counts, parents)

    def _tree(self, path: list[int]) -> list[tuple[int, int]]:
        """(token, row that it follows), `path` among them."""
        tree: list[tuple[int, int]] = []
        behind = 0
        for depth, token in enumerate(path):
            left = self.drafts - len(tree) - (len(path) - depth)
            if left and self._random.random() < 0.7:
                deepest = self._random.randint(1, min(left, len(path) - depth))
                parent = behind
                for number in range(deepest):
                    wrong = (token + 1 + number + self._random.randrange(3)) % VOCABULARY
                    tree.append((wrong, parent))
                    parent = len(tree)
            tree.append((token, behind))
            behind = len(tree)
        return tree
