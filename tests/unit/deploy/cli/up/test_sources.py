"""What `baton up` finds wrong in a file or the environment, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.cli.up.sources import check_sources, read_variables, unread_variables, with_sources
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from shared.config import misspelt_variables
from tests.support.paths import REPOSITORY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[scheduler]\nmax_runing = 3\n", r"max_runing \(from FILE \[scheduler\]\): unknown key, near are max_running"),
        ("[coordinator]\nqueue_limt = 1\n", r"queue_limt \(from FILE \[coordinator\]\): unknown key"),
        ("[scheduler]\nmax_running = 'many'\n", r"max_running = 'many' \(from FILE \[scheduler\]\): "),
        ("[schedular]\nmax_running = 3\n", r"\[schedular\] \(from FILE\): no such service; tables are .*scheduler"),
        ("log_levle = 'info'\n", r"log_levle \(from FILE\): no setting of every service.*log_level is near"),
    ],
)
def test_what_a_service_would_refuse_in_its_file_is_refused_first(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "stack.toml"
    file.write_text(text)
    with pytest.raises(CommandError, match=said.replace("FILE", re.escape(str(file)))):
        check_sources(file, {})


def test_what_a_service_would_refuse_in_the_environment_is_refused_first() -> None:
    with pytest.raises(CommandError, match=r"max_runing \(from environment BATON_SCHEDULER_MAX_RUNING\).*max_running"):
        check_sources(None, {"BATON_SCHEDULER_MAX_RUNING": "3"})
    check_sources(None, {"BATON_SCHEDULER_MAX_RUNNING": "3", "BATON_LOG_LEVEL": "debug"})


@pytest.mark.parametrize(
    ("typed", "assigned"),
    [({"port": 1, "log_level": "info"}, {}), ({"log_level": "info"}, {"gateway": {"port": "1"}})],
    ids=["options", "--set"],
)
def test_nobody_reads_a_bad_value_that_the_command_line_overrides(
    typed: dict[str, object], assigned: dict[str, dict[str, str]]
) -> None:
    """Kubernetes has such a variable for a service that is called baton-gateway."""
    environment = {"BATON_GATEWAY_PORT": "tcp://10.0.0.1:80", "BATON_LOG_LEVEL": "loud"}
    assert with_sources(typed, assigned, None, environment)["port"] == 1
    for name, value in environment.items():
        with pytest.raises(CommandError, match=name):
            with_sources({}, {}, None, {name: value})


def test_variables_that_nothing_reads_are_named_with_the_nearest_that_something_does() -> None:
    read = {"BATON_GATEWAY_PORT": "1", "BATON_NATS_PASSWORD_FILE": "/f", "BATON_NAME": "s", "PATH": "/bin"}
    assert unread_variables({**read, "BATON_GATEWY_PORT": "1"}) == [
        "environment BATON_GATEWY_PORT: nothing reads it, near are BATON_GATEWAY_PORT, BATON_GATEWAY_HOST, "
        "BATON_GATEWAY_PORT_FILE"
    ]


def test_every_variable_in_the_code_is_one_that_is_read() -> None:
    files = [
        file for folder in ("deploy", "services", "shared", "kvstore") for file in REPOSITORY.glob(f"{folder}/**/*.py")
    ]
    named = {name for file in files for name in re.findall(r'"(BATON_[A-Z_]+[A-Z])"', file.read_text())}
    assert len(named) > 10
    assert named - read_variables() <= {"BATON_HOST", "BATON_MODEL_NAME"}, "but for those of docker-compose.yml"


def test_no_service_takes_a_variable_of_ours_for_a_misspelt_one() -> None:
    """Neither what anything else reads, nor what docker-compose.yml is given."""
    compose = set(re.findall(r"BATON_[A-Z_]+[A-Z]", (REPOSITORY / "docker-compose.yml").read_text()))
    environment = dict.fromkeys(read_variables() | compose, "x")
    for service, kind in CONFIGS.items():
        assert misspelt_variables(service, kind, environment) == []
