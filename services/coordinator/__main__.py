"""`python -m services.coordinator`: places requests on engines, answers `admin.*`."""

from __future__ import annotations

from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit


def build(config: CoordinatorConfig, bus: Bus) -> CoordinatorActor:
    """The coordinator that `config` describes, on `bus`."""
    return CoordinatorActor(bus, config.instance_id(), config)


def main() -> None:
    """Serves until it is stopped; exits with 2 where the settings are wrong."""
    config = load_or_exit("coordinator", CoordinatorConfig)
    run_service(config, lambda bus: build(config, bus), "coordinator")


if __name__ == "__main__":
    main()
