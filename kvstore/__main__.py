"""`python -m kvstore`: keeps a node's KV blocks in shared memory."""

from __future__ import annotations

import sys

from kvstore import below
from kvstore.actor import KvStoreActor
from kvstore.config import KvStoreConfig
from kvstore.directory import DirectoryTaken, DirectoryUnusable, StoreDirectory
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit


async def build(config: KvStoreConfig, directory: StoreDirectory, bus: Bus) -> KvStoreActor:
    neighbours = below.exchange(config)
    actor = KvStoreActor(
        bus,
        config.instance_id(),
        config.node_id(),
        directory,
        memory=config.kvstore_memory,
        lease_seconds=config.lease_seconds,
        tier=below.redis_tier(config),
        neighbours=neighbours,
    )
    if neighbours is not None:
        await below.listen(neighbours, config, actor.store)
    return actor


def main() -> None:
    config = load_or_exit("kvstore", KvStoreConfig)
    try:
        directory = StoreDirectory(config.path())
        run_service(config, lambda bus: build(config, directory, bus), "kvstore")
    except (DirectoryTaken, DirectoryUnusable, below.NotToBeHad) as error:
        print(f"kvstore: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
