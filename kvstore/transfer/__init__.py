"""Blocks from store to store over gRPC: `server` sends, `client` pulls. Loaded only with `--transfer-port`."""
