"""Unit tests of `services.worker.executor`."""
