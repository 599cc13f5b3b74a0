"""Weights that are loaded once on a host: by the first engine that needs them, for all that come as long as one has
them.

What is shared is what the operations have packed, and large tables. Nobody owns it: it is there as long as a process
maps it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import PicklingError

from services.worker.kv.kept_peaks import key_of
from services.worker.models.weight_sharing.holders import WeightHolders, holders_of
from services.worker.models.weight_sharing.shared_arena import NotShared, SharedArena, open_sealed
from services.worker.models.weight_sharing.tensor_tree import dump_tree, load_tree
from services.worker.models.weights import DecoderWeights
from services.worker.ops.native.native_ops import NativeOps
from shared.machine.numa import allowed_cpus, nodes_of, read_nodes

log = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def sharing_key(folder: Path, ops: NativeOps, *parts: object) -> str:
    """Names all that packed weights depend on: `parts`, told apart by their texts, the files of the model's `folder` as
    they are now, the operations, and the memory that is near; with this code, these libraries and this machine, as long
    as it runs."""
    files = [(each.name, each.stat()) for each in sorted(folder.iterdir()) if each.is_file()]
    now = [(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in files]
    return key_of((now, ops.name, ops.dtype, _near_nodes(), _process_numbers(), *parts))


def shared_weights(key: str, ops: NativeOps, load: Callable[[], DecoderWeights]) -> DecoderWeights:
    """The weights of `key` that another process of this host holds; else what `load` packs by `ops`, for others too,
    where the kernel has such memory. `load` raises what it raises."""
    try:
        with holders_of(key) as holders:
            return _found(key, holders) or _loaded(key, holders, ops, load)
    except NotShared as refusal:
        log.info("weights are not shared", extra={"reason": str(refusal)})
        return load()


def _found(key: str, holders: WeightHolders) -> DecoderWeights | None:
    for path in holders.paths:
        try:
            file, memory, content = open_sealed(path)
        except NotShared:
            continue
        if content.startswith(key.encode()):  # the number of a process that is gone may be another's by now
            weights: DecoderWeights = load_tree(content[len(key.encode()) :], memory)
            holders.add(file)
            log.info("weights are shared", extra={"with": path, "bytes": len(memory)})
            return weights
    return None


def _loaded(key: str, holders: WeightHolders, ops: NativeOps, load: Callable[[], DecoderWeights]) -> DecoderWeights:
    """Raises NotShared before anything is loaded."""
    arena = SharedArena()
    holders.add(arena.file)
    with ops.packing_into(arena):
        weights = load()
    try:
        tree = dump_tree(weights, arena)
        arena.seal(key.encode() + tree)
    except (NotShared, PicklingError, TypeError, AttributeError) as refusal:
        log.info("weights are not shared", extra={"reason": str(refusal)})
        return weights
    shared: DecoderWeights = load_tree(tree, arena.memory)
    return shared


def _near_nodes() -> list[int]:
    """The NUMA nodes of this process's processors: weights on others are slower to read."""
    allowed = allowed_cpus()
    return [] if allowed is None else nodes_of(allowed, read_nodes())


def _process_numbers() -> tuple[str, ...]:
    """Where processes have the numbers that they have here: in another namespace of this host, on another host that
    has the same home, or after a boot, they are others'."""
    found = []
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
        found.append(_BOOT.read_text())
    return tuple(found)
