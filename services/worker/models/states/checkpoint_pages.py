"""How the KV store keeps the checkpoints of a model with states: as pages of the size of its blocks' records."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from kvstore.core.layout import cell_bytes
from services.worker.distributed.communicator import Communicator
from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints, StatePagesCopier
from services.worker.models.config import ModelConfig
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import Ops, StateCache, cached_head_dim
from shared.kv_groups import StateRecords
from shared.messages.kvstore import KvLayout

_WORD_BYTES = 4
"""Of a number of a state, float32."""


class CheckpointPages(NamedTuple):
    """What a rank has of a record, and how many of those make a checkpoint."""

    layout: KvLayout
    """Of records: those of the layers that attend. Where none does a record is a whole checkpoint."""
    first_head: int
    heads: int
    layers: int
    pages: int
    alone: bool
    distinct: bool
    """Whether no other rank has the same heads."""

    @property
    def page_bytes(self) -> int:
        """Of this rank's share of a record."""
        return self.heads * self.layers * cell_bytes(self.layout)

    @property
    def checkpoint_bytes(self) -> int:
        """Of this rank's share of a checkpoint, what its last page leaves empty included."""
        return self.pages * self.page_bytes

    @property
    def records(self) -> StateRecords:
        """As schedulers are told of them."""
        return StateRecords(pages=self.pages, alone=self.alone)

    def share(self, checkpoints: RankCheckpoints, caches: KvCaches, ops: Ops) -> RankKvCache | None:
        """For copying from and to a KV store: `checkpoints`, and the `caches` of layers that attend. None on GPUs, and
        where ranks have the same heads, as each has states of its own."""
        first, numbers = checkpoints
        if numbers.device.type != "cpu" or not self.distinct:
            return None
        attending = [cache for cache in caches if not isinstance(cache, StateCache)]
        blocks = None
        if attending:
            keys = self.layout.value_dim is None
            blocks = ops.kv_copier(attending, self.layout.head_dim) if keys else ops.latents.copier(attending)
        words = cell_bytes(self.layout) // _WORD_BYTES
        pages = numbers.view(-1, self.heads, self.layers, words).numpy()
        return RankKvCache(
            layout=self.layout,
            first_head=self.first_head,
            num_heads=self.heads,
            writes=True,
            num_blocks=first + len(pages),
            copier=StatePagesCopier(blocks, first, pages),
            first_layer=0,
            num_layers=self.layers,
            caches=attending,
            operations=ops.name,
            pages=len(pages),
        )


def checkpoint_pages(
    config: ModelConfig,
    share: LayerShard,
    ops: Ops,
    communicator: Communicator,
    state_bytes: int,
    model: str,
    more: int = 0,
) -> CheckpointPages:
    """Of a rank with `state_bytes` of each sequence's states. `model`: the digest of its configuration and weights.
    What lies in a page depends on how many ranks share the states, so that other numbers of them have other layouts.
    `more`: layers of blocks behind those that attend."""
    assert config.states is not None, "a model with states"
    ranks, attending = communicator.world_size, sum(not layer.has_state for layer in config.layers)
    attending += more if attending else 0
    digest = blake2b(f"{model} states of {ranks}".encode(), digest_size=len(model) // 2 or 1).hexdigest()
    if not attending:
        heads = config.states.heads // ranks
        size = -(-state_bytes // (heads * ops.block_size * 2 * _WORD_BYTES))
        layout = KvLayout(
            model=digest,
            dtype="float32",
            layers=1,
            kv_heads=config.states.heads,
            head_dim=size,
            block_size=ops.block_size,
        )
        return CheckpointPages(layout, communicator.rank * heads, heads, 1, 1, alone=True, distinct=True)
    latent = config.latent
    keys, _ = (
        ops.allocate_kv(1, 1, config.head_dim)
        if latent is None
        else ops.latents.allocate(1, latent.kv_rank, latent.beside_dim)
    )
    layout = KvLayout(
        model=digest,
        dtype=str(keys.dtype).removeprefix("torch."),
        layers=attending,
        kv_heads=config.num_kv_heads,
        head_dim=cached_head_dim(keys.dtype, config.head_dim) if latent is None else latent.kv_rank,
        block_size=ops.block_size,
        value_dim=None if latent is None else latent.beside_dim,
    )
    page = share.num_kv_heads * attending * cell_bytes(layout)
    pages = -(-state_bytes // page)
    return CheckpointPages(
        *(layout, share.kv_heads[0], share.num_kv_heads, attending, pages),
        alone=False,
        distinct=config.num_kv_heads % ranks == 0,
    )
