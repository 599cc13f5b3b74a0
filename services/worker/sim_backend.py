"""The simulated backend: takes the time that an accelerator would take, and says tokens that only look like text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from services.worker.backend import BackendError, StepOutput
from services.worker.sim.accelerator import MEMORY_SHARE, Accelerator
from services.worker.sim.shape import ModelShape, read_shape
from services.worker.sim.speculation import SimSpeculation
from services.worker.sim.vocabulary import drawn, printable_tokens
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.ids import ModelName, SequenceId
from shared.messages.generation import TokenLogprobs
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import PromptScored, Sampled, StepTiming
from shared.messages.worker import NewSequence, StepPlan, Work
from shared.tokens import count, unpack


class _Held:
    """One sequence: how many tokens it has, how many are computed, how many blocks."""

    __slots__ = ("blocks", "computed", "length", "new")

    def __init__(self, new: NewSequence) -> None:
        self.new = new
        self.length = count(new.tokens)
        self.computed = new.computed
        self.blocks = count(new.blocks)


StepSeconds = Callable[[int, int, int, int], float]
"""(tokens, pairs, read, samples) → seconds; see `ModelShape.load`."""


class SimStep:
    """A step that the imagined device computes; see `StepUnderWay`."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def output(self) -> StepOutput:
        assert self._output.ended is not None, "an imagined device knows when it ends"
        time.sleep(max(0.0, self._output.ended - time.perf_counter()))
        return self._output


class SimBackend:
    """Owns the lengths of the sequences; there is no memory to own. Its device computes one step after the other, and
    meanwhile the next is prepared: a `LaunchingBackend`."""

    def __init__(
        self,
        card: ModelCard,
        num_blocks: int,
        seconds: StepSeconds | None,
        vocabulary: list[int],
        device: str,
        speculation: SimSpeculation | None = None,
    ) -> None:
        self.card = card
        self.num_blocks = num_blocks
        self.device = device
        self.kv = None
        self.grammars = None
        self._speculation = speculation or SimSpeculation()
        self.max_speculate = self._speculation.most
        self.max_jump_ahead = 0
        self._seconds = seconds
        """None: a step takes no time at all."""
        self._vocabulary = vocabulary
        self._held: dict[SequenceId, _Held] = {}
        self._scores: dict[SequenceId, list[int]] = {}
        """Prompts of which log-probabilities are wanted."""
        self._busy_until = 0.0
        """When the device will have computed all that it was given, on `time.perf_counter`'s clock."""

    def reset(self) -> None:
        self._held.clear()
        self._scores.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        return self.begin(plan).output()

    def begin(self, plan: StepPlan) -> SimStep:
        started = time.perf_counter()
        for sequence in plan.released:
            del self._held[sequence]
            self._scores.pop(sequence, None)
        for new in plan.new:
            self._held[new.sequence] = _Held(new)
            if new.sampling.prompt_logprobs is not None:
                self._scores[new.sequence] = unpack(new.tokens)[: new.prompt_length]
        scored = tuple(self._scored(plan.work)) if self._scores else ()
        sampled, seconds = self._compute(plan)
        drafted = sum(work.speculate for work in plan.work)
        accepted = _accepted(sampled) if drafted else ()
        launched = time.perf_counter()
        self._busy_until = max(launched, self._busy_until) + seconds
        timing = StepTiming(wait=0.0, prepare=launched - started, forward=seconds, sample=0.0)
        return SimStep(StepOutput(sampled, timing, drafted, accepted, scored, self._busy_until))

    def _compute(self, plan: StepPlan) -> tuple[tuple[Sampled, ...], float]:
        sampled: list[Sampled] = []
        tokens = pairs = read = 0
        held_by_id = self._held
        for work in plan.work:
            sequence, work_count, blocks = work.sequence, work.count, work.blocks
            held = held_by_id[sequence]
            read += held.computed
            rows = work_count + work.speculate
            tokens += rows
            pairs += rows * held.computed + rows * (rows + 1) // 2
            held.computed += work_count
            if blocks:
                held.blocks += count(blocks)
            if held.computed + work.speculate > held.blocks * BLOCK_SIZE or held.computed > held.length:
                raise ValueError(f"sequence {sequence}: {held.computed} of {held.length} in {held.blocks} blocks")
            if work.sample:
                sampled.append(self._sample(sequence, held, work.speculate))
        seconds = self._seconds(tokens, pairs, read, len(sampled)) if self._seconds is not None else 0.0
        return tuple(sampled), seconds

    def _scored(self, work: tuple[Work, ...]) -> Iterator[PromptScored]:
        for item in work:
            held, prompt = self._held[item.sequence], self._scores.get(item.sequence, [])
            tokens = prompt[held.computed + 1 : held.computed + item.count + 1]
            if tokens:
                wanted = held.new.sampling.prompt_logprobs or 0
                entries = tuple(replace(self._logprobs(token, wanted), rank=len(self._vocabulary)) for token in tokens)
                yield PromptScored(item.sequence, held.computed + 1, entries)

    def _sample(self, sequence: SequenceId, held: _Held, drafts: int) -> Sampled:
        new = held.new
        position, seed = held.length - new.prompt_length, new.sampling.seed
        accepted = self._speculation.accepted(seed, position, drafts)
        tokens = tuple(self._token(new, place) for place in range(position, position + accepted + 1))
        held.length += len(tokens)
        held.computed += accepted
        wanted = new.sampling.logprobs
        logprobs = None if wanted is None else tuple(self._logprobs(token, wanted) for token in tokens)
        return Sampled(sequence, tokens, logprobs, drafts)

    def _token(self, new: NewSequence, position: int) -> int:
        barred = new.stop_token_ids if position < new.min_tokens else ()
        size = len(self._vocabulary)
        place = drawn(new.sampling.seed, position) % size
        for step in range(size):
            token = self._vocabulary[(place + step) % size]
            if token not in barred:
                return token
        raise ValueError("every printable token is a stop token, and min_tokens bars them all")

    def _logprobs(self, token: int, wanted: int) -> TokenLogprobs:
        """Those of the distribution that is drawn from: every token of the vocabulary alike."""
        logprob = -math.log(len(self._vocabulary))
        others = [t for t in self._vocabulary[: wanted + 1] if t != token]
        top = tuple((t, logprob) for t in [token, *others][:wanted])
        return TokenLogprobs(token, logprob, top)


def create_sim_backend(
    model_dir: Path,
    *,
    model_name: ModelName,
    dtype: str,
    max_model_len: int | None,
    kv_memory_bytes: int | None,
    world_size: int,
    accelerator: Accelerator,
    profile: str,
    step_seconds: float | None,
    time_scale: float,
    speculation: SimSpeculation | None = None,
) -> SimBackend:
    """A simulated rank of the model in `model_dir`, of which the config and the tokenizer are read.

    `step_seconds`: what every step takes, instead of what the accelerator would. Raises BackendError.
    """
    shape = read_shape(model_dir, dtype)
    length = max_model_len or shape.max_positions
    if length > shape.max_positions:
        raise BackendError(f"max_model_len {length}: the model has {shape.max_positions} positions")
    card = ModelCard(
        name=model_name,
        max_model_len=length,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        dtype=shape.dtype,
        created=int(time.time()),
    )
    blocks = _num_blocks(shape, kv_memory_bytes, world_size, accelerator, length)
    seconds = _step_seconds(shape, world_size, accelerator, step_seconds, time_scale)
    vocabulary = printable_tokens(model_dir, shape.vocab_size)
    return SimBackend(card, blocks, seconds, vocabulary, f"sim ({profile})", speculation)


def _accepted(sampled: tuple[Sampled, ...]) -> tuple[int, ...]:
    """By draft position."""
    longest = max((len(one.tokens) for one in sampled), default=1) - 1
    return tuple(sum(len(one.tokens) > place + 1 for one in sampled) for place in range(longest))


def _num_blocks(
    shape: ModelShape, given: int | None, world_size: int, accelerator: Accelerator, max_model_len: int
) -> int:
    """Each rank holds its share of the weights and of each block."""
    room = given if given is not None else accelerator.memory * MEMORY_SHARE - shape.weight_bytes / world_size
    most = MOST_SEQUENCES * blocks_for(max_model_len)
    blocks = min(most, int(room * world_size / (shape.kv_bytes_per_token * BLOCK_SIZE)))
    if blocks < 1:
        raise BackendError(f"the weights take {shape.weight_bytes} bytes; nothing is left for keys and values")
    return blocks


MOST_SEQUENCES = 1024
"""A pool is made for no more sequences of full length than this: on an imagined device, tiny models would get millions
of blocks, and the scheduler's tables are real."""


def _step_seconds(
    shape: ModelShape, world_size: int, accelerator: Accelerator, constant: float | None, scale: float
) -> StepSeconds | None:
    if constant is not None:
        fixed = constant * scale
        return (lambda tokens, pairs, read, samples: fixed) if fixed else None

    def modelled(tokens: int, pairs: int, read: int, samples: int) -> float:
        load = shape.load(tokens=tokens, pairs=pairs, read=read, samples=samples)
        return scale * accelerator.seconds(load.shared_by(world_size))

    return modelled
