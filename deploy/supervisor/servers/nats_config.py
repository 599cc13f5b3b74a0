"""Permissions on the bus: one NATS user per service, with credentials made for one run."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deploy.container_secrets import password_variable
from deploy.supervisor.spec import TlsFiles
from shared.permissions import USERS, Permissions, User, permissions_of


def passwords_of(token: str) -> Mapping[User, str]:
    """Passwords derived from the token: the same on every host that has it."""
    return {user: hmac.digest(token.encode(), user.encode(), "sha256").hex() for user in USERS}


def make_passwords() -> Mapping[User, str]:
    """Random passwords of 192 bits each."""
    return {user: secrets.token_urlsafe(24) for user in USERS}


# The text of a nats-server's configuration: the embedded one's, and `deploy/nats.conf` for containers.
#
# python -m deploy.supervisor.servers.nats_config


DEPLOY = Path(__file__).parents[2]
CONTAINER_CONFIGS = (DEPLOY / "nats.conf", DEPLOY / "kubernetes" / "components" / "nats" / "nats.conf")
"""Two of one text: kustomize reads no file outside of a component's folder."""
MAX_PAYLOAD = 8 * 2**20
ANSWERS_PER_QUESTION = 4
ANSWER_TIME = "2m"
CONTAINER_HEADING = """\
# nats-server for Baton in containers. Written by `python -m deploy.supervisor.servers.nats_config`; a test compares.
#
# There is one user per service, with the subjects that the service may publish and subscribe to. Their passwords are
# made by deploy/container_secrets.py at the first start.

include "./secrets/passwords.conf"

"""


SHARED_INBOXES = "_INBOX.>"
"""Where the processes of releases up to 0.2 took replies, every user alike."""


def nats_config(
    host: str,
    port: int,
    namespace: str,
    passwords: Mapping[User, str],
    *,
    tls: TlsFiles | None = None,
    routes: RouteSettings | None = None,
    shared_inboxes: bool = False,
) -> str:
    """Configuration for one address, with one user per service, nothing on disk and no other port open but that of
    `routes`. `tls`: clients must encrypt; it has a certificate and a key."""
    encrypted = ""
    if tls is not None:
        encrypted = f"tls {{ cert_file: {json.dumps(tls.certificate)}, key_file: {json.dumps(tls.key)} }}\n"
    others = _cluster(routes) if routes is not None else ""
    users = authorization(namespace, passwords, shared_inboxes=shared_inboxes)
    return _listener(host, port) + encrypted + others + users


class RouteSettings(NamedTuple):
    """How a nats-server meets those of other hosts."""

    name: str
    """Of this one; no other's."""
    cluster: str
    """The same for all."""
    address: str
    port: int
    tls: TlsFiles
    """Both sides of a route show a certificate of one authority."""
    user: str
    password: str
    routes: tuple[str, ...]
    """HOST:PORT of those that it calls, for ever; the others call this one."""


ROUTE_PING_SECONDS = 2
"""A route over which nothing comes back for three times as long is closed: until then its messages are lost."""


def _cluster(settings: RouteSettings) -> str:
    tls, user, password = settings.tls, json.dumps(settings.user), json.dumps(settings.password)
    urls = [f"nats-route://{settings.user}:{settings.password}@{route}" for route in settings.routes]
    return (
        f"server_name: {json.dumps(settings.name)}\n"
        "cluster {\n"
        f"  name: {json.dumps(settings.cluster)}\n"
        f"  host: {json.dumps(settings.address)}\n"
        f"  port: {settings.port}\n"
        # Clients of each host use its own server, which listens on loopback: nobody else's would reach it.
        "  no_advertise: true\n"
        f'  ping_interval: "{ROUTE_PING_SECONDS}s"\n'
        f"  authorization {{ user: {user}, password: {password}, timeout: 5 }}\n"
        f"  tls {{ cert_file: {json.dumps(tls.certificate)}, key_file: {json.dumps(tls.key)}, "
        f"ca_file: {json.dumps(tls.authority)}, verify: true, timeout: 5 }}\n"
        f"  routes: {json.dumps(urls)}\n"
        "}\n"
    )


def authorization(namespace: str, passwords: Mapping[User, str], *, shared_inboxes: bool = False) -> str:
    """The users, each with the subjects that `shared.permissions` gives it. `shared_inboxes`: for a stack in which
    processes of a release live on that had no inboxes of their own."""
    quoted = {user: json.dumps(password) for user, password in passwords.items()}
    return _users(namespace, quoted, (SHARED_INBOXES,) if shared_inboxes else ())


def container_config() -> str:
    """Configuration for containers. It has no user for a supervisor, as the container runtime starts, scales and
    restarts the services."""
    passwords: dict[User, str] = {u: f"${password_variable(u)}" for u in USERS if u != "supervisor"}
    return CONTAINER_HEADING + _listener("0.0.0.0", 4222) + _users("baton", passwords)


def _listener(host: str, port: int) -> str:
    return f'host: "{host}"\nport: {port}\nmax_payload: {MAX_PAYLOAD}\nwrite_deadline: "5s"\nping_interval: "5s"\n'


def _users(namespace: str, passwords: Mapping[User, str], inboxes: tuple[str, ...] = ()) -> str:
    users = ",\n".join(_user(user, password, namespace, inboxes) for user, password in passwords.items())
    return f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"


def _user(user: User, password: str, namespace: str, inboxes: tuple[str, ...]) -> str:
    may = permissions_of(user, namespace)
    return user_block(user, password, may._replace(subscribe=(*may.subscribe, *inboxes)))


def user_block(user: User, password: str, may: Permissions) -> str:
    """One entry of `authorization.users`; `password` as it stands there, quoted or a variable."""
    heard = json.dumps(may.subscribe)
    subscribe = f"{{ allow: {heard}, deny: {json.dumps(may.unheard)} }}" if may.unheard else heard
    return (
        f"    {{ user: {user}, password: {password}, permissions: {{\n"
        f"      publish: {json.dumps(may.publish)}\n"
        f"      subscribe: {subscribe}\n"
        f'      allow_responses: {{ max: {ANSWERS_PER_QUESTION}, expires: "{ANSWER_TIME}" }}\n'
        f"    }} }}"
    )


def main() -> None:
    """Writes the containers' configuration, for compose and for Kubernetes."""
    for path in CONTAINER_CONFIGS:
        path.write_text(container_config(), encoding="utf-8")


if __name__ == "__main__":
    main()
