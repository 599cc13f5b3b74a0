"""`baton cluster`: the clusters of a federation, as one of them sees them; one is drained for a while, and comes
back."""

from __future__ import annotations

import asyncio
import json
import secrets
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, running_stack
from deploy.errors import CommandError
from deploy.supervisor.operator_bus import ask_admin

SECRET_BYTES = 32


class ClusterAction(StrEnum):
    """What `baton cluster` does."""

    LIST = "list"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    SECRET = "secret"


def cluster(
    action: Annotated[
        ClusterAction,
        typer.Argument(
            help="list: show all clusters. drain: new requests to a cluster go to others. undrain: they stay again. "
            "secret: make what all clusters share."
        ),
    ],
    cluster_name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of drain and undrain.")] = None,
    move_after: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="With drain: seconds after which open streams go on in other clusters.",
            show_default="they end there",
        ),
    ] = None,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Show the clusters of a federation, or switch one: baton cluster list, drain NAME, undrain NAME, secret."""
    switches = action in (ClusterAction.DRAIN, ClusterAction.UNDRAIN)
    if switches != (cluster_name is not None):
        wanted = "NAME is missing" if switches else f"{cluster_name}: {action} takes no name"
        raise CommandError(f"cluster {action}: {wanted}", status=2)
    if move_after is not None and action is not ClusterAction.DRAIN:
        raise CommandError("--move-after: with drain only", status=2)
    if action is ClusterAction.SECRET:
        print(secrets.token_urlsafe(SECRET_BYTES))
        return
    state = running_stack(name, run_dir)
    if state.spec.federation is None:
        raise CommandError("this stack is in no federation: it was started without --federation-address")
    if action is ClusterAction.LIST:
        answer = asyncio.run(ask_admin(state, "clusters.list", {}))
        print(json.dumps(answer)) if as_json else _show(answer["clusters"])
        return
    request: dict[str, Any] = {"cluster": cluster_name}
    if move_after is not None:
        request["move_after"] = move_after
    answer = asyncio.run(ask_admin(state, f"clusters.{action}", request))
    said = (
        "takes requests again" if action is ClusterAction.UNDRAIN else "is drained: new requests go to other clusters"
    )
    print(json.dumps(answer) if as_json else f"Cluster {cluster_name} {said}.")


def _show(clusters: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("cluster", "state", "address", "model", "free"):
        table.add_column(column)
    for each in clusters:
        models = each["models"] or [{"model": "-", "free": 0, "places": 0}]
        for model in models:
            free = f"{model['free']} of {model['places']}"
            table.add_row(each["name"], each["state"], each["address"], model["model"], free)
    console = Console()
    console.print(table)
    for each in clusters:
        if "reason" in each:
            console.print(f"{each['name']} at {each['address']}: {each['reason']}", highlight=False, soft_wrap=True)
