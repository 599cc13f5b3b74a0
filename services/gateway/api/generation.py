"""A generation request: the fields that chats and completions share, and which sequences and what answer they mean.

The allowed ranges are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, abbreviated, invalid, unsupported
from services.gateway.api.fields.generation import CommonFields
from services.gateway.api.fields.ranges import INT64
from services.gateway.api.fields.stored_chat import ChatToStore
from services.gateway.api.media.source import MediaSource
from services.gateway.api.structured_outputs import OutputGrammar
from services.gateway.api.vllm.kv_transfer import NO_TRANSFER, KvTransfer
from services.gateway.core.beam_search import EarlyStopping
from services.gateway.parsing.output_parser import ParserOptions
from shared.ids import ModelName
from shared.messages.gateway import MAX_STREAM_CHOICES
from shared.messages.generation import PoolingOptions, SamplingOptions, StopConditions
from shared.messages.model_card import LoraCard, ModelCard, PooledKind
from shared.messages.tokenizer import Prompt, TextPrompt, TokenPrompt, TruncationSide

SEED_MASK = INT64 - 1


WholeKind = Literal["embedding", "pooling", "classification", "score", "generative_score", "rerank", "decision"]
"""Of those that have nothing to answer with before all of it is there: vectors, scores."""
GenerationKind = Literal[
    WholeKind,
    "chat",
    "cohere",
    "completion",
    "messages",
    "ollama",
    "responses",
    "sglang",
    "tokens",
    "transcription",
]
"""The family of endpoints that a request comes from, as metrics and logs name it."""
PROMPT_FIELDS = {
    **dict.fromkeys(("chat", "cohere", "messages", "ollama"), "messages"),
    "sglang": "text",
    "tokens": "token_ids",
    **dict.fromkeys(("responses", "decision"), "input"),
    "completion": "prompt",
    "transcription": "prompt",
}
"""The client's names of what is tokenized."""
WHOLE_KINDS: frozenset[GenerationKind] = frozenset(get_args(WholeKind))


class RequestLimits(Struct, frozen=True, kw_only=True):
    """The most that a single request may ask for."""

    max_choices: int = 128
    """Sequences: prompts × n."""
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_logprob_token_ids: int = 128
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_beams: int = 16
    max_embeddings: int = 2048
    """Inputs of a request for embeddings or labels, texts that one is compared with: OpenAI's limit."""
    allow_request_template: bool = False
    allow_prefix_caching: bool = True
    max_body: int = 16 * 2**20
    """Bytes of a body without its images, videos and sounds."""
    max_images: int = 16
    max_videos: int = 4
    max_sounds: int = 4
    image_hosts: tuple[str, ...] = ()
    """Hosts that images and videos may be fetched from: `HOST` or `HOST:PORT`."""
    efforts: Mapping[str, str] = {}
    """What values of `reasoning_effort` are to chat templates; those that are not named are themselves."""
    force_usage: bool = False
    """Whether every chunk of every stream has the usage, whatever it asks for."""
    stream_interval: int = 1
    """Of requests that do not say theirs."""


class StreamOptions(NamedTuple):
    """OpenAI's `stream_options`: usage in a last chunk, or in every chunk; and whether the stream can be resumed."""

    include_usage: bool
    continuous_usage: bool
    resumable: bool = False


class BeamSearchParams(NamedTuple):
    """How to rank hypotheses and when to stop. The beam width is the request's `n`."""

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class ResponseOptions(NamedTuple):
    """What the answer contains beside its text."""

    logprobs: bool = False
    prompt_logprobs: int | None = None
    """How many most likely tokens to report at each position of the prompt; None: nothing about the prompt."""
    echo_logprobs: int | None = None
    """The same, but placed before the output's log-probabilities, as the echoed prompt is before the text."""
    prompt_text: bool = False
    """The text of each prompt, as the chat template rendered it."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Name tokens in log-probabilities as `token_id:…`."""
    metrics: bool = False
    """The times that the request took."""
    weight_versions: bool = False
    """Which weights each choice's tokens came from."""
    role: str = "assistant"
    """Who says what a chat generates."""


TEXT_ONLY = ResponseOptions()


class ChoiceRequest(NamedTuple):
    """One sequence to generate."""

    position: int
    """Its index in the answer's choices."""
    prompt: Prompt
    sampling: SamplingOptions


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A checked request for a chat, a completion, or vectors of prompts."""

    kind: GenerationKind
    model: ModelCard
    prompts: tuple[Prompt, ...]
    n: int
    """Choices for each prompt."""
    seed: int | None
    """The client's seed; None: one is drawn for each choice."""
    sampling: SamplingOptions
    stopping: StopConditions
    stream: StreamOptions | None
    """None: one body at the end."""
    echo: bool = False
    echoed_messages: tuple[str, ...] = ()
    """What a chat's answer begins with: the last message of each prompt. Empty: of none."""
    only_echo: bool = False
    """The client wants no output. One token is generated nevertheless, as an engine cannot do with less."""
    response_options: ResponseOptions = TEXT_ONLY
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "left"
    beam_search: BeamSearchParams | None = None
    """The choices of a prompt are the best hypotheses of a beam search instead of samples."""
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    key: str = ""
    """Name of the API key, where requests of others may compete with it."""
    weight: float = 1.0
    """The key's share."""
    prefix_caching: bool = True
    """Whether blocks of its prompts may come from a cache and go into one."""
    output_grammar: OutputGrammar | None = None
    """What the output must match."""
    parser_options: ParserOptions | None = None
    """How to parse a chat's output; None: it is nothing but text."""
    pooling: PoolingOptions | None = None
    """How each prompt becomes a vector; None: text is generated."""
    lora: LoraCard | None = None
    """The adapter that the client named in the model's place; None: it named the model."""
    alias: ModelName | None = None
    """By which of its further names the client called the model; None: by none."""
    request_id: str | None = None
    """What the client calls the request; it is part of the answer's `id`."""
    media: tuple[MediaSource, ...] = ()
    """Images and videos of its one prompt, a chat, which has parts without rows in their places; empty once these are
    filled in."""
    decoder_prompt: TextPrompt | TokenPrompt | None = None
    """What each answer of a model with an encoder of prompts begins with; None: what the model says."""
    trace: str | None = None
    """See `Generation.trace`."""
    kv_transfer: KvTransfer = NO_TRANSFER
    """What the client conducts itself of a hand-over."""
    stream_interval: int = 1
    """Steps whose tokens come together, behind the first one."""
    stored: ChatToStore | None = None
    """What is kept of a chat that is to be stored."""

    @property
    def served_name(self) -> ModelName:
        """What the client calls what answers: the adapter, or the model."""
        return (self.alias or self.model.name) if self.lora is None else self.lora.name

    @property
    def allowed_names(self) -> tuple[ModelName, ...]:
        """Of these an API key must allow one: an adapter's name; the model's name where it was called by another."""
        return (self.served_name,) if self.alias is None else (self.alias, self.model.name)

    @property
    def sequences(self) -> int:
        """How many sequences to generate: prompts × n."""
        return len(self.prompts) * self.n

    def choices(self, drawn_seed: int) -> Iterator[ChoiceRequest]:
        """Yields every sequence. `drawn_seed` is used where the client gave none; choices of a prompt get different
        seeds."""
        base = drawn_seed if self.seed is None else self.seed
        for number, prompt in enumerate(self.prompts):
            for i in range(self.n):
                position = number * self.n + i
                sampling = replace(self.sampling, seed=(base + (position if self.seed is None else i)) & SEED_MASK)
                if i and self.stream is None:  # the first choice reports the prompt's log-probabilities for all
                    sampling = replace(sampling, prompt_logprobs=None)
                yield ChoiceRequest(position, prompt, sampling)


def stream_options(fields: CommonFields, *, force_usage: bool) -> StreamOptions | None:
    """Returns None where no stream is wanted; `force_usage`: see RequestLimits. Raises RequestError 400 for options
    without a stream."""
    options = fields.stream_options
    if not fields.stream:
        if options is not None:
            raise invalid("stream_options", "only allowed when stream is true")
        return None
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "obfuscation")
    usage = force_usage or (options is not None and bool(options.include_usage))
    if fields.return_metrics and not usage:
        raise invalid("return_metrics", "in a stream only allowed where stream_options.include_usage is true")
    continuous = force_usage or (usage and options is not None and bool(options.continuous_usage_stats))
    return StreamOptions(usage, continuous, options is not None and bool(options.resumable))


def check_resumable(generation: GenerationRequest) -> None:
    """Raises RequestError 400 for what a resumable stream cannot have."""
    field = "stream_options.resumable"
    if generation.sequences > MAX_STREAM_CHOICES:
        raise invalid(
            field, f"{generation.sequences} choices; at most {MAX_STREAM_CHOICES} are allowed in a resumable stream"
        )
    if generation.sampling.prompt_logprobs is not None:
        raise invalid(field, "not allowed together with log-probabilities of the prompt")
    if generation.response_options.metrics:
        raise invalid(field, "not allowed together with return_metrics")


def check_token_ids(name: str, ids: list[int], card: ModelCard) -> None:
    """Raises RequestError 400 for an id that is not in the vocabulary."""
    for position, token in enumerate(ids):
        if not 0 <= token < card.vocab_size:
            raise invalid(name, f"{token} at {position} is not allowed; token ids are 0 to {card.vocab_size - 1}")


POOLING_ENDPOINTS: dict[PooledKind, str] = {
    "embeddings": "/v1/embeddings, /pooling, /score and /rerank",
    "labels": "/classify and /pooling; with one label /score and /rerank, too",
    "steps": "/pooling",
}
"""Where models that make vectors, and classifiers, are asked."""


def check_generates(card: ModelCard) -> ModelCard:
    """Returns the card. Raises RequestError 400 where the model makes vectors only, or only hears."""
    if card.audio is not None:
        raise invalid("model", f"{card.name} writes down what is said, by /v1/audio/transcriptions alone")
    if card.generates:
        return card
    serves = POOLING_ENDPOINTS["embeddings" if card.pooling is None else card.pooling.makes]
    raise invalid("model", f"{card.name} has no language model head and generates no text; it serves {serves}")


def choose_model(name: str | None, cards: list[ModelCard]) -> ModelCard:
    """Returns the model that a request names: itself, one of its adapters or by an alias; without a name, or with an
    empty one, as vLLM's clients may send it, the only one.
    Raises RequestError 404 for an unknown model, 503 while none is known, 400 where the name is missing and there are
    several."""
    if not cards:
        raise RequestError(
            503, "no engine has announced its model yet; the stack is starting", retry_after=1.0, elsewhere=True
        )
    if not name:
        if len(cards) == 1:
            return cards[0]
        raise invalid("model", "this field is required where several models are served")
    for card in cards:
        if card.name == ModelName(name):
            return card
    for card in cards:
        if card.lora(ModelName(name)) is not None:
            return card
    for card in cards:
        if ModelName(name) in card.aliases:
            return card
    raise RequestError(
        404, f"The model `{abbreviated(name)[1:-1]}` does not exist.", param="model", code="model_not_found"
    )


def choose_alias(name: str | None, card: ModelCard) -> ModelName | None:
    """Returns by which alias a request calls the model of `card`; None: by its name, an adapter's, or none."""
    if name is None or name == card.name or card.lora(ModelName(name)) is not None:
        return None
    return next((alias for alias in card.aliases if alias == name), None)


def choose_lora(name: str | None, card: ModelCard) -> LoraCard | None:
    """Returns the adapter that a request to the model of `card` names; None where it names the model, or nothing."""
    return None if name is None or name == card.name else card.lora(ModelName(name))
