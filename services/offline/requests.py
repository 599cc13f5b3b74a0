"""Prompts and sampling parameters, and the requests to the gateway that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from services.offline.errors import InvalidRequest
from services.offline.media import chat_of

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt` or `prompt_token_ids`; beside a prompt of text it may have
`multi_modal_data`. For a model with an encoder of prompts, a dict with `encoder_prompt` and `decoder_prompt`: each is
text, token ids or such a dict, the latter may be None."""
Message = Mapping[str, Any]

_OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may say of prompts without parameters."""

_SHOWN = 80
"""Characters of a value in an error message."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to sample one prompt, with vLLM's names and defaults. The gateway checks the values, when a prompt is
    generated."""

    n: int = 1
    temperature: float = 1.0
    """0 means greedy decoding."""
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
    """Any other field of the gateway's endpoint: `/v1/completions`, or `/v1/chat/completions` for a chat."""

    def fields(self) -> dict[str, Any]:
        """Returns them as fields of `/v1/completions`, without those that are None."""
        given = {name: value for name, value in asdict(self).items() if name != "extra" and value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {**given, **self.extra}


UNSAID = SamplingParams()
"""Of prompts without parameters: sampled as the model's generation_config.json says."""


class PromptRequest(NamedTuple):
    """One prompt or conversation, and how to continue it."""

    fields: Mapping[str, Any]
    """`prompt` or `messages`, and what belongs to them."""
    params: SamplingParams
    text: str | None = None
    """The prompt, where it was given as text."""

    @property
    def is_chat(self) -> bool:
        """Returns whether the prompt is a conversation."""
        return "messages" in self.fields

    def body(self, model: str, max_tokens: int | None) -> dict[str, Any]:
        """Returns the JSON of the request. `max_tokens`: in place of the parameters', unless it is None."""
        sampling = self.params.fields()
        if self.params is UNSAID:
            sampling = {name: value for name, value in sampling.items() if name not in _OF_THE_MODEL}
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if self.is_chat and self.params.logprobs is not None:
            sampling |= {"logprobs": True, "top_logprobs": self.params.logprobs}
        names = ("return_token_ids", "return_prompt_text", "return_tokens_as_token_ids")
        return {"model": model, **sampling, **self.fields, **dict.fromkeys(names, True)}


def prompt_requests(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[PromptRequest]:
    """Returns one request for each prompt. Raises InvalidRequest."""
    each = [prompts] if isinstance(prompts, str | Mapping) or _is_ids(prompts) else list(prompts)
    chosen = params_for(len(each), params)
    return [_request(prompt, own, i) for i, (prompt, own) in enumerate(zip(each, chosen, strict=True))]


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """Returns parameters for `count` prompts: one for all, or one for each. Raises InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [UNSAID if params is None else params] * count
    if len(params) != count:
        raise InvalidRequest(f"params: {len(params)} for {count} prompts; one for all, or one for each", "params")
    return list(params)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)


def _request(prompt: object, params: SamplingParams, index: int) -> PromptRequest:
    own: dict[str, Any] = {}
    field = f"prompts[{index}]"
    if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
        if unknown := set(prompt) - {"encoder_prompt", "decoder_prompt"}:
            allowed = "encoder_prompt and decoder_prompt are"
            raise InvalidRequest(f"{field}: {_shown(sorted(unknown)[0])} is not allowed; {allowed}", field)
        if (begin := prompt.get("decoder_prompt")) is not None:
            own["decoder_prompt"] = _request(begin, params, index).fields["prompt"]
        prompt = prompt["encoder_prompt"]
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}:
            allowed = "prompt, prompt_token_ids, cache_salt, multi_modal_data"
            raise InvalidRequest(f"{field}: {_shown(sorted(unknown)[0])} is not allowed; {allowed} are", field)
        if "prompt_token_ids" not in prompt and "prompt" not in prompt:
            raise InvalidRequest(f"{field}: prompt or prompt_token_ids is required", field)
        if "cache_salt" in prompt:
            own["cache_salt"] = prompt["cache_salt"]
        given, media = prompt.get("prompt_token_ids") or prompt.get("prompt"), prompt.get("multi_modal_data")
        if media:
            return PromptRequest({**chat_of(given, media, field), **own}, params, given)
        prompt = given
    if isinstance(prompt, str):
        return PromptRequest({"prompt": prompt, **own}, params, prompt)
    if isinstance(prompt, Sequence) and _is_ids(prompt):
        return PromptRequest({"prompt": list(prompt), **own}, params)
    raise InvalidRequest(
        f"prompts[{index}]: {_shown(prompt)} is not allowed; a string, token ids, or a dict", "prompts"
    )


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Returns several conversations, also where only one is given. Raises InvalidRequest."""
    one: list[Message] = []
    several: list[list[Message]] = []
    for each in messages:
        if isinstance(each, Mapping):
            one.append(each)
        else:
            several.append(list(each))
    if one and several:
        raise InvalidRequest(
            "messages: one conversation is a list of dicts, several are a list of such lists", "messages"
        )
    return [one] if one else several


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
