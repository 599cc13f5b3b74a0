"""`python -m kvstore`: keeps a node's KV blocks in shared memory."""

from __future__ import annotations

import sys

from kvstore import lower_tiers as below
from kvstore.actor import KvStoreActor
from kvstore.arena.directory import DirectoryTaken, DirectoryUnusable, StoreDirectory
from kvstore.config import KvStoreConfig
from kvstore.memory import interleave
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit


async def build(config: KvStoreConfig, directory: StoreDirectory, bus: Bus) -> KvStoreActor:
    """The store's actor, with whatever `config` says lies below and beside the arena. Raises TierUnavailable."""
    interleave(config.numa)
    peers = below.peer_nodes(config)
    actor = KvStoreActor(
        bus,
        config.instance_id(),
        config.node_id(),
        directory,
        memory=config.kvstore_memory,
        lease_seconds=config.lease_seconds,
        tiers=below.tiers(config),
        peers=peers,
        copy_bandwidth=config.kv_bandwidth or 0,
    )
    if peers is not None:
        await below.listen(peers, config, actor.store)
    return actor


def main() -> None:
    """Runs the store until it receives a stop signal; exits with status 2 if its directory or a tier cannot be used."""
    config = load_or_exit("kvstore", KvStoreConfig)
    try:
        directory = StoreDirectory(config.path())
        run_service(config, lambda bus: build(config, directory, bus), "kvstore")
    except (DirectoryTaken, DirectoryUnusable, below.TierUnavailable) as error:
        print(f"kvstore: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
