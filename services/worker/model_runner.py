"""The backend that computes: a decoder on CPU or CUDA, its KV memory, its sequences and its sampler."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import StepOutput
from services.worker.batch import Batch, Shares
from services.worker.crossing import sent
from services.worker.drawn_step import DrawnBatch, DrawnStep
from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.jump_ahead import MOST, ForcedTokens
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import KvShare
from services.worker.model.decoder import Decoder, ForwardPass, KvCaches
from services.worker.ops import BatchMeta
from services.worker.outstanding import OutstandingTokens
from services.worker.parallel import Communicator
from services.worker.pipeline import Pipeline, SingleStage
from services.worker.rows import Int32s
from services.worker.sampling.parameters import Choices
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.sampling.sampler import Drawn, sample
from services.worker.sequences import SequenceTable
from services.worker.speculation.proposer import (
    NO_DRAFTING,
    Asked,
    Computed,
    Drafting,
    Drafts,
    FirstThatDrafts,
    Proposer,
)
from services.worker.speculation.verdict import NOTHING_DRAWN, Verdict, by_sequence
from services.worker.staging import staging_for
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan


class ModelRunner:
    """One rank; see :class:`services.worker.backend.Backend`. `torch_backend.create_backend` makes it."""

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
        samples. `proposer`: that of rank 0 of each stage drafts for the others, which need none. `replaying`: captures what can be
        replayed of the decoder's forward pass on these caches."""
        self._card = card
        self._device = device
        self._staging = staging_for(device)
        self._decoder = decoder
        self._num_blocks = num_blocks
        self._communicator = communicator
        self._pipeline = pipeline or SingleStage()
        self._proposer = proposer
        self._drafting = drafting
        self._draws = self._pipeline.stage + 1 == self._pipeline.stages
        """Or is of a stage before the last, and told later what was drawn."""
        self._caches: KvCaches = decoder.allocate_kv(num_blocks)
        self._kv = decoder.share_kv(self._caches, digest)
        self._forward = self._eager_or(replaying)
        self._sequences = SequenceTable(
            max_sequences=max_num_seqs,
            max_model_len=card.max_model_len,
            num_blocks=num_blocks,
            vocab_size=card.vocab_size,
        )
        self._outstanding = OutstandingTokens(self._pipeline, self._sequences)
        self._grammars = grammars
        self._guided = None if grammars is None else GuidedSequences(grammars, card.vocab_size)
        self._drafter = self._with_forced(proposer)

    @torch.inference_mode()
    def _eager_or(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None) -> ForwardPass:
        return self._decoder.forward if replaying is None else replaying(self._decoder.forward, self._caches)

    def _with_forced(self, proposer: Proposer | None) -> Proposer | None:
        """What grammars force is drafted before anything that is guessed."""
        if self._guided is None or self._pipeline.stages > 1:
            return proposer
        forced = ForcedTokens(self._guided)
        return forced if proposer is None else FirstThatDrafts((forced, proposer))

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def kv(self) -> KvShare:
        return self._kv

    @property
    def grammars(self) -> GrammarLibrary | None:
        return self._grammars

    @property
    def max_speculate(self) -> int:
        return self._drafting.most

    @property
    def max_jump_ahead(self) -> int:
        # Stages before the last have no matchers, and would have to be told the drafts before they were known.
        return MOST if self._pipeline.stages == 1 else 0

    def reset(self) -> None:
        self._outstanding.settle_all()
        self._sequences.clear()
        if self._guided is not None:
            self._guided.clear()
        if self._proposer is not None:
            self._proposer.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        return self.compute(plan).output()

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> DrawnStep:
        begun = time.perf_counter()
        for sequence in plan.released:
            slot = self._sequences.release(sequence)
            self._outstanding.release(sequence)
            if self._guided is not None:
                self._guided.release(slot)
        if self._proposer is not None:
            for transfer in plan.transfers:
                if transfer.kind == "load":
                    self._proposer.loaded(np.frombuffer(transfer.blocks, dtype="<u4").astype(np.int32))
        for new in plan.new:
            slot = self._sequences.add(new)
            if self._proposer is not None:
                self._proposer.took(slot, new.computed, self._sequences)
            if self._guided is not None:
                self._guided.add(slot, new)
        if not plan.work:
            return DrawnStep(plan, _timing(begun, *[time.perf_counter()] * 3))
        self._outstanding.settle(plan.work)
        shares = self._sequences.shares(plan.work)
        if not shares.work:
            return DrawnStep(plan, _timing(begun, *[time.perf_counter()] * 3))
        batch = self._sequences.batch(shares, self._drafts(shares))
        ids, meta = self._staging.place(batch.rows, batch.logits_rows)
        prepared = time.perf_counter()
        features = self._decoder.empty_features(len(ids)) if self._drafting.features else None
        logits = self._forward(ids, meta, self._caches, features)
        choices = self._masked(batch)
        self._wait_for_device()
        forwarded = time.perf_counter()
        logits, scored = self._scored(batch, logits)
        verdict = self._drawn(batch, logits, choices)
        if self._proposer is not None and self._draws:
            self._proposer.observe(self._computed(batch, meta, features, verdict))
        timing = _timing(begun, prepared, forwarded, time.perf_counter(), self._pipeline.take_waited())
        return DrawnStep(plan, timing, DrawnBatch(batch, verdict if self._draws else None, scored))

    def _scored(self, batch: Batch, logits: Tensor | None) -> tuple[Tensor | None, ScoredRows]:
        """The logits to draw from, and what the others say of prompts."""
        if batch.merged is None or logits is None:
            return logits, ScoredRows()
        drawn, scored = (sent(rows, logits.device) for rows in batch.merged[1:])
        told = batch.prompts.scored(logits.index_select(0, scored))
        return logits.index_select(0, drawn), told

    def _masked(self, batch: Batch) -> Choices | None:
        """How to draw, with what grammars allow; found out while the device computes."""
        if batch.choices is None or not self._guided:
            return batch.choices
        drafts = self._sequences.drafts(batch.sampled_slots, int(batch.drafted.max(initial=0)))
        mask = self._guided.mask(batch.sampled_slots, batch.drafted, drafts)
        return batch.choices if mask is None else batch.choices.masked(mask)

    def _drafts(self, shares: Shares) -> Drafts | None:
        """What to try for the speculating shares: rank 0's drafts, on every rank. None where nobody may speculate."""
        speculating = shares.speculating
        if not len(speculating):
            return None
        asked = Asked(shares.slots[speculating], shares.speculates[speculating], self._sequences)
        if self._communicator.rank == 0 and self._drafter is not None:
            drafts = self._drafter.propose(asked)
        else:
            drafts = Drafts.none(asked)
        if self._communicator.world_size == 1:
            return drafts
        return Drafts.told(self._agreed(drafts.message(int(asked.most.max()))))

    def _drawn(self, batch: Batch, logits: Tensor | None, choices: Choices | None) -> Verdict:
        """The next tokens of each sequence that asked for some; they are appended to the sequences."""
        if choices is None:
            return NOTHING_DRAWN
        if not self._draws:
            self._outstanding.expect(batch)
            return NOTHING_DRAWN
        if logits is not None:
            drawn = sample(logits, choices, self._sequences.history)
        else:
            drawn = Drawn(torch.zeros(len(batch.drawn_rows), dtype=torch.int32))
        own: Int32s = drawn.tokens.cpu().numpy().astype(np.int32)
        tokens = self._agreed(by_sequence(own, batch.drafted))
        self._pipeline.tell(tokens.ravel().tolist())
        counts = self._sequences.append(batch.sampled_slots, batch.drafted, tokens)
        if self._guided is not None:
            self._guided.take(batch.sampled_slots, counts, tokens)
        return Verdict(tokens, counts, drawn.told)

    def _computed(self, batch: Batch, meta: BatchMeta, features: Tensor | None, verdict: Verdict) -> Computed:
        last = batch.drawn_rows[batch.first_drawn + verdict.counts - 1] if len(batch.sampled) else batch.drawn_rows
        return Computed(
            row_slots=batch.rows.row_slots,
            positions=batch.rows.positions,
            kv_slots=batch.rows.kv_slots,
            meta=meta,
            features=features,
            sampled_slots=batch.sampled_slots,
            last_rows=last,
            histories=self._sequences,
        )

    def _agreed(self, numbers: Int32s) -> Int32s:
        """Rank 0's; the others' have the same shape."""
        if self._communicator.world_size == 1:
            return numbers
        told = torch.from_numpy(numbers).to(self._device)
        agreed: Int32s = self._communicator.broadcast(told).cpu().numpy()
        return agreed

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _timing(begun: float, prepared: float, forwarded: float, sampled: float, waited: float = 0.0) -> StepTiming:
    """`waited`: of the forward pass, for the stage before."""
    forward = forwarded - prepared - waited
    return StepTiming(wait=waited, prepare=prepared - begun, forward=forward, sample=sampled - forwarded)
