"""Turns the arguments of `LLM` into each service's configuration, checked like that service's flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import msgspec

from services.coordinator.config import CoordinatorConfig
from services.detokenizer.config import DetokenizerConfig
from services.encoder.config import EncoderConfig
from services.gateway.config import GatewayConfig
from services.offline.errors import InvalidRequest
from services.offline.rendezvous import new_rendezvous
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared.config import ConfigError, ServiceConfig, load_config
from shared.machine.home import expanded

C = TypeVar("C", bound=ServiceConfig)

ENGINE = "engine-1"
NO_TIMEOUT = 30 * 86_400
"""Seconds: no client waits at the other end of a connection, so a long timeout costs nothing."""
NO_LIMIT = 2**20

OFFLINE_DEFAULTS: dict[str, dict[str, object]] = {
    "gateway": {
        "max_open_requests": NO_LIMIT,
        "max_connections": NO_LIMIT,
        "max_choices": 4096,
        "max_body": 2**30,
        "max_bodies": 2**50,
        "max_logprobs": 100,
        "allow_request_template": True,
        "placement_s": 600,
        "queue_s": NO_TIMEOUT,
        "request_s": NO_TIMEOUT,
    },
    "coordinator": {"queue_limit": NO_LIMIT, "queue_timeout": NO_TIMEOUT},
    "scheduler": {"max_waiting": NO_LIMIT, "step_timeout_s": 600, "canary_interval_s": 0},
    "worker": {},
    "tokenizer": {},
    "encoder": {},
    "detokenizer": {"max_streams": NO_LIMIT},
}
"""What differs from serving: no request is refused for lack of capacity, as `LLM` sends no more than can be taken, and
the only engine checks nothing by canaries, as no other could take its place."""


class EngineArguments(TypedDict, total=False):
    """The arguments of `LLM` that are settings of its services, which say their defaults, units and limits."""

    served_model_name: str | None
    dtype: str
    device: str
    max_model_len: int | None
    kv_memory: str | int | None
    gpu_memory_utilization: float
    kv_cache_dtype: str
    enforce_eager: bool
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    enable_prefix_caching: bool
    language_model_only: bool


class ServiceConfigs(NamedTuple):
    """One configuration for each process that a stack would have."""

    gateway: GatewayConfig
    tokenizer: TokenizerConfig
    coordinator: CoordinatorConfig
    scheduler: SchedulerConfig
    ranks: tuple[WorkerConfig, ...]
    detokenizer: DetokenizerConfig
    encoder: EncoderConfig
    """Only models that take images have one."""


def service_configs(
    model: str, arguments: EngineArguments, settings: Mapping[str, object] | None = None
) -> ServiceConfigs:
    """Returns every service's configuration. `settings`: `SERVICE.KEY` → value, any setting of a service, as `baton up
    --set` takes it. Raises InvalidRequest, which names the key and its value; TypeError for an unknown argument."""
    if unknown := arguments.keys() - EngineArguments.__annotations__.keys():
        raise TypeError(f"LLM() got an unexpected keyword argument {min(unknown)!r}")
    own = _by_service(settings or {})
    given: dict[str, Any] = dict(arguments)
    names_of_sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    sizes = {name: given.pop(name, 1) for name in names_of_sizes}
    for name, size in sizes.items():
        if size < 1:
            raise InvalidRequest(f"{name}: {size} is not allowed; it must be at least 1", name)
    world_size = math.prod(sizes.values())
    common = {"block_size": given.pop("block_size", None)}
    gateway = {"enable_prefix_caching": given.pop("enable_prefix_caching", None)}
    names = {"model": model, "served_model_name": model_name(model, arguments.get("served_model_name"))}
    worker = {
        **given,
        **names,
        "engine": ENGINE,
        "world_size": world_size,
        "pp": sizes["pipeline_parallel_size"],
        "prefill_context_parallel_size": sizes["prefill_context_parallel_size"],
        "rendezvous": new_rendezvous() if world_size > 1 else None,
    }
    scheduler = {
        "max_running": given.get("max_num_seqs"),
        "max_batch_tokens": given.get("max_batch_tokens"),
        "world_size": world_size,
    }

    def made(service: str, type_: type[C], instance: str, given: Mapping[str, object]) -> C:
        return _made(
            service,
            type_,
            {"instance": instance, **OFFLINE_DEFAULTS[service], **common, **given, **own.get(service, {})},
        )

    return ServiceConfigs(
        gateway=made("gateway", GatewayConfig, "gateway-1", gateway),
        tokenizer=made("tokenizer", TokenizerConfig, "tokenizer-1", names),
        coordinator=made("coordinator", CoordinatorConfig, "coordinator-1", {}),
        scheduler=made("scheduler", SchedulerConfig, ENGINE, scheduler),
        ranks=tuple(
            made("worker", WorkerConfig, f"{ENGINE}-rank{rank}", {**worker, "rank": rank}) for rank in range(world_size)
        ),
        detokenizer=made("detokenizer", DetokenizerConfig, "detokenizer-1", names),
        encoder=made("encoder", EncoderConfig, "encoder-1", names),
    )


def _by_service(more: Mapping[str, object]) -> dict[str, dict[str, object]]:
    assigned: dict[str, dict[str, object]] = {}
    for target, value in more.items():
        service, dot, key = target.partition(".")
        if not dot or service not in OFFLINE_DEFAULTS:
            raise InvalidRequest(
                f"settings: {target!r} is not allowed; SERVICE.KEY of {', '.join(OFFLINE_DEFAULTS)}", target
            )
        assigned.setdefault(service, {})[key.replace("-", "_")] = value
    return assigned


def _made(service: str, type_: type[C], given: Mapping[str, object]) -> C:
    known = {field.name for field in msgspec.structs.fields(type_)}
    for key in given:
        if key not in known:
            raise InvalidRequest(f"{service}.{key}: unknown setting; known are {', '.join(sorted(known))}", key)
    argv = [_flag(key, value) for key, value in given.items() if value is not None]
    try:
        return load_config(service, type_, argv, environment={})
    except ConfigError as error:
        raise InvalidRequest(f"{service}: {error}") from None


def _flag(key: str, value: Any) -> str:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"--{name}={value}"


def model_name(model: str, served_model_name: str | None) -> str:
    """Returns the model's name in answers: by default that of its directory or repository."""
    folder = expanded(model)
    return served_model_name or (folder.resolve().name if folder.is_dir() else model)
