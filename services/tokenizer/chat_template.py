"""One chat template: compiled once, rendered as transformers' `apply_chat_template(tokenize=False)` renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from services.tokenizer.content_format import ContentFormat, detect
from services.tokenizer.refusal import PromptRefused
from services.tokenizer.template_environment import ENVIRONMENT

Message = dict[str, Any]

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind the message to be continued, and cut off with all that the template writes after it. Ends in a space,
so that a template that trims the message shows by trimming it."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients pass a message's reasoning; templates read the first."""

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template may raise over messages that it was not written for."""


class ChatTemplate:
    """Holds one compiled template. Raises PromptRefused (field `chat_template`) where it does not compile."""

    def __init__(self, source: str, content_format: ContentFormat | None = None) -> None:
        try:
            self._template = ENVIRONMENT.from_string(source)
            tree = ENVIRONMENT.parse(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise PromptRefused("chat_template", f"chat_template does not compile: {error}") from None
        self._source = source
        self.content_format: ContentFormat = content_format or detect(tree)
        self.knows_developer = "'developer'" in source or '"developer"' in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt as text. Raises PromptRefused, naming `messages`."""
        chat = [_with_reasoning_names(message) for message in messages]
        final = self._mark_final(chat) if continue_final_message else None
        try:
            text = self._template.render(
                messages=chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TEMPLATE_FAULTS as error:
            raise PromptRefused("messages", f"the chat template refuses these messages: {_said(error)}") from None
        return text if final is None else _cut_after_final(text, final)

    def _mark_final(self, chat: list[Message]) -> str:
        """Appends the mark to the last message's text, and answers with that text."""
        final = chat[-1].get("content")
        if final is None or "content" not in self._source:
            raise PromptRefused("messages", "continue_final_message: the last message has no content to continue")
        if isinstance(final, str):
            chat[-1] = {**chat[-1], "content": final + CONTINUED}
            return final
        parts = list(final)
        for index in reversed(range(len(parts))):
            text = parts[index].get("text") if isinstance(parts[index], dict) else None
            if isinstance(text, str):
                parts[index] = {**parts[index], "text": text + CONTINUED}
                chat[-1] = {**chat[-1], "content": parts}
                return text
        raise PromptRefused("messages", "continue_final_message: the last message has no text to continue")


def _with_reasoning_names(message: Message) -> Message:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _cut_after_final(text: str, final: str) -> str:
    mark = CONTINUED.strip()
    if final.strip() not in text or mark not in text:
        raise PromptRefused(
            "messages", "continue_final_message: the chat template leaves out or changes the last message's content"
        )
    at = text.rindex(mark)
    if text[at : at + len(CONTINUED)] == CONTINUED:
        return text[:at]
    # The template trimmed the message, the mark's space with it; so the message's own trailing space goes too.
    return text[:at].rstrip()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
