"""The expressions of Baton's rules and dashboards, and the metrics that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from deploy.observability.dashboards import FOLDER
from deploy.observability.scraping import RULES

GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
_NAME = re.compile(r"\b(?:baton|process|vllm)[_:][\w:]*\b")
_LABELS = re.compile(r"\{[^}]*\}")
_PARTS = ("_bucket", "_sum", "_count", "_total")


def rules() -> list[dict[str, Any]]:
    """All recording and alert rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Each query of each dashboard's file, as Grafana would send it: where it is, and what."""
    for path in sorted(FOLDER.glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", filled(target["expr"])


def filled(expression: str) -> str:
    """Without Grafana's variables."""
    for name, value in GRAFANA_VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def series_named(expression: str) -> set[str]:
    """Names of series in an expression, but for those in labels."""
    return set(_NAME.findall(_LABELS.sub("", expression)))


def family(series: str) -> str:
    """The metric that a series belongs to, without what Prometheus appends for each part of it."""
    return next((series.removesuffix(part) for part in _PARTS if series.endswith(part)), series)
