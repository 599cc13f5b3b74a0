"""Runs one gateway process: `python -m services.gateway --help`."""

from __future__ import annotations

from services.gateway.actor import Gateway
from services.gateway.config import GatewayConfig
from shared.actor import run_service
from shared.config import load_or_exit


def main() -> None:
    """Serves until the process receives a stop signal. Exits with a message if the configuration is invalid."""
    config = load_or_exit("gateway", GatewayConfig)
    run_service(config, lambda bus: Gateway(bus, config), "gateway")


if __name__ == "__main__":
    main()
