"""The command line of each process: what it is and where, then the user's settings of its service."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.core.numa_plan import share_of
from deploy.supervisor.core.plan import ROLES, Pool, ProcessSpec, process_specs
from deploy.supervisor.processes import TransferSite
from deploy.supervisor.spec import FEDERATION_FOLDER, StackSpec
from deploy.supervisor.state_file import LOCK
from services.coordinator.config import CoordinatorConfig
from shared.config import load_config, process_environment
from shared.ids import NodeId
from shared.messages.lifecycle import Service

EVERY_SERVICE = "*"


class LaunchContext(NamedTuple):
    """Values that are known only once the stack runs."""

    port: int
    """Of the gateways."""
    rendezvous: str | None
    """Address where the ranks of an engine meet, new for each start; None for a process that needs none."""
    arenas: Path | None = None
    """The KV store's directory; None in a stack without a store."""
    redis_url: str | None = None
    """URL of Redis for the KV store; None without Redis."""
    federation_url: str | None = None
    """URL of the federation's server for gateways, its password included; None in no federation."""
    standby: bool = False
    """Whether the process's engine is to stand by."""
    device: int | None = None
    """Index of this host's device that a worker computes on; None for other processes."""
    remote: bool = False
    """Whether it runs on another machine, where it ends with what started it instead of with this supervisor."""
    node: NodeId | None = None
    """The name of its engine's own KV store; None: that of this host's."""
    transfer: TransferSite | None = None
    """Where that store sends blocks from; None: as the stack's hosts do."""
    rows: Path | None = None
    """The folder of this host's folders of images' rows; None in a stack that takes none, and on another machine."""


class CommandLineOf(Protocol):
    """Makes the command line of a process; `service_command`, or a test's own."""

    def __call__(self, spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> list[str]:
        """The command line of one process of the stack."""


def service_command(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> list[str]:
    """`python -m services.X --key=value …`; the user's own settings come last and override the others. Without those
    that are secrets: see `secret_settings`."""
    if process.colocated:
        alone = process._replace(colocated=False)
        parts = ([each.service, *service_command(spec, each, where)[3:]] for each in (alone, *process.hosted))
        return [sys.executable, "-m", COLOCATED, *chain.from_iterable(parts)]
    spec = spec.of(process)
    settings = {
        **_common(spec, process, where),
        **_own(spec, process, where),
        **{key: value for key, value in _chosen(spec, process).items() if key not in SECRETS},
    }
    if where.node is not None and "kv_ssd" in settings:  # other engines' stores may be on that machine, too
        settings["kv_ssd"] = str(Path(settings["kv_ssd"]) / where.node)
    return [sys.executable, "-m", module_of(process.service), *flags(settings)]


def module_of(service: Service) -> str:
    """What `python -m` starts for a service: below `baton` where this is installed, as it is in the repository here."""
    above = __name__.removesuffix(".supervisor.launch").removesuffix("deploy")
    return f"{above}kvstore" if service == "kvstore" else f"{above}services.{service}"


COLOCATED = f"{module_of('scheduler').removesuffix('.scheduler')}.offline.colocated"
"""What `python -m` starts for several services in one process."""


def flags(settings: Mapping[str, str]) -> list[str]:
    """`key=value` as a flag; true and false as services' switches expect them."""
    argv: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        match value:
            case "true":
                argv.append(f"--{name}")
            case "false":
                argv.append(f"--no-{name}")
            case _:
                argv.append(f"--{name}={value}")
    return argv


def configured_block_size(spec: StackSpec) -> int:
    """What the stack's services find as their block size, wherever it is configured. Raises ConfigError."""
    (process,) = process_specs("coordinator", 1, spec.counts)
    argv = service_command(spec, process, LaunchContext(port=spec.port, rendezvous=None))[3:]
    return load_config("coordinator", CoordinatorConfig, argv, process_environment()).block_size


def _common(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> dict[str, str]:
    common = {
        "instance": process.instance,
        "namespace": spec.namespace,
        "drain_timeout": f"{spec.drain_timeout:g}",
    }
    if not where.remote:
        common |= {"supervisor_lock": str(spec.run_dir / LOCK), "orphan_timeout": f"{spec.orphan_timeout:g}"}
    if spec.config is not None:
        common["config"] = str(spec.config)
    return common


def _own(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> dict[str, str]:
    model = {"model": str(spec.model), "served_model_name": spec.served_model_name}
    match process.service:
        case "gateway":
            # Always shared: the supervisor itself holds the port, and others may join by `baton scale`.
            return {
                "host": spec.host,
                "port": str(where.port),
                "reuse_port": "true",
                **_database(spec),
                **_federation(spec),
            }
        case "tokenizer" | "detokenizer":
            return model
        case "encoder":
            return {**model, **_rows(where)}
        case "scheduler":
            return {
                "world_size": str(_ranks(spec, process)),
                **({"standby": "true"} if where.standby else {}),
                **_role(process.pool),
                **_node(spec, where),
                **_rows(where),
            }
        case "worker":
            return {**model, **_rank(spec, process, where), **_numa(spec, process), **_arenas(where, "kvstore_dir")}
        case "kvstore":
            memory = {"kvstore_memory": str(spec.store.memory)}
            return {**_node(spec, where), **_arenas(where, "directory"), **memory, **_transfer(spec, where)}
        case "coordinator" | "supervisor":
            return {}


def _database(spec: StackSpec) -> dict[str, str]:
    """A host that joins others has no file of its own: its clients would not find what they stored elsewhere."""
    if spec.cluster is not None and spec.cluster.first is not None:
        return {}
    return {"database_file": str(spec.run_dir.absolute() / "database.sqlite")}


def _federation(spec: StackSpec) -> dict[str, str]:
    """The cluster's name is a setting of the user's own."""
    if spec.federation is None:
        return {}
    return {
        "federation_address": spec.federation.cluster_address,
        "federation_model": spec.federation.model,
        "federation_state": str(spec.run_dir.absolute() / FEDERATION_FOLDER / "drained.json"),
    }


def _ranks(spec: StackSpec, process: ProcessSpec) -> int:
    return spec.counts.ranks_of(process.pool) if process.pool else 1


def _rank(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> dict[str, str]:
    alone = {"engine": str(process.engine), "local_rank": str(where.device or 0)}
    ranks, group = _ranks(spec, process), _group(spec, process)
    if (ranks == 1 and not group) or where.rendezvous is None:
        return alone
    return {
        **alone,
        "rank": str(process.rank),
        "world_size": str(ranks),
        "rendezvous": where.rendezvous,
        **_pipeline(spec, process),
        **_context(spec, process),
        **group,
    }


def _group(spec: StackSpec, process: ProcessSpec) -> dict[str, str]:
    """Its place in the data-parallel group of its engine; none where that shares nothing."""
    if process.group_size == 1:
        return {}
    return {"data_parallel_size": str(process.group_size), "data_parallel_rank": str(process.group_index)}


def _numa(spec: StackSpec, process: ProcessSpec) -> dict[str, str]:
    share = share_of(process, spec.counts, spec.numa_nodes)
    return {} if share is None else {"numa_share": str(share)}


def _pipeline(spec: StackSpec, process: ProcessSpec) -> dict[str, str]:
    stages = spec.counts.stages_of(process.pool) if process.pool else 1
    if stages == 1:
        return {}
    layers = {"pp_layers": ",".join(map(str, spec.pp_layers))} if spec.pp_layers else {}
    return {"pp": str(stages), **layers}


def _context(spec: StackSpec, process: ProcessSpec) -> dict[str, str]:
    size = spec.counts.context_parallel_of(process.pool) if process.pool else 1
    return {} if size == 1 else {"prefill_context_parallel_size": str(size)}


def _role(pool: Pool | None) -> dict[str, str]:
    role = ROLES[pool] if pool else "mixed"
    return {} if role == "mixed" else {"role": role}


def _node(spec: StackSpec, where: LaunchContext) -> dict[str, str]:
    """A service without a node uses no store."""
    return {"node": where.node or spec.store.node} if where.arenas else {}


def _transfer(spec: StackSpec, where: LaunchContext) -> dict[str, str]:
    """Stores of one stack's hosts send each other blocks, and know each other by the hosts' certificates."""
    if where.transfer is not None:
        return {
            "transfer_port": "0",
            "transfer_host": where.transfer.address,
            "transfer_tls_cert": str(where.transfer.certificate),
            "transfer_tls_key": str(where.transfer.key),
            "transfer_tls_ca": str(where.transfer.authority),
        }
    if spec.cluster is None:
        return {}
    tls = ClusterFolder(spec.run_dir).tls
    own = {"transfer_tls_cert": tls.certificate, "transfer_tls_key": tls.key, "transfer_tls_ca": tls.authority}
    files = {key: path for key, path in own.items() if path is not None}
    return {"transfer_port": "0", "transfer_host": spec.cluster.address, **files}


def _rows(where: LaunchContext) -> dict[str, str]:
    return {"rows_dir": str(where.rows)} if where.rows else {}


def _arenas(where: LaunchContext, key: str) -> dict[str, str]:
    return {key: str(where.arenas)} if where.arenas else {}


def _chosen(spec: StackSpec, process: ProcessSpec) -> dict[str, str]:
    """What the user said of this service's settings, or of all services'."""
    return {**spec.settings.get(EVERY_SERVICE, {}), **spec.settings.get(process.service, {})}


SECRETS = frozenset(
    {
        "api_keys",
        "database",
        "federation_url",
        "kv_connector_extra_config",
        "kv_tiers",
        "nats_password",
        "nats_url",
        "overflow_key",
        "redis_url",
    }
)
"""Settings that are passwords, or URLs that may hold one."""


def secret_settings(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> dict[str, str]:
    """Settings that go by environment, as every user of the machine may read a command line."""
    spec, own = spec.of(process), f"BATON_{process.service.upper()}_"
    found: dict[str, str] = {}
    if process.service == "gateway" and spec.api_keys:
        found["BATON_GATEWAY_API_KEYS"] = ",".join(spec.api_keys)
    if process.service == "gateway" and where.federation_url is not None:
        found["BATON_GATEWAY_FEDERATION_URL"] = where.federation_url
    if process.service == "kvstore" and where.redis_url is not None:
        found["BATON_KVSTORE_REDIS_URL"] = where.redis_url
    return found | {f"{own}{key.upper()}": value for key, value in _chosen(spec, process).items() if key in SECRETS}
