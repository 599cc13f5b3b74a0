"""Makes what lies below and beside the arena, as configured. Loads redis and grpc only for those who want them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kvstore.config import KvStoreConfig
from kvstore.tiers import Lender, Tier

if TYPE_CHECKING:
    from kvstore.transfer.exchange import Exchange

ANY_ADDRESS = ("", "0.0.0.0", "::")


class NotToBeHad(Exception):
    """Something that was asked for and cannot be; the text says what and why."""


def redis_tier(config: KvStoreConfig) -> Tier | None:
    """None without a URL. Raises NotToBeHad where there is no such library or the URL is none; a Redis that does not
    answer is waited for."""
    if config.redis_url is None:
        return None
    try:
        from kvstore.redis_tier import RedisTier
    except ImportError:
        raise NotToBeHad("redis-url: the library is missing: pip install 'baton-serve[kvstore]'") from None
    try:
        return RedisTier(config.redis_url, config.redis_ttl, config.redis_inflight)
    except ValueError as error:
        # Not the URL itself: there may be a password in it.
        raise NotToBeHad(f"redis-url: {error}") from None


def exchange(config: KvStoreConfig) -> Exchange | None:
    """None without a port. Raises NotToBeHad where there is no such library or a certificate cannot be read."""
    if config.transfer_port is None:
        return None
    try:
        from kvstore.transfer.exchange import Exchange
        from kvstore.transfer.tls import TlsUnusable, TransferTls
    except ImportError:
        raise NotToBeHad("transfer-port: grpc is missing: pip install 'baton-serve[kvstore]'") from None
    files = config.tls_files()
    try:
        return Exchange(None if files is None else TransferTls.read(*files))
    except TlsUnusable as error:
        raise NotToBeHad(f"transfer-tls: {error}") from None


async def listen(made: Exchange, config: KvStoreConfig, lender: Lender) -> None:
    """Raises NotToBeHad where the port is taken or the address is not of this machine."""
    from kvstore.transfer.server import CannotListen

    assert config.transfer_port is not None
    try:
        await made.listen(lender, config.transfer_host, config.transfer_port, known_as(config))
    except CannotListen as error:
        raise NotToBeHad(f"transfer-port: {error}") from None


def known_as(config: KvStoreConfig) -> str:
    """The host that other nodes are told."""
    if config.transfer_advertise:
        return config.transfer_advertise
    return socket.gethostname() if config.transfer_host in ANY_ADDRESS else config.transfer_host
