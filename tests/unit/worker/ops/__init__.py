"""Unit tests of `services.worker.ops`."""
