"""Drafts from the model's hidden states by one layer that goes on from them, chained: EAGLE, EAGLE-3 and MTP.

A row at position i takes what the model's hidden state of i gives and the embedding of the token at i + 1, and gives
what the head draws the token at i + 2 from. In a chain the layer's own hidden state takes the place of the model's.
The layer's keys and values lie under the same block ids as the model's, so blocks that sequences share have them;
blocks that came from elsewhere have none, and the last row of a shared block was made with the token that followed it
first. Both cost acceptance only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.batch.draft_trees import MAX_TREES, TreeShape
from services.worker.batch.rows import Indices, Int32s
from services.worker.models.decoder import Decoder
from services.worker.ops.interface import BatchMeta
from services.worker.ops.transfer import on_this_device, to_device
from services.worker.sampling.logits_processors import LOGITS_FEATURES
from services.worker.sampling.races import draw_of
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.chain import DraftSampler, draft_chain
from services.worker.speculation.drafter import DraftHead, TargetModel
from services.worker.speculation.proposer import ComputedStep, DraftRequest, SequenceHistories
from services.worker.speculation.trees.expansion import TreeExpansion
from shared.messages.worker import NewSequence


class DraftLayer(Decoder):
    """The layer by single operations, on any device: one rank has all of it."""

    def advance(
        self, x: Tensor, residual: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x [n, …] that its product reads, residual [n, hidden] → (the output, normed by the last norm; before it)."""
        layer, last_norm = self._weights.layers[0], self._weights.final_norm
        assert last_norm is not None, "it is there"
        mixed = self.attend(layer, self.queries(layer, x, meta, cache), meta, cache)
        return self._mlp(layer, mixed, residual, last_norm)


def without_axes(meta: BatchMeta) -> BatchMeta:
    """A step whose rows are texts' to the layer: a head knows one position of each, and sees none behind it."""
    if meta.rotations is None and meta.lasts is None:
        return meta
    return replace(meta, rotations=None, lasts=None)


class HiddenStateDrafter(Struct, frozen=True):
    """Owns a head's weights, see `Drafter`."""

    head: DraftHead
    target: TargetModel
    most: int
    tree: TreeShape | None = None
    """None: drafts are chains."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of the one layer's keys and values."""
        return self.head.kv_block_bytes

    def proposer(self, num_blocks: int, max_sequences: int) -> HiddenStateProposer:
        """A proposer with the layer's KV cache of `num_blocks` blocks."""
        return HiddenStateProposer(self, num_blocks, max_sequences)


class HiddenStateProposer:
    """Owns the layer's keys and values, lanes of trees among them, and the feature predicted for each sequence's last
    token."""

    drafts_ahead: Literal[True] = True

    def __init__(self, drafter: HiddenStateDrafter, num_blocks: int, max_sequences: int) -> None:
        self._head = drafter.head
        self._device = drafter.target.device
        self._draw = draw_of(drafter.target.ops)
        self._most = drafter.most
        tree = drafter.tree
        lanes = 0 if tree is None else tree.lane_blocks(max_sequences)
        self._caches = self._head.allocate_kv(num_blocks + lanes)
        self._trees = None if tree is None else TreeExpansion(self._head, tree, self._caches, num_blocks)
        self._predicted: Tensor = drafter.target.ops.empty_rows(max_sequences, self._head.hidden_size).zero_()
        self._ready: NDArray[np.bool_] = np.zeros(max_sequences, dtype=np.bool_)
        """Whether `_predicted` is of the last token: not for sequences that decoded while no drafts were asked for."""

    def propose(self, request: DraftRequest) -> DraftTokens:
        """No drafts for sequences whose last feature is not known."""
        most = np.where(self._ready[request.seq_indices], np.minimum(request.limits, self._most), 0).astype(np.int32)
        if self._trees is None:
            return self._chains(request, most)
        branches = np.flatnonzero(most)
        branches = branches[self._may_branch(request, branches)][:MAX_TREES]
        if not len(branches):
            return self._chains(request, most)
        seq_indices = request.seq_indices[branches]
        drafts = self._trees.draft(seq_indices, most[branches], request.histories, self._features(seq_indices))
        most[branches] = 0
        return self._chains(request, most).beside(drafts.among(len(most), branches))

    def _may_branch(self, request: DraftRequest, which: Indices) -> NDArray[np.bool_]:
        """Of `which` [B] sequences of a request: a tree is drafted where nothing that depends on a path changes what
        is drawn."""
        seq_indices, levels = np.repeat(request.seq_indices[which], self._most + 1), np.arange(self._most + 1)
        ahead = np.tile(levels.astype(np.int32), len(which))
        by_row = request.histories.sampling_batch(seq_indices, ahead).by_row & int(LOGITS_FEATURES)
        plain: NDArray[np.bool_] = (by_row.reshape(len(which), self._most + 1) == 0).all(axis=1)
        return plain

    def _features(self, seq_indices: Indices) -> Tensor:
        return self._predicted.index_select(0, to_device(seq_indices, self._device))

    def _chains(self, request: DraftRequest, most: Int32s) -> DraftTokens:
        """As many drafts of each sequence as `most` [P] says."""
        ready = np.flatnonzero(most)
        if not len(ready):
            return DraftTokens.none(len(request.seq_indices))
        if len(ready) == len(most):
            return DraftTokens(self._draft(request.seq_indices, most, request.histories, request.rejected), most)
        there = to_device(ready, self._device)
        short = None if request.rejected is None else request.rejected.of(there)
        drafted = self._draft(request.seq_indices[ready], most[ready], request.histories, short)
        return DraftTokens(drafted.new_zeros(len(most), drafted.shape[1]).index_copy_(0, there, drafted), most)

    def _draft(
        self, seq_indices: Indices, most: Int32s, histories: SequenceHistories, rejected: RejectedDrafts | None
    ) -> Tensor:
        """[P, the greatest of most]"""
        draws = DraftSampler(seq_indices, histories, rejected, self._draw)
        features = self._features(seq_indices)
        tokens = [draws.token(self._head.logits(features), [])]
        steps = int(most.max()) - 1
        if steps:
            # Those that may draft no further go on writing behind their last draft: nothing is read from there.
            ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], most - 1)
            rows = draft_chain(
                seq_indices,
                histories.lengths[seq_indices] - 1 + ahead,
                histories.block_tables,
                histories.block_size,
                self._device,
            )
            if rejected is not None:
                rows.move_back(rejected)
            if draws.greedy:
                first, stride = rows.meta(0), rows.stride
                drafts = self._head.draft_chain(tokens[0], first, steps, stride, self._caches, features)
                if drafts is not None:
                    return drafts.t()
            for step in range(steps):
                features, logits = self._head.predict(
                    tokens[-1], features, rows.meta(step), self._caches, wants_logits=True
                )
                assert logits is not None, "wanted"
                tokens.append(draws.token(logits, tokens))
        return torch.stack(tokens, dim=1)

    def observe(self, computed: ComputedStep) -> None:
        """The layer goes over every row of the step, each with the token behind it."""
        if computed.features is None:
            self._ready[computed.sampled_indices] = False
            return
        given = self._head.combine(computed.features)
        predicted, _ = self._head.predict(computed.following(), given, computed.meta, self._caches, wants_logits=False)
        rows, seq_indices = (
            on_this_device(computed.last_rows, self._device),
            to_device(computed.sampled_indices, self._device),
        )
        last = predicted.index_select(0, rows).to(self._predicted.dtype)
        self._predicted.index_copy_(0, seq_indices, last)
        self._ready[computed.sampled_indices] = True

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Nothing to do: its first decode follows a step that computes its last row."""

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Nothing to do: its place is written anew before it is read again."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """Nothing to do: what the layer made of their former contents stays, finite and wrong."""

    def clear(self) -> None:
        """No feature is known from here on."""
        self._ready[:] = False
