"""`python -m tests.support.tiny_stack.service SERVICE --instance …`: an actor that hears nothing and is always idle.

It misbehaves when told so by flags, in the ways a real service does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Meta

from shared.actor import Actor, TopicSubscription, run_service
from shared.bus import Bus
from shared.config import ServiceConfig, load_config
from shared.messages.lifecycle import Service


class TinyConfig(ServiceConfig, frozen=True, kw_only=True):
    fail: Annotated[str, Meta(description="Ends at start, with these words.")] = ""
    fail_beside: Annotated[str, Meta(description="Ends so while this file is there.")] = ""
    status: Annotated[int, Meta(description="Exit status of that end.")] = 1
    import_seconds: Annotated[float, Meta(description="Blocks this long before anything else.")] = 0.0
    redis_url: Annotated[str | None, Meta(description="As a store is told it; nobody asks there.")] = None
    busy: Annotated[bool, Meta(description="Is never idle, so that a drain takes its whole time.")] = False


class TinyActor(Actor):
    def __init__(self, bus: Bus, service: Service, config: TinyConfig) -> None:
        super().__init__(bus, config.instance_id())
        self.service = service
        self._busy = config.busy

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        return ()

    async def handle(self, message: Any) -> None:
        raise NotImplementedError

    async def set_up(self) -> None:
        await asyncio.sleep(0)

    def is_idle(self) -> bool:
        return not self._busy


def main(service: str, argv: list[str]) -> None:
    config = load_config(service, TinyConfig, argv)
    time.sleep(config.import_seconds)
    if config.fail or (config.fail_beside and Path(config.fail_beside).exists()):
        print(config.fail or "the file is there", file=sys.stderr)
        raise SystemExit(config.status)
    run_service(config, lambda bus: TinyActor(bus, cast(Service, service), config), service)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
