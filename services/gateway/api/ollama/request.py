"""`POST /api/chat` and `/api/generate`: reads the body as a chat, or as a completion where the prompt is raw.

Unknown fields are refused by name. Of `options` those that would change the text and are not supported are refused,
too; those that are about the machine (threads, batches, what is on a GPU) are the operator's here, and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.completions import CompletionFields, completion_request
from services.gateway.api.embeds.images import foreign_image
from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, unsupported
from services.gateway.api.fields.generation import CommonFields
from services.gateway.api.generation import (
    GenerationRequest,
    RequestLimits,
    check_generates,
    choose_alias,
    choose_model,
)
from services.gateway.api.structured_outputs import JsonSchemaFields, ResponseFormat
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard

LATEST = ":latest"
"""What Ollama's clients append to a name without a tag."""
EFFORTS = ("low", "medium", "high")

DialectOf = Callable[[ModelName], OutputDialect] | None


class OptionFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Ollama's `options`."""

    num_predict: int | None = None
    num_ctx: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    # Allowed with the value only that changes nothing.
    repeat_last_n: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    # About the machine.
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON fields of both endpoints."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OptionFields | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatFields(OllamaFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateFields(OllamaFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class ShowFields(Struct, kw_only=True):
    """The JSON of `POST /api/show`; `name` is the field's earlier name."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class ModelNameOnly(Struct, frozen=True):
    """A request without a prompt: the client wants the model to be loaded, which it is."""

    name: ModelName
    also: tuple[ModelName, ...] = ()
    """The model's own name, where it was called by an alias."""

    @property
    def names(self) -> tuple[ModelName, ...]:
        """Of these an API key must allow one."""
        return (self.name, *self.also)


_chat_decoder = msgspec.json.Decoder(OllamaChatFields)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateFields)
_show_decoder = msgspec.json.Decoder(ShowFields)


def read_ollama_chat(
    body: bytes, cards: list[ModelCard], limits: RequestLimits, dialect_of: DialectOf
) -> GenerationRequest | ModelNameOnly:
    """Reads and checks a body of `/api/chat`; see `read_chat`. Raises RequestError."""
    fields = decode_body(body, _chat_decoder)
    card = check_generates(named_card(fields, cards))
    if not fields.messages:
        return _loaded(fields, card)
    messages = _messages(fields.messages)
    return _chat(fields, messages, fields.tools, card, limits, dialect_of)


def read_ollama_generate(
    body: bytes, cards: list[ModelCard], limits: RequestLimits, dialect_of: DialectOf
) -> GenerationRequest | ModelNameOnly:
    """Reads and checks a body of `/api/generate`. Raises RequestError."""
    fields = decode_body(body, _generate_decoder)
    card = check_generates(named_card(fields, cards))
    for name, what in (
        ("template", "a template of the client's"),
        ("context", "a context from an earlier answer"),
    ):
        if getattr(fields, name):
            raise unsupported(name, what)
    if not (fields.prompt or fields.suffix):
        return _loaded(fields, card)
    if not (fields.raw or fields.suffix):
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        prompt = {"role": "user", "content": _with_images(fields.prompt, fields.images, "images")}
        return _chat(fields, [*system, prompt], None, card, limits, dialect_of)
    for name in ("images", "system", "think", *(["raw"] if fields.suffix else [])):
        if getattr(fields, name):
            raise invalid(name, f"not allowed together with {'suffix' if fields.suffix else 'raw'}")
    completion = CompletionFields(
        prompt=fields.prompt, suffix=fields.suffix, max_tokens=None, response_format=_format(fields)
    )
    _fill(completion, fields, card)
    if fields.logprobs:
        completion.logprobs = fields.top_logprobs or 0
    try:
        return replace(completion_request(completion, [card], limits, default_max_tokens=None), kind="ollama")
    except RequestError as error:
        raise _in_their_words(error) from None


def read_show(body: bytes) -> str:
    """Returns the model that a body of `/api/show` names. Raises RequestError."""
    fields = decode_body(body, _show_decoder)
    return fields.model or fields.name or ""


def _chat(
    fields: OllamaFields,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    card: ModelCard,
    limits: RequestLimits,
    dialect_of: DialectOf,
) -> GenerationRequest:
    chat = ChatFields(messages=messages, tools=tools or None, response_format=_format(fields))
    _fill(chat, fields, card)
    chat.logprobs, chat.top_logprobs = fields.logprobs, fields.top_logprobs if fields.logprobs else None
    think = fields.think
    if think is not None:
        if isinstance(think, str) and think not in EFFORTS:
            raise not_allowed("think", think, "true, false, 'low', 'medium' or 'high'")
        if think and dialect_of is not None and dialect_of(card.name).reasoning is None:
            raise invalid("think", f"{card.name} writes no reasoning, or none in a format that is known here")
        chat.chat_template_kwargs = {"enable_thinking": bool(think)}
        chat.include_reasoning = bool(think)
        if isinstance(think, str):
            chat.reasoning_effort = think
    try:
        return chat_request(chat, [card], limits, dialect_of, kind="ollama")
    except RequestError as error:
        raise _in_their_words(error) from None


class _Naming(Protocol):
    """Fields that name a model."""

    model: str


def named_card(fields: _Naming, cards: list[ModelCard]) -> ModelCard:
    """Returns the model that is named, from then on without the tag that Ollama's clients append. Raises
    RequestError."""
    try:
        return choose_model(fields.model, cards)
    except RequestError as error:
        if error.status != 404 or not fields.model.endswith(LATEST):
            raise
    fields.model = fields.model.removesuffix(LATEST)
    return choose_model(fields.model, cards)


def check_context(tokens: int | None, card: ModelCard) -> None:
    """Raises RequestError 400 where the option `num_ctx` asks for a longer context than the model has."""
    if tokens is not None and tokens > card.max_model_len:
        raise not_allowed("options.num_ctx", tokens, f"{card.name} has {card.max_model_len} tokens")


def _loaded(fields: OllamaFields, card: ModelCard) -> ModelNameOnly:
    if fields.keep_alive in (0, "0", "0s"):
        raise unsupported("keep_alive", "unloading a model")
    if (alias := choose_alias(fields.model, card)) is not None:
        return ModelNameOnly(alias, (card.name,))
    return ModelNameOnly(ModelName(fields.model) if card.lora(ModelName(fields.model)) else card.name)


def _fill(target: CommonFields, fields: OllamaFields, card: ModelCard) -> None:
    """Sets what both kinds have in common. Raises RequestError."""
    options = fields.options or OptionFields()
    for name, neutral in (
        ("tfs_z", 1.0),
        ("typical_p", 1.0),
        ("mirostat", 0),
        ("penalize_newline", True),
        ("repeat_last_n", -1),
    ):
        given = getattr(options, name)
        if name == "repeat_last_n" and options.repeat_penalty in (None, 1.0):
            continue  # nothing is penalised
        if given is not None and given != neutral:
            raise not_allowed(f"options.{name}", given, f"only {json.dumps(neutral)}, which changes nothing, is")
    check_context(options.num_ctx, card)
    if options.num_predict is not None and options.num_predict < 1 and options.num_predict not in (-1, -2):
        raise not_allowed("options.num_predict", options.num_predict, "at least 1, or -1 for no limit")
    target.model = fields.model
    target.max_tokens = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    target.stream = fields.stream is not False
    target.seed, target.stop = options.seed, options.stop
    target.temperature, target.top_p, target.min_p = options.temperature, options.top_p, options.min_p
    target.top_k = options.top_k
    target.repetition_penalty = options.repeat_penalty
    target.presence_penalty, target.frequency_penalty = options.presence_penalty, options.frequency_penalty


def _format(fields: OllamaFields) -> ResponseFormat | None:
    match fields.format:
        case None | "":
            return None
        case "json":
            return ResponseFormat("json_object")
        case dict(schema):
            return ResponseFormat("json_schema", JsonSchemaFields("answer", schema))
        case _:
            raise not_allowed("format", fields.format, "'json' or a JSON schema is")


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them: calls get ids there, and results refer to them. Here results follow in the
    order of the calls."""
    messages: list[dict[str, Any]] = []
    ids: list[str] = []
    calls = 0
    for i, message in enumerate(given):
        path = f"messages[{i}]"
        content = _with_images(message.get("content") or "", message.get("images"), f"{path}.images")
        made: dict[str, Any] = {"role": message.get("role"), "content": content}
        if thinking := message.get("thinking"):
            made["reasoning_content"] = thinking
        if message.get("role") == "tool":
            made["tool_call_id"] = ids.pop(0) if ids else f"call{calls:05d}"
            if name := message.get("tool_name"):
                made["name"] = name
        elif asked := message.get("tool_calls"):
            made["tool_calls"] = []
            for k, call in enumerate(asked if isinstance(asked, list) else [asked]):
                calls += 1
                ids.append(f"call{calls:05d}")  # nine characters, as Mistral's templates want
                made["tool_calls"].append(_call(call, ids[-1], f"{path}.tool_calls[{k}]"))
        messages.append(made)
    return messages


def _with_images(text: Any, images: Any, field: str) -> Any:
    """What a message says, behind its images, as Ollama's own templates have it."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise not_allowed(field, images, "a list of images' files in base64 is")
    parts = [foreign_image(f"{field}[{i}]", encoded=image) for i, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(call: Any, identity: str, path: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": dict(arguments)}}:
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            return {"id": identity, "type": "function", "function": function}
        case _:
            raise not_allowed(path, call, '{"function": {"name": "…", "arguments": {…}}} is')


_THEIRS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("seed", "stop", "temperature", "top_p", "top_k", "min_p")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
    "response_format.json_schema.schema": "format",
    "response_format": "format",
}


def _in_their_words(error: RequestError) -> RequestError:
    """The error with the names that fields have here."""
    theirs = _THEIRS.get(error.param or "")
    if theirs is None or error.param is None:
        return error
    message = error.message.replace(error.param, theirs, 1)
    return RequestError(error.status, message, param=theirs, code=error.code, retry_after=error.retry_after)
