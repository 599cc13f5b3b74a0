"""Commands that change a running stack, and how other NATS programs reach it: down, drain, undrain, scale, lora,
nats-env."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.gateway_client import listed_models, post
from deploy.cli.running_stack import (
    DEFAULT,
    AsJson,
    KubernetesNamespace,
    KubernetesUrl,
    Name,
    RunDir,
    run_dir_of,
    running_stack,
)
from deploy.errors import CommandError
from deploy.launchers import PoolChange
from deploy.launchers.supervisor_launcher import SupervisorLauncher
from deploy.supervisor.core.plan import SCALABLE
from deploy.supervisor.operator_bus import ask_admin
from shared.machine.home import expanded


def down(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests to finish.")] = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Drain and stop a stack, with its supervisor or without one."""
    from deploy.supervisor.orphans import end_stack

    ended = end_stack(run_dir_of(name, run_dir), now=now)
    print(ended or f"Stack {running_stack(name, run_dir).name} has been started meanwhile.")


def drain(
    instance: Annotated[
        str, typer.Argument(help="An instance as in `baton ps`, e.g. engine-1; or a pool: prefill, decode.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Drain it even if it is the last of its kind.")] = False,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Let an instance finish its open requests and accept no new ones."""
    answer = asyncio.run(ask_admin(running_stack(name, run_dir), "drain", {"instance": instance, "force": force}))
    instances, load = answer.get("instances", [instance]), answer.get("load", 0)
    several = len(instances) > 1
    verb, rest = (
        ("drain: they finish their open requests", "accept")
        if several
        else ("drains: it finishes its open requests", "accepts")
    )
    _say(answer, as_json, f"{', '.join(instances)} {verb} ({load}) and {rest} no new ones.")


def undrain(
    instance: Annotated[str, typer.Argument(help="An instance as in `baton ps`, or a pool.")],
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Let a drained instance accept requests again."""
    answer = asyncio.run(ask_admin(running_stack(name, run_dir), "undrain", {"instance": instance}))
    instances = answer.get("instances", [instance])
    _say(answer, as_json, f"{', '.join(instances)} {'accepts' if len(instances) == 1 else 'accept'} requests again.")


def scale(
    service: Annotated[
        str,
        typer.Argument(
            help="SERVICE=N, where SERVICE is gateway, tokenizer, encoder, detokenizer, coordinator, engines, prefill "
            "or decode."
        ),
    ],
    host: Annotated[
        str | None,
        typer.Option("--host", help="Name of the host where that is to be, in a stack of several. Default: this one."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Name of the model whose tokenizers or engines these are, of several."),
    ] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--data-parallel-size",
            min=1,
            help="With engines=N, where they share experts: engines of each group from now on. Groups of another size "
            "go on until the new ones are ready.",
        ),
    ] = None,
    kubernetes: KubernetesUrl = None,
    kubernetes_namespace: KubernetesNamespace = "baton",
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="With --kubernetes: seconds to wait until all are ready; 0: none.")
    ] = 0.0,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Start or stop instances: baton scale tokenizer=3."""
    kind, equals, count = service.partition("=")
    if not equals or not count.isdecimal():
        raise CommandError(f"{service}: SERVICE=N is expected, for example tokenizer=3", status=2)
    pool = _endpoint_name(kind)
    if kubernetes is not None:
        if host is not None:
            raise CommandError("--host: Kubernetes chooses hosts itself", status=2)
        if model is not None:
            raise CommandError("--model: on Kubernetes each model is a stack of its own", status=2)
        if data_parallel_size is not None:
            raise CommandError("--data-parallel-size: engines of a group are on one host, without Kubernetes", status=2)
        change = asyncio.run(_scale_pods(kubernetes, kubernetes_namespace, pool, int(count), wait))
    else:
        if wait:
            raise CommandError("--wait: with --kubernetes only", status=2)
        state = running_stack(name, run_dir)
        where = host if host is not None or state.spec.cluster is None else state.spec.cluster.node
        change = asyncio.run(SupervisorLauncher(state, where, model).scale(pool, int(count), data_parallel_size))
    changes = [f"starting {', '.join(change.started)}"] if change.started else []
    changes += [f"draining and stopping {', '.join(change.stopping)}"] if change.stopping else []
    changes += [f"and once these are ready stopping {', '.join(change.superseded)}"] if change.superseded else []
    answer = {"service": pool, **change._asdict()}
    _say(answer, as_json, f"{service}: {'; '.join(changes) or 'nothing to change'}.")


async def _scale_pods(url: str, namespace: str, pool: str, count: int, wait: float) -> PoolChange:
    """Raises CommandError."""
    from deploy.launchers.kubernetes_api import kubernetes_api
    from deploy.launchers.kubernetes_launcher import KubernetesLauncher

    try:
        async with kubernetes_api(url, namespace) as api:
            launcher = KubernetesLauncher(api)
            change = await launcher.scale(pool, count)
            if wait:
                await launcher.wait_until_ready(pool, count, wait)
            return change
    except ValueError as error:
        raise CommandError(f"--kubernetes {error}", status=2) from None


def _endpoint_name(service: str) -> str:
    """The endpoint's name of a service; singular and plural are both accepted (`engine`, `tokenizers`)."""
    for known in SCALABLE:
        if service.removesuffix("s") == known.removesuffix("s"):
            return known
    raise CommandError(f"{service}: cannot be scaled; {', '.join(SCALABLE)} can", status=2)


def _say(answer: dict[str, Any], as_json: bool, sentence: str) -> None:
    print(json.dumps(answer) if as_json else sentence)


def nats_env(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Print what the `nats` command needs: eval "$(baton nats-env)"; nats micro ls."""
    state = running_stack(name, run_dir)
    values = {"NATS_URL": ",".join(state.nats_url), "NATS_USER": state.nats_user, "NATS_PASSWORD": state.nats_password}
    values["NATS_CA"] = state.nats_ca
    known = {name: value for name, value in values.items() if value is not None}
    if as_json:
        print(json.dumps(known))
        return
    for name, value in known.items():
        print(f"export {name}={shlex.quote(value)}")


class LoraAction(StrEnum):
    """What `baton lora` does."""

    LIST = "list"
    LOAD = "load"
    UNLOAD = "unload"


def lora(
    action: Annotated[LoraAction, typer.Argument(help="list, load or unload.")],
    adapter: Annotated[str | None, typer.Argument(help="Name of the adapter.")] = None,
    folder: Annotated[Path | None, typer.Argument(help="Its folder, as PEFT writes it; of load.")] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
    url: Annotated[str | None, typer.Option(help="Any server's URL, in place of a stack of this machine.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key with the scope admin.", envvar="BATON_API_KEY", show_default=False)
    ] = None,
) -> None:
    """Show a stack's LoRA adapters, or change them: baton lora list, load NAME FOLDER, unload NAME.

    The stack must have been started with --lora-registry. Every engine has an adapter when load returns, and so has
    each that is started later; requests of an adapter that is unloaded end as if it was still there.
    """
    if url is None:
        state = running_stack(name, run_dir)
        url, api_key = state.url, api_key or state.api_key
    url = url.rstrip("/").removesuffix("/v1")
    match action:
        case LoraAction.LIST:
            adapters = [model for model in listed_models(url, api_key) if model.get("parent") is not None]
            for model in adapters:
                print(f"{model['id']:<30} {model['parent']}")
            if not adapters:
                print("no adapters", file=sys.stderr)
        case LoraAction.LOAD:
            if adapter is None or folder is None:
                raise CommandError("baton lora load NAME FOLDER: a name and a folder are expected", status=2)
            body = {"lora_name": adapter, "lora_path": str(expanded(folder).absolute())}
            print(post(url, api_key, "/v1/load_lora_adapter", body))
        case LoraAction.UNLOAD:
            if adapter is None or folder is not None:
                raise CommandError("baton lora unload NAME: a name is expected", status=2)
            print(post(url, api_key, "/v1/unload_lora_adapter", {"lora_name": adapter}))
