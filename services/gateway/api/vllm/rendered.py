"""What a request comes to before anything is generated, as vLLM's `…/render` shows it.

Its prompt's tokens, and how it is to be sampled: routers in front of several servers hash such tokens."""

from __future__ import annotations

from typing import Any

from services.gateway.api.generation import GenerationRequest


def rendered_request(generation: GenerationRequest, request_id: str, tokens: list[int]) -> dict[str, Any]:
    """Returns vLLM's GenerateRequest for one of the prompts, whose tokens are `tokens`."""
    stream = generation.stream
    options = None
    if stream is not None:
        options = {"include_usage": stream.include_usage, "continuous_usage_stats": stream.continuous_usage}
    return {
        "request_id": request_id,
        "model": generation.served_name,
        "token_ids": tokens,
        "features": None,
        "sampling_params": _sampling_params(generation),
        "stream": stream is not None,
        "stream_options": options,
        "cache_salt": generation.cache_salt,
        "priority": generation.priority,
        "kv_transfer_params": None,
    }


def _sampling_params(generation: GenerationRequest) -> dict[str, Any]:
    """With vLLM's names; what is null was not asked for."""
    sampling, stopping = generation.sampling, generation.stopping
    return {
        "n": generation.n,
        "seed": generation.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": list(generation.bad_words),
        "thinking_token_budget": sampling.thinking_budget,
        "logprobs": sampling.logprobs,
        "logprob_token_ids": sampling.logprob_token_ids,
        "prompt_logprobs": sampling.prompt_logprobs,
        "max_tokens": stopping.max_tokens,
        "min_tokens": stopping.min_tokens,
        "stop": list(stopping.stop),
        "stop_token_ids": list(stopping.stop_token_ids),
        "ignore_eos": stopping.ignore_eos,
        "include_stop_str_in_output": stopping.include_stop,
        "skip_special_tokens": generation.skip_special_tokens,
    }
