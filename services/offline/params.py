"""How to sample: vLLM's `SamplingParams`, as a request to our own gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict


class SamplingParams(Struct, frozen=True, kw_only=True):
    """vLLM's names and defaults. What a value may be is checked by the gateway, when a prompt is to be generated."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """N: log-probabilities of the chosen token and of the N most likely ones."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """{"json": …}, {"regex": …}, {"choice": […]}, {"grammar": …}: what the output must match."""
    extra: Mapping[str, Any] = {}
    """Any other field of `/v1/completions`."""

    def fields(self) -> dict[str, Any]:
        """As fields of `/v1/completions`, those left out that say nothing."""
        given = {name: value for name, value in asdict(self).items() if name != "extra" and value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {**given, **self.extra}
