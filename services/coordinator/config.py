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
        int, Meta(ge=0, description="Requests that wait here; the next one is refused with 429.")
    ] = LIMITS.queue
    queue_timeout: Annotated[float, Meta(gt=0, description="Seconds a request may wait here.")] = LIMITS.queue_seconds
    expect_engine: Annotated[
        float, Meta(ge=0, description="Seconds after its last sign that a model's engine is still waited for.")
    ] = LIMITS.expect_seconds
    engine_fill: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="An engine gets no more once it has this many times its running limit; "
            "none: until its own queue is full."
        ),
    ] = LIMITS.engine_fill
    router_policy: Annotated[
        Policy,
        Meta(description="kv (least work, cached blocks counted), least-loaded, round-robin or random."),
        UpOption("Routing"),
    ] = ROUTER.policy
    router_temperature: Annotated[
        float, Meta(ge=0, description="Above 0 engines are drawn by cost; 0 takes the cheapest, rotating among equals.")
    ] = ROUTER.temperature
    router_store_discount: Annotated[
        float, Meta(ge=0, le=1, description="What a block in a KV store is worth beside one on the device.")
    ] = ROUTER.store_discount
    router_saturation: Annotated[
        float,
        Meta(ge=1, description="Times the mean number of requests beyond which an engine does not win by its cache."),
    ] = ROUTER.saturation
    router_index_blocks: Annotated[
        int, Meta(ge=1024, description="Blocks that the prefix map holds; about 120 bytes each.")
    ] = ROUTER.index_blocks
    disaggregate_tokens: Annotated[
        int,
        Meta(ge=0, description="Prompt tokens left to compute from which on a prefill engine does it."),
        UpOption("Routing"),
    ] = ROUTER.disaggregate_tokens
    disaggregate_share: Annotated[
        float, Meta(ge=0, description="Or this share of the prompt left to compute; above 1: tokens alone decide.")
    ] = ROUTER.disaggregate_share
    disaggregate_least: Annotated[
        int, Meta(ge=0, description="Prompt tokens left to compute below which a prompt stays local in any case.")
    ] = ROUTER.disaggregate_least
    disaggregate_busy: Annotated[
        int, Meta(ge=0, description="Tokens waiting for each prefill engine above which prompts stay local.")
    ] = ROUTER.disaggregate_busy
    scale_timeout: Annotated[float, Meta(gt=0, description="Seconds the supervisor gets for `admin.scale`.")] = 30.0

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
