"""Unit tests of `services.worker.kv`."""
