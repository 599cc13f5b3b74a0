"""What a plan's message has for a KV connector, as connectors know it."""

from __future__ import annotations

from kvstore.connectors.interface import BlockRun, CacheLayout, ConnectorStep
from shared.blocks import split_hashes
from shared.messages.worker import ConnectorPlan, KvBlockRun
from shared.packing import unpack


def connector_step(planned: ConnectorPlan, layout: CacheLayout) -> ConnectorStep:
    """The plan's part for the connector. Raises ValueError for block ids that are none."""
    return ConnectorStep(
        layout=layout,
        loads=tuple(_block_run(load.run) for load in planned.loads),
        saves=tuple(_block_run(run) for run in planned.saves),
        sends=tuple(send.request for send in planned.sends),
        metadata=planned.metadata or b"",
    )


def _block_run(run: KvBlockRun) -> BlockRun:
    return BlockRun(run.request, run.first, tuple(unpack(run.blocks)), tuple(split_hashes(run.hashes)))
