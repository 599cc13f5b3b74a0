"""Messages to a tokenizer: prompts on their way to an engine, and requests that are answered directly."""

from __future__ import annotations

from typing import Any, Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

from shared.ids import Attempt, Count, EngineId, GatewayId, LoraId, ModelName, RequestId
from shared.messages.gateway import ErrorKind
from shared.messages.generation import (
    Grammar,
    KeptPrompt,
    MediaRows,
    PoolingOptions,
    PromptEmbeds,
    SamplingOptions,
    StopConditions,
    StreamInterval,
)

TruncationSide = Literal["left", "right"]
"""Where a prompt that is too long loses its tokens."""


class VideoParts(Struct, frozen=True, array_like=True):
    """A video of a chat, as rows of its frames."""

    parts: tuple[Count, ...]
    """Which of `ChatPrompt.embeds` they are, in the order of time."""
    times: tuple[float, ...]
    """Seconds from its beginning to each of these."""
    seconds: float = 0.0
    """That it lasts."""


class ChatPrompt(Struct, frozen=True, array_like=True, tag="chat", kw_only=True):
    """Messages to be rendered by the model's chat template."""

    messages: bytes
    """A JSON array, as the client sent it."""
    tools: bytes | None = None
    """A JSON array of tool definitions, as the client sent it."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    """A chat template from the client (`chat_template`), if the gateway allows it; None: the model's own."""
    template_kwargs: dict[str, Any] = {}
    """Variables for the template, from `chat_template_kwargs` and fields such as `documents`."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to those that the template has written."""
    embeds: tuple[PromptEmbeds, ...] = ()
    """Parts that are no text; the messages have `embeds_placeholder` where the template is to put them, but for images.
    """
    images: tuple[int, ...] = ()
    """Which of `embeds` are images, or sounds of a model that takes no images, in the order of the messages, which have
    parts of type image or audio in their places."""
    videos: tuple[VideoParts, ...] = ()
    """The videos, in the order of the messages, which have parts of type video in their places."""
    sounds: tuple[int, ...] = ()
    """The same of sounds of a model that takes images, too."""


def embeds_placeholder(number: int) -> str:
    """The text that stands for a chat's part of embeddings, counted from 0, until it is tokenized."""
    return f"<|prompt_embeds:{number}|>"


class TextPrompt(Struct, frozen=True, array_like=True, tag="text"):
    """Text to be tokenized as it is."""

    text: str
    add_special_tokens: bool = True
    text_tokens: Count | None = None
    """See `PairPrompt.text_tokens`."""


class InfillPrompt(Struct, frozen=True, array_like=True, tag="infill"):
    """The text around a gap that the answer fills, to be put together as the model was trained on it."""

    prefix: str
    suffix: str
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True, array_like=True, tag="tokens"):
    """Token ids that the client chose itself, packed as uint32; checked against the vocabulary."""

    tokens: bytes
    encoded: PromptEmbeds | None = None
    """Rows that stand beside it (`PromptEmbeds.encoded`): what an encoder made of a sound."""


class PairPrompt(Struct, frozen=True, array_like=True, tag="pair"):
    """Two texts to be tokenized as a pair, as a cross-encoder reads them: with what the tokenizer puts between and
    around them."""

    text: str
    second: str
    text_tokens: Count | None = None
    """So many tokens of `text` at most are read, from its beginning; None: all. Special ones do not count."""
    second_tokens: Count | None = None
    """The same of `second`."""


class EmbedsPrompt(Struct, frozen=True, array_like=True, tag="embeds"):
    """Embeddings that the client made itself, in place of tokens; checked against the model's hidden size."""

    embeds: PromptEmbeds


Prompt = ChatPrompt | TextPrompt | InfillPrompt | TokenPrompt | PairPrompt | EmbedsPrompt


def embeds_of(prompt: Prompt) -> tuple[PromptEmbeds, ...]:
    """The rows in a chat or beside tokens, of which encoders may keep some."""
    match prompt:
        case ChatPrompt():
            return prompt.embeds
        case TokenPrompt(encoded=PromptEmbeds() as encoded):
            return (encoded,)
        case _:
            return ()


def with_embeds(prompt: Prompt, embeds: tuple[PromptEmbeds, ...]) -> Prompt:
    """The prompt with others in place of its `embeds_of`, as many."""
    match prompt:
        case ChatPrompt():
            return replace(prompt, embeds=embeds)
        case TokenPrompt() if embeds:
            return replace(prompt, encoded=embeds[0])
        case _:
            return prompt


def kept_rows(prompt: Prompt) -> list[MediaRows]:
    """The rows of a prompt that encoders keep."""
    return [kept for each in embeds_of(prompt) for kept in each.kept]


def rows_bytes(prompt: Prompt) -> int:
    """All bytes of rows of a prompt, those of its client's own too."""
    return sum(each.count * each.row_bytes for each in embeds_of(prompt))


def prompt_bytes(prompt: Prompt) -> int:
    """About how many bytes a prompt has in a message: a character of a text counts as one."""
    match prompt:
        case ChatPrompt():
            rows = sum(len(each.rows) for each in prompt.embeds)
            return len(prompt.messages) + len(prompt.tools or b"") + rows
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.tokens) + (0 if prompt.encoded is None else len(prompt.encoded.rows))
        case EmbedsPrompt():
            return len(prompt.embeds.rows)
        case PairPrompt():
            return len(prompt.text) + len(prompt.second)
        case InfillPrompt():
            return len(prompt.prefix) + len(prompt.suffix)
        case _:
            assert_never(prompt)


class Tokenize(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """gateway → one tokenizer: tokenize this and send it on to a coordinator.

    If the prompt is invalid the gateway receives `RequestRejected`; otherwise it next hears from the coordinator
    (`RequestQueued` or `RequestPlaced`). While a long prompt is tokenized, or waits for it, `PromptsHeld` says so.
    """

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    prompt: Prompt
    sampling: SamplingOptions
    stopping: StopConditions
    resume: bytes = b""
    """Packed output tokens that earlier attempts already gave the client; appended to the prompt."""
    sent_chars: Count = 0
    """Characters of output text that the client already has."""
    skip_special_tokens: bool = True
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    avoid: tuple[EngineId, ...] = ()
    grammar: Grammar | None = None
    bad_words: tuple[str, ...] = ()
    """Words that must not be drawn. Each becomes token sequences in `SamplingOptions.bad_words`, with and without a
    leading space."""
    thinking_end: str = ""
    """Text that closes the reasoning. It becomes `SamplingOptions.thinking_end`."""
    truncate_prompt_tokens: Count | None = None
    """Keep at most this many of the prompt's tokens; None: keep all."""
    keep_markup: bool = False
    """Marks of tool calls and thoughts (`MARKUP_TOKENS`) stay in the text even where special tokens are skipped."""
    prefix_caching: bool = True
    """See `Generation.prefix_caching`."""
    max_model_len: Count | None = None
    """Tokens of the longest context that an engine of the model has; a longer prompt may be refused before it is
    tokenized."""
    suspect_until: Count | None = None
    """See `Generation.suspect_until`."""
    key: str = ""
    """See `Generation.key`."""
    weight: float = 1.0
    """See `Generation.weight`."""
    pooling: PoolingOptions | None = None
    """See `Generation.pooling`."""
    lora: LoraId | None = None
    """See `Generation.lora`."""
    truncation_side: TruncationSide = "left"
    trace: str | None = None
    """See `Generation.trace`."""
    keep: bool = False
    """See `Generation.keep`."""
    kept: KeptPrompt | None = None
    """See `Generation.kept`."""
    stream_interval: StreamInterval = 1
    hears_held: bool = False
    """Whether the gateway understands `PromptsHeld`; not one of release 0.3 or before."""


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """Requests the tokens of a prompt (`POST /tokenize`). Answered by `EncodeReply` or `TokenizerRefusal`."""

    prompt: Prompt
    return_strings: bool = False
    truncate_prompt_tokens: Count | None = None
    truncation_side: TruncationSide = "left"
    """Both as in `Tokenize`."""
    request: RequestId | None = None
    """By which `Withdraw` calls it off; None: nothing does."""
    string_slices: bool = False
    """Whether the gateway takes spellings in slices; not one of release 0.3 or before."""


class Decode(Struct, frozen=True, array_like=True, tag=True):
    """Requests the text of tokens (`POST /detokenize`, `echo`). Answered by `DecodeReply` or `TokenizerRefusal`."""

    tokens: bytes
    skip_special_tokens: bool = False
    request: RequestId | None = None
    """See `Encode.request`."""


class ReadTokenizerInfo(Struct, frozen=True, array_like=True, tag=True):
    """Requests what the tokenizer's files say (`GET /tokenizer_info`). Answered by `TokenizerInfo`."""


class TokenizerInfo(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ReadTokenizerInfo`."""

    info: bytes
    """A JSON object: `tokenizer_config.json` with tokens as their text, without files' paths."""


class EncodeReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Encode`: the tokens of a prompt, packed uint32, and their spellings where `return_strings` is set."""

    tokens: bytes
    strings: tuple[str, ...] | None = None
    string_slices: tuple[bytes, ...] | None = None
    """In place of `strings`, where `Encode.string_slices` is set: MessagePack arrays of a few thousand of them each.
    Decoding a million texts at once would leave no client of a gateway a turn."""


class DecodeReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Decode`: the text of the tokens."""

    text: str


class TokenizerRefusal(Struct, frozen=True, array_like=True, tag=True):
    """No answer: `field` names the field at fault, if any, `message` says why and what is allowed."""

    message: str
    field: str | None = None
    kind: ErrorKind = "invalid_request"


TokenizerRequest = Encode | Decode | ReadTokenizerInfo
TokenizerReply = EncodeReply | DecodeReply | TokenizerInfo | TokenizerRefusal
