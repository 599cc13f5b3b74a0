"""A generation request: the fields that chats and completions share, and which sequences and what answer they mean.

The allowed ranges are vLLM's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.media.source import MediaSource
from services.gateway.api.structured_outputs import OutputGrammar, ResponseFormat, StructuredOutputs
from services.gateway.api.vllm.kv_transfer import NO_TRANSFER, KvTransfer
from services.gateway.parsing.output_parser import ParserOptions
from shared.ids import ModelName
from shared.messages.gateway import MAX_STREAM_CHOICES
from shared.messages.generation import PoolingOptions, SamplingOptions, StopConditions
from shared.messages.model_card import LoraCard, ModelCard, PooledKind
from shared.messages.tokenizer import Prompt, TextPrompt, TokenPrompt, TruncationSide

INT64 = 2**63
SEED_MASK = INT64 - 1


WholeKind = Literal["embedding", "pooling", "classification", "score", "generative_score", "rerank"]
"""Of those that have nothing to answer with before all of it is there: vectors, scores."""
GenerationKind = Literal[
    WholeKind,
    "chat",
    "completion",
    "messages",
    "ollama",
    "responses",
    "sglang",
    "tokens",
    "transcription",
]
"""The family of endpoints that a request comes from, as metrics and logs name it."""
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
    force_usage: bool = False
    """Whether every chunk of every stream has the usage, whatever it asks for."""
    stream_interval: int = 1
    """Of requests that do not say theirs."""


class StreamOptions(NamedTuple):
    """OpenAI's `stream_options`: usage in a last chunk, or in every chunk; and whether the stream can be resumed."""

    include_usage: bool
    continuous_usage: bool
    resumable: bool = False


EarlyStopping = bool | Literal["never"]


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


class AllowedRange(NamedTuple):
    """The values that a number may have; NaN and infinity never are among them."""

    low: float | None
    high: float | None
    low_allowed: bool = True

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        if isinstance(value, float) and not math.isfinite(value):
            return False
        above = self.low is None or value > self.low or (self.low_allowed and value == self.low)
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'at least' if self.low_allowed else 'above'} {_bound(self.low)}"
        high = "" if self.high is None else f"at most {_bound(self.high)}"
        return " and ".join(part for part in (low, high) if part)


def _bound(value: float) -> str:
    """A bound in an error message: powers of two are unreadable in digits."""
    powers = {2**31 - 1: "2^31 - 1", -(2**31): "-2^31", INT64 - 1: "2^63 - 1", -INT64: "-2^63"}
    return powers.get(int(value), f"{value:g}")


RANGES = {
    "n": AllowedRange(1, 128),
    "temperature": AllowedRange(0, None),
    "top_p": AllowedRange(0, 1, low_allowed=False),
    "top_k": AllowedRange(-1, INT64 - 1),
    "min_p": AllowedRange(0, 1),
    "presence_penalty": AllowedRange(-2, 2),
    "frequency_penalty": AllowedRange(-2, 2),
    "repetition_penalty": AllowedRange(0, None, low_allowed=False),
    "max_tokens": AllowedRange(1, INT64 - 1),
    "max_completion_tokens": AllowedRange(1, INT64 - 1),
    "min_tokens": AllowedRange(0, INT64 - 1),
    "seed": AllowedRange(-INT64, INT64 - 1),
    "priority": AllowedRange(-(2**31), 2**31 - 1),
    "thinking_token_budget": AllowedRange(-1, INT64 - 1),
    "length_penalty": AllowedRange(-10, 10),
    "stream_interval": AllowedRange(1, 1024),
}


class StreamOptionFields(Struct):
    """The fields of OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None


class CommonFields(Struct, kw_only=True):
    """The JSON fields of both endpoints. Unknown fields are ignored; null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionFields | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    stream_interval: int | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    thinking_token_budget: int | None = None
    request_id: str | None = None
    return_metrics: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    # Of OpenAI's and vLLM's fields those that change no answer.
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    return_mm_kwargs: bool | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    store: bool | None = None
    # Those of which only the value that changes nothing is taken.
    service_tier: str | None = None
    verbosity: str | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    ec_transfer_params: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    repetition_detection: Any = None
    return_token_offsets: Any = None
    routed_experts_prompt_start: Any = None
    watermarking: Any = None


WITHOUT_EFFECT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "return_mm_kwargs"}
    | {"safety_identifier", "session_id", "store", "user"}
)
"""What clients may send, and no answer depends on."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""Fields of which only these values are taken, as they change nothing."""
_UNSUPPORTED = {
    "ec_transfer_params": "an encoder's cache",
    "guided_whitespace_pattern": "a pattern for white space",
    "logits_processors": "a logits processor of the client's (vllm_xargs asks for one of the engine's)",
    "media_io_kwargs": "anything but text",
    "mm_processor_kwargs": "anything but text",
    "repetition_detection": "an end by repetitions",
    "return_token_offsets": "where each token is in the prompt",
    "routed_experts_prompt_start": "which experts each token took",
    "watermarking": "a watermark",
}
_ABSENT: tuple[Any, ...] = (None, False, [], {})
"""Values by which a client asks for nothing. 0 equals False."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def check_common_fields(fields: CommonFields, prompts: int, limits: RequestLimits, *, unchecked: str = "") -> None:
    """Raises RequestError 400 for a number out of its range (except the field `unchecked`), for more choices than
    allowed, and for unsupported values."""
    for name, allowed in RANGES.items():
        value = getattr(fields, name, None)
        if value is not None and name != unchecked and value not in allowed:
            raise not_allowed(name, value, f"it must be {allowed}")
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name) not in _ABSENT:
            raise unsupported(name, what)
    for name, neutral in NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise not_allowed(name, value, f"{' or '.join(map(repr, neutral))} is")
    check_request_id(fields.request_id)
    if fields.skip_special_tokens is False and fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "taking spaces away from shown special tokens")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise not_allowed("best_of", fields.best_of, f"only the value of n ({fields.n or 1}) is")
    n = fields.n or 1
    if prompts * n > limits.max_choices:
        what = f"n = {n}" if prompts == 1 else f"{prompts} prompts" + (f" times n = {n}" if n > 1 else "")
        raise invalid(
            "n" if n > 1 else "prompt", f"{what} is not allowed; at most {limits.max_choices} choices in one request"
        )
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= 256:
        raise invalid("cache_salt", "it must have 1 to 256 characters")


def check_request_id(given: str | None) -> None:
    """Raises RequestError 400 for what cannot be part of an answer's id."""
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise not_allowed("request_id", given, "1 to 128 printable ASCII characters without spaces are")


def stream_options(fields: CommonFields, *, force_usage: bool) -> StreamOptions | None:
    """Returns None where no stream is wanted; `force_usage`: see RequestLimits. Raises RequestError 400 for options
    without a stream."""
    options = fields.stream_options
    if not fields.stream:
        if options is not None:
            raise invalid("stream_options", "only allowed when stream is true")
        return None
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
