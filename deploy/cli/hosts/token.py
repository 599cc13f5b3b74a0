"""`baton token`: who may join."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, run_dir_of, running_stack
from deploy.errors import CommandError
from deploy.supervisor.cluster.folder import ClusterFolder

MAX_HOURS = 24.0 * 365


def token(
    ttl: Annotated[
        float, typer.Option("--ttl", min=0.0001, max=MAX_HOURS, help="Hours for which hosts can join by it.")
    ] = 24.0,
    print_join_command: Annotated[
        bool, typer.Option("--print-join-command", help="Print what to type on the other host.")
    ] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="ID", help="Make none; end one. Hosts that joined stay.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--list", help="Make none; show those that there are.")] = False,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Make a token by which other hosts join this one's stack.

    It holds this host's address, the fingerprint of its certificate authority, and a secret. Any number of hosts may
    join by it until it expires or is revoked.
    """
    folder, now = ClusterFolder(run_dir_of(name, run_dir)), time.time()
    try:
        if revoke is not None:
            if not folder.tokens.revoke(revoke):
                raise CommandError(f"--revoke {revoke}: there is no such token; see baton token --list")
            print(f"Token {revoke} is revoked.")
        elif show_all:
            _show(folder, now, as_json=as_json)
        else:
            _print_new(folder, _first_host(name, run_dir), now, ttl, command=print_join_command, as_json=as_json)
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder.path}: {error}") from None


def _first_host(name: str, run_dir: RunDir) -> tuple[str, int]:
    """Address and port where hosts join. Raises CommandError."""
    cluster = running_stack(name, run_dir).spec.cluster
    if cluster is None:
        raise CommandError("no host can join this stack: it was started without --advertise-address")
    if cluster.join_port is None:
        raise CommandError(f"this host has joined itself; tokens are made on {cluster.first}")
    return cluster.address, cluster.join_port


def _print_new(
    folder: ClusterFolder, first: tuple[str, int], now: float, ttl: float, *, command: bool, as_json: bool
) -> None:
    made = folder.new_token(*first, now, ttl * 3600)
    if as_json:
        print(json.dumps({"id": made.id, "token": made.text(), "expires": now + ttl * 3600}))
    else:
        print(f"baton join {made.text()}" if command else made.text())


def _show(folder: ClusterFolder, now: float, *, as_json: bool) -> None:
    tokens = folder.tokens.tokens()
    if as_json:
        print(json.dumps([{"id": each, "expires": token.expires} for each, token in tokens.items()]))
        return
    for each, token in tokens.items():
        left = (token.expires - now) / 3600
        print(f"{each}  {f'{left:.1f} h left' if left > 0 else 'expired'}")
