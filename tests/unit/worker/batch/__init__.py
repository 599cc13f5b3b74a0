"""Unit tests of `services.worker.batch`."""
