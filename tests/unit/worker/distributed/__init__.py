"""Unit tests of `services.worker.distributed`."""
