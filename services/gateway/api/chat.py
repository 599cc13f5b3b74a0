"""`POST /v1/chat/completions`: reads the body as a generation request, and assembles the assistant's message."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, assert_never

import msgspec

from services.gateway.api.custom_tools.chat_tools import as_functions
from services.gateway.api.custom_tools.custom_input import CustomInput
from services.gateway.api.embeds.prompt_embeds import EmbeddedParts
from services.gateway.api.errors import abbreviated, check_packable, decode_body, invalid, not_allowed, unsupported
from services.gateway.api.fields.generation import CommonFields, check_common_fields
from services.gateway.api.fields.reasoning_effort import REASONING_EFFORTS
from services.gateway.api.fields.stored_chat import chat_to_store
from services.gateway.api.generation import (
    BeamSearchParams,
    GenerationKind,
    GenerationRequest,
    RequestLimits,
    check_generates,
    choose_model,
)
from services.gateway.api.media.source import IMAGE, SOUND, MediaSource
from services.gateway.api.prompts import chat_prompt, token_prompt
from services.gateway.api.sampling import beam_search_params, chat_logprobs_request, generation_request
from services.gateway.api.structured_outputs import OutputGrammar, read_output_grammar
from services.gateway.api.tool_grammars import combined_grammar, parser_options
from services.gateway.api.tools import read_tool_options, template_tools
from services.gateway.parsing.events import (
    ContentText,
    ParseEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallRetraction,
    ToolCallStart,
)
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from shared.ids import ModelName
from shared.messages.generation import FinishReason
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import Prompt


class ChatFields(CommonFields, kw_only=True):
    """The JSON fields of a chat."""

    messages: list[dict[str, Any]]
    prompt_token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
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
    audio: Any = None
    web_search_options: Any = None
    store: bool | None = None
    metadata: Any = None
    """Looked at where the chat is stored, and of no effect elsewhere, as with vLLM."""


_OF_TEMPLATES = (
    *("messages", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"),
    *("reasoning_effort", "add_special_tokens", "echo"),
)
_decoder = msgspec.json.Decoder(ChatFields)


def read_chat(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None = lambda _: OutputDialect(),
) -> GenerationRequest:
    """Reads and checks a body. `cards` are the models that are served; `dialect_of` gives the formats in which a model
    writes tool calls and reasoning. None: the answer is what the model writes, and tools are only shown to the chat
    template. Raises RequestError."""
    fields = decode_body(body, _decoder)
    sent = msgspec.structs.replace(fields) if fields.store else None
    generation = chat_request(fields, cards, limits, dialect_of)
    if sent is None:
        return generation
    if generation.stream is not None and generation.stream.resumable:
        raise invalid("stream_options.resumable", "not allowed where `store` is true")
    return msgspec.structs.replace(generation, stored=chat_to_store(sent))


def chat_request(
    fields: ChatFields,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
    kind: GenerationKind = "chat",
) -> GenerationRequest:
    """The same for a body that was read; `kind`: of the API that it came by. Raises RequestError."""
    card = check_generates(choose_model(fields.model, cards))
    check_common_fields(fields, 1, limits.max_choices)
    _check_fields(fields)
    _add_template_variables(fields, limits.efforts)
    beam_search = beam_search_params(fields, limits)
    output = read_output_grammar(fields)
    custom = as_functions(fields)
    parser: ParserOptions | None = None
    if dialect_of is not None:
        output, parser = _written_in(dialect_of(card.name), fields, output, beam_search)
    if custom and parser is not None:
        parser = parser._replace(custom=custom)
    asked = _question(fields, card, limits, kind)
    generation = generation_request(
        fields,
        card,
        limits,
        kind=kind,
        prompts=(asked.prompt,),
        role=asked.role,
        echoed_messages=(asked.echoed,) if fields.echo else (),
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        logprobs=chat_logprobs_request(fields, fields.logprobs, fields.top_logprobs, card, limits),
        beam_search=beam_search,
        output_grammar=output,
        parser_options=parser,
    )
    return msgspec.structs.replace(generation, media=asked.media) if asked.media else generation


def _check_fields(fields: ChatFields) -> None:
    """Those that only chats have. Raises RequestError."""
    for name in ("functions", "function_call"):
        if getattr(fields, name) is not None:
            raise invalid(name, "deprecated and not supported; use tools")
    if fields.prompt_embeds is not None:
        raise unsupported("prompt_embeds", "a prompt as embeddings outside of /v1/completions and parts of messages")
    for name in ("audio", "web_search_options"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "spoken output" if name == "audio" else "a search in the web")
    if fields.reasoning_effort is not None and fields.reasoning_effort not in REASONING_EFFORTS:
        raise not_allowed("reasoning_effort", fields.reasoning_effort, f"{', '.join(map(repr, REASONING_EFFORTS))} are")
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise unsupported("modalities", f"anything but ['text'], such as {abbreviated(fields.modalities)},")
    if fields.prompt_token_ids is not None:
        _check_needs_no_template(fields)


def _add_template_variables(fields: ChatFields, efforts: Mapping[str, str]) -> None:
    """As in vLLM some fields are variables of the chat template; those that `chat_template_kwargs` gives take
    precedence. `efforts`: what the operator has them mean. Raises RequestError."""
    asked = fields.reasoning_effort
    effort = None if asked is None else efforts.get(asked, asked)
    thinking = None if effort is None else effort != "none"
    variables = {"documents": fields.documents, "reasoning_effort": effort, "enable_thinking": thinking}
    given = {name: value for name, value in variables.items() if value is not None}
    for name, value in given.items():
        check_packable(name, value)
    fields.chat_template_kwargs = {**given, **(fields.chat_template_kwargs or {})}


def _written_in(
    dialect: OutputDialect, fields: ChatFields, output: OutputGrammar | None, beam_search: BeamSearchParams | None
) -> tuple[OutputGrammar | None, ParserOptions | None]:
    """The grammar of the whole output, tool calls and reasoning included, and how it is read; None: as it is written.
    `output`: the grammar of the answer alone. Raises RequestError."""
    if beam_search and fields.tools:
        raise invalid("tools", "not allowed together with use_beam_search")
    tools = read_tool_options(fields)
    fields.tools = template_tools(fields)
    go_on = (fields.chat_template_kwargs or {}).get("continue_final_message", fields.continue_final_message) is True
    guided = output is not None and (tools is None or tools.choice != "required")
    output = combined_grammar(dialect, tools, output, continued=go_on)
    if beam_search is not None:  # the text of a hypothesis is shown as it was ranked
        return output, None
    shown = fields.include_reasoning is not False
    parser = parser_options(dialect, tools, include_reasoning=shown, continued=go_on, guided=guided)
    if parser is not None and parser.dialect.sees_special_tokens:
        fields.skip_special_tokens = False
    return output, parser


class _ChatQuestion(NamedTuple):
    """What a chat asks, and who answers."""

    prompt: Prompt
    role: str = "assistant"
    echoed: str = ""
    """The message that the answer goes on from, where it is to be shown."""
    media: tuple[MediaSource, ...] = ()


def _question(fields: ChatFields, card: ModelCard, limits: RequestLimits, kind: GenerationKind) -> _ChatQuestion:
    if fields.prompt_token_ids is not None:
        return _ChatQuestion(token_prompt("prompt_token_ids", fields.prompt_token_ids, card))
    parts = EmbeddedParts(card, limits)
    prompt = chat_prompt(fields.messages, fields, limits, parts.read if kind == "chat" else parts.read_foreign)
    if parts.found:
        parts.check_fields(fields)
        images, sounds = parts.numbers(IMAGE), parts.numbers(SOUND)
        if card.images is None:  # of a model that hears alone they stand in the place of images, as 0.3.0 has it
            images, sounds = sounds, ()
        prompt = msgspec.structs.replace(prompt, embeds=tuple(parts.found), images=images, sounds=sounds)
    role = "assistant" if prompt.add_generation_prompt else fields.messages[-1]["role"]
    echoed = _text_of(fields.messages[-1], role) if fields.echo else ""
    return _ChatQuestion(prompt, role, echoed, tuple(parts.media))


def _check_needs_no_template(fields: ChatFields) -> None:
    """A prompt of token ids is taken as it is: nothing that a template would have made of it. Raises RequestError."""
    given = [name for name in _OF_TEMPLATES if getattr(fields, name)]
    if fields.add_generation_prompt is not None:
        given.append("add_generation_prompt")
    if given:
        raise invalid("prompt_token_ids", f"not allowed together with {given[0]}")


def _text_of(message: dict[str, Any], role: str) -> str:
    """What a message says, if `role` says it."""
    content = message.get("content") if message["role"] == role else None
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text", part.get("refusal")) for part in content)
    return content or ""


REASONING_FIELDS = ("reasoning_content", "reasoning")
"""vLLM's name for the reasoning, and its earlier name; clients know one or the other."""

NewId = Callable[[], str]


def openai_id() -> str:
    """Draws the id of a tool call in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def mistral_id() -> str:
    """Draws the id of a tool call as Mistral's chat templates require it: nine letters and digits."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


def repeatable_ids(name: str, mistral: bool) -> NewId:
    """Returns what makes the ids of a choice's tool calls, one after the other: the same for the same `name`, so that a
    stream that is resumed at another gateway has them again."""
    numbers = itertools.count()

    def make() -> str:
        digest = blake2b(f"{name}/{next(numbers)}".encode(), digest_size=12).digest()
        if not mistral:
            return f"call_{digest.hex()}"
        return "".join(ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest[:9])

    return make


class _ToolCall(NamedTuple):
    id: str
    name: str
    arguments: list[str]
    """Pieces; of a custom tool those of its input."""
    input: CustomInput | None
    """Of a custom tool: reads its arguments."""

    def written(self) -> dict[str, Any]:
        """Returns the call as it is shown, as far as it has arrived."""
        text = "".join(self.arguments)
        if self.input is not None:
            return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": text}}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}


class AssistantMessage:
    """Owns one choice's message as far as it has arrived: text, reasoning, and tool calls with ids."""

    def __init__(self, options: ParserOptions, new_id: NewId | None = None) -> None:
        self.parser = OutputParser(options)
        self._new_id = new_id or (mistral_id if options.dialect.tools == "mistral" else openai_id)
        self._options = options
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_ToolCall] = []
        self._started_calls = 0
        """Calls of which a stream has shown the start, retracted ones included."""

    def feed(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """Returns what new text adds, as `choices[].delta`; empty where nothing is decided yet."""
        delta: dict[str, Any] = {}
        for event in self.parser.read(text, finish):
            self._add(event, delta)
        return delta

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns `finish_reason`: `tool_calls` where the output stopped after one, otherwise `reason`."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def body(self) -> dict[str, Any]:
        """Returns `choices[].message`, as far as it has arrived."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        message["refusal"] = None
        if self._options.dialect.reasoning is not None and self._options.include_reasoning:
            reasoning = "".join(self._reasoning) or None
            message |= dict.fromkeys(REASONING_FIELDS, reasoning)
        if self._calls:
            message["tool_calls"] = [call.written() for call in self._calls]
        return message

    def _add(self, event: ParseEvent, delta: dict[str, Any]) -> None:
        match event:
            case ContentText(text):
                self._content.append(text)
                delta["content"] = delta.get("content", "") + text
            case ReasoningText(text):
                self._reasoning.append(text)
                delta |= dict.fromkeys(REASONING_FIELDS, delta.get("reasoning", "") + text)
            case ToolCallStart(name, identity):
                custom = CustomInput() if name in self._options.custom else None
                call = _ToolCall(identity or self._new_id(), name, [], custom)
                self._calls.append(call)
                entries: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
                entries.append({"index": self._started_calls, **call.written()})
                self._started_calls += 1
            case ToolCallArguments(text):
                custom = self._calls[-1].input
                if custom is None or (text := custom.feed(text)):
                    self._extend_call(delta, text)
            case ToolCallRetraction():
                self._calls.pop()
            case ToolCallEnd():
                custom = self._calls[-1].input if self._calls else None
                if custom is not None and (rest := custom.rest()):
                    self._extend_call(delta, rest)
            case _:
                assert_never(event)

    def _extend_call(self, delta: dict[str, Any], text: str) -> None:
        """Adds to the open call, and to its entry in `delta`, which is added where there is none yet."""
        call = self._calls[-1]
        call.arguments.append(text)
        entries: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
        index, (kind, part) = self._started_calls - 1, _PARTS[call.input is not None]
        if not entries or entries[-1]["index"] != index:
            entries.append({"index": index, kind: {part: ""}})
        entries[-1][kind][part] += text


_PARTS = (("function", "arguments"), ("custom", "input"))
"""Where the text of a call is, of a function and of a custom tool."""
