"""Unit tests of `services.worker.models`."""
