"""Messages to a coordinator, beside lifecycles and the JSON of its admin endpoints."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Attempt, DetokenizerId, EngineId, InstanceId, ModelName, RequestId
from shared.messages.generation import Generation


class Route(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → one coordinator: find an engine for this."""

    generation: Generation


class Withdraw(Struct, frozen=True, array_like=True, tag=True):
    """gateway → every coordinator: the client went away; drop the request if it still queues with you."""

    request: RequestId
    attempt: Attempt


class PlacementMade(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → every coordinator: where a request went, so that others do not take that engine for idle, and equal
    prompts go the same way. The engine's next report says it better: who misses this misses little."""

    coordinator: InstanceId
    engine: EngineId
    detokenizer: DetokenizerId
    model: ModelName
    prompt: bytes
    """Hash of the last block of the prompt that can be reused, which names all before it; empty where there is none."""
    prompt_blocks: int
    """Those up to it."""
    blocks: int
    """Of the whole request."""
    reused: int
    """Blocks that `engine` need not compute."""
    on_device: int
    """Of those, blocks that lie in its memory."""
    decode_on: EngineId | None = None
    """Who the request is handed over to."""
