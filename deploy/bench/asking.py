"""How a benchmark asks one engine directly, in the place of coordinator, detokenizer and gateway."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from shared import topics
from shared.blocks import hash_chain
from shared.bus import Bus
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, ModelName, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage
from shared.messages.generation import Generation, SamplingParams, StopParams
from shared.messages.scheduler import Generate, WorkerResult
from shared.tokens import pack

DETOKENIZER = DetokenizerId("bench-detokenizer")
GATEWAY = GatewayId("bench-gateway")


async def listen(
    bus: Bus,
    engine: EngineId,
    tokens: Callable[[TokenBatch], Awaitable[None]],
    gateway: Callable[[GatewayMessage], Awaitable[None]],
    result: Callable[[WorkerResult], Awaitable[None]],
) -> None:
    """Hears what the engine sends for its requests, and what its workers answer."""
    await bus.subscribe(topics.detokenizer_tokens(DETOKENIZER), tokens)
    await bus.subscribe(topics.gateway_inbox(GATEWAY), gateway)
    await bus.subscribe(topics.engine_results(engine), result)


def request_of(number: int) -> RequestId:
    return RequestId(f"bench-{number}")


def generate(number: int, model: ModelName, prompt: list[int], *, temperature: float, stopping: StopParams) -> Generate:
    """Request `number`, which is its seed, too."""
    tokens = pack(prompt)
    generation = Generation(
        request=request_of(number),
        attempt=Attempt(1),
        gateway=GATEWAY,
        model=model,
        tokens=tokens,
        prompt_length=len(prompt),
        block_hashes=b"".join(hash_chain(tokens, None)),
        sampling=SamplingParams(seed=number, temperature=temperature),
        stopping=stopping,
        arrival=time.time(),
    )
    return Generate(generation, DETOKENIZER)
