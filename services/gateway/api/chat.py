"""`POST /v1/chat/completions`: the body, checked, as a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import msgspec

from services.gateway.api.beams import read_beams
from services.gateway.api.errors import invalid, shown, unsupported
from services.gateway.api.fields import (
    CommonFields,
    check_count,
    check_ranges,
    checked_salt,
    choose_model,
    refuse_unsupported,
    stream_options,
)
from services.gateway.api.job import Job, Limits, Telling
from services.gateway.api.logprobs import chat_logprobs_asked
from services.gateway.api.reading import check_depth, read
from services.gateway.api.sampling import bad_words, sampling_params, stop_params, truncation
from services.gateway.api.structured import read_guided
from services.gateway.tools.offer import read_offer, told_tools
from services.gateway.tools.plan import plan_grammar, plan_parsing
from shared.dialects import Dialect
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard
from shared.messages.tokenizer import ChatPrompt

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES = frozenset(get_args(Role))


class Templated(Protocol):
    """How messages become a prompt: what this endpoint and `POST /tokenize` have in common."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


class ChatFields(CommonFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None


_decoder = msgspec.json.Decoder(ChatFields)


def _no_dialect(model: ModelName) -> Dialect:
    """Of a model that writes neither calls nor thoughts."""
    return Dialect()


def read_chat(
    body: bytes, cards: list[ModelCard], limits: Limits, dialect_of: Callable[[ModelName], Dialect] = _no_dialect
) -> Job:
    """`dialect_of`: how a model writes calls and thoughts. Raises ApiError."""
    fields = read(body, _decoder)
    card = choose_model(fields.model, cards)
    check_ranges(fields)
    refuse_unsupported(fields)
    _refuse_unsupported_chat(fields)
    n, beams = fields.n or 1, read_beams(fields, limits)
    check_count(1, n, limits)
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    dialect, offer = dialect_of(card.name), read_offer(fields)
    fields.tools = told_tools(fields)
    asked = chat_logprobs_asked(fields, fields.logprobs, fields.top_logprobs, card, limits)
    return Job(
        kind="chat",
        model=card,
        prompts=(chat_prompt(fields.messages, _with_variables(fields), limits),),
        n=n,
        seed=fields.seed,
        sampling=sampling_params(fields, asked, card, limits),
        stopping=stop_params(fields, max_tokens, card, limits),
        stream=stream_options(fields),
        telling=Telling(
            logprobs=asked.most_likely is not None,
            prompt_logprobs=asked.of_prompt,
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        ),
        bad_words=bad_words(fields, limits),
        truncate_prompt_tokens=truncation(fields, max_tokens, card),
        beams=beams,
        skip_special_tokens=fields.skip_special_tokens is not False,
        priority=fields.priority or 0,
        cache_salt=checked_salt(fields),
        guided=plan_grammar(dialect, offer, read_guided(fields)),
        # Of hypotheses all is told that they were compared by.
        parsing=None if beams else plan_parsing(dialect, offer, tell_reasoning=fields.include_reasoning is not False),
    )


def _with_variables(fields: ChatFields) -> ChatFields:
    """`documents` and `reasoning_effort` are variables of the model's template, as vLLM has it; what
    `chat_template_kwargs` says goes before."""
    given = {"documents": fields.documents, "reasoning_effort": fields.reasoning_effort}
    named = {name: value for name, value in given.items() if value is not None}
    if named:
        fields.chat_template_kwargs = {**named, **(fields.chat_template_kwargs or {})}
    return fields


def chat_prompt(given: list[dict[str, Any]], fields: Templated, limits: Limits) -> ChatPrompt:
    """The messages for the tokenizer's template. Raises ApiError."""
    if not given:
        raise invalid("messages", "[] is not allowed; at least one message is needed")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid("continue_final_message", "not allowed together with add_generation_prompt")
    if fields.chat_template is not None and not limits.allow_request_template:
        raise invalid("chat_template", "not taken from clients, unless gateway.allow_request_template is set")
    for name, value in (
        ("messages", given),
        ("tools", fields.tools),
        ("chat_template_kwargs", fields.chat_template_kwargs),
    ):
        check_depth(name, value)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(given)]
    return ChatPrompt(
        messages=msgspec.json.encode(messages),
        tools=msgspec.json.encode(fields.tools) if fields.tools else None,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        template=fields.chat_template,
        template_kwargs=fields.chat_template_kwargs or {},
    )


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """One message: a known role, and content that is text."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{path}.role", f"{shown(role)} is not allowed; one of {', '.join(sorted(ROLES))}")
    content = message.get("content")
    match content:
        case None if role == "assistant":
            pass
        case str():
            pass
        case list():
            message = {**message, "content": [_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]}
        case _:
            raise invalid(f"{path}.content", f"{shown(content)} is not allowed; a string or a list of text parts")
    _check_calls(message.get("tool_calls"), f"{path}.tool_calls")
    return message


def _check_calls(calls: Any, path: str) -> None:
    """A message's `tool_calls`, as an earlier answer had them. Arguments that are no JSON are the template's to bear: a
    model wrote them."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise invalid(path, f"{shown(calls)} is not allowed; a list of calls is")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        match function:
            case {"name": str(), "arguments": str() | dict() | None} | {"name": str()}:
                pass
            case _:
                raise invalid(f"{path}[{i}].function", f"{shown(function)} is not allowed; name and arguments are")


def _part(part: Any, path: str) -> dict[str, str]:
    match part:
        case str(text) | {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": str(kind)} if kind not in ("text", "refusal"):
            raise unsupported(f"{path}.type", f"a part of type {shown(kind)}, which is not text,")
        case _:
            raise invalid(path, f'{shown(part)} is not allowed; {{"type": "text", "text": "…"}} is')


def _refuse_unsupported_chat(fields: ChatFields) -> None:
    for name in ("functions", "function_call"):
        if getattr(fields, name) is not None:
            raise invalid(name, "deprecated and not supported; use tools")
    if fields.echo:
        raise unsupported("echo", "echo for chats")
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise unsupported("modalities", f"anything but ['text'], such as {shown(fields.modalities)},")
