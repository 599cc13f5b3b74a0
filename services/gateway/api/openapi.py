"""`GET /openapi.json`: the API as an OpenAPI 3.1 page, made from the types that bodies are decoded to."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.admin.loras import LoadLoraRequest, UnloadLoraRequest
from services.gateway.api.admin.operations import (
    AbortFields,
    ContinueFields,
    DrainFields,
    MemoryFields,
    PauseFields,
    ScaleFields,
    ScalePoolFields,
    StrikeFields,
    UndrainFields,
)
from services.gateway.api.anthropic.request import MessagesFields, MessagesTokensFields
from services.gateway.api.audio.request import TranscriptionFields, TranslationFields
from services.gateway.api.batches.batch import BatchFields
from services.gateway.api.batches.files import UploadFields
from services.gateway.api.batches.message_batch import MessageBatchFields
from services.gateway.api.chat import ChatFields
from services.gateway.api.chat_batch import ChatBatchFields
from services.gateway.api.cohere.request import CohereChatFields
from services.gateway.api.completions import CompletionFields
from services.gateway.api.decisions.request import DecisionFields
from services.gateway.api.fields.generation import CommonFields
from services.gateway.api.fields.ranges import RANGES, AllowedRange
from services.gateway.api.fields.stored_chat import StoredChatUpdateFields
from services.gateway.api.ollama.embeddings import OllamaEmbeddingsFields, OllamaEmbedFields
from services.gateway.api.ollama.request import OllamaChatFields, OllamaGenerateFields, ShowFields
from services.gateway.api.pooling.classification import ClassificationFields
from services.gateway.api.pooling.cohere import CohereEmbedFields
from services.gateway.api.pooling.embeddings import EmbeddingFields, PoolingFields
from services.gateway.api.pooling.scores import RerankFields, ScoreFields
from services.gateway.api.prompts import DetokenizeFields, InvocationFields, TokenizeFields
from services.gateway.api.responses.conversation import (
    ConversationFields,
    ConversationItemsFields,
    ConversationUpdateFields,
)
from services.gateway.api.responses.request import ResponsesFields
from services.gateway.api.sglang.request import SglangFields
from services.gateway.api.tokens.generative_scores import GenerativeScoreFields
from services.gateway.api.tokens.request import TokensFields

SCHEMAS = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error"},
        "request_id": {"type": ["string", "null"]},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        },
    },
}


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    """What its JSON body is decoded to."""
    content_types: tuple[str, ...] = ("application/json",)
    """Of a successful response."""
    with_key: bool = True
    """Whether it needs an API key where there are any."""
    resumable: bool = False
    """Whether its streams may be resumed."""
    form: bool = False
    """Whether its body is a form in place of JSON."""
    parameters: tuple[str, ...] = ()
    """Behind its path."""


GENERATED = ("application/json", "text/event-stream")
HEARD = ("application/json", "text/plain", "text/vtt", "text/event-stream")
LINES = ("application/x-ndjson", "application/json")
OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "Generate the next message of a chat.", ChatFields, GENERATED, resumable=True
    ),
    Operation("POST", "/v1/chat/completions/batch", "Answer several chats with a choice each.", ChatBatchFields),
    Operation("POST", "/v1/chat/completions/render", "A chat's prompt and sampling; nothing is generated.", ChatFields),
    Operation(
        "GET", "/v1/chat/completions", "Chats that were stored.", parameters=("after", "limit", "model", "order")
    ),
    Operation("GET", "/v1/chat/completions/{id}", "One of them."),
    Operation("POST", "/v1/chat/completions/{id}", "Change its metadata.", StoredChatUpdateFields),
    Operation("DELETE", "/v1/chat/completions/{id}", "Forget it."),
    Operation(
        "GET", "/v1/chat/completions/{id}/messages", "What it was asked.", parameters=("after", "limit", "order")
    ),
    Operation("POST", "/v1/completions", "Continue texts or token ids.", CompletionFields, GENERATED, resumable=True),
    Operation("POST", "/v1/completions/render", "The same for texts and token ids.", CompletionFields),
    Operation("POST", "/v1/decisions", "How likely the answers of questions about an input are.", DecisionFields),
    Operation(
        "POST",
        "/v1/audio/transcriptions",
        "What is said in a file.",
        TranscriptionFields,
        HEARD,
        form=True,
    ),
    Operation("POST", "/v1/audio/translations", "The same in English.", TranslationFields, HEARD, form=True),
    Operation("POST", "/v1/responses", "The same as OpenAI's Responses API has it.", ResponsesFields, GENERATED),
    Operation("POST", "/v1/responses/input_tokens", "How many tokens such a prompt has.", ResponsesFields),
    Operation("GET", "/v1/responses/{id}", "A response that was stored.", None, GENERATED),
    Operation("DELETE", "/v1/responses/{id}", "Forget a response."),
    Operation("POST", "/v1/responses/{id}/cancel", "End a response that runs in the background."),
    Operation("GET", "/v1/responses/{id}/input_items", "All items that a response went on from."),
    Operation("POST", "/v1/conversations", "Begin a conversation that responses go on from.", ConversationFields),
    Operation("GET", "/v1/conversations/{id}", "One of them."),
    Operation("POST", "/v1/conversations/{id}", "Change its metadata.", ConversationUpdateFields),
    Operation("DELETE", "/v1/conversations/{id}", "Forget it, with its items."),
    Operation("POST", "/v1/conversations/{id}/items", "Add items to it.", ConversationItemsFields),
    Operation("GET", "/v1/conversations/{id}/items", "Its items.", parameters=("after", "limit", "order")),
    Operation("GET", "/v1/conversations/{id}/items/{name}", "One of them."),
    Operation("DELETE", "/v1/conversations/{id}/items/{name}", "Forget one of them."),
    Operation("POST", "/v1/messages", "The same as Anthropic's API has it.", MessagesFields, GENERATED),
    Operation("POST", "/v1/messages/render", "Such a prompt and sampling; nothing is generated.", MessagesFields),
    Operation("POST", "/v1/messages/count_tokens", "How many tokens such a prompt has.", MessagesTokensFields),
    Operation("POST", "/v1/messages/batches", "Answer such requests, when there is time.", MessageBatchFields),
    Operation("GET", "/v1/messages/batches", "The key's.", parameters=("after_id", "before_id", "limit")),
    Operation("GET", "/v1/messages/batches/{name}", "One of them."),
    Operation("DELETE", "/v1/messages/batches/{name}", "Remove it, with its results."),
    Operation("POST", "/v1/messages/batches/{name}/cancel", "Answer no more of its requests."),
    Operation("GET", "/v1/messages/batches/{name}/results", "Its results.", None, ("application/x-jsonl",)),
    Operation("POST", "/api/chat", "The same as Ollama's API has it.", OllamaChatFields, LINES),
    Operation("POST", "/api/generate", "Go on from one prompt, as Ollama's API has it.", OllamaGenerateFields, LINES),
    Operation("POST", "/api/embed", "Vectors of texts, as Ollama's API has them.", OllamaEmbedFields),
    Operation("POST", "/api/embeddings", "A vector of one text, in its older form.", OllamaEmbeddingsFields),
    Operation("GET", "/api/tags", "All models, as Ollama's API lists them."),
    Operation("GET", "/api/ps", "The same, as models that are loaded."),
    Operation("POST", "/api/show", "One of them.", ShowFields),
    Operation("GET", "/api/version", "The version of the server, for Ollama's clients."),
    Operation("POST", "/generate", "Continue texts or token ids, as SGLang's API has it.", SglangFields, GENERATED),
    Operation(
        "POST", "/inference/v1/generate", "Token ids in, token ids out, as vLLM has it.", TokensFields, GENERATED
    ),
    Operation(
        "POST", "/generative_scoring", "How likely tokens are behind items, as vLLM has it.", GenerativeScoreFields
    ),
    Operation("POST", "/v1/embeddings", "Vectors of texts or token ids.", EmbeddingFields),
    Operation("POST", "/pooling", "Vectors or probabilities, whichever the model makes.", PoolingFields),
    Operation("POST", "/classify", "The labels of texts or token ids.", ClassificationFields),
    Operation("POST", "/score", "How well texts go together.", ScoreFields),
    Operation("POST", "/v1/score", "The same as /score.", ScoreFields),
    Operation("POST", "/rerank", "Documents in the order of their relevance.", RerankFields),
    Operation("POST", "/v1/rerank", "The same as /rerank.", RerankFields),
    Operation("POST", "/v2/rerank", "The same as /rerank, as version 2 of Cohere's API has it.", RerankFields),
    Operation("POST", "/v2/embed", "Vectors of texts, as version 2 of Cohere's API has them.", CohereEmbedFields),
    Operation("POST", "/v2/chat", "A chat, as version 2 of Cohere's API has it.", CohereChatFields, GENERATED),
    Operation("POST", "/cohere/v2/chat", "The same, by vLLM's path.", CohereChatFields, GENERATED),
    Operation("POST", "/v1/files", "Upload the requests of a batch.", UploadFields, form=True),
    Operation("GET", "/v1/files", "The key's files.", parameters=("after", "limit", "order", "purpose")),
    Operation("GET", "/v1/files/{name}", "One of them."),
    Operation("DELETE", "/v1/files/{name}", "Remove one of them."),
    Operation("GET", "/v1/files/{name}/content", "What is in one of them.", None, ("application/octet-stream",)),
    Operation("POST", "/v1/batches", "Answer the requests in a file, when there is time.", BatchFields),
    Operation("GET", "/v1/batches", "The key's batches.", parameters=("after", "limit")),
    Operation("GET", "/v1/batches/{name}", "One of them."),
    Operation("POST", "/v1/batches/{name}/cancel", "Answer no more of its requests."),
    Operation("POST", "/tokenize", "The token ids of a text or of messages.", TokenizeFields),
    Operation("POST", "/detokenize", "The text of token ids.", DetokenizeFields),
    Operation("POST", "/invocations", "The endpoint that the body's fields belong to.", InvocationFields, GENERATED),
    Operation(
        "GET", "/v1/models", "All models that are served.", parameters=("after_id", "before_id", "lifecycle", "limit")
    ),
    Operation("GET", "/v1/models/{name}", "One model."),
    Operation("GET", "/version", "The version of the server."),
    Operation("GET", "/load", "How many responses are open."),
    Operation("GET", "/openapi.json", "This page.", with_key=False),
    Operation("GET", "/admin/keys", "The API keys by name; needs the scope admin."),
    Operation("POST", "/admin/drain", "An instance takes no more requests; needs the scope admin.", DrainFields),
    Operation("POST", "/admin/undrain", "It takes requests again; needs the scope admin.", UndrainFields),
    Operation("POST", "/admin/scale", "So many instances; needs the scope admin.", ScalePoolFields),
    Operation("POST", "/admin/strike", "A process is killed or paused; needs the scope admin.", StrikeFields),
    Operation("POST", "/v1/load_lora_adapter", "Serve one more adapter; needs the scope admin.", LoadLoraRequest),
    Operation(
        "POST", "/v1/unload_lora_adapter", "Serve an adapter no longer; needs the scope admin.", UnloadLoraRequest
    ),
    Operation("POST", "/reset_prefix_cache", "Forget what engines have cached; needs the scope admin."),
    Operation("POST", "/flush_cache", "The same as /reset_prefix_cache."),
    Operation("POST", "/reset_mm_cache", "Forget what encoders have cached; needs the scope admin."),
    Operation("POST", "/reset_encoder_cache", "The same as /reset_mm_cache."),
    Operation("GET", "/tokenizer_info", "What a tokenizer's files say; needs the scope admin.", parameters=("model",)),
    Operation("POST", "/abort_requests", "End responses, or all; needs the scope admin.", AbortFields),
    Operation("POST", "/inference/v1/abort_requests", "The same as /abort_requests, of named ones.", AbortFields),
    Operation("POST", "/scale_elastic_ep", "So many engines; needs the scope admin.", ScaleFields),
    Operation("POST", "/is_scaling_elastic_ep", "Whether that is under way; needs the scope admin."),
    Operation(
        "POST",
        "/pause",
        "Have engines rest; needs the scope admin.",
        parameters=("mode", "wait_for_inflight_requests", "clear_cache"),
    ),
    Operation("POST", "/resume", "Have them go on; needs the scope admin."),
    Operation(
        "POST",
        "/sleep",
        "Have engines give up their memory; needs the scope admin.",
        parameters=("level", "mode"),
    ),
    Operation("POST", "/wake_up", "Have them serve again; needs the scope admin.", parameters=("tags",)),
    Operation("POST", "/release_memory_occupation", "The same as /sleep, as SGLang has it.", MemoryFields),
    Operation("POST", "/resume_memory_occupation", "The same as /wake_up, as SGLang has it.", MemoryFields),
    Operation("GET", "/is_sleeping", "Whether they sleep; needs the scope admin."),
    Operation("GET", "/is_paused", "Whether they rest; needs the scope admin."),
    Operation("POST", "/pause_generation", "The same as /pause, as SGLang has it.", PauseFields),
    Operation("POST", "/continue_generation", "The same as /resume, as SGLang has it.", ContinueFields),
    Operation("GET", "/server_info", "Models and engines; needs the scope admin."),
    Operation("GET", "/docs", "This page, for people.", None, ("text/html",), with_key=False),
    Operation("GET", "/console", "A page that shows the stack, live.", None, ("text/html",), with_key=False),
    Operation("GET", "/health", "Whether requests can be served.", with_key=False),
    Operation("GET", "/ping", "The same as /health.", with_key=False),
    Operation("POST", "/ping", "The same as /health.", with_key=False),
    Operation("GET", "/live", "Whether the process answers.", with_key=False),
    Operation("GET", "/ready", "Whether new requests are taken.", with_key=False, parameters=("model",)),
    Operation("GET", "/metrics", "Metrics for Prometheus.", None, ("text/plain",), with_key=False),
)


@cache
def openapi_page(version: str) -> bytes:
    """Returns the page as JSON; `version` is that of the server."""
    return msgspec.json.encode(_page(version))


def _page(version: str) -> dict[str, Any]:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    for body in bodies:
        if issubclass(body, CommonFields):
            _add_ranges(
                schemas[body.__name__]["properties"], unchecked="max_tokens" if body is CompletionFields else ""
            )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _description(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {
            "schemas": {
                **schemas,
                "Error": ERROR,
                "OllamaError": OLLAMA_ERROR,
                "AnthropicError": ANTHROPIC_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _error_of(path: str) -> str:
    """The schema of its errors: each API has its own shape."""
    if path.startswith("/api/"):
        return "OllamaError"
    return "AnthropicError" if path.startswith("/v1/messages") else "Error"


def _description(operation: Operation) -> dict[str, Any]:
    succeeded = {"description": "OK", "content": {kind: {} for kind in operation.content_types}}
    error = {"$ref": SCHEMAS + _error_of(operation.path)}
    failed = {"description": "Error", "content": {"application/json": {"schema": error}}}
    description: dict[str, Any] = {"summary": operation.summary, "responses": {"200": succeeded, "default": failed}}
    if operation.with_key:
        description["security"] = [{}, {"key": []}]
    for name in ("id", "name"):
        if f"{{{name}}}" in operation.path:
            within = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            description.setdefault("parameters", []).append(within)
    if operation.resumable:
        resumed = {"name": "Last-Event-ID", "in": "header", "required": False, "schema": {"type": "string"}}
        description["parameters"] = [resumed]
    if operation.body is not None:
        schema = {"$ref": SCHEMAS + operation.body.__name__}
        kind = "multipart/form-data" if operation.form else "application/json"
        description["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    for name in operation.parameters:
        parameter = {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        description.setdefault("parameters", []).append(parameter)
    return description


def _add_ranges(properties: dict[str, Any], unchecked: str) -> None:
    """Adds the bounds that `check_common_fields` checks after decoding."""
    for name, allowed in RANGES.items():
        if name == unchecked:
            continue
        for choice in properties.get(name, {}).get("anyOf", ()):
            if choice["type"] != "null":
                choice |= _bounds(allowed)


def _bounds(allowed: AllowedRange) -> dict[str, float]:
    bounds: dict[str, float] = {}
    if allowed.low is not None:
        bounds["minimum" if allowed.low_allowed else "exclusiveMinimum"] = allowed.low
    if allowed.high is not None:
        bounds["maximum"] = allowed.high
    return bounds
