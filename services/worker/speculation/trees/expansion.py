"""Looks for a tree of drafts, level by level: the best paths of each level go on, each by its `topk` best tokens.

EAGLE-2's expansion (Li et al., "EAGLE-2: Faster inference of language models with dynamic draft trees",
arXiv:2406.16858), by any `DraftHead`. How likely a token is to be accepted is what the head itself gives it; where
tokens are drawn its share of the race, as drafts and model race by the same times.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.batch.draft_trees import TreeShape
from services.worker.batch.rows import Indices, Int32s
from services.worker.models.weights import KvCaches
from services.worker.sampling.sampler import DraftCandidates, draft_candidates
from services.worker.speculation.drafter import DraftHead
from services.worker.speculation.proposer import SequenceHistories
from services.worker.speculation.trees.lanes import DraftLanes
from services.worker.speculation.trees.selection import ROOT, TreeCandidates, best_tree
from shared.blocks import blocks_for

Float32s = NDArray[np.float32]


class TreeExpansion:
    """Drafts trees by a head whose `caches` have blocks for lanes from `first_block` on."""

    def __init__(self, head: DraftHead, shape: TreeShape, caches: KvCaches, first_block: int) -> None:
        self._head = head
        self._shape = shape
        self._caches = caches
        self._first_block = first_block

    def draft(
        self, seq_indices: Indices, limits: Int32s, histories: SequenceHistories, features: Tensor
    ) -> DraftTokens:
        """Trees of S sequences, no path longer than its `limits` [S]; features [S, hidden], the rows that the head goes
        on from. Nothing but temperature and cuts may change what the sequences draw."""
        shape, looked_at = self._shape, self._expand(seq_indices, limits, histories, features)
        trees = [
            best_tree(TreeCandidates(*(part[row] for part in looked_at)), shape.of_depth(limit), shape.least_value)
            for row, limit in enumerate(limits.tolist())
        ]
        counts = np.array([len(tree.tokens) for tree in trees], dtype=np.int32)
        tokens, parents = np.zeros((2, len(trees), int(counts.max())), dtype=np.int32)
        for row, (tree, count) in enumerate(zip(trees, counts, strict=True)):
            tokens[row, :count], parents[row, :count] = tree
        return DraftTokens(tokens, counts, parents)

    def _expand(
        self, seq_indices: Indices, limits: Int32s, histories: SequenceHistories, features: Tensor
    ) -> TreeCandidates:
        """`TreeCandidates` of all sequences, [S, C] each."""
        topk = self._shape.topk
        search = _Search(
            topk, draft_candidates(self._head.logits(features), histories.sampling_batch(seq_indices, 0), topk)
        )
        positions = histories.lengths[seq_indices] - 1
        width = blocks_for(int((positions + limits).max()), histories.block_size)
        tables = histories.block_tables[seq_indices, :width]
        lanes = DraftLanes(tables, positions, topk, self._first_block, histories.block_size)
        rows, given = np.repeat(seq_indices, topk), features.repeat_interleave(topk, dim=0)
        for level in range(1, int(limits.max())):
            if search.is_over(self._shape.drafts, self._shape.least_value):
                break
            # Those that may draft no further go on at their last position: nothing is read from there.
            meta = lanes.next_level(np.minimum(level, limits) - 1, search.lanes)
            ids = torch.from_numpy(search.tokens)
            hidden, logits = self._head.predict(ids, given, meta, self._caches, wants_logits=True)
            assert logits is not None, "wanted"
            search.go_on(draft_candidates(logits, histories.sampling_batch(rows, level), topk), level < limits)
            given = hidden.index_select(0, torch.from_numpy(search.lanes))
        return search.looked_at()


class _Search:
    """What was found so far for S sequences, and the `topk` paths of each that go on."""

    def __init__(self, topk: int, first: DraftCandidates) -> None:
        self._topk, self._count = topk, len(first.tokens)
        tokens, values = _found(first)
        self._levels = [TreeCandidates(tokens, np.full_like(tokens, ROOT), values)]
        self.tokens = tokens.ravel()
        """[S * topk] the last ones of those paths."""
        self.lanes: Indices = np.arange(len(self.tokens))
        """[S * topk] the lane that each has come by."""
        self._values = values
        self._numbers = np.tile(np.arange(topk, dtype=np.int32), (self._count, 1))

    def go_on(self, found: DraftCandidates, may: NDArray[np.bool_]) -> None:
        """`found` [S * topk, topk] behind the paths, of sequences that `may` [S] go on."""
        shape = (self._count, self._topk**2)
        tokens, shares = _found(found)
        values = (self._values.reshape(-1, 1) + shares).reshape(shape)
        values[~may] = -np.inf
        number = sum(level.tokens.shape[1] for level in self._levels)
        level = TreeCandidates(tokens.reshape(shape), np.repeat(self._numbers, self._topk, axis=1), values)
        self._levels.append(level)
        best = np.argsort(-values, axis=1, kind="stable")[:, : self._topk]
        self.tokens = np.take_along_axis(level.tokens, best, axis=1).ravel()
        self.lanes = (np.arange(self._count)[:, None] * self._topk + best // self._topk).ravel()
        self._values = np.take_along_axis(values, best, axis=1)
        self._numbers = (number + best).astype(np.int32)

    def is_over(self, drafts: int, least_value: float) -> bool:
        """Whether nothing that could follow any path is worth more than that, and than so many tokens that there
        are."""
        values = np.concatenate([level.values for level in self._levels], axis=1)
        least = np.full(self._count, least_value)
        if values.shape[1] >= drafts:
            least = np.maximum(least, -np.partition(-values, drafts - 1, axis=1)[:, drafts - 1])
        return bool((least >= self._values.max(axis=1)).all())

    def looked_at(self) -> TreeCandidates:
        """All that was, [S, C]."""
        return TreeCandidates(*(np.concatenate(part, axis=1) for part in zip(*self._levels, strict=True)))


def _found(found: DraftCandidates) -> tuple[Int32s, Float32s]:
    """(tokens, the logarithms of their shares)"""
    with np.errstate(divide="ignore"):
        return found.tokens.numpy().astype(np.int32), np.log(found.shares.numpy())
