"""What a coordinator is told at its start."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.coordinator.core.limits import Limits
from services.coordinator.core.routing import Policy, Routing
from shared.config import ServiceConfig


class CoordinatorConfig(ServiceConfig, frozen=True, kw_only=True):
    queue_limit: Annotated[
        int, Meta(ge=0, description="Requests that wait here; the next one is refused with 429.")
    ] = 1024
    queue_timeout: Annotated[float, Meta(gt=0, description="Seconds a request may wait here.")] = 60.0
    expect_engine: Annotated[
        float, Meta(ge=0, description="Seconds after its last sign that a model's engine is still waited for.")
    ] = 15.0
    engine_fill: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="An engine gets no more once it has this many times its running limit in hand; "
            "none: until its own queue is full."
        ),
    ] = None
    router_policy: Annotated[
        Policy,
        Meta(description="kv (least work, cached blocks counted), least-loaded, round-robin or random."),
    ] = "kv"
    router_temperature: Annotated[
        float, Meta(ge=0, description="Above 0 engines are drawn by cost; 0 takes the cheapest, equals in turn.")
    ] = 0.0
    router_store_discount: Annotated[
        float, Meta(ge=0, le=1, description="What a block in a KV store is worth beside one on the device.")
    ] = 0.75
    router_saturation: Annotated[
        float,
        Meta(ge=1, description="Times the mean of requests in hand beyond which an engine does not win by its cache."),
    ] = 2.0
    router_index_blocks: Annotated[
        int, Meta(ge=1024, description="Blocks that the prefix map holds; about 120 bytes each.")
    ] = 2_000_000
    disaggregate_tokens: Annotated[
        int, Meta(ge=0, description="Prompt tokens left to compute from which on a prefill engine does it.")
    ] = 2048
    disaggregate_share: Annotated[
        float, Meta(ge=0, description="Or this share of the prompt left to compute; above 1: tokens alone decide.")
    ] = 0.7
    disaggregate_least: Annotated[
        int, Meta(ge=0, description="Prompt tokens left to compute below which a prompt stays local in any case.")
    ] = 256
    disaggregate_busy: Annotated[
        int, Meta(ge=0, description="Tokens waiting for each prefill engine above which prompts stay local.")
    ] = 16_384
    scale_timeout: Annotated[float, Meta(gt=0, description="Seconds the supervisor gets for `admin.scale`.")] = 30.0

    def limits(self) -> Limits:
        return Limits(
            queue=self.queue_limit,
            queue_seconds=self.queue_timeout,
            expect_seconds=self.expect_engine,
            engine_fill=self.engine_fill,
        )

    def routing(self) -> Routing:
        return Routing(
            policy=self.router_policy,
            temperature=self.router_temperature,
            store_discount=self.router_store_discount,
            saturation=self.router_saturation,
            disaggregate_tokens=self.disaggregate_tokens,
            disaggregate_share=self.disaggregate_share,
            disaggregate_least=self.disaggregate_least,
            disaggregate_busy=self.disaggregate_busy,
            index_blocks=self.router_index_blocks,
        )
