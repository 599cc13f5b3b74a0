"""The settings of a coordinator; their defaults are those of its core."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.coordinator.core.settings import CoordinatorLimits, Policy, RouterSettings
from shared.config import ServiceConfig
from shared.settings import UpOption

LIMITS = CoordinatorLimits()
ROUTER = RouterSettings()


class CoordinatorConfig(ServiceConfig, frozen=True, kw_only=True):
    """Every setting of a coordinator, with its unit and bounds."""

    queue_limit: Annotated[
        int, Meta(ge=0, description="Requests that may wait for an engine; the next one is refused with 429.")
    ] = LIMITS.queue
    queue_timeout: Annotated[float, Meta(gt=0, description="Seconds that a request may wait for an engine.")] = (
        LIMITS.queue_seconds
    )
    expect_engine: Annotated[
        float,
        Meta(ge=0, description="Seconds after an engine's last heartbeat in which its model is still expected back."),
    ] = LIMITS.expect_seconds
    engine_fill: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="An engine gets no requests above this multiple of its running limit; "
            "none: it gets requests until its queue is full."
        ),
    ] = LIMITS.engine_fill
    router_policy: Annotated[
        Policy,
        Meta(description="Placement of requests. kv: least work, with cached blocks counted as done."),
        UpOption("Routing"),
    ] = ROUTER.policy
    router_temperature: Annotated[
        float,
        Meta(ge=0, description="0: take the cheapest engine, rotating among equals; above 0: draw one by its cost."),
    ] = ROUTER.temperature
    router_store_discount: Annotated[
        float,
        Meta(ge=0, le=1, description="Value of a cached block in a KV store, relative to one on the engine's device."),
    ] = ROUTER.store_discount
    router_saturation: Annotated[
        float,
        Meta(ge=1, description="Above this multiple of the mean load an engine's cached blocks do not count."),
    ] = ROUTER.saturation
    router_index_blocks: Annotated[
        int, Meta(ge=1024, description="Blocks in the prefix map; each takes about 120 bytes.")
    ] = ROUTER.index_blocks
    disaggregate_tokens: Annotated[
        int,
        Meta(ge=0, description="Uncached prompt tokens from which on a prefill engine computes the prompt."),
        UpOption("Routing"),
    ] = ROUTER.disaggregate_tokens
    disaggregate_share: Annotated[
        float,
        Meta(ge=0, description="Or this uncached share of the prompt; above 1: only the number of tokens counts."),
    ] = ROUTER.disaggregate_share
    disaggregate_least: Annotated[
        int, Meta(ge=0, description="With fewer uncached prompt tokens than this, no prefill engine is used.")
    ] = ROUTER.disaggregate_least
    disaggregate_busy: Annotated[
        int, Meta(ge=0, description="With more tokens waiting per prefill engine than this, none is used.")
    ] = ROUTER.disaggregate_busy
    scale_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that the supervisor may take for `admin.scale`.")
    ] = 30.0

    def limits(self) -> CoordinatorLimits:
        """The bounds that its core keeps."""
        return CoordinatorLimits(
            queue=self.queue_limit,
            queue_seconds=self.queue_timeout,
            expect_seconds=self.expect_engine,
            engine_fill=self.engine_fill,
        )

    def router(self) -> RouterSettings:
        """How its core places requests."""
        return RouterSettings(
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
