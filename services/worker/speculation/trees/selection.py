"""Which of the tokens that were looked at make a tree: those whose paths are likeliest to be accepted.

EAGLE-2's reranking (Li et al., arXiv:2406.16858): the value of a token is the product of the drafter's confidences on
its path. A token is worth no more than the one that it follows, so the best so many are a tree. Where
EAGLE-2 has always as many, what is hardly ever accepted is left out here: on a CPU each row takes time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.rows import Int32s

ROOT = -1
"""The parent of tokens that follow a sequence's last one."""


class TreeCandidates(NamedTuple):
    """The C tokens that were looked at for one sequence, each behind the one that it follows; of those that follow the
    same one, the first is what a chain would draft."""

    tokens: Int32s
    """[C]"""
    parents: Int32s
    """[C] which of them each follows, or `ROOT`."""
    values: NDArray[np.float32]
    """[C] the logarithm of how likely its path is to be accepted; -inf: it is no candidate."""


class DraftTree(NamedTuple):
    """The drafts of one sequence, in the order of `TreeRows`."""

    tokens: list[int]
    parents: list[int]


def best_tree(candidates: TreeCandidates, most: int, least: float) -> DraftTree:
    """Of no more than `most` drafts, each of a value of `least` or more but for the best."""
    order = np.argsort(-candidates.values, kind="stable")[:most]  # of equals, the one before
    worth = candidates.values[order] >= least
    worth[0] = True
    chosen = np.sort(order[worth]).tolist()
    children: dict[int, list[int]] = {}
    for candidate in chosen:
        children.setdefault(int(candidates.parents[candidate]), []).append(candidate)
    tree, rows = DraftTree([], []), {ROOT: 0}
    pending = children.get(ROOT, [])[::-1]
    while pending:
        candidate = pending.pop()
        tree.tokens.append(int(candidates.tokens[candidate]))
        tree.parents.append(rows[int(candidates.parents[candidate])])
        rows[candidate] = len(tree.tokens)
        pending += children.get(candidate, [])[::-1]
    return tree
