"""What a Prometheus server is told, so that it scrapes a stack of `baton up` and judges it by Baton's alert rules."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.supervisor.servers.prometheus_targets import TARGETS

RULES = Path(__file__).parent / "prometheus" / "rules" / "baton.yml"
"""The alert rules, for any Prometheus that scrapes Baton under the job `baton`."""
SCRAPE_INTERVAL = "5s"
JOB = "baton"


def configuration(run_dir: Path, scrape_interval: str = SCRAPE_INTERVAL) -> str:
    """Prometheus' configuration file for the stack in this run directory, in YAML.

    It finds processes by the file that the supervisor writes there, new ones within seconds, and keeps the labels that
    Baton's own samples have (`honor_labels`)."""
    return f"""\
global:
  scrape_interval: {scrape_interval}
  evaluation_interval: {scrape_interval}

rule_files:
  - {json.dumps(str(RULES))}

scrape_configs:
  - job_name: {JOB}
    honor_labels: true
    file_sd_configs:
      - files: [{json.dumps(str(run_dir / TARGETS))}]
        refresh_interval: {scrape_interval}
"""
