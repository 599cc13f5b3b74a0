"""Requests of a simulated load: how long they are, which of their beginnings are the same, and what became of them. No
tokens are needed.

The cores look at lengths and at the names of blocks, never at tokens. So a prompt is a chain of named segments, and its
blocks get names that follow from these; its token ids are all 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from services.worker.sim.tokens import drawn
from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.packing import TOKEN_BYTES

GATEWAY = GatewayId("gateway-1")
ATTEMPT = Attempt(1)
_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
MAX_REMEMBERED_SEGMENTS = 16_384


class PromptSegment(NamedTuple):
    """A piece of a prompt. Two prompts with a segment of the same name are the same up to the end of it."""

    name: int
    tokens: int


class SimRequest(NamedTuple):
    """One request of a load."""

    number: int
    """Counts from 0, in the order of arrival."""
    at: float
    """When its client sends it, in seconds; of a load with constant concurrency, the earliest time."""
    segments: tuple[PromptSegment, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """All segments together."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def id(self) -> RequestId:
        """Its name on the simulated bus."""
        return RequestId(f"r{self.number}")


@dataclass(slots=True)
class RequestRecord:
    """What became of one request on its engine. Times are those at which its client has the tokens."""

    request: RequestId
    engine: EngineId
    sent: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    """Of each frame with tokens."""
    error: str | None = None


def generation_of(request: SimRequest, model: ModelName, sent: float, block_size: int) -> Generation:
    """The request as a tokenizer would send it. Its answer is as long as the load says: there is no stop token."""
    tokens = request.prompt_tokens
    return Generation(
        request=request.id,
        attempt=ATTEMPT,
        gateway=GATEWAY,
        model=model,
        tokens=bytes(TOKEN_BYTES * tokens),
        prompt_length=tokens,
        block_hashes=block_names(request.segments, block_size),
        sampling=SamplingOptions(seed=request.number),
        stopping=StopConditions(max_tokens=request.output_tokens, ignore_eos=True),
        arrival=sent,
    )


def block_names(segments: tuple[PromptSegment, ...], block_size: int) -> bytes:
    """16 bytes for each full block of `block_size` tokens: by the segment in which it ends, and its place in the
    prompt."""
    names, end, named = [], 0, 0
    for segment in segments:
        end += segment.tokens
        full = end // block_size
        if full > named:
            names.append(_names(segment.name, named, full))
            named = full
    return b"".join(names)


@lru_cache(MAX_REMEMBERED_SEGMENTS)
def _names(segment: int, first: int, end: int) -> bytes:
    base = drawn(segment, 0)
    words = array("Q")
    for place in range(first, end):
        words.append((base + place * _STRIDE) & _MASK)
        words.append(base)
    return words.tobytes()
