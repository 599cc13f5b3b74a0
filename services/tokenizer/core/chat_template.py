"""A model's chat templates, compiled once; rendered as transformers' `apply_chat_template(tokenize=False)` does it.

What OpenAI's API allows in messages and templates do not expect is translated as vLLM translates it: text parts to one
string (unless the template goes through parts itself), a tool call's JSON arguments to an object, nulls to missing
keys, `developer` to `system` where the template knows no developer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

import jinja2
import msgspec

from services.tokenizer.core.content_format import ContentFormat, detect_content_format
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.sandbox import ENVIRONMENT
from shared.messages.dialects import Dialect, ReasoningFormat, ThinkingControl, ToolFormat
from shared.messages.tokenizer import ChatPrompt
from shared.models.tokenizer_files import TokenizerUnusable
from shared.packing import NOT_DECODED

Message = dict[str, Any]

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind the message to be continued, and cut off with all that the template writes after it. Ends in a space,
so that a template that trims the message shows by trimming it."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients pass a message's reasoning; templates read the first."""

IMAGE_TOKENS = (IMAGE_ROW, IMAGE_MARK, IMAGE_END) = ("image_row", "image_mark", "image_end")
"""Under these names a model of images has, beside its special tokens, what stands for a row of an image in its prompts.
Where its templates write a mark for each image, that stands before the image then, and the end behind it."""
IMAGE_TOKEN = "image_token"
"""The same of what stands for a whole image, until it has rows."""
IMAGE_NUMBERED = "image_numbered"
"""Under this name what is written for an image, as in `ImageModel.numbered`."""
IMAGE_BOUND = "image_bound"
"""Under this name what stands on both sides of an image, as in `ImageModel.bounded`."""
IMAGE_FOLLOWED = "image_followed"
"""Under this name what stands behind an image, as in `ImageModel.followed`."""
SOUND_TOKEN = "sound_token"
"""The same of a sound's."""
VIDEO_TOKENS = (VIDEO_TOKEN, VIDEO_ROW, VIDEO_START, VIDEO_END) = (
    "video_token",
    "video_row",
    "video_start",
    "video_end",
)
"""The same of videos: what a template writes, and what stands for a row; the last two where each of their frames stands
between them."""
VIDEO_FRAME = "video_frame"
"""Under this name what is written for each of these, as in `VideoTokens.frame`."""
VIDEO_INTRO, VIDEO_OUTRO = "video_intro", "video_outro"
"""Under these names what stands before the first of them, and behind the last, as in `VideoTokens`."""
OF_VIDEOS = "videos"
"""The name of the template of chats with videos, where there is one of their own."""
MEDIA_PARTS = ("image", "video", "audio")
"""Types of parts that a gateway has put in place of what the client sent."""

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Part types that are text, and the key that holds it."""

RESERVED_VARIABLES = frozenset({"chat_template", "conversation", "messages", "self", "tokenize", "tools"})
"""Names that a request may not set through `chat_template_kwargs`: they are fields of their own."""

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

TOOL_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "<|call|>"), "openai"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<beginning_of_sentence>", "<tool_calls>"), "minimax"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_call|>",), "granite"),
    (("<function=",), "qwen3_xml"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("[func_name", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)
"""The first of which all marks are found decides: some lie in a `<tool_call>`, too."""

THINKING_CONTROLS: tuple[ThinkingControl, ...] = get_args(ThinkingControl)

REASONING_MARKS: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), "openai_gptoss"),
    (("<|tool_call_argument_begin|>", "<think>"), "kimi_k2"),
    *((("<think>",), "qwen3"), (("</think>",), "qwen3")),
    *((("[THINK]",), "mistral"), (("[/THINK]",), "mistral")),
    (("Here is my thought process:",), "granite"),
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
        self.has_channels = "<|channel|>" in source
        own = _names(source, "audio") or not _names(source, "input_audio")
        self.sound_part = "audio" if own else "input_audio"
        """What it calls a sound; Mistral's as clients do."""
        self.knows_developer = _names(source, "developer")

    def render(self, prompt: ChatPrompt, special_tokens: Mapping[str, str]) -> str:
        """The prompt as text; the template has put the beginning-of-sequence token there itself. Raises
        PromptRefused."""
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
        messages = read_json_list(prompt.messages, "messages")
        if not messages:
            raise PromptRefused("messages", "messages: at least one is needed")
        image = special_tokens.get(IMAGE_MARK, special_tokens.get(IMAGE_TOKEN, ""))
        marks = {
            "image": image,
            "audio": special_tokens.get(SOUND_TOKEN, image),
            "video": special_tokens.get(VIDEO_TOKEN, ""),
        }
        chat = [_message(message, f"messages[{index}]", self, marks) for index, message in enumerate(messages)]
        tools = None if prompt.tools is None else _objects(read_json_list(prompt.tools, "tools"), "tools")
        if (documents := variables.pop("documents", None)) is not None:
            documents = _objects(documents, "chat_template_kwargs", "documents")
        final = self._mark_final(chat) if go_on else None
        # As in vLLM: DeepSeek's templates, and those that know no tools, join the content of each message to text.
        absent: str | list[Any] = [] if self.content_format == "openai" else ""
        chat = [message if "content" in message else {**message, "content": absent} for message in chat]
        try:
            text = self._rendered(chat, tools=tools, documents=documents, add_generation_prompt=add, **variables)
        except TEMPLATE_FAULTS as error:
            raise PromptRefused("messages", f"the chat template refuses these messages: {_said(error)}") from None
        return text if final is None else _cut_after_final(text, final)

    def _rendered(self, chat: list[Message], **variables: Any) -> str:
        """Renders calls with their arguments as objects or, for templates that join them to text (DeepSeek's), as
        JSON."""
        try:
            return self._template.render(messages=chat, **variables)
        except TypeError:
            if not any("tool_calls" in message for message in chat):
                raise
        return self._template.render(messages=[_with_json_arguments(message) for message in chat], **variables)

    def _mark_final(self, chat: list[Message]) -> str:
        """Appends the mark to the last message's text, and returns that text."""
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

    def choose(self, name: str | None, *, tools: bool, videos: bool = False) -> ChatTemplate | None:
        """The template of that name, or the model's default. None where `name` is no name but a template's text.
        `videos`: whether the chat has any."""
        if name is not None:
            return self._by_name.get(name)
        if videos and OF_VIDEOS in self._by_name:
            return self._by_name[OF_VIDEOS]
        if tools and "tool_use" in self._by_name:
            return self._by_name["tool_use"]
        if "default" in self._by_name:
            return self._by_name["default"]
        raise PromptRefused("messages", f"this model has no {self._missing()}; send texts in place of messages")

    def _missing(self) -> str:
        names = ", ".join(sorted(self._by_name))
        return f"default chat template, only {names}" if names else "chat template"


def score_template(source: str) -> ChatTemplate:
    """The template that makes one prompt of a query and a document. Raises TokenizerUnusable."""
    try:
        return ChatTemplate(source)
    except PromptRefused as error:
        raise TokenizerUnusable(f"score_template: {error.message}") from None


def dialect_of(templates: Mapping[str, str]) -> Dialect:
    """The markup that a model speaks, by the marks in its chat templates, given by name: the one named `tool_use`,
    where there is one, shows how tools are called."""
    default = templates.get("default", "")
    calls = templates.get("tool_use", default)
    tools = next((name for marks, name in TOOL_MARKS if _shown(marks, calls)), None)
    reasoning = next((name for marks, name in REASONING_MARKS if _shown(marks, default) or _shown(marks, calls)), None)
    controls = tuple(name for name in THINKING_CONTROLS if name in default or name in calls)
    return Dialect(tools if "tools" in calls else None, reasoning, controls, "documents" in default + calls)


def _shown(marks: tuple[str, ...], template: str) -> bool:
    return all(mark in template for mark in marks)


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


def _names(source: str, word: str) -> bool:
    return f"'{word}'" in source or f'"{word}"' in source


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def read_json_list(payload: bytes, field: str) -> list[Any]:
    """A JSON array. Raises PromptRefused. Strict: no NaN, and no lone surrogates, which are no text."""
    try:
        value = msgspec.json.decode(payload)
    except NOT_DECODED as error:
        raise PromptRefused(field, f"{field}: {error}") from None
    if not isinstance(value, list):
        raise PromptRefused(field, f"{field}: an array is expected")
    return value


def _message(message: Any, where: str, template: ChatTemplate, marks: dict[str, str]) -> Message:
    if not isinstance(message, dict):
        raise PromptRefused("messages", f"{where}: an object is expected")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if not isinstance(role, str):
        raise PromptRefused("messages", f"{where}.role: a string is expected")
    if role == "developer" and not template.knows_developer:
        kept["role"] = "system"
    if "content" in kept:
        kept["content"] = _content(kept["content"], f"{where}.content", template, marks)
    if "tool_calls" in kept:
        _read_tool_calls(kept, f"{where}.tool_calls")
    reasoning = next((kept[name] for name in REASONING_FIELDS if name in kept), None)
    content = kept.get("content")
    if template.has_channels and "tool_calls" in kept and isinstance(reasoning, str) and isinstance(content, str):
        # gpt-oss's template has one place for what came before a call, and refuses both.
        reasoning = "\n".join(text for text in (reasoning, kept.pop("content")) if text)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _content(content: Any, where: str, template: ChatTemplate, marks: dict[str, str]) -> str | list[dict[str, Any]]:
    """`marks`: what stands for an image or a video where a template takes text alone."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptRefused("messages", f"{where}: a string or an array of parts is expected")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if template.content_format == "openai":
        return [{"type": template.sound_part} if part["type"] == "audio" else part for part in parts]
    return "\n".join(marks[part["type"]] if part["type"] in marks else part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS and len(part) == 1:
        return dict(part)
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


def _with_json_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Templates want an object. What a model once wrote and is none stays in the history for ever, so it becomes an
    empty one (as in vLLM) rather than an error at every later turn."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except NOT_DECODED:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _objects(value: Any, field: str, name: str = "") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptRefused(field, f"{name or field}: an array of objects is expected")
    return value
