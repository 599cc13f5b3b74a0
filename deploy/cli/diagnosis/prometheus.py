"""`baton prometheus-config`: what a Prometheus server beside a stack is told."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of
from deploy.observability.scraping import SCRAPE_INTERVAL, configuration

ScrapeInterval = Annotated[
    str, typer.Option("--scrape-interval", help="How often every process is asked, as Prometheus spells it.")
]


def prometheus_config(
    scrape_interval: ScrapeInterval = SCRAPE_INTERVAL, name: Name = DEFAULT, run_dir: RunDir = None
) -> None:
    """Print a configuration by which Prometheus scrapes a stack and judges it by Baton's alert rules."""
    print(configuration(run_dir_of(name, run_dir), scrape_interval), end="")
