"""Unit tests of `services.worker.sampling`."""
