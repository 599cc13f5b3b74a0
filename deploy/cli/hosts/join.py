"""`baton join`: from a token to a running part of another host's stack."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli import end_at_once, raise_interrupt
from deploy.cli.hosts.joined_stack import joined_spec, model_here, own_node
from deploy.cli.hosts.model_source import ModelSource, comes_from_peers, fetched_model
from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of
from deploy.cli.up.assignments import parsed_settings
from deploy.cli.up.options import Detach, Offer, StackAssignments, given, offers, stack_settings, with_options
from deploy.cli.up.other_hosts import check_certificates, host_address
from deploy.errors import CommandError
from deploy.model_choice import model_folder
from deploy.supervisor.checkpoints.fetch import FetchedModel
from deploy.supervisor.cluster.folder import ClusterFolder, NotAMember
from deploy.supervisor.cluster.messages import HostMembership, StackFacts
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from deploy.supervisor.cluster.tokens import BadToken, JoinToken
from deploy.supervisor.core.plan import LightService
from deploy.supervisor.launch import EVERY_SERVICE
from deploy.supervisor.network import own_address_towards
from deploy.supervisor.state_file import is_held, read_state
from shared.ids import NodeId

TOKEN_VARIABLE = "BATON_JOIN_TOKEN"
OPTIONS = (
    "model",
    "device",
    "engines",
    "standby",
    "max_instances",
    "prefill",
    "decode",
    "tp",
    "pp",
    "kvstore_memory",
    "kv_ssd",
    "kv_ssd_size",
    "node",
    "advertise_address",
    "route_port",
    "model_port",
    "host",
    "port",
    "keys_file",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "federation_address",
    "gpu_memory_utilization",
    "kv_memory",
    "max_num_seqs",
    "max_batch_tokens",
    "bind",
    "numa",
    "gpu_topology",
    "insecure",
    "log_level",
    "start_timeout",
)
"""Of those of `baton up`; everything else is as on the first host."""
Number = Annotated[int, typer.Option(min=0, max=256, rich_help_panel="How many", help="Of these on this host.")]


def join(
    token: Annotated[
        str | None,
        typer.Argument(
            help="What `baton token` printed on the first host; better set by environment, as others on this machine "
            "see arguments. None: come back to the stack that this host joined before.",
            envvar=TOKEN_VARIABLE,
        ),
    ] = None,
    *,
    gateways: Number = 0,
    tokenizers: Number = 0,
    detokenizers: Number = 0,
    coordinators: Number = 0,
    model_source: Annotated[
        ModelSource,
        typer.Option(
            rich_help_panel="Model",
            help="auto: from the hosts of the stack where it is not here; peers: from them in any case; local: never.",
        ),
    ] = "auto",
    settings: StackAssignments = None,
    detach: Detach = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
    **typed: Any,
) -> None:
    """Make this host part of another host's stack: with engines, a KV store and a NATS server of its own.

    Without --engines, --prefill and --decode it gets one engine. With --gateways, --tokenizers, --detokenizers and
    --coordinators it serves clients even while the first host is away.
    """
    end_at_once()
    where, assigned = run_dir_of(name, run_dir), parsed_settings(settings or [])
    values = given(typed)
    light: dict[LightService, int] = {
        "gateway": gateways,
        "tokenizer": tokenizers,
        "detokenizer": detokenizers,
        "coordinator": coordinators,
    }
    raise_interrupt()
    if token:
        block_size = values.get("block_size") or assigned.get(EVERY_SERVICE, {}).get("block_size")
        _request_admission(token, values, where, model_source, gateways=gateways > 0, block_size=block_size)
    try:
        host = ClusterFolder(where).membership()
    except NotAMember as error:
        raise CommandError(f"{error}; a token is needed: baton token, on the first host", status=2) from None
    model = fetched_model(host, where) if values.get("model") is None else None
    values |= {} if model is None else {"model": str(model)}
    spec = joined_spec(host, values, assigned, light, name=name, run_dir=where)
    if detach:
        from deploy.supervisor.background import start_in_background

        start_in_background(where, spec, environment={TOKEN_VARIABLE: ""})
        print(f"\nIt runs in the background; stop it with: baton down --run-dir {where}")
        return
    from deploy.cli.up.run import run_stack

    run_stack(spec, ready_fd)


def _request_admission(
    text: str,
    values: dict[str, Any],
    run_dir: Path,
    source: ModelSource,
    *,
    gateways: bool,
    block_size: str | None,
) -> None:
    """Writes the membership down. Raises CommandError."""
    check_certificates()
    from deploy.supervisor.cluster.join_client import JoinFailed, JoiningHost, find_stack, join_stack

    if is_held(run_dir) or read_state(run_dir) is not None:
        raise CommandError(f"a stack runs already in {run_dir} (baton ps, baton down); join needs another --run-dir")
    try:
        token = JoinToken.read(text)
    except BadToken as error:
        raise CommandError(f"token: {error}", status=2) from None
    stack, node = stack_settings(values), own_node(values.get("node"))
    address = _own_address(stack.advertise_address, token)
    try:
        found = asyncio.run(find_stack(token))
        by_peers = comes_from_peers(source, values.get("model"), found.facts)
        folder = None if by_peers else _model(values.get("model"), found.facts, run_dir)
        model = None if folder is None else model_fingerprint(folder, weights=not found.facts.dummy_weights)
        host = JoiningHost(node, address, stack.route_port, model, gateways, int(block_size) if block_size else None)
        joined = asyncio.run(join_stack(token, found, host))
        kept = HostMembership(node=NodeId(node), address=address, route_port=stack.route_port, stack=joined.membership)
        ClusterFolder(run_dir).keep_membership(kept, joined.authority, joined.key)
        FetchedModel(run_dir).want() if by_peers else FetchedModel(run_dir).discard()
    except JoinFailed as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or run_dir}: {error.strerror or error}") from None


def _own_address(text: str | None, token: JoinToken) -> str:
    if text is not None:
        return host_address("--advertise-address", text, 1)[0]
    address = own_address_towards(token.address)
    if address is None:
        raise CommandError(f"token: there is no way from here to the first host at {token.address}")
    return address


def _model(typed: str | None, facts: StackFacts, run_dir: Path) -> Path:
    """Where this host has the model. Raises CommandError."""
    here = model_here(typed, facts.model, facts.served_model_name)
    return model_folder(here, "dummy" if facts.dummy_weights else None, run_dir)


UNSET = {
    "model": "where the first host has it, or from the hosts that are there",
    "device": "as on the first host",
    "engines": "1, or 0 beside pools",
    "tp": "as on the first host",
    "pp": "as on the first host",
    "federation_address": "where --advertise-address is, at the first host's port; only with --gateways",
}
"""What applies here where an option is not given, other than with `baton up`."""


def _joined_offers() -> list[Offer]:
    known = (offers()[name] for name in OPTIONS)
    return [each._replace(option=each.option._replace(unset=UNSET.get(each.name, each.option.unset))) for each in known]


with_options(join, _joined_offers())
