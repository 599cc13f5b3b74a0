"""What the containers are made of agrees with what the services say of themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deploy.configuration import CONFIGS
from deploy.healthcheck import is_healthy
from deploy.supervisor.servers.nats_config import container_config
from shared.config import load_config
from shared.settings import parse_bytes
from tests.support.paths import REPOSITORY


def test_the_containers_bus_has_the_same_permissions_as_ours() -> None:
    written = (REPOSITORY / "deploy" / "nats.conf").read_text()
    assert written == container_config(), "run: python -m deploy.supervisor.servers.nats_config > deploy/nats.conf"


def test_every_choice_is_explained_and_has_the_default_that_is_shown() -> None:
    compose = (REPOSITORY / "docker-compose.yml").read_text()
    lines = (REPOSITORY / ".env.example").read_text().splitlines()
    choices = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for name, default in choices.items():
        assert f"${{{name}:-{default}}}" in compose, name
    assert all(part.split(":-")[0] in choices for part in compose.split("${")[1:])


def compose() -> dict[str, Any]:
    """The file with every choice at its default."""
    text = (REPOSITORY / "docker-compose.yml").read_text()
    filled = re.sub(r"\$\{\w+:-([^}]*)\}", lambda found: found[1], text)
    parsed: dict[str, Any] = yaml.safe_load(filled)
    return parsed


def started_by(*profiles: str) -> set[str]:
    services = compose()["services"].items()
    return {name for name, each in services if not each.get("profiles") or set(profiles) & set(each["profiles"])}


PLAIN = {"nats", "gateway", "tokenizer", "coordinator", "scheduler", "worker", "detokenizer", "kvstore"}


def test_without_a_profile_one_engine_does_everything() -> None:
    assert started_by() == started_by("aggregated") == PLAIN
    assert {compose()["services"][name]["scale"] for name in ("scheduler", "worker")} == {1}


def test_profiles_add_pools_and_a_redis() -> None:
    pools = {f"{service}-{role}" for service in ("scheduler", "worker") for role in ("prefill", "decode")}
    assert started_by("disaggregated") == PLAIN | pools
    assert started_by("redis") == PLAIN | {"redis"}


@pytest.mark.parametrize("container", sorted(compose()["services"].keys() - {"nats", "redis"}))
def test_every_container_is_told_only_what_its_service_knows(container: str) -> None:
    service = container.split("-")[0]
    told = {key: str(value) for key, value in compose()["services"][container]["environment"].items()}
    config = load_config(service, CONFIGS[service], [], told)
    assert config.nats_user == service


def test_an_engines_containers_name_each_other_and_the_stores_node() -> None:
    told = {name: each.get("environment", {}) for name, each in compose()["services"].items()}
    for engine in ("", "-prefill", "-decode"):
        scheduler, worker = told[f"scheduler{engine}"], told[f"worker{engine}"]
        assert worker["BATON_WORKER_ENGINE"] == scheduler["BATON_INSTANCE"]
        assert scheduler["BATON_SCHEDULER_NODE"] == told["kvstore"]["BATON_KVSTORE_NODE"]
        assert worker["BATON_WORKER_KVSTORE_DIR"] == told["kvstore"]["BATON_KVSTORE_DIRECTORY"]
        assert scheduler.get("BATON_SCHEDULER_ROLE", "") == engine.removeprefix("-")


def test_the_arena_fits_its_volume() -> None:
    options = dict(each.split("=") for each in compose()["volumes"]["arena"]["driver_opts"]["o"].split(","))
    memory = compose()["services"]["kvstore"]["environment"]["BATON_KVSTORE_KVSTORE_MEMORY"]
    assert parse_bytes(memory) < parse_bytes(options["size"])


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
