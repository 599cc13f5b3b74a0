"""The text of a nats-server's configuration, and the passwords in it."""

from __future__ import annotations

import itertools

from deploy.supervisor.servers.nats_config import RouteSettings, make_passwords, nats_config
from deploy.supervisor.spec import TlsFiles
from shared.permissions import USERS


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


def test_servers_of_several_hosts_meet_by_certificate_and_password_and_tell_clients_nothing() -> None:
    tls = TlsFiles(authority="/ca.pem", certificate="/host.pem", key="/host.key")
    settings = RouteSettings("b", "baton", "10.0.0.2", 6222, tls, "route", "secret", ("10.0.0.1:6222",))
    text = nats_config("127.0.0.1", 4333, "baton", make_passwords(), routes=settings)
    assert 'host: "127.0.0.1"\nport: 4333\n' in text, "clients are of this host"
    assert '  host: "10.0.0.2"\n  port: 6222\n' in text
    assert "no_advertise: true" in text
    assert "verify: true" in text
    assert 'routes: ["nats-route://route:secret@10.0.0.1:6222"]' in text
