"""What a client asked for, as it travels from the tokenizer to the worker."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId

FinishReason = Literal["stop", "length"]
"""OpenAI's words. A cancelled or failed request never finishes; it is rejected or failed."""


class SamplingParams(Struct, frozen=True, array_like=True, kw_only=True):
    """How the next token is drawn. A pure function of (logits, seed, output position): no generator state.

    Ranges are checked by the gateway; defaults are OpenAI's, for the additions vLLM's.
    """

    seed: int
    """63 bits; the gateway draws one when the client gave none and keeps it over every attempt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities. N: the sampled token's and those of the N most likely."""


class StopParams(Struct, frozen=True, array_like=True, kw_only=True):
    """When a generation ends."""

    max_tokens: int | None = None
    """Output tokens at the most, resumed ones counted; None: as many as the context holds."""
    min_tokens: int = 0
    """No stop token is drawn, and no stop string looked for, before this many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether a stop string that was hit is part of the text."""


class Generation(Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate: tokenized, hashed, on its way to an engine."""

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    tokens: bytes
    """Packed uint32: the prompt, then the output tokens that earlier attempts already gave the client."""
    prompt_length: int
    """Tokens of the prompt; whatever follows in `tokens` is output of earlier attempts."""
    block_hashes: bytes
    """16 bytes for each full block of `tokens`."""
    sampling: SamplingParams
    stopping: StopParams
    sent_chars: int = 0
    """Characters of output text that the client already has."""
    skip_special_tokens: bool = True
    priority: int = 0
    """Lower goes first, as in vLLM."""
    arrival: float = 0.0
    """Unix seconds when the gateway took the request; kept over attempts, so a retry does not lose its place."""
    cache_salt: str | None = None
    avoid: tuple[EngineId, ...] = ()
    """Engines that failed earlier attempts; used only where there is no other."""
    trace: str | None = None
    """W3C traceparent of the client's span, where it sent one."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, from the logits before any processing."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), most likely first."""
