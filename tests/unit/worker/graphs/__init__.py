"""Unit tests of `services.worker.graphs`."""
