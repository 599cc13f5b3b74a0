"""Unit tests of `services.worker.guided`."""
