"""Fields of vLLM's answers beside OpenAI's: those that every one has, and which weights its tokens came from."""

from __future__ import annotations

from typing import Any

UNUSED_OF_ANSWER = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
UNUSED_OF_CHAT = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
UNUSED_OF_CHOICE = dict.fromkeys(("token_ids", "routed_experts"))
UNUSED_OF_TEXT = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
UNUSED_OF_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Null where they say nothing: vLLM's clients may read them unasked."""
WEIGHTS = "default"
"""The version of weights: those that the engines were started with."""


def weight_versions(tokens: int) -> list[dict[str, Any]]:
    """Returns `weight_versions` of a choice that has so many output tokens: one span of all."""
    return [{"version": WEIGHTS, "start": 0, "end": tokens}] if tokens else []
