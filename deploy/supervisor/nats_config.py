"""The text of the embedded nats-server's configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping

from deploy.supervisor.permissions import User, permissions_of, subjects

MAX_PAYLOAD = 8 * 2**20
ANSWERS_PER_QUESTION = 4
ANSWER_TIME = "2m"


def nats_config(host: str, port: int, namespace: str, passwords: Mapping[User, str]) -> str:
    """A server on one address, one user per service, nothing on disk and no other port open."""
    users = ",\n".join(_user(user, password, namespace) for user, password in passwords.items())
    return (
        f'host: "{host}"\nport: {port}\nmax_payload: {MAX_PAYLOAD}\n'
        f'write_deadline: "5s"\nping_interval: "5s"\n'
        f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"
    )


def _user(user: User, password: str, namespace: str) -> str:
    publish, subscribe = subjects(namespace, permissions_of(user))
    return (
        f"    {{ user: {user}, password: {json.dumps(password)}, permissions: {{\n"
        f"      publish: {json.dumps(publish)}\n"
        f"      subscribe: {json.dumps(subscribe)}\n"
        f'      allow_responses: {{ max: {ANSWERS_PER_QUESTION}, expires: "{ANSWER_TIME}" }}\n'
        f"    }} }}"
    )
