"""The runner of ranks whose drawn tokens are in main memory before the next step goes on with them.

A rank on a processor that computes alone has its next step prepared by a second thread, while the tokens are being
drawn that it goes on with: it needs their number, and reads them when it is launched. Where it needs more than that,
preparing waits until all steps before it are computed:

- whoever drafts, and a grammar that forces tokens, reads what sequences hold: such a step is prepared when it is
  launched; and how many drafts are accepted decides how long sequences are behind it;
- a sequence that leaves gives its row up only when nobody draws for it any more, and so does an adapter its slot.

Ranks that compute together, those of a data-parallel group too, and the stages of a pipeline go step by step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from services.worker.backend import StepOutput
from services.worker.batch.batch import NO_COPIES, Batch, DecodeBatch
from services.worker.batch.decode_reuse import DecodeReuse
from services.worker.batch.draft_trees import AcceptedPaths, accepted_rows
from services.worker.batch.pooled_rows import NO_VECTORS
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.batch.rows import Int32s
from services.worker.batch.staging import rows_in_place
from services.worker.distributed.lockstep import LatestStep
from services.worker.executor.pending import ExpectedSteps
from services.worker.executor.runner import (
    RankState,
    StepRunner,
    decode_output,
    masked,
    split_logits,
    step_output,
    undefined_sequences,
)
from services.worker.graphs.decode_draws import RowSubset
from services.worker.graphs.host_decodes import HostDecode, HostDecodes
from services.worker.ops.interface import BatchMeta
from services.worker.sampling.logprobs import RowLogprobs
from services.worker.sampling.masks import TokenMask
from services.worker.sampling.sampler import SamplerOutput
from services.worker.speculation.verification import NO_TOKENS, AcceptedTokens, by_sequence, sampled_rows
from shared.messages.scheduler import SequenceFailed, StepTiming
from shared.messages.worker import StepPlan


class _Inputs(NamedTuple):
    """The inputs with which a step is launched."""

    batch: Batch
    ids: Tensor
    meta: BatchMeta
    places: Int32s | None
    """[Q] the position of each token that is drawn; None where only what is accepted of the drafts says that, or where
    another stage draws."""


class HostRunner(StepRunner):
    """See the module, and :class:`services.worker.backend.Backend`."""

    def __init__(self, rank: RankState) -> None:
        super().__init__(rank)
        self._on_cpu = rank.platform.in_main_memory
        alone = rank.pipeline.stages == 1 and rank.communicator.world_size == 1 and self.group is None
        self.mode = "prepared" if self._on_cpu and alone else "sequential"
        self._expected = ExpectedSteps(rank.pipeline, rank.sequences)
        self._reuse = DecodeReuse(rank.sequences)
        self._decodes: HostDecodes | None = None
        """None where steps of decodes are more than one call of the library."""
        if self.mode == "prepared":
            of_rank = (rank.caches, rank.sequences, rank.max_num_seqs, rank.loras)
            self._decodes = HostDecodes.of(rank.decoder, *of_rank)
        self._latest: HostStep | None = None
        """The step that was prepared last; None: nothing is under way."""

    def reset(self) -> None:
        """Forgets every sequence, once all steps are computed."""
        self.wait()
        self._expected.receive_all()
        self._forget()
        self.rank.begin_epoch()

    # ---- on the thread that prepares

    def prepare(self, plan: StepPlan) -> HostStep:
        """Waits for the steps before it where it needs to know more than how many tokens they draw. Raises what
        computing them raised."""
        self.rank.steps += 1
        if any(work.speculate for work in plan.work):
            self._latest = HostStep(self, plan)
            return self._latest
        latest = self._latest
        leaves = plan.released or plan.forget_loras
        if latest is not None and not latest.computed and (leaves or not latest.lengths_known):
            self.wait()
        self._latest = HostStep(self, plan, self._inputs(plan), prepared=True)
        return self._latest

    def wait(self) -> None:
        """Waits until every prepared step is computed. Raises what computing them raised."""
        if self._latest is not None:
            self._latest.wait()
            self._latest = None

    def _inputs(self, plan: StepPlan) -> _Inputs | HostDecode | None:
        """None where there is nothing to compute."""
        rank, sequences = self.rank, self.rank.sequences
        changed = plan.released or plan.new or plan.transfers or plan.forget_loras
        if changed or plan.connector is not None:
            rank.update_sequences(plan)
        if not rank.draws:
            for sequence in plan.released:
                self._expected.release(sequence)
            self._expected.receive_for(plan.work)
        whole = plan.released or plan.new or plan.checkpoints
        if not whole and self._decodes is not None and (decode := self._decodes.next(plan.work)) is not None:
            rank.drafting.steps_without_drafts += 1
            return decode
        made: Batch | HostDecode | None = None if whole else self._reuse.next(plan.work)
        if made is not None:
            rank.drafting.steps_without_drafts += 1
        else:
            made = self._made(plan)
        if made is None or isinstance(made, HostDecode):
            return made
        if self._on_cpu:  # token ids are read when it is launched
            ids, meta = rows_in_place(made.rows, made.logits_rows)
        else:
            np.copyto(made.rows.ids, sequences.tokens[made.rows.seq_indices, made.rows.positions])
            ids, meta = rank.staging.place(made.rows, made.logits_rows)
        placed = rank.draws and not made.drafted.any()
        return _Inputs(made, ids, meta, sequences.advance(made.sampled_indices) if placed else None)

    def _made(self, plan: StepPlan) -> Batch | HostDecode | None:
        """Builds the step of a plan from scratch; None if there is nothing to compute."""
        self._forget()
        rank, sequences = self.rank, self.rank.sequences
        scheduled = sequences.scheduled(plan.work) if plan.work else None
        if scheduled is None or not scheduled.work:
            return None
        proposed = rank.drafting.propose(scheduled)
        drafts = None if proposed is None else proposed.on_host()
        decodes = None if rank.drafting.observes else self._decodes
        if decodes is not None and not (plan.restored or plan.checkpoints):
            guided = rank.guided.with_grammar(scheduled.seq_indices) if rank.guided else None
            processed = rank.processors.asked_by(scheduled.seq_indices) if rank.processors else None
            if (decode := decodes.first(scheduled, drafts, guided, processed)) is not None:
                return decode
        batch = sequences.batch(scheduled, drafts)
        if decodes is None or not decodes.knows(scheduled.seq_indices):
            self._reuse.remember(plan.work, batch)
        copies = sequences.state_copies(plan)
        return batch if copies is NO_COPIES else replace(batch, copies=copies)

    def _forget(self) -> None:
        """Forgets the last batch, so that the next one is built from scratch."""
        self._reuse.forget()
        if self._decodes is not None:
            self._decodes.forget()

    # ---- on the thread that computes

    def compute(self, step: HostStep) -> None:
        """Computes what was prepared, or prepares it first, and leaves the outcome in `step`."""
        begun, rank, prepare = time.perf_counter(), self.rank, 0.0
        if not step.prepared:
            step.inputs = self._inputs(step.plan)
            prepare = time.perf_counter() - begun
            begun += prepare
        if step.inputs is None:
            step.timing = StepTiming(wait=0.0, prepare=prepare, forward=0.0, sample=0.0)
            return
        if isinstance(step.inputs, HostDecode):
            forward = self._decode(step, step.inputs)
            sample = time.perf_counter() - begun - forward
            step.timing = StepTiming(wait=0.0, prepare=prepare, forward=forward, sample=sample)
            return
        batch, ids, meta, _ = step.inputs
        if self._on_cpu and step.prepared:
            np.copyto(batch.rows.ids, rank.sequences.tokens[batch.rows.seq_indices, batch.rows.positions])
        guided, choices = rank.guided or None, batch.choices  # None, too, where no sequence has a grammar
        if guided is not None:
            rank.request_masks(guided, batch)  # made on another core meanwhile
        logits, features = rank.forward(ids, meta, batch)
        if guided is not None:
            choices, step.failed = masked(guided, choices), guided.take_failed()
        rank.platform.synchronize()
        forwarded = time.perf_counter()
        if batch.merged is not None:
            logits, step.scored = split_logits(batch, logits, self.find_logprobs)
        if batch.pooled.spans and features is not None:
            step.vectors = batch.pooled.vectors(features).on_host()
        if not rank.draws:
            self._expected.expect(batch)
        elif choices is None:
            step.verdict = NO_TOKENS
        else:
            if (processors := rank.processors or None) is not None:
                if logits is not None:
                    choices = processors.process(logits, choices, rank.sequences.history, rank.sequences.generations)
                step.failed += processors.take_failed()
            drawn = self.sample(batch, logits, choices, rank.sequences.history)
            step.verdict = self._accept(step.inputs, drawn)
            step.failed += undefined_sequences(batch, drawn.undefined)
            if guided is not None:
                guided.accept(batch.sampled_indices, step.verdict.counts, step.verdict.tokens)
        if rank.drafting.observes:
            self._observe(step.inputs, features, step.verdict or NO_TOKENS)
        if self.group is not None:
            step.shared = self.group.latest
        over, waited = time.perf_counter(), rank.pipeline.take_waited() if rank.pipeline.stages > 1 else 0.0
        forward = forwarded - begun - waited
        step.timing = StepTiming(wait=waited, prepare=prepare, forward=forward, sample=over - forwarded)

    def _decode(self, step: HostStep, decode: HostDecode) -> float:
        """One call of the library, in two where masks come between; how many seconds the forward pass took. What that
        left is drawn, and what became of drafts is read."""
        rank, rows, draws = self.rank, decode.run.rows, decode.run.draws
        guided, masked, mask = rank.guided or None, draws.masked, None
        if guided is not None and masked is not None:
            drafts = rank.sequences.drafts(masked.seq_indices, int(masked.drafted.max(initial=0)))
            guided.request_masks(masked.seq_indices, masked.drafted, drafts)
        forward = decode.compute()
        if guided is not None:
            if masked is not None and (found := guided.masks()) is not None:
                mask = masked.of_step(found)
            step.failed = guided.take_failed()
        if masked is not None:
            decode.finish(mask)
        logprobs = decode.logprobs
        if draws.left is not None:
            logprobs += self._draw_left(decode, draws.left, mask)
        if processors := rank.processors or None:  # of those, too, that have failed before they were applied
            step.failed += processors.take_failed()
        drafted = bool(rows.drafted.any())
        if not (logprobs or drafted or masked is not None or draws.left is not None):
            return forward
        step.verdict = verdict = AcceptedTokens(by_sequence(decode.drawn, rows.drafted), decode.gained, logprobs)
        step.decoded = rows
        step.failed += undefined_sequences(rows, torch.from_numpy(decode.undefined))
        decode.release()
        if drafted:
            rank.sequences.assume(rows.sampled_indices, verdict.counts - 1)
        if guided is not None and masked is not None:
            guided.accept(masked.seq_indices, verdict.counts[masked.places], verdict.tokens[masked.places])
        return forward

    def _draw_left(self, decode: HostDecode, left: RowSubset, mask: TokenMask | None) -> tuple[RowLogprobs, ...]:
        """Has the sampler draw the rows that the library left; their log-probabilities, of the step's rows."""
        rank, (logits, choices) = self.rank, decode.left_logits(left)
        if mask is not None:
            choices = choices.masked(left.own(mask))
        if processors := rank.processors or None:
            choices = processors.process(logits, choices, rank.sequences.history, rank.sequences.generations)
        drawn = self.draw(logits, choices, rank.sequences.history)
        assert drawn.undefined is not None, "it was looked for"
        decode.accept(left, drawn.tokens, drawn.undefined)
        return tuple(each._replace(rows=left.rows[each.rows]) for each in drawn.logprobs)

    def _observe(self, inputs: _Inputs, features: Tensor | None, verdict: AcceptedTokens) -> None:
        batch, _, meta, _ = inputs
        if batch.trees is None or verdict.rows is None:
            self.rank.drafting.observe(batch, meta, features, batch.last_rows(verdict.counts))
            return
        accepted = AcceptedPaths(verdict.rows, verdict.counts)
        rows, kept, last_rows = accepted_rows(batch.rows, batch.drawn_rows, batch.trees, accepted)
        _, meta = rows_in_place(rows, batch.logits_rows[:0])
        if features is not None:
            features = features.index_select(0, torch.from_numpy(kept))
        self.rank.drafting.observe(replace(batch, rows=rows), meta, features, last_rows)

    def _accept(self, inputs: _Inputs, drawn: SamplerOutput) -> AcceptedTokens:
        """The next tokens of each sequence that asked for some, which holds them from here on."""
        rank, (batch, ids, meta, places) = self.rank, inputs
        if batch.trees is not None:
            verdict = rank.accept_trees(batch, drawn)
        else:
            trial = None if places is not None else rank.verified(batch, ids, sampled_rows(batch, meta), drawn.tokens)
            outcome = drawn.tokens if trial is None else trial.outcome
            verdict = AcceptedTokens.of(outcome.cpu().numpy().astype(np.int32), batch.drafted, drawn.logprobs)
        if rank.pipeline.stages > 1:
            rank.pipeline.send_tokens(verdict.tokens.ravel().tolist())
        rank.accept_states(verdict.counts)
        if places is None:
            rank.sequences.append(batch.sampled_indices, verdict.counts, verdict.tokens)
        else:
            rank.sequences.fill(batch.sampled_indices, places, verdict.tokens[:, 0])
        return verdict


class HostStep:
    """See :class:`services.worker.backend.Step`. Nothing that it holds is written to once it is computed."""

    def __init__(
        self,
        runner: HostRunner,
        plan: StepPlan,
        inputs: _Inputs | HostDecode | None = None,
        *,
        prepared: bool = False,
    ) -> None:
        """`prepared`: what it is launched with is known; None of it where there is nothing to compute."""
        self.plan = plan
        self.inputs = inputs
        self.prepared = self.lengths_known = prepared
        """How long sequences are behind a step that may have drafts depends on what it draws."""
        self.verdict: AcceptedTokens | None = None
        """None on ranks that draw nothing, and where the library alone has drawn, without drafts."""
        self.decoded: DecodeBatch | None = None
        """What `verdict` is of, where the pass was one call of the library."""
        self.scored = ScoredPromptRows()
        self.vectors = NO_VECTORS
        self.failed: tuple[SequenceFailed, ...] = ()
        self.timing = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)
        self.shared: LatestStep | None = None
        """Which step of its data-parallel group it was, if it was one."""
        self.computed = False
        self._runner = runner
        self._error: BaseException | None = None
        self._under_way = threading.Lock()
        """Held until it is computed."""
        self._under_way.acquire()

    def launch(self) -> None:
        """Computes it. Raises what computing raised."""
        try:
            self._runner.compute(self)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.computed = True
            self._under_way.release()

    def wait(self) -> None:
        """Returns when it is computed. Raises what computing raised."""
        with self._under_way:
            if self._error is not None:
                raise self._error

    def result(self) -> StepOutput:
        """The step's output. Raises what computing it raised."""
        with self._under_way:
            if self._error is not None:
                raise self._error
        if isinstance(self.inputs, HostDecode):
            if self.verdict is None:
                return decode_output(self.plan, self.timing, self.inputs, self.failed)
            return step_output(self.plan, self.timing, self.decoded, self.verdict, self.scored, self.failed)
        batch = None if self.inputs is None else self.inputs.batch
        output = step_output(self.plan, self.timing, batch, self.verdict, self.scored, self.failed, self.vectors)
        return output if self.shared is None else msgspec.structs.replace(output, shared=self.shared)
