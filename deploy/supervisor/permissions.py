"""Who may say what on the bus: one NATS user per service, made for one run."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from shared import topics
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, NodeId
from shared.messages.lifecycle import Service

Operator = Literal["operator"]
User = Service | Operator
"""The operator is whoever types `baton drain` or `baton record`."""
USERS: tuple[User, ...] = (*get_args(Service), *get_args(Operator))


class Permissions(Struct, frozen=True, kw_only=True):
    """Subjects below the namespace. Answering a question needs no permission of its own."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    micro: bool = False
    """Offers a NATS micro service, which others find below $SRV."""
    finds_micro: bool = False


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
_LIFECYCLES = topics.lifecycles().subject
_SCALING = topics.scaling().subject
_RANKS_WANTED = topics.ranks_wanted().subject
_RANKS_HELD = topics.ranks_held().subject
_STORE_QUESTIONS = topics.kvstore_questions(NodeId(_ANY)).subject
_STORE_RELEASES = topics.kvstore_releases(NodeId(_ANY)).subject
_KV_EVENTS = topics.all_kv_events().subject
_KV_DUMP_REQUESTS = topics.kv_dump_requests(InstanceId(_ANY)).subject
_KV_DUMPS = topics.kv_dumps(InstanceId(_ANY)).subject
_ADMIN = f"{topics.ADMIN}.>"
_EVERYTHING = ">"
"""For `baton record` and `baton top`: whoever operates a stack may see its traffic."""


def permissions_of(user: User) -> Permissions:
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
        publish=(*publish, topics.lifecycle_of(service, InstanceId(_ANY)).subject),
        subscribe=(*subscribe, _LIFECYCLES, _INSTANCES),
        micro=micro,
    )


def subjects(namespace: str, permissions: Permissions) -> tuple[list[str], list[str]]:
    """Full subjects for (publish, subscribe); everybody may receive answers to own questions."""
    publish = [f"{namespace}.{subject}" for subject in permissions.publish]
    subscribe = [*(f"{namespace}.{subject}" for subject in permissions.subscribe), "_INBOX.>"]
    if permissions.micro:
        subscribe.append("$SRV.>")
    if permissions.finds_micro:
        publish.append("$SRV.>")
    return publish, subscribe


def passwords_of(token: str) -> Mapping[User, str]:
    """The same on every host that knows the token."""
    return {user: hmac.digest(token.encode(), user.encode(), "sha256").hex() for user in USERS}


def make_passwords() -> Mapping[User, str]:
    """192 random bits each."""
    return {user: secrets.token_urlsafe(24) for user in USERS}
