"""What an engine requires of a KV connector, in vLLM's terms: one half beside the scheduler, one beside each rank.

No call holds up a step: the scheduler's half is asked on a thread of its own, and its answer is awaited for a few
milliseconds; a rank's half works on a thread beside the one that computes. Whatever a connector raises, answers wrongly
or never answers is computed instead. Packages that bring connectors (docs/kv_connectors.md) import from here whatever
they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from shared.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BlockRun",
    "CacheLayout",
    "ConnectorConfig",
    "ConnectorOutput",
    "ConnectorRequest",
    "ConnectorStep",
    "KVConnectorBase",
    "KVRole",
]

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
"""kv_producer: the engine saves. kv_consumer: it loads. kv_both: it does both."""

LayerCache: TypeAlias = "tuple[Any, Any]"
"""One layer's keys and values: two torch tensors whose first dimension is the block. What lies inside of a block is
the device's affair, and equal wherever `CacheLayout.name` is."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a connector is made with. Both halves are made of one class."""

    engine: str
    role: KVRole
    extra: Mapping[str, Any]
    """`--kv-connector-extra-config`, a JSON object."""
    rank: int | None
    """The rank that this half works beside; None: it is the scheduler's half."""
    block_size: int
    """Tokens of a block: 16, 32 or 64."""


class CacheLayout(NamedTuple):
    """What keys and values of an engine look like."""

    name: str
    """A digest of model, dtype, shapes, ranks and operations: equal tokens have other bytes under each, so it belongs
    to every key."""
    world_size: int
    """Ranks of the engine. Each has its own heads or layers, and saves and loads these only."""


@dataclass(frozen=True, slots=True)
class ConnectorRequest:
    """A request as the scheduler's half sees it."""

    request_id: str
    """Unique among what the engine holds; another attempt of a request has another one."""
    tokens: bytes
    """Packed uint32; see `token_ids`."""
    block_hashes: tuple[bytes, ...]
    """16 bytes for each full block: they name its tokens, all before them, and the request's cache salt."""
    layout: CacheLayout

    @property
    def token_ids(self) -> list[int]:
        """All known tokens, prompt and output."""
        return unpack(self.tokens)


class BlockRun(NamedTuple):
    """Full blocks of one request that follow each other in it."""

    request_id: str
    first: int
    """Which block of the request the first of them is: it holds the tokens from `first * block_size` on."""
    block_ids: tuple[int, ...]
    """Where they lie in every layer's cache."""
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ConnectorStep:
    """What one plan has for the connector. Blocks in it are nobody else's until every rank is done with them."""

    layout: CacheLayout
    loads: tuple[BlockRun, ...] = ()
    """To be filled: `get_num_new_matched_tokens` has promised them."""
    saves: tuple[BlockRun, ...] = ()
    """Whole once the plan is computed, and not loaded themselves. Each block is named once while it stays cached."""
    sends: tuple[str, ...] = ()
    """Requests that have ended, and of which `request_finished` has kept the blocks."""
    metadata: bytes = b""
    """What `build_connector_meta` made; empty when that is called."""


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """What the ranks have reported since the last one."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    """Requests whose load failed on some rank, or took too long. They are computed."""


class KVConnectorBase:
    """A connector that neither loads nor saves; subclasses change what they need.

    Each half calls one method at a time. The scheduler's half has the deadline of a lookup (`scheduler.store_deadline`)
    for every call; after three failures in a row it is left alone for 1 s, then for longer, up to 60 s.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        """Raises ValueError for a configuration that cannot be used, which ends the start with its text."""
        self.config = config
        self.step: ConnectorStep | None = None
        """What the plan that is being worked on has for it; None between plans, and on the scheduler's half."""

    # ---- the scheduler's half

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int, bool] | int | None:
        """How many tokens behind the first `num_computed_tokens` can be loaded; whole blocks of them are. With True
        beside it, the load is over when `get_finished` names the request; else when `wait_for_layer_load` has returned
        for every layer. 0 or None: nothing. May be asked again for the same request."""
        return 0

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request has blocks for what was matched, which may be less by now; the plan that `build_connector_meta`
        is called for next loads them."""

    def build_connector_meta(self, step: ConnectorStep) -> bytes:
        """What the ranks' halves are to know of a plan, at most 64 KiB. Called for plans that have anything for the
        connector, in their order."""
        return b""

    def request_finished(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """The request has ended. True: its blocks are kept until `get_finished` of every rank names it as sent. Called
        only where it is overridden and the engine produces."""
        return False

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The ranks have reported something."""

    # ---- a rank's half, on a thread beside the one that computes

    @property
    def layerwise(self) -> bool:
        """Whether layers are saved while those behind them are computed, and steps compute behind what they load,
        waiting for one layer after the other. Read once, at the start."""
        return False

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache], layout: CacheLayout) -> None:
        """The caches, layer by layer in the model's order. Called once, before all else. What it raises ends the
        start."""

    def bind_connector_metadata(self, step: ConnectorStep) -> None:
        """What follows, up to `clear_connector_metadata`, is of this plan."""
        self.step = step

    def clear_connector_metadata(self) -> None:
        """The plan is done with, as far as it is not awaited by `get_finished`."""
        self.step = None

    def start_load_kv(self) -> None:
        """Begins to load `step.loads`, all layers at once or in their order."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns when the layer has what `step.loads` asks for. Called for each layer in its order; layerwise a step
        may be waiting for it."""

    def save_kv_layer(self, layer_name: str, kv_layer: LayerCache) -> None:
        """The layer has what `step.saves` names. Layerwise it is called as soon as that is so, else when the step is
        computed."""

    def wait_for_save(self) -> None:
        """Returns when all of `step.saves` is saved, or copied to where nobody overwrites it."""

    def get_finished(self, finished_request_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose kept blocks are sent, requests whose asynchronous load is over). `finished_request_ids`:
        `sends` of the plan. Called after each plan, and every few milliseconds while something is awaited."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this plan's loads, or of those `get_finished` has just named, that do not hold what they should."""
        return set()

    def shutdown(self) -> None:
        """The process ends."""
