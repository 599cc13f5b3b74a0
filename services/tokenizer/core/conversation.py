"""Checks a client's chat messages, and converts them to the shape that chat templates expect.

What OpenAI's API allows and templates do not expect is translated as vLLM translates it: text parts to one string
(unless the template goes through parts itself), a tool call's JSON arguments to an object, nulls to missing keys,
`developer` to `system` where the template knows no developer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.tokenizer.core.chat_template import ChatTemplate, Message
from services.tokenizer.core.refusal import PromptRefused
from shared.messages.tokenizer import ChatPrompt

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Part types that are text, and the key that holds it."""
RESERVED_VARIABLES = frozenset({"chat_template", "conversation", "messages", "self", "tokenize", "tools"})
"""Names that a request may not set through `chat_template_kwargs`: they are fields of their own."""


def render_chat(prompt: ChatPrompt, template: ChatTemplate, special_tokens: Mapping[str, str]) -> str:
    """The prompt as text; the template has put the beginning-of-sequence token there itself. Raises PromptRefused."""
    variables: dict[str, Any] = {**special_tokens, **prompt.template_kwargs}
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise PromptRefused("chat_template_kwargs", f"chat_template_kwargs.{name}: not a template variable")
    add = variables.pop("add_generation_prompt", prompt.add_generation_prompt)
    go_on = variables.pop("continue_final_message", prompt.continue_final_message)
    if not isinstance(add, bool) or not isinstance(go_on, bool):
        raise PromptRefused("chat_template_kwargs", "add_generation_prompt, continue_final_message: true or false")
    if add and go_on:
        raise PromptRefused("continue_final_message", "continue_final_message excludes add_generation_prompt")
    documents = variables.pop("documents", None)
    messages = read_json_list(prompt.messages, "messages")
    if not messages:
        raise PromptRefused("messages", "messages: at least one is needed")
    return template.render(
        [_message(message, f"messages[{index}]", template) for index, message in enumerate(messages)],
        tools=None if prompt.tools is None else _objects(read_json_list(prompt.tools, "tools"), "tools"),
        documents=None if documents is None else _objects(documents, "chat_template_kwargs", "documents"),
        add_generation_prompt=add,
        continue_final_message=go_on,
        variables=variables,
    )


def read_json_list(payload: bytes, field: str) -> list[Any]:
    """A JSON array. Raises PromptRefused. Strict: no NaN, and no lone surrogates, which are no text."""
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptRefused(field, f"{field}: {error}") from None
    if not isinstance(value, list):
        raise PromptRefused(field, f"{field}: an array is expected")
    return value


def _message(message: Any, where: str, template: ChatTemplate) -> Message:
    if not isinstance(message, dict):
        raise PromptRefused("messages", f"{where}: an object is expected")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if not isinstance(role, str):
        raise PromptRefused("messages", f"{where}.role: a string is expected")
    if role == "developer" and not template.knows_developer:
        kept["role"] = "system"
    if "content" in kept:
        kept["content"] = _content(kept["content"], f"{where}.content", template)
    if "tool_calls" in kept:
        _read_tool_calls(kept, f"{where}.tool_calls")
    return kept


def _content(content: Any, where: str, template: ChatTemplate) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptRefused("messages", f"{where}: a string or an array of parts is expected")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if template.content_format == "openai":
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise PromptRefused("messages", f"{where}.type: {kind!r}; only text parts are served")
    if not isinstance(part.get(key), str):
        raise PromptRefused("messages", f"{where}.{key}: a string is expected")
    rest = {name: value for name, value in part.items() if name not in ("type", key)}
    return {"type": "text", "text": part[key], **rest}


def _read_tool_calls(message: Message, where: str) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise PromptRefused("messages", f"{where}: an array is expected")
    if not calls:
        del message["tool_calls"]
        return
    message["tool_calls"] = [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise PromptRefused("messages", f"{where}.function: an object is expected")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Templates want an object. What a model once wrote and is none stays in the history for ever, so it becomes an
    empty one (as in vLLM) rather than an error at every later turn."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _objects(value: Any, field: str, name: str = "") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptRefused(field, f"{name or field}: an array of objects is expected")
    return value
