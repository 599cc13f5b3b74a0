"""A model's chat templates, compiled once; rendered as transformers' `apply_chat_template(tokenize=False)` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from services.tokenizer.core.content_format import ContentFormat, detect_content_format
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.sandbox import ENVIRONMENT
from shared.messages.dialects import Dialect, ReasoningFormat, ToolFormat
from shared.models.tokenizer_files import TokenizerUnusable

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

TOOL_MARKS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<arg_key>", None),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""The first that is found decides. GLM's `<arg_key>` lies in a `<tool_call>`, too, and is a markup that no
parser here reads."""

REASONING_MARKS: tuple[tuple[str, ReasoningFormat], ...] = (
    *(("<think>", "qwen3"), ("</think>", "qwen3")),
    *(("[THINK]", "mistral"), ("[/THINK]", "mistral")),
)
"""No mark says that answers begin with unmarked thoughts: where the template opens them, each prompt shows it."""


class ChatTemplate:
    """Holds one compiled template. Raises PromptRefused (field `chat_template`) where it does not compile."""

    def __init__(self, source: str, content_format: ContentFormat | None = None) -> None:
        try:
            self._template = ENVIRONMENT.from_string(source)
            tree = ENVIRONMENT.parse(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise PromptRefused("chat_template", f"chat_template does not compile: {error}") from None
        self._source = source
        self.content_format: ContentFormat = content_format or detect_content_format(tree)
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


class ChatTemplates:
    """Owns the model's compiled templates. With several, the one named `tool_use` serves requests with tools.

    Raises TokenizerUnusable for one that does not compile.
    """

    def __init__(self, sources: Mapping[str, str], content_format: ContentFormat | None = None) -> None:
        try:
            self._by_name = {name: ChatTemplate(source, content_format) for name, source in sources.items()}
        except PromptRefused as error:
            raise TokenizerUnusable(f"the model's {error.message}") from None
        self.dialect = dialect_of(sources)

    def choose(self, name: str | None, *, tools: bool) -> ChatTemplate | None:
        """The template of that name, or the model's default. None where `name` is no name but a template's text."""
        if name is not None:
            return self._by_name.get(name)
        if tools and "tool_use" in self._by_name:
            return self._by_name["tool_use"]
        if "default" in self._by_name:
            return self._by_name["default"]
        raise PromptRefused("messages", f"this model has no {self._missing()}; use /v1/completions")

    def _missing(self) -> str:
        names = ", ".join(sorted(self._by_name))
        return f"default chat template, only {names}" if names else "chat template"


def dialect_of(templates: Mapping[str, str]) -> Dialect:
    """The markup that a model speaks, by the marks in its chat templates, given by name: the one named `tool_use`,
    where there is one, shows how tools are called."""
    default = templates.get("default", "")
    calls = templates.get("tool_use", default)
    tools = next((name for mark, name in TOOL_MARKS if mark in calls), None)
    reasoning = next((name for mark, name in REASONING_MARKS if mark in default or mark in calls), None)
    return Dialect(tools if "tools" in calls else None, reasoning)


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
