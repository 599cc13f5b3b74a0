"""Unit tests of `services.worker.sim`."""
