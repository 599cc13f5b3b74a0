"""What a tokenizer hears: requests to turn text into tokens, and two questions that are answered at once."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.generation import Grammar, SamplingParams, StopParams


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
    text: str
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True, array_like=True, tag="tokens"):
    """Token ids that the client chose itself; checked against the vocabulary."""

    tokens: bytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Tokenize(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """gateway → one tokenizer: tokenize this and send it on to a coordinator.

    Answered to the gateway by `Rejected` where the prompt is at fault; otherwise the next sign is the
    coordinator's `Queued` or `Placed`.
    """

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    prompt: Prompt
    sampling: SamplingParams
    stopping: StopParams
    resume: bytes = b""
    """Packed output tokens that earlier attempts already gave the client; appended to the prompt."""
    sent_chars: int = 0
    skip_special_tokens: bool = True
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    avoid: tuple[EngineId, ...] = ()
    trace: str | None = None
    grammar: Grammar | None = None
    bad_words: tuple[str, ...] = ()
    """Become `SamplingParams.bad_words`, each with and without a space before it."""
    thinking_end: str = ""
    """Becomes `SamplingParams.thinking_end`."""
    truncate_prompt_tokens: int | None = None
    """Keep no more than this many of the prompt's tokens, the last ones."""
    keep_markup: bool = False
    """Marks of tool calls and thoughts (`MARKUP_TOKENS`) stay in the text even where special tokens are skipped."""


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """Asks which tokens a prompt becomes (`POST /tokenize`). Answered by `Encoded` or `Refused`."""

    prompt: Prompt
    return_strings: bool = False


class Decode(Struct, frozen=True, array_like=True, tag=True):
    """Asks which text tokens become (`POST /detokenize`, `echo`). Answered by `Decoded` or `Refused`."""

    tokens: bytes
    skip_special_tokens: bool = False


class Encoded(Struct, frozen=True, array_like=True, tag=True):
    tokens: bytes
    strings: tuple[str, ...] | None = None


class Decoded(Struct, frozen=True, array_like=True, tag=True):
    text: str


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """The question was at fault: `field` names what, `message` says why and what is allowed."""

    message: str
    field: str | None = None


TokenizerQuestion = Encode | Decode
TokenizerAnswer = Encoded | Decoded | Refused
