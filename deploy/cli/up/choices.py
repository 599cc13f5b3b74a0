"""From what was typed to a `StackSpec`: the model's directory, each service's settings."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from deploy.cli.up.assignments import Settings, check_journal, merged, parsed_settings
from deploy.cli.up.counts import (
    allows_texts_alone,
    check_engines,
    check_hand_overs,
    check_images_beside,
    counts_of,
    cpu_share,
    encoders,
    hands_over,
    layer_split,
    max_instances,
)
from deploy.cli.up.federation import federation_choice
from deploy.cli.up.machine import gpu_choice, numa_choice
from deploy.cli.up.models import (
    ChosenModel,
    check_names,
    check_together,
    chosen_models,
    first_of,
    own_settings,
)
from deploy.cli.up.options import given, placed, service_settings, stack_settings
from deploy.cli.up.other_hosts import check_certificates, check_outside_bus, cluster_choice, hosts_choice
from deploy.cli.up.sources import with_sources
from deploy.cli.up.store import node_name, ssd_settings, store_choice, with_connector, without_unused_store
from deploy.errors import CommandError
from deploy.model_choice import folder_with_tokenizer, model_folder, served_name
from deploy.supervisor.adoption import LeftStack, left_stack
from deploy.supervisor.core.plan import Counts, all_process_specs, process_specs
from deploy.supervisor.launch import LaunchContext, secret_settings, service_command
from deploy.supervisor.servers.arenas import clear_leftovers
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import ClusterSpec, HostsSpec, ModelSpec, OutsideBus, RaySpec, StackSpec, StoreSpec
from services.gateway.config import GatewayConfig
from services.gateway.core.api_keys import KeyFileError
from services.gateway.http.certificates import CertificateError
from services.gateway.key_file import KeyFileWatcher
from services.worker.config import WorkerConfig
from services.worker.distributed.binding import available_cores
from services.worker.platforms.names import check_device_name
from services.worker.speculation.settings import SpeculationError, check_supported, read_speculation
from shared.config import ConfigError, ServiceConfig, load_config, process_environment
from shared.ids import ModelName
from shared.machine.home import expanded
from shared.plugins.entry_points import PluginError
from shared.settings import settings_of

_Part = TypeVar("_Part", StackSpec, ModelSpec)


class _Options(NamedTuple):
    """What was typed, by whose it is."""

    values: Mapping[str, Any]
    """All, by their names."""
    assigned: Settings
    """What `--set` said, which wins."""
    stack: StackSettings
    placed: Mapping[str, Any]
    """What is neither a service's nor of `stack`, with defaults."""
    name: str
    run_dir: Path
    config: Path | None

    @property
    def pp(self) -> int:
        """Stages of an engine."""
        stages: int = self.placed["pp"]
        return stages


class _StackLayout(NamedTuple):
    """Where the stack's processes run, and how many there are of everything."""

    counts: Counts
    store: StoreSpec | None
    hosts: HostsSpec | None
    cluster: ClusterSpec | None
    ray: RaySpec | None
    is_running: bool
    """A stack of this run directory is left, to be adopted."""


def stack_spec(
    typed: Mapping[str, Any],
    assigned: Settings,
    *,
    name: str,
    run_dir: Path,
    config: Path | None,
    models: Sequence[str] = (),
    own: Mapping[ModelName, Sequence[str]] = MappingProxyType({}),
) -> StackSpec:
    """The stack that the options describe. `assigned` is what `--set` said, which wins; `models` is what `--model` said
    each time, and `own` what `--set` said of one of several. Raises CommandError.

    Removes what a killed supervisor left in shared memory, as it takes the memory that the store is to have.
    """
    chosen = chosen_models(models)
    values = given(first_of(chosen, with_sources(typed, assigned, config, process_environment())))
    check_together(chosen, values, own)
    options = _Options(values, assigned, stack_settings(values), placed(values), name, run_dir, config)
    spec = _described(options, _layout(options))
    if spec.counts.leads:
        spec = check_gateway(spec)
    if len(chosen) > 1:
        spec = _of_several(spec, chosen, values, assigned, own)
    configs = worker_configs(spec)
    check_adapters(configs.values())
    return without_unused_store(_without_unread_towers(spec, configs), values)


def _layout(options: _Options) -> _StackLayout:
    """Raises CommandError for what cannot run so. Removes what a killed supervisor left in shared memory."""
    values, stack, dealt = options.values, options.stack, options.placed
    outside_bus = dealt["nats_url"]
    check_outside_bus(outside_bus or (), insecure=stack.insecure)
    ranks = stack.tp * options.pp
    hosts = hosts_choice(stack, outside_bus=bool(outside_bus), ranks=ranks, kvstore_memory=dealt["kvstore_memory"])
    clear_leftovers(options.run_dir)
    left = left_stack(options.run_dir)
    cluster = cluster_choice(stack, node_name(dealt["node"]), is_running=left is not None)
    store = _store(options, left, has_hosts=hosts is not None)
    counts = counts_of(
        stack,
        options.pp,
        has_store=store is not None,
        data_parallel=dealt["data_parallel_size"],
        context_parallel=dealt["prefill_context_parallel_size"],
    )
    check_hand_overs(values, prefill=stack.prefill, decode=stack.decode, has_store=store is not None)
    ray = ray_choice(stack, values, options.assigned, runs_here=cluster is not None or hosts is not None)
    if ray is not None:
        counts = replace(counts, kvstore=0, engine_stores=store is not None)
    check_journal(options.assigned, counts.all_engines)
    return _StackLayout(counts, store, hosts, cluster, ray, is_running=left is not None)


def _described(options: _Options, layout: _StackLayout) -> StackSpec:
    """The stack of one model. Raises CommandError for a model that cannot be served so."""
    values, stack, dealt, ray = options.values, options.stack, options.placed, layout.ray
    model = _model(options, is_local=ray is None)
    without = _without_weights(values, options.assigned)
    counts = _with_model(layout.counts, stack, dealt, model)
    federation = federation_choice(
        stack, values, model, dummy_weights=without.dummy, simulated=without.simulated, is_running=layout.is_running
    )
    numa_nodes = numa_choice(values, options.assigned) if ray is None else ()
    threads = cpu_share(counts, numa_nodes) if ray is None else ray.cpus_per_rank
    found = _found_settings(values, threads, stages=max(stack.stages(options.pp)), has_store=layout.store is not None)
    return StackSpec(
        name=options.name,
        run_dir=options.run_dir,
        model=model,
        served_model_name=served_name(dealt["model"], dealt["served_model_name"]),
        host=dealt["host"],
        port=dealt["port"] if counts.leads else 0,
        counts=counts,
        max_instances=max_instances(stack),
        pp_layers=layer_split(values.get("pp_layers"), counts),
        store=layout.store or StoreSpec(),
        settings=merged(service_settings(values), found, options.assigned),
        api_keys=tuple(dealt["api_key"]),
        outside_bus=OutsideBus(urls=tuple(dealt["nats_url"])) if dealt["nats_url"] else None,
        hosts=layout.hosts,
        cluster=layout.cluster,
        federation=federation,
        ray=ray,
        gpus=gpu_choice(stack, values, options.assigned) if ray is None else None,
        numa_nodes=numa_nodes,
        namespace=dealt["namespace"],
        config=options.config.absolute() if options.config else None,
        log_level=log_level(values),
        drain_timeout=dealt["drain_timeout"],
        orphan_timeout=dealt["orphan_timeout"],
        start_timeout=stack.start_timeout,
        start_method=stack.start_method,
        ksm=stack.ksm,
    )


def log_level(values: Mapping[str, Any]) -> str:
    """Of all processes."""
    level: str = values.get("log_level", settings_of(ServiceConfig)["log_level"].default)
    return level


def _model(options: _Options, *, is_local: bool) -> Path:
    """The model's folder, with the tokenizer that is asked for. Raises CommandError."""
    model = model_folder(options.placed["model"], options.values.get("load_format"), options.run_dir)
    tokenizer = options.stack.tokenizer
    return model if tokenizer is None else folder_with_tokenizer(model, tokenizer, options.run_dir, is_local=is_local)


def _store(options: _Options, left: LeftStack | None, *, has_hosts: bool) -> StoreSpec | None:
    """None: no store, as for engines over several hosts or with a connector. Raises CommandError."""
    stack, dealt = options.stack, options.placed
    memory = dealt["kvstore_memory"]
    return store_choice(
        memory="0" if has_hosts or with_connector(options.values, memory) else memory,
        left=left,
        node=dealt["node"],
        redis=stack.redis,
        redis_memory=str(stack.redis_memory),
        redis_url=dealt["redis_url"],
    )


class _WithoutWeights(NamedTuple):
    """Whether workers read no checkpoint: its weights are made up, or nothing is computed."""

    dummy: bool
    simulated: bool


def _without_weights(values: Mapping[str, Any], assigned: Settings) -> _WithoutWeights:
    """Raises CommandError for a device that nobody brings."""
    load_format = assigned.get("worker", {}).get("load_format", values.get("load_format"))
    return _WithoutWeights(load_format == "dummy", _device(values, assigned) == "sim")


def _device(values: Mapping[str, Any], assigned: Settings) -> str | None:
    """The workers'; None: the machine decides. Raises CommandError where nobody brings it."""
    device: str | None = assigned.get("worker", {}).get("device", values.get("device"))
    check_device(device or "auto")
    return device


def _found_settings(
    values: Mapping[str, Any], threads: int | None, *, stages: int, has_store: bool
) -> dict[str, dict[str, str]]:
    """What services are told that follows from the machine, or from files. `threads`: of a rank. `stages`: the most
    that an engine has. Raises CommandError."""
    drafts = drafting(values.get("speculative"), device=values.get("device"), stages=stages)
    worker = {"speculative": drafts, "threads": threads}
    return {
        "worker": {key: str(value) for key, value in worker.items() if value is not None},
        "gateway": gateway_files(values),
        "kvstore": ssd_settings(values, has_store=has_store),
    }


def gateway_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Files of this machine that its gateways read."""
    given = {name: values.get(name) for name in ("keys_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    return {name: str(Path(path).absolute()) for name, path in given.items() if path is not None}


def _of_several(
    spec: StackSpec,
    chosen: Sequence[ChosenModel],
    values: Mapping[str, Any],
    assigned: Settings,
    own: Mapping[ModelName, Sequence[str]],
) -> StackSpec:
    """The stack with processes for each model, which share this machine's processors evenly. Raises CommandError."""
    models = [_model_spec(spec.run_dir, each, values, assigned, own.get(each.name, ())) for each in chosen]
    check_names(models)
    ranks = sum(each.counts.all_ranks for each in models)
    check_journal(assigned, sum(each.counts.all_engines for each in models))
    threads = {"worker": {"threads": str(max(1, available_cores() // ranks))}}
    return replace(
        spec,
        model=models[0].model,
        served_model_name=models[0].name,
        counts=replace(spec.counts, tokenizer=0, encoder=0, detokenizer=0, engines=0, prefill=0, decode=0),
        models=tuple(replace(each, settings=merged(threads, each.settings)) for each in models),
        numa_nodes=(),
    )


def _with_model(counts: Counts, stack: StackSettings, dealt: Mapping[str, Any], model: Path) -> Counts:
    """With what the model decides of them. Raises CommandError for pools, ranks and stages that it cannot have."""
    check_engines(stack, dealt["pp"], dealt["prefill_context_parallel_size"], dealt["data_parallel_size"], model)
    return replace(counts, encoder=encoders(stack, model), hands_over=hands_over(model))


def _model_spec(
    run_dir: Path, chosen: ChosenModel, values: Mapping[str, Any], assigned: Settings, own: Sequence[str]
) -> ModelSpec:
    """`values` and `assigned` are of all models, `own` of this one, and wins. Raises CommandError."""
    options, assignments = own_settings(chosen.name, own)
    values = {**values, **options}
    stack, dealt = stack_settings(values), placed(values)
    pp, context = dealt["pp"], dealt["prefill_context_parallel_size"]
    counts = counts_of(stack, pp, has_store=False, context_parallel=context)
    counts = replace(counts, gateway=0, coordinator=0, model=chosen.name)
    drafts = drafting(values.get("speculative"), device=values.get("device"), stages=max(stack.stages(pp)))
    drafted = {} if drafts is None else {"worker": {"speculative": drafts}}
    model = model_folder(chosen.source, values.get("load_format"), run_dir)
    settings = merged(assigned, parsed_settings(assignments))
    _device(values, settings)
    return ModelSpec(
        name=chosen.name,
        model=model,
        counts=_with_model(counts, stack, dealt, model),
        pp_layers=layer_split(values.get("pp_layers"), counts),
        settings=merged(service_settings(values), drafted, settings),
    )


def worker_configs(spec: StackSpec) -> dict[ModelName | None, WorkerConfig]:
    """What the workers of each model are told, whoever says so: options, a TOML file or the environment. Not of those
    that would refuse it, and say so themselves."""
    processes = all_process_specs(spec.counts, [each.counts for each in spec.models])
    of_engines = (part for process in processes for part in (process, *(process.hosted if process.colocated else ())))
    workers = {process.model: process for process in of_engines if process.service == "worker"}
    where, configs = LaunchContext(port=spec.port, rendezvous="127.0.0.1:0"), {}
    for model, process in workers.items():
        with contextlib.suppress(ConfigError):
            argv = service_command(spec, process, where)[3:]
            configs[model] = load_config("worker", WorkerConfig, argv, process_environment())
    return configs


def check_adapters(configs: Iterable[WorkerConfig]) -> None:
    """Raises CommandError where one of an engine's adapters, `NAME=FOLDER`, is none. Its workers would say so only once
    they have the model."""
    for config in configs:
        for name, folder in config.lora_folders():
            if not (path := folder / "adapter_config.json").is_file():
                said = f"--lora {name}={folder}: there is no {path}; an adapter is a folder as PEFT writes it"
                raise CommandError(said, status=2)


def _without_unread_towers(spec: StackSpec, configs: Mapping[ModelName | None, WorkerConfig]) -> StackSpec:
    """Nothing is encoded for a model whose weights nobody reads, nor for one that is served for texts: as its workers
    are told, or as none of what it sees or hears is allowed in a chat, which its workers are told then."""
    try:
        gateway = _gateway_config(spec)
    except ConfigError:  # of a host without gateways
        gateway = GatewayConfig()
    spec = _without_unread_tower(spec, configs, gateway)
    return replace(spec, models=tuple(_without_unread_tower(each, configs, gateway) for each in spec.models))


def _without_unread_tower(
    part: _Part, configs: Mapping[ModelName | None, WorkerConfig], gateway: GatewayConfig
) -> _Part:
    config = configs.get(part.counts.model)
    if config is None:
        return part
    settings = part.settings
    if allows_texts_alone(part.model, gateway):
        settings = merged({"worker": {"language_model_only": "true"}}, settings)
    elif not config.language_model_only and config.load_format != "dummy" and config.device != "sim":
        check_images_beside(part.counts, part.model)
        return part
    return replace(part, counts=replace(part.counts, encoder=0), settings=settings)


def _gateway_config(spec: StackSpec) -> GatewayConfig:
    """What its gateways are told. Raises ConfigError."""
    (process,) = process_specs("gateway", 1, spec.counts)
    where = LaunchContext(port=spec.port, rendezvous=None)
    environment = {**process_environment(), **secret_settings(spec, process, where)}
    return load_config("gateway", GatewayConfig, service_command(spec, process, where)[3:], environment)


def check_gateway(spec: StackSpec) -> StackSpec:
    """The stack; its settings name the files that its gateways read, whoever says so: by a certificate in a TOML file,
    too, they are asked by HTTPS. Raises CommandError for an empty API key, without which no gateway would ask for any,
    and where a gateway of the stack would refuse to start, for an address that is open to strangers, its keys or its
    certificate."""
    if not all(spec.api_keys):
        raise CommandError("--api-key: '' is no key; at least one character is needed", status=2)
    try:
        config = _gateway_config(spec)
        KeyFileWatcher(config.api_keys, config.keys_file).load()
        if (files := config.certificate_files()) is not None:
            files.context()
    except ConfigError as error:
        raise CommandError(str(error), status=2) from None
    except KeyFileError as error:
        raise CommandError(f"--keys-file {config.keys_file}: {error}", status=2) from None
    except CertificateError as error:
        raise CommandError(f"TLS of the HTTP port: {error}", status=2) from None
    read = gateway_files(msgspec.structs.asdict(config))
    return replace(spec, settings=merged({"gateway": read}, spec.settings)) if read else spec


def ray_choice(
    stack: StackSettings, values: Mapping[str, Any], assigned: Settings, *, runs_here: bool
) -> RaySpec | None:
    """None: processes run on this machine. `runs_here`: other hosts have a part in the stack. Raises CommandError."""
    if stack.launcher != "ray":
        return None
    if importlib.util.find_spec("ray") is None:
        raise CommandError("--launcher ray: Ray is missing: pip install 'baton-serve[ray]'")
    if runs_here:
        raise CommandError("--launcher ray: Ray chooses hosts itself; no --advertise-address and --nodes", status=2)
    check_certificates()
    worker = {**service_settings(values).get("worker", {}), **assigned.get("worker", {})}
    threads, device = worker.get("threads"), worker.get("device", "auto")
    if threads is not None and not (threads.isascii() and threads.isdigit() and int(threads)):
        raise CommandError(f"--threads {threads}: a number from 1 on is expected", status=2)
    return RaySpec(
        address=None if stack.ray_address == "auto" else stack.ray_address,
        cpus_per_rank=int(threads or 1),
        gpus_per_rank="auto" if device == "auto" else 1 if device == "cuda" else 0,
    )


# `--device` and `--speculative`, checked before anything starts.


def check_device(name: str) -> None:
    """Raises CommandError where no device is called so here."""
    try:
        check_device_name(name)
    except PluginError as error:
        raise CommandError(f"--device {name}: {error}", status=2) from None


def drafting(text: str | None, *, device: str | None, stages: int) -> str | None:
    """For the workers, which run elsewhere: its `model` as an absolute path. `stages`: the most that an engine of this
    stack has. Raises CommandError."""
    if text is None:
        return None
    try:
        settings = read_speculation(text)
        check_supported(settings, device=device or "", stages=stages)
    except SpeculationError as error:
        raise CommandError(f"--{error}", status=2) from None
    if settings.model is not None:
        folder = expanded(settings.model)
        if not folder.is_dir():
            raise CommandError(f"--speculative: model {settings.model}: there is no such directory", status=2)
        settings = msgspec.structs.replace(settings, model=str(folder.absolute()))
    return msgspec.json.encode(settings).decode()
