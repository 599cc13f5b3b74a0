"""Which connectors there are: the built-in one, and those that installed packages name in `baton.kv_connectors`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from msgspec import Meta

from kvstore.connectors.interface import ConnectorConfig, KVConnectorBase, KVRole
from shared.plugins.entry_points import PluginError, load_plugin
from shared.settings import UpOption

GROUP = "baton.kv_connectors"
SHARED_MEMORY = "shared-memory"

ConnectorName = Annotated[
    str | None,
    Meta(description="KV connector in place of the KV store: shared-memory, or of a package (docs/kv_connectors.md)."),
    UpOption("KV store"),
]
ConnectorExtraConfig = Annotated[
    str, Meta(description="Configuration of the KV connector, a JSON object."), UpOption("KV store")
]
ConnectorRole = Annotated[
    KVRole, Meta(description="Whether the engine saves by the KV connector, loads, or both."), UpOption("KV store")
]


class ConnectorRefused(Exception):
    """A connector that cannot be had or be made; the text names the setting and says why."""


def open_connector(
    name: str, extra: str, role: KVRole, *, engine: str, rank: int | None, block_size: int
) -> KVConnectorBase:
    """One half of the connector `name`; `rank` None: the scheduler's. Raises ConnectorRefused."""
    factory = _factory(name)
    config = ConnectorConfig(engine=engine, role=role, extra=_json_object(extra), rank=rank, block_size=block_size)
    try:
        connector = factory(config)
    except Exception as error:  # whatever a foreign package raises
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ConnectorRefused(f"kv_connector = {name}: {why}") from None
    if not isinstance(connector, KVConnectorBase):
        raise ConnectorRefused(f"kv_connector = {name}: made a {type(connector).__name__}, no KVConnectorBase")
    return connector


def keeps_blocks(connector: KVConnectorBase) -> bool:
    """Whether blocks of requests that have ended may have to be kept."""
    return type(connector).request_finished is not KVConnectorBase.request_finished


def _factory(name: str) -> Any:
    if name == SHARED_MEMORY:
        from kvstore.connectors.shared_memory import SharedMemoryConnector

        return SharedMemoryConnector
    try:
        return load_plugin(GROUP, name, built_in=(SHARED_MEMORY,)).value
    except PluginError as error:
        raise ConnectorRefused(f"kv_connector = {name}: {error}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:  # not the text itself: there may be a password in it
        raise ConnectorRefused(f"kv_connector_extra_config: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConnectorRefused("kv_connector_extra_config: a JSON object is expected")
    return value
