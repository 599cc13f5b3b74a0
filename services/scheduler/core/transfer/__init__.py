"""Blocks on their way between KV memory, the KV store of the node, and engines that go on with a request."""
