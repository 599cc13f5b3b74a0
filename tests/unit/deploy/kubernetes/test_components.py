"""Components that not every overlay has: encoders of images, and Prometheus' rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.launchers.kubernetes_launcher import WORKLOADS
from deploy.observability.prometheus_rule import MANIFEST, RULES, prometheus_rule
from services.encoder.config import EncoderConfig
from tests.support.kubernetes.manifests import Manifest, composed, named, of_kind, selects, violations
from tests.support.kubernetes.pods import Workload
from tests.unit.deploy.kubernetes.test_manifests import configuration, secrets

__all__ = ["secrets"]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, ...]:
    folder = tmp_path_factory.mktemp("overlay")
    components = [f"components/{name}" for name in ("nats", "images", "monitoring")]
    return composed(folder, {"namespace": "baton", "resources": ["base"], "components": components})


def test_encoders_are_as_tokenizers_are_but_for_what_they_need(manifests: tuple[Manifest, ...], secrets: Path) -> None:
    assert [problem for each in manifests for problem in violations(each)] == []
    encoder = named(manifests, "Deployment", "encoder")
    (container,) = Workload(encoder).containers
    config = configuration(manifests, Workload(encoder), container, secrets)
    assert isinstance(config, EncoderConfig)
    assert (config.model, config.nats_user) == ("/model", "encoder")
    assert container.target == "encoder"
    assert [each.name for each in WORKLOADS["encoder"]] == ["encoder"], "so that `baton scale` finds them"

    def rest(manifest: Manifest) -> Any:
        text = json.dumps(manifest).replace("tokenizer", "encoder").replace("TOKENIZER", "ENCODER")
        found = json.loads(text)
        found["spec"].pop("replicas")
        found["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/part-of", None)
        found["spec"]["template"]["spec"]["containers"][0].pop("resources")
        return found

    assert rest(encoder) == rest(named(manifests, "Deployment", "tokenizer")), "all else is checked of tokenizers"
    policies = [each["spec"]["podSelector"] for each in of_kind(manifests, "NetworkPolicy")]
    labels = Workload(encoder).labels
    assert sum(selects(policy, labels) for policy in policies) == 3, "default-deny, services-to-bus, Prometheus"
    budget = named(manifests, "PodDisruptionBudget", "encoder")
    assert selects(budget["spec"]["selector"], labels)


def test_the_operator_gets_the_rules_that_are_tested(manifests: tuple[Manifest, ...]) -> None:
    assert MANIFEST.read_text() == prometheus_rule(), "run python -m deploy.observability.prometheus_rule"
    rule = named(manifests, "PrometheusRule", "baton")
    assert rule["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]
    assert sum("alert" in each for group in rule["spec"]["groups"] for each in group["rules"]) > 20


def test_the_job_is_the_one_that_rules_ask_for(manifests: tuple[Manifest, ...]) -> None:
    """The operator takes it from the label of the Service that a monitor has found."""
    monitors = list(of_kind(manifests, "ServiceMonitor"))
    assert len(monitors) == 2
    for monitor in monitors:
        found = [
            each["metadata"]["labels"]
            for each in of_kind(manifests, "Service")
            if selects(monitor["spec"]["selector"], each["metadata"].get("labels", {}))
        ]
        assert [labels.get(monitor["spec"]["jobLabel"]) for labels in found] == ["baton"]


def test_a_field_that_a_rule_does_not_have_is_noticed(manifests: tuple[Manifest, ...]) -> None:
    spoilt = json.loads(json.dumps(named(manifests, "PrometheusRule", "baton")))
    spoilt["spec"]["groups"][0]["rules"][0]["record_as"] = "x"
    assert violations(spoilt)
    spoilt = json.loads(json.dumps(named(manifests, "PrometheusRule", "baton")))
    spoilt["spec"]["groups"][0]["interval"] = "soon"
    assert violations(spoilt)
