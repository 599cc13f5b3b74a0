"""What may be given as a prompt, and the gateway's requests that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.offline.errors import InvalidRequest
from services.offline.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt` or `prompt_token_ids`."""
Message = Mapping[str, Any]

_SHOWN = 80


class Asked(NamedTuple):
    """One prompt with how to continue it."""

    prompt: str | list[int]
    params: SamplingParams
    more: Mapping[str, Any] = {}
    """Further fields of the request that go by prompt."""

    @property
    def text(self) -> str | None:
        return self.prompt if isinstance(self.prompt, str) else None

    def body(self, model: str, max_tokens: int | None) -> dict[str, Any]:
        """Of `/v1/completions`."""
        fields = self.params.fields()
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        telling = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": self.prompt, **fields, **self.more, **telling}


def asked(prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Asked]:
    """One for each prompt. Raises InvalidRequest."""
    each = [prompts] if _is_one(prompts) else list(prompts)
    chosen = params_for(len(each), params)
    return [_asked(prompt, how, i) for i, (prompt, how) in enumerate(zip(each, chosen, strict=True))]


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One for all, or one for each. Raises InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"params: {len(params)} for {count} prompts; one for all, or one for each", "params")
    return list(params)


def _is_one(prompts: object) -> bool:
    return isinstance(prompts, str | Mapping) or _is_ids(prompts)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)


def _asked(prompt: object, params: SamplingParams, place: int) -> Asked:
    if isinstance(prompt, str):
        return Asked(prompt, params)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, params, place)
    if _is_ids(prompt):
        return Asked(list(prompt), params)  # type: ignore[call-overload]
    raise InvalidRequest(
        f"prompts[{place}]: {_shown(prompt)} is not allowed; a string, token ids, or a dict", "prompts"
    )


def _from_mapping(prompt: Mapping[str, Any], params: SamplingParams, place: int) -> Asked:
    field = f"prompts[{place}]"
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        allowed = "prompt, prompt_token_ids, cache_salt"
        raise InvalidRequest(f"{field}: {_shown(sorted(unknown)[0])} is not allowed; {allowed} are", field)
    if "prompt_token_ids" not in prompt and "prompt" not in prompt:
        raise InvalidRequest(f"{field}: prompt or prompt_token_ids is required", field)
    inner = prompt.get("prompt_token_ids") or prompt.get("prompt")
    found = _asked(inner if not isinstance(inner, Mapping) else None, params, place)
    return found._replace(more={"cache_salt": prompt["cache_salt"]} if "cache_salt" in prompt else {})


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One list of messages, or several. Raises InvalidRequest."""
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
