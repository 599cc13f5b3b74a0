"""Unit tests of `shared.reliability`."""
