"""`--model` several times: one stack with processes for each model, and what is said of one alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli.up.assignments import parsed_settings
from deploy.cli.up.choices import stack_spec
from deploy.cli.up.counts import allows_texts_alone
from deploy.cli.up.models import chosen_models, split_assignments
from deploy.errors import CommandError
from deploy.supervisor.launch import LaunchContext, service_command
from deploy.supervisor.spec import StackSpec
from services.gateway.config import GatewayConfig
from tests.support.paths import DEMO_MODEL

BOTH = (f"org/a={DEMO_MODEL}", f"b={DEMO_MODEL}")
WHERE = LaunchContext(port=8001, rendezvous="127.0.0.1:9")


def described(
    folder: Path, *settings: str, models: tuple[str, ...] = BOTH, config: Path | None = None, **typed: object
) -> StackSpec:
    said = split_assignments(settings)
    options = {"device": "sim", "kvstore_memory": "0", **typed}
    return stack_spec(
        options,
        parsed_settings(said.shared),
        name="s",
        run_dir=folder,
        config=config,
        models=models,
        own=said.own,
    )


def test_a_tokenizer_is_of_one_model(tmp_path: Path) -> None:
    alone = described(tmp_path, models=(str(DEMO_MODEL),), tokenizer=str(DEMO_MODEL))
    assert alone.model.is_relative_to(tmp_path.resolve())
    assert alone.served_model_name == DEMO_MODEL.name
    with pytest.raises(CommandError, match=r"--tokenizer .*: not with several models"):
        described(tmp_path, tokenizer=str(DEMO_MODEL))


def test_a_name_stands_before_the_model_unless_there_is_a_folder_of_that_name(tmp_path: Path) -> None:
    odd = tmp_path / "lr=1"
    odd.mkdir()
    named, unnamed, hub = chosen_models([f"org/a={DEMO_MODEL}", str(odd), "Org/Model-7B"])
    assert named == ("org/a", str(DEMO_MODEL), True)
    assert unnamed == ("lr=1", str(odd), False)
    assert hub == ("Org/Model-7B", "Org/Model-7B", False)


def test_one_model_may_be_named_so_too(tmp_path: Path) -> None:
    spec = described(tmp_path, models=BOTH[:1])
    assert (spec.served_model_name, spec.models, spec.counts.engines) == ("org/a", (), 1)
    with pytest.raises(CommandError, match="--served-model-name c: --model org/a=… names it already"):
        described(tmp_path, models=BOTH[:1], served_model_name="c")


def test_each_has_processes_of_its_own_beside_what_all_share(tmp_path: Path) -> None:
    said = ("b/engines=2", "b/tp=2", "b/worker.sim_step_ms=7", "b/max-model-len=99", "worker.threads=3")
    spec = described(tmp_path, *said, tp=1, max_model_len=50)
    assert spec.names == ("org/a", "b")
    assert (spec.counts.gateway, spec.counts.coordinator) == (2, 1)
    processes = {each.instance: each for each in spec.planned()}
    assert set(processes) == {
        *("org-a-engine-1", "org-a-engine-1-rank0", "org-a-tokenizer-1", "org-a-detokenizer-1"),
        *("b-engine-1", "b-engine-1-rank0", "b-engine-1-rank1", "b-tokenizer-1", "b-detokenizer-1"),
        *("b-engine-2", "b-engine-2-rank0", "b-engine-2-rank1"),
        *("gateway-1", "gateway-2", "coordinator-1"),
    }
    of_a, of_b = (
        service_command(spec, processes[name], WHERE)[3:] for name in ("org-a-engine-1-rank0", "b-engine-1-rank0")
    )
    assert {"--served-model-name=org/a", "--max-model-len=50", "--threads=3"} <= set(of_a)
    assert {"--served-model-name=b", "--max-model-len=99", "--threads=3", "--sim-step-ms=7", "--world-size=2"} <= set(
        of_b
    )
    assert f"--model={DEMO_MODEL.resolve()}" in of_b
    assert "--served-model-name=b" in service_command(spec, processes["b-tokenizer-1"], WHERE)
    assert "--world-size=2" in service_command(spec, processes["b-engine-2"], WHERE)
    assert "--world-size=1" in service_command(spec, processes["org-a-engine-1"], WHERE)


def seeing(folder: Path) -> Path:
    """Of a model that sees what its encoder makes of images."""
    found = folder / "seeing"
    found.mkdir()
    (found / "config.json").write_text(
        json.dumps({"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5})
    )
    return found


@pytest.mark.parametrize(
    ("table", "setting", "value", "has_encoder"),
    [
        ("worker", "language_model_only", "true", False),
        ("worker", "language_model_only", "false", True),
        ("worker", "load_format", '"dummy"', False),
        ("gateway", "max_images", "0", False),
        ("gateway", "max_images", "1", True),
    ],
)
def test_a_file_or_the_environment_says_that_there_is_no_encoder_as_a_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, setting: str, value: str, has_encoder: bool
) -> None:
    model = (str(seeing(tmp_path)),)
    file = tmp_path / "baton.toml"
    file.write_text(f"[{table}]\n{setting} = {value}\n")
    by_file = described(tmp_path, models=model, config=file, device="cpu")
    monkeypatch.setenv(f"BATON_{table}_{setting}".upper(), value.strip('"'))
    by_environment = described(tmp_path, models=model, device="cpu")
    for spec in (by_file, by_environment):
        assert bool(spec.counts.encoder) == has_encoder
        told = "language_model_only" in spec.settings.get("worker", {})
        assert told == (setting == "max_images" and not has_encoder)


def test_a_model_that_sees_and_hears_is_served_for_texts_where_nothing_of_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2_5OmniModel"], "thinker_config": {}}))
    kinds = ("max_images", "max_videos", "max_sounds")
    assert allows_texts_alone(tmp_path, GatewayConfig(**dict.fromkeys(kinds, 0)))
    for kind in kinds:
        assert not allows_texts_alone(tmp_path, GatewayConfig(**{**dict.fromkeys(kinds, 0), kind: 1}))


def test_a_model_of_which_nobody_reads_weights_has_no_encoder(tmp_path: Path) -> None:
    """However that is said, and of whichever model."""
    folder = seeing(tmp_path)
    models = (f"a={folder}", f"b={folder}")
    said = ("b/worker.device=sim",)
    for typed, settings, encoders in (
        ({"device": "cpu"}, (), [1, 1]),
        ({"device": "cpu"}, said, [1, 0]),
        ({"device": "sim"}, (), [0, 0]),
        ({"device": "cpu"}, ("b/worker.load_format=dummy",), [1, 0]),
        ({"device": "cpu"}, ("worker.load_format=dummy",), [0, 0]),
        ({"device": "cpu", "language_model_only": True}, (), [0, 0]),
        ({"device": "cpu"}, ("b/worker.language_model_only=true",), [1, 0]),
        ({"device": "cpu"}, ("gateway.max_images=0",), [0, 0]),
        ({"device": "cpu"}, ("gateway.max_videos=0",), [1, 1]),
    ):
        spec = described(tmp_path, *settings, models=models, **typed)
        assert [each.counts.encoder for each in spec.models] == encoders
        texts = [each.settings.get("worker", {}).get("language_model_only") for each in spec.models]
        assert "max_images" not in str(settings) or texts == ["true", "true"]


READ_BY_ENCODERS = (
    {"architectures": ["T5ForConditionalGeneration"], "d_model": 8},
    {"architectures": ["WhisperForConditionalGeneration"], "d_model": 8},
    {"architectures": ["BertModel"], "model_type": "bert"},
)


@pytest.mark.features("encoder-decoder", "prefill/decode", refused=True)
@pytest.mark.parametrize("config", READ_BY_ENCODERS)
def test_a_model_that_an_encoder_reads_for_has_no_pools_ranks_and_stages(
    tmp_path: Path, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for models, typed, named in (
        ((str(tmp_path),), {"prefill": 1, "decode": 2}, "--prefill 1: an encoder reads .* allowed: --engines N"),
        ((f"a={DEMO_MODEL}", f"b={tmp_path}"), {"decode": 2}, "--decode 2: an encoder reads"),
        ((str(tmp_path),), {"tp": 2}, "--tp 2: an encoder reads .*, and one rank computes it; allowed: --engines N"),
        ((f"a={DEMO_MODEL}", f"b={tmp_path}"), {"pp": 2}, "--pp 2: an encoder reads .*, and one rank computes it"),
        ((str(tmp_path),), {"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2: an encoder reads"),
        (
            (str(tmp_path),),
            {"data_parallel_size": 2},
            "--data-parallel-size 2: an encoder reads .* share nothing; allowed",
        ),
    ):
        with pytest.raises(CommandError, match=named):
            described(tmp_path, models=models, **typed)


def test_a_model_whose_images_stand_beside_prompts_has_pools_ranks_and_a_store(tmp_path: Path) -> None:
    model = (str(tmp_path),)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MllamaForConditionalGeneration"]}))
    seeing = described(tmp_path, models=model, kvstore_memory=None, device="cpu")
    assert (seeing.counts.encoder, seeing.counts.kvstore, seeing.counts.hands_over) == (1, 1, True)
    pools = described(tmp_path, models=model, kvstore_memory=None, prefill=1, decode=1, tp=2, pp=2, device="cpu")
    assert (pools.counts.encoder, pools.counts.prefill, pools.counts.stages) == (1, 1, 2)
    with pytest.raises(CommandError, match=r"--prefill-context-parallel-size: .*--language-model-only"):
        described(tmp_path, models=model, device="cpu", prefill_context_parallel_size=2)
    texts = described(tmp_path, models=model, kvstore_memory=None, tp=2, language_model_only=True, device="cpu")
    assert (texts.counts.encoder, texts.counts.kvstore, texts.counts.hands_over) == (0, 1, True)


@pytest.mark.parametrize("config", READ_BY_ENCODERS)
def test_a_store_that_no_engine_uses_is_not_started(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    hears, beside = (str(tmp_path),), (f"a={tmp_path}", f"b={DEMO_MODEL}")
    for models, stores in ((hears, 0), (beside, 1), ((f"a={tmp_path}", f"b={tmp_path}"), 0)):
        assert described(tmp_path, models=models, kvstore_memory=None).counts.kvstore == stores
    assert described(tmp_path, models=beside, kvstore_memory="32MiB").store.memory == 2**25
    for typed, named in (
        ({"kvstore_memory": "32MiB"}, "--kvstore-memory: .* use no KV store"),
        ({"kvstore_memory": None, "kv_ssd": "cache"}, "--kv-ssd: .* use no KV store"),
        ({"kvstore_memory": None, "redis": True}, "--redis: .* use no KV store"),
    ):
        with pytest.raises(CommandError, match=named):
            described(tmp_path, models=hears, **typed)


@pytest.mark.parametrize(
    ("settings", "typed", "named"),
    [
        ((), {"served_model_name": "c"}, "--served-model-name c: not with several models \\(org/a, b\\)"),
        ((), {"nodes": 2}, "--nodes 2: not with several models"),
        ((), {"advertise_address": "10.0.0.1"}, "--advertise-address 10.0.0.1: not with several models"),
        ((), {"federation_address": "10.0.0.1"}, "--federation-address 10.0.0.1: not with several models"),
        ((), {"launcher": "ray"}, "--launcher ray: not with several models"),
        ((), {"alias": ["x"]}, "--alias x: not with several models .*; --set org/a/alias=… is of one of them"),
        ((), {"lora": ["x=/y"]}, "--lora x=/y: not with .*; --set org/a/lora=… is of one of them"),
        ((), {"lora_registry": "/r.json"}, "--lora-registry /r.json: not with several models"),
        (("c/engines=2",), {}, "--set c/engines=2: the models are org/a, b"),
        (("b/port=2",), {}, "--set b/port=2: 'port' is no option of one model; there are .*max_model_len"),
        (("b/gateway.port=2",), {}, "--set b/gateway.port=2: 'gateway' is no service of one model; detokenizer"),
        (("b/engines=many",), {}, "--set b/engines=many: "),
        (("b/engines",), {}, "--set b/engines: MODEL/OPTION=VALUE"),
        (("b/kv_connector=x",), {}, "'kv_connector' is no option of one model"),
    ],
)
def test_what_several_models_cannot_have_is_refused_by_name(
    settings: tuple[str, ...], typed: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match=named) as refused:
        described(tmp_path, *settings, **typed)
    assert refused.value.status == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("b/alias=x,org/a",), "'org/a' is a name of org/a and of b"),
        (("org/a/alias=x", "b/alias=y,x"), "'x' is a name of org/a and of b"),
        (("org/a/lora=x=/y", "b/alias=x"), "'x' is a name of org/a and of b"),
    ],
)
def test_a_name_is_of_one_model(settings: tuple[str, ...], named: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=named):
        described(tmp_path, *settings)


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (("a=/x", "a=/y"), "--model a twice"),
        (("a/b=/x", "a-b=/y"), "--model a-b and a/b: names of processes would be the same"),
        (("=/x", "a=/y"), "--model =/x: NAME=PATH_OR_ID is expected"),
        (("a=",), "--model a=: NAME=PATH_OR_ID is expected"),
        (tuple(f"m{number}=/x" for number in range(65)), "--model: 65 models, 64 are allowed"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(models: tuple[str, ...], named: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=named):
        described(tmp_path, models=models)


def test_settings_of_one_model_need_several(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--set org/a/engines=2: there is one model; leave MODEL/ out"):
        described(tmp_path, "org/a/engines=2", models=BOTH[:1])
