"""The table of who may publish and hear what covers every topic, and every service's code keeps to it."""

from __future__ import annotations

import ast
import fnmatch
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytest

from shared import topics
from shared.messages.lifecycle import Service
from shared.permissions import ACTORS, TABLE, USERS, User, permissions_of
from tests.support.paths import REPOSITORY

Direction = Literal["publish", "subscribe", "either"]
PUBLISHING = {"publish", "_publish", "request", "request_raw"}
SUBSCRIBING = {"subscribe", "serve", "TopicSubscription", "tap"}
ROWS = {row.topic.__name__: row for row in TABLE}


@cache
def topic_functions() -> set[str]:
    found = inspect.getmembers(topics, callable)
    return {name for name, each in found if "Topic[" in str(getattr(each, "__annotations__", {}).get("return", ""))}


def test_every_topic_has_a_row_and_every_row_a_topic() -> None:
    assert len(topic_functions()) >= 20
    assert topic_functions() == set(ROWS)


def test_every_subject_has_a_publisher_and_a_subscriber() -> None:
    for row in TABLE:
        granted = [permissions_of(user, "ns") for user in USERS if user != "operator" or user in row.publishers]
        assert any(allowed(each.publish, f"ns.{row.subject}") for each in granted), row
        assert any(allowed(each.subscribe, f"ns.{row.subject}") for each in granted), row


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    """Every pattern here has single-token wildcards, and test names hold no dots; `>` stands at the end."""
    return any(fnmatch.fnmatchcase(subject, pattern.replace(">", "*")) for pattern in patterns)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("gateway", "engine.engine-1.requests"),
        ("gateway", "route"),
        ("gateway", "instance.engine-1.control"),
        ("tokenizer", "engine.engine-1.control"),
        ("worker", "route"),
        ("worker", "gateway.gateway-1.deltas"),
        ("worker", "lifecycle.scheduler.engine-1"),
        ("detokenizer", "engine.engine-1.steps"),
        ("kvstore", "engine.engine-1.requests"),
        ("operator", "instance.engine-1.control"),
        ("operator", "supervisor.scale"),
    ],
)
def test_nobody_may_say_what_is_not_theirs(user: User, subject: str) -> None:
    assert not allowed(permissions_of(user, "ns").publish, f"ns.{subject}")


def test_no_user_hears_the_replies_to_another() -> None:
    for user in USERS:
        may = permissions_of(user, "ns")
        inboxes = {other: f"{topics.inbox_prefix(other)}.r4nd0m.1" for other in USERS}
        assert {
            o for o, inbox in inboxes.items() if allowed(may.subscribe, inbox) and not allowed(may.unheard, inbox)
        } == {user}
        assert allowed(may.subscribe, "_INBOX.r4nd0m.1") == (user == "operator")


@pytest.mark.parametrize(
    ("user", "prefix"),
    [("gateway", "_INBOX.gateway"), (None, "_INBOX"), ("*", "_INBOX"), ("a.>", "_INBOX"), ("", "_INBOX")],
)
def test_an_inbox_is_named_after_its_user_where_a_subject_can_hold_the_name(user: str | None, prefix: str) -> None:
    assert topics.inbox_prefix(user) == prefix


# ---- what the code does


class Use(NamedTuple):
    """A place in the code that names a topic."""

    where: str
    topic: str
    direction: Direction


@cache
def uses(folder: str) -> tuple[Use, ...]:
    """Of a folder, or of one module."""
    paths = [REPOSITORY / folder] if folder.endswith(".py") else sorted((REPOSITORY / folder).rglob("*.py"))
    return tuple(use for path in paths for use in _uses_of(path))


def _uses_of(path: Path) -> Iterator[Use]:
    text = path.read_text()
    if "topics" in text:
        tree = ast.parse(text)
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "shared.topics"
            for alias in node.names
        }
        yield from _uses_in(tree, path, imported)


def _uses_in(tree: ast.AST, path: Path, imported: set[str]) -> Iterator[Use]:
    directions: dict[int, Direction] = {}
    for node in ast.walk(tree):  # a call comes before what stands in it
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        if name in PUBLISHING | SUBSCRIBING and node.args:
            directions[id(node.args[0])] = "publish" if name in PUBLISHING else "subscribe"
        topical = isinstance(node.func, ast.Attribute) and _name(node.func.value) == "topics"
        if name in topic_functions() and (topical or name in imported):
            yield Use(f"{path.relative_to(REPOSITORY)}:{node.lineno}", name, directions.get(id(node), "either"))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def may(user: User, use: Use) -> bool:
    row = ROWS[use.topic]
    own_life = use.topic == "lifecycle_of" and user in ACTORS
    publishes, subscribes = own_life or user in row.publishers, user in row.subscribers
    return {"publish": publishes, "subscribe": subscribes, "either": publishes or subscribes}[use.direction]


KV_EVENT_PUBLISHER = "shared/kv_events/publisher.py"
HOLDERS_OF_BLOCKS: tuple[Service, ...] = ("scheduler", "kvstore")


@pytest.mark.parametrize("service", HOLDERS_OF_BLOCKS)
def test_who_holds_blocks_may_publish_them(service: Service) -> None:
    found = uses(KV_EVENT_PUBLISHER)
    assert {use.topic for use in found} == {"kv_events", "kv_dumps"}
    assert [use for use in found if not may(service, use)] == []


@pytest.mark.parametrize("service", get_args(Service))
def test_a_service_uses_only_topics_that_the_table_gives_it(service: Service) -> None:
    folder = {"kvstore": "kvstore", "supervisor": "deploy/supervisor"}.get(service, f"services/{service}")
    found = [use for use in uses(folder) if "/operator_bus.py" not in use.where]
    assert found, f"{folder} names no topic: is this still how to find them?"
    assert [use for use in found if not may(service, use)] == []


def test_every_actor_may_do_what_its_runtime_does() -> None:
    found = list(uses("shared/actor"))
    assert len(found) >= 3
    assert [(actor, use) for actor in ACTORS for use in found if not may(actor, use)] == []


def test_no_right_is_given_that_no_code_uses() -> None:
    folders = {service: f"services/{service}" for service in ACTORS} | {"kvstore": "kvstore"}
    for service in ACTORS:
        used = {use.topic for use in [*uses(folders[service]), *uses("shared/actor")]}
        if service in HOLDERS_OF_BLOCKS:
            used |= {use.topic for use in uses(KV_EVENT_PUBLISHER)}
        given = {name for name, row in ROWS.items() if service in (*row.publishers, *row.subscribers)}
        assert given - used == set(), service
