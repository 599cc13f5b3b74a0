"""What all runners of a rank share: what it holds between steps, how it samples, and the messages about a step's
results. It knows what a plan changes, not how steps follow each other: that is what runners differ in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import ExecutionMode, Step, StepOutput
from services.worker.batch.batch import Batch, BrokenPlan, DecodeBatch
from services.worker.batch.draft_trees import BranchBlocks
from services.worker.batch.pooled_rows import NO_VECTORS, PooledHead, PooledVectors
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.batch.rows import Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.batch.staging import encoded_inputs, staging_for, state_rows
from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.distributed.lockstep import LockstepMember
from services.worker.executor.drafting import FORGETS_AFTER, RankDrafting
from services.worker.graphs.host_decodes import HostDecode
from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.expert_parallel.expert_load import ExpertLoad
from services.worker.models.loaded_model import CausalLm
from services.worker.models.lora.slots import LoraSlots
from services.worker.models.states.sequence_states import SequenceStates
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.drafts import SlotCopies
from services.worker.ops.interface import BatchMeta
from services.worker.ops.torch_ops import TorchOps
from services.worker.ops.transfer import to_device
from services.worker.platforms.interface import Platform
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.logprobs import FindLogprobs, find_logprobs_of
from services.worker.sampling.parameters import SamplingBatch
from services.worker.sampling.plugins.request_processors import RequestProcessors
from services.worker.sampling.races import draw_of
from services.worker.sampling.sampler import SamplerOutput, find_likeliest_of, sample, undefined_rows
from services.worker.speculation.drafted_states import DraftedStates
from services.worker.speculation.proposer import NO_DRAFTS, DraftSettings, Proposer
from services.worker.speculation.verification import AcceptedTokens, VerifiedDrafts, verify_batch
from shared.kv_groups import KvCacheGroup
from shared.messages.lifecycle import SLOWLY
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import SampledTokens, SequenceFailed, StepTiming
from shared.messages.worker import StepPlan

UNDEFINED = "the model computed NaN"


class RanksOutOfSync(Exception):
    """The ranks of an engine have not computed the same steps: what they would exchange from here on is of different
    ones, so they start anew. The text says how many steps each has computed at the least and at the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankComponents:
    """What a rank is made of, whatever memory it has."""

    card: ModelCard
    """With the longest sequences that are asked for; what fits may be shorter."""
    platform: Platform
    decoder: CausalLm
    digest: str
    """Tells this model's keys and values from those of any other."""
    max_num_seqs: int
    communicator: Communicator
    pipeline: Pipeline
    grammars: GrammarLibrary | None = None
    """Given to the rank that samples."""
    drafting: DraftSettings = NO_DRAFTS
    expert_load: ExpertLoad | None = None
    """Where steps count picks; see `Backend.expert_load`."""
    processors: RequestProcessors | None = None
    """What plug-ins change logits by; None on ranks that do not sample."""
    classifier: PooledHead | None = None
    """See `LoadedModel.classifier`."""
    loras: LoraSlots | None = None
    """The adapters that are served."""
    groups: tuple[KvCacheGroup, ...] = ()
    """Of layers, as the decoder uses them; empty: all layers have one block table."""


class RankMemory(NamedTuple):
    """What a rank has memory for."""

    num_blocks: int
    """KV blocks of sequences."""
    state_checkpoints: int = 0
    """Where the model has states."""


class RankState:
    """Owns a rank's share of the model, its KV memory, and its sequences with their grammars. Used from the compute
    thread."""

    def __init__(
        self,
        parts: RankComponents,
        memory: RankMemory,
        *,
        proposer: Proposer | None = None,
        replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None = None,
    ) -> None:
        """`proposer`: that of rank 0 of each stage drafts for the others, which need none. `replaying`: captures what
        can be replayed of the decoder's forward pass on these caches."""
        self.card = parts.card
        self.platform = parts.platform
        self.device = parts.platform.device
        self.decoder = parts.decoder
        self.num_blocks = memory.num_blocks
        self.max_num_seqs = parts.max_num_seqs
        self.communicator = parts.communicator
        self.pipeline = parts.pipeline
        self.draws = self.pipeline.stage + 1 == self.pipeline.stages
        """Or is of a stage before the last, which is sent later what was drawn."""
        self.grammars = parts.grammars
        self.staging = staging_for(self.device)
        tree = parts.drafting.tree
        branches = 0 if tree is None else tree.branch_blocks(self.max_num_seqs)
        self.caches: KvCaches = self.decoder.allocate_kv(self.num_blocks + branches, self.max_num_seqs)
        """Read and written by steps and copies only, and by measurements without sequences."""
        self.states = self._allocated_states(memory.state_checkpoints)
        """None where no layer has any."""
        self._drafted_states: DraftedStates | None = None
        """Of the step that was computed last, if it had drafts."""
        kept = None if self.states is None else RankCheckpoints(self.num_blocks, self.states.kept)
        self.kv: RankKvCache | None = self.decoder.share_kv(self.caches, parts.digest, kept)
        pages = self.decoder.checkpoint_pages
        self.state_records = None if pages is None or self.kv is None else pages.records
        self._dtype: torch.dtype = getattr(torch, self.card.dtype)
        self.steps = 0
        """Plans of this epoch that were prepared; runners count them."""
        self._forward = self._eager_or(replaying)
        self.sequences = _sequence_table(parts, BranchBlocks(self.num_blocks, branches), self.num_blocks)
        self.loras, self.groups = parts.loras, parts.groups
        self.expert_load, self.processors = parts.expert_load, parts.processors
        self.guided = None if self.grammars is None else GuidedSequences(self.grammars)
        self.drafting = RankDrafting(
            *(parts.drafting, proposer, self.sequences, self.guided, self.communicator, self.pipeline, self.device),
            rolls_back=self.states is None or self.device.type == "cpu",
        )

    def _allocated_states(self, checkpoints: int) -> SequenceStates | None:
        pages = self.decoder.checkpoint_pages
        return None if pages is None else SequenceStates(self.caches, checkpoints, pages.checkpoint_bytes)

    @torch.inference_mode()
    def _eager_or(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass] | None) -> ForwardPass:
        return self.decoder.fastest_pass if replaying is None else replaying(self.decoder.forward, self.caches)

    def begin_epoch(self) -> None:
        """Removes every sequence, once all ranks of the engine have said that they computed the same steps.

        A rank that missed the last plans of the epoch before, because its scheduler died, cannot know that. The other
        ranks then wait for it inside such a step, in other process groups than those of these collectives, and are
        found by their watchdogs; or they report how many steps there were. Raises RanksOutOfSync, and what a collective
        raises."""
        steps, self.steps = self.steps, 0
        least, most = self.communicator.minimum(steps), -self.communicator.minimum(-steps)
        if least != most:
            raise RanksOutOfSync(f"of the epoch before, {least} steps at the least and {most} at the most are computed")
        self.sequences.clear()
        if self.loras is not None:
            self.loras.forget_unserved()
        if self.guided is not None:
            self.guided.clear()
        if self.processors is not None:
            self.processors.clear()
        if self.drafting.proposer is not None:
            self.drafting.proposer.clear()

    def update_sequences(self, plan: StepPlan) -> list[int]:
        """Removes the sequences that `plan` releases, and adds its new ones. Returns the indices of the new ones.
        Raises BrokenPlan."""
        proposer = self.drafting.proposer
        for sequence in plan.released:
            seq_index = self.sequences.release(sequence)
            if proposer is not None:
                proposer.end_sequence(seq_index, self.sequences)
            if self.guided:
                self.guided.release(seq_index)
            if self.processors:
                self.processors.release(seq_index)
        if plan.forget_loras and self.loras is not None:
            self.loras.forget_unserved(plan.forget_loras)
        if proposer is not None:
            for transfer in plan.transfers:
                if transfer.kind == "load":
                    blocks = np.frombuffer(transfer.blocks, dtype="<u4").astype(np.int32)
                    proposer.forget_blocks(blocks[blocks < self.num_blocks])  # others are pages of checkpoints
            for load in () if plan.connector is None else plan.connector.loads:
                proposer.forget_blocks(np.frombuffer(load.run.blocks, dtype="<u4").astype(np.int32))
        seq_indices, restored = [], {each.sequence for each in plan.restored}
        for new in plan.new:
            if self.states is not None and new.computed and new.sequence not in restored:
                raise BrokenPlan(f"sequence {new.sequence}: it has no states behind {new.computed} computed tokens")
            seq_indices.append(seq_index := self.sequences.add(new))
            if proposer is not None:
                proposer.start_sequence(seq_index, new, self.sequences)
            if self.guided is not None and new.grammar is not None:
                self.guided.add(seq_index, new, new.grammar)
            if self.processors is not None and new.sampling.extra_args:
                self.processors.add(seq_index, new)
        return seq_indices

    def forward(self, ids: Tensor, meta: BatchMeta, batch: Batch | None = None) -> tuple[Tensor | None, Tensor | None]:
        """(logits, the last hidden state of every row where the proposer wants it, or some of `batch` are pooled).
        Without a `batch`, as measurements are, rows are of the base model and none is pooled.

        Rows with an adapter are not computed by what was captured."""
        if self.states is None or batch is None:
            return self._pass(ids, meta, batch)
        self.states.restore(batch.copies.restored)
        drafted = DraftedStates(self.decoder.ops.states, batch, meta) if batch.drafted.any() else None
        rows = state_rows(batch.rows, self.device)._replace(trial=drafted)
        computed = self._pass(ids, replace(meta, states=rows), batch)
        self.states.keep(batch.copies.checkpoints)
        self._drafted_states = drafted
        return computed

    def accept_states(self, counts: Int32s) -> None:
        """So many rows stand of each sequence that drew in the step that was computed last: their states go on."""
        if self._drafted_states is not None:
            self._drafted_states.accept(counts)
            self._drafted_states = None

    def _pass(self, ids: Tensor, meta: BatchMeta, batch: Batch | None) -> tuple[Tensor | None, Tensor | None]:
        pools = batch is not None and bool(batch.pooled.spans)
        drafts = self.drafting.settings.features and self.drafting.steps_without_drafts <= FORGETS_AFTER
        features = self.decoder.empty_features(len(ids)) if drafts or (pools and self.draws) else None
        if batch is not None and batch.inputs is not None:
            meta = replace(meta, inputs=batch.inputs.on(self.device, self._dtype))
        if batch is not None and batch.encoded is not None:
            encoded = encoded_inputs(batch.encoded, self.device, self._dtype, self.card.block_size)
            meta = replace(meta, encoded=encoded)
        if batch is not None and batch.shifts is not None:
            meta = self._rotated(meta, batch.shifts)
        if batch is not None and batch.lasts is not None:
            lasts = to_device(batch.lasts, self.device)
            meta = replace(meta, lasts=lasts, others=tuple(replace(each, lasts=lasts) for each in meta.others))
        if batch is not None and batch.trees is not None:
            copies = self._slot_copies(*batch.trees.copies)
            meta = replace(meta, copies=copies if len(copies.sources) else None)
        if self.loras is not None and batch is not None:
            of, read = self.sequences.loras, batch.encoded
            beside = None if read is None else of[read.owners]
            adapted = self.loras.batch(of[batch.rows.seq_indices], batch.logits_rows, beside)
            if adapted is not None:
                return self.loras.forward(adapted, ids, meta, self.caches, features), features
        return self._forward(ids, meta, self.caches, features), features

    def _rotated(self, meta: BatchMeta, shifts: Int32s) -> BatchMeta:
        """A step of rows whose positions have several axes: `meta` has the places, which may have been moved back. A
        stage in which no layer attends rotates nothing."""
        if (turn := self.decoder.rotations) is None:
            return meta
        turned = turn(meta.positions + to_device(shifts, self.device))
        return replace(meta, rotations=turned, others=tuple(replace(each, rotations=turned) for each in meta.others))

    def verified(self, batch: Batch, ids: Tensor, rows: Tensor | None, drawn: Tensor) -> VerifiedDrafts | None:
        """Which of a step's drafts are accepted, on the device; see `verify_batch`. None where no sequence had any."""
        return verify_batch(self.decoder.ops, batch, ids, rows, drawn) if batch.drafted.any() else None

    def accept_trees(self, batch: Batch, drawn: SamplerOutput) -> AcceptedTokens:
        """The tokens that a step with trees yields; keys and values of the drafts among them go to the blocks of their
        sequences."""
        assert batch.trees is not None, "the caller has looked"
        verdict = AcceptedTokens.of_trees(batch, drawn.tokens.cpu().numpy().astype(np.int32), drawn.logprobs)
        assert verdict.rows is not None, "they are of trees"
        rows = verdict.rows[np.arange(verdict.rows.shape[1]) < verdict.counts[:, None]]
        sources, targets = batch.rows.kv_slots[batch.drawn_rows[rows]], batch.trees.own_slots[rows]
        moved = sources != targets
        if moved.any():
            copies = self._slot_copies(sources[moved], targets[moved])
            for keys, values in self.caches:
                self.decoder.ops.copy_slots(keys, values, copies)
        return verdict

    def _slot_copies(self, sources: Int32s, targets: Int32s) -> SlotCopies:
        return SlotCopies(to_device(sources, self.device), to_device(targets, self.device))

    def take_failed(self) -> tuple[SequenceFailed, ...]:
        """The sequences that a grammar or a logits processor cannot continue, each once."""
        failed = self.guided.take_failed() if self.guided else ()
        return (*failed, *self.processors.take_failed()) if self.processors else failed

    def request_masks(self, guided: GuidedSequences, batch: Batch) -> None:
        """Has made what `masked` needs; `guided`: this rank's. Best called before the device computes."""
        if batch.choices is not None:
            drafts = self.sequences.drafts(batch.sampled_indices, int(batch.drafted.max(initial=0)))
            guided.request_masks(batch.sampled_indices, batch.drafted, drafts)


class StepRunner:
    """See :class:`services.worker.backend.Backend`: what all runners of a rank have in common."""

    mode: ExecutionMode

    def __init__(self, rank: RankState) -> None:
        self.rank = rank
        self.card = rank.card
        """The card of the model that is served."""
        self.num_blocks = rank.num_blocks
        self.kv_groups = rank.groups
        self.state_checkpoints = None if rank.states is None else rank.states.checkpoints
        self.state_records = rank.state_records
        self.device = _device_text(rank)
        self.device_name = rank.platform.device_name
        self.kv: RankKvCache | None = rank.kv
        self.grammars = rank.grammars
        self.adapters = rank.loras
        self.expert_load = rank.expert_load
        self.group = rank.decoder if isinstance(rank.decoder, LockstepMember) else None
        self.max_loras = 0 if rank.loras is None else rank.loras.max_loras
        self.max_speculate = rank.drafting.settings.max_tokens
        self.max_jump_ahead = rank.drafting.max_jump_ahead
        self.rows_per_draft = rank.drafting.settings.rows_per_draft
        self._draw = draw_of(rank.decoder.ops)
        self.find_logprobs = find_logprobs_of(rank.decoder.ops)
        self._find_likeliest = find_likeliest_of(rank.decoder.ops)

    def compute_context(self) -> AbstractContextManager[object]:
        """Runs without gradients."""
        return torch.inference_mode()

    def prepare(self, plan: StepPlan) -> Step:
        """See :meth:`services.worker.backend.Backend.prepare`."""
        raise NotImplementedError

    def sample(
        self, batch: Batch, logits: Tensor | None, choices: SamplingBatch | None, history: HistoryLookup
    ) -> SamplerOutput:
        """A token for each row of `batch` that is drawn from: the same on all ranks, of which one has the logits."""
        communicator = self.rank.communicator
        if choices is None or logits is None:
            drawn = SamplerOutput(torch.empty(len(batch.drawn_rows), dtype=torch.int64, device=self.rank.device))
        else:
            drawn = self.draw(logits, choices, history)
        if choices is None or communicator.world_size == 1:
            return drawn
        return replace(drawn, tokens=communicator.broadcast(drawn.tokens))

    def draw(self, logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> SamplerOutput:
        """A token for each row of `logits` [R, words], and which of them mean nothing."""
        drawn = sample(logits, choices, history, self._draw, self.find_logprobs, self._find_likeliest)
        if drawn.undefined is None:
            drawn = replace(drawn, undefined=undefined_rows(logits, drawn.tokens))
        return drawn


def masked(guided: GuidedSequences, choices: SamplingBatch | None) -> SamplingBatch | None:
    """`choices` with what grammars allow; behind `request_masks`. Best called while the device computes."""
    if choices is None or (mask := guided.masks()) is None:
        return choices
    return choices.masked(mask)


def _sequence_table(parts: RankComponents, branches: BranchBlocks, num_blocks: int) -> SequenceTable:
    card = parts.card
    table = SequenceTable(
        max_sequences=parts.max_num_seqs,
        max_model_len=card.max_model_len,
        num_blocks=num_blocks,
        vocab_size=card.vocab_size,
        block_size=card.block_size,
        classifier=parts.classifier,
        groups=parts.groups,
        branches=branches,
    )
    if parts.loras is not None:
        table.lora_numbers = parts.loras.numbers
    return table


class SplitLogits(NamedTuple):
    """A step's logits: the rows to draw from, and what the others say of prompts."""

    drawn: Tensor | None
    """None on ranks that have no logits."""
    scored: ScoredPromptRows


def split_logits(batch: Batch, logits: Tensor | None, find: FindLogprobs | None) -> SplitLogits:
    """What a step's logits are for. `find`: see `sampler.sample`."""
    if batch.merged is None or logits is None:
        return SplitLogits(logits, ScoredPromptRows())
    drawn, scored = (to_device(rows, logits.device) for rows in batch.merged[1:])
    return SplitLogits(logits.index_select(0, drawn), batch.prompts.scored(logits.index_select(0, scored), find))


def decode_output(
    plan: StepPlan, timing: StepTiming, decode: HostDecode, failed: tuple[SequenceFailed, ...] = ()
) -> StepOutput:
    """The messages of a computed step of decodes that the library alone has drawn, without drafts."""
    sequences, drawn, undefined = decode.take()
    sampled = tuple(SampledTokens(each, (token,)) for each, token in zip(sequences, drawn, strict=True))
    if len(sampled) != len(plan.work):
        sampled = _complete(plan, sampled)
    if True in undefined:
        nan = (each for each, meaningless in zip(sequences, undefined, strict=True) if meaningless)
        failed += tuple(SequenceFailed(each, UNDEFINED, "nan") for each in nan)
    return StepOutput(sampled, timing, failed=failed)


def undefined_sequences(batch: Batch | DecodeBatch, undefined: Tensor | None) -> tuple[SequenceFailed, ...]:
    """The sequences of `batch` that drew from NaN; `undefined`: see `SamplerOutput`."""
    if undefined is None or not (rows := np.flatnonzero(undefined.cpu().numpy())).size:
        return ()
    owners = np.repeat(np.arange(len(batch.sampled)), batch.drafted + 1)
    return tuple(SequenceFailed(batch.sampled[owner], UNDEFINED, "nan") for owner in np.unique(owners[rows]))


def step_output(
    plan: StepPlan,
    timing: StepTiming,
    batch: Batch | DecodeBatch | None,
    verdict: AcceptedTokens | None,
    scored: ScoredPromptRows,
    failed: tuple[SequenceFailed, ...] = (),
    vectors: PooledVectors = NO_VECTORS,
) -> StepOutput:
    """The messages about a step's results. `batch` None: there was nothing to compute. `verdict` None: on ranks that do
    not sample. `vectors`: on the host."""
    if batch is None:
        return StepOutput(_complete(plan, ()), timing)
    drafted, prompts = int(batch.levels.sum()), scored.messages() if scored.parts else ()
    if verdict is None:
        return StepOutput((), timing, drafted, (), prompts, failed)
    pooled, undefined = vectors.messages()
    failed += tuple(SequenceFailed(sequence, UNDEFINED, "nan") for sequence in undefined)
    accepted = verdict.by_position(batch) if drafted else ()
    sampled = verdict.sampled(batch)
    if len(sampled) != sum(work.sample for work in plan.work):
        sampled = _complete(plan, sampled)
    return StepOutput(sampled, timing, drafted, accepted, prompts, failed, pooled)


def _complete(plan: StepPlan, sampled: tuple[SampledTokens, ...]) -> tuple[SampledTokens, ...]:
    """An entry for each work that wanted one: those whose context was full drew nothing."""
    by_sequence = {one.sequence: one for one in sampled}
    return tuple(
        by_sequence.get(work.sequence) or SampledTokens(work.sequence, ()) for work in plan.work if work.sample
    )


def _device_text(rank: RankState) -> str:
    """The platform as the log has it, with the reason if it computes many times slower than it could."""
    ops = rank.decoder.ops
    why = ops.stands_in_because if isinstance(ops, TorchOps) else ""
    return f"{rank.platform} {SLOWLY}: {why}" if why else str(rank.platform)
