"""Applies a step's results: corrects planned lengths, records and sends tokens, and ends sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.health.canary import CANARY_DETOKENIZER
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.planning.speculation import SpeculationBudget
from services.scheduler.core.planning.step_timing import ExpectedResult
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.results.outbox import EngineOutbox, token_entry
from services.scheduler.core.results.requests import EngineRequests
from services.scheduler.core.sequence import TokenState
from services.scheduler.core.transfer.prompt_keeper import PromptKeeper
from shared.messages.generation import FinishReason
from shared.messages.scheduler import SampledTokens, StepFinished


class WrongYield(ValueError):
    """A step yielded no token of a sequence, or more than were planned: the ranks have a bug."""


class StepResults:
    """Corrects what the planner assumed, reports to the speculation budget, and sends tokens. Owns nothing."""

    def __init__(
        self,
        memory: BlockAllocator,
        queues: SequenceQueues,
        requests: EngineRequests,
        speculation: SpeculationBudget,
        keeper: PromptKeeper,
        outbox: EngineOutbox,
        counters: EngineCounters,
    ) -> None:
        self._keeper = keeper
        self._memory = memory
        self._queues = queues
        self._requests = requests
        self._speculation = speculation
        self._outbox = outbox
        self._counters = counters

    def record(self, result: StepFinished, expected: ExpectedResult, now: float) -> None:
        """Applies a step's result; `expected`: what was planned. Raises WrongYield. Tokens of sequences that have ended
        meanwhile are dropped."""
        for failed in result.failed:
            self._requests.record_failed(failed)
        by_id = self._queues.by_id
        yielded = len(result.sampled)
        if expected.extras:  # before tokens are appended, so that `length` and `planned` are bounds again
            yielded = sum(
                self._correct(sampled, expected.extras.get(sampled.sequence, 0)) for sampled in result.sampled
            )
            self._counters.drafted += result.drafted
            accepted = zip_longest(self._counters.accepted, result.accepted, fillvalue=0)
            self._counters.accepted = tuple(a + b for a, b in accepted)
        if not expected.prefills:
            timing = result.timing
            # From the end of the step before to this one's: the time that messages of a step need counts as well.
            seconds = timing.wait + timing.prepare + timing.forward + timing.sample
            asked = sum(expected.extras.values())
            self._speculation.record_step(expected.samples, asked, result.drafted, seconds, yielded)
        for pooled in result.pooled:
            if (sequence := by_id.get(pooled.sequence)) is not None:
                self._outbox.streams.add_pooled(sequence, pooled)
        for scored in result.scored:
            if (sequence := by_id.get(scored.sequence)) is not None:
                self._outbox.streams.add_prompt_logprobs(sequence, scored)
        self._append_tokens(result, now, several=bool(expected.extras))

    def _correct(self, sampled: SampledTokens, extra: int) -> int:
        """Corrects one sequence's planned length by what was drawn. Returns how many tokens it got: 1 if it has ended
        meanwhile, whatever was drafted for it."""
        got, drafted = len(sampled.tokens), sampled.drafted
        sequence = self._queues.by_id.get(sampled.sequence)
        if sequence is not None and sequence.pooled:
            return 0
        if sequence is not None:
            if not 1 <= got <= 1 + extra:
                raise WrongYield(f"{got} tokens of {sampled.sequence}, not 1 to {1 + extra}")
            if got <= extra:
                # The blocks meant for the rest stay in its table, where the workers have them too, for its next steps.
                sequence.tokens.retract(1 + extra - got, planned=sequence.phase == "decoding")
            if drafted:
                self._speculation.record_drafts(sequence, drafted, got - 1)
        if drafted:
            self._counters.speculated += 1
            self._counters.speculated_tokens += got
        return got if sequence is not None else 1

    def _append_tokens(self, result: StepFinished, now: float, *, several: bool) -> None:
        """Adds each sequence's tokens to it and to its stream; tokens behind the one that ends it are dropped.
        `several`: a sequence may have more than one."""
        by_id, streams, counters = self._queues.by_id, self._outbox.streams, self._counters
        detokenizer, entries, counted = None, [], True
        streams.begin_step()
        same, since = 0, now  # number of sequences in a row whose previous token came at the same time, `since`
        for sampled in result.sampled:
            sequence = by_id.get(sampled.sequence)
            if sequence is None:
                continue
            if sequence.generation.pooling is not None:
                streams.pending[sequence.detokenizer].entries.append(token_entry(sequence, (), "length"))
                self._requests.end(sequence, tell_detokenizer=False)
                continue
            state, tokens, logprobs = sequence.tokens, sampled.tokens, sampled.logprobs
            if len(tokens) == 1:  # most steps of most engines: without a call
                finish = state.append(tokens[0])
            elif several:
                kept, finish = _append_until_finished(state, tokens)
                tokens, logprobs = tokens[:kept], logprobs and logprobs[:kept]
            else:
                raise WrongYield(f"step {result.step}: {len(tokens)} tokens of {sampled.sequence}, not 1")
            if sequence.detokenizer != detokenizer:
                detokenizer = sequence.detokenizer
                entries = streams.pending[detokenizer].entries
                counted = detokenizer != CANARY_DETOKENIZER
            entry = token_entry(sequence, tokens, finish, logprobs)
            sent = entry if sequence.stream.interval == 1 else streams.pace(sequence, entry, now)
            if sent is not None:
                entries.append(sent)
            if counted:
                if not entry.position:
                    counters.record_first_token(now - sequence.last_token_at)
                elif sequence.last_token_at == since:
                    same += 1
                else:
                    counters.record_later_tokens(same, now - since)
                    same, since = 1, sequence.last_token_at
                if len(tokens) > 1:  # the further tokens of the step came with the first
                    counters.record_later_tokens(len(tokens) - 1, 0.0)
                sequence.last_token_at = now
            if len(state.hashes) > sequence.blocks.indexed:
                self._memory.index_full_blocks(sequence)
            if finish is not None:
                if sequence.generation.keep:
                    self._keeper.start(sequence)
                self._requests.end(sequence, tell_detokenizer=False)
            elif sequence.phase == "returning" and not state.in_flight:  # all its tokens are known now
                self._queues.requeue(sequence)
        counters.record_later_tokens(same, now - since)
        streams.release(now)


def _append_until_finished(state: TokenState, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """How many of `tokens` the sequence takes, the last of which may end it, and why it ends."""
    for count, token in enumerate(tokens, 1):
        if (finish := state.append(token)) is not None:
            return count, finish
    return len(tokens), None
