"""`python -m services.scheduler`: decides what one engine's workers compute."""

from __future__ import annotations

import logging

from kvstore.connectors.installed import ConnectorRefused
from services.scheduler.actor import SchedulerActor
from services.scheduler.config import SchedulerConfig
from services.scheduler.media_intake import RowsMemory
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.error_groups import innermost

log = logging.getLogger(__name__)

CANNOT_SERVE = 2
"""Exit status, as for settings that cannot be used: a start is given up at once, as the next one would fail, too."""


def build(config: SchedulerConfig, bus: Bus) -> SchedulerActor:
    """The actor as it is configured, not started yet."""
    return SchedulerActor(
        bus,
        config.instance_id(),
        config.limits(),
        world_size=config.world_size,
        role=config.role,
        node=config.node_id(),
        connector=config.connector(),
        journal=config.journal_settings(),
        standby=config.standby,
        pulls=config.prefill_queue,
        rows=RowsMemory(config.rows_dir, config.rows_memory),
    )


def main() -> None:
    """Runs the scheduler until it is stopped. Exits with a message where the configuration is wrong."""
    config = load_or_exit("scheduler", SchedulerConfig)
    try:
        run_service(config, lambda bus: build(config, bus), "scheduler")
    except* ConnectorRefused as errors:
        log.error("cannot serve", extra={"reason": str(innermost(errors))})
        raise SystemExit(CANNOT_SERVE) from None


if __name__ == "__main__":
    main()
