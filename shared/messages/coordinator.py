"""Messages to a coordinator, beside lifecycles and the JSON of its admin endpoints."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Attempt, Count, DetokenizerId, EngineId, InstanceId, ModelName, RequestId
from shared.messages.generation import Generation


class Route(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → one coordinator: find an engine for this."""

    generation: Generation


class Withdraw(Struct, frozen=True, array_like=True, tag=True):
    """gateway → every coordinator and tokenizer: attempts up to this one are given up, and their engine is not known
    here. Drop the request if it still waits with you; have it cancelled if you have placed it. Also of questions to
    tokenizers (`Encode`, `Decode`) whose answers nobody waits for any more."""

    request: RequestId
    attempt: Attempt


class RequestEnded(Struct, frozen=True, array_like=True, tag=True):
    """gateway → every coordinator: a request of an API key that an engine has had is over, finished or not. Whoever
    placed it counted it for all that it might generate, and corrects that. Lost, it stays at that."""

    request: RequestId
    generated: Count
    """Its output tokens, of all attempts."""


class PullPrefills(Struct, frozen=True, array_like=True, tag=True):
    """prefill engine → every coordinator: with a prefill queue, I compute so many prompt tokens more next. It replaces
    the engine's pull before; lost, it is repeated."""

    engine: EngineId
    tokens: Count
    """0: nothing, for now."""


PlacementNotice = Withdraw | RequestEnded


class PlacementMade(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → every coordinator: the engine that a request was placed on. The receivers add it to the engine's
    load and route equal prompts there. The engine's next report replaces it, so a lost message does little harm."""

    coordinator: InstanceId
    engine: EngineId
    detokenizer: DetokenizerId
    model: ModelName
    prompt: bytes
    """Hash of the last block of the prompt that can be reused; it stands for all blocks before it, too. Empty if there
    is none."""
    prompt_blocks: Count
    """Number of blocks of the prompt up to and including the one that `prompt` names."""
    blocks: Count
    """Number of blocks of all tokens of the request: its prompt, and the output of earlier attempts."""
    reused: Count
    """Number of blocks that `engine` need not compute, because it or a KV store holds them."""
    on_device: Count
    """How many of the reused blocks already lie in the engine's own memory."""
    decode_on: EngineId | None = None
    """The decode engine that `engine` will hand the request over to; None without a hand-over."""
