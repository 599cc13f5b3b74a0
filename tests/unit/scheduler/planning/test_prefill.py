"""Prompts of which log-probabilities are wanted: computed whatever is cached, bounded a step, told before any token."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.scheduler.core.events import Output, SendTokens
from services.scheduler.core.limits import EngineLimits
from shared.ids import SequenceId
from shared.messages.detokenizer import PromptLogprobs
from shared.messages.generation import TokenLogprobs
from shared.messages.scheduler import GenerateRequest, SequencePromptLogprobs
from shared.messages.worker import MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN, MAX_PROMPT_LOGPROBS_PER_PLAN, StepPlan
from shared.packing import unpack
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.single_engine import PROMPT, Ring


def scoring(request: str, prompt: list[int], resume: tuple[int, ...] = (), **stopping: Any) -> GenerateRequest:
    asked = generate(request, prompt, resume=resume, ignore_eos=True, **stopping)
    generation = asked.generation
    return replace(asked, generation=replace(generation, sampling=replace(generation.sampling, prompt_logprobs=0)))


class ScoringRing(Ring):
    """Its worker scores what a real one would: the token behind each that it computes, while that is the prompt's."""

    def __init__(self, limits: EngineLimits | None = None, num_blocks: int = 32, max_model_len: int = 256) -> None:
        self.heard: list[tuple[str, int]] = []
        """Requests and positions, in the order in which the detokenizer hears of them."""
        self.first_tokens: dict[str, int] = {}
        """How many positions of each had been told when its first token came."""
        self._prompts: dict[SequenceId, tuple[list[int], int]] = {}
        super().__init__(limits, num_blocks, max_model_len)

    def step(self) -> list[Output]:
        plan = self.plans.pop(0)
        scored = tuple(self._scored(plan))
        return self.send(replace(self.worker.step(plan), scored=scored))

    def _scored(self, plan: StepPlan) -> list[SequencePromptLogprobs]:
        for new in plan.new:
            self._prompts.pop(new.sequence, None)
            if new.sampling.prompt_logprobs is not None:
                self._prompts[new.sequence] = (unpack(new.tokens)[: new.prompt_length], new.computed)
        parts = []
        for work in plan.work:
            if work.sequence in self._prompts:
                prompt, computed = self._prompts[work.sequence]
                tokens = prompt[computed + 1 : computed + work.count + 1]
                self._prompts[work.sequence] = (prompt, computed + work.count)
                entries = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
                parts += [SequencePromptLogprobs(work.sequence, computed + 1, entries)] if entries else []
        return parts

    def send(self, event: object) -> list[Output]:
        outputs = super().send(event)
        for output in outputs:
            if isinstance(output, SendTokens):
                for told in output.batch.scored:
                    self._hear(told)
                for entry in output.batch.entries:
                    positions = {position for request, position in self.heard if request == entry.request}
                    self.first_tokens.setdefault(entry.request, len(positions))
        return outputs

    def _hear(self, told: PromptLogprobs) -> None:
        self.heard += [(told.request, told.position + i) for i in range(len(told.logprobs))]


def test_every_token_but_the_first_is_told_before_the_first_of_the_output() -> None:
    ring = ScoringRing(EngineLimits(max_batch_tokens=7, max_running=4))
    ring.send(scoring("a", PROMPT, max_tokens=3))
    ring.finish()
    assert ring.heard == [("a", position) for position in range(1, len(PROMPT))]
    assert ring.first_tokens == {"a": len(PROMPT) - 1}
    assert ring.output_of("a") == right_output(scoring("a", PROMPT, max_tokens=3), 256)[0]


def test_a_prompt_is_computed_whole_though_it_is_cached_and_can_be_read_by_others() -> None:
    ring = ScoringRing()
    for request in ("a", "b"):
        ring.send(scoring(request, PROMPT * 2, max_tokens=1))
        (new,) = ring.plans[-1].new
        assert new.computed == 0
        ring.finish()
    ring.send(generate("c", PROMPT * 2, max_tokens=1))
    assert ring.plans[-1].new[0].computed == 32


def test_it_does_not_wait_for_another_that_computes_the_same() -> None:
    ring = ScoringRing(EngineLimits(max_batch_tokens=10, max_running=4, run_ahead=0))
    ring.send(generate("a", PROMPT * 2, max_tokens=1))
    ring.send(scoring("b", PROMPT * 2, max_tokens=1))
    ring.finish()
    assert {position for request, position in ring.heard if request == "b"} == set(range(1, 40))
    assert ring.engine.counters.prompts_shared == 0


def test_an_attempt_with_output_scores_nothing_and_reads_the_cache() -> None:
    ring = ScoringRing()
    ring.send(scoring("a", PROMPT, max_tokens=1))
    ring.finish()
    ring.send(scoring("b", PROMPT, resume=(5,), max_tokens=3))
    (new,) = (new for plan in ring.plans for new in plan.new)
    assert (new.sampling.prompt_logprobs, new.computed) == (None, 16)


def test_a_step_scores_no_more_than_a_device_has_room_for() -> None:
    ring = ScoringRing(EngineLimits(max_batch_tokens=4096, run_ahead=0), num_blocks=200, max_model_len=2048)
    long = [4 + i % 17 for i in range(700)]
    ring.send(scoring("a", long, max_tokens=1))
    ring.send(scoring("b", [*long, 4], max_tokens=1))
    ring.send(generate("c", [5, *long], max_tokens=1))
    counts = []
    while ring.plans:
        counts.append([work.count for work in ring.plans[0].work])
        ring.step()
    assert counts == [[MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN], [188, 324, 701], [377]]
    assert ring.first_tokens["b"] == 700


def test_what_was_preempted_is_scored_again_from_the_start() -> None:
    """Whoever stands last in line is preempted, here in the middle of its prompt."""
    ring = ScoringRing(EngineLimits(max_batch_tokens=4, max_running=4), num_blocks=9, max_model_len=144)
    for request in ("a", "bb", "ccc"):
        ring.send(generate(request, [4 + len(request)] * 3, max_tokens=40, ignore_eos=True))
    while len(ring.output_of("ccc")) < 2:
        ring.step()
    ring.send(scoring("c", PROMPT * 2, max_tokens=5))
    ring.finish()
    assert len(ring.heard) > len(set(ring.heard)), "nobody was preempted"
    assert ring.first_tokens["c"] == len(PROMPT * 2) - 1
    assert ring.output_of("c") == right_output(scoring("c", PROMPT * 2, max_tokens=5), 144)[0]


def test_many_log_probabilities_of_each_token_make_smaller_steps() -> None:
    ring = ScoringRing(EngineLimits(run_ahead=0))
    asked = scoring("a", PROMPT * 2, max_tokens=1)
    sampling = replace(asked.generation.sampling, prompt_logprobs=MAX_PROMPT_LOGPROBS_PER_PLAN // 16)
    ring.send(replace(asked, generation=replace(asked.generation, sampling=sampling)))
    counts = []
    while ring.plans:
        counts += [work.count for work in ring.plans[0].work]
        ring.step()
    assert counts == [15, 15, 10]
