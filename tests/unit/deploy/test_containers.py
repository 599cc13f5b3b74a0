"""What the containers are made of agrees with what the services say of themselves."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.configuration import CONFIGS
from deploy.container_secrets import SERVICES, make
from deploy.healthcheck import is_healthy
from deploy.supervisor.servers.nats_config import CONTAINER_CONFIGS, container_config
from shared.bus.nats_connection import NatsOptions, connect
from shared.config import load_config
from shared.settings import parse_bytes
from tests.support.cluster.nats_server import BINARY
from tests.support.cluster.ports import free_port
from tests.support.paths import REPOSITORY


def test_the_containers_bus_has_the_same_permissions_as_ours() -> None:
    assert len(CONTAINER_CONFIGS) == 2
    for path in CONTAINER_CONFIGS:
        assert path.read_text() == container_config(), "run: python -m deploy.supervisor.servers.nats_config"


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


PLAIN = {"secrets", "nats", "gateway", "tokenizer", "coordinator", "scheduler", "worker", "detokenizer", "kvstore"}


FOREIGN = {"nats", "redis", "prometheus", "grafana"}


def test_without_a_profile_one_engine_does_everything() -> None:
    assert started_by() == started_by("aggregated") == PLAIN
    assert {compose()["services"][name]["scale"] for name in ("scheduler", "worker")} == {1}


def test_profiles_add_pools_and_a_redis() -> None:
    pools = {f"{service}-{role}" for service in ("scheduler", "worker") for role in ("prefill", "decode")}
    assert started_by("disaggregated") == PLAIN | pools
    assert started_by("redis") == PLAIN | {"redis"}
    assert started_by("observability") == PLAIN | {"prometheus", "grafana"}
    assert started_by("gpu") == PLAIN | {"scheduler-gpu", "worker-gpu"}


def test_a_gpu_is_given_to_the_ranks_of_that_profile_alone() -> None:
    given = {name for name, each in compose()["services"].items() if "deploy" in each}
    assert given == {"worker-gpu"}
    (device,) = compose()["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    text = (REPOSITORY / "docker-compose.yml").read_text()
    ranks = set(re.findall(r"(\S+): \$\{BATON_GPUS:-1\}", text))
    assert ranks == {"BATON_SCHEDULER_WORLD_SIZE", "BATON_WORKER_LOCAL_RANKS", "BATON_WORKER_WORLD_SIZE"}


def test_prometheus_scrapes_every_service_by_its_name_in_the_network() -> None:
    scraped = yaml.safe_load((REPOSITORY / "deploy/observability/prometheus/prometheus.yml").read_text())
    (source,) = scraped["scrape_configs"][0]["dns_sd_configs"]
    assert set(source["names"]) == compose()["services"].keys() - FOREIGN - {"secrets"}


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_watches_is_reached_from_this_machine_alone_and_finds_its_files(name: str) -> None:
    described = compose()["services"][name]
    assert all(port.startswith("127.0.0.1:") for port in described["ports"])
    mounted = [volume.split(":")[0] for volume in described["volumes"] if volume.startswith("./")]
    assert mounted
    assert all((REPOSITORY / folder).is_dir() for folder in mounted)


@pytest.mark.parametrize("container", sorted(compose()["services"].keys() - FOREIGN - {"secrets"}))
def test_every_container_is_told_only_what_its_service_knows(container: str, secrets: Path) -> None:
    service, described = container.split("-")[0], compose()["services"][container]
    told = {key: "" if value is None else str(value) for key, value in described["environment"].items()}
    mounted = secrets / service
    assert f"secret-{service}:/run/baton:ro" in described["volumes"]
    assert [each for each in described["volumes"] if each.startswith("secret-")] == [f"secret-{service}:/run/baton:ro"]
    inside = {name: value.replace("/run/baton", str(mounted)) for name, value in told.items()}
    config = load_config(service, CONFIGS[service], [], inside)
    assert (config.nats_user, config.nats_password) == (service, (mounted / "nats-password").read_text())


def made_secrets(folder: Path) -> Path:
    for name in (*SERVICES, "nats", "redis"):
        (folder / name).mkdir(exist_ok=True)
    make(folder)
    return folder


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    return made_secrets(tmp_path)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_secrets_are_made_once_and_are_private(secrets: Path) -> None:
    first = contents(secrets)
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets.rglob("*"))
    passwords = [text for name, text in first.items() if name.endswith("-password") or name == "redis/password"]
    assert len(set(passwords)) == len(passwords) == len(SERVICES) + 2
    assert min(map(len, passwords)) >= 32
    (secrets / "worker" / "nats-password").unlink()
    make(secrets)
    assert contents(secrets) == first


def test_a_volume_holds_the_password_of_its_own_service_only(secrets: Path) -> None:
    found = contents(secrets)
    for service in SERVICES:
        password = found[f"{service}/nats-password"]
        assert {name.split("/")[0] for name, text in found.items() if password in text} == {service, "nats"}
    kept = found["redis/password"]
    assert {name.split("/")[0] for name, text in found.items() if kept in text} == {"redis", "kvstore"}


def test_no_secret_stands_in_the_compose_file_or_on_a_command_line() -> None:
    for name, described in compose()["services"].items():
        told = {**described.get("environment", {}), **described.get("build", {}).get("args", {})}
        assert [key for key in told if "PASSWORD" in key and not key.endswith("_FILE")] == [], name
        assert "pass" not in " ".join(described.get("command", [])), name


@pytest.fixture
def containers_nats(secrets: Path) -> Iterator[str]:
    """A server as the containers' one, but for its address."""
    folder = secrets / "etc"
    folder.mkdir()
    (folder / "secrets").symlink_to(secrets / "nats")
    port = free_port()
    config = (REPOSITORY / "deploy" / "nats.conf").read_text().replace("0.0.0.0", "127.0.0.1")
    (folder / "baton.conf").write_text(config.replace("port: 4222", f"port: {port}"))
    server = subprocess.Popen([str(BINARY), "-c", str(folder / "baton.conf")], stderr=subprocess.DEVNULL)
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


async def test_nats_server_takes_the_containers_configuration(secrets: Path, containers_nats: str) -> None:
    for user in (*SERVICES, "operator"):
        place = "nats/operator-password" if user == "operator" else f"{user}/nats-password"
        password = (secrets / place).read_text()
        options = NatsOptions(servers=(containers_nats,), user=user, password=password, connect_timeout=60.0)
        bus = await connect(options)
        await bus.close()


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
