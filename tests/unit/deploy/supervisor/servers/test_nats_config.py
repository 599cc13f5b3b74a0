"""Every topic has somebody who may publish it and somebody who may hear it; nobody may say what is not theirs."""

from __future__ import annotations

import fnmatch
import inspect
import itertools

import pytest

from deploy.supervisor.servers.nats_config import USERS, make_passwords, nats_config, permissions_of
from shared import topics
from shared.topics import Topic


def every_topic() -> list[Topic[object]]:
    own = [f for name, f in vars(topics).items() if name[0] != "_" and getattr(f, "__module__", "") == topics.__name__]
    functions = [f for f in own if callable(f) and not inspect.isclass(f)]
    made = [f(*("gateway" for _ in inspect.signature(f).parameters)) for f in functions]
    return [each for each in made if isinstance(each, Topic)]


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    """Every pattern here has single-token wildcards, and test names hold no dots; `>` stands at the end."""
    return any(fnmatch.fnmatchcase(subject, pattern.replace(">", "*")) for pattern in patterns)


def test_all_topics_are_found() -> None:
    assert len(every_topic()) >= 14


@pytest.mark.parametrize("topic", every_topic(), ids=lambda topic: topic.subject)
def test_every_topic_has_a_speaker_and_a_listener(topic: Topic[object]) -> None:
    users = [permissions_of(user) for user in USERS]
    assert any(allowed(user.subscribe, topic.subject) for user in users)
    assert any(allowed(user.publish, topic.subject) for user in users)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("gateway", "engine.engine-1.requests"),
        ("gateway", "instance.engine-1.control"),
        ("tokenizer", "engine.engine-1.control"),
        ("worker", "gateway.gateway-1.deltas"),
        ("worker", "lifecycle.scheduler.engine-1"),
        ("detokenizer", "engine.engine-1.steps"),
        ("operator", "instance.engine-1.control"),
        ("operator", "supervisor.scale"),
    ],
)
def test_nobody_may_say_what_is_not_theirs(user: str, subject: str) -> None:
    found = next(each for each in USERS if each == user)
    assert not allowed(permissions_of(found).publish, subject)


def test_passwords_are_long_and_made_anew() -> None:
    first, second = make_passwords(), make_passwords()
    assert set(first) == set(USERS)
    all_of_them = list(itertools.chain(first.values(), second.values()))
    assert len(set(all_of_them)) == len(all_of_them)
    assert min(map(len, all_of_them)) >= 32


def test_the_configuration_knows_every_user_and_listens_on_loopback_only() -> None:
    text = nats_config("127.0.0.1", 4333, "baton", make_passwords())
    assert 'host: "127.0.0.1"' in text
    assert all(f"user: {user}," in text for user in USERS)
