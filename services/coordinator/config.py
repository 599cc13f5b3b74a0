"""What a coordinator is told at its start."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.coordinator.core.limits import Limits
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
    scale_timeout: Annotated[float, Meta(gt=0, description="Seconds the supervisor gets for `admin.scale`.")] = 30.0

    def limits(self) -> Limits:
        return Limits(
            queue=self.queue_limit,
            queue_seconds=self.queue_timeout,
            expect_seconds=self.expect_engine,
            engine_fill=self.engine_fill,
        )
