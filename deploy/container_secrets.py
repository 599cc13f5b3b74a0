"""Makes the passwords of a compose project at its first start, one volume per reader. Standard library only, one file.

Every container mounts the volume of its own service alone, so that it holds no password but its own; none is in an
environment, on a command line or in an image. Later starts keep what is there, and repair what is missing. On
Kubernetes each folder becomes a Secret (docs/kubernetes.md).

    python container_secrets.py /secrets        # writes a folder (a volume) for each of SERVICES, nats and redis
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

SERVICES = ("gateway", "tokenizer", "encoder", "coordinator", "scheduler", "worker", "detokenizer", "kvstore")
USERS = (*SERVICES, "operator")
"""Users of NATS in containers."""
SERVICE_UID = 10001
"""As the services' images have it."""
ROOT, REDIS_UID = 0, 999
"""What the official images of nats and redis run as."""


def password_variable(user: str) -> str:
    """The variable of nats-server's configuration that holds a user's password."""
    return f"{user.upper()}_PASSWORD"


def make(folder: Path) -> None:
    """Writes every volume below `folder`. Raises OSError, and KeyError where a file of passwords lacks one."""
    passwords = _kept(folder / "nats" / "passwords.conf", USERS)
    redis = _kept(folder / "redis" / "passwords.conf", ("redis",))["redis"]
    _write(folder / "nats" / "passwords.conf", _lines(passwords), ROOT)
    _write(folder / "nats" / "operator-password", passwords["operator"], ROOT)
    for service in SERVICES:
        _write(folder / service / "nats-password", passwords[service], SERVICE_UID)
    _write(folder / "kvstore" / "redis-url", f"redis://:{redis}@redis:6379/0", SERVICE_UID)
    _write(folder / "redis" / "passwords.conf", _lines({"redis": redis}), REDIS_UID)
    _write(folder / "redis" / "password", redis, REDIS_UID)
    _write(folder / "redis" / "redis.conf", f'requirepass {redis}\nsave ""\nappendonly no\n', REDIS_UID)


def _kept(path: Path, users: tuple[str, ...]) -> dict[str, str]:
    """The passwords that are there, 192 random bits for each user at the first start."""
    if not path.exists():
        return {user: secrets.token_urlsafe(24) for user in users}
    found = dict(line.split(": ", 1) for line in path.read_text().splitlines())
    return {user: found[password_variable(user)].strip('"') for user in users}


def _lines(passwords: Mapping[str, str]) -> str:
    return "".join(f'{password_variable(user)}: "{password}"\n' for user, password in passwords.items())


def _write(path: Path, text: str, owner: int) -> None:
    """Whole or not at all, and its owner's alone from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = path.with_name(f"{path.name}.new")
    making.unlink(missing_ok=True)
    with open(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    for each, mode in ((making, 0o600), (path.parent, 0o700)):
        if os.geteuid() == ROOT:
            os.chown(each, owner, owner)
        each.chmod(mode)
    making.replace(path)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
