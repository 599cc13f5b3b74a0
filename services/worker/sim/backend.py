"""The simulated backend: takes the time that an accelerator would take, and says tokens that only look like text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec.structs import replace

from services.worker.backend import BackendError, ExecutionMode, StepOutput
from services.worker.kv.copier import RankKvCache
from services.worker.sim.accelerator import MEMORY_SHARE, Accelerator
from services.worker.sim.expert_spread import ExpertSpread
from services.worker.sim.kv_copier import simulated_kv
from services.worker.sim.shape import ModelShape, read_shape
from services.worker.sim.tokens import SimSpeculation, drawn, printable_tokens
from shared.blocks import blocks_for
from shared.ids import ModelName, SequenceId
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.generation import TokenLogprobs
from shared.messages.model_card import ModelCard, SamplingDefaults
from shared.messages.scheduler import SampledTokens, SequencePromptLogprobs, StepTiming
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import count, unpack


class _SimSequence:
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
    """A step that the imagined device computes; see :class:`services.worker.backend.Step`."""

    def __init__(self, backend: SimBackend, output: StepOutput, seconds: float) -> None:
        """`seconds`: what the device takes for it."""
        self._backend = backend
        self._output = output
        self._seconds = seconds
        self._ended = 0.0

    def launch(self) -> None:
        """The device begins with it when it has computed all steps before."""
        self._ended = self._backend.busy_until = max(time.perf_counter(), self._backend.busy_until) + self._seconds

    def result(self) -> StepOutput:
        """Sleeps until the device is done."""
        time.sleep(max(0.0, self._ended - time.perf_counter()))
        return replace(self._output, ended=self._ended)


class SimBackend:
    """Owns the lengths of the sequences; there is no memory to own. Its device computes one step after the other, and
    meanwhile the next is prepared."""

    mode: ExecutionMode = "launched"

    def __init__(
        self,
        card: ModelCard,
        num_blocks: int,
        seconds: StepSeconds | None,
        vocabulary: list[int],
        device: str,
        speculation: SimSpeculation | None = None,
        kv: RankKvCache | None = None,
    ) -> None:
        self.card = card
        self.num_blocks = num_blocks
        self.kv_groups: tuple[KvCacheGroup, ...] = ()
        self.state_checkpoints: int | None = None
        self.state_records: StateRecords | None = None
        self.device = self.device_name = device
        self.kv = kv
        self.grammars = None
        self._speculation = speculation or SimSpeculation()
        self.max_speculate = self._speculation.most
        self.max_jump_ahead = 0
        self.rows_per_draft = 1
        self.max_loras = 0
        self.adapters = None
        self.expert_load = None
        self.group = None
        self._seconds = seconds
        """None: a step takes no time at all."""
        self._vocabulary = vocabulary
        self._held: dict[SequenceId, _SimSequence] = {}
        self._scores: dict[SequenceId, list[int]] = {}
        """Prompts of which log-probabilities are wanted."""
        self.busy_until = 0.0
        """When the device will have computed all that it was given, on `time.perf_counter`'s clock."""

    def reset(self) -> None:
        """Removes every sequence."""
        self._held.clear()
        self._scores.clear()

    def compute_context(self) -> AbstractContextManager[object]:
        """Nothing is needed to imagine."""
        return nullcontext()

    def another(self) -> SimBackend:
        """A device of the same kind that holds nothing."""
        return SimBackend(
            self.card, self.num_blocks, self._seconds, self._vocabulary, self.device, self._speculation, self.kv
        )

    def prepare(self, plan: StepPlan) -> SimStep:
        """What the step draws is known at once. Raises ValueError for a plan that cannot be computed."""
        output = self.compute(plan)
        return SimStep(self, output, output.timing.forward)

    def compute(self, plan: StepPlan) -> StepOutput:
        """Applies `plan`, on no clock: `timing.forward` is what the device takes for it. Raises ValueError for a plan
        that cannot be computed."""
        for sequence in plan.released:
            del self._held[sequence]
            self._scores.pop(sequence, None)
        for new in plan.new:
            self._held[new.sequence] = _SimSequence(new)
            if new.sampling.prompt_logprobs is not None:
                self._scores[new.sequence] = unpack(new.tokens)[: new.prompt_length]
        scored = tuple(self._scored(plan.work)) if self._scores else ()
        sampled, seconds = self._compute(plan)
        drafted = sum([work.speculate for work in plan.work])
        accepted = _accepted(sampled) if drafted else ()
        timing = StepTiming(wait=0.0, prepare=0.0, forward=seconds, sample=0.0)
        return StepOutput(sampled, timing, drafted, accepted, scored)

    def _compute(self, plan: StepPlan) -> tuple[tuple[SampledTokens, ...], float]:
        sampled: list[SampledTokens] = []
        tokens = pairs = read = 0
        held_by_id, block_size = self._held, self.card.block_size
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
            if held.computed + work.speculate > held.blocks * block_size or held.computed > held.length:
                raise _no_room(sequence, held)
            if work.sample:
                sampled.append(self._sample(sequence, held, work.speculate))
        seconds = self._seconds(tokens, pairs, read, len(sampled)) if self._seconds is not None and plan.work else 0.0
        return tuple(sampled), seconds

    # ---- several steps at once, for whoever knows that they only decode

    def computed(self, sequence: SequenceId) -> int:
        """How many tokens of the sequence are computed."""
        return self._held[sequence].computed

    def decode_seconds(self, sequences: int, read: int) -> float:
        """What a step takes that decodes a token of each of so many sequences, of which `read` tokens in all are
        computed."""
        return 0.0 if self._seconds is None else self._seconds(sequences, read + sequences, read, sequences)

    def token(self, sequence: SequenceId, position: int) -> int:
        """What the sequence draws at that output position."""
        return self._token(self._held[sequence].new, position)

    def decode(self, sequence: SequenceId, steps: int) -> None:
        """Applies so many steps that decode a token of the sequence each, in the blocks that it has. Raises ValueError
        where these are too few."""
        held = self._held[sequence]
        held.computed += steps
        held.length += steps
        if held.computed > held.blocks * self.card.block_size:
            raise _no_room(sequence, held)

    def _scored(self, work: tuple[SequenceWork, ...]) -> Iterator[SequencePromptLogprobs]:
        for item in work:
            held, prompt = self._held[item.sequence], self._scores.get(item.sequence, [])
            tokens = prompt[held.computed + 1 : held.computed + item.count + 1]
            if tokens:
                wanted = held.new.sampling.prompt_logprobs or 0
                entries = tuple(replace(self._logprobs(token, wanted), rank=len(self._vocabulary)) for token in tokens)
                yield SequencePromptLogprobs(item.sequence, held.computed + 1, entries)

    def _sample(self, sequence: SequenceId, held: _SimSequence, drafts: int) -> SampledTokens:
        new = held.new
        position = held.length - new.prompt_length
        if drafts:
            accepted = self._speculation.accepted(new.sampling.seed, position, drafts)
            tokens = tuple([self._token(new, place) for place in range(position, position + accepted + 1)])
        else:
            accepted, tokens = 0, (self._token(new, position),)
        held.length += len(tokens)
        held.computed += accepted
        wanted = new.sampling.logprobs
        logprobs = None if wanted is None else tuple(self._logprobs(token, wanted) for token in tokens)
        return SampledTokens(sequence, tokens, logprobs, drafts)

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
        """Log-probabilities of the distribution that is drawn from: all tokens of the vocabulary are equally likely."""
        logprob = -math.log(len(self._vocabulary))
        others = [t for t in self._vocabulary[: wanted + 1] if t != token]
        top = tuple((t, logprob) for t in [token, *others][:wanted])
        return TokenLogprobs(token, logprob, top)


def _no_room(sequence: SequenceId, held: _SimSequence) -> ValueError:
    return ValueError(f"sequence {sequence}: {held.computed} of {held.length} in {held.blocks} blocks")


def create_sim_backend(
    model_dir: Path,
    *,
    model_name: ModelName,
    dtype: str,
    max_model_len: int | None,
    kv_memory_bytes: int | None,
    world_size: int,
    rank: int = 0,
    accelerator: Accelerator,
    profile: str,
    step_seconds: float | None,
    time_scale: float,
    block_size: int,
    speculation: SimSpeculation | None = None,
    spread: ExpertSpread | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    sampling: SamplingDefaults | None = None,
) -> SimBackend:
    """A simulated rank of the model in `model_dir`, of which the config and the tokenizer are read.

    `step_seconds`: what every step takes, instead of what the accelerator would. Raises BackendError.
    """
    shape = read_shape(model_dir, dtype, quantization, kv_cache_dtype)
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
        block_size=block_size,
        sampling=sampling,
    )
    if spread is not None and shape.experts is None:
        raise BackendError(f"sim_expert_ranks: {model_dir} is no mixture of experts")
    blocks = _num_blocks(shape, kv_memory_bytes, world_size, accelerator, card, spread)
    seconds = _step_seconds(shape, world_size, accelerator, step_seconds, time_scale, spread)
    vocabulary = printable_tokens(model_dir, shape.vocab_size)
    kv = simulated_kv(
        shape,
        num_blocks=blocks,
        block_size=block_size,
        rank=rank,
        world_size=world_size,
        bandwidth=accelerator.host_link,
        time_scale=time_scale,
    )
    return SimBackend(card, blocks, seconds, vocabulary, f"sim ({profile})", speculation, kv)


def _accepted(sampled: tuple[SampledTokens, ...]) -> tuple[int, ...]:
    """How many drafts were accepted, by draft position."""
    longest = max((len(one.tokens) for one in sampled), default=1) - 1
    return tuple(sum(len(one.tokens) > place + 1 for one in sampled) for place in range(longest))


def _num_blocks(
    shape: ModelShape,
    given: int | None,
    world_size: int,
    accelerator: Accelerator,
    card: ModelCard,
    spread: ExpertSpread | None,
) -> int:
    """Each rank holds its share of the weights and of each block."""
    weights = shape.resident_bytes(world_size, spread)
    room = given if given is not None else accelerator.memory * MEMORY_SHARE - weights
    most = MAX_SEQUENCES * blocks_for(card.max_model_len, card.block_size)
    blocks = min(most, int(room * world_size / (shape.kv_bytes_per_token * card.block_size)))
    if blocks < 1:
        raise BackendError(f"the weights take {weights:.0f} bytes of a rank; nothing is left for keys and values")
    return blocks


MAX_SEQUENCES = 1024
"""A pool is made for no more sequences of full length than this: on an imagined device, tiny models would get millions
of blocks, and the scheduler's tables are real."""


def _step_seconds(
    shape: ModelShape,
    world_size: int,
    accelerator: Accelerator,
    constant: float | None,
    scale: float,
    spread: ExpertSpread | None,
) -> StepSeconds | None:
    if constant is not None:
        fixed = constant * scale
        return (lambda tokens, pairs, read, samples: fixed) if fixed else None

    def modelled(tokens: int, pairs: int, read: int, samples: int) -> float:
        load = shape.load(tokens=tokens, pairs=pairs, read=read, samples=samples)
        return scale * accelerator.seconds(load.shared_by(world_size))

    return modelled if spread is None else _spread_seconds(shape, world_size, accelerator, scale, spread)


def _spread_seconds(
    shape: ModelShape, world_size: int, accelerator: Accelerator, scale: float, spread: ExpertSpread
) -> StepSeconds:
    def modelled(tokens: int, pairs: int, read: int, samples: int) -> float:
        load = shape.spread_load(spread, world_size, tokens=tokens, pairs=pairs, read=read, samples=samples)
        return scale * accelerator.seconds(load)

    def halved(tokens: int, pairs: int, read: int, samples: int) -> float:
        half = {"tokens": tokens / 2, "pairs": pairs / 2, "read": read / 2, "samples": samples / 2}
        return scale * accelerator.overlapped(shape.spread_load(spread, world_size, **half))

    return halved if spread.overlap else modelled
