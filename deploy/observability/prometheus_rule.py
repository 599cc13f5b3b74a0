"""The alert rules as a PrometheusRule of the Prometheus Operator.

    python -m deploy.observability.prometheus_rule      # writes deploy/kubernetes/components/monitoring/rules.yaml

It needs PyYAML, which only those need who change the rules.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE / "prometheus" / "rules" / "baton.yml"
MANIFEST = HERE.parent / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEAD = """\
# Written by `python -m deploy.observability.prometheus_rule` from deploy/observability/prometheus/rules/baton.yml,
# which has the reasons. The ServiceMonitors' `jobLabel` makes the job "baton", which the rules ask for.
"""


def prometheus_rule() -> str:
    """The manifest, as it is written."""
    import yaml

    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(manifest, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    MANIFEST.write_text(prometheus_rule(), encoding="utf-8")
