"""Messages to a tokenizer: prompts on their way to an engine, and two requests that are answered directly."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.generation import Grammar, SamplingOptions, StopConditions


class ChatPrompt(Struct, frozen=True, array_like=True, tag="chat", kw_only=True):
    """Messages to be rendered by the model's chat template."""

    messages: bytes
    """A JSON array, as the client sent it."""
    tools: bytes | None = None
    """A JSON array of tool definitions, as the client sent it."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    """A chat template of the client's own (`chat_template`), where the gateway allows it."""
    template_kwargs: dict[str, Any] = {}


class TextPrompt(Struct, frozen=True, array_like=True, tag="text"):
    """Text to be tokenized as it is."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True, array_like=True, tag="tokens"):
    """Token ids that the client chose itself; checked against the vocabulary."""

    tokens: bytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Tokenize(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """gateway → one tokenizer: tokenize this and send it on to a coordinator.

    Answered to the gateway by `RequestRejected` where the prompt is at fault; otherwise the next sign is the
    coordinator's `RequestQueued` or `RequestPlaced`.
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
    sent_chars: int = 0
    skip_special_tokens: bool = True
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    avoid: tuple[EngineId, ...] = ()
    grammar: Grammar | None = None
    bad_words: tuple[str, ...] = ()
    """Become `SamplingOptions.bad_words`, each with and without a space before it."""
    thinking_end: str = ""
    """Becomes `SamplingOptions.thinking_end`."""
    truncate_prompt_tokens: int | None = None
    """Keep no more than this many of the prompt's tokens, the last ones."""
    keep_markup: bool = False
    """Marks of tool calls and thoughts (`MARKUP_TOKENS`) stay in the text even where special tokens are skipped."""


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """Which tokens does this prompt become (`POST /tokenize`)? Answered by `EncodeReply` or `TokenizerRefusal`."""

    prompt: Prompt
    return_strings: bool = False


class Decode(Struct, frozen=True, array_like=True, tag=True):
    """Which text do these tokens become (`POST /detokenize`, `echo`)? Answered by `DecodeReply` or
    `TokenizerRefusal`."""

    tokens: bytes
    skip_special_tokens: bool = False


class EncodeReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Encode`: the tokens of a prompt, packed uint32, and their spellings where `return_strings` is set."""

    tokens: bytes
    strings: tuple[str, ...] | None = None


class DecodeReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Decode`: the text of the tokens."""

    text: str


class TokenizerRefusal(Struct, frozen=True, array_like=True, tag=True):
    """The request was at fault: `field` names what, `message` says why and what is allowed."""

    message: str
    field: str | None = None


TokenizerRequest = Encode | Decode
TokenizerReply = EncodeReply | DecodeReply | TokenizerRefusal
