"""Dashboards are Grafana's JSON, lie where they belong, and ask for what services measure."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.dashboards import DASHBOARDS, FOLDER
from deploy.observability.grafana_json import COLUMNS, Dashboard, as_json, text
from services.gateway.metrics import Meters, gateway_collectors
from shared.telemetry.metrics import ProcessMetrics
from tests.support.paths import REPOSITORY
from tests.support.promql import family, panel_queries, rules, series_named

SERVICES = ("gateway", "coordinator", "scheduler", "tokenizer", "detokenizer", "worker")
MODULES = ("shared.telemetry.startup", "kvstore.metrics", *(f"services.{name}.metrics" for name in SERVICES))
RULES_TEST = REPOSITORY / "tests" / "integration" / "observability" / "rules_test.yml"


def measured() -> set[str]:
    """The names of all that services measure."""
    for module in MODULES:
        importlib.import_module(module)
    every = ProcessMetrics("kvstore", *SERVICES, added=gateway_collectors(Meters()))
    return {metric.name for metric in every.collect()}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_the_files_are_what_the_module_writes(dashboard: Dashboard) -> None:
    assert (FOLDER / f"{dashboard.uid}.json").read_text() == text(dashboard), (
        "run: python -m deploy.observability.dashboards"
    )


def test_there_is_no_other_dashboard() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {dashboard.uid for dashboard in DASHBOARDS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_panels_lie_beside_and_below_each_other(dashboard: Dashboard) -> None:
    panels = as_json(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = [set(cells(panel["gridPos"])) for panel in panels]
    assert all(not one & other for one, other in itertools.combinations(taken, 2))
    assert all(x < COLUMNS for cell in taken for x, _ in cell)


def cells(position: dict[str, int]) -> Iterator[tuple[int, int]]:
    return itertools.product(
        range(position["x"], position["x"] + position["w"]), range(position["y"], position["y"] + position["h"])
    )


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_grafanas_own_types_know_every_field(dashboard: Dashboard) -> None:
    """Its SDK reads and writes a dashboard as its schema has it: what the schema does not know would be lost."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is missing")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    ours = json.loads(text(dashboard))
    theirs = json.loads(JSONEncoder().encode(models.Dashboard.from_json(ours)))
    assert lost(ours, theirs) == []


def lost(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Paths of what is in the one and not, or otherwise, in the other."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key in ours for each in lost(ours[key], theirs.get(key), f"{where}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for place, pair in pairs for each in lost(*pair, f"{where}[{place}]")]
    return [] if ours == theirs or (ours in ("", [], {}) and theirs is None) else [f"{where}: {ours!r} != {theirs!r}"]


def test_every_metric_that_rules_and_dashboards_name_is_one_of_ours() -> None:
    known, recorded = measured(), {rule["record"] for rule in rules() if "record" in rule}
    expressions = [*panel_queries(), *((rule.get("alert", "record"), rule["expr"]) for rule in rules())]
    assert len(expressions) > 100
    unknown = {
        (where, name)
        for where, expression in expressions
        for name in series_named(expression)
        if family(name) not in known and name not in known | recorded
    }
    assert unknown == set()


def test_every_alert_has_a_unit_test_and_a_place_in_the_docs() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    cases = [case for test in yaml.safe_load(RULES_TEST.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    page = (REPOSITORY / "docs" / "observability.md").read_text()
    assert set(re.findall(r"`(Baton\w+)`", page)) == alerts
    assert all({"summary", "description"} <= rule["annotations"].keys() for rule in rules() if "alert" in rule)


def test_rules_lie_in_what_is_installed() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in Path(FOLDER.parents[1]).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert all(path.suffix == ".py" or f"*{path.suffix}" in patterns for path in files)
