"""The routes of the API: which handler answers which path, and what a client's key must allow for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from starlette.routing import Route

from services.gateway.api.anthropic.answer import error_body as anthropic_error
from services.gateway.api.audio.request import Task
from services.gateway.api.ollama.answer import AnswerShape
from services.gateway.api.ollama.answer import error_body as ollama_error
from services.gateway.api.pooling.cohere import error_body as cohere_error
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.batches.file_store import FileStore
from services.gateway.conversations.chat_store import ChatStore
from services.gateway.core.api_keys import KeyScope
from services.gateway.http.access import AccessControl
from services.gateway.http.admin.fleet import FleetEndpoints
from services.gateway.http.admin.loras import LoraEndpoints
from services.gateway.http.admin.pauses import PauseEndpoints
from services.gateway.http.admin.sleeps import SleepEndpoints
from services.gateway.http.apis.anthropic import CountTokensEndpoint, MessagesEndpoint
from services.gateway.http.apis.audio import AudioEndpoint
from services.gateway.http.apis.background import BackgroundResponses
from services.gateway.http.apis.batches import BatchEndpoints
from services.gateway.http.apis.chat_batch import ChatBatchEndpoint
from services.gateway.http.apis.cohere import CohereChatEndpoint
from services.gateway.http.apis.decisions import DecisionsEndpoint
from services.gateway.http.apis.files import FileEndpoints
from services.gateway.http.apis.invocations import InvocationsEndpoint
from services.gateway.http.apis.message_batches import MessageBatchEndpoints
from services.gateway.http.apis.ollama import OllamaEndpoint, OllamaInfo
from services.gateway.http.apis.render import RenderedKind, RenderEndpoint
from services.gateway.http.apis.responses import ResponsesEndpoint
from services.gateway.http.apis.sglang import SglangEndpoint
from services.gateway.http.apis.stored.chats import StoredChatEndpoints
from services.gateway.http.apis.stored.conversations import ConversationEndpoints
from services.gateway.http.apis.stored.responses import StoredResponseEndpoints
from services.gateway.http.apis.tokens.generate import TokensEndpoint
from services.gateway.http.apis.tokens.generative_scores import GenerativeScoresEndpoint
from services.gateway.http.bodies.body_budget import BodyLimits
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import OPENAI, ApiShape
from services.gateway.http.endpoints import VERSION, Endpoint, Handler, InfoEndpoints
from services.gateway.http.generation import GenerationEndpoint, StreamSettings
from services.gateway.http.overflow import Overflow
from services.gateway.http.pages.console import Console
from services.gateway.http.pages.documentation import Documentation
from services.gateway.http.pooling import PooledEndpoint, PooledKind
from services.gateway.overflow_provider import OverflowProvider
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from shared.models.lora_registry import LoraRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointParts:
    """What the endpoints of a gateway are made of."""

    table: RequestTable
    peers: GatewayPeers
    streams: ResumableStreams
    settings: StreamSettings
    bodies: BodyLimits
    parser: BodyParser
    access: AccessControl
    fleet: FleetEndpoints
    pauses: PauseEndpoints
    sleeps: SleepEndpoints
    batches: BatchEndpoints
    message_batches: MessageBatchEndpoints
    sounds: AudioDecoder
    """Decodes what is to be transcribed."""
    provider: OverflowProvider | None
    """Gets what cannot be served here in time."""
    lora_registry: LoraRegistry | None
    """None: no adapter can be loaded at run time."""
    background: BackgroundResponses | None
    """None: there is no database."""
    chats: ChatStore | None
    """None: there is no database."""
    file_store: FileStore | None
    """None: there is no database."""
    console: Console | None
    """None: it is switched off."""


def all_routes(parts: EndpointParts) -> list[Route]:
    """Every route of a gateway."""
    routes = _Routes(parts)
    info = InfoEndpoints(parts.table, parts.parser, parts.access, parts.peers, parts.provider)
    return [
        *routes.openai(info),
        *routes.responses(),
        *routes.conversations(),
        *routes.chats(),
        *routes.anthropic(),
        *routes.ollama(),
        *routes.cohere(),
        *routes.pooling(),
        *routes.files_and_batches(),
        *routes.process(info),
        *routes.fleet(info),
        *routes.loras(),
        *routes.pauses(),
        *routes.pages(),
    ]


ANTHROPIC = ApiShape(anthropic_error, (b"x-request-id", b"request-id"))
OLLAMA = ApiShape(lambda error, _: ollama_error(error))
COHERE = ApiShape(lambda error, _: cohere_error(error))
MODELS = OPENAI._replace(for_anthropic=ANTHROPIC)


def shape_of(path: str) -> ApiShape:
    """Returns the shape of the API that a path belongs to, served or not."""
    beginnings = {"/v1/messages": ANTHROPIC, "/api/": OLLAMA, "/v2/": COHERE, "/cohere/": COHERE}
    return next((shape for beginning, shape in beginnings.items() if path.startswith(beginning)), OPENAI)


class _Routes:
    """By whose API, or what, they belong to."""

    def __init__(self, parts: EndpointParts) -> None:
        self._parts = parts
        self._generating = (parts.table, parts.parser, parts.access, parts.streams, parts.settings)
        """What every endpoint that generates takes."""
        self._overflow = (
            None
            if parts.provider is None
            else Overflow(
                *(parts.provider, parts.table.cluster, parts.access, parts.settings.read_timeout, parts.table.clusters)
            )
        )

    def openai(self, info: InfoEndpoints) -> list[Route]:
        """Chats, completions, sounds and models; SageMaker's and SGLang's ways to the same."""
        route = self._route
        invoked = InvocationsEndpoint(self._parts.table, self._parts.parser, self._generation, self._pooled)
        return [
            route("POST", "/v1/chat/completions", self._generation("chat"), "inference", media=True),
            route("POST", "/v1/chat/completions/batch", ChatBatchEndpoint(*self._generating), "inference"),
            route("POST", "/v1/chat/completions/render", self._rendered("chat"), "inference"),
            route("POST", "/v1/completions", self._generation("completion"), "inference"),
            route("POST", "/v1/completions/render", self._rendered("completion"), "inference"),
            route("POST", "/v1/decisions", DecisionsEndpoint(*self._generating), "inference"),
            route("POST", "/v1/audio/transcriptions", self._audio("transcribe"), "inference"),
            route("POST", "/v1/audio/translations", self._audio("translate"), "inference"),
            route("POST", "/generate", SglangEndpoint(*self._generating), "inference"),
            route("POST", "/inference/v1/generate", TokensEndpoint(*self._generating), "inference"),
            route("POST", "/generative_scoring", GenerativeScoresEndpoint(*self._generating), "inference"),
            route("POST", "/invocations", invoked, "inference", media=True),
            route("POST", "/tokenize", info.tokenize, "inference"),
            route("POST", "/detokenize", info.detokenize, "inference"),
            route("GET", "/v1/models", info.models, "read-only", MODELS),
            route("GET", "/v1/models/{name:path}", info.model, "read-only", MODELS),
        ]

    def responses(self) -> list[Route]:
        """OpenAI's Responses, those that are stored among them."""
        route, background = self._route, self._parts.background
        responses = ResponsesEndpoint(*self._generating, background)
        stored = StoredResponseEndpoints(background, self._parts.settings, self._parts.table.timeout)
        return [
            route("POST", "/v1/responses", responses, "inference"),
            route("POST", "/v1/responses/input_tokens", responses.input_tokens, "inference"),
            route("GET", "/v1/responses/{id}", stored.get, "read-only"),
            route("DELETE", "/v1/responses/{id}", stored.delete, "inference"),
            route("POST", "/v1/responses/{id}/cancel", stored.cancel, "inference"),
            route("GET", "/v1/responses/{id}/input_items", stored.input_items, "read-only"),
        ]

    def conversations(self) -> list[Route]:
        """OpenAI's Conversations."""
        route, background = self._route, self._parts.background
        store = None if background is None else background.store.conversations
        conversations = ConversationEndpoints(store, self._parts.parser)
        return [
            route("POST", "/v1/conversations", conversations.create, "inference"),
            route("GET", "/v1/conversations/{id}", conversations.retrieve, "read-only"),
            route("POST", "/v1/conversations/{id}", conversations.update, "inference"),
            route("DELETE", "/v1/conversations/{id}", conversations.delete, "inference"),
            route("POST", "/v1/conversations/{id}/items", conversations.add_items, "inference"),
            route("GET", "/v1/conversations/{id}/items", conversations.items, "read-only"),
            route("GET", "/v1/conversations/{id}/items/{name}", conversations.item, "read-only"),
            route("DELETE", "/v1/conversations/{id}/items/{name}", conversations.delete_item, "inference"),
        ]

    def chats(self) -> list[Route]:
        """OpenAI's stored chats."""
        route, chats = self._route, StoredChatEndpoints(self._parts.chats)
        return [
            route("GET", "/v1/chat/completions", chats.list, "read-only"),
            route("GET", "/v1/chat/completions/{id}", chats.get, "read-only"),
            route("POST", "/v1/chat/completions/{id}", chats.update, "inference"),
            route("DELETE", "/v1/chat/completions/{id}", chats.delete, "inference"),
            route("GET", "/v1/chat/completions/{id}/messages", chats.messages, "read-only"),
        ]

    def anthropic(self) -> list[Route]:
        """Anthropic's Messages."""
        parts = self._parts
        count_tokens = CountTokensEndpoint(parts.table, parts.parser, parts.access)
        messages = MessagesEndpoint(*self._generating)
        return [
            self._route("POST", "/v1/messages", messages, "inference", ANTHROPIC, media=True),
            self._route("POST", "/v1/messages/render", self._rendered("messages"), "inference", ANTHROPIC),
            self._route("POST", "/v1/messages/count_tokens", count_tokens, "inference", ANTHROPIC),
        ]

    def ollama(self) -> list[Route]:
        """Ollama's API, as desktop clients speak it."""
        route, models = self._route, OllamaInfo(self._parts.table, VERSION)
        chat, generate = (OllamaEndpoint(shape, *self._generating) for shape in get_args(AnswerShape))
        return [
            route("POST", "/api/chat", chat, "inference", OLLAMA, media=True),
            route("POST", "/api/generate", generate, "inference", OLLAMA, media=True),
            route("POST", "/api/embed", self._pooled("ollama_embed"), "inference", OLLAMA),
            route("POST", "/api/embeddings", self._pooled("ollama_embeddings"), "inference", OLLAMA),
            route("GET", "/api/tags", models.tags, "read-only", OLLAMA),
            route("GET", "/api/ps", models.running, "read-only", OLLAMA),
            route("POST", "/api/show", models.show, "read-only", OLLAMA),
            route("GET", "/api/version", models.version, "read-only", OLLAMA),
        ]

    def cohere(self) -> list[Route]:
        """Version 2 of Cohere's chats, by vLLM's path, too; embeddings and reranking are among what reads prompts."""
        chat = CohereChatEndpoint(*self._generating)
        return [
            self._route("POST", path, chat, "inference", COHERE, media=True) for path in ("/v2/chat", "/cohere/v2/chat")
        ]

    def pooling(self) -> list[Route]:
        """What reads prompts and generates nothing."""
        kinds: dict[str, PooledKind] = {
            "/v1/embeddings": "embedding",
            "/pooling": "pooling",
            "/classify": "classification",
            "/score": "score",
            "/v1/score": "score",
            "/rerank": "rerank",
            "/v1/rerank": "rerank",
            "/v2/rerank": "cohere_rerank",
            "/v2/embed": "cohere_embed",
        }
        return [
            self._route("POST", path, self._pooled(kind), "inference", shape_of(path)) for path, kind in kinds.items()
        ]

    def files_and_batches(self) -> list[Route]:
        """OpenAI's files and batches, and Anthropic's; requests of a batch count for its key, these calls do not."""
        files, batches = FileEndpoints(self._parts.file_store, self._parts.settings.read_timeout), self._parts.batches
        handlers = (
            ("POST", "/v1/files", files.create),
            ("GET", "/v1/files", files.list),
            ("GET", "/v1/files/{name}", files.retrieve),
            ("DELETE", "/v1/files/{name}", files.delete),
            ("GET", "/v1/files/{name}/content", files.content),
            ("POST", "/v1/batches", batches.create),
            ("GET", "/v1/batches", batches.list),
            ("GET", "/v1/batches/{name}", batches.retrieve),
            ("POST", "/v1/batches/{name}/cancel", batches.cancel),
        )
        batched = self._parts.message_batches
        of_messages = (
            ("POST", "/v1/messages/batches", batched.create),
            ("GET", "/v1/messages/batches", batched.list),
            ("GET", "/v1/messages/batches/{name}", batched.retrieve),
            ("DELETE", "/v1/messages/batches/{name}", batched.delete),
            ("POST", "/v1/messages/batches/{name}/cancel", batched.cancel),
            ("GET", "/v1/messages/batches/{name}/results", batched.results),
        )
        return [
            *(self._route(*handler, "inference", counted=False) for handler in handlers),
            *(self._route(*handler, "inference", ANTHROPIC, counted=False) for handler in of_messages),
        ]

    def process(self, info: InfoEndpoints) -> list[Route]:
        """Of this gateway: whether it lives, what it measures."""
        route = self._route
        return [
            route("GET", "/version", info.version, "read-only"),
            route("GET", "/load", info.load, "read-only"),
            route("GET", "/health", info.health, None),
            route("GET", "/ping", info.health, None),
            route("POST", "/ping", info.health, None),
            route("GET", "/live", info.live, None),
            route("GET", "/ready", info.ready, None),
            route("GET", "/metrics", info.metrics, None),
        ]

    def fleet(self, info: InfoEndpoints) -> list[Route]:
        """What an operator does to engines, under vLLM's and SGLang's names where they have them."""
        route, fleet = self._route, self._parts.fleet
        return [
            route("GET", "/admin/keys", info.keys, "admin"),
            route("POST", "/admin/drain", fleet.drain, "admin"),
            route("POST", "/admin/undrain", fleet.undrain, "admin"),
            route("POST", "/admin/scale", fleet.scale_pool, "admin"),
            route("POST", "/admin/strike", fleet.strike, "admin"),
            route("POST", "/reset_prefix_cache", fleet.reset_prefix_cache, "admin"),
            route("POST", "/flush_cache", fleet.reset_prefix_cache, "admin"),
            route("POST", "/reset_mm_cache", fleet.reset_encoder_cache, "admin"),
            route("POST", "/reset_encoder_cache", fleet.reset_encoder_cache, "admin"),
            route("GET", "/tokenizer_info", fleet.tokenizer_info, "admin"),
            route("POST", "/abort_requests", fleet.abort_requests, "admin"),
            route("POST", "/inference/v1/abort_requests", fleet.abort_named, "admin"),
            route("POST", "/scale_elastic_ep", fleet.scale, "admin"),
            route("POST", "/is_scaling_elastic_ep", fleet.is_scaling, "admin"),
            route("GET", "/server_info", fleet.server_info, "admin"),
        ]

    def loras(self) -> list[Route]:
        """Adapters at run time, under vLLM's names."""
        loras = LoraEndpoints(self._parts.table.cluster, self._parts.lora_registry)
        return [
            self._route("POST", "/v1/load_lora_adapter", loras.load, "admin"),
            self._route("POST", "/v1/unload_lora_adapter", loras.unload, "admin"),
        ]

    def pauses(self) -> list[Route]:
        """Engines that pause or sleep, under vLLM's and SGLang's names."""
        route, pauses, sleeps = self._route, self._parts.pauses, self._parts.sleeps
        return [
            route("POST", "/pause", pauses.pause, "admin"),
            route("POST", "/resume", pauses.resume, "admin"),
            route("GET", "/is_paused", pauses.is_paused, "admin"),
            route("POST", "/pause_generation", pauses.pause_generation, "admin"),
            route("POST", "/continue_generation", pauses.continue_generation, "admin"),
            route("POST", "/sleep", sleeps.sleep, "admin"),
            route("POST", "/wake_up", sleeps.wake_up, "admin"),
            route("GET", "/is_sleeping", sleeps.is_sleeping, "admin"),
            route("POST", "/release_memory_occupation", sleeps.release_memory, "admin"),
            route("POST", "/resume_memory_occupation", sleeps.resume_memory, "admin"),
        ]

    def pages(self) -> list[Route]:
        """The documentation of the API, and the console."""
        route, console, documentation = self._route, self._parts.console, Documentation()
        pages = [
            route("GET", "/openapi.json", documentation.openapi, None),
            route("GET", "/docs", documentation.page, None),
            route("GET", "/docs/{name}", documentation.asset, None),
        ]
        if console is None:
            return pages
        return [
            *pages,
            route("GET", "/console", console.page, None),
            route("GET", "/console/events", console.events, "admin"),
            route("GET", "/console/prefixes", self._parts.fleet.prefixes, "admin"),
            route("GET", "/console/requests/{request}", console.request, "admin"),
            route("GET", "/console/engines/{engine}", console.engine, "admin"),
            route("GET", "/console/{name}", console.asset, None),
        ]

    def _route(
        self,
        method: str,
        path: str,
        handler: Handler,
        scope: KeyScope | None,
        shape: ApiShape = OPENAI,
        *,
        counted: bool = True,
        media: bool = False,
    ) -> Route:
        """See `Endpoint`. `media`: bodies may have images, videos and sounds in them, where a model takes any."""
        parts = self._parts
        takes_media = parts.table.cluster.takes_media if media else lambda: False
        endpoint = Endpoint(
            *(handler, path, scope, parts.access, parts.bodies, shape), counted=counted, takes_media=takes_media
        )
        return Route(path, endpoint, methods=[method])

    def _rendered(self, kind: RenderedKind) -> Handler:
        return RenderEndpoint(self._parts.table, kind, self._parts.parser, self._parts.access)

    def _generation(self, kind: Literal["chat", "completion"]) -> Handler:
        parts = self._parts
        return GenerationEndpoint(
            *(parts.table, kind, parts.parser, parts.access, parts.streams, parts.settings, self._overflow, parts.chats)
        )

    def _audio(self, task: Task) -> Handler:
        parts = self._parts
        return AudioEndpoint(task, parts.table, parts.access, parts.settings, parts.sounds)

    def _pooled(self, kind: PooledKind) -> Handler:
        parts = self._parts
        return PooledEndpoint(kind, parts.table, parts.parser, parts.access, parts.settings.read_timeout)
