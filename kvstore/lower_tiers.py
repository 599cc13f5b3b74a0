"""Makes the lower tiers from the configuration. Imports redis and grpc only where they are configured."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kvstore.config import KvStoreConfig
from kvstore.tiers.interface import LowerTier
from kvstore.tiers.plugin_tier import PluginRefused, plugin_tier
from kvstore.tiers.segment_files import FolderRefused
from kvstore.tiers.ssd_tier import SsdTier
from kvstore.transfer.interface import BlockLender, CannotListen
from shared.machine.home import expanded

if TYPE_CHECKING:
    from kvstore.tiers.peer_nodes import PeerNodes

ANY_ADDRESS = ("", "0.0.0.0", "::")


class TierUnavailable(Exception):
    """A configured tier that cannot be made; the text names the setting and says why."""


def tiers(config: KvStoreConfig) -> list[LowerTier]:
    """The configured tiers, in the order in which they are searched: what is nearest first. Raises TierUnavailable."""
    found = (ssd_tier(config), redis_tier(config), *plugin_tiers(config))
    return [tier for tier in found if tier is not None]


def plugin_tiers(config: KvStoreConfig) -> list[LowerTier]:
    """The tiers of installed packages, in the order of their URLs. Raises TierUnavailable."""
    if len(set(schemes := [url.partition("://")[0] for url in config.kv_tiers])) < len(schemes):
        raise TierUnavailable("kv-tiers: one URL for each scheme, as reports and metrics name a tier by it")
    try:
        return [plugin_tier(url) for url in config.kv_tiers]
    except PluginRefused as error:
        raise TierUnavailable(f"kv-tiers: {error}") from None


def ssd_tier(config: KvStoreConfig) -> LowerTier | None:
    """The tier on a local disk; None without a folder. Raises TierUnavailable where another store works there or it
    holds something else. A folder that cannot be had for another reason is waited for in the background."""
    if config.kv_ssd is None:
        return None
    try:
        return SsdTier(expanded(config.kv_ssd), config.kv_ssd_size)
    except FolderRefused as error:
        raise TierUnavailable(f"kv-ssd: {error}") from None


def redis_tier(config: KvStoreConfig) -> LowerTier | None:
    """The Redis tier; None without a URL. Raises TierUnavailable where there is no such library or the URL is none. A
    Redis that does not answer is waited for in the background."""
    if config.redis_url is None:
        return None
    try:
        from kvstore.tiers.redis_tier import RedisTier
    except ImportError:
        raise TierUnavailable("redis-url: the library is missing: pip install 'baton-serve[kvstore]'") from None
    try:
        return RedisTier(config.redis_url, config.redis_ttl, config.redis_inflight)
    except ValueError as error:
        # Not the URL itself: there may be a password in it.
        raise TierUnavailable(f"redis-url: {error}") from None


def peer_nodes(config: KvStoreConfig) -> PeerNodes | None:
    """The stores of other nodes; None without a port. Raises TierUnavailable where there is no such library or a
    certificate cannot be read."""
    if config.transfer_port is None:
        return None
    try:
        from kvstore.tiers.peer_nodes import PeerNodes
        from kvstore.transfer.grpc_transport import GrpcTransport
        from kvstore.transfer.tcp_transport import TcpTransport
        from kvstore.transfer.tls import TlsUnusable, TransferTls
    except ImportError:
        raise TierUnavailable("transfer-port: grpc is missing: pip install 'baton-serve[kvstore]'") from None
    files = config.tls_files()
    kinds: dict[str, type[GrpcTransport] | type[TcpTransport]] = {"grpc": GrpcTransport, "tcp": TcpTransport}
    try:
        tls = None if files is None else TransferTls.read(*files)
        return PeerNodes({name: kinds[name](tls) for name in config.transfer_transports})
    except TlsUnusable as error:
        raise TierUnavailable(f"transfer-tls: {error}") from None


async def listen(peers: PeerNodes, config: KvStoreConfig, lender: BlockLender) -> None:
    """Opens the transfer port. Raises TierUnavailable where it is taken or the address is not of this machine."""
    assert config.transfer_port is not None
    ports = {"grpc": config.transfer_port, "tcp": config.transfer_tcp_port}
    try:
        await peers.listen(lender, config.transfer_host, ports, known_as(config))
    except CannotListen as error:
        raise TierUnavailable(f"transfer-port: {error}") from None


def known_as(config: KvStoreConfig) -> str:
    """The host under which other nodes reach this one."""
    if config.transfer_advertise:
        return config.transfer_advertise
    return socket.gethostname() if config.transfer_host in ANY_ADDRESS else config.transfer_host
