"""Unit tests of `services.worker.speculation`."""
