"""The fields that say how tokens are drawn, and when an output ends, as endpoints have them by the same names. Which
values numbers may have is in `ranges.RANGES`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from services.gateway.api.structured_outputs import StructuredOutputs


class SamplingFields(Struct, kw_only=True):
    """The fields of OpenAI's API, vLLM's and SGLang's alike. Null means the model's default, or the neutral value."""

    n: int | None = None
    """Choices for each prompt."""
    temperature: float | None = None
    """0: the most likely token."""
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1: all tokens."""
    min_p: float | None = None
    presence_penalty: float | None = None
    """Of tokens of the output, once."""
    frequency_penalty: float | None = None
    """Of tokens of the output, each time that they occur."""
    repetition_penalty: float | None = None
    """Of tokens of the prompt and the output; a factor."""
    logit_bias: dict[str, float] | None = None
    """By token id."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    """Go on behind a token that ends the output."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text: the default."""
    spaces_between_special_tokens: bool | None = None


class VllmSamplingFields(SamplingFields, kw_only=True):
    """With those that vLLM's `SamplingParams` and its OpenAI endpoints have besides."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    """None: one is drawn."""
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    """Whose log-probabilities to report in place of the most likely tokens'."""
    prompt_logprobs: int | None = None
    """How many most likely tokens to report at each position of the prompt."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning; -1: any number."""
    stream_interval: int | None = None
    """Steps whose tokens come together in a stream, behind the first one."""
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    watermarking: Any = None
