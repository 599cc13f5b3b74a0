"""The options of `baton up` are the settings that offer themselves, and reach whom they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.up.choices import stack_spec
from deploy.cli.up.options import given, offers, placed, service_settings, stack_settings
from deploy.errors import CommandError
from deploy.supervisor.launch import flags
from deploy.supervisor.settings import StackSettings
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig
from shared.config import load_config


def test_what_is_not_given_leaves_every_service_its_own_default() -> None:
    values = given({"device": None, "enforce_eager": False, "api_key": [], "max_num_seqs": None})
    assert values == {}
    assert service_settings(values) == {}
    assert stack_settings(values) == StackSettings()


def test_zero_is_given() -> None:
    values = given({"port": 0, "sim_step_ms": 0.0, "disaggregate_tokens": 0})
    assert placed(values)["port"] == 0
    assert service_settings(values) == {"worker": {"sim_step_ms": "0.0"}, "coordinator": {"disaggregate_tokens": "0"}}


def test_one_option_sets_all_settings_of_its_name() -> None:
    told = service_settings(given({"max_num_seqs": 7, "max_batch_tokens": 64, "enforce_eager": True}))
    assert told == {
        "worker": {"max_num_seqs": "7", "max_batch_tokens": "64", "enforce_eager": "true"},
        "scheduler": {"max_running": "7", "max_batch_tokens": "64"},
    }


def test_what_is_said_of_a_gpu_reaches_the_worker() -> None:
    typed = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "kv_cache_dtype": None}
    argv = flags(service_settings(given(typed))["worker"])
    assert argv == ["--enforce-eager", "--gpu-memory-utilization=0.5"]
    config = load_config("worker", WorkerConfig, ["--model=m", "--engine=e", *argv], environment={})
    assert (config.enforce_eager, config.gpu_memory_utilization, config.kv_cache_dtype) == (True, 0.5, "auto")


@pytest.mark.parametrize("typed", [None, True, False])
def test_a_switch_that_is_on_by_default_can_be_turned_off(typed: bool | None) -> None:
    told = service_settings(given({"enable_prefix_caching": typed})).get("gateway", {})
    assert told == ({} if typed is None else {"enable_prefix_caching": str(typed).lower()})
    assert load_config("gateway", GatewayConfig, flags(told), environment={}).enable_prefix_caching is (
        typed is not False
    )


def test_what_speaks_to_every_service_does_and_what_the_supervisor_places_is_not_passed_on() -> None:
    values = given({"log_level": "debug", "namespace": "kitchen", "pp": 2, "tp": 3})
    assert service_settings(values) == {"*": {"log_level": "debug"}}
    assert (placed(values)["namespace"], placed(values)["pp"], placed(values)["host"]) == ("kitchen", 2, "127.0.0.1")
    assert stack_settings(values).ranks(2) == (6, 6, 6)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ({"kv_memory": "much"}, "--kv-memory 'much': a size is"),
        ({"namespace": "a b"}, "--namespace 'a b'"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0.0"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"bind": "all"}, "--bind 'all'"),
    ],
)
def test_a_value_that_no_service_takes_is_refused_before_anything_starts(typed: dict[str, object], named: str) -> None:
    with pytest.raises(CommandError) as refused:
        given(typed)
    assert named in str(refused.value)
    assert refused.value.status == 2


def test_a_stack_is_described_by_what_was_typed(tmp_path: Path) -> None:
    typed = dict.fromkeys(offers()) | {"device": "sim", "tp": 2, "engines": 2, "kvstore_memory": "0"}
    spec = stack_spec(typed, {"worker": {"sim_step_ms": "1"}}, name="s", run_dir=tmp_path, config=None)
    assert (spec.counts.engines, spec.counts.ranks, spec.counts.kvstore) == (2, 2, 0)
    assert (spec.host, spec.port, spec.namespace, spec.drain_timeout) == ("127.0.0.1", 8000, "baton", 30.0)
    assert spec.settings["worker"].keys() == {"device", "sim_step_ms", "threads"}
    assert spec.served_model_name == "baton-demo"


def test_options_that_are_dealt_out_come_from_a_file_and_the_environment_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that configuration.md names is passed over in silence."""
    file = tmp_path / "baton.toml"
    gateway = '[gateway]\nport = 1\nhost = "127.0.0.2"\napi_keys = ["k"]\n'
    file.write_text(
        f'drain_timeout = 5\n{gateway}[kvstore]\nkvstore_memory = "0"\n[worker]\nserved_model_name = "m"\npp = 2\n'
    )
    monkeypatch.setenv("BATON_GATEWAY_PORT", "2")
    monkeypatch.setenv("BATON_WORKER_PP", "1")
    sources = [({}, {}), ({"port": 3}, {}), ({"port": 3}, {"gateway": {"port": "4"}, "*": {"namespace": "n"}})]
    specs = [
        stack_spec(
            dict.fromkeys(offers()) | {"device": "sim"} | typed, assigned, name="s", run_dir=tmp_path, config=file
        )
        for typed, assigned in sources
    ]
    assert [(spec.port, spec.namespace) for spec in specs] == [(2, "baton"), (3, "baton"), (4, "n")]
    for spec in specs:
        assert (spec.host, spec.served_model_name, spec.drain_timeout) == ("127.0.0.2", "m", 5.0)
        assert (spec.api_keys, spec.counts.kvstore, spec.counts.stages) == (("k",), 0, 1)
    monkeypatch.setenv("BATON_GATEWAY_PORT", "many")
    with pytest.raises(CommandError, match=r"port = 'many' .from environment BATON_GATEWAY_PORT.: "):
        stack_spec(dict.fromkeys(offers()), {}, name="s", run_dir=tmp_path, config=None)
