"""What a Grafana dashboard of ours is made of, and how it becomes Grafana's JSON. Written for Grafana 10 and later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

SCHEMA_VERSION = 39
"""Grafana 10.4's; later ones convert it when they load it."""
COLUMNS = 24
"""Of Grafana's grid."""
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

PanelType = Literal["timeseries", "stat", "table"]


class Panel(NamedTuple):
    """One chart: its queries as (PromQL, legend)."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    description: str = ""
    kind: PanelType = "timeseries"
    width: int = 8


class Dashboard(NamedTuple):
    """A page of panels, from left to right and from top to bottom."""

    uid: str
    title: str
    description: str
    panels: Sequence[Panel]


def rate(metric: str, labels: str = "") -> str:
    """A counter's growth per second, over what Grafana takes for an interval."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def quantiles(metric: str, labels: str = "", by: str = "") -> list[tuple[str, str]]:
    """The 50th, 95th and 99th percentile of a histogram. `by`: a label to keep apart."""
    kept = f"le, {by}" if by else "le"
    named = f" {{{{{by}}}}}" if by else ""
    return [
        (f"histogram_quantile({share}, sum by ({kept}) ({rate(metric + '_bucket', labels)}))", f"p{percent}{named}")
        for share, percent in ((0.5, 50), (0.95, 95), (0.99, 99))
    ]


def mean(metric: str, labels: str = "", by: str = "instance") -> str:
    """The mean of a histogram's observations."""
    return f"sum by ({by}) ({rate(metric + '_sum', labels)}) / sum by ({by}) ({rate(metric + '_count', labels)})"


def summed(expression: str, by: str) -> str:
    """The sum over all labels but these."""
    return f"sum by ({by}) ({expression})"


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """In Grafana's own format."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["baton"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": ["baton"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": list(_variables())},
        "panels": list(_panels(dashboard.panels)),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in (
        ("model", "label_values(baton_gateway_time_to_first_token_seconds_count, model)"),
        ("instance", 'label_values(up{job="baton"}, instance)'),
    ):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    x = y = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        yield {
            "id": number,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": _options(panel.kind),
            "targets": [_target(panel, position) for position in range(len(panel.queries))],
        }
        x += panel.width


def _options(kind: PanelType) -> dict[str, Any]:
    if kind != "timeseries":
        return {}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(panel: Panel, position: int) -> dict[str, Any]:
    query, legend = panel.queries[position]
    target: dict[str, Any] = {"refId": chr(ord("A") + position), "datasource": SOURCE, "expr": query}
    if panel.kind == "timeseries":
        return {**target, "legendFormat": legend, "exemplar": "_bucket" in query and "baton_gateway" in query}
    shown = "table" if panel.kind == "table" else "time_series"
    return {**target, "legendFormat": legend, "instant": True, "format": shown}


def text(dashboard: Dashboard) -> str:
    """The dashboard's file."""
    return json.dumps(as_json(dashboard), indent=2, ensure_ascii=False) + "\n"
