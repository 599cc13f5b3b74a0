"""KV connectors: what loads and saves blocks for an engine without the node's KV store in between."""
