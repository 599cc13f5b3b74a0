"""Unit tests of `services.worker.measure`."""
