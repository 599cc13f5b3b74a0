"""Permissions on the bus: one NATS user per service, with credentials made for one run."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from shared import topics
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, NodeId
from shared.messages.lifecycle import Service

Operator = Literal["operator"]
User = Service | Operator
"""The operator is the user of `baton drain` and `baton record`."""
USERS: tuple[User, ...] = (*get_args(Service), *get_args(Operator))


class Permissions(Struct, frozen=True, kw_only=True):
    """Subjects (below the namespace) that a user may use. Replying to a request needs no permission of its own."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    micro: bool = False
    """May offer a NATS micro service, which clients find below $SRV."""
    finds_micro: bool = False
    """May look for micro services."""


_ANY = "*"
_TOKENIZE = "tokenize.*"
_QUESTIONS = "tokenizer.*.ask"
_ROUTE = topics.route().subject
_WITHDRAWALS = topics.withdrawals().subject
_PLACEMENTS = topics.placements().subject
_REQUESTS = topics.engine_requests(EngineId(_ANY)).subject
_STEPS = topics.engine_steps(EngineId(_ANY)).subject
_RESULTS = topics.engine_results(EngineId(_ANY)).subject
_CONTROL = topics.engine_control(EngineId(_ANY)).subject
_PROBES = topics.engine_probes(EngineId(_ANY)).subject
_TOKENS = topics.detokenizer_tokens(DetokenizerId(_ANY)).subject
_DELTAS = topics.gateway_inbox(GatewayId(_ANY)).subject
_INSTANCES = topics.instance_control(InstanceId(_ANY)).subject
_CLAIMS = topics.name_claims(InstanceId(_ANY)).subject
_LIFECYCLES = topics.lifecycles().subject
_SCALING = topics.scaling().subject
_RANKS_WANTED = topics.rank_assignments().subject
_RANKS_HELD = topics.rank_status().subject
_STORE_QUESTIONS = topics.kvstore_requests(NodeId(_ANY)).subject
_STORE_RELEASES = topics.kvstore_releases(NodeId(_ANY)).subject
_KV_EVENTS = topics.all_kv_events().subject
_KV_DUMP_REQUESTS = topics.kv_dump_requests(InstanceId(_ANY)).subject
_KV_DUMPS = topics.kv_dumps(InstanceId(_ANY)).subject
_ADMIN = f"{topics.ADMIN}.>"
_EVERYTHING = ">"
"""For `baton record` and `baton top`: the operator of a stack may see all its traffic."""


def permissions_of(user: User) -> Permissions:
    """The subjects that a service, or the operator, may publish and subscribe to."""
    match user:
        case "gateway":
            return _service(
                user, publish=(_TOKENIZE, _QUESTIONS, _WITHDRAWALS, _CONTROL, _PROBES), subscribe=(_DELTAS,)
            )
        case "tokenizer":
            return _service(user, publish=(_ROUTE, _DELTAS), subscribe=(_TOKENIZE, _QUESTIONS))
        case "coordinator":
            return _service(
                user,
                publish=(_REQUESTS, _DELTAS, _INSTANCES, _SCALING, _KV_DUMP_REQUESTS, _PLACEMENTS),
                subscribe=(_ROUTE, _WITHDRAWALS, _PLACEMENTS, _ADMIN, _KV_EVENTS, _KV_DUMPS),
                micro=True,
            )
        case "scheduler":
            return _service(
                user,
                publish=(
                    *(_STEPS, _TOKENS, _DELTAS, _REQUESTS, _CONTROL),
                    *(_STORE_QUESTIONS, _STORE_RELEASES, _KV_EVENTS, _KV_DUMPS),
                ),
                subscribe=(_REQUESTS, _CONTROL, _PROBES, _RESULTS, _KV_DUMP_REQUESTS),
            )
        case "worker":
            return _service(user, publish=(_RESULTS,), subscribe=(_STEPS,))
        case "detokenizer":
            return _service(user, publish=(_DELTAS, _CONTROL, _PROBES), subscribe=(_TOKENS,))
        case "kvstore":
            return _service(
                user,
                publish=(_KV_EVENTS, _KV_DUMPS),
                subscribe=(_STORE_QUESTIONS, _STORE_RELEASES, _KV_DUMP_REQUESTS),
            )
        case "supervisor":
            return Permissions(
                publish=(_LIFECYCLES, _RANKS_WANTED, _RANKS_HELD),
                subscribe=(_LIFECYCLES, _SCALING, _RANKS_WANTED, _RANKS_HELD),
            )
        case "operator":
            return Permissions(publish=(_ADMIN,), subscribe=(_EVERYTHING,), finds_micro=True)


def _service(
    service: Service, *, publish: tuple[str, ...], subscribe: tuple[str, ...], micro: bool = False
) -> Permissions:
    return Permissions(
        publish=(*publish, topics.lifecycle_of(service, InstanceId(_ANY)).subject, _CLAIMS),
        subscribe=(*subscribe, _LIFECYCLES, _INSTANCES, _CLAIMS),
        micro=micro,
    )


def subjects(namespace: str, permissions: Permissions) -> tuple[list[str], list[str]]:
    """Full subjects as (publish, subscribe); every user may receive replies to its own requests."""
    publish = [f"{namespace}.{subject}" for subject in permissions.publish]
    subscribe = [*(f"{namespace}.{subject}" for subject in permissions.subscribe), "_INBOX.>"]
    if permissions.micro:
        subscribe.append("$SRV.>")
    if permissions.finds_micro:
        publish.append("$SRV.>")
    return publish, subscribe


def passwords_of(token: str) -> Mapping[User, str]:
    """Passwords derived from the token: the same on every host that has it."""
    return {user: hmac.digest(token.encode(), user.encode(), "sha256").hex() for user in USERS}


def make_passwords() -> Mapping[User, str]:
    """Random passwords of 192 bits each."""
    return {user: secrets.token_urlsafe(24) for user in USERS}


# The text of a nats-server's configuration: the embedded one's, and `deploy/nats.conf` for containers.
#
# python -m deploy.supervisor.servers.nats_config > deploy/nats.conf


MAX_PAYLOAD = 8 * 2**20
ANSWERS_PER_QUESTION = 4
ANSWER_TIME = "2m"
CONTAINER_PASSWORD = "$NATS_PASSWORD"
"""A variable in nats-server's own environment, from which it reads the password."""

CONTAINER_HEADING = """\
# nats-server for Baton in containers. Written by `python -m deploy.supervisor.servers.nats_config`; a test compares.
#
# There is one user per service, with the subjects that the service may publish and subscribe to. All users have the
# password NATS_PASSWORD; give each its own if the services do not trust each other. It must not look like a number.

"""


def nats_config(host: str, port: int, namespace: str, passwords: Mapping[User, str]) -> str:
    """Configuration for one address, with one user per service, nothing on disk and no other port open."""
    return _configuration(host, port, namespace, {user: json.dumps(password) for user, password in passwords.items()})


def container_config() -> str:
    """Configuration for containers. It has no user for a supervisor, as the container runtime starts, scales and
    restarts the services."""
    users = [user for user in USERS if user != "supervisor"]
    return CONTAINER_HEADING + _configuration("0.0.0.0", 4222, "baton", dict.fromkeys(users, CONTAINER_PASSWORD))


def _configuration(host: str, port: int, namespace: str, passwords: Mapping[User, str]) -> str:
    users = ",\n".join(_user(user, password, namespace) for user, password in passwords.items())
    return (
        f'host: "{host}"\nport: {port}\nmax_payload: {MAX_PAYLOAD}\n'
        f'write_deadline: "5s"\nping_interval: "5s"\n'
        f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"
    )


def _user(user: User, password: str, namespace: str) -> str:
    publish, subscribe = subjects(namespace, permissions_of(user))
    return (
        f"    {{ user: {user}, password: {password}, permissions: {{\n"
        f"      publish: {json.dumps(publish)}\n"
        f"      subscribe: {json.dumps(subscribe)}\n"
        f'      allow_responses: {{ max: {ANSWERS_PER_QUESTION}, expires: "{ANSWER_TIME}" }}\n'
        f"    }} }}"
    )


if __name__ == "__main__":
    sys.stdout.write(container_config())
