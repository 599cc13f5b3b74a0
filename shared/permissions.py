"""Who may publish and who may hear each subject: one row per topic, from which a NATS server's users are made.

A topic without a row reaches nobody, and `tests/unit/shared/test_permissions.py` fails for it. What a service's code
publishes and subscribes to is compared with this table there, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

from shared import topics
from shared.messages.lifecycle import Service

User = Service | Literal["operator"]
"""Who connects to the bus. The operator is the user of `baton ps`, `top`, `drain` and `record`, and of the `nats`
command."""
USERS: tuple[User, ...] = (*get_args(Service), "operator")
ACTORS: tuple[Service, ...] = tuple(service for service in get_args(Service) if service != "supervisor")
"""Services that are actors: they announce themselves, and can be drained."""

_OBSERVERS: tuple[User, ...] = ("gateway", "coordinator", "scheduler", "detokenizer", "kvstore", "supervisor")
"""Those that hear of everybody's life."""


class TopicRights(NamedTuple):
    """A row of the table: all subjects that one function of `shared.topics` makes."""

    topic: Callable[..., Any]
    publishers: tuple[User, ...]
    subscribers: tuple[User, ...]

    @property
    def subject(self) -> str:
        """The subject, with `*` for every id in it."""
        ids = inspect.signature(self.topic).parameters
        made: topics.Topic[Any] = self.topic(*(_ID for _ in ids))
        return made.subject.replace(_ID, "*")


_ID = "ID"
"""Stands for an id; upper case, so that no other part of a subject is taken for it."""

# fmt: off
TABLE: tuple[TopicRights, ...] = (
    # topic                            publishers                                        subscribers
    TopicRights(topics.tokenize,           ("gateway",),                                     ("tokenizer",)),
    TopicRights(topics.tokenizer_requests, ("gateway",),                                     ("tokenizer",)),
    TopicRights(topics.image_requests,     ("gateway",),                                     ("encoder",)),
    TopicRights(topics.rows_leases,        ("gateway",),                                     ("encoder",)),
    TopicRights(topics.kept_rows,          ("scheduler", "worker", "gateway"),               ("encoder", "scheduler")),
    TopicRights(topics.route,              ("tokenizer", "coordinator"),                     ("coordinator",)),
    TopicRights(topics.withdrawals,        ("gateway",),                            ("coordinator", "tokenizer")),
    TopicRights(topics.placements,         ("coordinator",),                                 ("coordinator",)),
    TopicRights(topics.prefill_pulls,      ("scheduler",),                                   ("coordinator",)),
    TopicRights(topics.engine_requests,    ("coordinator", "scheduler"),                     ("scheduler",)),
    TopicRights(topics.engine_steps,       ("scheduler",),                                   ("worker",)),
    TopicRights(topics.rank_orders,        ("scheduler",),                                   ("worker",)),
    TopicRights(topics.engine_results,     ("worker",),                                      ("scheduler",)),
    TopicRights(topics.engine_control,     ("gateway", "detokenizer", "coordinator", "scheduler"), ("scheduler",)),
    TopicRights(topics.engine_probes,      ("gateway", "detokenizer", "coordinator"),        ("scheduler",)),
    TopicRights(topics.kvstore_requests,   ("scheduler", "coordinator"),                     ("kvstore",)),
    TopicRights(topics.kvstore_releases,   ("scheduler",),                                   ("kvstore",)),
    TopicRights(topics.kvstore_prefetches, ("scheduler",),                                   ("kvstore",)),
    TopicRights(topics.kv_events,          ("scheduler", "kvstore"),                         ()),
    TopicRights(topics.all_kv_events,      (),                                               ("coordinator",)),
    TopicRights(topics.kv_dump_requests,   ("coordinator",),                                 ("scheduler", "kvstore")),
    TopicRights(topics.kv_dumps,           ("scheduler", "kvstore"),                         ("coordinator",)),
    TopicRights(topics.detokenizer_tokens, ("scheduler",),                                   ("detokenizer",)),
    TopicRights(topics.gateway_inbox,
                ("tokenizer", "coordinator", "scheduler", "detokenizer", "gateway"),         ("gateway",)),
    TopicRights(topics.key_usage,          ("gateway",),                                     ("gateway",)),
    TopicRights(topics.gateway_requests,   ("gateway",),                                     ("gateway",)),
    TopicRights(topics.lifecycles,         (),                                               _OBSERVERS),
    TopicRights(topics.lifecycle_of,       ("supervisor",),                                  ()),  # and each its own
    TopicRights(topics.rank_lifecycles,    ("worker", "supervisor"),                        ("scheduler",)),
    TopicRights(topics.lifecycle_requests, (*ACTORS, "supervisor", "operator"),              ACTORS),
    TopicRights(topics.heartbeat_interval,     ("coordinator",),                                 ACTORS),
    TopicRights(topics.instance_control,   ("coordinator", "supervisor"),                    ACTORS),
    TopicRights(topics.name_claims,        ACTORS,                                           ACTORS),
    TopicRights(topics.span_requests,      ("gateway", "operator"),                          ACTORS),
    TopicRights(topics.rank_assignments,   ("supervisor",),                                  ("supervisor",)),
    TopicRights(topics.rank_status,        ("supervisor",),                                  ("supervisor",)),
    TopicRights(topics.host_reports,       ("supervisor",),                                  ("supervisor",)),
    TopicRights(topics.scaling,            ("coordinator",),                                 ("supervisor",)),
    TopicRights(topics.host_scaling,       ("coordinator",),                                 ("supervisor",)),
    TopicRights(topics.planner_decisions,  ("operator",),                                    ("operator", "gateway")),
)
# fmt: on


MICRO_SERVICES = "$SRV.>"
"""Where clients find NATS micro services, and these answer."""


class Permissions(NamedTuple):
    """Full subjects that a user may use. Replying to a request that it received needs no permission of its own."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    unheard: tuple[str, ...] = ()
    """What it does not hear although `subscribe` holds it."""


def permissions_of(user: User, namespace: str) -> Permissions:
    """What a user may publish and subscribe to; replies to its own requests come to an inbox that no other user may
    hear."""
    if user == "operator":
        return _of_operator(namespace)
    publish = _in(namespace, (row.subject for row in TABLE if user in row.publishers))
    subscribe = _in(namespace, (row.subject for row in TABLE if user in row.subscribers))
    own_life = f"{namespace}.lifecycle.{user}.*"
    if user in ACTORS and own_life not in publish:
        publish.append(own_life)
    subscribe.append(f"{topics.inbox_prefix(user)}.>")
    if user == "coordinator":
        subscribe += [f"{namespace}.{topics.ADMIN}.>", MICRO_SERVICES]
    if user == "gateway":
        publish += [f"{namespace}.{topics.ADMIN}.{name}" for name in topics.ADMIN_OF_GATEWAYS]
        subscribe += [f"{namespace}.{topics.CLUSTERS_ADMIN}.>", MICRO_SERVICES]
    return Permissions(tuple(publish), tuple(subscribe))


def _of_operator(namespace: str) -> Permissions:
    """It sees all traffic of its stack but replies to others, and sends only what a coordinator judges, and what its
    own planner decides. NATS programs such as the `nats` command know no inbox of their own, so it has all
    that are nobody's."""
    return Permissions(
        publish=(
            f"{namespace}.{topics.ADMIN}.>",
            MICRO_SERVICES,
            *_in(namespace, (row.subject for row in TABLE if "operator" in row.publishers)),
        ),
        subscribe=(f"{namespace}.>", f"{topics.inbox_prefix(None)}.>"),
        unheard=tuple(f"{topics.inbox_prefix(user)}.>" for user in USERS if user != "operator"),
    )


def _in(namespace: str, subjects: Iterable[str]) -> list[str]:
    return [f"{namespace}.{subject}" for subject in subjects]
