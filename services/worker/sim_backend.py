"""The simulated backend: takes the time that an accelerator would take, and says tokens that only look like text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from services.worker.backend import BackendError, StepOutput
from services.worker.sim.accelerator import MEMORY_SHARE, Accelerator
from services.worker.sim.shape import ModelShape, read_shape
from services.worker.sim.vocabulary import drawn, printable_tokens
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.ids import ModelName, SequenceId
from shared.messages.generation import TokenLogprobs
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import Sampled, StepTiming
from shared.messages.worker import NewSequence, StepPlan
from shared.tokens import count


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


class SimBackend:
    """Owns the lengths of the sequences; there is no memory to own."""

    def __init__(
        self, card: ModelCard, num_blocks: int, seconds: StepSeconds | None, vocabulary: list[int], device: str
    ) -> None:
        self.card = card
        self.num_blocks = num_blocks
        self.device = device
        self.kv = None
        self._seconds = seconds
        """None: a step takes no time at all."""
        self._vocabulary = vocabulary
        self._held: dict[SequenceId, _Held] = {}

    def reset(self) -> None:
        self._held.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        started = time.perf_counter()
        for sequence in plan.released:
            del self._held[sequence]
        for new in plan.new:
            self._held[new.sequence] = _Held(new)
        sampled, seconds = self._compute(plan)
        prepared = time.perf_counter() - started
        if seconds > prepared:
            time.sleep(seconds - prepared)
        timing = StepTiming(wait=0.0, prepare=prepared, forward=max(0.0, seconds - prepared), sample=0.0)
        return StepOutput(sampled, timing)

    def _compute(self, plan: StepPlan) -> tuple[tuple[Sampled, ...], float]:
        sampled: list[Sampled] = []
        tokens = pairs = read = 0
        held_by_id = self._held
        for work in plan.work:
            sequence, work_count, blocks = work.sequence, work.count, work.blocks
            held = held_by_id[sequence]
            read += held.computed
            tokens += work_count
            pairs += work_count * held.computed + work_count * (work_count + 1) // 2
            held.computed += work_count
            if blocks:
                held.blocks += count(blocks)
            if held.computed > held.blocks * BLOCK_SIZE or held.computed > held.length:
                raise ValueError(f"sequence {sequence}: {held.computed} of {held.length} in {held.blocks} blocks")
            if work.sample:
                sampled.append(self._sample(sequence, held))
        seconds = self._seconds(tokens, pairs, read, len(sampled)) if self._seconds is not None else 0.0
        return tuple(sampled), seconds

    def _sample(self, sequence: SequenceId, held: _Held) -> Sampled:
        new = held.new
        position = held.length - new.prompt_length
        held.length += 1
        token = self._token(new.sampling.seed, position, new.stop_token_ids if position < new.min_tokens else ())
        if new.sampling.logprobs is None:
            return Sampled(sequence, (token,))
        return Sampled(sequence, (token,), (self._logprobs(token, new.sampling.logprobs),))

    def _token(self, seed: int, position: int, barred: tuple[int, ...]) -> int:
        size = len(self._vocabulary)
        place = drawn(seed, position) % size
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
    return SimBackend(card, blocks, seconds, vocabulary, f"sim ({profile})")


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
