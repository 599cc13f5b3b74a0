"""What the containers are made of agrees with what the services say of themselves."""

from __future__ import annotations

from pathlib import Path

from deploy.healthcheck import is_healthy
from deploy.supervisor.nats_config import container_config

REPOSITORY = Path(__file__).parents[2]


def test_the_containers_bus_has_the_same_permissions_as_ours() -> None:
    written = (REPOSITORY / "deploy" / "nats.conf").read_text()
    assert written == container_config(), "run: python -m deploy.supervisor.nats_config > deploy/nats.conf"


def test_every_choice_is_explained_and_has_the_default_that_is_shown() -> None:
    compose = (REPOSITORY / "docker-compose.yml").read_text()
    lines = (REPOSITORY / ".env.example").read_text().splitlines()
    choices = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for name, default in choices.items():
        assert f"${{{name}:-{default}}}" in compose, name
    assert all(part.split(":-")[0] in choices for part in compose.split("${")[1:])


def metrics(phase: str) -> str:
    phases = ("starting", "ready", "draining", "failed")
    lines = [f'baton_phase{{phase="{each}",service="scheduler"}} {float(each == phase)}' for each in phases]
    return "\n".join(["# HELP baton_phase 1 for the phase the service is in.", *lines])


def test_a_container_is_healthy_while_its_service_is_ready_or_drains() -> None:
    assert {phase: is_healthy(metrics(phase)) for phase in ("starting", "ready", "draining", "failed")} == {
        "starting": False,
        "ready": True,
        "draining": True,
        "failed": False,
    }
    assert not is_healthy("")
