"""From what was typed to a `StackSpec`: the model's directory, each service's settings."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from deploy.cli.up.data_parallel import engines_of_groups
from deploy.cli.up.federation import federation_choice
from deploy.cli.up.machine import gpu_choice, numa_choice
from deploy.cli.up.models import ChosenModel, check_names, check_together, chosen_models, first_of, own_settings
from deploy.cli.up.options import given, placed, service_settings, stack_settings
from deploy.cli.up.other_hosts import check_certificates, check_outside_bus, cluster_choice, hosts_choice
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.model_choice import model_folder, served_name
from deploy.supervisor.adoption import LeftStack, left_stack
from deploy.supervisor.core.plan import POOLS, Counts, process_specs
from deploy.supervisor.launch import EVERY_SERVICE, LaunchContext, secret_settings, service_command
from deploy.supervisor.servers.arenas import clear_leftovers, default_memory, fits, free_memory
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import EmbeddedRedis, ModelSpec, OutsideBus, OutsideRedis, RaySpec, StackSpec, StoreSpec
from deploy.supervisor.state_file import shared_memory
from services.gateway.config import GatewayConfig
from services.gateway.core.api_keys import KeyFileError
from services.gateway.key_file import KeyFileWatcher
from services.worker.distributed.binding import available_cores
from services.worker.platforms.names import check_device_name
from services.worker.speculation.settings import SpeculationError, check_supported, read_speculation
from shared.config import ConfigError, ServiceConfig, load_config, process_environment
from shared.ids import ModelName, NodeId, checked_instance
from shared.messages.lifecycle import Service
from shared.models.audio_models import read_audio_model
from shared.models.image_models import read_image_model
from shared.plugins.entry_points import PluginError
from shared.settings import parse_bytes, settings_of

Settings = Mapping[str, Mapping[str, str]]


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
    values = given(first_of(chosen, typed))
    check_together(chosen, values, own)
    stack, dealt = stack_settings(values), placed(values)
    pp, outside_bus = dealt["pp"], dealt["nats_url"]
    check_outside_bus(outside_bus or (), insecure=stack.insecure)
    hosts = hosts_choice(
        stack, outside_bus=bool(outside_bus), ranks=stack.tp * pp, kvstore_memory=dealt["kvstore_memory"]
    )
    clear_leftovers(run_dir)
    cluster = cluster_choice(stack, node_name(dealt["node"]), is_running=left_stack(run_dir) is not None)
    store = store_choice(
        memory="0" if hosts or with_connector(values, dealt["kvstore_memory"]) else dealt["kvstore_memory"],
        left=left_stack(run_dir),
        node=dealt["node"],
        redis=stack.redis,
        redis_memory=str(stack.redis_memory),
        redis_url=dealt["redis_url"],
    )
    counts = counts_of(stack, pp, has_store=store is not None, data_parallel=dealt["data_parallel_size"])
    check_order(values, prefill=stack.prefill, decode=stack.decode)
    for option, asked in (
        ("--pd-order decode-first", values.get("pd_order") == "decode-first"),
        ("--prefill-queue", values.get("prefill_queue")),
    ):
        if asked and store is None:
            raise CommandError(f"{option}: hands over through a KV store: --kvstore-memory SIZE", status=2)
    ray = ray_choice(stack, values, assigned, runs_here=cluster is not None or hosts is not None)
    if ray is not None:
        counts = replace(counts, kvstore=0, engine_stores=store is not None)
    check_journal(assigned, counts.all_engines)
    check_device(assigned.get("worker", {}).get("device", values.get("device") or "auto"))
    drafts = drafting(values.get("speculative"), device=values.get("device"), stages=max(stack.stages(pp)))
    numa_nodes = numa_choice(values, assigned) if ray is None else ()
    threads = cpu_share(counts, numa_nodes) if ray is None else ray.cpus_per_rank
    found = {"speculative": drafts, "threads": threads}
    worker = {key: str(value) for key, value in found.items() if value is not None}
    ssd = ssd_settings(values, has_store=store is not None)
    keys_file = values.get("keys_file")
    gateway = {"keys_file": str(Path(keys_file).absolute())} if keys_file is not None else {}
    model, load_format = model_folder(dealt["model"], values.get("load_format"), run_dir), values.get("load_format")
    simulated = assigned.get("worker", {}).get("device", values.get("device")) == "sim"
    counts = replace(counts, encoder=encoders(stack, model, has_weights=load_format != "dummy" and not simulated))
    federation = federation_choice(
        stack,
        values,
        model,
        dummy_weights=load_format == "dummy",
        simulated=simulated,
        is_running=left_stack(run_dir) is not None,
    )
    spec = StackSpec(
        name=name,
        run_dir=run_dir,
        model=model,
        served_model_name=served_name(dealt["model"], dealt["served_model_name"]),
        host=dealt["host"],
        port=dealt["port"] if counts.leads else 0,
        counts=counts,
        pp_layers=layer_split(values.get("pp_layers"), counts),
        store=store or StoreSpec(),
        settings=merged(service_settings(values), {"worker": worker, "gateway": gateway, "kvstore": ssd}, assigned),
        api_keys=tuple(dealt["api_key"]),
        outside_bus=OutsideBus(urls=tuple(outside_bus)) if outside_bus else None,
        hosts=hosts,
        cluster=cluster,
        federation=federation,
        ray=ray,
        gpus=gpu_choice(stack, values, assigned) if ray is None else None,
        numa_nodes=numa_nodes,
        namespace=dealt["namespace"],
        config=config.absolute() if config else None,
        log_level=values.get("log_level", settings_of(ServiceConfig)["log_level"].default),
        drain_timeout=dealt["drain_timeout"],
        orphan_timeout=dealt["orphan_timeout"],
        start_timeout=stack.start_timeout,
        start_method=stack.start_method,
    )
    if counts.leads:
        check_gateway(spec)
    return spec if len(chosen) < 2 else _of_several(spec, chosen, values, assigned, own)


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


def _model_spec(
    run_dir: Path, chosen: ChosenModel, values: Mapping[str, Any], assigned: Settings, own: Sequence[str]
) -> ModelSpec:
    """`values` and `assigned` are of all models, `own` of this one, and wins. Raises CommandError."""
    options, assignments = own_settings(chosen.name, own)
    values = {**values, **options}
    stack, pp = stack_settings(values), placed(values)["pp"]
    counts = replace(counts_of(stack, pp, has_store=False), gateway=0, coordinator=0, model=chosen.name)
    drafts = drafting(values.get("speculative"), device=values.get("device"), stages=max(stack.stages(pp)))
    drafted = {} if drafts is None else {"worker": {"speculative": drafts}}
    model = model_folder(chosen.source, values.get("load_format"), run_dir)
    has_weights = values.get("load_format") != "dummy" and values.get("device") != "sim"
    return ModelSpec(
        name=chosen.name,
        model=model,
        counts=replace(counts, encoder=encoders(stack, model, has_weights=has_weights)),
        pp_layers=layer_split(values.get("pp_layers"), counts),
        settings=merged(service_settings(values), drafted, assigned, parsed_settings(assignments)),
    )


def check_gateway(spec: StackSpec) -> None:
    """Raises CommandError where a gateway of the stack would refuse to start, for an address that is open to strangers
    or for its keys."""
    (process,) = process_specs("gateway", 1, spec.counts)
    where = LaunchContext(port=spec.port, rendezvous=None)
    argv = service_command(spec, process, where)[3:]
    environment = {**process_environment(), **secret_settings(spec, process, where)}
    try:
        config = load_config("gateway", GatewayConfig, argv, environment)
        KeyFileWatcher(config.api_keys, config.keys_file).load()
    except ConfigError as error:
        raise CommandError(str(error), status=2) from None
    except KeyFileError as error:
        raise CommandError(f"--keys-file {config.keys_file}: {error}", status=2) from None


def counts_of(stack: StackSettings, pp: int, *, has_store: bool, data_parallel: int = 1) -> Counts:
    """How many processes of each kind. Raises CommandError where no engine would decode, or no group can be."""
    stages, ranks = stack.stages(pp), stack.ranks(pp)
    if stack.colocate:
        check_colocation(stack, ranks)
    engines = engines_of_groups(data_parallel, stack, pp)
    return Counts(
        gateway=stack.gateways,
        tokenizer=stack.tokenizers,
        detokenizer=0 if stack.colocate else stack.detokenizers,
        coordinator=0 if stack.colocate else stack.coordinators,
        colocate=stack.colocate,
        engines=mixed_engines(engines, stack.prefill, stack.decode),
        data_parallel=data_parallel,
        ranks=ranks[0],
        stages=stages[0],
        prefill=stack.prefill,
        prefill_ranks=ranks[1],
        prefill_stages=stages[1],
        decode=stack.decode,
        decode_ranks=ranks[2],
        decode_stages=stages[2],
        kvstore=int(has_store),
        standby=standby_engines(stack),
        hosts=stack.nodes,
        host=stack.node_rank,
    )


def check_colocation(stack: StackSettings, ranks: tuple[int, int, int]) -> None:
    """Raises CommandError for what `--colocate` cannot be combined with."""
    refused = {
        f"engines of {ranks[0]} ranks": ranks[0] > 1,
        f"--prefill {stack.prefill} and --decode {stack.decode}": bool(stack.prefill or stack.decode),
        f"--standby {stack.standby}": bool(stack.standby),
        f"--coordinators {stack.coordinators}": stack.coordinators > 1,
        f"--detokenizers {stack.detokenizers}": stack.detokenizers > 1,
        f"--nodes {stack.nodes}": stack.nodes > 1,
        f"--advertise-address {stack.advertise_address}": stack.advertise_address is not None,
        f"--launcher {stack.launcher}": stack.launcher != "local",
    }
    if what := [each for each, is_given in refused.items() if is_given]:
        allowed = "engines of one rank on this machine alone, each with a coordinator and a detokenizer of its own"
        raise CommandError(f"--colocate: not with {', '.join(what)}, but for {allowed}", status=2)


def encoders(stack: StackSettings, model: Path, *, has_weights: bool) -> int:
    """How many processes encode images: none for a model that takes none, or of which nobody reads weights."""
    return stack.encoders if has_weights and (read_image_model(model) or read_audio_model(model)) is not None else 0


def parsed_settings(assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """`scheduler.run_ahead=0` for one service, `log_level=debug` for all. Raises CommandError."""
    settings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        service, dot, key = target.rpartition(".")
        if not equals or not key.replace("_", "").replace("-", "").isalnum():
            raise CommandError(f"--set {assignment}: SERVICE.KEY=VALUE or KEY=VALUE is expected", status=2)
        if dot and service not in get_args(Service):
            raise CommandError(f"--set {assignment}: {service!r} is none of {', '.join(get_args(Service))}", status=2)
        name = key.replace("-", "_")
        known = settings_of(CONFIGS[service]) if service in CONFIGS else {}
        if known and name not in known:
            close = get_close_matches(name, known, 1)
            meant = f", {service}.{close[0]} is near" if close else ""
            raise CommandError(f"--set {assignment}: no such setting{meant}; docs/configuration.md has all", status=2)
        settings[service if dot else EVERY_SERVICE][name] = value
    return dict(settings)


def check_journal(settings: Settings, engines: int) -> None:
    """Raises CommandError if several engines would write to one journal file, each moving away what another writes."""
    journal = settings.get("scheduler", {}).get("journal")
    if journal and engines > 1 and not Path(journal).is_dir():
        raise CommandError(
            f"--set scheduler.journal={journal}: {engines} engines need a folder that is there", status=2
        )


def merged(*layers: Settings) -> dict[str, dict[str, str]]:
    """The settings of all layers together; a later layer overrides earlier ones."""
    settings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for layer in layers:
        for service, values in layer.items():
            settings[service].update(values)
    return dict(settings)


def check_order(values: Mapping[str, Any], *, prefill: int, decode: int) -> None:
    """Raises CommandError where an order of two engines is asked for, and no request passes through two."""
    apart = bool(prefill and decode)
    if values.get("pd_order") == "decode-first" and not apart:
        raise CommandError("--pd-order decode-first: needs pools: --prefill N --decode N", status=2)
    if values.get("prefill_queue") and not prefill:
        raise CommandError("--prefill-queue: needs engines that pull from it: --prefill N", status=2)
    if values.get("prefill_queue") and values.get("pd_order") == "decode-first":
        raise CommandError("--prefill-queue: needs --pd-order prefill-first", status=2)


def mixed_engines(engines: int | None, prefill: int, decode: int) -> int:
    """Number of engines that both prefill and decode: the given one; by default one, or none beside pools. Raises
    CommandError."""
    mixed = engines if engines is not None else int(not prefill and not decode)
    if mixed + decode == 0:
        raise CommandError("prefill engines need others that decode: --decode N or --engines N", status=2)
    return mixed


def standby_engines(stack: StackSettings) -> int:
    """As many as were asked for, in each pool. Raises CommandError where none could take another one's place."""
    if not stack.standby:
        return 0
    if stack.nodes > 1:
        raise CommandError(f"--standby {stack.standby}: engines over several hosts cannot be replaced so", status=2)
    if stack.engines == stack.prefill == stack.decode == 0:
        raise CommandError(f"--standby {stack.standby}: there are no engines whose place one could take", status=2)
    return stack.standby


def layer_split(text: str | None, counts: Counts) -> tuple[int, ...]:
    """`17,15`: layers of each pipeline stage. Raises CommandError."""
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise CommandError(f"--pp-layers {text}: numbers from 1 on are expected, e.g. 17,15", status=2)
    stages = [counts.stages_of(pool) for pool in POOLS if counts.of(pool)]
    wrong = next((s for s in stages if s not in (1, len(parts))), None)
    if wrong is not None or len(parts) not in stages:
        raise CommandError(f"--pp-layers {text}: {len(parts)} numbers for {wrong or 1} stages (--pp)", status=2)
    return tuple(map(int, parts))


def cpu_share(counts: Counts, numa_nodes: Sequence[int] = ()) -> int | None:
    """Threads for each rank where several engines share this machine; None: a rank knows its share of one engine, or of
    its NUMA nodes."""
    if counts.all_engines == counts.hosts == 1 or numa_nodes:
        return None
    return max(1, available_cores() // counts.all_ranks)


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


# From what was typed about the KV store to a `StoreSpec`.


REDIS_SCHEMES = ("redis", "rediss", "unix")


def store_choice(
    *,
    memory: str | None,
    node: str | None,
    redis: bool,
    redis_memory: str,
    redis_url: str | None,
    left: LeftStack | None = None,
) -> StoreSpec | None:
    """None: no store. What goes on without a supervisor (`left`) has its memory already. Raises CommandError."""
    if redis and redis_url is not None:
        raise CommandError("--redis starts a server, --redis-url names one: choose", status=2)
    size = _store_memory(memory, left.state.spec if left is not None else None)
    if not size:
        if redis or redis_url is not None:
            raise CommandError("Redis is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
        return None
    return StoreSpec(node=node_name(node), memory=size, redis=_redis(redis, redis_memory, redis_url))


def with_connector(values: Mapping[str, Any], memory: str | None) -> bool:
    """Whether a KV connector takes the place of the KV store. Raises CommandError where both are asked for."""
    if "kv_connector" not in values:
        if given := sorted({"kv_connector_extra_config", "kv_role"} & values.keys()):
            option = given[0].replace("_", "-")
            raise CommandError(f"--{option} is of a KV connector, and there is none: --kv-connector NAME", status=2)
        return False
    if memory is not None and memory != "0":
        raise CommandError("--kv-connector takes the place of the KV store: leave --kvstore-memory out", status=2)
    return True


def ssd_settings(values: Mapping[str, Any], *, has_store: bool) -> dict[str, str]:
    """The store's folder on an SSD, as the store finds it from wherever it runs. Raises CommandError."""
    folder = values.get("kv_ssd")
    if not has_store and "kv_tier" in values:
        raise CommandError("--kv-tier is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
    if not has_store and (folder is not None or "kv_ssd_size" in values):
        raise CommandError("--kv-ssd is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
    if folder is None and "kv_ssd_size" in values:
        raise CommandError("--kv-ssd-size is the size of --kv-ssd FOLDER, which is not given", status=2)
    return {} if folder is None else {"kv_ssd": str(Path(folder).expanduser().absolute())}


def _store_memory(text: str | None, left: StackSpec | None) -> int:
    free, taken = free_memory(), left.store.memory if left is not None and left.counts.kvstore else None
    if text is None:
        return default_memory(free) if left is None else taken or 0
    size = _size("--kvstore-memory", text)
    if size != taken and not fits(size, free):
        raise CommandError(
            f"--kvstore-memory {text}: {shared_memory()} has {free / 2**20:.0f} MiB left; take less, 0 for "
            "no store, or give a container more (docker run --shm-size)"
        )
    return size


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{option} {text}: {error}", status=2) from None


def _redis(embedded: bool, memory: str, url: str | None) -> EmbeddedRedis | OutsideRedis | None:
    if embedded:
        return EmbeddedRedis(memory=_size("--redis-memory", memory))
    if url is None:
        return None
    if urlsplit(url).scheme not in REDIS_SCHEMES:
        raise CommandError(f"--redis-url: {', '.join(f'{each}://…' for each in REDIS_SCHEMES)} are known", status=2)
    return OutsideRedis(url=url)


def node_name(text: str | None) -> NodeId:
    """The given name of this machine, or its own as far as a subject can hold it. Raises CommandError."""
    if text is None:
        return NodeId(re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "here")
    try:
        return NodeId(checked_instance(text))
    except ValueError:
        raise CommandError(f"--node {text}: 1 to 64 of A-Z a-z 0-9 _ - are allowed", status=2) from None


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
        folder = Path(settings.model).expanduser()
        if not folder.is_dir():
            raise CommandError(f"--speculative: model {settings.model}: there is no such directory", status=2)
        settings = msgspec.structs.replace(settings, model=str(folder.absolute()))
    return msgspec.json.encode(settings).decode()
