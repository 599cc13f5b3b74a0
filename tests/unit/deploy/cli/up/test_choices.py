"""From what was typed to what each process is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.cli.ps import duration
from deploy.cli.up.assignments import parsed_settings
from deploy.cli.up.choices import check_adapters, check_gateway, worker_configs
from deploy.cli.up.counts import counts_of, engines_of_groups
from deploy.errors import CommandError
from deploy.model_choice import DEMO_MODEL, folder_with_tokenizer, model_directory, model_folder, served_name
from deploy.supervisor.core.plan import Counts, all_process_specs
from deploy.supervisor.launch import LaunchContext, flags, secret_settings, service_command
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import ClusterSpec, ModelSpec, StackSpec, StoreSpec
from shared.ids import ModelName, NodeId
from tests.support.cluster.tls_authority import Authority

WHERE = LaunchContext(port=8001, rendezvous="127.0.0.1:9")


def spec(**more: object) -> StackSpec:
    made: dict[str, object] = {"name": "t", "run_dir": Path("/r"), "model": Path("/m"), "served_model_name": "m"}
    made |= {"host": "127.0.0.1", "port": 8000, "namespace": "baton", "log_level": "info"}
    made |= {"drain_timeout": 30.0, "start_timeout": 600.0}
    return StackSpec(**(made | more))  # type: ignore[arg-type]


def commands(spec: StackSpec) -> dict[str, list[str]]:
    return {process.instance: service_command(spec, process, WHERE) for process in all_process_specs(spec.counts)}


def test_every_process_is_a_module_of_this_python_with_its_name_and_its_end_of_the_pipe() -> None:
    for instance, argv in commands(spec(counts=Counts(ranks=2))).items():
        assert argv[:2] == [sys.executable, "-m"]
        assert argv[2].startswith("services.")
        assert f"--instance={instance}" in argv
        assert f"--supervisor-lock={spec().run_dir}/lock" in argv


def test_the_users_settings_win_over_ours() -> None:
    told = commands(spec(settings={"*": {"drain_timeout": "7"}, "gateway": {"host": "::1"}}))
    assert "--drain-timeout=7" in told["engine-1"]
    assert "--host=::1" in told["gateway-1"]
    assert not any("--host=127.0.0.1" in argv for argv in told["gateway-1"])


def test_switches_are_flags_without_values() -> None:
    assert flags({"reuse_port": "true", "prefix_caching": "false", "n": "3"}) == [
        "--reuse-port",
        "--no-prefix-caching",
        "--n=3",
    ]


def test_keys_go_by_environment_to_the_gateways_only() -> None:
    guarded = spec(api_keys=("k1", "k2"))
    told = {process.service: secret_settings(guarded, process, WHERE) for process in all_process_specs(guarded.counts)}
    assert told.pop("gateway") == {"BATON_GATEWAY_API_KEYS": "k1,k2"}
    assert set(map(str, told.values())) == {"{}"}
    assert not any("k1" in part for argv in commands(guarded).values() for part in argv)


def test_gateways_keep_records_in_the_run_directory_and_a_databases_url_goes_by_environment() -> None:
    assert "--database-file=/r/database.sqlite" in commands(spec())["gateway-1"]
    chosen = spec(settings=parsed_settings(["gateway.database=postgresql://u:secret@h/d"]))
    assert not any("secret" in part for argv in commands(chosen).values() for part in argv)
    (gateway,) = (each for each in all_process_specs(chosen.counts) if each.service == "gateway")
    assert secret_settings(chosen, gateway, WHERE) == {"BATON_GATEWAY_DATABASE": "postgresql://u:secret@h/d"}


def test_a_gateway_of_a_host_that_joins_has_no_file_of_its_own() -> None:
    joined = ClusterSpec(node=NodeId("n2"), address="10.0.0.2", route_port=6222, first="n1 at 10.0.0.1")
    assert not any("database" in part for part in commands(spec(cluster=joined))["gateway-1"])


def test_ranks_of_a_pool_are_told_their_number_and_schedulers_their_role() -> None:
    pools = Counts(engines=1, prefill=1, decode=1, decode_ranks=2)
    told = {instance: set(argv) for instance, argv in commands(spec(counts=pools)).items()}
    assert told["prefill-1"] >= {"--role=prefill", "--world-size=1"}
    assert told["decode-1"] >= {"--role=decode", "--world-size=2"}
    assert told["decode-1-rank1"] >= {"--engine=decode-1", "--rank=1", "--world-size=2", "--rendezvous=127.0.0.1:9"}
    assert not any("rendezvous" in flag for flag in told["prefill-1-rank0"])
    assert not any(flag.startswith("--role") for flag in told["engine-1"])


def test_store_schedulers_and_ranks_are_told_of_one_node_and_one_directory() -> None:
    stack = spec(counts=Counts(kvstore=1), store=StoreSpec(node=NodeId("n1"), memory=7))
    where = WHERE._replace(arenas=Path("/dev/shm/a"), redis_url="redis://:secret@h")
    told: dict[str, set[str]] = {
        s.instance: set(service_command(stack, s, where)) for s in all_process_specs(stack.counts)
    }
    assert told["kvstore-1"] >= {"kvstore", "--node=n1", "--directory=/dev/shm/a", "--kvstore-memory=7"}
    assert "--node=n1" in told["engine-1"]
    assert "--kvstore-dir=/dev/shm/a" in told["engine-1-rank0"]
    secrets: dict[str, dict[str, str]] = {
        process.instance: secret_settings(stack, process, where) for process in all_process_specs(stack.counts)
    }
    assert secrets.pop("kvstore-1") == {"BATON_KVSTORE_REDIS_URL": "redis://:secret@h"}
    assert set(map(str, secrets.values())) == {"{}"}
    assert not any("secret" in flag for flags_ in told.values() for flag in flags_)


def test_secrets_that_are_set_by_hand_go_by_environment_too() -> None:
    typed = ["gateway.api_keys=secret-1", "kvstore.redis_url=redis://:secret-2@h", "nats_password=secret-3"]
    stack = spec(counts=Counts(kvstore=1), settings=parsed_settings([*typed, "gateway.max_body=7"]))
    told = commands(stack)
    assert not any("secret" in flag for argv in told.values() for flag in argv)
    assert "--max-body=7" in told["gateway-1"]
    secrets = {str(each.instance): secret_settings(stack, each, WHERE) for each in all_process_specs(stack.counts)}
    assert secrets["gateway-1"] == {"BATON_GATEWAY_API_KEYS": "secret-1", "BATON_GATEWAY_NATS_PASSWORD": "secret-3"}
    assert secrets["kvstore-1"]["BATON_KVSTORE_REDIS_URL"] == "redis://:secret-2@h"
    assert secrets["tokenizer-1"] == {"BATON_TOKENIZER_NATS_PASSWORD": "secret-3"}


def test_without_a_store_nobody_is_told_of_one() -> None:
    flags_ = [flag for argv in commands(spec()).values() for flag in argv]
    assert not any(flag.startswith(("--node", "--kvstore", "--role")) for flag in flags_)


def test_a_model_is_called_as_asked_or_as_its_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert served_name(None, None) == "baton-demo"
    assert served_name("org/name", None) == served_name("org/name@v1", None) == "org/name"
    assert served_name("org/name@v1:Q8_0", None) == "org/name:Q8_0"
    assert served_name(str(tmp_path), None) == tmp_path.name
    assert served_name(str(tmp_path), "mine") == "mine"
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json"):
        model_directory(str(tmp_path))


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (0.4, "0s"), (187, "3m07s"), (18_725, "5h12m"), (187_200, "2d04h")]
)
def test_durations_are_short(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_ranks_of_a_pipeline_are_told_its_stages_and_their_layers() -> None:
    pools = Counts(ranks=4, stages=2, prefill=1, prefill_ranks=2)
    told = {i: set(argv) for i, argv in commands(spec(counts=pools, pp_layers=(4, 2))).items()}
    assert told["engine-1-rank3"] >= {"--rank=3", "--world-size=4", "--pp=2", "--pp-layers=4,2"}
    assert "--world-size=4" in told["engine-1"]
    assert not any(flag.startswith("--pp") for flag in told["prefill-1-rank1"])


def test_without_weights_a_shape_will_do_for_a_model(tmp_path: Path) -> None:
    folder = model_folder("qwen3-0.6b", "dummy", tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 28
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode([2048, 151935]).strip() == "2048 151935", "all tokens have a text"
    assert (
        tokenizer.encode("a fox 2048").ids
        == Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode("a fox 2048").ids
    )
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path), "dummy", tmp_path) == tmp_path
    assert model_folder(None, None, tmp_path) == model_directory(None)
    with pytest.raises(CommandError, match=r"config\.json"):
        model_folder(str(tmp_path / "shapes"), "dummy", tmp_path)


def test_a_stack_that_is_open_to_strangers_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"host 0\.0\.0\.0: .* \(--api-key, .* or --insecure"):
        check_gateway(spec(host="0.0.0.0"))
    check_gateway(spec(host="0.0.0.0", api_keys=("k",)))
    check_gateway(spec(host="0.0.0.0", settings={"gateway": {"insecure": "true"}}))
    config = tmp_path / "baton.toml"
    config.write_text('[gateway]\napi_keys = ["k"]\n')
    check_gateway(spec(host="0.0.0.0", config=config))


@pytest.mark.parametrize("keys", [("",), ("k", "")])
def test_an_empty_key_is_refused_as_it_would_let_everybody_in(keys: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="--api-key: '' is no key"):
        check_gateway(spec(api_keys=keys))


def test_a_file_of_keys_is_read_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[keys.alice]\n")
    with pytest.raises(CommandError, match=r"keys\.alice: .*hash"):
        check_gateway(spec(settings={"gateway": {"keys_file": str(file)}}))


def test_a_certificate_is_read_before_anything_starts_and_known_whoever_names_it(tmp_path: Path) -> None:
    certificate, key, _ = Authority(tmp_path / "ca").files("gateway")
    config = tmp_path / "baton.toml"
    config.write_text(f'[gateway]\nssl_certfile = "{certificate}"\nssl_keyfile = "{key}"\n')
    assert check_gateway(spec(config=config)).settings["gateway"] == {"ssl_certfile": certificate, "ssl_keyfile": key}
    with pytest.raises(CommandError, match=r"TLS of the HTTP port: .*baton\.toml and .*: no"):
        check_gateway(spec(config=config, settings={"gateway": {"ssl_certfile": str(config)}}))
    assert check_gateway(spec()) == spec()


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_stack_knows_that_its_gateways_want_certificates_whoever_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    certificate, key, authority = Authority(tmp_path / "ca").files("gateway")
    files = {"ssl_certfile": certificate, "ssl_keyfile": key}
    config = tmp_path / "baton.toml"
    config.write_text(f'[gateway]\nssl_ca_certs = "{authority}"\n' if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("BATON_GATEWAY_SSL_CA_CERTS", authority)
    if source == "flag":
        files["ssl_ca_certs"] = authority
    assert check_gateway(spec(config=config, settings={"gateway": files})).wants_certificates


def test_an_adapter_is_looked_for_before_anything_starts_whoever_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "baton.toml"
    config.write_text('[worker]\nlora = ["a=/nope"]\n')
    said = r"^--lora a=/nope: there is no /nope/adapter_config\.json"
    of_one = ModelSpec(
        name=ModelName("b"),
        model=Path("/m"),
        counts=Counts(model=ModelName("b")),
        settings={"worker": {"lora": "a=/nope"}},
    )
    for each in (spec(config=config), spec(config=config, counts=Counts(colocate=True)), spec(models=(of_one,))):
        with pytest.raises(CommandError, match=said):
            check_adapters(worker_configs(each).values())
    check_adapters(worker_configs(spec(config=config, settings={"worker": {"lora": ""}})).values())
    monkeypatch.setenv("BATON_WORKER_LORA", "a=/nope")
    with pytest.raises(CommandError, match=said):
        check_adapters(worker_configs(spec()).values())


@pytest.mark.parametrize(
    ("settings", "pp", "said"),
    [
        ({}, 2, "--pp 2"),
        ({"standby": 1}, 1, "--standby 1"),
        ({"nodes": 2}, 1, "--nodes 2"),
        ({"advertise_address": "10.0.0.1"}, 1, "--advertise-address 10.0.0.1"),
        ({"launcher": "ray"}, 1, "--launcher ray"),
        ({"engines": 3}, 1, "--engines 3: whole groups are needed, of --data-parallel-size 2 engines each"),
        ({"engines": 0}, 1, "--engines 0: whole groups are needed"),
    ],
)
def test_what_engines_of_a_data_parallel_group_cannot_be_is_refused(
    settings: dict[str, object], pp: int, said: str
) -> None:
    with pytest.raises(CommandError, match=said):
        engines_of_groups(2, StackSettings(**settings), pp)  # type: ignore[arg-type]


@pytest.mark.features("data parallel", "prefill/decode", refused=True)
def test_engines_of_a_data_parallel_group_are_in_no_pool() -> None:
    for pools in ({"prefill": 1}, {"decode": 1}):
        with pytest.raises(CommandError, match=r"share experts on one host; not with --(prefill|decode) 1"):
            engines_of_groups(2, StackSettings(**pools), 1)


def test_a_data_parallel_group_is_so_many_engines_unless_there_are_several() -> None:
    assert engines_of_groups(2, StackSettings(), 1) == 2
    assert engines_of_groups(2, StackSettings(engines=4), 1) == 4
    assert engines_of_groups(1, StackSettings(), 1) is None


def test_ranks_share_prompts_where_any_are_computed() -> None:
    stack = StackSettings(engines=1, prefill=1, decode=1)
    counts = counts_of(stack, 1, has_store=True, context_parallel=2)
    assert (counts.ranks, counts.prefill_ranks, counts.decode_ranks) == (2, 2, 1)
    told = commands(spec(counts=counts))
    for engine in ("engine-1", "prefill-1"):
        assert {"--prefill-context-parallel-size=2", "--world-size=2"} <= set(told[f"{engine}-rank1"])
    assert not any(flag.startswith("--prefill-context") for flag in told["decode-1-rank0"])
    for refused, size in (({"tp": 2}, 1), ({"tp_prefill": 2}, 1), ({"pp_prefill": 2}, 1), ({"nodes": 2}, 1), ({}, 2)):
        with pytest.raises(CommandError, match="--prefill-context-parallel-size 2: its ranks have all weights each"):
            counts_of(StackSettings(**refused), 1, has_store=True, data_parallel=size, context_parallel=2)


def test_ranks_are_told_their_place_in_their_group() -> None:
    told = commands(spec(counts=Counts(engines=4, data_parallel=2)))
    for number, rank in ((1, 0), (2, 1), (3, 0), (4, 1)):
        own = told[f"engine-{number}-rank0"]
        assert {"--data-parallel-size=2", f"--data-parallel-rank={rank}", "--world-size=1"} <= set(own)
        assert "--rendezvous=127.0.0.1:9" in own


def test_a_model_may_have_another_tokenizer(tmp_path: Path) -> None:
    other, run_dir = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, other / name)
    (other / "chat_template.jinja").write_text("other")
    folder = folder_with_tokenizer(DEMO_MODEL, str(other), run_dir, is_local=True)
    assert folder.is_relative_to(run_dir.resolve())
    assert (folder / "chat_template.jinja").read_text() == "other"
    assert (folder / "tokenizer.json").resolve() == (other / "tokenizer.json").resolve()
    assert (folder / "config.json").resolve() == (DEMO_MODEL / "config.json").resolve()
    assert {path.name for path in folder.iterdir()} >= {path.name for path in DEMO_MODEL.glob("*.safetensors")}
    assert folder_with_tokenizer(DEMO_MODEL, str(other), run_dir, is_local=True) == folder
    grown = json.loads((other / "tokenizer.json").read_bytes())
    grown["model"]["vocab"] |= {f"word{i}": i for i in range(len(grown["model"]["vocab"]), 4096)}
    (other / "tokenizer.json").write_text(json.dumps(grown))
    with pytest.raises(CommandError, match="tokens; the model has rows for"):
        folder_with_tokenizer(DEMO_MODEL, str(other), run_dir, is_local=True)
    with pytest.raises(CommandError, match=r"--tokenizer .*: no tokenizer\.json there"):
        folder_with_tokenizer(DEMO_MODEL, str(tmp_path), run_dir, is_local=True)
    with pytest.raises(CommandError, match="not with --launcher ray"):
        folder_with_tokenizer(DEMO_MODEL, str(other), run_dir, is_local=False)


def test_repositories_are_looked_for_where_the_command_says(tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads the folder as it is loaded."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    code = """
import sys
from deploy.cli.up.command import fetch_to
from shared.models.model_files import resolve_model
fetch_to(sys.argv[1])
print(resolve_model("owner/name", weights=False))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == snapshot
