"""Settings come from defaults < TOML < environment < flags, and whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from shared.config import ConfigError, ServiceConfig, load_config, load_or_exit, look_up_settings
from shared.settings import ByteSize, parse_bytes, settings_of


class Cooking(ServiceConfig, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port.")] = 8000
    memory: Annotated[ByteSize | None, Meta(description="Memory.")] = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    keys: tuple[str, ...] = ()
    greedy: bool = False
    salt: Annotated[float, Meta(gt=0)] = 1.0


def load(*argv: str, environment: dict[str, str] | None = None) -> Cooking:
    return load_config("cooking", Cooking, argv, environment or {})


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        'namespace = "kitchen"\n[cooking]\nport = 1\npolicy = "priority"\nsalt = 2.5\n[worker]\nunknown = 1\n'
    )
    config = load(
        "--config", str(file), "--salt", "4", environment={"BATON_COOKING_PORT": "2", "BATON_COOKING_SALT": "3"}
    )
    assert (config.namespace, config.policy, config.port, config.salt) == ("kitchen", "priority", 2, 4.0)


def test_values_are_parsed_by_their_type() -> None:
    config = load("--memory", "2GiB", "--keys", "a, b,c", "--greedy", "--nats-url", "nats://a:1,nats://b:2")
    assert (config.memory, config.keys, config.greedy) == (2 * 2**30, ("a", "b", "c"), True)
    assert config.nats_url == ("nats://a:1", "nats://b:2")


def test_common_keys_are_read_for_every_service() -> None:
    assert load(environment={"BATON_NATS_USER": "anna"}).nats_user == "anna"
    assert load(environment={"BATON_NATS_USER": "anna", "BATON_COOKING_NATS_USER": "otto"}).nats_user == "otto"


def test_an_optional_value_can_be_switched_off() -> None:
    assert load("--metrics-port", "none").metrics_port is None
    assert load("--memory", "").memory is None


@pytest.mark.parametrize(
    ("argv", "environment", "named"),
    [
        (["--port", "70000"], {}, ["port", "70000", "--port", "65535"]),
        (["--port", "many"], {}, ["port", "many", "--port"]),
        (["--policy", "fifo"], {}, ["policy", "fifo", "--policy"]),
        (["--memory", "two"], {}, ["memory", "two", "2GiB"]),
        (["--salt", "0"], {}, ["salt", "'0'", "--salt"]),
        ([], {"BATON_COOKING_PORT": "-1"}, ["port", "-1", "BATON_COOKING_PORT"]),
        ([], {"BATON_COOKING_POT": "1"}, ["pot", "BATON_COOKING_POT", "unknown"]),
        (["--namespace", "a.b"], {}, ["namespace", "a.b", "--namespace"]),
    ],
)
def test_a_bad_setting_names_key_value_and_source(
    argv: list[str], environment: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(*argv, environment=environment)
    for part in named:
        assert part in str(error.value)


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[cooking]\npot = 1\n")
    with pytest.raises(ConfigError, match=r"pot .*\[cooking\].*unknown key, port is near; docs/configuration\.md"):
        load("--config", str(file))
    file.write_text("pot = 1\n")
    with pytest.raises(ConfigError, match=r"pot .*no setting of every service.*\[worker\]"):
        load(environment={"BATON_CONFIG": str(file)})
    file.write_text("[workers]\npot = 1\n")
    with pytest.raises(ConfigError, match=r"\[workers\] .*no such service; tables are .*, worker$"):
        load("--config", str(file))
    file.write_text("[worker]\npot = 1\n")
    load("--config", str(file))
    file.write_text("= =")
    with pytest.raises(ConfigError, match=r"baton\.toml"):
        load("--config", str(file))


def test_a_password_is_never_shown() -> None:
    class Secret(ServiceConfig, frozen=True, kw_only=True):
        door_password: Annotated[str, Meta(min_length=20)] = "x" * 20

    with pytest.raises(ConfigError) as error:
        load_config("secret", Secret, ["--door-password", "hunter2"], {})
    assert "hunter2" not in str(error.value)


def test_a_path_is_one_whether_given_or_not(tmp_path: Path) -> None:
    class Placed(ServiceConfig, frozen=True, kw_only=True):
        where: Path | None = None

    assert load_config("kitchen", Placed, ["--where=/a/b"], {}).where == Path("/a/b")
    assert load_config("kitchen", Placed, ["--where=none"], {}).where is None
    (tmp_path / "baton.toml").write_text("[kitchen]\nwhere = 7\n")
    with pytest.raises(ConfigError, match="where = 7"):
        load_config("kitchen", Placed, [f"--config={tmp_path / 'baton.toml'}"], {})


def test_sizes() -> None:
    assert [parse_bytes(t) for t in ("7", "1k", "1KB", "1.5MiB", "2 GB")] == [7, 1024, 1000, 1572864, 2 * 10**9]
    for bad in ("", "-1", "1 parsec", "GiB"):
        with pytest.raises(ValueError, match="size"):
            parse_bytes(bad)


class _Optional(ServiceConfig, frozen=True, kw_only=True):
    share: Annotated[int | None, Meta(ge=1, description="Bounds on a value that may be missing.")] = None


def test_bounds_hold_for_settings_that_may_be_none() -> None:
    assert load_config("x", _Optional, ["--share=3"], {}).share == 3
    assert load_config("x", _Optional, ["--share=none"], {}).share is None
    with pytest.raises(ConfigError, match="share = '0'"):
        load_config("x", _Optional, ["--share=0"], {})


@pytest.mark.parametrize("flag", ["--whither=1", "--nats-ur=x"])
def test_a_flag_that_is_none_is_named_in_one_line(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(flag)
    assert flag in str(refused.value)
    assert "--help" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_variable_may_name_a_file_with_the_value(tmp_path: Path) -> None:
    secret, name = tmp_path / "password", tmp_path / "name"
    secret.write_text("p4ss\n")
    name.write_text("one")
    config = load_config(
        "gateway",
        ServiceConfig,
        [],
        {"BATON_NATS_PASSWORD_FILE": str(secret), "BATON_GATEWAY_INSTANCE_FILE": str(name), "BATON_NATS_USER_FILE": ""},
    )
    assert (config.nats_password, config.instance, config.nats_user) == ("p4ss", "one", None)


def test_a_value_from_a_file_is_given_once_and_readable(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"BATON_NATS_PASSWORD_FILE: {missing}: No such file"):
        load_config("gateway", ServiceConfig, [], {"BATON_NATS_PASSWORD_FILE": missing})
    both = {"BATON_NATS_PASSWORD_FILE": missing, "BATON_NATS_PASSWORD": "x"}
    with pytest.raises(ConfigError, match="BATON_NATS_PASSWORD_FILE and BATON_NATS_PASSWORD: both are set"):
        load_config("gateway", ServiceConfig, [], both)
    with pytest.raises(ConfigError, match="frobnicate"):
        load_config("gateway", ServiceConfig, [], {"BATON_GATEWAY_FROBNICATE_FILE": __file__})


@pytest.mark.parametrize(
    "argv",
    [
        ["--port=1", "--port=2", "--greedy", "--no-greedy", "--keys=a,b", "--nats-user=", "--metrics-port=none"],
        ["--no-greedy", "--greedy", "--namespace=a", "--salt=0.5", "--memory=1GiB"],
        ["--nats-user=a=b c", "--nats-password=--port"],
    ],
)
def test_flags_of_a_supervisor_mean_what_argparse_reads(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load(*argv)
    monkeypatch.setattr("shared.config._plain_flags", lambda *_: None)
    assert plain == load(*argv)


@pytest.mark.parametrize(
    "argv", [["--greedy=true"], ["--port"], ["--no-port"], ["--porting=3"], ["port=3"], ["--no_greedy"], ["-port=3"]]
)
def test_what_is_wrong_with_a_flag_argparse_says(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--help shows every flag"):
        load(*argv)


def test_settings_are_looked_up_before_processes_are_forked() -> None:
    class Baking(Cooking, frozen=True, kw_only=True):
        oven: str = "gas"

    look_up_settings()
    before = settings_of.cache_info().misses
    assert "oven" in settings_of(Baking)
    assert settings_of.cache_info().misses == before


def test_a_service_names_variables_that_are_probably_misspelt_and_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cooking"])
    monkeypatch.setenv("BATON_COKING_PORT", "1")
    monkeypatch.setenv("BATON_LOGLEVEL", "debug")
    monkeypatch.setenv("BATON_KV_SSD_SIZE", "1GiB")
    assert load_or_exit("cooking", Cooking).log_level == "info"
    assert capsys.readouterr().err.splitlines() == [
        "cooking: environment BATON_COKING_PORT: nothing reads it, BATON_COOKING_PORT is near",
        "cooking: environment BATON_LOGLEVEL: nothing reads it, BATON_LOG_LEVEL is near",
    ]
