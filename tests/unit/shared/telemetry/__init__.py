"""Unit tests of `shared.telemetry`."""
