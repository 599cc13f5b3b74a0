"""promtool reads the configuration, the rules and every query, and runs the alert rules' unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.observability.scraping import RULES, configuration
from tests.support.paths import REPOSITORY
from tests.support.prometheus_server import promtool

HERE = Path(__file__).parent


def test_alerts_come_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(HERE / "rules_test.yml"))


def test_an_alert_that_never_comes_would_be_noticed(tmp_path: Path) -> None:
    """The unit tests of rules can fail: those of one, as all of them take long."""
    alert = "BatonKvMemoryFull"
    (tmp_path / "rules.yml").write_text(RULES.read_text().replace("> 0.95", "> 1.95"))
    file = yaml.safe_load((HERE / "rules_test.yml").read_text())
    own = [each for each in file["tests"] if any(one["alertname"] == alert for one in each.get("alert_rule_test", ()))]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({**file, "tests": own, "rule_files": ["rules.yml"]}))
    with pytest.raises(AssertionError, match=alert):
        promtool("test", "rules", "tests.yml", folder=tmp_path)


def test_promtool_takes_the_configurations(tmp_path: Path) -> None:
    (tmp_path / "up.yml").write_text(configuration(tmp_path))
    promtool("check", "config", str(tmp_path / "up.yml"))
    containers = (REPOSITORY / "deploy/observability/prometheus/prometheus.yml").read_text()
    mounted = containers.replace("/etc/prometheus/rules", str(RULES.parent))
    (tmp_path / "containers.yml").write_text(mounted)
    said = promtool("check", "config", str(tmp_path / "containers.yml"))
    assert "rules found" in said
