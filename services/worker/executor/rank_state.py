"""One rank of a model, and what it holds between steps. Knows what a plan changes, not how steps follow each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.batch import Batch, DraftTokens, ScheduledWork
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.batch.rows import Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.batch.staging import staging_for
from services.worker.distributed.communicator import Communicator, Pipeline, SingleStage
from services.worker.guided.guided_sequences import MAX_JUMP_FORWARD, GuidedSequences, JumpForwardProposer
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import RankKvCache
from services.worker.models.decoder import Decoder
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.interface import BatchMeta
from services.worker.ops.transfer import to_device
from services.worker.sampling.parameters import SamplingBatch
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.proposer import (
    NO_DRAFTS,
    ComputedStep,
    DraftRequest,
    DraftsAhead,
    DraftSettings,
    Proposer,
    ProposerChain,
    StatelessProposer,
)
from services.worker.speculation.verification import VerifiedDrafts, verify_batch
from shared.messages.lifecycle import ModelCard
from shared.messages.worker import StepPlan

FORGETS_AFTER = 8
"""Steps without drafts after which the proposer observes no further step: a drafter that does not pay costs nothing
then. When it is asked again it starts from what it can read."""


class SplitLogits(NamedTuple):
    """A step's logits: the rows to draw from, and what the others say of prompts."""

    drawn: Tensor | None
    """None on ranks that have no logits."""
    scored: ScoredPromptRows


class RankState:
    """Owns a rank's share of the model, its KV memory, and its sequences with their grammars and drafts. Used from the
    compute thread."""

    def __init__(
        self,
        *,
        card: ModelCard,
        device: torch.device,
        decoder: Decoder,
        num_blocks: int,
        max_num_seqs: int,
        communicator: Communicator,
        digest: str,
        pipeline: Pipeline | None = None,
        grammars: GrammarLibrary | None = None,
        proposer: Proposer | None = None,
        drafting: DraftSettings = NO_DRAFTS,
        replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None = None,
    ) -> None:
        """`digest` tells this model's keys and values from those of any other. `grammars`: given to the rank that
        samples. `proposer`: that of rank 0 of each stage drafts for the others, which need none. `replaying`: captures
        what can be replayed of the decoder's forward pass on these caches."""
        self.card = card
        self.device = device
        self.decoder = decoder
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.communicator = communicator
        self.pipeline = pipeline or SingleStage()
        self.draws = self.pipeline.stage + 1 == self.pipeline.stages
        """Or is of a stage before the last, which is sent later what was drawn."""
        self.grammars = grammars
        self.drafting = drafting
        self.staging = staging_for(device)
        self._caches: KvCaches = decoder.allocate_kv(num_blocks)
        self.kv: RankKvCache = decoder.share_kv(self._caches, digest)
        self._forward = self._eager_or(replaying)
        self.sequences = SequenceTable(
            max_sequences=max_num_seqs,
            max_model_len=card.max_model_len,
            num_blocks=num_blocks,
            vocab_size=card.vocab_size,
        )
        self.steps_without_drafts = 0
        """Steps since drafts were asked for; the same on all ranks. Written by the runner, too."""
        self._forgotten = False
        """Whether the proposer knows no sequence, as it has observed no step since."""
        self.guided = None if grammars is None else GuidedSequences(grammars, card.vocab_size)
        self.draft_by(proposer)

    @property
    def caches(self) -> KvCaches:
        """Read and written by steps and copies only, and by measurements without sequences."""
        return self._caches

    @torch.inference_mode()
    def _eager_or(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None) -> ForwardPass:
        return self.decoder.fastest_pass if replaying is None else replaying(self.decoder.forward, self._caches)

    def draft_by(self, proposer: Proposer | None) -> None:
        """Drafts by `proposer` from here on; tokens that a grammar forces are drafted before any guess."""
        self.proposer = self._drafter = proposer
        self.observes = self.draws and proposer is not None and not isinstance(proposer, StatelessProposer)
        """Whether the proposer observes what steps compute."""
        if self.guided is not None and self.pipeline.stages == 1:
            forced = JumpForwardProposer(self.guided)
            self._drafter = forced if proposer is None else ProposerChain((forced, proposer))

    @property
    def max_jump_ahead(self) -> int:
        """Forced tokens that one step may yield for a sequence with a grammar; 0 where there are several stages."""
        # Stages before the last have no matchers, and would need the drafts before they are known.
        return MAX_JUMP_FORWARD if self.pipeline.stages == 1 else 0

    def clear(self) -> None:
        """Forgets every sequence."""
        self.sequences.clear()
        if self.guided is not None:
            self.guided.clear()
        if self.proposer is not None:
            self.proposer.clear()

    def update_sequences(self, plan: StepPlan) -> list[int]:
        """Removes the sequences that `plan` releases, and adds its new ones: their indices. Raises BrokenPlan."""
        for sequence in plan.released:
            seq_index = self.sequences.release(sequence)
            if self.guided is not None:
                self.guided.release(seq_index)
        if self.proposer is not None:
            for transfer in plan.transfers:
                if transfer.kind == "load":
                    self.proposer.forget_blocks(np.frombuffer(transfer.blocks, dtype="<u4").astype(np.int32))
        seq_indices = []
        for new in plan.new:
            seq_indices.append(seq_index := self.sequences.add(new))
            if self.proposer is not None:
                self.proposer.start_sequence(seq_index, new.computed, self.sequences)
            if self.guided is not None:
                self.guided.add(seq_index, new)
        return seq_indices

    def drafts(self, scheduled: ScheduledWork) -> DraftTokens | None:
        """See `proposed`, on the host, which waits for them."""
        drafts = self.proposed(scheduled)
        return None if drafts is None else drafts.on_host()

    def goes_ahead(self, plan: StepPlan) -> bool:
        """Whether a step can be prepared before the host knows how many drafts of the one before were accepted.

        Not where a sequence has a grammar, the proposer reads tokens, or other ranks have to be sent the drafts."""
        if self.communicator.world_size > 1 or self.guided or any(new.grammar is not None for new in plan.new):
            return False
        if any(work.speculate for work in plan.work):
            return isinstance(self.proposer, DraftsAhead)
        return self.proposer is None or isinstance(self.proposer, DraftsAhead | StatelessProposer)

    def proposed(self, scheduled: ScheduledWork, rejected: RejectedDrafts | None = None) -> DraftTokens | None:
        """The drafts of the sequences that may speculate: rank 0's, on every rank. None where no sequence may.

        They may lie on the device alone, unless other ranks or a grammar need them. For `rejected` see
        `DraftRequest`."""
        speculating = scheduled.speculating
        if not len(speculating):
            self.steps_without_drafts += 1
            return None
        self.steps_without_drafts = 0
        request = DraftRequest(
            scheduled.seq_indices[speculating], scheduled.speculates[speculating], self.sequences, rejected
        )
        if self.communicator.rank == 0 and self._drafter is not None:
            drafts = self._drafter.propose(request)
        else:
            drafts = DraftTokens.none(len(request.seq_indices))
        if self.communicator.world_size == 1:
            return drafts.on_host() if self.guided else drafts
        return DraftTokens.from_message(self.agreed(drafts.message(int(request.limits.max()))))

    def forward(self, ids: Tensor, meta: BatchMeta) -> tuple[Tensor | None, Tensor | None]:
        """(logits, the last hidden state of every row where the proposer wants it)."""
        wanted = self.drafting.features and self.steps_without_drafts <= FORGETS_AFTER
        features = self.decoder.empty_features(len(ids)) if wanted else None
        return self._forward(ids, meta, self._caches, features), features

    def verified(self, batch: Batch, ids: Tensor, rows: Tensor | None, drawn: Tensor) -> VerifiedDrafts | None:
        """Which of a step's drafts are accepted, on the device; see `verify_batch`. None where no sequence had any."""
        return verify_batch(self.decoder.ops, batch, ids, rows, drawn) if batch.drafted.any() else None

    def observe(
        self,
        batch: Batch,
        meta: BatchMeta,
        features: Tensor | None,
        last_rows: Int32s | Tensor,
        following: Callable[[], Tensor] | None = None,
    ) -> None:
        """Lets the proposer observe a step that is computed. `last_rows` [Q], `following`: see `ComputedStep`; None:
        the host knows the tokens."""
        if not self.observes or self.proposer is None:
            return
        if self.drafting.features and features is None:
            if not self._forgotten:
                self.proposer.clear()
            self._forgotten = True
            return
        self._forgotten = False
        rows = batch.rows
        self.proposer.observe(
            ComputedStep(
                seq_indices=rows.seq_indices,
                positions=rows.positions,
                kv_slots=rows.kv_slots,
                meta=meta,
                features=features,
                sampled_indices=batch.sampled_indices,
                last_rows=last_rows,
                following=following
                or (lambda: to_device(self.sequences.tokens[rows.seq_indices, rows.positions + 1], self.device)),
            )
        )

    def masked(self, batch: Batch) -> SamplingBatch | None:
        """How to draw, with what grammars allow. Best called while the device computes."""
        if batch.choices is None or not self.guided:
            return batch.choices
        drafts = self.sequences.drafts(batch.sampled_indices, int(batch.drafted.max(initial=0)))
        mask = self.guided.mask(batch.sampled_indices, batch.drafted, drafts)
        return batch.choices if mask is None else batch.choices.masked(mask)

    def agreed(self, numbers: Int32s) -> Int32s:
        """Rank 0's; the others' have the same shape. Waits for the device."""
        if self.communicator.world_size == 1:
            return numbers
        agreed: Int32s = self.communicator.broadcast(to_device(numbers, self.device)).cpu().numpy()
        return agreed


def split_logits(batch: Batch, logits: Tensor | None) -> SplitLogits:
    """What a step's logits are for."""
    if batch.merged is None or logits is None:
        return SplitLogits(logits, ScoredPromptRows())
    drawn, scored = (to_device(rows, logits.device) for rows in batch.merged[1:])
    return SplitLogits(logits.index_select(0, drawn), batch.prompts.scored(logits.index_select(0, scored)))
