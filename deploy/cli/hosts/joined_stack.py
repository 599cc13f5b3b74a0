"""From a membership and what was typed to the `StackSpec` of a host that joined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from deploy.cli.up.assignments import Settings, merged
from deploy.cli.up.choices import check_gateway, gateway_files, log_level
from deploy.cli.up.counts import cpu_share, max_instances, standby_engines
from deploy.cli.up.machine import gpu_choice, numa_choice
from deploy.cli.up.options import placed, service_settings, stack_settings
from deploy.cli.up.other_hosts import host_address
from deploy.cli.up.store import check_store_unasked, node_name, ssd_settings, store_choice
from deploy.errors import CommandError
from deploy.model_choice import DEMO_NAME, model_folder
from deploy.supervisor.adoption import left_stack
from deploy.supervisor.cluster.admission import MAX_NODE_NAME
from deploy.supervisor.cluster.messages import HostMembership, StackMembership
from deploy.supervisor.core.plan import Counts, LightService
from deploy.supervisor.servers.arenas import clear_leftovers
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import ClusterSpec, FederationSpec, OutsideBus, StackSpec, StoreSpec
from shared.ids import ModelName


def own_node(text: str | None) -> str:
    """The host's name, as short as names of processes that begin with it must have it. Raises CommandError."""
    name = node_name(text)
    if text is not None and len(name) > MAX_NODE_NAME:
        raise CommandError(f"--node {text}: {MAX_NODE_NAME} characters at most, as processes' names begin with it", 2)
    return name[:MAX_NODE_NAME]


def model_here(typed: str | None, there: str, name: ModelName) -> str | None:
    """Where this host has the model that the first one has at `there`: as typed, at the same place, or (None) the demo
    model. Raises CommandError."""
    if typed is not None or Path(there).is_dir():
        return typed or there
    if name == DEMO_NAME:
        return None
    raise CommandError(f"--model: the first host serves {name} from {there}, which is not here; say where it is")


def joined_spec(
    host: HostMembership,
    values: Mapping[str, Any],
    assigned: Settings,
    light: Mapping[LightService, int],
    *,
    name: str,
    run_dir: Path,
) -> StackSpec:
    """This host's part of the stack. `values` are those of `given`, `light` how many of the services without engines it
    runs. Raises CommandError."""
    stack, dealt, found = stack_settings(values), placed(values), host.stack
    _check_same_host(host, values, stack)
    clear_leftovers(run_dir)
    if not found.counts.hands_over:
        check_store_unasked(values, found.model)
    store = _store(host, dealt["kvstore_memory"], run_dir)
    counts = _counts(host, values, stack, light, has_store=store is not None)
    _check_part(counts, sum(light.values()), values, found)
    numa_nodes = numa_choice(values, assigned)
    threads = cpu_share(counts, numa_nodes) if counts.all_engines else None
    own = _own_settings(host, values, threads, store)
    load_format = found.settings.get("worker", {}).get("load_format")
    spec = StackSpec(
        name=name,
        run_dir=run_dir,
        model=model_folder(model_here(values.get("model"), found.model, found.served_model_name), load_format, run_dir),
        served_model_name=found.served_model_name,
        host=dealt["host"],
        port=dealt["port"] if counts.gateway else 0,
        counts=counts,
        max_instances=max_instances(stack),
        pp_layers=found.pp_layers if "pp" not in values else (),
        store=store or StoreSpec(node=host.node),
        settings=merged(found.settings, service_settings(values), own, assigned),
        api_keys=found.api_keys if counts.gateway else (),
        federation=_federation(host, stack) if counts.gateway else None,
        outside_bus=OutsideBus(urls=found.outside_bus) if found.outside_bus else None,
        cluster=_cluster(host, stack),
        gpus=gpu_choice(stack, values, assigned),
        numa_nodes=numa_nodes,
        namespace=found.namespace,
        log_level=log_level(values),
        drain_timeout=found.drain_timeout,
        orphan_timeout=found.orphan_timeout,
        start_timeout=stack.start_timeout,
    )
    if counts.gateway:
        spec = check_gateway(spec)
    return spec


def _check_part(counts: Counts, light: int, values: Mapping[str, Any], stack: StackMembership) -> None:
    """Raises CommandError where nothing would run here, of services without engines `light`, or a gateway without the
    files that the first host's have."""
    if not counts.all_engines + counts.kvstore + light:
        raise CommandError("nothing is to run here: --engines, --prefill, --decode or --kvstore-memory", status=2)
    if counts.gateway and stack.keys_file and values.get("keys_file") is None:
        raise CommandError("--gateways: the stack's keys are in a file; bring it here and give --keys-file", status=2)
    if counts.gateway and stack.tls and values.get("ssl_certfile") is None:
        raise CommandError("--gateways: the stack's speak TLS; give --ssl-certfile, and --ssl-keyfile", status=2)


def _cluster(host: HostMembership, stack: StackSettings) -> ClusterSpec:
    """This host's place among the others."""
    return ClusterSpec(
        node=host.node,
        address=host.address,
        route_port=host.route_port,
        model_port=stack.model_port,
        routes=host.stack.routes,
        first=host.stack.first,
    )


def _store(host: HostMembership, memory: str, run_dir: Path) -> StoreSpec | None:
    """None: no store, as with a connector, or where no engine hands blocks over. Raises CommandError."""
    unused = "kv_connector" in host.stack.settings.get("worker", {}) or not host.stack.counts.hands_over
    return store_choice(
        memory="0" if unused else memory,
        left=left_stack(run_dir),
        node=host.node,
        redis=False,
        redis_memory="0",
        redis_url=host.stack.redis_url if memory != "0" else None,
    )


def _own_settings(
    host: HostMembership, values: Mapping[str, Any], threads: int | None, store: StoreSpec | None
) -> Settings:
    """What services are told that follows from this machine and its files. `threads`: of a rank."""
    federation = host.stack.federation
    return {
        "worker": {} if threads is None else {"threads": str(threads)},
        "kvstore": ssd_settings(values, has_store=store is not None),
        "gateway": {
            **gateway_files(values),
            **({} if federation is None else {"cluster": federation.cluster}),
        },
    }


def _federation(host: HostMembership, stack: StackSettings) -> FederationSpec | None:
    """This host's own server in the stack's federation: the cluster stays in it while the first host is away."""
    found = host.stack.federation
    if found is None:
        if stack.federation_address is not None:
            raise CommandError("--federation-address: the stack is in no federation", status=2)
        return None
    address, port = host.address, found.port
    if stack.federation_address is not None:
        address, port = host_address("--federation-address", stack.federation_address, found.port)
    return FederationSpec(
        cluster=found.cluster,
        host=address,
        port=port,
        others=(found.address, *found.others),
        secret=found.secret,
        model=found.model,
        of=found.address,
    )


def _check_same_host(host: HostMembership, values: Mapping[str, Any], stack: StackSettings) -> None:
    """Raises CommandError where this host was let in as another one than is typed now."""
    typed = {"--node": values.get("node"), "--advertise-address": stack.advertise_address}
    if "route_port" in values:
        typed["--route-port"] = str(stack.route_port)
    kept = {"--node": host.node, "--advertise-address": host.address, "--route-port": str(host.route_port)}
    for option, value in typed.items():
        if value is not None and value != kept[option]:
            raise CommandError(f"{option} {value}: this host joined with {kept[option]}; another needs a token", 2)


def _counts(
    host: HostMembership,
    values: Mapping[str, Any],
    stack: StackSettings,
    light: Mapping[LightService, int],
    *,
    has_store: bool,
) -> Counts:
    """How many of everything run here; the ranks of each engine as on the first host, unless --tp or --pp says."""
    there = host.stack.counts
    shape: dict[str, int] = {}
    if "tp" in values or "pp" in values:
        pp = int(values.get("pp", 1))
        for kind in ("", "prefill_", "decode_"):
            shape |= {f"{kind}ranks": stack.tp * pp, f"{kind}stages": pp}
        shape["context_parallel"] = 1
    engines = stack.engines if stack.engines is not None else int(not stack.prefill and not stack.decode)
    of_services: dict[str, int] = {str(service): count for service, count in light.items()}
    pools = {
        "engines": engines,
        "standby": standby_engines(stack),
        "prefill": stack.prefill,
        "decode": stack.decode,
        "kvstore": int(has_store),
    }
    return replace(there, joined=host.node, hosts=1, host=0, **pools, **of_services, **shape)
