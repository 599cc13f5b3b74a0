"""`python -m kvstore`: keeps a node's KV blocks in shared memory."""

from __future__ import annotations

import sys

from kvstore.actor import KvStoreActor
from kvstore.config import KvStoreConfig
from kvstore.directory import DirectoryTaken, DirectoryUnusable, StoreDirectory
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit


def build(config: KvStoreConfig, directory: StoreDirectory, bus: Bus) -> KvStoreActor:
    return KvStoreActor(
        bus,
        config.instance_id(),
        config.node_id(),
        directory,
        memory=config.kvstore_memory,
        lease_seconds=config.lease_seconds,
    )


def main() -> None:
    config = load_or_exit("kvstore", KvStoreConfig)
    try:
        directory = StoreDirectory(config.path())
    except (DirectoryTaken, DirectoryUnusable) as error:
        print(f"kvstore: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_service(config, lambda bus: build(config, directory, bus), "kvstore")


if __name__ == "__main__":
    main()
