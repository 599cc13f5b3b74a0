"""Blocks of KV cache in a Mooncake store, which other hosts' engines share.

    --kv-connector mooncake --kv-connector-extra-config '{"master": "10.0.0.1:50051", "segment": 1073741824}'

One object for each block and rank: the keys and values of all its layers, read and written where they lie in KV memory.
"""

from __future__ import annotations

import socket
from typing import Any

try:
    from baton.kvstore.connectors.interface import KVConnectorBase
except ImportError:  # in a checkout of Baton
    from kvstore.connectors.interface import KVConnectorBase

MASTER_TIMEOUT = 5.0
BATCH = 64
"""Blocks of one call."""
OPTIONS = {
    "master": "",  # host:port of mooncake_master
    "metadata": "P2PHANDSHAKE",  # or of a metadata server, as Mooncake names it
    "host": "127.0.0.1",  # this host, as other hosts reach it
    "protocol": "tcp",  # or rdma, with "device"
    "device": "",
    "segment": 0,  # bytes of memory that each rank gives to the store; what lies there is lost with it
    "buffer": 64 << 20,  # bytes for transfers
}


class MooncakeConnector(KVConnectorBase):
    def __init__(self, config):
        super().__init__(config)
        if unknown := sorted(config.extra.keys() - OPTIONS.keys()):
            raise ValueError(f"{', '.join(unknown)}: not known; there are {', '.join(OPTIONS)}")
        self.options: dict[str, Any] = {**OPTIONS, **config.extra}
        for name, default in OPTIONS.items():
            if type(self.options[name]) is not type(default):
                raise ValueError(f"{name} = {self.options[name]!r}: a {type(default).__name__} is expected")
        _check_master(self.options["master"])
        self.halves: list[Any] = []  # each layer's keys and values
        self.broken: set[int] = set()
        if config.rank is None:
            self.store = self._open(segment=0)

    def _open(self, segment: int) -> Any:
        from mooncake.store import MooncakeDistributedStore

        of, store = self.options, MooncakeDistributedStore()
        status = store.setup(
            of["host"], of["metadata"], segment, of["buffer"], of["protocol"], of["device"], of["master"]
        )
        if status:
            raise ValueError(f"Mooncake's store at {of['master']} answers {status} to setup")
        return store

    def _key(self, layout, rank, name):
        return f"{layout.name}-{rank}-{name.hex()}"

    # beside the scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        names = request.block_hashes[num_computed_tokens // self.config.block_size :]
        ranks = range(request.layout.world_size)
        if not names:
            return 0
        there = self.store.batch_is_exist([self._key(request.layout, rank, name) for name in names for rank in ranks])
        found = 0
        while found < len(names) and all(each == 1 for each in there[found * len(ranks) : (found + 1) * len(ranks)]):
            found += 1
        return found * self.config.block_size

    # beside each rank

    def register_kv_caches(self, kv_caches, layout):
        self.layout, self.last = layout, list(kv_caches)[-1]
        self.halves = [half for layer in kv_caches.values() for half in layer]
        if any(half.device.type != "cpu" for half in self.halves):
            raise ValueError("tried on CPUs only: KV memory is on " + str(self.halves[0].device))
        self.store = self._open(self.options["segment"])
        for half in self.halves:
            if status := self.store.register_buffer(half.data_ptr(), half.nbytes):
                raise ValueError(f"Mooncake answers {status} to register_buffer")

    def _batches(self, runs):
        """(blocks, keys, addresses, bytes) of up to BATCH blocks at a time; a block has both halves of each layer."""
        pairs = [pair for run in runs for pair in zip(run.block_ids, run.hashes, strict=True)]
        sizes = [half.nbytes // half.shape[0] for half in self.halves]
        for first in range(0, len(pairs), BATCH):
            blocks = [block for block, _ in pairs[first : first + BATCH]]
            keys = [self._key(self.layout, self.config.rank, name) for _, name in pairs[first : first + BATCH]]
            places = [
                [half.data_ptr() + block * size for half, size in zip(self.halves, sizes, strict=True)]
                for block in blocks
            ]
            yield blocks, keys, places, [sizes] * len(blocks)

    def start_load_kv(self):
        for blocks, keys, places, sizes in self._batches(self.step.loads):
            got = self.store.batch_get_into_multi_buffers(keys, places, sizes)
            for block, size in zip(blocks, got, strict=True):
                if size != sum(sizes[0]):  # negative: an error, such as that it is gone
                    self.broken.add(block)

    def get_block_ids_with_load_errors(self):
        broken, self.broken = self.broken, set()
        return broken

    def save_kv_layer(self, layer_name, kv_layer):
        if layer_name != self.last:
            return  # a block is one object
        for _, keys, places, sizes in self._batches(self.step.saves):
            if any(status := self.store.batch_put_from_multi_buffers(keys, places, sizes)):
                raise RuntimeError(f"Mooncake did not take {sum(each != 0 for each in status)} blocks: {min(status)}")

    def shutdown(self):
        if store := getattr(self, "store", None):
            store.close()


def _check_master(address: str) -> None:
    """Raises ValueError where nobody listens: Mooncake itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'master = {address!r}: an address is expected, such as {{"master": "10.0.0.1:50051"}}')
    try:
        socket.create_connection((host, int(port)), MASTER_TIMEOUT).close()
    except OSError as error:
        raise ValueError(f"master = {address}: {error}") from None
