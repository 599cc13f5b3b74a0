"""The text of a nats-server's configuration: the embedded one's, and `deploy/nats.conf` for containers.

python -m deploy.supervisor.nats_config > deploy/nats.conf
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from deploy.supervisor.permissions import USERS, User, permissions_of, subjects

MAX_PAYLOAD = 8 * 2**20
ANSWERS_PER_QUESTION = 4
ANSWER_TIME = "2m"
CONTAINER_PASSWORD = "$NATS_PASSWORD"
"""Where nats-server reads the password from: its own environment."""

CONTAINER_HEADING = """\
# nats-server for Baton in containers; written by `python -m deploy.supervisor.nats_config`, kept equal by a test.
#
# One user per service, with what the service may say and hear. NATS_PASSWORD is everybody's password here; give each
# user one of its own where the services do not trust each other. It must not look like a number.

"""


def nats_config(host: str, port: int, namespace: str, passwords: Mapping[User, str]) -> str:
    """A server on one address, one user per service, nothing on disk and no other port open."""
    return _configuration(host, port, namespace, {user: json.dumps(password) for user, password in passwords.items()})


def container_config() -> str:
    """No supervisor there: containers are started, scaled and restarted by who runs them."""
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
