"""What drafts for a rank's sequences: when it is asked, and which steps it observes. Knows no method of drafting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.batch.batch import Batch, DraftTokens, ScheduledWork
from services.worker.batch.rows import Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.guided.guided_sequences import MAX_JUMP_FORWARD, GuidedSequences, JumpForwardProposer
from services.worker.ops.interface import BatchMeta
from services.worker.ops.transfer import to_device
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.proposer import (
    ComputedStep,
    DraftRequest,
    DraftsAhead,
    DraftSettings,
    Proposer,
    ProposerChain,
    StatelessProposer,
)
from shared.messages.worker import StepPlan

FORGETS_AFTER = 8
"""Steps without drafts after which the proposer observes no further step: a drafter that does not pay costs nothing
then. When it is asked again it starts from what it can read."""


class RankDrafting:
    """Owns a rank's proposer, and whether it is asked and observes. Used from the thread that prepares or computes."""

    def __init__(
        self,
        settings: DraftSettings,
        proposer: Proposer | None,
        sequences: SequenceTable,
        guided: GuidedSequences | None,
        communicator: Communicator,
        pipeline: Pipeline,
        device: torch.device,
        *,
        rolls_back: bool = True,
    ) -> None:
        """`proposer`: that of rank 0 of each stage drafts for the others, which need none. `rolls_back`: whether what
        was computed of drafts can be taken back; not where it went into states."""
        self.settings = settings
        self._sequences = sequences
        self._guided = guided
        self._communicator = communicator
        self._device = device
        self._forces = pipeline.stages == 1 and rolls_back
        self._draws = pipeline.stage + 1 == pipeline.stages
        self.max_jump_ahead = MAX_JUMP_FORWARD if self._forces else 0
        """Forced tokens that one step may yield for a sequence with a grammar. 0 where there are several stages: those
        before the last have no matchers, and would need the drafts before they are known; and where no drafts are
        computed at all."""
        self.steps_without_drafts = 0
        """Steps since drafts were asked for; the same on all ranks. Written by the runner, too."""
        self._forgotten = False
        """Whether the proposer knows no sequence, as it has observed no step since."""
        self.draft_by(proposer)

    def draft_by(self, proposer: Proposer | None) -> None:
        """Drafts by `proposer` from here on; tokens that a grammar forces are drafted before any guess."""
        self.proposer = self._drafter = proposer
        self.observes = self._draws and proposer is not None and not isinstance(proposer, StatelessProposer)
        """Whether the proposer observes what steps compute."""
        if self._guided is not None and self._forces:
            forced = JumpForwardProposer(self._guided)
            self._drafter = forced if proposer is None else ProposerChain((forced, proposer))

    def goes_ahead(self, plan: StepPlan) -> bool:
        """Whether a step can be prepared before the host knows how many drafts of the one before were accepted.

        Not where a sequence has a grammar, the proposer reads tokens, or other ranks have to be sent the drafts."""
        if self._communicator.world_size > 1 or self._guided or any(new.grammar is not None for new in plan.new):
            return False
        if any(work.speculate for work in plan.work):
            return isinstance(self.proposer, DraftsAhead)
        return self.proposer is None or isinstance(self.proposer, DraftsAhead | StatelessProposer)

    def propose(self, scheduled: ScheduledWork, rejected: RejectedDrafts | None = None) -> DraftTokens | None:
        """The drafts of the sequences that may speculate: rank 0's, on every rank. None where no sequence may. Those of
        a sequence with a grammar are no tree.

        They may lie on the device alone, unless other ranks or a grammar need them. For `rejected` see
        `DraftRequest`."""
        if not scheduled.speculates.any():
            self.steps_without_drafts += 1
            return None
        speculating, communicator = scheduled.speculating, self._communicator
        self.steps_without_drafts = 0
        limits = scheduled.speculates[speculating]
        request = DraftRequest(scheduled.seq_indices[speculating], limits, self._sequences, rejected)
        if communicator.rank == 0 and self._drafter is not None:
            drafts = self._drafter.propose(request)
        else:
            drafts = DraftTokens.none(len(speculating))
        if self._guided:  # a mask follows one path
            drafts = drafts.on_host().without_branches(self._guided.with_grammar(request.seq_indices))
        if communicator.world_size == 1:
            return drafts
        trees = self.settings.tree is not None
        message = to_device(drafts.message(self.settings.width(int(limits.max())), trees=trees), self._device)
        return DraftTokens.from_message(communicator.broadcast(message).cpu().numpy(), trees=trees)

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
        if self.settings.features and features is None:
            if not self._forgotten:
                self.proposer.clear()
            self._forgotten = True
            return
        self._forgotten = False
        rows, tokens = batch.rows, self._sequences.tokens
        self.proposer.observe(
            ComputedStep(
                seq_indices=rows.seq_indices,
                positions=rows.positions,
                kv_slots=rows.kv_slots,
                meta=meta,
                features=features,
                sampled_indices=batch.sampled_indices,
                last_rows=last_rows,
                following=following or (lambda: to_device(tokens[rows.seq_indices, rows.positions + 1], self._device)),
            )
        )
