"""How the workers are told of a sequence that they do not know yet."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.sequence import Sequence
from shared.blocks import blocks_for
from shared.messages.generation import SamplingParams
from shared.messages.worker import NewSequence
from shared.tokens import TOKEN_BYTES, pack


def new_size(sequence: Sequence) -> int:
    """About the bytes that it takes, where they are many."""
    return len(sequence.tokens) * TOKEN_BYTES + sequence.list_bytes


def new_sequence(sequence: Sequence, cached: int) -> NewSequence:
    """`cached`: of its tokens, those that lie computed in its first blocks."""
    generation = sequence.generation
    return NewSequence(
        sequence=sequence.id,
        tokens=pack(sequence.tokens),
        prompt_length=sequence.prompt_length,
        computed=cached,
        blocks=pack(sequence.blocks[: blocks_for(cached)]),
        sampling=_sampling(sequence),
        min_tokens=generation.stopping.min_tokens,
        stop_token_ids=tuple(sorted(sequence.stops)),
        grammar=generation.grammar,
    )


def _sampling(sequence: Sequence) -> SamplingParams:
    """The client's, without what it has been told already."""
    sampling = sequence.generation.sampling
    told = sampling.prompt_logprobs is not None and not sequence.scored
    return replace(sampling, prompt_logprobs=None) if told else sampling
