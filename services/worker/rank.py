"""One rank of a model, and what it holds between steps. Knows what a plan changes, not how steps follow each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch import Batch, Shares
from services.worker.crossing import sent
from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.jump_ahead import MOST, ForcedTokens
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import KvShare
from services.worker.model.decoder import Decoder, ForwardPass, KvCaches
from services.worker.ops import BatchMeta
from services.worker.parallel import Communicator
from services.worker.pipeline import Pipeline, SingleStage
from services.worker.rows import Int32s
from services.worker.sampling.parameters import Choices
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.sequences import SequenceTable
from services.worker.shortfall import Shortfall
from services.worker.speculation.proposer import (
    NO_DRAFTING,
    Asked,
    Computed,
    Drafting,
    Drafts,
    DraftsAhead,
    FirstThatDrafts,
    Proposer,
    WithoutMemory,
)
from services.worker.speculation.trial import Trial, trial
from services.worker.staging import staging_for
from shared.messages.lifecycle import ModelCard
from shared.messages.worker import StepPlan

FORGETS_AFTER = 8
"""Steps without drafts after which whoever drafts is told nothing more of what the model computes: it costs a drafter
that does not pay nothing then, and when it is asked again it finds its way as well as it can."""


class Apart(NamedTuple):
    """A step's logits: the rows to draw from, and what the others say of prompts."""

    drawn: Tensor | None
    """None on ranks that have no logits."""
    scored: ScoredRows


class Rank:
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
        drafting: Drafting = NO_DRAFTING,
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
        self.grammars = grammars
        self.drafting = drafting
        self.staging = staging_for(device)
        self._caches: KvCaches = decoder.allocate_kv(num_blocks)
        self.kv: KvShare = decoder.share_kv(self._caches, digest)
        self._forward = self._eager_or(replaying)
        self.sequences = SequenceTable(
            max_sequences=max_num_seqs,
            max_model_len=card.max_model_len,
            num_blocks=num_blocks,
            vocab_size=card.vocab_size,
        )
        self._unasked = 0
        """Steps since drafts were asked for; the same on all ranks."""
        self._forgotten = False
        """Whether the proposer knows no sequence, as it was told of no step since."""
        self.guided = None if grammars is None else GuidedSequences(grammars, card.vocab_size)
        self.draft_by(proposer)

    @property
    def caches(self) -> KvCaches:
        """To be read and written by nobody but steps, copies, and who measures without sequences."""
        return self._caches

    @torch.inference_mode()
    def _eager_or(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None) -> ForwardPass:
        return self.decoder.forward if replaying is None else replaying(self.decoder.forward, self._caches)

    def draft_by(self, proposer: Proposer | None) -> None:
        """What grammars force is drafted before anything that is guessed."""
        self.proposer = self._drafter = proposer
        if self.guided is not None and self.pipeline.stages == 1:
            forced = ForcedTokens(self.guided)
            self._drafter = forced if proposer is None else FirstThatDrafts((forced, proposer))

    @property
    def tells(self) -> bool:
        """Whether whoever drafts is told what steps computed."""
        return self.draws and self.proposer is not None and not isinstance(self.proposer, WithoutMemory)

    @property
    def draws(self) -> bool:
        """Or is of a stage before the last, and told later what was drawn."""
        return self.pipeline.stage + 1 == self.pipeline.stages

    @property
    def max_jump_ahead(self) -> int:
        # Stages before the last have no matchers, and would have to be told the drafts before they were known.
        return MOST if self.pipeline.stages == 1 else 0

    def clear(self) -> None:
        """Forgets every sequence."""
        self.sequences.clear()
        if self.guided is not None:
            self.guided.clear()
        if self.proposer is not None:
            self.proposer.clear()

    def take_over(self, plan: StepPlan) -> list[int]:
        """The plan's sequences come and go: the slots of those that come. Raises BrokenPlan."""
        for sequence in plan.released:
            slot = self.sequences.release(sequence)
            if self.guided is not None:
                self.guided.release(slot)
        if self.proposer is not None:
            for transfer in plan.transfers:
                if transfer.kind == "load":
                    self.proposer.loaded(np.frombuffer(transfer.blocks, dtype="<u4").astype(np.int32))
        slots = []
        for new in plan.new:
            slots.append(slot := self.sequences.add(new))
            if self.proposer is not None:
                self.proposer.took(slot, new.computed, self.sequences)
            if self.guided is not None:
                self.guided.add(slot, new)
        return slots

    def drafts(self, shares: Shares) -> Drafts | None:
        """As `proposed`, on the host, which waits for them."""
        drafts = self.proposed(shares)
        return None if drafts is None else drafts.on_host()

    def goes_ahead(self, plan: StepPlan) -> bool:
        """Whether a step can be prepared before the host knows how many drafts of the one before stand. Whoever has a
        grammar, or drafts by looking at tokens, or must tell other ranks what is drafted, needs to know."""
        if self.communicator.world_size > 1 or self.guided or any(new.grammar is not None for new in plan.new):
            return False
        if any(work.speculate for work in plan.work):
            return isinstance(self.proposer, DraftsAhead)
        return self.proposer is None or isinstance(self.proposer, DraftsAhead | WithoutMemory)

    def proposed(self, shares: Shares, shortfall: Shortfall | None = None) -> Drafts | None:
        """What to try for the speculating shares: rank 0's drafts, on every rank. None where nobody may speculate.

        They may lie on the device alone, unless other ranks or somebody's grammar have to be told them. For `shortfall`
        see `Asked`."""
        speculating = shares.speculating
        if not len(speculating):
            self.nobody_drafts()
            return None
        self._unasked = 0
        asked = Asked(shares.slots[speculating], shares.speculates[speculating], self.sequences, shortfall)
        if self.communicator.rank == 0 and self._drafter is not None:
            drafts = self._drafter.propose(asked)
        else:
            drafts = Drafts.none(asked)
        if self.communicator.world_size == 1:
            return drafts.on_host() if self.guided else drafts
        return Drafts.told(self.agreed(drafts.message(int(asked.most.max()))))

    def nobody_drafts(self) -> None:
        """In a step. Whoever drafts is told less and less of such steps."""
        self._unasked += 1

    def forward(self, ids: Tensor, meta: BatchMeta) -> tuple[Tensor | None, Tensor | None]:
        """(logits, the last hidden state of every row where whoever drafts wants it)."""
        wanted = self.drafting.features and self._unasked <= FORGETS_AFTER
        features = self.decoder.empty_features(len(ids)) if wanted else None
        return self._forward(ids, meta, self._caches, features), features

    def tried(self, batch: Batch, ids: Tensor, rows: Tensor | None, drawn: Tensor) -> Trial | None:
        """What stands of a step's drafts, on the device; see `trial`. None where nobody had any."""
        return trial(self.decoder.ops, batch, ids, rows, drawn) if batch.drafted.any() else None

    def tell(
        self,
        batch: Batch,
        meta: BatchMeta,
        features: Tensor | None,
        last_rows: Int32s | Tensor,
        following: Callable[[], Tensor] | None = None,
    ) -> None:
        """Whoever drafts hears of a step that is computed. `last_rows` [Q], `following`: see `Computed`; None: the host
        knows the tokens."""
        if not self.tells or self.proposer is None:
            return
        if self.drafting.features and features is None:
            if not self._forgotten:
                self.proposer.clear()
            self._forgotten = True
            return
        self._forgotten = False
        rows = batch.rows
        self.proposer.observe(
            Computed(
                row_slots=rows.row_slots,
                positions=rows.positions,
                kv_slots=rows.kv_slots,
                meta=meta,
                features=features,
                sampled_slots=batch.sampled_slots,
                last_rows=last_rows,
                following=following
                or (lambda: sent(self.sequences.tokens[rows.row_slots, rows.positions + 1], self.device)),
            )
        )

    def masked(self, batch: Batch) -> Choices | None:
        """How to draw, with what grammars allow. Best called while the device computes."""
        if batch.choices is None or not self.guided:
            return batch.choices
        drafts = self.sequences.drafts(batch.sampled_slots, int(batch.drafted.max(initial=0)))
        mask = self.guided.mask(batch.sampled_slots, batch.drafted, drafts)
        return batch.choices if mask is None else batch.choices.masked(mask)

    def agreed(self, numbers: Int32s) -> Int32s:
        """Rank 0's; the others' have the same shape. Waits for the device."""
        if self.communicator.world_size == 1:
            return numbers
        agreed: Int32s = self.communicator.broadcast(sent(numbers, self.device)).cpu().numpy()
        return agreed


def apart(batch: Batch, logits: Tensor | None) -> Apart:
    """What a step's logits are for."""
    if batch.merged is None or logits is None:
        return Apart(logits, ScoredRows())
    drawn, scored = (sent(rows, logits.device) for rows in batch.merged[1:])
    return Apart(logits.index_select(0, drawn), batch.prompts.scored(logits.index_select(0, scored)))


class RankBackend:
    """What every backend of a rank is asked beside steps; see :class:`services.worker.backend.Backend`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @property
    def card(self) -> ModelCard:
        return self.rank.card

    @property
    def num_blocks(self) -> int:
        return self.rank.num_blocks

    @property
    def device(self) -> str:
        return str(self.rank.device)

    @property
    def kv(self) -> KvShare:
        return self.rank.kv

    @property
    def grammars(self) -> GrammarLibrary | None:
        return self.rank.grammars

    @property
    def max_speculate(self) -> int:
        return self.rank.drafting.most

    @property
    def max_jump_ahead(self) -> int:
        return self.rank.max_jump_ahead
