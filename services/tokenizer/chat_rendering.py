"""From a chat request to the prompt's text: messages, tools and variables checked, template chosen, rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.conversation import read_json_list, read_messages
from services.tokenizer.refusal import PromptRefused
from services.tokenizer.template_files import ChatTemplates
from shared.messages.tokenizer import ChatPrompt

RESERVED = frozenset({"chat_template", "conversation", "messages", "self", "tokenize", "tools"})
"""Names that a request may not set through `chat_template_kwargs`: they are fields of their own."""


def render_chat(prompt: ChatPrompt, template: ChatTemplate, special_tokens: Mapping[str, str]) -> str:
    """The prompt as text; the template has put the beginning-of-sequence token there itself. Raises PromptRefused."""
    variables: dict[str, Any] = {**special_tokens, **prompt.template_kwargs}
    for name in variables:
        if name in RESERVED:
            raise PromptRefused("chat_template_kwargs", f"chat_template_kwargs.{name}: not a template variable")
    add = variables.pop("add_generation_prompt", prompt.add_generation_prompt)
    go_on = variables.pop("continue_final_message", prompt.continue_final_message)
    if not isinstance(add, bool) or not isinstance(go_on, bool):
        raise PromptRefused("chat_template_kwargs", "add_generation_prompt, continue_final_message: true or false")
    if add and go_on:
        raise PromptRefused("continue_final_message", "continue_final_message excludes add_generation_prompt")
    return template.render(
        read_messages(prompt.messages, template),
        tools=None if prompt.tools is None else _objects(read_json_list(prompt.tools, "tools"), "tools"),
        documents=_objects(variables.pop("documents", None), "chat_template_kwargs", "documents"),
        add_generation_prompt=add,
        continue_final_message=go_on,
        variables=variables,
    )


def chosen_template(prompt: ChatPrompt, templates: ChatTemplates) -> ChatTemplate | None:
    """One of the model's own templates; None where the request brings its own."""
    return templates.choose(prompt.template, tools=prompt.tools is not None)


def _objects(value: Any, field: str, name: str = "") -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptRefused(field, f"{name or field}: an array of objects is expected")
    return value


class ClientChat(msgspec.Struct, frozen=True):
    """A chat with a template of the client's own, on its way to the process that renders it."""

    prompt: ChatPrompt
    special_tokens: dict[str, str]


class RenderedChat(msgspec.Struct, frozen=True):
    """What that process answers: text, or the refusal's field and message."""

    text: str | None
    field: str | None = None
    message: str | None = None


def render_client_chat(chat: ClientChat) -> RenderedChat:
    """Compiles and renders in this process. Only for a process that may be lost."""
    try:
        template = ChatTemplate(chat.prompt.template or "")
        return RenderedChat(render_chat(chat.prompt, template, chat.special_tokens))
    except PromptRefused as refused:
        return RenderedChat(None, refused.field, refused.message)
